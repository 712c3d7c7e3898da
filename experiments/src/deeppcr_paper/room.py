"""What does not fit into memory is no failure of an experiment: its record says so, and the others go on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .experiment import is_out_of_memory

T = TypeVar("T")

#: The entry of what did not fit; other entries have another status, "ok" where there is nothing to say.
OUT_OF_MEMORY: dict[str, Any] = {"status": "out of memory"}


def within_memory(call: Callable[[], T], device: torch.device) -> T | None:
    """What the call returns; None where memory runs out."""
    try:
        return call()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    release(device)  # only here: until it is handled, the error holds on to all that the call has made
    return None


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
