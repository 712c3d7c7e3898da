"""CUDA graphs of iterations: when they are made, kept and thrown away."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ...graphs.cache import CLEARED
from ...graphs.record import RECORDING, no_collection


class Cache:
    """A few things by key, the latest used last. One that is in use is not in it: two calls at once never share one."""

    def __init__(self, most: int = 4):
        self.most = most
        self._kept: OrderedDict[tuple, Any] = OrderedDict()
        self._watched: set[int] = set()
        # What is thrown away may be the last to hold an owner, whose end is then told to the thread that is here already.
        self._lock = threading.RLock()
        CLEARED.add(self)

    def take(self, key: tuple) -> Any:
        with self._lock:
            return self._kept.pop(key, None)

    def put(self, key: tuple, value: Any) -> None:
        with self._lock:
            self._kept[key] = value
            while len(self._kept) > self.most:
                self._kept.popitem(last=False)

    def forget_with(self, owner: Any) -> None:
        """Drop all keys that begin with a fingerprint of ``owner`` when it is no more."""
        if id(owner) not in self._watched:
            with contextlib.suppress(TypeError):  # not everything can be watched: such is kept alive by its fingerprint
                weakref.finalize(owner, _forget, weakref.ref(self), id(owner))
                self._watched.add(id(owner))

    def forget(self, owner: int) -> None:
        with self._lock:
            self._watched.discard(owner)
            for key in [each for each in self._kept if each[0][0] == owner]:
                self._kept.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)

    def __reduce__(self):
        return Cache, (self.most,)  # copies and pickles of a solver start without graphs


def _forget(cache: weakref.ref[Cache], owner: int) -> None:
    found = cache()
    if found is not None:
        found.forget(owner)


class Replayed:
    """Calls of a few functions with a few arguments, each captured after it was first called.

    A function, ``function(*key)``, works on buffers that stay where they are. It comes with each call: kept here, it would
    hold the buffers, and they this, until a collector of garbage comes by. It is known by its name.

    Args:
        device: a CUDA device
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.refusal: str | None = None
        self._graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def __call__(self, function: Callable[..., None], *key: Any) -> None:
        name = (function.__name__, *key)
        graph = self._graphs.get(name)
        if graph is not None:
            graph.replay()
        elif self.refusal is not None:
            function(*key)
        else:
            self._capture(name, function, key)

    def _capture(self, name: tuple, function: Callable[..., None], key: tuple) -> None:
        """Call it on a stream of its own, which also lets libraries set themselves up there; then capture it."""
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function(*key)
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with (
                    RECORDING,
                    no_collection(),
                    torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
                ):
                    function(*key)
            except RuntimeError as error:  # the host waits somewhere in the denoiser, say
                self.refusal = str(error).strip().split("\n")[0][:120]
                return
            finally:  # a capture that fails does not always leave its stream
                torch.cuda.set_stream(current)
                current.wait_stream(self._stream)
        self._graphs[name] = graph
