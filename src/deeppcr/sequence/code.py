"""What the code of functions and classes says: whose it is, and which names it uses."""

from __future__ import annotations

import sys
from functools import cached_property, lru_cache
from types import CodeType
from typing import Any

#: Packages whose functions are what they are, whatever stands in global variables.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "triton", "deeppcr"}


def own_classes(kind: type) -> list[type]:
    """A class and its bases, but for those of libraries."""
    return [each for each in kind.__mro__ if not is_of_library(each.__module__)]


def is_of_library(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def unwrapped(value: Any) -> Any:
    """The function behind a method of any kind, or a property."""
    kind = type(value)
    if kind is property:
        return value.fget
    return value.__func__ if kind in (staticmethod, classmethod) else value.func if kind is cached_property else value


@lru_cache(maxsize=1024)
def names_in(code: CodeType) -> tuple[str, ...]:
    """The names that a function uses, each once, also in functions inside, and as texts: ``getattr(model, "scale")``."""
    found = dict.fromkeys(code.co_names)
    for each in code.co_consts:
        if type(each) is CodeType:
            found.update(dict.fromkeys(names_in(each)))
        elif type(each) is str and each.isidentifier():
            found[each] = None
    return tuple(found)


def contents_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is still empty
        return None
