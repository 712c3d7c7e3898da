"""One iteration on all unfinished steps: tensors in, tensors out, nothing read by the host.

Shapes: L steps, B samples, D the flattened sample, K slots, N rows of one call of the network.

The unknowns are the states after all steps. In an iteration the network sees every unfinished pair of step and sample
as a row; what the steps make of its outputs differs from the states by the residuals; the prior's bidiagonal system
turns them into an update (``Coupling``). From the last two updates the next is extrapolated, with one coefficient for
every step and sample that knows of the steps before it alone: so nothing that is exact is ever spoilt by what is not.
(Anderson's acceleration of depth one, made triangular as in Tang et al. 2024, "Accelerating parallel sampling of
diffusion models".)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .coupling import Coupling
from .step import Coefficients

#: where an update is this small against the state, it is rounding: a step may leave with it
_ROUNDING = 32.0


class Iteration:
    """The unknowns of one run and what an iteration does to them, in buffers that stay where they are.

    Args:
        coefficients: of the L steps
        coupling: of the L steps
        samples, width: B, D
        size: at most so many steps of a sample are evaluated in an iteration
        freeze: a step leaves when its update is below this
        accelerate: extrapolate updates
        adds_noise: whether ``shift`` is used
    """

    def __init__(
        self,
        coefficients: Coefficients,
        coupling: Coupling,
        samples: int,
        width: int,
        *,
        size: int,
        freeze: float,
        accelerate: bool,
        adds_noise: bool,
    ):
        self.coefficients, self.coupling = coefficients, coupling
        self.freeze, self.accelerate = freeze, accelerate
        length, slots = len(coefficients.timesteps), coefficients.slots
        self.length, self.samples, self.size = length, samples, min(size, length)
        like = coefficients.gain
        # One row of padding: rows that only fill up a call read and write there.
        self.times = torch.cat([coefficients.timesteps, coefficients.timesteps[-1:]])
        self.scale = torch.cat([coefficients.scale, coefficients.scale[-1:]]).unsqueeze(-1)
        self.states = like.new_zeros(length + 1, samples, width, slots)  # states[0] is the initial one
        self.outputs = like.new_zeros((length + 1) * samples, width)
        self.shift = like.new_zeros(length, samples, width) if adds_noise else None
        if accelerate:
            self.last_states, self.last_update = (like.new_zeros(length, samples, width, slots) for _ in range(2))
        whole = {"dtype": torch.long, "device": like.device}
        self.index = torch.arange(length, **whole).unsqueeze(1)  # [L, 1]
        self.numbers = torch.arange(length * samples, **whole)
        self.rows = torch.empty(length * samples + 1, **whole)
        self.prefix, self.iterations, self.evaluations, self.diverged = torch.zeros(4, samples, **whole)
        self.measured = like.new_zeros(length, samples)
        self.summary = torch.zeros(3, dtype=torch.float64, device=like.device)

    @property
    def most_rows(self) -> int:
        return self.size * self.samples

    def load(self, initial: Tensor, shift: Tensor | None, start: Tensor) -> None:
        """Begin a run.

        Args:
            initial: [B, D, K]
            shift: [L, B, D] or None
            start: [L, B, D, K], a guess of the states
        """
        self.states[0].copy_(initial)
        self.states[1:].copy_(start)
        if self.shift is not None and shift is not None:
            self.shift.copy_(shift)
        self.outputs.zero_()
        for counter in (self.prefix, self.iterations, self.evaluations, self.diverged, self.measured):
            counter.zero_()
        if self.accelerate:
            self.last_update.zero_()

    def run(self, network: Callable[[Tensor, Tensor, Tensor], Tensor], count: int, leave: bool) -> None:
        """One iteration.

        Args:
            network: of rows [N, D], times [N] and samples [N]
            count: N, at least the number of unfinished pairs of step and sample
            leave: finished steps leave the window; False while the network is imprecise
        """
        length, samples, prefix = self.length, self.samples, self.prefix
        active = (self.index >= prefix) & (self.index < prefix + self.size)  # [L, B]
        rows = self._rows(active, count)
        flat = self.states.flatten(0, 1)
        step = rows // samples
        outputs = network(flat[rows, :, 0] * self.scale[step], self.times[step], rows % samples)
        self.outputs.index_copy_(0, rows, outputs)

        states = self.states[1:]
        found = self.outputs[: length * samples].view(length, samples, -1)
        values = self.coefficients.advance(slice(None), self.states[:-1], found, self.shift)
        residual = values - states
        size = residual.abs().amax((-2, -1))
        # Not finite: from an exact state it is the loop's own fate; elsewhere the iterate has strayed, and the chain is cut.
        finite = torch.isfinite(size)
        first = self.index == prefix
        self.diverged.logical_or_((active & first & ~finite).any(0))
        used = active & finite
        residual = torch.where(used[..., None, None], residual, 0)
        size = torch.where(first, 0, size)  # about to be replaced by its value
        self.measured.copy_(torch.where(used, size, self.measured))

        update = self.coupling.spread(residual)
        largest = update.abs().amax((-2, -1))
        if self.accelerate:
            update, largest = self._extrapolate(update, largest, active)
        stable = torch.isfinite(largest)
        update = torch.where(stable[..., None, None], update, residual)
        moved = torch.where((first & finite)[..., None, None], values, states + update)
        states.copy_(moved)

        allowed = self.freeze + _ROUNDING * torch.finfo(moved.dtype).eps * moved.abs().amax((-2, -1))
        done = (self.index < prefix) | (used & stable & (largest <= allowed))
        self.evaluations += active.sum(0)
        self.iterations += prefix < length
        if leave:
            run = done.long().cumprod(0).sum(0)
            exact = (first & used).any(0).long()  # its start is exact, so it is now
            prefix.copy_(torch.maximum(run, prefix + exact))
        left = (length - prefix).clamp(max=self.size).sum()
        largest = torch.where(active, largest, 0).max()
        self.summary.copy_(torch.stack([left.double(), largest.double(), self.diverged.any().double()]))

    def _rows(self, active: Tensor, count: int) -> Tensor:
        """[N]: the numbers of the active pairs, in order, filled up with that of the padding."""
        chosen = active.flatten()
        total = chosen.numel()
        place = torch.where(chosen, chosen.cumsum(0) - 1, total)
        self.rows.fill_(total)
        self.rows.scatter_(0, place, self.numbers)
        return self.rows[:count]

    def _extrapolate(self, update: Tensor, largest: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """From this update and the last: the step that makes their combination smallest, over all steps up to each one.

        Where there was no last update, or it was the same, nothing is added.
        """
        states = self.states[1:]
        change = update - self.last_update  # of the update, for a change of the states
        moved = states - self.last_states + change
        known = (self.last_update != 0).any(-1).any(-1) & active
        change = torch.where(known[..., None, None], change, 0)
        self.last_states.copy_(states)
        self.last_update.copy_(update)
        along = (change * update).sum((-2, -1)).cumsum(0)
        length = (change * change).sum((-2, -1)).cumsum(0)
        weight = torch.where(known & (length > 0), along / length, 0)
        extrapolated = update - weight[..., None, None] * moved
        size = extrapolated.abs().amax((-2, -1))
        return extrapolated, torch.maximum(largest, size)
