"""CUDA graphs of iterations: when they are made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ...graphs.cache import prepared_samplers
from ...graphs.record import Scratch, scratch_of
from ...runtime import is_out_of_memory


class Replayed:
    """Calls of a few functions with a few arguments, each captured after it was first called.

    A function, ``function(*key)``, works on buffers that stay where they are. It comes with each call: kept here, it would
    hold the buffers, and they this, until a collector of garbage comes by. It is known by its name.

    Unlike a solve's step, what is called is not watched: a network may hold operations whose inside cannot be seen.

    Args:
        device: a CUDA device
    """

    def __init__(self, device: torch.device):
        self.scratch: Scratch = scratch_of(device)
        self.refusal: str | None = None
        self._graphs: dict[tuple, Callable[[], None]] = {}

    def turn(self) -> AbstractContextManager[None]:
        """Around what is replayed: other runs wait meanwhile."""
        return self.scratch.turn()

    def knows(self, function: Callable[..., None], *key: Any) -> bool:
        """Whether it is replayed from now on."""
        return (function.__name__, *key) in self._graphs

    def __call__(self, function: Callable[..., None], *key: Any) -> None:
        name, call = (function.__name__, *key), partial(function, *key)
        if name in self._graphs:
            self._graphs[name]()
        elif self.refusal is not None:
            call()
        else:
            self.scratch.call(call)
            try:
                self._graphs[name] = self.record(call)
            except RuntimeError as error:  # the host waits somewhere in the denoiser, say
                if is_out_of_memory(error):
                    raise
                self.refusal = str(error).strip().split("\n")[0][:120]

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """Where memory runs out, what is kept of other runs makes room."""
        try:
            return self.scratch.record(call)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        make_room()
        return self.scratch.record(call)


def make_room() -> None:
    """Let go of all that is kept of runs that are over, and give its memory back to the device."""
    prepared_samplers.clear()
    torch.cuda.empty_cache()
