"""Containers that a step fills and whose contents nothing depends on, as a log or a memo: by what its code names."""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Hashable
from itertools import pairwise
from types import CodeType
from typing import Any

from .changing import LARGEST
from .reach import BOUND_IN_C, CONTAINERS, INSIDE, Walk, last_part, outside_of_modules

#: Containers that may be added to, by methods that tell nothing of them.
_ADDED_TO = frozenset((list, deque, set))
_ADDING = frozenset(("append", "appendleft", "extend", "add"))
#: What tells nothing of a dictionary but what stands under a key.
_LOOKING_UP = frozenset(("get", "setdefault", "__getitem__", "__setitem__", "__contains__"))


def never_read(step: Any) -> set[int]:
    """The ids of lists, deques and sets to which a step adds and does nothing else: then nothing depends on what is there. And
    of dictionaries in which it only looks things up, as in a memo: then nothing depends on how many there are."""
    walk = Walk(step, largest=LARGEST, everything=False)
    added: dict[int, set[Any]] = {}
    looked_up: dict[int, set[Any]] = {}
    said: set[str] = set()
    for owner, name, each in outside_of_modules(walk):
        if type(each) is str:
            said.add(each)
        names = added if type(each) in _ADDED_TO else looked_up if issubclass(type(each), dict) else None
        if names is not None and name is not INSIDE:  # in another container it is known by no name
            names.setdefault(id(each), set()).add(None if _has_no_name(owner, name) else last_part(name))
    codes: list[CodeType] = [each for each in walk.used if type(each) is CodeType]
    read, counted = {None, *said}, set[Any](said)  # as attributes are asked for: getattr(self, self.name)
    for code in codes:
        codes += [each for each in code.co_consts if type(each) is CodeType]
        for this, following in pairwise(dis.get_instructions(code)):
            if "LOAD_" in this.opname and this.opname != "LOAD_CONST":
                # From Python 3.13 on one instruction may name two variables, of which the last is what the next one is about.
                *others, last = this.argval if isinstance(this.argval, tuple) else (this.argval,)
                read.update(others if following.argval in _ADDING else (*others, last))
                if not _looks_up(following):
                    counted.add(last)
        for words in (read, counted):
            words.update(each for each in code.co_consts if type(each) is str)
    return {
        number
        for names, reading in ((added, read), (looked_up, counted))
        for number, each in names.items()
        if each.isdisjoint(reading)
    }


def _has_no_name(owner: Any, name: Hashable) -> bool:
    """Whether code reads what stands there by no name of its own: in a container, among the arguments of a partial, behind a bound method."""
    if type(owner) in BOUND_IN_C:
        return owner.__name__ not in _ADDING
    return isinstance(owner, CONTAINERS) or type(name) is int


def _looks_up(following: dis.Instruction) -> bool:
    """Whether what was loaded just before is a dictionary in which something is looked up: a key comes next, or one of few methods."""
    if following.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return following.argval in _LOOKING_UP
    return following.opname.startswith("LOAD_") or following.opname in ("CONTAINS_OP", "PUSH_NULL", "COPY")
