"""Rows of a batch that Newton's method cannot take: they go layer by layer, and the others do not notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..runtime import in_functorch, is_capturing
from ..solution import Plan, Result, Solution, warn, without_iterations


def solve_finite_rows(solve: Callable[[Tensor], Solution], loop: Callable[[Tensor], Tensor], start: Tensor) -> Solution:
    """``solve(start)``, with the states of ``loop`` in those rows of ``start`` [B, ...] that are not finite.

    A start of at most one dimension is a single row.
    """
    if in_functorch() or is_capturing(start.device):
        return solve(start)  # which says in one line that it cannot, or does what it can without a look
    finite = torch.isfinite(start.detach())
    finite = finite.flatten(1).all(1) if start.ndim > 1 else finite.all()
    if finite.all():
        return solve(start)

    rows = (~finite).flatten().nonzero().flatten().tolist()
    message = (
        f"input: row {rows[0]} holds values that are not finite, and so does its result ({len(rows)} of "
        f"{finite.numel()} rows)"
    )
    warn(message)
    if not finite.any():
        results, none = (Result.NON_FINITE,) * finite.numel(), torch.zeros_like(finite, dtype=torch.long)
        return without_iterations(loop(start), results, none, Plan(), message, dtype=start.dtype)
    # Another row in their place is as harmless as the batch itself; zeros need not be.
    harmless = start.detach()[finite][:1]
    solution = solve(start.where(finite.view(-1, *(1,) * (start.ndim - 1)), harmless))
    states = solution.states.clone()
    states[:, ~finite] = loop(start[~finite])
    results = [Result.NON_FINITE if row in rows else result for row, result in enumerate(solution.results)]
    return replace(
        solution,
        states=states,
        result=Result.NON_FINITE,
        results=tuple(results),
        exact_steps=solution.exact_steps.where(finite, 0),
        description=message,
    )
