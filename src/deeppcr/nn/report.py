"""How a pass over a network went: read off what the kernels have found, or known beforehand.

Shapes: N chunks, B rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ..convergence import ENOUGH, error_left_of_one
from ..runtime import in_functorch, is_capturing
from ..solution import Dropped, Plan, Result, Solution, without_iterations
from ..tolerance import Tolerance, size_at_first
from ..warned import warn


@dataclass
class Report:
    """How a parallel pass went; ``found`` [passes, 2, B], and behind these the sizes of chunks (see ``kernels``), is read only when
    somebody asks."""

    blocks: int
    chunk: int
    found: Tensor
    rounds: int
    finished: bool = False
    note: str = ""  # for the plan
    tolerance: tuple[float, float, float] = (0.0, 0.0, 0.0)  # as of ``Layers``

    def passes_taken(self) -> list[int]:
        """For each row the passes until it was settled, 0 where it was not: as ``kernels.settled`` sees it."""
        taken = []
        for found in zip(*self.found[: 2 * self.rounds, 0].tolist(), strict=True):
            passes = 0
            for k, (before, last) in enumerate(pairwise(found), 2):
                if error_left_of_one(last, before) <= ENOUGH:
                    passes = k
                    break
            taken.append(passes)
        return taken

    def iterations(self, taken: list[int]) -> list[int]:
        """Of rows that took so many passes: two are one iteration, and rows that were not settled took all."""
        return [-(-passes // 2) or self.rounds for passes in taken]

    def known_steps(self, taken: list[int]) -> Tensor:
        """[B], of rows that took so many passes: see ``Solution.known_steps``. All where the loop went on, or digits of every state were
        asked for, by the caller or because something large hid them (``size_at_first``)."""
        atol, rtol, first = self.tolerance
        chunks = -(-self.blocks // self.chunk)
        known = torch.full((len(taken),), self.blocks)
        if first == 0:
            return known.to(self.found.device)
        even, odd = self.found[-chunks - 1 :].cpu().unbind(1)
        last = torch.tensor([(passes or 1) - 1 for passes in taken])
        sizes, before = torch.where(last % 2 == 0, even, odd), torch.where(last % 2 == 0, odd, even)
        tolerance = Tolerance(atol, rtol)
        scale = torch.maximum(size_at_first(sizes, before, rtol), sizes[1:])
        # What the ends of chunks tell, the layers before the first of them that is lost are known by.
        numbers = torch.tensor([*range(self.chunk, self.blocks, self.chunk), self.blocks])
        with_digits = tolerance.known_steps(sizes[1:].unsqueeze(-1), scale.unsqueeze(-1), numbers)
        known = torch.where(torch.tensor(taken) > 0, with_digits, known)
        return known.to(self.found.device)

    def solution(self) -> Solution:
        taken = self.passes_taken()
        results = tuple(Result.CONVERGED if passes else Result.FINISHED_BY_LOOP for passes in taken)
        device = self.found.device
        exact = [self.blocks if passes else min(self.blocks, (2 * self.rounds - 1) * self.chunk) for passes in taken]
        worst = max(results, key=lambda result: result.severity)
        last = torch.tensor([(passes or 1) - 1 for passes in taken], device=device)
        residual = self.found[:, 1].gather(0, last.unsqueeze(0))[0]
        plan = Plan(
            evaluation="fused kernels", derivative="analytic", linear="groups of chunks", chunk=self.chunk,
            notes=[self.note] if self.note else [],
        )  # fmt: skip
        return Solution(
            states=None,
            iterations=torch.tensor(self.iterations(taken), device=device),
            residual=torch.where(torch.tensor([passes > 0 for passes in taken], device=device), residual, 0.0),
            result=worst,
            results=results,
            exact_steps=torch.tensor(exact, device=device),
            updates=self.found[: 2 * self.rounds : 2, 0],
            plan=plan,
            description=worst.value.format(step=min(exact)),
            tolerance=Tolerance(*self.tolerance[:2], local=self.tolerance[2] == 0),
            dropped=Dropped(self.blocks, self.blocks, None, self.known_steps(taken)),
        )


def one_chunk(blocks: int, rows: int, device: torch.device) -> Solution:
    """How a pass over a single chunk went: there was nothing to solve."""
    plan = Plan(evaluation="fused kernels", derivative="analytic", linear="none", chunk=blocks)
    found = _exact(Result.CONVERGED, blocks, rows, device, plan, Result.CONVERGED.value)
    once = torch.ones_like(found.iterations)
    return replace(found, iterations=once, updates=torch.zeros(1, rows, device=device))


def looped(steps: int, rows: int, device: torch.device, why: str) -> Solution:
    """How a pass went that took one step after the other."""
    message = f"computed one step after the other: {why}"
    return _exact(Result.LOOP, steps, rows, device, Plan(chunk=steps, notes=[why]), message)


def _exact(result: Result, steps: int, rows: int, device: torch.device, plan: Plan, message: str) -> Solution:
    """Of a pass that left nothing to be found."""
    exact = torch.full((rows,), steps, device=device)
    return without_iterations(None, (result,) * rows, exact, plan, message)


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
