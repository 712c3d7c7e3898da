"""What took too long at one depth is not tried at larger ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .experiment import Context
from .timing import clocked

_KEY = "what took long"


def without_set_up(call: Callable[[], Any], first: float, patience: float, device: torch.device) -> float:
    """Seconds of a call by which it may be judged: the first one's or, where those are too many, a second one's.

    Only a first call compiles kernels, which can take longer than all that is timed.
    """
    return first if first <= patience else clocked(call, device)[1]


def note(context: Context, what: tuple, depth: int, seconds: float) -> None:
    """So many seconds at this depth. Gone with the run: one that is gone on with finds out once more."""
    context.cache.setdefault(_KEY, {})[what] = (depth, seconds)


def too_long(context: Context, what: tuple, depth: int, patience: float) -> str:
    """Why it is not worth trying, by the last depth that was noted; empty where nothing speaks against it.

    >>> import torch
    >>> context = Context(torch.device("cpu"))
    >>> note(context, ("forward",), 64, 5.0)
    >>> too_long(context, ("forward",), 128, 2.0), too_long(context, ("forward",), 64, 2.0)
    ('5.0 s at L = 64', '')
    """
    before, seconds = context.cache.get(_KEY, {}).get(what, (0, 0.0))
    return f"{seconds:.1f} s at L = {before}" if before < depth and seconds > patience else ""
