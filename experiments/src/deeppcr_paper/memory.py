"""Peak memory of a call, on a GPU and on a CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """The largest number of bytes alive at once among the storages that operations return."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor.untyped_storage())
        return result

    def ignore(self, *tensors: torch.Tensor) -> None:
        """What was there before does not count when a view of it is returned."""
        self._seen |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def _track(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive -= size


def peak_bytes(run: Callable[[], Any], device: torch.device, *inputs: torch.Tensor) -> int:
    """The most that ``run`` holds at a time beyond its inputs, on a second call: what is set up once does not count."""
    run()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with LiveStorages() as storages:
        storages.ignore(*inputs)
        run()
    return storages.peak
