"""The modules that a step reaches: those that it is, holds, or closes over, also through other functions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

#: Containers with more entries than this are not looked into.
LARGEST = 1000
#: Of a model with more modules than this, only those are looked at that the step names.
_MOST_MODULES = 200


def modules_of(step: Any, used: set[Any] | None = None) -> list[nn.Module]:
    """The modules that a step reaches, without those inside of them.

    Args:
        used: takes the code of the step's functions, all names that they use, and the integers and strings that they hold
    """
    found: dict[int, nn.Module] = {}
    _find(step, 4, found, set() if used is None else used, set())
    return list(found.values())


def inside(root: nn.Module, used: set[Any]) -> list[nn.Module]:
    """The modules of a root, itself first, each once. Of many, those that are called by name, or else the first."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [root]
    while waiting and len(found) <= _MOST_MODULES:
        module = waiting.pop()
        # A scripted module keeps what it has outside of Python.
        if module is not None and id(module) not in found and isinstance(module._buffers, dict):
            found[id(module)] = module
            if module._modules:
                waiting += reversed(module._modules.values())
    every = list(found.values())
    if len(every) <= _MOST_MODULES:
        return every
    named = [inner for name, inner in root._modules.items() if name in used and inner is not None]
    if not named:
        return every[:_MOST_MODULES]
    return list({id(m): m for m in [root, *(m for inner in named for m in inside(inner, used))]}.values())


# In what follows types are asked, not values: a proxy answers for something else, or raises.


def _find(value: Any, depth: int, found: dict[int, nn.Module], used: set[Any], seen: set[int]) -> None:
    kind = type(value)
    if issubclass(kind, nn.Module):
        found[id(value)] = value
    elif kind is int or kind is str:
        used.add(value)
    elif depth and id(value) not in seen and not issubclass(kind, (type, ModuleType, Tensor)):
        seen.add(id(value))
        for each in _held_by(value, used):
            _find(each, depth - 1, found, used, seen)


def _held_by(value: Any, used: set[Any]) -> Iterable[Any]:
    kind = type(value)
    if kind in (list, tuple, dict):
        return () if len(value) > LARGEST else value.values() if kind is dict else value
    if kind is partial:
        return [value.func, *value.args, *value.keywords.values()]
    if kind is MethodType:
        return [value.__func__, value.__self__, *_attributes_of(value.__self__).values()]
    attributes = _attributes_of(value)
    if kind is FunctionType:
        held = [*attributes.values(), *(value.__defaults__ or ()), *map(_contents_of, value.__closure__ or ())]
        if not (value.__module__ or "").startswith("torch."):  # whose functions hold none
            used.add(value.__code__)
            names, scope = _names_in(value.__code__), value.__globals__
            used.update(names)
            held += [scope[name] for name in names if name in scope]
        return held
    if callable(value):
        return attributes.values()
    # An object that is not called may hold the whole program.
    return [each for name, each in attributes.items() if name in used or issubclass(type(each), nn.Module)]


def _attributes_of(value: Any) -> dict[str, Any]:
    """Of an object that is neither a module nor a type."""
    if issubclass(type(value), (nn.Module, type, ModuleType)):
        return {}
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has none
        return {}


def _names_in(code: CodeType) -> list[str]:
    """The names that a function uses, also in functions inside."""
    inner = [each for each in code.co_consts if type(each) is CodeType]
    return [*code.co_names, *(name for each in inner for name in _names_in(each))]


def _contents_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is still empty
        return None
