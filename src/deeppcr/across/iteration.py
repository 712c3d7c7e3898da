"""Newton's iteration on a sequence whose chunks are spread over ranks.

An iteration linearises at the last states, solves for the update, and tells the other ranks what came out: one prefix of affine maps and one
packed message. By the latter all ranks know the same and decide alike. What an iteration finds is also a look at the one before: a row is
done when its residual was within the tolerance, and what true Jacobians made of it, too. That last update is made, and not counted. (In one
process a look by itself is cheaper than Jacobians; here it would take as many messages as an iteration.)

Shapes: N chunks on this rank (n of them from chunk ``first`` on), B rows, D the packed state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..linear import Blocks
from ..newton import Newton
from ..newton.certificate import Certified
from ..newton.guess import Guess
from ..newton.iteration import GAP, Outcome, first_ends
from ..newton.safeguards import ANY_ROUNDING, largest_of
from ..sequence.evaluate import StepError
from ..solution import Plan, Result
from ..tolerance import Bounds
from .kernels import Kernels
from .part import Part, nearest
from .progress import Shared


class Iteration(Certified[Shared]):
    """One run on all ranks, of which each has its own unknowns.

    Attributes:
        entry: [B, D], the state that this rank starts from
        peak: [B, D], how large each number of a state was before this rank's part
        after: [B, D], where digits of every state are asked for: the one after this rank's part, if there is one
        sizes: [B, D], in the end: of all states of all ranks
    """

    first: int
    reasons: tuple[str, ...]
    entry: Tensor
    peak: Tensor
    sizes: Tensor
    after: Tensor | None
    values: Tensor | None
    unit: Tensor | None

    def __init__(
        self,
        newton: Newton,
        part: Part,
        guess: Guess | None,
        chunk: int,
        plan: Plan,
        kernels: Kernels | None = None,
    ):
        ends = part.empty()
        with part.trouble.kept():
            if part.sequence is not None and guess is not None:
                ends = first_ends(part.sequence, guess, chunk).detach().clone()
        super().__init__(newton, Shared(part, newton, chunk), ends, chunk, plan)
        self.part: Part = part
        self.kernels = kernels
        self.structure: Blocks | None = None  # blocks of no step: what structure they have on all ranks
        # Of the last iteration, all chunks: what came out before the update, and the largest of each number on any rank; whether some
        # state of some rank may have been thrown far away; rows that are faint somewhere.
        self.values = self.unit = None
        self.far: bool = False
        self.faint: Tensor = torch.zeros_like(self.progress.active)
        self.tell()

    @property
    def before(self) -> Tensor:
        return self.entry

    def tell(self, **measures: Tensor) -> dict[str, Tensor]:
        self.entry, self.peak, found = self.part.meet(self.ends, *measures.values())
        self.after = None
        if self.progress.asks_for_every_state:  # the size around a step is that of the one after it, too
            held = self.ends[:1] if len(self.ends) else self.part.empty().new_zeros(1, *self.entry.shape)
            told = torch.cat([held.flatten(), held.new_full((1,), len(self.ends))])
            ahead = self.part.ranks.reversed().before(told, nearest)
            self.after = None if ahead is None or not ahead[-1] else ahead[:-1].view_as(self.entry)
        return dict(zip(measures, found, strict=True))

    def starts(self) -> Tensor:
        return super().starts() if len(self.ends) else self.ends

    def scale(self) -> Tensor:
        return self.progress.scale(self.ends, self.entry, self.peak, self.after)

    def bounds(self, products: Callable[[Tensor], Tensor] | None = None) -> Bounds:
        return super().bounds(products) if len(self.ends) else Bounds(self.progress.tolerance, self.ends, self.ends)

    def hides(self, sizes: Tensor, errors: Tensor, closer: Tensor | None = None) -> Tensor:
        return self.progress.hides(sizes, errors, closer, self.entry)

    def has_faint(self, rows: Tensor, ends: Tensor, bounds: Bounds) -> bool:
        return bool((self.faint & rows).any())

    @torch.no_grad()
    def run(self) -> Outcome:
        progress, tested = self.progress, self.newton.stop.fixed is None
        while True:
            counts = not tested or progress.count < progress.limit
            self.iterate(counts)
            if not counts or not progress.active.any() or (not tested and progress.count >= progress.limit):
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
        if self.structure is None:
            self.structure = self.part.agree_on(blocks)
        if blocks is None:
            shape = self.structure.data.shape[1:]
            blocks = type(self.structure)(self.structure.data.new_zeros(len(values), *shape))
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

    def evaluate(self, ends: Tensor | None = None) -> Tensor:
        entry, ends = (self.entry, self.ends) if ends is None else (self.part.meet(ends)[0], ends)
        return self.roll_out(torch.cat([entry.unsqueeze(0), ends[:-1]])[self.first :] if len(ends) else ends)

    def roll_out(self, starts: Tensor) -> Tensor:
        with self.part.trouble.kept():
            if self.part.sequence is not None and len(starts):
                return (self.kernels or self.part.sequence).roll_out(starts, self.chunk, self.first)[0]
        return starts

    def push(self, tangents: Tensor) -> Tensor:
        with self.part.trouble.kept():
            if self.part.sequence is not None and len(tangents):
                given = self.starts(), tangents.unsqueeze(1), self.chunk, self.first
                return self.part.sequence.push_out(*given)[1].squeeze(1)
        return tangents

    def is_refused(self, refused: bool) -> bool:
        error = self.part.trouble.take()
        refused = isinstance(error, StepError)
        return any(each for (each,) in self.part.ranks.agree(None if refused else error, refused))

    def total(self, sums: Tensor) -> Tensor:
        return self.part.ranks.total(sums)

    def hand_on(self, errors: Tensor, **measures: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        entry, _, found = self.part.meet(errors, *measures.values())
        entry = torch.zeros_like(entry) if self.part.is_first else entry
        return entry, dict(zip(measures, found, strict=True))

    def solve(self, blocks: Blocks, residual: Tensor) -> Tensor:
        return self.part.solve(blocks, residual, self.newton.linear, choose=self.choose)

    def iterate(self, counts: bool) -> None:
        """One iteration; ``counts``: False for a look after the last."""
        progress, promises = self.progress, self.newton.stop.promises
        values, blocks = self.linearise()
        if self.far:
            values, blocks = self.call_back(values, blocks)
        before, first = self.ends, self.first
        ends = before[first:]
        frozen, next_exact = progress.frozen(first)
        # From an exact start a value that is not finite is the sequence's own, which all ranks have to hear first.
        finite = torch.isfinite(values).all(-1) | frozen
        lost = (~finite & next_exact).any(0)
        if not finite.all():
            blocks = blocks.where(finite & ~frozen)
        residual, delta = self.correct(values, blocks, finite, frozen, next_exact)

        moved, came_out = self.ends[first:], torch.where(finite.unsqueeze(-1), values, ends)
        unit = largest_of(came_out.abs()) if self.unit is None else self.unit
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
            "unsettled": -progress.leading(settled, first),
            "large": ~small,
            "lost": lost,
            "unit": largest_of(came_out.abs()),
            "far": self.find_far(moved, came_out, unit).any(0) if len(moved) else torch.zeros_like(progress.active),
        }
        if self.newton.quadratic and promises:
            measures["faint"] = progress.tolerance.is_faint(ends, bounds.scale)
        if not self.newton.quadratic:
            measures |= progress.rates(delta, bounds)
        found = self.tell(**measures)
        self.faint = found.get("faint", torch.zeros_like(self.faint)) > 0
        self.far = bool(((found["far"] > 0) & progress.active).any())
        self.values, self.unit = torch.cat([before[:first], came_out]), found["unit"].to(self.ends.dtype)

        done = progress.seem_done(found)
        hidden = nearest = None
        if promises:
            hidden, nearest = self.hidden_among(done, ends, came_out, delta, blocks, bounds)
        progress.heard(found, done if hidden is None else done & ~hidden, counts=counts)
        if hidden is not None:  # their updates were measured otherwise until now
            progress.look_closer(hidden)
            done = done & ~hidden
        if nearest is not None:
            self.replace(torch.where(done.unsqueeze(-1), nearest, moved))
            self.tell()
        if counts and promises and bool(progress.stuck.any()):
            self.end_stuck(came_out, delta, blocks, bounds)

    def call_back(self, values: Tensor, blocks: Blocks) -> tuple[Tensor, Blocks]:
        """States that the last update threw far away get their step values back: see ``find_thrown``. Ranks ask each other only where some
        state is far away.

        Args:
            values, blocks: at the states as they are

        Returns:
            at the states as they are then
        """
        ends = self.ends[self.first :]
        assert self.values is not None
        assert self.unit is not None
        last = self.values[self.first :]
        thrown, begin = self.find_thrown(values - ends, last, self.unit)
        if not ((begin < self.progress.chunks) & self.progress.active).any():
            return values, blocks
        self.replace(torch.where(thrown.unsqueeze(-1), last, ends))
        self.tell()
        return self.linearise()

    def roll_on(self) -> bool:
        worth = super().roll_on()
        self.values, self.unit, self.far = None, None, False  # of other states
        return worth

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
            progress.join(-joined.long())
        return Outcome.of(states, self)
