"""Is what the iteration found the solution? The step itself is asked, by products with its Jacobians: no block is formed.

Shapes: N chunks of C steps, B rows, D the packed state. Over ranks these are the chunks of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..convergence import NEGLIGIBLE, still_to_come
from ..jacobian import Jacobian
from ..sequence import Sequence
from ..sequence.evaluate import StepError
from ..solution import Result
from ..tolerance import Bounds
from .safeguards import FALSE_DERIVATIVE, Safeguarded, _Progress, largest_of

#: What is left of an error is known when it changes by this many roundings of the state: the loop's own steps round as much.
ROUNDINGS = 4
#: An error of so many tolerances, known to first order, is small enough to be taken back: what is left of it is of second order.
TAKEN_BACK = 10
#: Values that change otherwise than a derivative says, by more than this part of the change, have another derivative.
ANOTHER = 0.1
#: So many roundings a step may make that computes with larger numbers than its state.
NOISE = 100
#: So many steps, or such a part of them, may be next to a kink.
_KINKS, _AT_KINKS = 2, 0.01


class Certified(Safeguarded[_Progress]):
    """A run that asks the step itself whether what it found is the solution."""

    first: int
    ends: Tensor
    reasons: tuple[str, ...]

    def push(self, tangents: Tensor) -> Tensor:
        """[n, B, D], products of the true Jacobians of the chunks from ``first`` on with vectors."""
        raise NotImplementedError

    def is_refused(self, refused: bool) -> bool:
        """Whether the step cannot be differentiated, anywhere."""
        return refused

    def total(self, sums: Tensor) -> Tensor:
        """Over all chunks, of sums over those that are here."""
        return sums

    def hand_on(self, errors: Tensor, **measures: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """[B, D], the error before the first chunk, given those of the ends; and the largest of each measure that anybody has."""
        return torch.zeros_like(self.before), measures

    def has_derivative_at_ends(self) -> Tensor:
        values, blocks = self.linearise()
        return self.has_derivative(values, blocks.apply)

    def has_derivative(self, values: Tensor, push: Callable[[Tensor], Tensor]) -> Tensor:
        """[B]: whether chunks from ``first`` on, which lead to ``values``, change as products ``push`` say."""
        starts, rtol = self.starts(), self.progress.tolerance.rtol
        change = small_change(starts, rtol)
        changed, foreseen = self.roll_out(starts + change), push(change)
        largest = self.tell(largest=largest_of(values.abs()).nan_to_num(math.inf, math.inf))["largest"]
        return is_foreseen(values, changed, foreseen, rtol, largest, self.total)

    @torch.no_grad()
    def certify(self) -> None:
        """What approximate Jacobians found, seen by the true ones: what they make of the residual is the error to first order, and is taken
        back. Rows that are wrong, or cannot be certified, lose their claim.

        An observed rate of convergence proves nothing where errors shrink first and grow later, and a small update nothing
        where many of them add up.
        """
        progress, self.first = self.progress, 0
        claimed = progress.codes <= Result.PRECISION_FLOOR.severity
        claimed &= progress.iterations < progress.chunks  # after which they are exact, whatever the Jacobians are
        if not claimed.any():
            return
        values, blocks = self.linearise()
        residual, refused = torch.where(claimed.unsqueeze(-1), values - self.ends, 0), False
        bounds = Bounds(progress.tolerance, self.ends, self.ends)  # of no chunks
        try:
            if len(self.ends):
                bounds = progress.bounds(self.ends, self.before, 0, self.push, self.scale())
        except StepError:
            refused = True
        if self.is_refused(refused):
            progress.withdraw(claimed, Result.UNCERTIFIED)
            self._not_certified("the step cannot be differentiated")
            return

        def solve(missing: Tensor) -> Tensor:
            return self.solve(blocks, missing)

        error, known = error_by_products(self.push, bounds.rounding, residual, solve, progress.limit, self.hand_on)
        true = self.has_derivative(values, self.push)
        found = self.tell(worst=largest_of(bounds.ratio(error)), beyond=~bounds.is_rounding(error))
        small, is_rounding = found["worst"] <= torch.where(true & known, TAKEN_BACK, 1), found["beyond"] == 0
        progress.withdraw(claimed & ~small & is_rounding, Result.PRECISION_FLOOR)
        floor = progress.codes == Result.PRECISION_FLOOR.severity
        small |= floor & is_rounding
        lost = claimed & (~small | (floor & ~true))
        if not progress.tolerance.local:
            sizes = torch.maximum(self.ends.abs(), values.abs())
            lost |= claimed & self.hides(sizes, error.abs(), (self.ends + error).abs())
        progress.withdraw(lost)
        kept = claimed & ~lost
        progress.withdraw(kept & ~(true & known), Result.UNCERTIFIED)
        if (kept & ~true).any():
            self._not_certified(FALSE_DERIVATIVE)
        if (kept & true & ~known).any():
            self._not_certified("products with the true Jacobians did not converge")
        self.ends = torch.where((kept & true & known).unsqueeze(-1), self.ends + error, self.ends)
        self.tell()

    def _not_certified(self, why: str) -> None:
        self.reasons = (*self.reasons, why)
        self.plan.note(f"not certified: {why}")


def error_by_products(
    push: Callable[[Tensor], Tensor],
    rounding: Tensor,
    residual: Tensor,
    solve: Callable[[Tensor], Tensor],
    rounds: int,
    hand_on: Callable[..., tuple[Tensor, dict[str, Tensor]]],
) -> tuple[Tensor, Tensor]:
    """The error of the ends of chunks, to first order: ``e_n = J_n e_{n-1} + r_n`` with the true Jacobians ``J_n``.

    Approximate Jacobians take the place of a solver: each round, one product with the true ones shows what is missing. An
    error that shrinks first and grows later is followed until nothing but rounding is left of it and falls, or less than that:
    what grows after that is what the loop's own rounding would grow to.

    Args:
        push: ``J_n v_n`` of vectors [N, B, D]
        rounding: [N, B, D], a unit of it of every state: of its own size, for what is small may grow again
        residual: [N, B, D], ``r_n``: where the chunks lead, less where they were found to
        solve: for a residual, with approximate Jacobians of the chunks
        rounds: so many at most, from 1
        hand_on: as of ``Certified``

    Returns:
        the error, [N, B, D], and which rows it is known of, [B]
    """
    eps = torch.finfo(residual.dtype).eps
    error, missing, largest = torch.zeros_like(residual), residual, torch.zeros_like(residual.sum(0))
    while True:
        change = solve(missing)
        error = error + change
        size, allowed = change.abs(), ROUNDINGS * torch.maximum(rounding, eps * error.abs())
        # Of what products themselves round, some of the numbers never fall.
        creeping = torch.where(size <= NEGLIGIBLE * allowed, 0, size / allowed)
        measures = {"largest": largest_of(size), "creeping": largest_of(creeping)}
        numbers = {name: each.nan_to_num(math.inf, math.inf) for name, each in measures.items()}
        entry, found = hand_on(error, **numbers)
        before, largest = largest, found["largest"].to(error.dtype)
        known = ((found["creeping"] == 0) | (found["creeping"] * still_to_come(largest, before) <= 1)).all(-1)
        rounds -= 1
        if rounds == 0 or known.all() or not torch.isfinite(largest).all():
            return error, known
        if len(error):
            missing = residual + push(torch.cat([entry.unsqueeze(0), error[:-1]])) - error


def steps_have_derivative(
    sequence: Sequence,
    jacobian: Jacobian,
    initial: Tensor,
    states: Tensor,
    values: Tensor,
    rtol: float,
    *,
    either_side: bool = False,
) -> Tensor:
    """[B]: whether the first n steps, which lead from the initial state [B, D] and states [n, B, D] to ``values``, change as their
    Jacobians say.

    Args:
        either_side: each number may have its derivative on one side alone. Who stays at a bound (``clamp``) is at a kink at every step
    """
    previous, steps = torch.cat([initial.unsqueeze(0), states[:-1]]), range(len(states))
    change = small_change(previous, rtol)
    changed = sequence.values(previous + change, steps)
    if jacobian.given:  # which may know better than the step
        foreseen = jacobian.evaluate(sequence, previous, steps)[1].apply(change)
    else:
        foreseen = sequence.push(previous, change.unsqueeze(1), steps)[1].squeeze(1)
    if either_side:
        mirrored, right = 2 * values - sequence.values(previous - change, steps), values + foreseen
        changed = torch.where((mirrored - right).abs() < (changed - right).abs(), mirrored, changed)
    largest = values.abs().amax(0)
    foreseen_in_all = is_foreseen(values, changed, foreseen, rtol, largest, lambda sums: sums)
    return foreseen_in_all & _few_differ(previous, values, changed, foreseen, rtol)


def _few_differ(previous: Tensor, values: Tensor, changed: Tensor, foreseen: Tensor, rtol: float) -> Tensor:
    """[B]: whether no more steps than may be next to a kink change quite otherwise than foreseen: see ``is_foreseen``, which asks for the
    average. Some of the steps that hide a derivative do as much harm as all of them, and are no part of that.

    A step rounds what its row has there: what was large at another time is not to hide what small states change by, but for the
    rounding of that itself, since what fades may be the difference of what stays large.
    """
    of_row = torch.maximum(previous.abs().amax(-1, keepdim=True), values.abs().amax(-1, keepdim=True))
    noise = noise_of(values.dtype, rtol) * torch.minimum(of_row, values.abs().amax(0))
    noise = torch.maximum(noise, torch.finfo(values.dtype).eps * of_row.amax(0))
    change = changed - values
    differ = (change - foreseen).abs() > 0.5 * torch.maximum(change.abs(), foreseen.abs()) + noise
    return (differ.sum(0) <= max(_KINKS, _AT_KINKS * len(values))).all(-1)


def small_change(starts: Tensor, rtol: float) -> Tensor:
    """[N, B, D]: large enough to stand out of rounding, small enough for a derivative to foresee what comes of it.

    In proportion to each number by itself, so that none changes its sign: many steps have a kink there.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    signs = torch.randint(0, 2, starts.shape, generator=generator, device="cpu").mul_(2).sub_(1).to(starts)
    return _part_changed(starts.dtype, rtol) * starts.abs() * signs


