"""What a function reaches: the ONE walk, and the modules that it finds.

Types are asked here, not values: a proxy answers for something else, or raises.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from types import (
    BuiltinMethodType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn

from .changing import LARGEST, PLAIN, digest_of, shared_generators, state_of
from .code import contents_of, is_of_library, names_in, own_classes, unwrapped
from .stack import HOOKS, MODULE_INTERNALS

#: Containers with more entries than this are data, where they are attributes that no code names.
_MANY = 100
#: Of a model with more modules than this, only those are looked at that the step names.
MOST_MODULES = 200
#: So many functions and objects may stand one behind the other; containers and modules do not count.
_DEPTH = 8
#: Methods that a call of an object does not run.
_NOT_RUN = frozenset(("__init__", "__new__", "__init_subclass__", "__repr__", "__str__", "__reduce__", "__del__"))
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_WITHOUT_DEPTH = (nn.Module, *CONTAINERS)
#: Methods of what is written in C, ``append`` and ``__len__`` say.
BOUND_IN_C = (BuiltinMethodType, MethodWrapperType)
#: What may be changed, and then is another thing; and all that is not looked into for more.
_CHANGING = (Tensor, torch.Generator, random.Random)
_NOTHING_INSIDE = (*_CHANGING, type, ModuleType, nn.Module, float)


#: What stands for something else.
_SEEN_THROUGH: dict[type, Callable[[Any], Any]] = {
    MappingProxyType: dict,
    weakref.ref: lambda reference: reference(),
    ContextVar: lambda variable: variable.get(None),
    threading.local: vars,
    **dict.fromkeys(map(type, ({}.keys(), {}.values(), {}.items())), list),
}
_STANDING_FOR_OTHERS = tuple(_SEEN_THROUGH)
#: What they stand for, which some make anew whenever they are asked.
INSIDE = "inside"


class Walk:
    """Everything that a function reaches, as far as it is asked for, and on its shortest way.

    That is what it closes over, its defaults and attributes, the global variables that its code names, and so on: of partials,
    methods, containers, objects (slots too), modules (hooks too), and what classes have under names that any code has used.
    Functions of libraries are not asked for global variables, nor their classes for anything.

    Iterating gives each thing with what it holds, by name, the function first. ``go`` says what is to come later. Of a container with
    many entries that is an attribute which no code names, a data set or a log say, that is nothing.

    Args:
        largest: containers with more entries count as empty
        everything: else objects that are not called give only modules and what is named by any code: one may hold the whole
            program

    Attributes:
        used: the code of all functions met, and all names that they use
    """

    def __init__(self, function: Any, *, largest: float = math.inf, everything: bool = True):
        self.used: set[Any] = set()
        self._largest, self._everything = largest, everything
        self._numbers = {id(function): 0}
        self._order = [(function, _DEPTH)]  # which keeps all of them where they are
        self._left = _DEPTH
        self._known = 0  # how many names were used when classes were last asked
        self._slots: dict[type, list[Any]] = {}
        self._classes: dict[type | ModuleType, set[str]] = {}  # and the names that were looked up there
        self._partly: list[tuple[Any, int]] = []
        self._large: dict[int, set[Hashable]] = {}  # containers with many entries that are attributes, by these names
        self._named: set[int] = set()  # those of them that are also reached otherwise

    def __iter__(self) -> Iterator[tuple[Any, list[tuple[Hashable, Any]]]]:
        at = 0
        while True:
            while at < len(self._order):
                value, left = self._order[at]
                at += 1
                kind = type(value)
                self._left = left if issubclass(kind, _WITHOUT_DEPTH) else left - 1
                held = self._held_by(value, kind)
                if self._large and (kind is FunctionType or issubclass(kind, (partial, *CONTAINERS))):
                    self._named.update(id(each) for _, each in held if id(each) in self._large)
                yield value, held
            self._left = _DEPTH
            named, known = self._named_in_classes(), self._known
            self._known = len(self.used) + len(self._named)
            if not named and self._known == known:
                return
            if named:
                yield None, named
            self._order += self._partly  # of which more may be named now
            self._partly = []

    def functions(self) -> list[FunctionType]:
        """Those met, but for libraries'."""
        found = [each for each, _ in self._order if type(each) is FunctionType]
        return [each for each in found if not is_of_library(each.__globals__.get("__name__"))]

    def go(self, value: Any) -> int | None:
        """Have what a thing holds come later, once. Its number in the order of coming; None where it is too far away."""
        number = self._numbers.get(id(value))
        if number is None and self._left > 0:
            number = self._numbers[id(value)] = len(self._order)
            self._order.append((value, self._left))
        return number

    def _held_by(self, value: Any, kind: type) -> list[tuple[Hashable, Any]]:
        if kind is FunctionType:  # as most are, and they have no slots
            return [*value.__dict__.items(), *self._held_by_function(value)]
        if issubclass(kind, nn.Module):
            own = self._noted([(name, each) for name, each in vars(value).items() if name not in MODULE_INTERNALS])
            for hooks in HOOKS:
                if every := getattr(value, hooks):
                    own += [(hooks, each) for each in every.values()]
            return [
                *own,
                *self._in_slots(value, kind),
                *value._parameters.items(),
                *value._buffers.items(),
                *value._modules.items(),
            ]
        if kind is MethodType:
            return [("__func__", value.__func__), ("__self__", value.__self__)]
        if kind in BOUND_IN_C:
            return [("__name__", value.__name__), ("__self__", value.__self__)]
        if issubclass(kind, _STANDING_FOR_OTHERS):
            see = next(_SEEN_THROUGH[each] for each in kind.__mro__ if each in _SEEN_THROUGH)
            return [(INSIDE, see(value)), *self._in_slots(value, kind)]
        held = self._attributes_of(value, kind)
        if issubclass(kind, CONTAINERS):
            if len(value) > self._largest:
                return held
            names = self._large.get(id(value))
            if names is not None and id(value) not in self._named and names.isdisjoint(self.used):
                self._partly.append((value, self._left))
                return held
            if self._everything and len(value) > _MANY and (digest := digest_of(value)) is not None:
                return [*held, ("entries", digest)]
            if issubclass(kind, dict):
                return [*held, *dict.items(value)]
            if issubclass(kind, (set, frozenset)):  # which have no order: what is known by its value is told elsewhere
                return [*held, *(("entry", each) for each in value if type(each) not in PLAIN)]
            return [*held, *enumerate(value)]
        if issubclass(kind, partial):
            return [*held, ("func", value.func), *enumerate(value.args), *value.keywords.items()]
        if self._everything or callable(value):
            return held
        self._partly.append((value, self._left + 1))
        return [(name, each) for name, each in held if name in self.used or issubclass(type(each), nn.Module)]

    def _held_by_function(self, function: FunctionType) -> list[tuple[Hashable, Any]]:
        code, scope = function.__code__, function.__globals__
        cells = dict(zip(code.co_freevars, map(contents_of, function.__closure__ or ()), strict=True))
        held: list[tuple[Hashable, Any]] = []
        if function.__defaults__ or function.__kwdefaults__:
            held = _defaults_of(function)
        if is_of_library(scope.get("__name__")):
            return [*held, *cells.items()]
        names = names_in(code)
        self.used.add(code)
        self.used.update(names)
        seen: set[int] = set()
        return [*held, *_named_in(cells, cells, names, seen), *_named_in(scope, names, names, seen, "global ")]

    def _attributes_of(self, value: Any, kind: type) -> list[tuple[Hashable, Any]]:
        try:
            inside = object.__getattribute__(value, "__dict__")
        except AttributeError:  # it has none
            inside = {}
        return self._noted([*inside.items(), *self._in_slots(value, kind)])

    def _noted(self, attributes: list[tuple[Hashable, Any]]) -> list[tuple[Hashable, Any]]:
        for name, each in attributes:
            # Not where it was reached before, and not as an attribute.
            known = id(each) in self._numbers and id(each) not in self._large
            if not known and issubclass(type(each), CONTAINERS) and len(each) > _MANY:
                self._large.setdefault(id(each), set()).add(name)
        return attributes

    def _in_slots(self, value: Any, kind: type) -> list[tuple[Hashable, Any]]:
        slots = self._slots.get(kind)
        if slots is None:
            self.meet(kind)
            slotted = (vars(each) for each in kind.__mro__ if "__slots__" in vars(each))
            slots = [slot for own in slotted for slot in own.values() if type(slot) is MemberDescriptorType]
            self._slots[kind] = slots
        found = []
        for slot in slots:
            try:
                found.append((slot.__name__, slot.__get__(value)))
            except AttributeError:  # still empty
                continue
        return found

    def meet(self, owner: type | ModuleType) -> None:
        """Have what a class, or a module of Python's, has under names that are used come last."""
        if isinstance(owner, ModuleType):
            owners = [] if is_of_library(owner.__name__) else [owner]
        else:
            owners = own_classes(owner)
        for each in owners:
            self._classes.setdefault(each, set())

    def _named_in_classes(self) -> list[tuple[Hashable, Any]]:
        found = []
        for owner, done in self._classes.items():
            for name, value in vars(owner).items():
                special = name.startswith("__") and type(value) is FunctionType and name not in _NOT_RUN
                if name not in done and (special or name == "forward" or name in self.used):
                    done.add(name)
                    if type(value) not in (MemberDescriptorType, GetSetDescriptorType):
                        found.append(((owner.__name__, name), unwrapped(value)))
        return found


