"""Newton's iteration in a straight line: without a look at values, so that a CUDA graph can hold it.

Shapes: L steps in chunks of C, B rows, D the packed state.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..linear import Blocks
from ..newton import Newton
from ..newton.guess import Guess
from ..newton.iteration import Iteration, Outcome, first_ends
from ..sequence import Sequence
from ..solution import Plan, Result
from ..tolerance import Bounds


class Noting(Iteration):
    """Work that may be needed is done, and what would need more is noted: whoever can read the note does it anew."""

    sizes: Tensor
    errors: Tensor

    looks = False

    def __init__(self, newton: Newton, sequence: Sequence, ends: Tensor, chunk: int, plan: Plan):
        super().__init__(newton, sequence, ends, chunk, plan)
        self.unusual: Tensor = torch.zeros((), dtype=torch.bool, device=ends.device)
        self.stale: Tensor = self.unusual  # whether states were changed after they were looked at
        # Of rows that are done, as they were found to be when they were.
        self.sizes = self.errors = torch.zeros_like(ends)

    def needs_safeguard(self, flags: Tensor) -> bool:
        self.unusual = self.unusual | flags.any()
        return False

    def changes_states(self, flags: Tensor) -> bool:
        self.stale = flags.any()
        return True

    def is_worth_it(self, flags: Tensor) -> bool:
        return True

    def hidden_among(
        self, done: Tensor, ends: Tensor, values: Tensor, errors: Tensor, blocks: Blocks, bounds: Bounds
    ) -> tuple[None, None]:
        """Whether something is hidden is seen at the end, once."""
        self.errors = torch.where(done.unsqueeze(-1), errors, self.errors)
        self.sizes = torch.where(done.unsqueeze(-1), torch.maximum(ends.abs(), values.abs()), self.sizes)
        return None, None

    def solve(self, blocks: Blocks, residual: Tensor) -> Tensor:
        delta = super().solve(blocks, residual)
        self.needs_safeguard(~(delta.abs().amax() < math.inf))
        return delta


class Masking(Iteration):
    """A fixed number of iterations; the safeguards are all done, by masks, and a row that fails ends in NaN.

    Its result is ITERATIONS_DONE all the same, since nobody can read it: fewer than all of its steps are exact.
    """

    looks = False

    def needs_safeguard(self, flags: Tensor) -> bool:
        return True

    def solve(self, blocks: Blocks, residual: Tensor) -> Tensor:
        delta = super().solve(blocks, residual)
        if self.linear.overflows:
            # A product of blocks may have overflowed where the solution does not, which takes a look to mend.
            self.progress.finish(~torch.isfinite(delta).all(-1).all(0), Result.NOT_CONVERGED)
        return delta

    def run(self) -> Outcome:
        assert self.newton.stop.fixed is not None
        # A guess that is not finite spoils its row from the start.
        self.progress.finish(~torch.isfinite(self.ends).all(-1).all(0), Result.NOT_CONVERGED)
        # Each iteration makes one more chunk exact: after all of them there is nothing left to change.
        for _ in range(min(self.newton.stop.fixed, self.progress.chunks)):
            self.update(*self.linearise())
        self.progress.finish(self.progress.active, Result.ITERATIONS_DONE)
        return self.outcome()

    def outcome(self) -> Outcome:
        states, progress = self.states(), self.progress
        steps = torch.arange(self.sequence.length, device=states.device).unsqueeze(1)
        lost = steps >= progress.exact_steps  # of rows that are not ITERATIONS_DONE
        return Outcome(
            states=states.where(~lost.unsqueeze(-1), math.nan),
            results=[Result.ITERATIONS_DONE] * self.sequence.layout.rows,
            iterations=progress.iterations,
            exact_steps=progress.exact_steps,
            updates=torch.stack(progress.updates),
        )


@torch.no_grad()
def run_unseen(newton: Newton, sequence: Sequence, guess: Guess, plan: Plan) -> Outcome:
    """A fixed number of iterations, without a look at values."""
    plan.chunk = newton.choose_chunk(sequence, plan)
    return Masking(newton, sequence, first_ends(sequence, guess, plan.chunk), plan.chunk, plan).run()
