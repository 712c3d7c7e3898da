"""Newton's iteration on a sequence whose chunks are spread over ranks.

An iteration linearises at the last states, solves for the update, and tells the other ranks what came out: one prefix of affine maps and one
packed message. By the latter all ranks know the same and decide alike. What an iteration finds is also a look at the one before: a row is
done when its residual was within the tolerance, and what true Jacobians made of it, too. That last update is made, and not counted.

Shapes: N chunks on this rank (n of them from chunk ``first`` on), B rows, D the packed state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..guess import Guess
from ..iteration import ANY_ROUNDING, FAR, GAP, Outcome, first_ends
from ..linear import Blocks, LinearSolver
from ..newton import Newton
from ..solution import Plan, Result
from ..tolerance import Bounds
from .certificate import Certified
from .kernels import Kernels
from .part import Part, nearest
from .progress import Shared, largest_of


class Iteration(Certified):
    """One run on all ranks, of which each has its own unknowns.

    Attributes:
        ends: [N, B, D], the states after this rank's chunks; always finite
        entry: [B, D], the state that this rank starts from
        peak: [B, D], how large each number of a state was before this rank's part
        sizes: [B, D], in the end: of all states of all ranks
    """

    newton: Newton
    part: Part
    plan: Plan
    progress: Shared
    chunk: int
    first: int
    ends: Tensor
    entry: Tensor
    peak: Tensor
    sizes: Tensor
    after: Tensor | None
    guess: Tensor
    rolled_on: bool
    values: Tensor | None
    unit: Tensor | None
    far: bool

    def __init__(
        self,
        newton: Newton,
        part: Part,
        guess: Guess | None,
        chunk: int,
        plan: Plan,
        kernels: Kernels | None = None,
    ):
        self.newton, self.part, self.chunk, self.plan, self.kernels = newton, part, chunk, plan, kernels
        self.progress = Shared(part, newton, chunk)
        self.first = 0
        self.blocks: Blocks | None = None  # of no step: what structure they have on all ranks
        self.reasons: tuple[str, ...] = ()
        # Of the last iteration, all chunks: what came out before the update, and the largest of each number on any rank.
        self.values = self.unit = None
        self.far = False  # whether some state of some rank may have been thrown far away
        self.ends = part.empty()
        with part.trouble.kept():
            if part.sequence is not None and guess is not None:
                self.ends = first_ends(part.sequence, guess, chunk).detach().clone()
        self.guess, self.rolled_on = self.ends, False
        self.meet()

    def meet(self, **measures: Tensor) -> dict[str, Tensor]:
        self.entry, self.peak, found = self.part.meet(self.ends, *measures.values())
        self.after = None
        if self.progress.tolerance.local:  # the size around a step is that of the one after it, too
            held = self.ends[:1] if len(self.ends) else self.part.empty().new_zeros(1, *self.entry.shape)
            ahead = self.part.ranks.reversed().before(
                torch.cat([held.flatten(), held.new_full((1,), len(self.ends))]), nearest
            )
            self.after = None if ahead is None or not ahead[-1] else ahead[:-1].view_as(self.entry)
        return dict(zip(measures, found, strict=True))

    def starts(self) -> Tensor:
        return torch.cat([self.entry.unsqueeze(0), self.ends[:-1]])[self.first :] if len(self.ends) else self.ends

    def bounds(self, products: Callable[[Tensor], Tensor] | None = None, *, all_of_them: bool = False) -> Bounds:
        first = 0 if all_of_them else self.first
        tolerance, states = self.progress.tolerance, self.ends
        if not len(states):
            return Bounds(tolerance, states, states)
        if not tolerance.local:
            scale = tolerance.scale(states, self.peak)
        elif self.after is None:
            scale = tolerance.scale(states, self.entry)
        else:
            scale = tolerance.scale(torch.cat([states, self.after.unsqueeze(0)]), self.entry)[:-1]
        if products is not None and not self.newton.quadratic:
            products = ANY_ROUNDING
        return self.progress.bounds(states, self.entry, first, products, scale)

    @torch.no_grad()
    def run(self) -> Outcome:
        progress, tested = self.progress, self.newton.stop.fixed is None
        while True:
            counts = not tested or progress.count < progress.limit
            self.iterate(counts)
            if not counts or not progress.active.any() or (not tested and progress.count >= progress.limit):
                break
            if tested and self.newton.stop.promises and bool(progress.stuck.any()):
                self.end_stuck()
                if not progress.active.any():
                    break
            hopeless = progress.why_hopeless() if tested else None
            if hopeless and not self.roll_on():
                self.reasons = (*self.reasons, hopeless)
                self.plan.note(hopeless)
                break
            least = int(progress.prefix[progress.active].min()) if progress.active.any() else progress.chunks
            if least >= progress.chunks:
                break
            self.first = min(max(least - progress.before, 0), len(self.ends))
        if not tested:
            progress.finish(progress.active, Result.ITERATIONS_DONE)
        elif not self.newton.quadratic and self.newton.stop.promises:
            self.certify()
        return self.outcome()

    def linearise(self) -> tuple[Tensor, Blocks]:
        """The chunks' ends as they come out, and the Jacobians; of a rank without chunks, or in trouble, none that do anything."""
        sequence, starts, blocks = self.part.sequence, self.starts(), None
        values = self.ends[self.first :]
        if sequence is not None and len(starts):
            with self.part.trouble.kept():
                try:
                    found = None if self.kernels is None else self.kernels.linearise(starts, self.chunk, self.first)
                    if found is None:
                        self.kernels = None
                        found = self.newton.jacobian.linearise(sequence, starts, self.chunk, self.first)
                    values, blocks = found
                except Exception as error:
                    self._locate(error, starts)
                    raise
        if self.blocks is None:
            self.blocks = self.part.agree_on(blocks)
        if blocks is None:
            shape = self.blocks.data.shape[1:]
            blocks = type(self.blocks)(self.blocks.data.new_zeros(len(values), *shape))
        if self.newton.shrink != 1.0:
            blocks = type(blocks)(blocks.data * self.newton.shrink)
        return values, blocks

    def _locate(self, error: Exception, starts: Tensor) -> None:
        """Add to an error of the step which one raised it, where steps are evaluated one by one: of those evaluated at once none did."""
        part, sequence = self.part, self.part.sequence
        assert sequence is not None
        where = f"steps {part.offset + 1} to {part.offset + part.length}"
        if "loop" in sequence.evaluation and self.chunk == 1:
            for index, state in enumerate(starts, self.first):
                try:
                    sequence.step(index, state)
                except Exception:
                    where = f"step {part.offset + index + 1}"
                    break
        error.args = (f"{error} ({where})",)

    def iterate(self, counts: bool) -> None:
        """One iteration; ``counts``: False for a look after the last."""
        progress = self.progress
        values, blocks = self.linearise()
        if self.far:
            values, blocks = self.call_back(values, blocks)
        ends = self.ends[self.first :]
        frozen, next_exact = progress.frozen(self.first)
        # From an exact start a value that is not finite is the sequence's own; elsewhere the iterate has strayed: the chain is cut there.
        finite = torch.isfinite(values).all(-1) | frozen
        lost = (~finite & next_exact).any(0)
        if not finite.all():
            blocks = blocks.where(finite & ~frozen)
        residual = torch.where((finite & ~frozen).unsqueeze(-1), values - ends, 0)
        delta = self.part.solve(blocks, residual, self.newton.linear, choose=self.choose)

        moved = ends + delta
        moved = torch.where(torch.isfinite(moved).all(-1, keepdim=True), moved, values)
        moved = torch.where(next_exact.unsqueeze(-1), values, moved)  # exact, whatever else happens
        usable = torch.isfinite(moved).all(-1) & ~frozen
        moved = torch.where(usable.unsqueeze(-1), moved, ends)
        came_out = torch.where(finite.unsqueeze(-1), values, ends)
        unit = largest_of(came_out.abs()) if self.unit is None else self.unit
        before, self.ends = self.ends, torch.cat([self.ends[: self.first], moved])
        bounds = self.bounds(blocks.apply)
        update = torch.where(frozen, 0, bounds.ratio(delta))
        off = torch.where(finite, bounds.ratio(residual), math.inf)
        settled = frozen | (bounds.settles(delta) & finite & bounds.settles(residual))
        if not self.newton.quadratic:  # of approximate Jacobians an update says nothing of the error in a chunk
            settled = frozen & progress.active
        small = bounds.relative(delta) <= math.sqrt(progress.eps) if len(delta) else torch.ones_like(progress.active)
        if not self.newton.quadratic and len(delta):
            small = bounds.is_rounding(delta)
        measures = {
            "worst": largest_of(update),
            "off": largest_of(off),
            "residual": largest_of(residual.abs().nan_to_num(math.inf, math.inf)).amax(-1),
            "unsettled": -progress.leading(settled, self.first),
            "large": ~small,
            "lost": lost,
            "unit": largest_of(came_out.abs()),
            "far": self._far(moved, came_out, unit).any(0) if len(moved) else torch.zeros_like(progress.active),
        }
        if not self.newton.quadratic:
            measures |= progress.rates(delta, bounds)
        found = self.meet(**measures)
        progress.heard(found, counts=counts)
        self.far = bool(((found["far"] > 0) & progress.active).any())
        self.values, self.unit = torch.cat([before[: self.first], came_out]), found["unit"].to(self.ends.dtype)

    def _far(self, ends: Tensor, values: Tensor, unit: Tensor) -> Tensor:
        """[n, B]: which states an update threw far away from what came out before it, every component in a unit [B, D] of its own."""
        unit = unit.clamp(min=torch.finfo(ends.dtype).tiny)
        sizes = ((each / unit).abs().amax(-1) for each in (ends, values))
        return (next(sizes) > FAR * next(sizes)) & self.progress.active

    def call_back(self, values: Tensor, blocks: Blocks) -> tuple[Tensor, Blocks]:
        """States that the last update threw far away, to where the step says they do not belong, get their step values back, and so do
        those that follow: see ``deeppcr.iteration.Iteration``. Ranks ask each other only where some state is far away.

        Args:
            values, blocks: at the states as they are

        Returns:
            at the states as they are then
        """
        progress, ends = self.progress, self.ends[self.first :]
        assert self.values is not None
        assert self.unit is not None
        last, unit = self.values[self.first :], self.unit.clamp(min=torch.finfo(ends.dtype).tiny)
        far = self._far(ends, last, unit)
        off = ((values - ends) / unit).abs().amax(-1) > 0.1 * (ends / unit).abs().amax(-1)
        told = -progress.leading(~(far & off), self.first)
        _, (wrong,) = self.part.say(self.part.ranks, ends.new_zeros(1), torch.maximum, (told,))
        if not ((-wrong < progress.chunks) & progress.active).any():
            return values, blocks
        thrown = far & (progress.index[self.first :] >= -wrong)
        self.ends = torch.cat([self.ends[: self.first], torch.where(thrown.unsqueeze(-1), last, ends)])
        self.meet()
        return self.linearise()

    def roll_on(self) -> bool:
        """Where Newton is hopeless from the guess, roll the chunks out from it, again and again: see ``deeppcr.iteration.Iteration``.

        Each time the ranks tell each other where they ended.

        Returns:
            whether the iteration is worth going on with
        """
        progress, ends = self.progress, self.ends
        left = progress.chunks - int(progress.prefix[progress.active].min())
        to_the_end = 2 * progress.count + left <= progress.chunks // 2
        if not progress.compare_with_loop or (self.rolled_on and not to_the_end):
            return False
        self.rolled_on = True
        most = left if to_the_end else left // 2
        frozen, _ = progress.frozen(0)
        self.ends = torch.where(frozen.unsqueeze(-1), ends, self.guess)
        self.meet()
        residuals: list[Tensor] = []  # [B] each, in units of the tolerance
        while len(residuals) < most and (to_the_end or progress.falls(residuals)):
            last = values = self.ends[self.first :]
            with self.part.trouble.kept():
                if self.part.sequence is not None and len(last):
                    values = (self.kernels or self.part.sequence).roll_out(self.starts(), self.chunk, self.first)[0]
            finite = torch.isfinite(values).all(-1)
            off = torch.where(frozen[self.first :], 0, self.bounds().ratio(values - last))
            moved = torch.where((finite & ~frozen[self.first :]).unsqueeze(-1), values, last)
            self.ends = torch.cat([self.ends[: self.first], moved])
            residuals.append(self.meet(off=largest_of(off))["off"])
        return self._keep_what_came_near(ends, residuals)

    def _keep_what_came_near(self, ends: Tensor, residuals: list[Tensor]) -> bool:
        """After the chunks were rolled out: rows that are no nearer get their ``ends`` [N, B, D] back, but for what is exact now."""
        progress, times = self.progress, len(residuals)
        if times:
            finite = torch.isfinite(torch.stack(residuals)).all(0)
            near = progress.active & finite & progress.came_near(residuals[0], residuals[-1])
            self.plan.note(
                f"after {progress.count} iterations the chunks were rolled out {times} times from the guess: "
                f"{int(near.sum())} of {int(progress.active.sum())} rows came near"
            )
            progress.advance(finite, times)
            exact = progress.index < progress.prefix
            self.ends = torch.where((near | exact).unsqueeze(-1), self.ends, ends)
            worth = progress.is_early or bool(near.any()) or not progress.active.any()
        else:
            self.ends, worth = ends, progress.is_early
        self.values, self.unit, self.far = None, None, False  # of other states
        self.meet()
        return worth

    def choose(self, couplings: Blocks) -> LinearSolver:
        linear, why = self.newton.linear.choose(couplings)
        self.plan.linear = f"{linear} ({why})" if why else str(linear)
        return linear

    # What came out.

    def outcome(self) -> Outcome:
        progress, part, self.first = self.progress, self.part, 0
        states, gap = self.ends, torch.zeros(self.ends.shape[:2], device=self.ends.device)
        if self.chunk > 1 and part.sequence is not None:
            with part.trouble.kept():
                rolled, states = (self.kernels or part.sequence).roll_out(self.starts(), self.chunk)
                gap = self.bounds(ANY_ROUNDING).ratio(rolled - self.ends)
        # The last chunk of a rank may round otherwise than the iteration saw, and so where the next one starts is said anew.
        gaps = -progress.leading(gap <= GAP)
        self.entry, self.peak, (joined, sizes) = part.meet(states, gaps, largest_of(states.abs()))
        self.sizes = sizes.to(states.dtype)
        if self.chunk > 1:
            progress.joined_at(-joined.long())
        none = torch.zeros(0, part.layout.rows, device=states.device)
        return Outcome(
            states=states,
            results=progress.results,
            iterations=progress.iterations,
            exact_steps=progress.exact_steps,
            updates=torch.stack(progress.updates) if progress.updates else none,
            reasons=self.reasons,
        )
