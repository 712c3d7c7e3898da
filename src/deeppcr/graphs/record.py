"""The one place that captures CUDA graphs for solves: a function, done once more on the device."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..sequence.trace import Watch


class Recorder:
    """Records functions that work on memory that stays where it is. One solve at a time has its turn on a device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._lock:
            yield

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """A function that does again on the device what ``function`` does now."""
        raise NotImplementedError

    def rehearse(self, function: Callable[[], None]) -> None:
        """Run a function once, so that libraries make ready and nothing is left to decide; see that it can be recorded."""
        with Watch(self.device) as watch:
            function()
        if watch.refusal is not None:
            raise RuntimeError(watch.refusal)


class CudaGraphs(Recorder):
    """CUDA graphs, all in one pool of memory: what is not needed between replays, they share."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            anchor = torch.zeros(1, device=device)
            self._anchor = self.record(lambda: anchor.zero_())  # a pool lives as long as one of its graphs

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._lock, torch.cuda.device(self.device):
            try:
                yield
            finally:  # the next solve may work on that memory on another stream, or give it back
                torch.cuda.current_stream().synchronize()

    def record(self, function: Callable[[], Any]) -> Callable[[], None]:
        outer = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            with RECORDING:
                self._stream.wait_stream(outer)
                with torch.cuda.stream(self._stream):
                    self.rehearse(function)
                how: dict[str, Any] = {"stream": self._stream, "capture_error_mode": "thread_local"}
                with no_collection(), torch.cuda.graph(graph, pool=self._pool, **how):
                    function()
        finally:  # a capture that fails does not always leave its stream
            torch.cuda.set_stream(outer)
            outer.wait_stream(self._stream)
        return graph.replay


#: PyTorch captures one graph at a time.
RECORDING = threading.Lock()


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected inside: what it frees, another CUDA graph say, would end a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


#: By type of device. Elsewhere there is nothing to gain.
RECORDERS: dict[str, type[Recorder]] = {"cuda": CudaGraphs}
