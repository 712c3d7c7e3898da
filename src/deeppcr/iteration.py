"""Newton's iteration on the chunks of a sequence, and its safeguards.

Shapes: L steps in N chunks of C, B rows, D the packed state. The unknowns are the states after the chunks, [N, B, D].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .certificate import FALSE_DERIVATIVE, certify, has_derivative
from .convergence import Progress
from .guess import Guess
from .jacobian import block_bytes
from .linear import Blocks, LinearSolver, solve_coupled
from .newton import Newton
from .runtime import is_out_of_memory
from .sequence import Sequence
from .solution import Plan, Result
from .tolerance import Bounds

#: A state is far away when it is this many times larger than its step value was before the update.
FAR = 10.0
#: So many tolerances a chunk that is evaluated once more may end beside where it was found to end: for steps that round almost as much.
GAP = 2
#: So many times what is faint is corrected to see whether it is a signal that lives on, or noise.
_CLOSER_LOOKS = 4
#: For ``Progress.bounds`` where nobody knows what a step rounds: no more than the largest number beside it does.
ANY_ROUNDING = partial(torch.full_like, fill_value=math.inf)


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


class Iteration:
    """One run: the unknowns and what is done to them. ``progress`` knows which rows and chunks are finished.

    Args:
        ends: the unknowns to start from, [N, B, D]
    """

    newton: Newton
    sequence: Sequence
    chunk: int
    plan: Plan
    guess: Tensor
    rolled_on: bool

    def __init__(self, newton: Newton, sequence: Sequence, ends: Tensor, chunk: int, plan: Plan):
        self.newton, self.sequence, self.chunk, self.plan = newton, sequence, chunk, plan
        self.progress: Progress = Progress(
            sequence.layout,
            sequence.length,
            chunk,
            tolerance=newton.tolerance(sequence.layout.dtype),
            quadratic=newton.quadratic,
            stop=newton.stop,
            max_iterations=newton.max_iterations,
            compare_with_loop=newton.chunk == "auto" and newton.quadratic,
        )
        self.linear: LinearSolver = newton.linear  # by which the last system was solved
        self.ends: Tensor = ends  # always finite
        self.guess, self.rolled_on = ends, False
        # From chunk `first` on (those before are finished in every active row and no longer evaluated), as of the last
        # iteration: the Jacobians, and the chunks' ends as they came out before the update.
        self.first: int = 0
        self.blocks: Blocks | None = None
        self.values: Tensor = ends
        self.reasons: tuple[str, ...] = ()

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

    def starts(self) -> Tensor:
        return torch.cat([self.sequence.initial.unsqueeze(0), self.ends[:-1]])[self.first :]

    def bounds(self) -> Bounds:
        """What differences of the states are held against, by the last Jacobians."""
        products = None if self.blocks is None else self.blocks.apply
        if products is not None and not self.newton.quadratic:
            # They do not tell what a step rounds; what they find is certified by itself.
            products = ANY_ROUNDING
        return self.progress.bounds(self.ends, self.sequence.initial, self.first, products)

    def evaluate(self) -> Tensor:
        return self.sequence.roll_out(self.starts(), self.chunk, self.first)[0]

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

        # A value that is not finite: from an exact start it is the sequence's own; elsewhere the iterate has strayed, and
        # the chain is cut there for this time so that it spoils no other state.
        finite = torch.isfinite(values).all(-1) | frozen
        if self.needs_safeguard(~finite):
            progress.finish((~finite & next_exact).any(0), Result.NON_FINITE)
            frozen, next_exact = progress.frozen(self.first)
            blocks = blocks.where(finite & ~frozen)
        residual = torch.where((finite & ~frozen).unsqueeze(-1), values - ends, 0)
        delta = self.solve(blocks, residual)

        moved = ends + delta
        moved = torch.where(torch.isfinite(moved).all(-1, keepdim=True), moved, values)
        moved = torch.where(next_exact.unsqueeze(-1), values, moved)  # exact, whatever else happens
        usable = torch.isfinite(moved).all(-1) & ~frozen
        moved = torch.where(usable.unsqueeze(-1), moved, ends)
        self.replace(moved)
        self.blocks, self.values = blocks, torch.where(finite.unsqueeze(-1), values, ends).detach()
        with torch.no_grad():
            bounds = self.bounds()
            progress.judge(self.first, frozen, finite, residual.detach(), delta.detach(), bounds)
            if self.newton.stop.promises and self.needs_safeguard(progress.stuck):
                self.end_stuck(delta.detach())

    def solve(self, blocks: Blocks, residual: Tensor) -> Tensor:
        if self.newton.shrink != 1.0:
            blocks = type(blocks)(blocks.data * self.newton.shrink)
        couplings = blocks[1:]
        self.linear, why = self.newton.linear.choose(couplings)
        self.plan.linear = f"{self.linear} ({why})" if why else str(self.linear)
        # Not refined: the next iteration starts from the residual that is left, and so is the refinement.
        return solve_coupled(couplings, residual, reverse=False, solver=self.linear, look=self.looks, refined=False)

    def replace(self, ends: Tensor) -> None:
        self.ends = torch.cat([self.ends[: self.first], ends])

    @torch.no_grad()
    def look(self, values: Tensor) -> None:
        """After an update, with the ends that come out of it: finish the rows that need no further iteration."""
        progress, ends = self.progress, self.ends[self.first :]
        residual = torch.where(progress.active.unsqueeze(-1), values - ends, 0)
        candidates = progress.active & progress.residual_suffices(residual)
        if self.newton.stop.by_residual:
            progress.finish(candidates, Result.CONVERGED)
        elif self.newton.quadratic:
            bounds = self.bounds()
            candidates &= (bounds.ratio(residual) <= 1).all(0)
            if self.is_worth_it(candidates):
                # The update that the last Jacobians give for the new residual estimates the error that is left.
                assert self.blocks is not None
                delta = self.solve(self.blocks, torch.where(candidates.unsqueeze(-1), residual, 0))
                update = bounds.ratio(delta)
                done = candidates & (progress.error_left(update) <= 1).all(0)
                done = self.without_hidden(done, values, delta, bounds)
                if self.is_worth_it(done):
                    self.replace(torch.where(done.unsqueeze(-1), ends + delta, ends))
                progress.finish(done, Result.CONVERGED)
        self.call_back(residual)

    def without_hidden(self, done: Tensor, values: Tensor, errors: Tensor, bounds: Bounds) -> Tensor:
        """Of rows [B] that seem to be done, those of which no transient hides that later states are not known; the others are looked at
        more closely from now on.

        Args:
            values, errors: [n, B, D], from chunk ``first`` on: the ends as they come out, which live where those that were found may not yet,
                and by how much the ends may be off
        """
        progress, ends, tolerance = self.progress, self.ends[self.first :], self.progress.tolerance
        if tolerance.local or not ((ends.abs() <= tolerance.faint * bounds.scale) & done.unsqueeze(-1)).any():
            return done
        unknown = done if progress.local is None else done & ~progress.local
        hidden = self.find_hidden(unknown, values, errors)
        if hidden.any():
            self.plan.note(
                f"after {progress.count} iterations states of a time when they were large hid what came after them: from there on "
                'digits of every state were asked for, as by Newton(scale="local")'
            )
            progress.look_closer(hidden)
        return done & ~hidden

    def find_hidden(self, rows: Tensor, values: Tensor, errors: Tensor) -> Tensor:
        """[B]: in which of the rows what was large once hides that later states are not known.

        What is left of an iterate where the signal has died is noise, and as steady as a signal that lives: but noise falls with every
        correction by the last Jacobians, and a signal stays.
        """
        exact, ends, hides = self.ends[: self.first], self.ends[self.first :], self.progress.tolerance.hides
        initial, hidden, rows = self.sequence.initial, torch.zeros_like(rows), rows.clone()
        sizes = torch.cat([exact, torch.maximum(ends.abs(), values.abs())])
        for _ in range(_CLOSER_LOOKS):
            off = torch.cat([torch.zeros_like(exact), errors])
            rows &= hides(sizes, initial, off)
            if not rows.any():
                return hidden
            ends = ends + errors
            starts = torch.cat([initial.unsqueeze(0), exact, ends[:-1]])[self.first :]
            values, _ = self.sequence.roll_out(starts, self.chunk, self.first)
            closer = torch.cat([exact, torch.maximum(ends.abs(), values.abs())])
            lives = rows & (hides(sizes, initial, off, closer) | ~torch.isfinite(values).all(-1).all(0))
            hidden, rows = hidden | lives, rows & ~lives
            assert self.blocks is not None
            sizes, errors = closer, self.solve(self.blocks, torch.where(rows.unsqueeze(-1), values - ends, 0))
        return hidden  # what fell every time is noise

    def call_back(self, residual: Tensor) -> None:
        """States that an update threw far away, to where the step says they do not belong, get their step values back.

        Left alone they return by one contraction an iteration, if at all. An update that is large because the
        sequence grows leaves a small residual, and stays.
        """
        ends = self.ends[self.first :]
        # Every component in units of its own: of the largest that it was anywhere.
        unit = self.values.abs().amax(0).clamp(min=torch.finfo(ends.dtype).tiny)
        size = (ends / unit).abs().amax(-1)
        far = (size > FAR * (self.values / unit).abs().amax(-1)) & self.progress.active
        wrong = far & ((residual / unit).abs().amax(-1) > 0.1 * size)
        # What follows a wrong state was thrown with it.
        thrown = far & (self.progress.index[self.first :] >= self.progress.leading(~wrong, self.first))
        if self.changes_states(thrown):
            self.replace(torch.where(thrown.unsqueeze(-1), self.values, ends))

    @torch.no_grad()  # nobody differentiates through iterations that are judged
    def roll_on(self) -> bool:
        """Where Newton is hopeless from the guess, roll the chunks out from it, again and again, each from the last end before it.

        Steps that contract forget where they started: what linearising far from the trajectory throws about comes near it by
        itself. Each time takes as many dependent steps as the loop does for the chunk that becomes exact by it. So this is
        tried once, while residuals fall, for half of what is left; and done to the end where all of the solve still takes
        half of the loop's dependent steps.

        Returns:
            whether the iteration is worth going on with
        """
        progress, ends = self.progress, self.ends[self.first :]
        left = progress.chunks - int(progress.prefix[progress.active].min())
        to_the_end = 2 * progress.count + left <= progress.chunks // 2  # an iteration rolls out twice
        if not progress.compare_with_loop or (self.rolled_on and not to_the_end):
            return False
        self.rolled_on = True
        most = left if to_the_end else left // 2
        frozen, _ = progress.frozen(self.first)
        self.replace(torch.where(frozen.unsqueeze(-1), ends, self.guess[self.first :]))
        residuals: list[Tensor] = []  # [B] each, in units of the tolerance
        while len(residuals) < most and (to_the_end or progress.falls(residuals)):
            before, values = self.ends[self.first :], self.evaluate()
            finite = torch.isfinite(values).all(-1)
            off = progress.bounds(self.ends, self.sequence.initial, self.first).ratio(values - before)
            residuals.append(torch.where(frozen, 0, off).amax(0))
            self.replace(torch.where((finite & ~frozen).unsqueeze(-1), values, before))
        return self._keep_what_came_near(ends, residuals)

    def _keep_what_came_near(self, ends: Tensor, residuals: list[Tensor]) -> bool:
        """After the chunks were rolled out: rows that are no nearer get their ``ends`` [n, B, D] back, but for what is exact now."""
        progress, times = self.progress, len(residuals)
        if not times:
            return progress.is_early
        finite = torch.isfinite(torch.stack(residuals)).all(0)
        near = progress.active & finite & progress.came_near(residuals[0], residuals[-1])
        self.plan.note(
            f"after {progress.count} iterations the chunks were rolled out {times} times from the guess: "
            f"{int(near.sum())} of {int(progress.active.sum())} rows came near"
        )
        progress.advance(finite, times)
        exact = progress.index[self.first :] < progress.prefix
        self.replace(torch.where((near | exact).unsqueeze(-1), self.ends[self.first :], ends))
        return progress.is_early or bool(near.any()) or not progress.active.any()

    def end_stuck(self, delta: Tensor) -> None:
        """Rows whose updates ``delta`` stay small and shrink no more: rounding is all that is left, or the Jacobians are not the step's.

        Approximate ones may be anything: what they found is seen by ``certify``.
        """
        progress, sequence, chunk, first = self.progress, self.sequence, self.chunk, self.first
        if self.newton.quadratic:
            progress.stuck = self.without_hidden(progress.stuck, self.values, delta, self.bounds())
            starts = self.starts()
            values, blocks = self.newton.jacobian.linearise(sequence, starts, chunk, first)
            true = has_derivative(sequence, starts, values, blocks.apply, chunk, first, progress.tolerance.rtol)
            if (progress.stuck & ~true).any():
                self.reasons = (FALSE_DERIVATIVE,)
                progress.finish(progress.stuck & ~true, Result.NOT_CONVERGED)
        progress.finish(progress.stuck, Result.PRECISION_FLOOR)

    @torch.no_grad()
    def certify(self) -> None:
        self.first = 0
        newton, starts = self.newton, self.starts()
        self.ends, why = certify(self.sequence, newton.jacobian, newton.linear, self.progress, starts, self.ends)
        self.reasons = (*self.reasons, *why)
        for each in why:
            self.plan.note(f"not certified: {each}")

    def states(self) -> Tensor:
        """Every state, [L, B, D]."""
        if self.chunk == 1:
            return self.ends
        self.first = 0
        rolled, states = self.sequence.roll_out(self.starts(), self.chunk)
        # Not always the ends that the iteration saw: as many chunks at once may round otherwise than some of them, and in a
        # chaotic sequence that is seen at the end of a chunk.
        bounds = self.progress.bounds(self.ends, self.sequence.initial, 0, ANY_ROUNDING)
        self.progress.join(bounds.ratio((rolled - self.ends).detach()) <= GAP)
        return states

    def outcome(self) -> Outcome:
        states, progress = self.states(), self.progress
        none = torch.zeros(0, self.sequence.layout.rows, device=states.device)
        return Outcome(
            states=states,
            results=progress.results,
            iterations=progress.iterations,
            exact_steps=progress.exact_steps,
            updates=torch.stack(progress.updates) if progress.updates else none,
            reasons=self.reasons,
            local=progress.local,
        )


def _memory_message(sequence: Sequence, chunk: int) -> str:
    layout, length = sequence.layout, sequence.length

    def gigabytes(chunk: int) -> str:
        return f"{4 * block_bytes(sequence) * -(-length // chunk) / 2**30:.2f} GiB"

    larger = min(16 * chunk, length)
    elementwise = 4 * length * layout.rows * layout.width * layout.dtype.itemsize / 2**30
    free = (
        f" ({torch.cuda.mem_get_info(layout.device)[0] / 2**30:.2f} GiB are free)"
        if layout.device.type == "cuda"
        else ""
    )
    return (
        f"out of memory: {length} steps in chunks of {chunk}, {layout.rows} rows of width {layout.width}: dense blocks need "
        f"about {gigabytes(chunk)}{free}. With chunk={larger} they need {gigabytes(larger)}; DiagonalJacobian, "
        f"HutchinsonJacobian and ScalarJacobian need at most {elementwise:.2f} GiB"
    )
