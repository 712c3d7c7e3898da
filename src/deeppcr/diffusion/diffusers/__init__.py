"""Schedulers, models and pipelines of ``diffusers`` in parallel over their steps; nothing here imports it."""