def _defaults_of(function: FunctionType) -> list[tuple[Hashable, Any]]:
    """What arguments are where nobody gives them, by their names."""
    found: list[tuple[Hashable, Any]] = [*(function.__kwdefaults__ or {}).items()]
    if given := function.__defaults__:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        found += zip(
            reversed(names), reversed(given), strict=False
        )  # the last ones have them; somebody may have set too many
    return found


#: By place, that is by the id of what holds a thing and its name there: with what holds it, what that is called, and itself.
Values = dict[tuple[Hashable, Hashable], tuple[Any, str | None, Any]]


def reached_by(
    step: Any, used: set[Any] | None = None, without: Collection[int] = ()
) -> tuple[list[nn.Module], Values]:
    """The modules that a step reaches, without those inside of them; and outside of modules everything that has a state.

    Args:
        used: takes the code of the step's functions, all names that they use, and the integers and strings that they hold
        without: the ids of what has no state for this step, and is not to be looked into, but for dictionaries
    """
    if issubclass(type(step), nn.Module):
        return [step], _shared([step], (), without)
    found: dict[int, nn.Module] = {}
    plain: set[Any] = set()
    values: Values = {}
    called: dict[int, str] = {}  # containers
    places: dict[int, Hashable] = {}  # of what may be made anew with the same entries
    walk = Walk(step, largest=LARGEST, everything=False)
    for owner, name, each in outside_of_modules(walk, without):
        kind = type(each)
        place = places.get(id(owner), id(owner)), name
        if issubclass(kind, nn.Module):
            found[id(each)] = each
        if kind is int or kind is str:
            plain.add(each)
        if kind is tuple or name is INSIDE:
            places.setdefault(id(each), place)
        if issubclass(kind, CONTAINERS):
            inside_of = called.get(id(owner))
            called.setdefault(id(each), last_part(name) if inside_of is None else f"{inside_of}[{name!r}]")
        if id(each) not in without and state_of(each) is not None:
            values[place] = owner, called.get(id(owner)), each
    if used is not None:
        used |= walk.used | plain
    return list(found.values()), values | _shared(found.values(), walk.functions(), without)


