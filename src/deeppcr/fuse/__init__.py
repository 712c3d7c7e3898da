"""A step as a kernel: traced, written as Triton source, and run in parallel over its steps or one after the other."""

from __future__ import annotations

from typing import Any

__all__ = ["source"]


def __getattr__(name: str) -> Any:
    """Imported when somebody asks: what traces a step takes seconds to import."""
    if name != "source":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .source import source

    return source
