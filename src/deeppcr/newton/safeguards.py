"""The unknowns of Newton's iteration, and what is done to them where updates alone would not do: in one process, or on ranks that each hold a
part of them.

Shapes: N chunks of C steps (n of them from chunk ``first`` on), B rows, D the packed state. Over ranks these are the chunks of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..convergence import Progress
from ..linear import Blocks, LinearSolver
from ..solution import Plan, Result
from ..tolerance import Bounds
from .newton import Newton

#: Why updates, and products with Jacobians, may say nothing of the error.
FALSE_DERIVATIVE = (
    "the step's values do not change as its derivative says (detach, rounding, a straight-through estimate?)"
)
#: A state is far away when it is this many times larger than its step value was before the update.
FAR = 10.0
#: So many times what is faint is corrected to see whether it is a signal that lives on, or noise.
_CLOSER_LOOKS = 4
#: For ``Progress.bounds`` where nobody knows what a step rounds: no more than the largest number beside it does.
ANY_ROUNDING = partial(torch.full_like, fill_value=math.inf)
_Progress = TypeVar("_Progress", bound=Progress)


class Safeguarded(Generic[_Progress]):
    """One run: its unknowns, how an update is applied to them, and its safeguards.

    How often a run looks, and at what, is up to who derives from this: in one process a look takes an evaluation of the steps and spares
    their Jacobians; over ranks what costs is a message, and so an iteration is a look at the one before.

    Attributes:
        ends: [N, B, D], the unknowns; always finite
        guess: [N, B, D], those that the run started from
        first: chunks before it are finished in every active row, and no longer evaluated
    """

    newton: Newton
    progress: _Progress
    chunk: int
    plan: Plan
    ends: Tensor
    guess: Tensor
    first: int
    rolled_on: bool
    reasons: tuple[str, ...]

    def __init__(self, newton: Newton, progress: _Progress, ends: Tensor, chunk: int, plan: Plan):
        self.newton, self.progress, self.chunk, self.plan = newton, progress, chunk, plan
        self.ends = self.guess = ends
        self.first, self.rolled_on = 0, False
        self.reasons = ()

    # What a run has to know: of all chunks, wherever they are.

    @property
    def before(self) -> Tensor:
        """[B, D], the state before the first chunk."""
        raise NotImplementedError

    def tell(self, **measures: Tensor) -> dict[str, Tensor]:
        """After the ends have changed: the largest of each measure that anybody has."""
        raise NotImplementedError

    def linearise(self) -> tuple[Tensor, Blocks]:
        """The chunks' ends from ``first`` on as they come out, and their Jacobians."""
        raise NotImplementedError

    def roll_out(self, starts: Tensor) -> Tensor:
        """[n, B, D], the chunks' ends as they come out of these starts."""
        raise NotImplementedError

    def evaluate(self, ends: Tensor | None = None) -> Tensor:
        """[n, B, D], the chunks' ends as they come out of the ends [N, B, D] before them, or of others."""
        raise NotImplementedError

    def solve(self, blocks: Blocks, residual: Tensor) -> Tensor:
        """[n, B, D], the update for a residual."""
        raise NotImplementedError

    def hides(self, sizes: Tensor, errors: Tensor, closer: Tensor | None = None) -> Tensor:
        """``Tolerance.hides`` of all chunks; [N, B, D] each."""
        raise NotImplementedError

    def has_derivative_at_ends(self) -> Tensor:
        """[B]: whether the chunks from ``first`` on change as their Jacobians say."""
        raise NotImplementedError

    def scale(self) -> Tensor | None:
        """[N, B, D], the size that numbers have, where it does not come from these states alone."""
        return None

    # What all have in common.

    def starts(self) -> Tensor:
        return torch.cat([self.before.unsqueeze(0), self.ends[:-1]])[self.first :]

    def replace(self, ends: Tensor) -> None:
        self.ends = torch.cat([self.ends[: self.first], ends])

    def bounds(self, products: Callable[[Tensor], Tensor] | None = None) -> Bounds:
        """What differences of the states are held against; ``products``: of the Jacobians, which tell what a step rounds."""
        if products is not None and not self.newton.quadratic:
            products = ANY_ROUNDING  # approximate ones do not tell that; what they find is certified by itself
        return self.progress.bounds(self.ends, self.before, self.first, products, self.scale())

    def choose(self, couplings: Blocks) -> LinearSolver:
        """Who solves for couplings; the plan says why."""
        linear, why = self.newton.linear.choose(couplings)
        self.plan.linear = f"{linear} ({why})" if why else str(linear)
        return linear

    def correct(
        self, values: Tensor, blocks: Blocks, finite: Tensor, frozen: Tensor, next_exact: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Solve the linearised system and apply the update.

        Args:
            values: [n, B, D], the chunks' ends as they come out of their starts
            blocks: n Jacobians
            finite: [n, B], where values are numbers, or nobody asks; elsewhere the iterate has strayed, and the chain is cut there for
                this time so that it spoils no other state
            frozen, next_exact: [n, B], as of ``Progress.frozen``

        Returns:
            residual and update, [n, B, D] each
        """
        ends = self.ends[self.first :]
        residual = torch.where((finite & ~frozen).unsqueeze(-1), values - ends, 0)
        if self.newton.shrink != 1.0:
            blocks = type(blocks)(blocks.data * self.newton.shrink)
        delta = self.solve(blocks, residual)
        moved = ends + delta
        moved = torch.where(torch.isfinite(moved).all(-1, keepdim=True), moved, values)
        moved = torch.where(next_exact.unsqueeze(-1), values, moved)  # exact, whatever else happens
        usable = torch.isfinite(moved).all(-1) & ~frozen
        self.replace(torch.where(usable.unsqueeze(-1), moved, ends))
        return residual, delta

    # What something large hides.

    def has_faint(self, rows: Tensor, ends: Tensor, bounds: Bounds) -> bool:
        """Whether in some of the rows [B] numbers of the ends [n, B, D] are faint beside what was large once."""
        return bool((self.progress.tolerance.is_faint(ends, bounds.scale) & rows).any())

    def hidden_among(
        self, done: Tensor, ends: Tensor, values: Tensor, errors: Tensor, blocks: Blocks, bounds: Bounds
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of rows [B] that seem to be done, those of which a transient hides that later states are not known; None where it does of none.

        They are to be looked at more closely from now on, by ``Progress.look_closer``. And the ends [n, B, D] of the others, where more than
        the one correction was made to find that out.

        Args:
            ends, values, errors: [n, B, D]: the ends, as they come out, which live where those that were found may not yet, and by how much
                the ends may be off
            blocks: n Jacobians
        """
        progress = self.progress
        if progress.tolerance.local or not self.has_faint(done, ends, bounds):
            return None, None
        unknown = done if progress.local is None else done & ~progress.local
        hidden, nearest = self.find_hidden(unknown, ends, values, errors, blocks)
        if not hidden.any():
            return None, nearest
        self.plan.note(
            f"after {progress.count} iterations states of a time when they were large hid what came after them: from there on "
            'digits of every state were asked for, as by Newton(scale="local")'
        )
        return hidden, nearest

    def find_hidden(
        self, rows: Tensor, ends: Tensor, values: Tensor, errors: Tensor, blocks: Blocks
    ) -> tuple[Tensor, Tensor]:
        """``hidden_among`` of rows that have faint numbers.

        What is left of an iterate where the signal has died is noise, and as steady as a signal that lives: but noise falls with every
        correction by the last Jacobians, and a signal stays. One that comes out by these corrections may be too short to be seen to live
        on: so they are kept.
        """
        exact = self.ends[: self.first]
        hidden, rows = torch.zeros_like(rows), rows.clone()
        sizes = torch.cat([exact.abs(), torch.maximum(ends.abs(), values.abs())])
        for _ in range(_CLOSER_LOOKS):
            off = torch.cat([torch.zeros_like(exact), errors.abs()])
            rows &= self.hides(sizes, off)
            ends = ends + errors
            if not rows.any():
                break
            values = self.evaluate(torch.cat([exact, ends]))
            closer = torch.cat([exact.abs(), torch.maximum(ends.abs(), values.abs())])
            errors = self.solve(blocks, torch.where(rows.unsqueeze(-1), values - ends, 0))
            # Each by itself: a step may make numbers of what is none, as tanh does of infinity.
            finite = torch.isfinite(values) & torch.isfinite(ends) & torch.isfinite(errors)
            broken = self.tell(broken=~finite.all(-1).all(0))["broken"] > 0
            lives = rows & (self.hides(sizes, off, closer) | broken)
            hidden, rows = hidden | lives, rows & ~lives
            errors = torch.where(rows.unsqueeze(-1), errors, 0)
            sizes = closer
        return hidden, ends  # what fell every time is noise

    # Where updates throw states about.

    def find_far(self, ends: Tensor, values: Tensor, unit: Tensor) -> Tensor:
        """[n, B]: which ends [n, B, D] an update threw far away from the values that came out before it; ``unit``: [B, D], every component
        has one of its own, the largest that it was anywhere."""
        unit = unit.clamp(min=torch.finfo(ends.dtype).tiny)
        size, size_before = ((each / unit).abs().amax(-1) for each in (ends, values))
        return (size > FAR * size_before) & self.progress.active

    def find_thrown(self, residual: Tensor, values: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
        """[n, B]: which ends an update threw far away, to where the step says they do not belong; those that follow were thrown with them.

        Left alone they return by one contraction an iteration, if at all: they are to get their step values back. An update that is large
        because the sequence grows leaves a small residual, and stays.

        Args:
            residual: [n, B, D], after the update
            values, unit: as of ``find_far``

        Returns:
            which they are, and the chunk [B] that this begins with, anywhere; all chunks where it does not
        """
        progress, ends = self.progress, self.ends[self.first :]
        far = self.find_far(ends, values, unit)
        unit = unit.clamp(min=torch.finfo(ends.dtype).tiny)
        wrong = far & ((residual / unit).abs().amax(-1) > 0.1 * (ends / unit).abs().amax(-1))
        begin = -self.tell(begin=-progress.leading(~wrong, self.first))["begin"]
        return far & (progress.index[self.first :] >= begin), begin

    # Where Newton is hopeless.

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
        self.tell()
        residuals: list[Tensor] = []  # [B] each, in units of the tolerance
        while len(residuals) < most and (to_the_end or progress.falls(residuals)):
            last, values = self.ends[self.first :], self.evaluate()
            finite = torch.isfinite(values).all(-1)
            off = torch.where(frozen, 0, self.bounds().ratio(values - last))
            self.replace(torch.where((finite & ~frozen).unsqueeze(-1), values, last))
            residuals.append(self.tell(off=largest_of(off))["off"])
        return self._keep_what_came_near(ends, residuals)

    def _keep_what_came_near(self, ends: Tensor, residuals: list[Tensor]) -> bool:
        """After the chunks were rolled out: rows that are no nearer get their ``ends`` [n, B, D] back, but for what is exact now."""
        progress, times = self.progress, len(residuals)
        near = torch.zeros_like(progress.active)
        if times:
            finite = torch.isfinite(torch.stack(residuals)).all(0)
            near = progress.active & finite & progress.came_near(residuals[0], residuals[-1])
            self.plan.note(
                f"after {progress.count} iterations the chunks were rolled out {times} times from the guess: "
                f"{int(near.sum())} of {int(progress.active.sum())} unfinished rows came near"
            )
            progress.advance(finite, times)
        exact = progress.index[self.first :] < progress.prefix
        self.replace(torch.where((near | exact).unsqueeze(-1), self.ends[self.first :], ends))
        self.tell()
        return progress.is_early or bool(near.any()) or not progress.active.any()

    def end_stuck(self, values: Tensor, delta: Tensor, blocks: Blocks, bounds: Bounds) -> None:
        """Rows whose updates ``delta`` stay small and shrink no more: rounding is all that is left, or the Jacobians are not the step's.

        Approximate ones may be anything: what they found is seen by a certificate.

        Args:
            values, delta, blocks, bounds: of the last update: see ``hidden_among``
        """
        progress = self.progress
        if self.newton.quadratic:
            # The update is applied already.
            ends = self.ends[self.first :] - delta
            hidden, _ = self.hidden_among(progress.stuck, ends, values, delta, blocks, bounds)
            if hidden is not None:
                progress.look_closer(hidden)
                progress.stuck = progress.stuck & ~hidden
            true = self.has_derivative_at_ends()
            if (progress.stuck & ~true).any():
                self.reasons = (FALSE_DERIVATIVE,)
                progress.finish(progress.stuck & ~true, Result.NOT_CONVERGED)
        progress.finish(progress.stuck, Result.PRECISION_FLOOR)


def largest_of(each: Tensor) -> Tensor:
    """Over chunks, of which there may be none: [n, ...] to [...]."""
    return each.amax(0) if len(each) else each.new_zeros(each.shape[1:])
