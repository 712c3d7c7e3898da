"""Newton's iteration on the chunks of a sequence, and its safeguards.

Shapes: L steps in N chunks of C, B rows, D the packed state. The unknowns are the states after the chunks, [N, B, D].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..convergence import Progress
from ..jacobian import block_bytes
from ..linear import Blocks, LinearSolver, solve_coupled
from ..runtime import is_out_of_memory
from ..sequence import Sequence
from ..solution import Plan, Result
from ..tolerance import Bounds
from .certificate import Certified
from .guess import Guess
from .newton import Newton
from .safeguards import ANY_ROUNDING, Safeguarded

#: So many tolerances a chunk that is evaluated once more may end beside where it was found to end: for steps that round almost as much.
GAP = 2


@dataclass(frozen=True)
class Outcome:
    """Where the iteration got to.

    Attributes:
        states: [L, B, D]
        results: how each row ended; NOT_CONVERGED and NON_FINITE rows are not to be trusted past their exact steps
        iterations, exact_steps: [B]
        updates: [iterations, B], the largest update in units of the tolerance
        reasons: why it ended early, where it did
        local: [B], rows of which digits of every state were asked for; None where that was done of none beside what the settings say
    """

    states: Tensor
    results: list[Result]
    iterations: Tensor
    exact_steps: Tensor
    updates: Tensor
    reasons: tuple[str, ...] = ()
    local: Tensor | None = None

    @staticmethod
    def of_loop(states: Tensor, result: Result, rows: int, exact: int) -> Outcome:
        """Of states that no iteration has found: how all rows end, how many they are, and how many of their steps are exact."""
        nothing = torch.zeros(rows, dtype=torch.long, device=states.device)
        return Outcome(states, [result] * rows, nothing, nothing + exact, torch.zeros(0, rows, device=states.device))

    def marked(self, otherwise: Result, at: Tensor) -> Outcome:
        """Rows that failed are NON_FINITE where the loop's states say so, ``otherwise`` where they do not.

        Args:
            at: [B], the first step after which they are not finite, or -1
        """
        results = [
            result if not result.failed and result is not otherwise else Result.NON_FINITE if index >= 0 else otherwise
            for result, index in zip(self.results, at.tolist(), strict=True)
        ]
        return replace(self, results=results, exact_steps=torch.where(at >= 0, at, self.exact_steps))

    @staticmethod
    def of(states: Tensor, run: Safeguarded[Any]) -> Outcome:
        progress = run.progress
        none = torch.zeros(0, progress.layout.rows, device=states.device)
        return Outcome(
            states=states,
            results=progress.results,
            iterations=progress.iterations,
            exact_steps=progress.exact_steps,
            updates=torch.stack(progress.updates) if progress.updates else none,
            reasons=run.reasons,
            local=progress.local,
        )


def run(newton: Newton, sequence: Sequence, guess: Guess, plan: Plan) -> Outcome:
    """Iterate until every row is finished or hopeless."""
    chunk = newton.choose_chunk(sequence, plan)
    plan.chunk = chunk
    try:
        return Iteration(newton, sequence, first_ends(sequence, guess, chunk), chunk, plan).run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(_memory_message(sequence, chunk)) from error


def first_ends(sequence: Sequence, guess: Guess, chunk: int) -> Tensor:
    """The states after the chunks that the iteration starts from, [N, B, D]."""
    ends = guess.states(sequence, range(chunk - 1, sequence.length, chunk))
    if len(ends) * chunk >= sequence.length:
        return ends
    # A ragged last chunk ends with the last step.
    return torch.cat([ends, guess.states(sequence, range(sequence.length - 1, sequence.length))])


class Iteration(Certified[Progress]):
    """One run in one process. ``progress`` knows which rows and chunks are finished.

    Args:
        ends: the unknowns to start from, [N, B, D]
    """

    sequence: Sequence
    ends: Tensor  # these are Safeguarded's: said again for type checkers, which infer what a subclass sets
    first: int
    reasons: tuple[str, ...]

    def __init__(self, newton: Newton, sequence: Sequence, ends: Tensor, chunk: int, plan: Plan):
        settings = newton.of_progress(sequence.layout.dtype)
        progress = Progress(sequence.layout, sequence.length, chunk, **settings)
        super().__init__(newton, progress, ends, chunk, plan)
        self.sequence = sequence
        self.linear: LinearSolver = newton.linear  # by which the last system was solved
        # From chunk `first` on, as of the last iteration: the Jacobians, and the chunks' ends as they came out before the update.
        self.blocks: Blocks | None = None
        self.values: Tensor = ends

    def run(self) -> Outcome:
        progress = self.progress
        tested = self.newton.stop.fixed is None
        while True:
            fresh = seen = None
            if progress.count and tested:
                # After an update: was it enough? With true Jacobians a look at the residual is far cheaper than
                # linearising again; otherwise linearising is all there is. (A graph through the iterations is built
                # of whole ones only.)
                fresh = None if self.newton.quadratic else self.linearise()
                if fresh is not None or not torch.is_grad_enabled():
                    values, looked_at = self.evaluate() if fresh is None else fresh[0], self.ends
                    self.look(values)
                    seen = values if self.ends is looked_at else None
            if not progress.active.any() or progress.count >= progress.limit:
                break
            hopeless = progress.why_hopeless() if tested else None
            if hopeless:
                if not self.roll_on():
                    self.reasons = (*self.reasons, hopeless)
                    self.plan.note(hopeless)
                    break
                if not progress.active.any():
                    break
                fresh = seen = None  # what was seen is of other states
            passed = int(progress.prefix[progress.active].min()) - self.first
            self.first += passed
            if self.first >= progress.chunks:  # all of it is exact: further iterations would change nothing
                break
            if fresh is None:
                self.update(*self.linearise(None if seen is None else seen[passed:]))
            else:
                self.update(fresh[0][passed:], fresh[1][passed:])
        if not tested:
            progress.finish(progress.active, Result.ITERATIONS_DONE)
        elif not self.newton.quadratic and self.newton.stop.promises:
            self.certify()
        return self.outcome()

    # Where Python branches on values; a run that is being recorded cannot.

    looks = True

    def needs_safeguard(self, flags: Tensor) -> bool:
        """Whether any of ``flags`` is set, which calls for a safeguard."""
        return bool(flags.any())

    def changes_states(self, flags: Tensor) -> bool:
        """Whether any of ``flags`` is set, and states are about to be changed after they were looked at."""
        return bool(flags.any())

    def is_worth_it(self, flags: Tensor) -> bool:
        """Whether any of ``flags`` is set; if not, some work is spared that would change nothing."""
        return bool(flags.any())

    @property
    def before(self) -> Tensor:
        return self.sequence.initial

    def tell(self, **measures: Tensor) -> dict[str, Tensor]:
        return measures

    def hides(self, sizes: Tensor, errors: Tensor, closer: Tensor | None = None) -> Tensor:
        return self.progress.tolerance.hides(sizes, self.before, errors, closer)

    def bounds_by_blocks(self) -> Bounds:
        """By the last Jacobians."""
        return self.bounds(None if self.blocks is None else self.blocks.apply)

    def evaluate(self, ends: Tensor | None = None) -> Tensor:
        starts = self.starts()
        if ends is not None:
            starts = torch.cat([self.before.unsqueeze(0), ends[:-1]])[self.first :]
        return self.roll_out(starts)

    def roll_out(self, starts: Tensor) -> Tensor:
        return self.sequence.roll_out(starts, self.chunk, self.first)[0]

    def push(self, tangents: Tensor) -> Tensor:
        return self.sequence.push_out(self.starts(), tangents.unsqueeze(1), self.chunk, self.first)[1].squeeze(1)

    def linearise(self, ends: Tensor | None = None) -> tuple[Tensor, Blocks]:
        """The chunks' ends as they come out, given where they are known, and the Jacobians."""
        self.blocks = None  # nobody looks at the last ones any more, and both at once take twice the memory
        return self.newton.jacobian.linearise(self.sequence, self.starts(), self.chunk, self.first, ends)

    def update(self, values: Tensor, blocks: Blocks) -> None:
        """One iteration: solve the linearised system and apply the update.

        Args:
            values: [n, B, D], the chunks' ends as they come out of their starts
            blocks: n Jacobians
        """
        progress, ends = self.progress, self.ends[self.first :]
        frozen, next_exact = progress.frozen(self.first)
        # A value that is not finite: from an exact start it is the sequence's own.
        finite = torch.isfinite(values).all(-1) | frozen
        if self.needs_safeguard(~finite):
            progress.finish((~finite & next_exact).any(0), Result.NON_FINITE)
            frozen, next_exact = progress.frozen(self.first)
            blocks = blocks.where(finite & ~frozen)
        residual, delta = self.correct(values, blocks, finite, frozen, next_exact)
        self.blocks, self.values = blocks, torch.where(finite.unsqueeze(-1), values, ends).detach()
        with torch.no_grad():
            delta, bounds = delta.detach(), self.bounds_by_blocks()
            progress.judge(self.first, frozen, finite, residual.detach(), delta, bounds)
            if self.newton.stop.promises and self.needs_safeguard(progress.stuck):
                self.end_stuck(self.values, delta, blocks, bounds)

    def solve(self, blocks: Blocks, residual: Tensor) -> Tensor:
        couplings = blocks[1:]
        self.linear = self.choose(couplings)
        # Not refined: the next iteration starts from the residual that is left, and so is the refinement.
        return solve_coupled(couplings, residual, reverse=False, solver=self.linear, look=self.looks, refined=False)

    @torch.no_grad()
    def look(self, values: Tensor) -> None:
        """After an update, with the ends that come out of it: finish the rows that need no further iteration."""
        progress, ends = self.progress, self.ends[self.first :]
        residual = torch.where(progress.active.unsqueeze(-1), values - ends, 0)
        candidates = progress.active & progress.residual_suffices(residual)
        if self.newton.stop.by_residual:
            progress.finish(candidates, Result.CONVERGED)
        elif self.newton.quadratic:
            bounds = self.bounds_by_blocks()
            candidates &= (bounds.ratio(residual) <= 1).all(0)
            if self.is_worth_it(candidates):
                # The update that the last Jacobians give for the new residual estimates the error that is left.
                assert self.blocks is not None
                delta = self.solve(self.blocks, torch.where(candidates.unsqueeze(-1), residual, 0))
                update = bounds.ratio(delta)
                done = candidates & (progress.error_left(update) <= 1).all(0)
                hidden, nearest = self.hidden_among(done, ends, values, delta, self.blocks, bounds)
                if hidden is not None:
                    progress.look_closer(hidden)
                    done = done & ~hidden
                if self.is_worth_it(done):
                    self.replace(torch.where(done.unsqueeze(-1), ends + delta if nearest is None else nearest, ends))
                progress.finish(done, Result.CONVERGED)
        self.call_back(residual)

    def call_back(self, residual: Tensor) -> None:
        """States that an update threw far away, to where the step says they do not belong, get their step values back."""
        thrown, _ = self.find_thrown(residual, self.values, self.values.abs().amax(0))
        if self.changes_states(thrown):
            self.replace(torch.where(thrown.unsqueeze(-1), self.values, self.ends[self.first :]))

    def has_derivative_at_ends(self) -> Tensor:
        blocks = self.blocks
        found = super().has_derivative_at_ends()
        self.blocks = blocks  # which are looked at again
        return found

    def states(self) -> Tensor:
        """Every state, [L, B, D]."""
        if self.chunk == 1:
            return self.ends
        self.first = 0
        rolled, states = self.sequence.roll_out(self.starts(), self.chunk)
        # Not always the ends that the iteration saw: as many chunks at once may round otherwise than some of them, and in a
        # chaotic sequence that is seen at the end of a chunk.
        gap = self.bounds(ANY_ROUNDING).ratio((rolled - self.ends).detach())
        self.progress.join(self.progress.leading(gap <= GAP))
        return states

    def outcome(self) -> Outcome:
        return Outcome.of(self.states(), self)


def _memory_message(sequence: Sequence, chunk: int) -> str:
    layout, length = sequence.layout, sequence.length

    def gigabytes(chunk: int) -> str:
        return f"{4 * block_bytes(sequence) * -(-length // chunk) / 2**30:.2f} GiB"

    larger = min(16 * chunk, length)
    elementwise = 4 * length * layout.rows * layout.width * layout.dtype.itemsize / 2**30
    free = ""
    if layout.device.type == "cuda":
        free = f" ({torch.cuda.mem_get_info(layout.device)[0] / 2**30:.2f} GiB are free)"
    return (
        f"out of memory: {length} steps in chunks of {chunk}, {layout.rows} rows of width {layout.width}: dense blocks need "
        f"about {gigabytes(chunk)}{free}. With chunk={larger} they need {gigabytes(larger)}; DiagonalJacobian, "
        f"HutchinsonJacobian and ScalarJacobian need at most {elementwise:.2f} GiB"
    )
