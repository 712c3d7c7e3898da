"""Is this the same denoiser? What its graphs depend on, as a value that can be compared."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .denoiser import reachable

#: What every module has, and what is looked at by itself.
_INNER = frozenset(vars(nn.Module()))
#: what is known by its value
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
#: what is known by its identity alone
_WHOLE = (type, ModuleType, nn.Module)
#: arrays of so many bytes are looked at
_SMALL = 1024


def owner_of(function: Callable) -> Any:
    """What a denoiser is known by: itself, or what a method is bound to, since methods are made anew at every look."""
    return getattr(function, "__self__", function)


def fingerprint(function: Callable) -> tuple:
    """What graphs of a denoiser depend on: where its tensors lie, and the plain values that it and its closure hold.

    What tensors hold does not matter, for a graph reads them when it is replayed: but for a single number on the CPU, which is
    an argument of the kernels. Not seen: what objects with slots hold, closures of functions that a module holds, large arrays of
    NumPy that are changed in place, and a class whose ``forward`` is replaced.
    """
    found: list[Any] = [id(owner_of(function)), type(function), getattr(function, "__func__", None)]
    waiting, seen = reachable(function), set()
    while waiting:  # by itself, not by ``modules()``: this is done at every call
        value = waiting.pop()
        if not isinstance(value, nn.Module):
            found.append(_mark(value))
        elif id(value) not in seen:  # a module may know its parent
            seen.add(id(value))
            hooks = (*value._forward_hooks.values(), *value._forward_pre_hooks.values())
            found += [type(value), value.training, *map(_mark, hooks)]
            held = vars(value)
            found += [_mark(held[name]) for name in sorted(held.keys() - _INNER)]
            found += [_mark(each) for each in (*value._parameters.values(), *value._buffers.values())]
            waiting += [each for each in value._modules.values() if each is not None]
    return tuple(found)


class Same:
    """Equal where the same object is meant, as long as it lives: what is gone is equal to nothing.

    It keeps nothing alive that can be watched: what a module holds may hold the module.
    """

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Any):
        self._hash = id(value)
        try:
            self._value = weakref.ref(value)
        except TypeError:
            self._value = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value() is other._value() is not None

    def __hash__(self) -> int:
        return self._hash


def _mark(value: Any, depth: int = 3) -> Hashable:
    if type(value) in PLAIN:  # most are: the quickest way to know
        return value
    if isinstance(value, Tensor):
        held = repr(value.item()) if value.ndim == 0 and value.is_cpu else None  # as text NaN equals itself
        return value.data_ptr(), value.shape, value.stride(), value.dtype, held
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_mark(each, depth) for each in value)
    if isinstance(value, dict):
        return tuple((_mark(name, depth), _mark(each, depth)) for name, each in value.items())
    if isinstance(value, MethodType):  # made anew at every look
        return _mark(value.__self__, depth), Same(value.__func__)
    inside = getattr(value, "__dict__", None)
    if depth and inside and isinstance(inside, dict) and not isinstance(value, _WHOLE):
        return Same(value), tuple((name, _mark(each, depth - 1)) for name, each in inside.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(_mark(each, depth) for each in value)
    array: Any = value
    if type(array).__module__ == "numpy" and getattr(array, "nbytes", math.inf) <= _SMALL:
        return str(array.dtype), array.shape, array.tobytes()
    return Same(value)


def layout_of(nest: Any) -> Hashable:
    """Shapes and dtypes of a nest of tensors."""
    leaves, spec = pytree.tree_flatten(nest)
    return str(spec), tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
