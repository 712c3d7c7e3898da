"""What a module holds, so that calls can be told by what they change, and undone."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..runtime import is_capturing
from .reach import LARGEST
from .stack import MODULE_INTERNALS

_MISSING = object()
#: Types of attributes that cannot be changed in place, and of those whose entries are looked at: subclasses may do anything.
_CONSTANT = frozenset((int, float, bool, str, tuple, type(None)))
_CONTAINERS = {list: list, deque: list, dict: dict, set: set, OrderedDict: dict, defaultdict: dict}


class Snapshot:
    """What one module holds. Of PyTorch's own modules, which keep nothing else: parameters and buffers.

    Args:
        copied: names of tensors that can be written back, and so can the buffers of a module in train mode, as batch statistics
    """

    __slots__ = ("_containers", "_copies", "_stores", "_tensors", "module")

    def __init__(self, module: nn.Module, copied: Collection[str] = ()):
        self.module = module
        self._stores: list[tuple[dict, dict]] = []  # dictionaries, and what they had in them
        self._containers: list[tuple[str, Any, Any]] = []
        every = (*module._parameters.items(), *module._buffers.items())
        tensors = [(name, tensor) for name, tensor in every if tensor is not None]
        if not type(module).__module__.startswith("torch.nn.modules."):
            stores = (vars(module), module._parameters, module._buffers)
            self._stores = [(store, store.copy()) for store in stores]
            for name, value in vars(module).items():
                kind = type(value)
                if kind in _CONSTANT or name in MODULE_INTERNALS:
                    continue
                if issubclass(kind, Tensor):
                    tensors.append((name, value))
                elif kind in _CONTAINERS and len(value) <= LARGEST:
                    self._containers.append((name, value, _CONTAINERS[kind](value)))
        self._tensors = [(name, tensor, version_of(tensor)) for name, tensor in tensors]
        if module.training and module._buffers:
            copied = {*copied, *module._buffers}
        self._copies = {
            name: tensor.detach().clone()
            for name, tensor, version in self._tensors
            if name in copied and version is not None and not is_capturing(tensor.device)
        }

    def is_lazy(self) -> bool:
        return any(version is None and is_lazy(tensor) for _, tensor, version in self._tensors)

    def counted(self) -> list[str]:
        """The names of tensors that were written to, or made."""
        return [name for name, tensor, version in self._tensors if version_of(tensor) != version]

    def written(self) -> list[str]:
        """The same, less parameters that are known to have kept their values. A buffer may still come to change."""
        return [
            name
            for name, tensor, version in self._tensors
            if version_of(tensor) != version
            and (
                name not in self._copies or name in self.module._buffers or not torch.equal(self._copies[name], tensor)
            )
        ]

    @torch.no_grad()
    def rewind(self) -> None:
        """Write back what was copied: not all of PyTorch's operations count what they write."""
        for name, tensor, _ in self._tensors:
            if name in self._copies and not torch.equal(self._copies[name], tensor):
                tensor.copy_(self._copies[name])

    def replaced(self) -> list[str]:
        """The names of what is another object now, or a container with other entries."""
        found = [name for name, value, entries in self._containers if not _same_entries(entries, value)]
        for now, before in self._stores:
            if len(before) != len(now) or not all(map(is_, before.values(), now.values())):
                found += [
                    name
                    for name in before.keys() | now.keys()
                    if name not in MODULE_INTERNALS and before.get(name, _MISSING) is not now.get(name, _MISSING)
                ]
        return sorted(found)

    def restore(self) -> None:
        """Put back what was replaced, and nothing else."""
        for name in self.replaced():
            for now, before in self._stores:
                if name in before:
                    now[name] = before[name]
                else:
                    now.pop(name, None)
        for _, container, entries in self._containers:
            if not _same_entries(entries, container):
                container.clear()
                container.extend(entries) if isinstance(container, (list, deque)) else container.update(entries)


def restore(every: Iterable[Snapshot]) -> None:
    for snapshot in every:
        snapshot.restore()


def rewind(every: Iterable[Snapshot]) -> None:
    for snapshot in every:
        snapshot.rewind()


@contextmanager
def undone(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Whatever is called meanwhile, the modules hold afterwards what they held before."""
    every = [Snapshot(module) for module in modules]
    try:
        yield
    finally:
        restore(every)


def _same_entries(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(key in b and value is b[key] for key, value in a.items())
    return a == b if isinstance(a, set) else all(map(is_, a, b))


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None where that is not counted, or where it has yet to be made."""
    try:
        return None if tensor.is_inference() else tensor._version
    except ValueError:  # of a lazy module
        return None
