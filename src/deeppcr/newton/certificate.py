"""Is what the iteration found the solution? The step itself is asked, by products with its Jacobians: no block is formed.

Shapes: N chunks of C steps, B rows, D the packed state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..convergence import NEGLIGIBLE, Progress, still_to_come
from ..jacobian import Jacobian
from ..linear import Blocks, LinearSolver, solve_coupled
from ..sequence import Sequence
from ..sequence.evaluate import StepError
from ..solution import Result

#: Why updates, and products with Jacobians, may say nothing of the error.
FALSE_DERIVATIVE = (
    "the step's values do not change as its derivative says (detach, rounding, a straight-through estimate?)"
)

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


def certify(
    sequence: Sequence,
    jacobian: Jacobian,
    linear: LinearSolver,
    progress: Progress,
    starts: Tensor,
    ends: Tensor,
) -> tuple[Tensor, list[str]]:
    """What approximate Jacobians found, seen by the true ones: what they make of the residual is the error to first order.

    An observed rate of convergence proves nothing where errors shrink first and grow later, and a small update nothing
    where many of them add up.

    Args:
        progress: rows that are wrong, or cannot be certified, lose their claim there
        starts, ends: [N, B, D], the states before and after the chunks

    Returns:
        the ends, [N, B, D], less the error that was found, and why rows were not certified
    """
    claimed = progress.codes <= Result.PRECISION_FLOOR.severity
    claimed &= progress.iterations < progress.chunks  # after which they are exact, whatever the Jacobians are
    if not claimed.any():
        return ends, []
    chunk, rtol = progress.chunk, progress.tolerance.rtol

    def push(tangents: Tensor) -> Tensor:
        return sequence.push_out(starts, tangents.unsqueeze(1), chunk)[1].squeeze(1)

    values, blocks = jacobian.linearise(sequence, starts, chunk)
    residual = torch.where(claimed.unsqueeze(-1), values - ends, 0)
    try:
        bounds = progress.bounds(ends, sequence.initial, 0, push)
        error, known = error_by_products(push, bounds.rounding, residual, blocks, linear, progress.limit)
        true = has_derivative(sequence, starts, values, push, chunk, 0, rtol)
    except StepError:
        progress.withdraw(claimed, Result.UNCERTIFIED)
        return ends, ["the step cannot be differentiated"]
    small = (bounds.ratio(error) <= torch.where(true & known, TAKEN_BACK, 1)).all(0)
    progress.withdraw(claimed & ~small & bounds.is_rounding(error), Result.PRECISION_FLOOR)
    floor = progress.codes == Result.PRECISION_FLOOR.severity
    small |= floor & bounds.is_rounding(error)
    lost = claimed & (~small | (floor & ~true))
    if not progress.tolerance.local:
        lost |= claimed & progress.tolerance.hides(
            torch.maximum(ends.abs(), values.abs()), sequence.initial, error, (ends + error).abs()
        )
    progress.withdraw(lost)
    progress.withdraw(claimed & ~lost & ~(true & known), Result.UNCERTIFIED)
    why = []
    if (claimed & ~lost & ~true).any():
        why.append(FALSE_DERIVATIVE)
    if (claimed & ~lost & true & ~known).any():
        why.append("products with the true Jacobians did not converge")
    return torch.where((claimed & ~lost & true & known).unsqueeze(-1), ends + error, ends), why


def error_by_products(
    push: Callable[[Tensor], Tensor],
    rounding: Tensor,
    residual: Tensor,
    blocks: Blocks,
    linear: LinearSolver,
    rounds: int,
) -> tuple[Tensor, Tensor]:
    """The error of the ends of chunks, to first order: ``e_n = J_n e_{n-1} + r_n`` with the true Jacobians ``J_n``.

    Approximate Jacobians take the place of a solver: each round, one product with the true ones shows what is missing. An
    error that shrinks first and grows later is followed until nothing but rounding is left of it and falls, or less than that:
    what grows after that is what the loop's own rounding would grow to.

    Args:
        push: ``J_n v_n`` of vectors [N, B, D]
        rounding: [N, B, D], a unit of it of every state: of its own size, for what is small may grow again
        residual: [N, B, D], ``r_n``: where the chunks lead, less where they were found to
        blocks: N approximate Jacobians of the chunks
        rounds: so many at most, from 1

    Returns:
        the error, [N, B, D], and which rows it is known of, [B]
    """
    eps = torch.finfo(residual.dtype).eps
    error, missing, largest = torch.zeros_like(residual), residual, torch.zeros_like(residual[0])
    while True:
        change = solve_coupled(blocks[1:], missing, reverse=False, solver=linear)
        error = error + change
        size = change.abs()
        before, largest = largest, size.amax(0)
        allowed = ROUNDINGS * torch.maximum(rounding, eps * error.abs())
        # Of what products themselves round, some of the numbers never fall.
        settled = (size <= NEGLIGIBLE * allowed) | (size * still_to_come(largest, before) <= allowed)
        known = settled.all(-1).all(0)
        rounds -= 1
        if rounds == 0 or known.all() or not torch.isfinite(largest).all():
            return error, known
        missing = residual + push(torch.cat([torch.zeros_like(error[:1]), error[:-1]])) - error


def has_derivative(
    sequence: Sequence,
    starts: Tensor,
    values: Tensor,
    push: Callable[[Tensor], Tensor],
    chunk: int,
    first: int,
    rtol: float,
) -> Tensor:
    """[B]: whether chunks from ``first`` on, which lead from ``starts`` to ``values``, change as products ``push`` say."""
    change = small_change(starts, rtol)
    changed, _ = sequence.roll_out(starts + change, chunk, first)
    return is_foreseen(values, changed, push(change), rtol)


def steps_have_derivative(
    sequence: Sequence, jacobian: Jacobian, initial: Tensor, states: Tensor, values: Tensor, rtol: float
) -> Tensor:
    """[B]: whether the first n steps, which lead from the initial state [B, D] and states [n, B, D] to ``values``, change as their
    Jacobians say."""
    previous, steps = torch.cat([initial.unsqueeze(0), states[:-1]]), range(len(states))
    change = small_change(previous, rtol)
    changed = sequence.values(previous + change, steps)
    if jacobian.given:  # which may know better than the step
        foreseen = jacobian.evaluate(sequence, previous, steps)[1].apply(change)
    else:
        foreseen = sequence.push(previous, change.unsqueeze(1), steps)[1].squeeze(1)
    return is_foreseen(values, changed, foreseen, rtol) & _few_differ(values, changed, foreseen, rtol)


def _few_differ(values: Tensor, changed: Tensor, foreseen: Tensor, rtol: float) -> Tensor:
    """[B]: whether no more steps than may be next to a kink change quite otherwise than foreseen: see ``is_foreseen``, which asks for the
    average. Some of the steps that hide a derivative do as much harm as all of them, and are no part of that."""
    change, noise = changed - values, noise_of(values.dtype, rtol) * values.abs().amax(0)
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


def is_foreseen(values: Tensor, changed: Tensor, foreseen: Tensor, rtol: float) -> Tensor:
    """Whether values [N, B, D] change as the derivative says, in every number of a row, on the average of the steps: [B].

    A derivative is not always that of the values (``detach``, ``round``, straight-through estimates): then an update says
    nothing of the error that is left. A few steps next to a kink may differ.

    Args:
        changed: [N, B, D], the values after a ``small_change`` of the states
        foreseen: [N, B, D], the change of the values by the derivative
    """
    noise, change = noise_of(values.dtype, rtol), changed - values
    off, seen, told = ((each.abs() / len(values)).sum(0) for each in (change - foreseen, change, foreseen))
    return (off <= ANOTHER * torch.maximum(seen, told) + noise * values.abs().amax(0)).all(-1)
