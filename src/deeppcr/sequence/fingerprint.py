"""Is this the same function? What it reaches, as a value that can be compared."""

from __future__ import annotations

import math
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from hashlib import blake2b
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.nn.parameter import is_lazy

from ..runtime import version_of
from .changing import CTYPES, PLAIN
from .reach import CONTAINERS, Walk
from .stack import HOOKS

#: The hooks of all modules, which are added to and never replaced.
_OF_ALL_MODULES = [getattr(all_modules, f"_global{hooks}") for hooks in HOOKS]
#: Containers of more entries tell nothing of a kind of function: it may note something there in every call.
_FEW = 16
#: arrays of so many bytes are looked at
_SMALL = 1024
#: Objects that are known by their identity: how PyTorch works inside, and what knows all of a program.
_MACHINERY = ("torch._", "logging")
#: Attributes of tensors that PyTorch sets while it compiles.
_OF_COMPILERS = ("_dynamo", "_torch")
#: Known by what they hold.
_OPEN = (*CONTAINERS, partial, MethodType, BuiltinMethodType, SimpleNamespace, type(None), object)
#: What does not change from call to call by itself.
_FIXED = (FunctionType, MethodType, BuiltinMethodType, partial, *CONTAINERS)
#: What precision and ways of computing are switched by.
_SWITCHES = (bool, torch.dtype, CodeType)


def owner_of(function: Callable[..., Any]) -> Any:
    """What a function is known by: itself, or what a method is bound to, since methods are made anew at every look."""
    return getattr(function, "__self__", function)


def fingerprint(function: Callable[..., Any]) -> tuple[Any, ...]:
    """What a recording of a function depends on: where its tensors lie, and all else that it reaches. Begins with its owner's ``id``.

    What tensors hold does not matter, for a graph reads them when it is replayed: but for a single number on the CPU, which is
    an argument of the kernels. What is made anew and equal gives the same fingerprint, but for the owner. Not seen is what changes
    outside of Python, in large arrays of NumPy, in global variables of libraries, or behind more objects than a walk goes through.
    """
    owner = owner_of(function)
    return id(owner), Same(owner), *_marks(function, _place)


class Told:
    """A step that tells what it depends on, so that nobody has to walk through what it reaches: for steps of the library's own, which
    are never changed once they are made."""

    def told(self) -> tuple[Hashable, tuple[Tensor, ...]]:
        """What its operations depend on beside its class and its tensors; and all tensors that it reaches."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """These tensors, each once: as ``structure_of`` has them."""
        return list({id(each): each for each in self.told()[1]}.values())


def structure_of(function: Callable[..., Any]) -> tuple[Hashable, list[Tensor]]:
    """What the operations of a function depend on: all that it reaches, but for what tensors hold and where they lie; and these tensors.

    Of two functions with equal structures one may stand for the other, given the other's tensors.
    """
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}

    def place(tensor: Tensor) -> Hashable:
        number = numbers.setdefault(id(tensor), len(numbers))
        if number == len(tensors):
            tensors.append(tensor)
        shape = None if is_lazy(tensor) else tensor.shape  # a parameter that is yet to be made has none
        return number, type(tensor), shape, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad

    if isinstance(function, Told):
        known, given = function.told()
        return (type(function), known, *[place(tensor) for tensor in given]), tensors
    return tuple(_marks(function, place)), tensors


def without_numbers(structure: Hashable) -> Hashable:
    """A structure as it is whatever the fractions in it are.

    >>> of = lambda rate: structure_of(lambda z: rate * z)[0]
    >>> of(0.3) == of(0.4), without_numbers(of(0.3)) == without_numbers(of(0.4))
    (False, True)
    """
    if not isinstance(structure, tuple):
        return structure
    return float if structure[:1] == (float,) else tuple(map(without_numbers, structure))


def _marks(function: Callable, place: Callable[[Tensor], Hashable]) -> list[Hashable]:
    """Of everything that a function reaches; of tensors, what ``place`` gives."""
    walk = Walk(function)
    found = [_mark(each, walk, place) for every in _OF_ALL_MODULES if every for each in every.values()]
    for value, held in walk:
        marks: list[Hashable] = [_what(value, held)]
        for name, each in held:
            kind = type(each)
            marks.append(name if type(name) is str else _mark(name, walk, place))
            if kind in PLAIN:  # most are
                marks += (kind, each)
            else:
                marks.append(_mark(each, walk, place))
        found.append(tuple(marks))
    return found


def _what(value: Any, held: list) -> Hashable:
    """What is to be known of a thing beside what it holds."""
    kind = type(value)
    if kind is FunctionType:
        return value.__code__
    if issubclass(kind, nn.Module):
        return kind, value.training, None if isinstance(value._buffers, dict) else Same(value)
    if issubclass(kind, (set, frozenset)):  # which have no order
        return kind, frozenset((type(each), each) if type(each) in PLAIN else Same(each) for each in value)
    # An object is what it holds; where that is nothing, or not all of it lies open, it counts which one it is.
    return kind if kind in _OPEN or (held and _is_open(kind)) else (kind, Same(value))


def _is_open(kind: type) -> bool:
    """Whether objects of a class keep nothing outside of Python: it is written in Python, down to its first base."""
    firsts = (each for each in kind.__mro__ if each.__base__ is object and each not in _OPEN)
    return all("__slots__" in vars(each) or "__weakref__" in vars(each) for each in firsts)


def _mark(value: Any, walk: Walk, place: Callable[[Tensor], Hashable]) -> Hashable:
    """A thing by its value, by where it lies, by which one it is, or by its number in a walk that is to go there."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind is tuple or kind is torch.Size:
        return kind, *[(type(each), each) if type(each) in PLAIN else _mark(each, walk, place) for each in value]
    if issubclass(kind, Tensor):
        own = value.__dict__  # what somebody noted there, as a rule nobody but a compiler
        noted = [each for each in own.items() if not each[0].startswith(_OF_COMPILERS)] if own else ()
        return (place(value), *[(name, _note(each, walk, place)) for name, each in noted]) if noted else place(value)
    if not issubclass(kind, nn.Module):
        if issubclass(kind, (float, complex)):
            return kind, repr(value)  # which tells zeros apart, and NaN is NaN
        if kind.__module__ == "numpy" and getattr(value, "nbytes", math.inf) <= _SMALL:
            return str(value.dtype), value.shape, value.tobytes()
        if issubclass(kind, (bytearray, array, memoryview, *CTYPES)):
            memory = memoryview(value)
            return kind, memory.format, memory.shape, blake2b(memory.tobytes()).digest()
        if issubclass(kind, (type, ModuleType)):
            walk.meet(value)
        if _is_whole(value):
            return Same(value)
    number = walk.go(value)
    return Same(value) if number is None else number


