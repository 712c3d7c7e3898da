"""What is told of a solve by the kernels of its step: the rows' results, and what few ask for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..convergence import ENOUGH, error_left
from ..sequence.layout import Layout, not_finite_in, refuse_not_finite
from ..sequence.words import in_words
from ..solution import Dropped, Plan, Result, Solution, first_not_finite, worst_of
from ..tolerance import Tolerance

if TYPE_CHECKING:
    from ..fuse.found import Found, Others
    from ..fuse.step import FusedStep

#: How a row ends whose chunks have joined, by whether rounding is all that is left.
_JOINED = (Result.CONVERGED, Result.PRECISION_FLOOR)
#: A correction that is so many times the one before it is not the same again: as in ``fuse.support``, which needs Triton.
_VARIED = 1.05


def plan_of(fused: FusedStep, chunk: int, length: int) -> Plan:
    parallel = chunk < length
    derivative, linear = ("forward, in the kernels", "groups of chunks") if parallel else ("none", "none")
    return Plan(f"fused kernels ({fused.placement})", derivative, linear, chunk)


def dropped_from(found: Found, layout: Layout, tolerance: Tolerance | None) -> Dropped | None:
    """What is to be told of states that were not written."""
    others = found.others
    if others is None:
        return None
    known = torch.full((layout.rows,), found.length, device=layout.device)
    if tolerance is not None:
        known = _known_steps(found, others, tolerance)
    return Dropped(others.every, found.length, layout.unpack(others.final), known.reshape(layout.batch_shape))


def _known_steps(found: Found, others: Others, tolerance: Tolerance) -> Tensor:
    """[B], by the states that were written and the last one, each beside the largest size up to the end of the chunk that it is in."""
    states, final = found.states, others.final.unsqueeze(0)
    numbers = torch.arange(1, len(states) + 1, device=states.device) * others.every
    numbers = torch.cat([numbers, torch.full_like(numbers[:1], found.length)])
    scale = others.sizes.cummax(0).values[(numbers - 1) // found.chunk].to(states)
    return tolerance.known_steps(torch.cat([states, final]), scale, numbers)


class FusedSolution(Solution):
    """A solution by kernels: what few ask for is computed when somebody does, since that takes as long as the kernels.

    Args:
        late: what that is computed from; None where all is known
        known: attributes of a Solution
    """

    def __init__(self, late: tuple[Found, Layout, list[int] | None] | None = None, **known: Any):
        self.__dict__.update(known, _late=late)

    def tell(
        self, call: Any, fused: FusedStep, found: Found, result: Result, exact_steps: Any = None, **known: Any
    ) -> None:
        """What is known once the device is done.

        Args:
            call: a ``fused.Call``
            result: of all rows of which nothing else was noted
            exact_steps: [B], of a fixed number of passes; None where all are
        """
        layout, rows = fused.layout, fused.layout.rows
        results, description = (result,) * rows, result.value
        noted = found.left or found.floored or found.unsettled
        if noted and result is not Result.ITERATIONS_DONE:
            if found.left or found.floored:
                results, exact_steps = _of_rows(found, rows, found.length)
            if found.unsettled:
                results, exact_steps = _not_finite(call, results, exact_steps, found.states)
            result = worst_of(results)
            description = result.value
            if result.severity > Result.PRECISION_FLOOR.severity:
                description = in_words(results, torch.tensor(exact_steps), call.given_inputs, layout)
        late = found, layout, exact_steps
        self.__dict__.update(known, _late=late, result=result, results=results, description=description)

    def told_as(self, result: Result) -> FusedSolution:
        """The same, where all rows ended so and no state was exact before."""
        known = {name: value for name, value in self.__dict__.items() if name != "_late"}
        known |= {
            "result": result,
            "results": (result,) * len(self.results),
            "description": result.value.format(step=0),
        }
        assert self._late is not None
        found, layout, _ = self._late
        return FusedSolution((found, layout, [0] * layout.rows), **known)

    @property
    def _batch_shape(self) -> torch.Size:
        return torch.Size(self._late[1].batch_shape) if self._late is not None else super()._batch_shape

    def without_states(self, dropped: Dropped | None = None) -> FusedSolution:
        late = self._late
        if late is not None:
            found, layout, exact = late
            late = found.without_states(), layout, exact
        made = FusedSolution()
        made.__dict__.update(self.__dict__, states=None, z0=None, dropped=dropped or self.dropped, _late=late)
        return made

    def in_short(self) -> Solution:
        found = None if self._late is None or self._late[0].left else self._late[0]
        known = None if found is None or self.tolerance is None or self.dropped is not None else found.notes.known
        if found is None or known is None:
            return super().in_short()
        length = found.length
        return self.without_states(Dropped(length, length, None, known.reshape(self._batch_shape).long()))

    def __getattr__(self, name: str) -> Any:
        make, late = LATE.get(name), self.__dict__.get("_late")
        if make is None or late is None:
            raise AttributeError(name)
        value = self.__dict__[name] = make(*late)
        return value

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, or what is written to a file: all is known."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"_late": None}


def _by_row(of_lanes: Tensor, layout: Layout) -> Tensor:
    """[..., R] to [..., *batch]: of a row's channels the largest."""
    return of_lanes.unflatten(-1, (layout.rows, -1)).amax(-1).reshape((*of_lanes.shape[:-1], *layout.batch_shape))


