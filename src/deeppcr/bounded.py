"""What is kept from call to call: so many things and no more, the least recently used forgotten first."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from typing import Any


class Bounded:
    """Things by key; safe for threads.

    Args:
        most: how many are kept
        most_bytes: how many bytes they have in all, each by its attribute ``bytes``; the latest is kept whatever it has

    >>> kept = Bounded(most=2)
    >>> for key in "abc":
    ...     kept.put(key, key.upper())
    >>> kept.get("a"), kept.get("b"), len(kept)
    (None, 'B', 2)
    """

    def __init__(self, most: int, most_bytes: int | None = None):
        self.most: int = most
        self.most_bytes: int | None = most_bytes
        self._kept: OrderedDict[Hashable, tuple[Any, weakref.ref | None]] = OrderedDict()
        # What is thrown away may be the last to hold an owner, whose end is then told to the thread that is here already.
        self._lock = threading.RLock()

    def get(self, key: Hashable, default: Any = None) -> Any:
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return default
            self._kept.move_to_end(key)  # the key itself stays: what an owner's end looks for is that one
            return found[0]

    def take(self, key: Hashable) -> Any:
        """The same, and it is kept no longer: two that take and put back never have one thing at once."""
        with self._lock:
            return self._kept.pop(key, (None, None))[0]

    def put(self, key: Hashable, value: Any, owner: Any = None) -> None:
        """Keep a thing, until its owner is no more, if that can be watched."""
        watch = None
        with suppress(TypeError):
            watch = weakref.ref(owner, lambda _: self.take(key))
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = value, watch
            while len(self._kept) > 1 and self._is_too_much():
                self._kept.popitem(last=False)

    def _is_too_much(self) -> bool:
        if len(self._kept) > self.most:
            return True
        return self.most_bytes is not None and sum(each.bytes for each in self.values()) > self.most_bytes

    def values(self) -> list[Any]:
        with self._lock:
            return [value for value, _ in self._kept.values()]

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


class Hashed:
    """A key of many parts: they are gone through once, not whenever something is looked up."""

    __slots__ = ("_hash", "parts")

    def __init__(self, *parts: Hashable):
        self.parts: tuple[Hashable, ...] = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Hashed) and self._hash == other._hash and self.parts == other.parts)
