"""The states of a loop as they come, and what is kept of them.

Shapes: L steps, B rows, D the packed state.
"""

from __future__ import annotations

from cmath import isfinite
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..solution import Dropped, first_not_finite
from .evaluate import StepError, returned
from .layout import Layout
from .purity import changes_in_place

#: Where not all states are kept, so many steps are held at a time, to be looked at together: one by one takes longer than a step.
_BLOCK = 256
#: Of a tensor how often it was written to, and its dtype: of each state of a loop, and quicker than by a function of Python.
writes_of: Callable[[Tensor], int] = attrgetter("_version")
dtype_of: Callable[[Tensor], torch.dtype] = attrgetter("dtype")


class KeptStates:
    """The states after every so many steps of a loop, and whether all of them are finite.

    Args:
        layout: of a state
        length: L
        every: 1 keeps all of them
        infinities: are values as others are, as in a loop that begins with one

    Attributes:
        length: L
        counted: whether it is counted how often a tensor is written to
    """

    def __init__(self, layout: Layout, length: int, every: int, *, infinities: bool = False):
        self.length: int = length
        self._layout, self._every = layout, every
        self._leaves = len(layout.shapes)
        self._full = (length if every == 1 else _BLOCK) * self._leaves
        self.counted: bool = not torch.is_inference_mode_enabled()
        self._versions: list[int] = []
        self._held: list[Tensor] = []  # the leaves of one state after the other
        self._parts: list[list[Tensor]] = []
        self._seen, self._infinities, self._unchecked = 0, infinities, False
        self._at: Tensor | None = None

    @property
    def count(self) -> int:
        """How many states there were."""
        return self._seen + len(self._held) // self._leaves

    @property
    def room(self) -> int:
        """How many states can be added before ``close_if_full``."""
        return (self._full - len(self._held)) // self._leaves

    def holders(self) -> tuple[Callable[[Any], None], Callable[[Any], None]] | tuple[None, None]:
        """What take a tensor that a step returned, or a tuple of them, and its version: in less time than ``add``, which looks whether it is a state.
        That is done later. None where states are held in another way."""
        several = self._layout.is_tuple
        if not self.counted or not (several or self._layout.spec.is_leaf()):
            return None, None
        self._unchecked = True
        return (self._held.extend, self._versions.extend) if several else (self._held.append, self._versions.append)

    def add(self, leaves: Sequence[Tensor]) -> None:
        """The next state, by its leaves."""
        if self.counted:
            self._held += leaves
            self._versions += map(writes_of, leaves)
        else:  # a step may return the same tensor again with other numbers, and nobody could tell
            self._held += [leaf.clone() for leaf in leaves]

    def check(self, *, latest: bool = False) -> None:
        """Raise where something that is held is no state; or only the latest."""
        begin = len(self._held) - self._leaves if latest else 0
        for first in range(max(0, begin), len(self._held), self._leaves) if self._unchecked else ():
            leaves = self._held[first : first + self._leaves]
            returned(self._layout, tuple(leaves) if self._layout.is_tuple else leaves[0], None)

    def close_if_full(self) -> None:
        if len(self._held) == self._full:
            self._close()

    def _close(self) -> None:
        """Keep what is to be kept of the states that are held."""
        # All at once: a state that a later step changed has been kept, or is the caller's.
        if self.counted and self._versions != list(map(writes_of, self._held)):
            raise StepError(changes_in_place("its state"))
        each = [self._held[number :: self._leaves] for number in range(self._leaves)]
        try:
            stacked = [torch.stack(leaves) for leaves in each]
        except RuntimeError:  # they may be of several shapes
            self.check()
            raise
        if any(set(map(dtype_of, leaves)) != {dtype} for leaves, dtype in zip(each, self._layout.dtypes, strict=True)):
            self.check()
        seen = [leaf.detach() for leaf in stacked]
        # What is not finite makes a sum so. A large sum may be so by itself; to look at each number takes several times the memory.
        if not all(isfinite(leaf.sum().item()) for leaf in seen):
            rows = self._layout.rows
            states = torch.cat([leaf.reshape(len(leaf), rows, -1) for leaf in seen], -1)
            at = first_not_finite(states, infinities=self._infinities)
            if (at >= 0).any():
                at = torch.where(at >= 0, at + self._seen, at)
                self._at = at if self._at is None else torch.where(self._at >= 0, self._at, at)
        if self._every > 1:
            self._last = [leaf[-1].clone() for leaf in stacked]
            first = self._every - 1 - self._seen % self._every
            stacked = [leaf[first :: self._every].clone() for leaf in stacked]
        if len(stacked[0]):
            self._parts.append(stacked)
        self._seen += len(self._held) // self._leaves
        self._held, self._versions = [], []

    def states(self) -> list[Tensor]:
        """Of every leaf those that were kept, [L // every, ...]: after the last was added."""
        if self._held:
            self._close()
        if len(self._parts) == 1:
            return self._parts[0]
        return [torch.cat(each) for each in zip(*self._parts, strict=True)]

    @property
    def not_finite(self) -> Tensor | None:
        """[B]: the first step after which a row was not finite, -1 where it always was; None where all always were."""
        return self._at

    def dropped(self, known_steps: Tensor) -> Dropped | None:
        """What is to be told of those that were not kept."""
        if self._every == 1:
            return None
        return Dropped(self._every, self.length, self._last, known_steps)
