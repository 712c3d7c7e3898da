"""The states of a loop as they come, and what is kept of them.

Shapes: L steps, B rows, D the packed state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..solution import Dropped, first_not_finite
from .evaluate import StepError
from .layout import Layout
from .purity import changes_in_place

#: Where not all states are kept, so many steps are held at a time, to be looked at together: one by one takes longer than a step.
_BLOCK = 256


class KeptStates:
    """The states after every so many steps of a loop, and whether all of them are finite.

    Args:
        layout: of a state
        length: L
        every: 1 keeps all of them
        infinities: are values as others are, as in a loop that begins with one

    Attributes:
        length: L
    """

    def __init__(self, layout: Layout, length: int, every: int, *, infinities: bool = False):
        self.length: int = length
        self._layout, self._every = layout, every
        self._leaves = len(layout.shapes)
        self._full = (length if every == 1 else _BLOCK) * self._leaves
        self._counted = not torch.is_inference_mode_enabled()  # how often a tensor was written to
        self._versions: list[int] = []
        self._held: list[Tensor] = []  # the leaves of one state after the other
        self._parts: list[list[Tensor]] = []
        self._seen, self._infinities = 0, infinities
        self._at: Tensor | None = None

    def add(self, leaves: Sequence[Tensor]) -> None:
        """The next state, by its leaves."""
        if self._counted:
            self._held += leaves
            for leaf in leaves:
                self._versions.append(leaf._version)
        else:  # a step may return the same tensor again with other numbers, and nobody could tell
            self._held += [leaf.clone() for leaf in leaves]
        if len(self._held) == self._full:
            self._close()

    def _close(self) -> None:
        """Keep what is to be kept of the states that are held."""
        # All at once: a state that a later step changed has been kept, or is the caller's.
        if self._counted and self._versions != [leaf._version for leaf in self._held]:
            raise StepError(changes_in_place("its state"))
        stacked = [torch.stack(self._held[number :: self._leaves]) for number in range(self._leaves)]
        seen = [leaf.detach() for leaf in stacked]
        # What is not finite makes a sum so. A large sum may be so by itself; to look at each number takes several times the memory.
        if not all(torch.isfinite(leaf.sum()) for leaf in seen):
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
