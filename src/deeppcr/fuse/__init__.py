"""A step as a kernel: traced, written as Triton source, and run in parallel over its steps or one after the other."""

from .source import source

__all__ = ["source"]