def _note(value: Any, walk: Walk, place: Callable[[Tensor], Hashable]) -> Hashable:
    """What is an attribute of a tensor: an object may hold the whole program, and is known by which one it is."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return place(value)
    by_value = kind in PLAIN or issubclass(kind, (float, complex, *CONTAINERS))
    return _mark(value, walk, place) if by_value else Same(value)


def _is_whole(value: Any) -> bool:
    """Whether it is known by its identity."""
    kind = type(value)
    if kind is BuiltinMethodType:  # of a list or a tensor, say, or a function
        return value.__self__ is None or isinstance(value.__self__, (type, ModuleType))
    return issubclass(kind, (type, ModuleType)) or str(kind.__module__).startswith(_MACHINERY)


def _place(tensor: Tensor) -> Hashable:
    usual = type(tensor) is Tensor or type(tensor) is nn.Parameter
    try:
        held = repr(tensor.item()) if tensor.ndim == 0 and tensor.is_cpu else None  # as text NaN equals itself
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, held
    except (RuntimeError, ValueError):  # it is sparse, or yet to be made
        return Same(tensor), version_of(tensor)
    return place if usual else (*place, Same(tensor))


def kind_of(function: Callable[..., Any]) -> tuple[Any, Hashable]:
    """What stays the same where a function is made anew for every call, and what tells two of them apart.

    Of tensors that is their shapes: values change in training. What may be noted in every call does not count: numbers in lists,
    dictionaries and global variables, long containers, and of objects and modules all but switches and functions.
    """
    found: list[Hashable] = []
    walk = Walk(function, largest=_FEW)
    fixed = {id(function)}  # what no object holds
    for value, held in walk:
        kind = type(value)
        loose = id(value) not in fixed or not issubclass(kind, _FIXED)
        counts = kind in (list, dict, deque)
        marks: list[Hashable] = []
        for name, each in held:
            inner, mark = type(each), None
            if inner in _SWITCHES:
                mark = each
            elif inner in PLAIN or issubclass(inner, (float, complex)):
                number = issubclass(inner, (int, float, complex))
                if not loose and not (number and (counts or str(name).startswith("global "))):
                    mark = inner, each
            elif issubclass(inner, Tensor):
                mark = None if loose else (each.shape, each.dtype)
            elif not issubclass(kind, nn.Module) or not issubclass(inner, nn.Module):  # the inside of modules is theirs
                if issubclass(inner, nn.Module) or not (loose or issubclass(inner, _FIXED)):
                    mark = Same(each)
                if not loose:
                    fixed.add(id(each))
                if not _is_whole(each):
                    walk.go(each)
            if mark is not None:
                marks.append((name if type(name) in PLAIN else None, mark))
        if issubclass(kind, nn.Module):
            marks.append(value.training)
        if marks or not loose or kind is FunctionType:
            found.append((value.__code__ if kind is FunctionType else kind, *marks))
    return _known_by(function), tuple(found)


def _known_by(function: Any) -> Any:
    if isinstance(function, partial):
        return _known_by(function.func)
    if isinstance(function, FunctionType):
        return function.__code__
    return getattr(function, "known_by", owner_of(function))


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
