"""CUDA graphs of iterations: when they are made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...graphs.record import capture, on_stream


class Replayed:
    """Calls of a few functions with a few arguments, each captured after it was first called.

    A function, ``function(*key)``, works on buffers that stay where they are. It comes with each call: kept here, it would
    hold the buffers, and they this, until a collector of garbage comes by. It is known by its name.

    Unlike a solve's step, what is called is not watched: a network may hold operations whose inside cannot be seen.

    Args:
        device: a CUDA device
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.refusal: str | None = None
        self._graphs: dict[tuple, Callable[[], None]] = {}
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[..., None], *key: Any) -> None:
        name, call = (function.__name__, *key), partial(function, *key)
        if name in self._graphs:
            self._graphs[name]()
        elif self.refusal is not None:
            call()
        else:
            with on_stream(self._stream):
                call()
            try:
                self._graphs[name], _ = capture(call, self._stream, self._pool)
            except RuntimeError as error:  # the host waits somewhere in the denoiser, say
                self.refusal = str(error).strip().split("\n")[0][:120]
