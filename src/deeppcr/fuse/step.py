"""A step that has kernels: what they read at the moment, and what is known of solves by them."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..bounded import Bounded
from ..sequence.evaluate import entry_of
from ..sequence.layout import Layout
from ..solution import first_not_finite
from ..tolerance import Tolerance, bears_out
from .compiled import Kernels, kernels_of
from .expressions import NotCovered
from .kinds import Kind, first_chunk, is_shorter_in_one
from .rows import rows_agree
from .trace import TRACING, one_row

#: How many kinds of solves are remembered of a step.
_MOST_KINDS = 256
#: Steps of each sort that are looked at where not all are.
_FEW = 3
_random = random.Random(0)  # which leaves the caller's random numbers alone


@dataclass
class FusedStep:
    """A step by its kernels.

    Attributes:
        kernels: of the step
        layout: of its state
        places: of the tensors that it closes over, where they stand among all that it reaches
        elsewhere: whether some of them are on another device: single numbers
        kinds: of solves, by length and rows
        solves: how many there were, without gradients and with them
        longest: steps of the longest solve that was held against the step in all of its states
        hides: the step hides some of its derivatives, which may matter in the next solve
        only_loop: it did, so that chunks cannot be joined by them
        gradients_fit: what kernels of gradients were compiled for that are known to fit the device
    """

    kernels: Kernels
    layout: Layout
    places: tuple[int, ...]
    elsewhere: bool
    kinds: Bounded = field(default_factory=lambda: Bounded(_MOST_KINDS))
    solves: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    longest: int = 0
    hides: bool = False
    only_loop: bool = False
    gradients_fit: set[tuple[Any, ...]] = field(default_factory=set)

    @staticmethod
    def of(step: Callable[..., Any], layout: Layout, z0: Any, inputs: Any, reached: list[Tensor]) -> FusedStep:
        """Trace a step.

        Args:
            z0, inputs: a state, and what the step sees of xs at one step
            reached: the tensors that it reaches

        Raises:
            NotCovered: there are no kernels for it, and why
        """
        with TRACING:
            row = one_row(step, layout, inputs)
            # What is kept of a step is not to keep its tensors, which the next call may have replaced.
            kernels = kernels_of(replace(row, closures=()), layout)  # with derivatives, which may not be covered
        where = {id(tensor): place for place, tensor in enumerate(reached)}
        if any(id(tensor) not in where for tensor in row.closures):
            raise NotCovered("a tensor that the step closes over cannot be found again")
        for tensor in row.closures:
            if tensor.device != layout.device and tensor.ndim:
                raise NotCovered(f"a tensor on {tensor.device} is not covered")
        if not rows_agree(step, row, layout, z0, inputs, list(row.closures)):
            raise NotCovered("rows depend on each other, or on how many there are")
        elsewhere = any(tensor.device != layout.device for tensor in row.closures)
        return FusedStep(kernels, layout, tuple(where[id(tensor)] for tensor in row.closures), elsewhere)

    def has_gradients_of(self, step: Callable[..., Any], z0: Any, inputs: Any, reached: list[Tensor]) -> bool:
        """Whether rows of the step have the gradients that they have by themselves: ``x - x.mean(0) + x.mean(0).detach()`` has others."""
        row, closures = self.kernels.program.parts.row, self.closures(reached)
        return rows_agree(step, row, self.layout, z0, inputs, closures, gradients=True)

    @staticmethod
    def key_of_kind(length: int, chunk: int | str, tolerance: Tolerance, repeated: bool) -> tuple[Any, ...]:
        """What a kind of solves is known by.

        Args:
            chunk: steps of a chunk at first, or "auto"
            repeated: it starts from the initial state, not from a guess
        """
        return length, chunk, tolerance.atol, tolerance.rtol, tolerance.local, repeated

    def kind(self, key: tuple[Any, ...]) -> Kind:
        """What is known of solves of a kind: a copy is for one of them to change, and to be noted in ``kinds``."""
        found = self.kinds.get(key)
        if found is None:
            (length, chunk, _, _, local, _), program = key, self.kernels.program
            if self.only_loop:
                return Kind(length, length, gave_up=True, patience=sys.maxsize)
            first = self._first_chunk(length, local) if isinstance(chunk, str) else min(chunk, length)
            # A roll-out without tangents is a guess that costs little.
            found = Kind(length, first, int(program.parts.tiled))
        return found

    def leave_to_loop(self) -> None:
        """From now on one step after the other."""
        self.only_loop = True
        self.kinds.clear()

    def _first_chunk(self, length: int, local: bool = False) -> int:
        program = self.kernels.program
        return first_chunk(length, self.layout.rows * program.channels, program, local)

    def is_quicker_in_one(self, length: int) -> bool:
        """Whether so few steps are expected to be done by the loop in one kernel before chunks have joined."""
        return is_shorter_in_one(length, self._first_chunk(length), self.kernels.program)

    def closures(self, reached: list[Tensor]) -> list[Tensor]:
        """Of all tensors that the step reaches, those that it closes over."""
        return [reached[place] for place in self.places]

    @cached_property
    def placement(self) -> str:
        """Where the numbers of a state are while the kernels work."""
        program = self.kernels.program
        return "tiles" if program.parts.tiled else "elementwise" if program.elementwise else "narrow"

    @cached_property
    def given_places(self) -> list[int] | None:
        """Which of the inputs and closures the kernels read themselves; None where something has to be computed from them first."""
        return None if self.elsewhere else self.kernels.program.parts.given_places

    def bases(self, inputs: list[Tensor], closures: list[Tensor]) -> list[Tensor]:
        """What the kernels read from, differentiable in xs and in what the step closes over."""
        if self.given_places is not None:
            return list(map([*inputs, *closures].__getitem__, self.given_places))
        device = self.layout.device
        if self.elsewhere:
            closures = [tensor.to(device) for tensor in closures]
        return self.kernels.program.parts.values(inputs, closures, device)

    @torch.no_grad()
    def is_borne_out(
        self, step: Callable[..., Any], initial: Tensor, inputs: Any, states: Tensor, tolerance: Tolerance, chunk: int
    ) -> bool:
        """Whether the step itself gives some of the states, drawn at random: of all, of those with which a chunk begins, and of those
        with which a row stops being finite.

        Kernels that were compiled wrong solve their own recurrence, and find it solved.

        Args:
            initial, states: [B, D] and [L, B, D]
            inputs: xs
            chunk: steps of a chunk
        """
        drawn = [range(len(states)), range(chunk, len(states), chunk), _ends_of_rows(states)]
        for at in {at for each in drawn for at in _random.sample(each, min(_FEW, len(each)))}:
            before = initial if at == 0 else states[at - 1]
            z, x = self.layout.unpack(before), entry_of(inputs, at)
            value = self.layout.pack(self.layout.in_order(step(z) if inputs is None else step(z, x)))
            size = states[:at].abs().amax(0).maximum(initial.abs()) if at else initial.abs()
            if not bears_out(value.unsqueeze(0), states[at : at + 1], size, tolerance).all():
                return False
        return True


def _ends_of_rows(states: Tensor) -> list[int]:
    """The steps with which rows of states [L, B, D] stop being finite; as a rule none, which one number tells."""
    if math.isfinite(torch.linalg.vector_norm(states, math.inf).item()):
        return []
    return sorted({at for at in first_not_finite(states).tolist() if at >= 0})
