"""A solve by the loop of Python, and what is told of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..sequence import Sequence
from ..sequence.bare import BareLoop
from ..sequence.kept import KeptStates
from ..sequence.layout import Layout, not_finite_in
from ..sequence.words import in_words
from ..solution import Plan, Result, Solution, without_iterations
from ..warned import warn


class Given(NamedTuple):
    """A loop, as ``solve`` was given it."""

    step: Any
    z0: Any
    xs: Any
    length: int | None
    batch_dims: int | None


def by_loop(loop: Given, every: int) -> Solution:
    sequence = Sequence(*loop, watched=False)  # in which a step may keep what it likes: none is taken twice
    layout, length, held = sequence.layout, sequence.length, not_finite_in(loop.z0)
    kept = KeptStates(layout, length, every, infinities=held == "an infinity")
    kept.add(layout.leaves(sequence.first))
    BareLoop(layout, loop.step, loop.xs, length, kept, first=1).advance(layout.unpack(sequence.first))
    found = of_loop(layout, kept, kept.states(), loop.z0, sequence.given_inputs, held)
    for note in sequence.all_notes:
        found.plan.note(note)
    return found


def of_loop(
    layout: Layout,
    kept: KeptStates,
    states: list[Tensor],
    z0: Any,
    inputs: Callable[[int], Any],
    held: str | None = None,
) -> Solution:
    """What a loop found; warns where it is not finite.

    Args:
        kept: of its states
        states: that it gave
        inputs: what a step sees of xs, by its index
        held: what z0 holds that is not finite
    """
    at, exact = kept.not_finite, torch.full((layout.rows,), kept.length, device=layout.device)
    results, description = [Result.LOOP] * layout.rows, Result.LOOP.value
    if at is not None:
        results = [Result.LOOP if place < 0 else Result.NON_FINITE for place in at.tolist()]
        exact = torch.where(at >= 0, at, exact)
        description = in_words(results, exact, inputs, layout, start=held)
        warn(description)
    exact = exact.reshape(layout.batch_shape)
    dropped = kept.dropped(exact)
    if dropped is not None:
        dropped = replace(dropped, final=layout.nest(dropped.final))
    start = z0.detach() if isinstance(z0, Tensor) else pytree.tree_map(torch.detach, z0)
    about = {"dtype": layout.dtype, "z0": start, "dropped": dropped}
    return without_iterations(layout.nest(states), results, exact, Plan(), description, **about)
