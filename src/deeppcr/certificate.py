"""Is what the iteration found the solution? The step itself is asked, by products with its Jacobians: no block is formed.

Shapes: N chunks of C steps, B rows, D the packed state.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .convergence import still_to_come
from .linear import Blocks, LinearSolver, solve_coupled
from .sequence import Sequence

#: What is left of an error is known when it changes by this many roundings of the state: the loop's own steps round as much.
_ROUNDINGS = 4
#: Values that change otherwise than a derivative says, by more than this part of the change, have another derivative.
_ANOTHER = 0.1
#: So many roundings a step may make that computes with larger numbers than its state.
_NOISE = 100


def error_by_products(
    sequence: Sequence,
    starts: Tensor,
    ends: Tensor,
    residual: Tensor,
    chunk: int,
    blocks: Blocks,
    linear: LinearSolver,
    rounds: int,
) -> tuple[Tensor, Tensor]:
    """The error of the ends of chunks, to first order: ``e_n = J_n e_{n-1} + r_n`` with the true Jacobians ``J_n``.

    Approximate Jacobians take the place of a solver: each round, one product with the true ones shows what is missing. An
    error that shrinks first and grows later is followed until nothing but rounding is left of it and falls: what grows
    after that is what the loop's own rounding would grow to.

    Args:
        starts, ends: [N, B, D], the states before and after the chunks, as they were found
        residual: [N, B, D], ``r_n``: where the chunks lead, less where they were found to
        blocks: N approximate Jacobians of the chunks
        rounds: so many at most, from 1

    Returns:
        the error, [N, B, D], and which rows it is known of, [B]
    """
    eps, size = torch.finfo(ends.dtype).eps, ends.abs()
    error, missing, largest = torch.zeros_like(residual), residual, torch.zeros_like(residual[0])
    for _ in range(rounds):
        change = solve_coupled(blocks[1:], missing, reverse=False, solver=linear)
        error = error + change
        before, largest = largest, change.abs().amax(0)
        rounding = _ROUNDINGS * eps * torch.maximum(size, error.abs().amax(-1, keepdim=True))
        known = (change.abs() * still_to_come(largest, before) <= rounding).all(-1).all(0)
        if known.all() or not torch.isfinite(largest).all():
            return error, known
        shifted = torch.cat([torch.zeros_like(error[:1]), error[:-1]])
        missing = residual + sequence.push_out(starts, shifted.unsqueeze(1), chunk)[1].squeeze(1) - error
    return error, known


def small_change(starts: Tensor, rtol: float) -> Tensor:
    """[N, B, D]: large enough to stand out of rounding, small enough for a derivative to foresee what comes of it."""
    generator = torch.Generator("cpu").manual_seed(0)
    signs = torch.randint(0, 2, starts.shape, generator=generator, device="cpu").mul_(2).sub_(1).to(starts)
    return max(math.sqrt(torch.finfo(starts.dtype).eps), rtol) * starts.abs().amax(0) * signs


def is_foreseen(values: Tensor, changed: Tensor, foreseen: Tensor, rtol: float) -> Tensor:
    """Whether values [N, B, D] change as the derivative says, in every number of a row, on the average of the steps: [B].

    A derivative is not always that of the values (``detach``, ``round``, straight-through estimates): then an update says
    nothing of the error that is left. A few steps next to a kink may differ.

    Args:
        changed: [N, B, D], the values after a ``small_change`` of the states
        foreseen: [N, B, D], the change of the values by the derivative
    """
    noise = max(_NOISE * torch.finfo(values.dtype).eps, _ANOTHER * rtol)  # of a step in lower precision rtol tells
    change = changed - values
    off, seen, told = ((each.abs() / len(values)).sum(0) for each in (change - foreseen, change, foreseen))
    return (off <= _ANOTHER * torch.maximum(seen, told) + noise * values.abs().amax(0)).all(-1)
