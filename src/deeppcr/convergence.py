"""How far Newton's iteration is: the status of every row while it runs.

What ``Progress`` does is arithmetic on the device, so that iterations can be captured in a CUDA graph; Python reads values only
in ``results`` and ``why_hopeless``.

Shapes: N chunks (n of them from chunk ``first`` on), B rows, D the packed state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .sequence.layout import Layout
from .solution import Result
from .stopping import StoppingTest
from .tolerance import ROUNDED, Bounds, Tolerance

#: An update this far below the tolerance is believed to be the error that is left, whatever came before it.
NEGLIGIBLE = 0.01
#: To kernels a row is settled when no more than this is left, in units of the tolerance.
ENOUGH = 0.1
#: Iterations that are granted unjudged: what converges at all has mostly done so by then.
_PATIENCE = 12
#: Where the residual is this small a part of the states, Newton's method mostly converges.
_NEAR = 0.01
#: Iterations over which progress is then measured.
_TREND = 4
#: So many more iterations are made in any case, though the loop might need no longer.
_FEW_MORE = 4


class Progress:
    """A row is active until it has a result; the chunks below its prefix are exact and are never touched again.

    Args:
        layout: of a state
        length, chunk: L steps in chunks of C
        tolerance: of a state
        quadratic: the Jacobians are the true ones
        stop: when a row is done
        max_iterations: not to be exceeded
        compare_with_loop: also give up when the loop would be no slower
        chunks: how many they are, where some in between are shorter than C
    """

    def __init__(
        self,
        layout: Layout,
        length: int,
        chunk: int,
        *,
        tolerance: Tolerance,
        quadratic: bool,
        stop: StoppingTest,
        max_iterations: int,
        compare_with_loop: bool,
        chunks: int | None = None,
    ):
        self.layout: Layout = layout
        self.length: int = length
        self.chunk: int = chunk
        self.chunks: int = -(-length // chunk) if chunks is None else chunks
        self.tolerance: Tolerance = tolerance
        self.quadratic: bool = quadratic
        self.stop: StoppingTest = stop
        self.limit: int = max_iterations if stop.fixed is None else stop.fixed
        self.compare_with_loop = compare_with_loop
        self.eps: float = torch.finfo(layout.dtype).eps

        rows, device = layout.rows, layout.device
        self.index: Tensor = torch.arange(self.chunks, device=device).unsqueeze(1)  # of each chunk
        self.count: int = 0
        self.active: Tensor = torch.ones(rows, dtype=torch.bool, device=device)
        self.prefix: Tensor = torch.zeros(rows, dtype=torch.long, device=device)
        self.iterations: Tensor = torch.zeros(rows, dtype=torch.long, device=device)
        self.codes: Tensor = torch.full((rows,), Result.NOT_CONVERGED.severity, device=device)
        self.updates: list[Tensor] = []  # [B] each: the largest update in units of the tolerance
        self.stuck: Tensor = ~self.active  # of the last iteration, rows that may be as exact as rounding lets them
        self.local: Tensor | None = None  # [B], rows that are asked for digits of every state, as `look_closer` says
        self._first_residual: Tensor | None = None
        shape = (rows, layout.width)
        nothing = torch.zeros(shape, dtype=layout.dtype, device=device)
        # Terms that cancel with some of these signs do not with others. (Made on the device: a capture copies nothing there.)
        number = torch.arange(layout.width, device=device)
        bits = torch.stack([number * 40503 // 8192, number * 40503 // 8192 + number]) % 2
        self._signs = (1 - 2 * bits).to(layout.dtype)
        self._last = (nothing, nothing)  # largest updates [B, D] of the last iteration, and their factors
        self._best = torch.full((rows,), math.inf, dtype=torch.float64, device=device)
        self._since_best = torch.zeros(rows, dtype=torch.long, device=device)
        self._trend: list[tuple[Tensor, Tensor]] = []  # smallest prefix and largest update of the active rows
        # Of a short sequence the loop would have done much by then: what may help is tried sooner.
        self._patience = min(_PATIENCE, self.chunks // 4) if compare_with_loop else _PATIENCE

    def carry(self, keep: Callable[[str, Tensor], Tensor]) -> None:
        """Leave to the next iteration only what it needs, where ``keep(name, tensor)`` puts it."""
        for name in ("active", "prefix", "iterations", "codes", "_first_residual", "_best", "_since_best"):
            setattr(self, name, keep(name, getattr(self, name)))
        self.updates = [keep("update", self.updates[-1])]
        self._trend.clear()

    @property
    def results(self) -> list[Result]:
        members = list(Result)
        return [members[code] for code in self.codes.tolist()]

    @property
    def exact_steps(self) -> Tensor:
        trusted = self.codes < Result.UNCERTIFIED.severity
        return torch.where(trusted, self.length, (self.prefix * self.chunk).clamp(max=self.length))

    def finish(self, rows: Tensor, result: Result) -> None:
        rows = rows & self.active
        self.codes = torch.where(rows, result.severity, self.codes)
        self.active = self.active & ~rows

    def withdraw(self, rows: Tensor, result: Result = Result.NOT_CONVERGED) -> None:
        """Rows [B] that claimed to have converged and have not, or not provably; exact is what each iteration made so."""
        self.codes = torch.where(rows, result.severity, self.codes)
        self.prefix = torch.where(rows, torch.minimum(self.prefix, self.iterations), self.prefix)

    def join(self, joined: Tensor) -> None:
        """Exact are only the first ``joined`` [B] chunks, which each begin where the one before it ends; who claimed more loses the claim."""
        self.prefix = torch.minimum(self.prefix, joined)
        if self.stop.promises:
            lost = (joined < self.chunks) & (self.codes == Result.CONVERGED.severity)
            self.codes = torch.where(lost, Result.NOT_CONVERGED.severity, self.codes)

    def frozen(self, first: int) -> tuple[Tensor, Tensor]:
        """For the chunks from ``first`` on: [n, B], may not be touched; and is the first chunk not known to be exact."""
        index = self.index[first:]
        return (index < self.prefix) | ~self.active, index == self.prefix

    def leading(self, fine: Tensor, first: int = 0) -> Tensor:
        """How many chunks, [B], come before the first that is not ``fine`` [n, B], those before ``first`` included."""
        return torch.where(fine, self.chunks, self.index[first:]).amin(0)

    def bounds(
        self,
        states: Tensor,
        initial: Tensor,
        first: int = 0,
        products: Callable[[Tensor], Tensor] | None = None,
        scale: Tensor | None = None,
    ) -> Bounds:
        """What differences of the chunks from ``first`` on are held against.

        Args:
            states: [N, B, D], after all chunks
            initial: [B, D]
            products: of the Jacobians of the chunks from ``first`` on with vectors [n, B, D]: what rounding their starts changes,
                rounding leaves there too
            scale: [N, B, D], the size of every component, where these are not all the states that there are
        """
        states, initial = states.detach(), initial.detach()
        before = torch.cat([initial.unsqueeze(0), states[:-1]])[first:].abs()
        rounding = torch.maximum(before, states[first:].abs())
        if products is not None:
            # No more than of the largest number beside it: what grows along the sequence is no rounding of a step.
            most = self.layout.spread(self.layout.norms(rounding))
            for signs in self._signs:  # magnitudes of all blocks would take their memory once more
                rounding = torch.maximum(rounding, products(signs * before).abs())
            rounding = torch.minimum(rounding, most)
        if scale is None:
            scale = self.scale(states, initial)
        return Bounds(self.tolerance, scale[first:], self.eps * rounding)

    @property
    def asks_for_every_state(self) -> bool:
        """Whether digits of every state are asked for, in some row at least."""
        return self.tolerance.local or self.local is not None

    def scale(self, states: Tensor, initial: Tensor, peak: Tensor | None = None, after: Tensor | None = None) -> Tensor:
        """[N, B, D], the size of every component: that up to each state, or around it where rows are asked for that.

        Args:
            peak: [B, D], the size up to the initial state, where that is not the first of all
            after: [B, D], the state after the last, where there is one
        """
        around = states
        if self.asks_for_every_state:
            following = states if after is None else torch.cat([states, after.unsqueeze(0)])
            around = replace(self.tolerance, local=True).scale(following, initial)[: len(states)]
            if self.local is None:
                return around
        so_far = self.tolerance.scale(states, initial if peak is None else peak)
        return so_far if self.local is None else torch.where(self.local.unsqueeze(-1), around, so_far)

    def look_closer(self, rows: Tensor) -> None:
        """From now on these rows [B] are asked for digits of every state, relative to the size around it; progress is measured anew."""
        self.local = rows if self.local is None else self.local | rows
        self._best = torch.where(rows, math.inf, self._best)
        self._since_best = torch.where(rows, 0, self._since_best)
        self._trend.clear()

    def judge(
        self,
        first: int,
        frozen: Tensor,
        finite: Tensor,
        residual: Tensor,
        delta: Tensor,
        bounds: Bounds,
    ) -> None:
        """After an iteration: which chunks have settled, which rows are done, which have stopped improving.

        Args:
            frozen: [n, B], what was not to be touched
            finite: [n, B], where the residual is a number; elsewhere the chain was cut, and nothing is settled
            residual, delta: [n, B, D], before the update, and the update
            bounds: of the states after it
        """
        if self._first_residual is None:
            self._first_residual = residual.abs().amax((0, -1))
        off = torch.where(finite, bounds.ratio(residual), math.inf)
        update = torch.where(frozen, 0, bounds.ratio(delta))
        worst = update.amax(0)
        left = delta if self.quadratic else self._scaled_by_rate(delta, bounds)
        estimate = update if self.quadratic else torch.where(frozen, 0, bounds.ratio(left))
        self.updates.append(worst)
        settled = (frozen | bounds.settles(left)) & finite & bounds.settles(residual)
        self.advance_one(self.leading((self.index[first:] < self.prefix) | settled, first))
        if self.stop.fixed is not None:
            return
        self.finish(self.prefix >= self.chunks, Result.CONVERGED)
        if self.stop.promises:
            if not self.quadratic:  # of true Jacobians more is asked than their name: see error_left
                self.finish(((estimate <= 1) & (off <= 1)).all(0), Result.CONVERGED)
            small = bounds.relative(delta) <= math.sqrt(self.eps) if self.quadratic else bounds.is_rounding(delta)
            self.stuck = self.find_stuck(worst, off.amax(0), small)
        prefix = torch.where(self.active, self.prefix, self.chunks)
        self._trend.append((prefix.amin(), torch.where(self.active, worst, 0).amax()))

    def advance_one(self, leading: Tensor) -> None:
        """By an iteration, after which so many chunks [B], from the first on, have settled."""
        self.count += 1
        # Where all of it is exact, an iteration that is done all the same changes nothing, and does not count.
        self.iterations = self.iterations + (self.active & (self.active & (self.prefix < self.chunks)).any())
        grown = torch.maximum(self.prefix + 1, leading).clamp(max=self.chunks)
        self.prefix = torch.where(self.active, grown, self.prefix)

    def _scaled_by_rate(self, delta: Tensor, bounds: Bounds) -> Tensor:
        """With an approximate Jacobian, the error that is left, [n, B, D], if updates go on falling as they did.

        The rate is that of each element of the state, the largest update of all steps: one element that falls fast does
        not speak for another that creeps.
        """
        size = delta.abs()
        largest = size.amax(0)  # [B, D]
        before, factor_before = self._last
        factor = still_to_come(largest, before)
        self._last = (largest, factor)
        factor = torch.maximum(factor, factor_before)  # one lucky iteration proves nothing
        # There are at most N more iterations: what is below the tolerance / N cannot add up to it, falling or not.
        harmless = size <= torch.maximum(bounds.allowed / self.chunks, ROUNDED * bounds.rounding)
        return torch.where(harmless, size, size * factor)

    def error_left(self, update: Tensor) -> Tensor:
        """The error left after an update [n, B] by the last, true Jacobians, both in units of the tolerance."""
        return error_left(update, update.amax(0), self.updates[-1])

    def find_stuck(self, worst: Tensor, off: Tensor, small: Tensor) -> Tensor:
        """[B]: rows whose update no longer shrinks although it is so small that it should.

        Only rounding is left of them, if the Jacobians are what they are said to be.

        Args:
            worst, off: [B], the largest update and residual, in units of the tolerance
            small: [B], whether the update is so small that it may be rounding
        """
        better = worst < 0.5 * self._best
        self._best = torch.where(better, worst, self._best)
        self._since_best = torch.where(better, 0, self._since_best + 1)
        return (self._since_best >= (3 if self.quadratic else 10)) & small & (off <= 1) & self.active

    @property
    def is_early(self) -> bool:
        """Whether it is too early to give up."""
        return self.count < _PATIENCE

    def falls(self, residuals: list[Tensor]) -> bool:
        """Whether residuals [B] of active rows are above the tolerance and still fall, as far as that can be said yet."""
        if not residuals or not bool((residuals[-1][self.active] > 1).any()):
            return not residuals
        return len(residuals) <= _TREND or bool((residuals[-1] <= 0.5 * residuals[-1 - _TREND])[self.active].any())

    def came_near(self, before: Tensor, residual: Tensor) -> Tensor:
        """[B]: has a residual fallen that much, from ``before``, that Newton may begin there rather than where it is?"""
        relative = residual * max(self.tolerance.rtol, self.eps)
        return (residual <= 0.1 * torch.minimum(before, self.updates[-1])) & (relative <= _NEAR)

    def advance(self, rows: Tensor, count: int) -> None:
        """In these rows [B] so many further chunks are exact, without an iteration; progress is measured anew."""
        self.prefix = torch.where(rows & self.active, (self.prefix + count).clamp(max=self.chunks), self.prefix)
        self.finish(self.prefix >= self.chunks, Result.CONVERGED)
        self._trend.clear()
        self._patience = _PATIENCE

    def residual_suffices(self, residual: Tensor) -> Tensor:
        """[B]: by the residual [n, B, D] after an update, may the row be done?"""
        assert self._first_residual is not None
        return self.stop.residual_suffices(residual, self._first_residual)

    def why_hopeless(self) -> str | None:
        """Whether neither the growth of the exact prefix nor the fall of the updates can reach the end in time."""
        if self.count < self._patience or len(self._trend) <= _TREND:
            return None
        prefix_then, prefix = (int(self._trend[at][0]) for at in (-1 - _TREND, -1))
        update_then, update = (float(self._trend[at][1]) for at in (-1 - _TREND, -1))
        remaining = self.chunks - prefix
        by_prefix = remaining * _TREND / (prefix - prefix_then)
        by_update = math.inf
        if 0 < update < update_then < math.inf:
            by_update = _TREND * math.log(max(update, 1.0)) / math.log(update_then / update)
        needed = min(by_prefix, by_update)
        if self.count + needed > self.limit:
            return f"gave up after {self.count} iterations: about {needed:.0f} more were needed"
        # To hand over takes as long as an iteration or two, and tells the caller of it: for a few more it is not worth that.
        if self.compare_with_loop and needed > max(remaining / 2, _FEW_MORE):
            return (
                f"gave up after {self.count} iterations: about {needed:.0f} more were needed, and the loop is as fast"
            )
        return None


def still_to_come(update: Tensor, before: Tensor) -> Tensor:
    """What later updates add up to in units of this one, if they go on falling as they did; at least 1."""
    total = torch.where(update < before, (update / (before - update)).clamp(min=1), math.inf)
    return torch.where(update == 0, 1.0, total)


def error_left(update: Tensor, largest: Tensor, before: Tensor) -> Tensor:
    """The error left after an update by true Jacobians, all in units of the tolerance.

    They are believed as far as a row's largest update is smaller than the one before it, or an update is negligible.
    The same is said of numbers below, and by ``nn.kernels.settled`` in a kernel.
    """
    return torch.where(update <= NEGLIGIBLE, update, update * still_to_come(largest, before))


def error_left_of_one(update: float, before: float) -> float:
    """``error_left`` of a row's only update: in PyTorch that takes longer than the kernels that found it."""
    if update <= NEGLIGIBLE:
        return update
    return update * max(update / (before - update), 1.0) if update < before else math.inf
