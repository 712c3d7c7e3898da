"""Solves as CUDA graphs: recorded when they repeat, and replayed on other inputs."""