LATE: dict[str, Callable[[Found, Layout, Any], Tensor]] = {
    "iterations": lambda found, layout, _: _by_row(found.notes.taken.abs(), layout).long(),
    "residual": lambda found, layout, _: _by_row(found.notes.residual, layout).to(found.states.dtype),
    "updates": lambda found, layout, _: _by_row(found.notes.corrections[: found.passes], layout),
    "exact_steps": lambda found, layout, exact: (
        torch.full(layout.batch_shape, found.length, device=layout.device)
        if exact is None
        else torch.as_tensor(exact, device=layout.device).reshape(layout.batch_shape)
    ),
}


@torch.no_grad()
def spoil_failed(found: Found, layout: Layout) -> Tensor | None:
    """Where nobody can look: rows whose last corrections went beyond the numbers are NaN behind what is exact, as in ``graphs.straight``.

    Returns:
        [B], how many steps of each are exact, or as exact as so many passes get; None where all are
    """
    length, exact = found.length, found.passes * found.chunk
    if not found.passes or exact >= length:
        return None
    lanes = ~torch.isfinite(found.notes.corrections[found.passes - 1])
    found.notes.residual.masked_fill_(lanes, math.nan)
    failed = lanes.unflatten(0, (layout.rows, -1)).any(-1)
    found.states[exact:].masked_fill_(failed.unsqueeze(-1), math.nan)
    return torch.where(failed, exact, length)


def _of_rows(found: Found, rows: int, length: int) -> tuple[tuple[Result, ...], list[int] | None]:
    """Where not all lanes were settled by their corrections: how each row ended, and its exact steps; None where all are."""
    results = [_JOINED[rough] for rough in found.notes.rough(rows)]
    if not found.left:
        return tuple(results), None
    notes, exact = found.notes.on_host(), min(length, found.passes * found.chunk)
    before, last = notes.corrections[found.passes - 2 : found.passes].double()
    left = error_left(last, last, before)
    noise = (last <= 1) & (before <= 1) & ((last >= _VARIED * before) | (left <= 1))  # as the kernels say
    enough = (left <= ENOUGH) | noise
    by_loop = (~enough).view(rows, -1).any(-1).tolist()
    results = [Result.FINISHED_BY_LOOP if looped else result for looped, result in zip(by_loop, results, strict=True)]
    return tuple(results), [exact if looped else length for looped in by_loop]


def _not_finite(
    call: Any, results: tuple[Result, ...], exact_steps: list[int] | None, states: Tensor
) -> tuple[tuple[Result, ...], list[int] | None]:
    """Rows whose states are not finite somewhere end so."""
    # Mostly all are, and this one number tells.
    if math.isfinite(torch.linalg.vector_norm(states, math.inf).item()):
        return results, exact_steps
    places = first_not_finite(states).tolist()
    if 0 in places and not_finite_in(call.z0) is not None:
        refuse_not_finite(call.z0, infinities=True)
        places = first_not_finite(states, infinities=True).tolist()
    found = tuple(Result.NON_FINITE if place >= 0 else result for place, result in zip(places, results, strict=True))
    known = [place if place >= 0 else len(states) if exact_steps is None else exact_steps[row]
             for row, place in enumerate(places)]  # fmt: skip
    return found, known
