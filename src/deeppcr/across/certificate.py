"""Is what the ranks found the solution? Their steps are asked, by products with their Jacobians: see ``deeppcr.newton.certificate``.

Shapes: N chunks on this rank, B rows, D the packed state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..convergence import NEGLIGIBLE, still_to_come
from ..linear import Blocks
from ..newton import Newton
from ..newton.certificate import ANOTHER, FALSE_DERIVATIVE, ROUNDINGS, TAKEN_BACK, noise_of, small_change
from ..newton.safeguards import Safeguarded, largest_of
from ..sequence.evaluate import StepError
from ..solution import Plan, Result
from .part import Part
from .progress import Shared


class Certified(Safeguarded[Shared]):
    """What an iteration over ranks asks of what it found."""

    entry: Tensor
    ends: Tensor  # these are Safeguarded's: said again for type checkers, which infer what a subclass sets
    first: int
    reasons: tuple[str, ...]

    def __init__(self, newton: Newton, part: Part, ends: Tensor, chunk: int, plan: Plan):
        super().__init__(newton, Shared(part, newton, chunk), ends, chunk, plan)
        self.part: Part = part

    def linearise(self) -> tuple[Tensor, Blocks]:
        raise NotImplementedError

    def has_derivative_at_ends(self) -> Tensor:
        values, blocks = self.linearise()
        return self.has_derivative(values, blocks.apply)

    @torch.no_grad()
    def has_derivative_anywhere(self) -> Tensor:
        """[B]: the same of all chunks."""
        self.first = 0
        return self.has_derivative_at_ends()

    def has_derivative(self, values: Tensor, push: Callable[[Tensor], Tensor]) -> Tensor:
        """[B]: whether chunks from ``first`` on, which lead to ``values``, change as products ``push`` say: see ``certificate``."""
        starts, rtol, part = self.starts(), self.progress.tolerance.rtol, self.part
        sums = [torch.zeros_like(self.entry, dtype=torch.float64) for _ in range(4)]
        if part.sequence is not None and len(starts):
            with part.trouble.kept():
                change = small_change(starts, rtol)
                changed = part.sequence.roll_out(starts + change, self.chunk, self.first)[0] - values
                foreseen = push(change)
                sums = [each.abs().sum(0).double() for each in (changed - foreseen, changed, foreseen)]
                sums.append(values.abs().amax(0).double())
        part.ranks.agree(part.trouble.take())
        off, seen, told, _ = part.ranks.total(torch.stack(sums)) / self.progress.chunks
        largest = part.ranks.maximum(sums[3].nan_to_num(math.inf, math.inf))
        noise = noise_of(values.dtype, rtol)
        return (off <= ANOTHER * torch.maximum(seen, told) + noise * largest).all(-1)

    def certify(self) -> None:
        """What approximate Jacobians found, seen by the true ones: see ``certificate.certify``."""
        progress, part, self.first = self.progress, self.part, 0
        claimed = progress.codes <= Result.PRECISION_FLOOR.severity
        claimed &= progress.iterations < progress.chunks
        if not claimed.any():
            return
        values, blocks = self.linearise()
        residual = torch.where(claimed.unsqueeze(-1), values - self.ends, 0)

        def push(tangents: Tensor) -> Tensor:
            if part.sequence is None:
                return tangents
            return part.sequence.push_out(self.starts(), tangents.unsqueeze(1), self.chunk)[1].squeeze(1)

        cannot = False
        with part.trouble.kept():
            try:
                push(torch.zeros_like(self.ends))
            except StepError:
                cannot = True
        if any(each for (each,) in part.ranks.agree(part.trouble.take(), cannot)):
            progress.withdraw(claimed, Result.UNCERTIFIED)
            self._not_certified("the step cannot be differentiated")
            return
        bounds = self.bounds(push)
        error, known = self._error(push, bounds.rounding, residual, blocks)
        true = self.has_derivative(values, push)
        ratio, rounded = bounds.ratio(error), (error.abs() > 100 * bounds.rounding).any(-1)
        faint = progress.tolerance.is_faint(self.ends, bounds.scale)
        _, _, (worst, beyond, faint) = part.meet(self.ends, largest_of(ratio), largest_of(rounded.double()), faint)
        small, is_rounding = worst <= torch.where(true & known, TAKEN_BACK, 1), beyond == 0
        progress.withdraw(claimed & ~small & is_rounding, Result.PRECISION_FLOOR)
        floor = progress.codes == Result.PRECISION_FLOOR.severity
        small |= floor & is_rounding
        lost = claimed & (~small | (floor & ~true))
        if not progress.tolerance.local and ((faint > 0) & claimed).any():
            sizes = torch.maximum(self.ends.abs(), values.abs())
            lost |= claimed & self.hides(sizes, error.abs(), (self.ends + error).abs())
        progress.withdraw(lost)
        progress.withdraw(claimed & ~lost & ~(true & known), Result.UNCERTIFIED)
        if (claimed & ~lost & ~true).any():
            self._not_certified(FALSE_DERIVATIVE)
        if (claimed & ~lost & true & ~known).any():
            self._not_certified("products with the true Jacobians did not converge")
        self.ends = torch.where((claimed & ~lost & true & known).unsqueeze(-1), self.ends + error, self.ends)
        self.tell()

    def _not_certified(self, why: str) -> None:
        self.reasons = (*self.reasons, why)
        self.plan.note(f"not certified: {why}")

    def _error(
        self, push: Callable[[Tensor], Tensor], rounding: Tensor, residual: Tensor, blocks: Blocks
    ) -> tuple[Tensor, Tensor]:
        """The error of the ends to first order, and which rows it is known of, [B]: ``certificate.error_by_products`` over ranks."""
        error, missing, largest = torch.zeros_like(residual), residual, torch.zeros_like(self.entry)
        rounds, eps, part = self.progress.limit, self.progress.eps, self.part
        while True:
            change = part.solve(blocks, missing, self.newton.linear)
            error = error + change
            size, allowed = change.abs(), ROUNDINGS * torch.maximum(rounding, eps * error.abs())
            creeping = torch.where(size <= NEGLIGIBLE * allowed, 0, size / allowed).nan_to_num(math.inf, math.inf)
            entry, _, found = part.meet(error, largest_of(size).nan_to_num(math.inf, math.inf), largest_of(creeping))
            before, largest = largest, found[0].to(error.dtype)
            falling = found[1] * still_to_come(largest, before).double() <= 1
            known = ((found[1] == 0) | falling).all(-1)
            rounds -= 1
            if rounds == 0 or known.all() or not torch.isfinite(largest).all():
                return error, known
            if part.is_first:
                entry = torch.zeros_like(entry)
            if len(error):
                with part.trouble.kept():
                    missing = residual + push(torch.cat([entry.unsqueeze(0), error[:-1]])) - error
