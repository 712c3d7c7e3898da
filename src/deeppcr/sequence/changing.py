"""Values that have a state: what is another after it was changed."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from array import array
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ..runtime import version_of

#: Containers with more entries than this are not looked into: they are known by how many they have, the first and the last.
LARGEST = 1000
#: Of arrays so many entries are looked at from either end.
_ENTRIES = 4096
#: Memory of up to so many bytes is looked at whole.
_LOOKED_AT = 2**20
#: Known by their value.
PLAIN = frozenset((bool, int, str, bytes, range, type(None), torch.dtype, torch.device, CodeType))
_VALUES = PLAIN | {float, complex}
#: Numbers of C, and arrays and structures of them.
CTYPES = (ctypes.c_int.__mro__[1], ctypes.Array, ctypes.Structure, ctypes.Union)
#: As text they are themselves.
_WRITTEN = frozenset((bool, int, str, bytes, float, type(None)))


def state_of(value: Any) -> list[Any] | None:
    """What is another list after a value was changed; None where it has no state of its own, but only what it holds.

    Of a container this is how many entries it has: what they are is theirs to tell, but for entries of sets. Equal where nothing
    was changed, as long as the value is kept: tensors are known by which one they are.
    """
    kind = type(value)
    if kind in _VALUES:
        return [kind, value]  # in a list what is no number equals itself
    if issubclass(kind, Tensor):
        noted = [each for each in value.__dict__.items() if type(each[1]) in _VALUES]  # as attributes
        return [id(value), version_of(value), *noted]
    if issubclass(kind, (list, deque)):
        ends = (value[0], value[-1]) if len(value) > LARGEST else ()
        return [len(value), *map(_known_by, ends)]
    if issubclass(kind, dict):
        return [len(value)]
    if issubclass(kind, (set, frozenset)):
        return [len(value), frozenset(map(_known_by, value)) if len(value) <= LARGEST else None]
    if issubclass(kind, torch.Generator):
        return value.get_state().tolist()
    if issubclass(kind, random.Random):
        return [value.getstate()]
    if issubclass(kind, (bytearray, array, memoryview, *CTYPES)):
        return _bytes_of(value)
    if kind.__module__.startswith("numpy") and (numpy := sys.modules.get("numpy")) is not None:
        if issubclass(kind, (numpy.ndarray, numpy.generic)):
            ends = (value.flat[:_ENTRIES], value.flat[-_ENTRIES:])
            return [value.dtype, value.shape, *(each.tobytes() for each in ends)]
        if issubclass(kind, (numpy.random.Generator, numpy.random.RandomState)):
            # Of one of the older kind numbers that are drawn in pairs are a part, too. (As text the state takes as long as a small solve.)
            legacy = issubclass(kind, numpy.random.RandomState)
            return [pickle.dumps(value.get_state(legacy=False) if legacy else value.bit_generator.state)]
    return None


def _bytes_of(value: Any) -> list[Any]:
    """Of memory, of which there may be very much."""
    try:
        memory = memoryview(value)
    except ValueError:  # it was released
        return []
    if memory.ndim == 1 and memory.nbytes > _LOOKED_AT:
        return [len(memory), bytes(memory[:_ENTRIES]), bytes(memory[-_ENTRIES:])]
    return [bytes(memory)]


def digest_of(container: Any) -> bytes | None:
    """All entries of a container as few bytes, where they are numbers and texts alone: there may be very many. Else None."""
    entries = [*container, *container.values()] if isinstance(container, dict) else container
    kinds = {type(next(iter(entries)))}
    if not kinds <= _WRITTEN or not (kinds := set(map(type, entries))) <= _WRITTEN:
        return None
    if isinstance(container, (set, frozenset)):  # which have no order, and tell elsewhere what they hold
        return None
    # Bits tell zeros apart, and take a tenth of the time of writing them down.
    return blake2b(array("d", entries) if kinds == {float} else repr(entries).encode()).digest()


def shared_generators() -> Iterator[tuple[str, Any]]:
    """Those of the whole process, and the modules they belong to."""
    for module, its in (("random", "_inst"), ("numpy.random", "mtrand._rand")):
        if module in sys.modules:
            yield module, attrgetter(its)(sys.modules[module])


def draws(value: Any) -> bool:
    """Whether its state changes because random numbers are drawn."""
    return isinstance(value, (torch.Generator, random.Random)) or type(value).__module__.startswith("numpy.random")


def _known_by(entry: Any) -> Any:
    return (type(entry), entry) if type(entry) in _VALUES else id(entry)