def _shared(roots: Iterable[nn.Module], functions: Iterable[FunctionType], without: Collection[int]) -> Values:
    """The generators of the whole process from which functions, or modules and those inside of them, draw by name; and what modules
    have in common with all of their class: what arguments of its methods are by default.

    Whoever only has names that are those of distributions (``gamma``, ``sample``) is not to answer for what other threads draw.
    """
    modules = list(roots)
    for module in modules:  # which grow
        if len(modules) < MOST_MODULES and isinstance(module._modules, dict):
            modules += [each for each in module._modules.values() if each is not None]
    kinds = {each for kind in set(map(type, modules)) for each in own_classes(kind)}
    methods = {own: name for kind in kinds for name, own in vars(kind).items() if type(own) is FunctionType}
    forwards = [method for method, name in methods.items() if name == "forward"]
    names: set[str] = set()
    held: set[int] = set()
    for function in (*functions, *forwards):
        scope, own = function.__globals__, names_in(function.__code__)
        names.update(own)
        found: Iterable[Any] = (*map(scope.get, own), *map(contents_of, function.__closure__ or ()))
        for each in found:
            held.add(id(each.__self__ if type(each) in (MethodType, BuiltinMethodType) else each))
    kept: Values = {}
    for method in methods:
        for name, each in _defaults_of(method):  # and nothing else: what it names besides may be the module itself
            if issubclass(type(each), CONTAINERS) and id(each) not in without:
                inside = outside_of_modules(Walk(each, largest=LARGEST, everything=False), without)
                for owner, place, one in ((method, name, each), *inside):
                    if id(one) not in without and state_of(one) is not None:
                        kept[id(owner), place] = owner, None, one
    return kept | {
        (module, "state"): (module, None, generator)
        for module, generator in shared_generators()
        if "random" in names or id(sys.modules[module]) in held or id(generator) in held
    }


def outside_of_modules(walk: Walk, without: Collection[int] = ()) -> Iterator[tuple[Any, Hashable, Any]]:
    """What a walk comes to, with what holds it and its name there."""
    for owner, held in walk:
        for name, each in held:
            kind = type(each)
            if issubclass(kind, (type, ModuleType)):
                walk.meet(each)
            looked_at = id(each) not in without or issubclass(kind, dict)
            if looked_at and kind not in PLAIN and not issubclass(kind, _NOTHING_INSIDE):
                walk.go(each)
            yield owner, name, each


def last_part(name: Hashable) -> str:
    """Of the name of a variable, "global settings.seen" say, or of an attribute of a class."""
    text = name[-1] if isinstance(name, tuple) and name else name
    return str(text).replace(" ", ".").rpartition(".")[2]


def _named_in(
    scope: dict[str, Any], wanted: Iterable[str], names: Iterable[str], seen: set[int], prefix: str = ""
) -> list[tuple[Hashable, Any]]:
    """What stands in a scope under the wanted names; of Python's modules there, what they have under names that are used."""
    found: list[tuple[Hashable, Any]] = []
    for name in filter(scope.__contains__, wanted):  # mostly few: attributes have names, too
        value = scope[name]
        if not issubclass(type(value), ModuleType):
            found.append((prefix + name, value))
        elif id(value) not in seen and not is_of_library(vars(value).get("__name__")):
            seen.add(id(value))
            found += _named_in(vars(value), names, names, seen, f"{prefix}{name}.")
    return found
