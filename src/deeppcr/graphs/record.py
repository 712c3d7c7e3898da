"""The one place that captures CUDA graphs: a function, done once more on the device."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from ..runtime import as_written
from ..sequence.trace import Watch, without_cast_cache

T = TypeVar("T")
#: PyTorch captures one graph at a time.
RECORDING = threading.RLock()


def capture(function: Callable[[], T], stream: torch.cuda.Stream, pool: Any = None) -> tuple[Callable[[], None], T]:
    """Record what ``function`` launches, on memory that stays where it is; nothing of it is done now.

    Args:
        stream: where it was called before: libraries set themselves up in the first calls, which a capture does not allow
        pool: of memory, shared with other graphs that are not replayed at the same time

    Returns:
        what does it all again, and what ``function`` returned: tensors that every replay fills anew

    Raises:
        RuntimeError: it asks the host, say, which a graph cannot; the current stream is as it was
    """
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:  # to find that out inside would leave random numbers unusable
        raise RuntimeError("PYTORCH_NO_CUDA_MEMORY_CACHING is set, and a graph has its memory from PyTorch's cache")
    graph = torch.cuda.CUDAGraph()
    how: dict[str, Any] = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    with RECORDING, on_stream(stream), no_collection(), torch.cuda.graph(graph, **how):
        found = function()
    return graph.replay, found


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """What is inside goes to another stream: after all that came before it, and before all that comes after."""
    with torch.cuda.device(stream.device):
        outer = torch.cuda.current_stream()
        stream.wait_stream(outer)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:  # a capture that fails does not always leave its stream
            torch.cuda.set_stream(outer)
            outer.wait_stream(stream)


class Scratch:
    """A stream and a pool of memory on a device for graphs: what nobody holds between replays, they share.

    So the pool is as large as the largest of them needs it; and one thread at a time has its turn.
    What the first calls of a function leave to the stream, the next ones take again.
    """

    device: torch.device

    def __init__(self, device: torch.device):
        self.device, self._lock = device, threading.RLock()
        self._stream = torch.cuda.Stream(device)
        self._pool, self._graphs = torch.cuda.graph_pool_handle(), weakref.WeakSet()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What is replayed inside has the memory for itself."""
        with self._lock, torch.cuda.device(self.device):
            try:
                yield
            finally:
                torch.cuda.current_stream().synchronize()

    def call(self, function: Callable[[], None]) -> None:
        """Call a function where it can be recorded after that."""
        with on_stream(self._stream):
            function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """What does again what ``function`` does, which was called before; it returns nothing."""
        if not self._graphs:  # a pool ends with the last of its graphs
            self._pool = torch.cuda.graph_pool_handle()
        with without_cast_cache(self.device.type):
            replay, _ = capture(function, self._stream, self._pool)
        self._graphs.add(replay.__self__)  # type: ignore[attr-defined]
        return replay

    @property
    def bytes(self) -> int:
        """Of the pool."""
        pools = [(tuple(each["segment_pool_id"]), each["total_size"]) for each in torch.cuda.memory_snapshot()]
        return sum(size for pool, size in pools if pool == tuple(self._pool))


_scratch: dict[torch.device, Scratch] = {}


def scratch_of(device: torch.device) -> Scratch:
    """The one of a device."""
    with RECORDING:
        if device not in _scratch:
            _scratch[device] = Scratch(device)
        return _scratch[device]


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


class Recorder:
    """Records functions that work on memory that stays where it is. One solve at a time has its turn on a device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._lock = threading.Lock()

    def turn(self) -> AbstractContextManager[Any]:
        return self._lock

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
    """CUDA graphs: what is not needed between replays, they share."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._scratch = Scratch(device)

    def turn(self) -> AbstractContextManager[None]:
        return self._scratch.turn()

    def record(self, function: Callable[[], Any]) -> Callable[[], None]:
        # A rehearsal must not get into what another thread captures; and what was rehearsed is what is captured.
        with RECORDING, as_written():
            self._scratch.call(lambda: self.rehearse(function))
            return self._scratch.record(function)


#: By type of device. Elsewhere there is nothing to gain.
RECORDERS: dict[str, type[Recorder]] = {"cuda": CudaGraphs}