def _part_changed(dtype: torch.dtype, rtol: float) -> float:
    return max(math.sqrt(torch.finfo(dtype).eps), rtol)


def noise_of(dtype: torch.dtype, rtol: float) -> float:
    """What values may change by beside what is foreseen, as a part of their largest size.

    Of a step in lower precision rtol tells. In half precision so many roundings would be more than the change itself, and hide all of it.
    """
    return min(max(NOISE * torch.finfo(dtype).eps, ANOTHER * rtol), 0.5 * _part_changed(dtype, rtol))


def is_foreseen(
    values: Tensor,
    changed: Tensor,
    foreseen: Tensor,
    rtol: float,
    largest: Tensor,
    total: Callable[[Tensor], Tensor],
) -> Tensor:
    """Whether values [N, B, D] change as the derivative says, in every number of a row, on the average of the steps: [B].

    A derivative is not always that of the values (``detach``, ``round``, straight-through estimates): then an update says
    nothing of the error that is left. A few steps next to a kink may differ.

    Args:
        changed: [N, B, D], the values after a ``small_change`` of the states
        foreseen: [N, B, D], the change of the values by the derivative
        largest: [B, D], of all values
        total: as of ``Certified``
    """
    noise, change = noise_of(values.dtype, rtol), changed - values
    sums = [each.abs().sum(0, dtype=torch.float64) for each in (change - foreseen, change, foreseen)]
    off, seen, told, count = total(torch.stack([*sums, torch.full_like(sums[0], len(values))]))
    return (off <= ANOTHER * torch.maximum(seen, told) + noise * count * largest).all(-1)
