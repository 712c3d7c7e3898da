"""What the networks take, checked when they are made."""

from __future__ import annotations

import operator
from typing import Any, Literal

from ..newton import Newton

Mode = Literal["parallel", "sequential", "auto"]
_MODES = ("parallel", "sequential", "auto")


def check_mode(mode: Any) -> Mode:
    if mode not in _MODES:
        raise ValueError(f"mode: expected one of {', '.join(_MODES)}, got {mode!r}")
    return mode


def check_newton(newton: Any) -> Newton:
    if newton is None:
        return Newton()
    if not isinstance(newton, Newton):
        raise TypeError(f'newton: expected Newton(...) or None, got {newton!r}; for the plain loop, mode="sequential"')
    return newton


def check_size(name: str, value: Any) -> int:
    """A whole number from 1; booleans are none."""
    try:
        size = operator.index(value)
    except TypeError:
        size = None
    if size is None or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if size < 1:
        raise ValueError(f"{name}: at least 1, got {size}")
    return size
