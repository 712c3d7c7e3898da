"""A short window that moves along the steps: few rows a step, for networks of which every row costs.

Shapes: L steps, B samples, D the flattened sample, K slots, W steps in the window, of which each sample has one of its own.

An iteration is that of ``Iteration``, on the window alone, and learns from the steps that it has seen:

- The slope of the network's output along a step's own moves (a secant) takes the place of the prior's, one number for a step and a sample.
- Steps that come into the window begin where the network's output, apart from that slope, stays what it was at the window's end.
- A step leaves when what is left of its error is small: its update times the rate at which its updates fall. To wait until the
  update itself is small would evaluate every step once more.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...linear import BlockDiagonal, Blocks, Diagonal, Scalar
from ..coupling import Coupling
from ..prior import GaussianPrior
from ..samplers import Coefficients
from .iteration import FAR, NOISE, Iteration, _distance, _size
from .rounding import LARGE

#: Data that vary far more, and far less, than any: between the slopes that they give lies what a secant may find.
_WIDE, _NARROW = 1e6, 1e-6
#: and by this share of that beyond, for networks are not ideal
_BEYOND = 0.2
#: Where a step's input has moved by more than this share of what a coarse network rounds, its output tells a slope: rounding has no
#: direction, and of all coordinates together little of it is left.
_HEARD = 0.25
#: and by so many times what two outputs differ by in any one direction: so much of a slope is known then
_TIMES = 4.0
#: buffers that an iteration writes
_WRITTEN = ("states", "values", "inputs", "outputs", "used", "share", "sizes", "growth", "excess", "measured")
#: updates that fall more slowly than this tell nothing of what is left; and none is taken to fall faster than that
_SLOWEST, _FASTEST = 0.7, 0.25


class SlidingIteration(Iteration):
    """See ``Iteration``: the same arguments, none is extrapolated from; ``size`` may change from iteration to iteration."""

    prefix: Tensor
    iterations: Tensor
    evaluations: Tensor
    jumps: Tensor

    # Rounding has no direction, and of many steps little adds up. What an iteration leaves has one.
    margin: float = 0.25
    plain: bool = True
    may_be_rough: bool = False
    in_words: str | None = "iteration: a window that slides, with slopes as seen"

    def __init__(self, coefficients: Coefficients, coupling: Coupling, samples: int, width: int, **settings: Any):
        rounded, outputs = settings.pop("rounded"), settings.pop("outputs")
        super().__init__(coefficients, coupling, samples, width, **{**settings, "accelerate": False})
        self.rounded: Tensor = rounded.to(self.freeze).reshape(-1, 1)
        least = _TIMES * outputs.to(self.freeze).reshape(-1, 1)
        self.least_move: Tensor = least / coefficients.scale.abs().unsqueeze(-1)
        like, length, steps, prior = coefficients.gain, self.length, coupling.steps, coupling.prior
        assert isinstance(prior, GaussianPrior)
        self.slopes: Tensor = prior.slopes(steps).to(like).reshape(length, 1, -1)  # [L, 1, 1 or D], in the basis
        wide, narrow = (GaussianPrior(v).slopes(steps).to(like).reshape(length, 1, 1) for v in (_WIDE, _NARROW))
        self.lowest: Tensor = wide
        self.range: Tensor = narrow - wide
        # Of a step's slope, where between these two it is on average; what the network last saw and said there; the last update.
        share = (self.slopes.mean(-1, keepdim=True) - wide) / self.range
        self.first_share: Tensor = share.squeeze(-1).expand(length, samples)
        self.share: Tensor = self.first_share.clone()
        self.inputs: Tensor = torch.zeros_like(self.values)
        self.outputs: Tensor = like.new_zeros(length, samples, width)
        self.sizes: Tensor = like.new_zeros(length, samples)
        self.who: Tensor = torch.arange(samples, device=like.device)
        self.seen: Tensor = like.new_zeros(coefficients.slots)  # of a state's slots, by the network
        self.seen[0] = 1
        # A network that rounds its outputs moves a step by that times its gain; what changes more tells something.
        gain = coefficients.slope.abs().amax(-1).reshape(length, 1)
        rounding, eps = torch.finfo(like.dtype).eps, settings["eps"][0]
        self.told: Tensor = NOISE * (rounding + eps * gain)
        self.heard: float = max(NOISE * rounding, _HEARD * eps)
        # Behind the last step there is a row of padding: what a window holds beyond the last step is written there.
        self._padded = {name: _pad(getattr(self, name)) for name in _WRITTEN}
        for name, padded in self._padded.items():
            setattr(self, name, padded[:-1])

    def forget(self) -> None:
        super().forget()
        self.sizes.fill_(math.inf)
        self.share.copy_(self.first_share)

    def advance(self, outputs: Tensor, leave: bool) -> None:
        length, samples, size, who = self.length, self.samples, self.size, self.who
        found = outputs.new_empty((length + 1) * samples, outputs.shape[1])
        found.index_copy_(0, self.rows[: len(outputs)], outputs)
        found = found.view(length + 1, samples, -1)
        # The window, and as many steps ahead of it: all of its own may leave at once.
        index = self.prefix + torch.arange(2 * size, device=outputs.device).unsqueeze(1)  # [2 W, B]
        there, at = index < length, index.clamp(max=length - 1)
        near = slice(0, size)
        here, first = at[near], index[near] == self.prefix
        place = torch.where(there, at, length)
        before, after = self.states[at, who], self.states[at + 1, who]
        self.iterations += self.prefix < length
        self.evaluations += there[near].sum(0)

        said = found[here, who]  # [W, B, D]
        values = self._steps(here, before[near], said)
        finite = _size(values) < math.inf
        self.diverged.logical_or_((there[near] & first > finite).any(0))
        used = there[near] & finite
        self._learn(here, place[near], used, before[near], said, values)
        slope = self._slopes(at)
        expected = self._expected(slope, before, said, used)
        ahead = self._steps(at[size:], before[size:], expected)
        # Beyond the window only steps that nobody has seen move by what is expected of them.
        seen = used, (self.used[at[size:], who] == 0) & there[size:] & (_size(ahead) < math.inf)
        values = torch.where(torch.cat(seen)[..., None, None], torch.cat([values, ahead]), after)
        residual = values - after
        update = self._spread(at, slope, residual)
        largest = _size(update)
        # A step from an exact state is exact as it stands; so is, for want of better, where the update overflowed.
        exact = largest.isfinite().logical_not_()
        exact[near] |= first
        moved = torch.where(exact[..., None, None], values, after + update)
        self._put("states", place + 1, moved)
        measured = _size(residual[near]).masked_fill_(first, 0)
        self._put("measured", place[near], torch.where(used, measured, self.measured[here, who]))
        self._leave(here, place[near], first, used, largest[near], _size(moved[near]))
        self._put("sizes", place, largest.nan_to_num(math.inf))

    def _put(self, name: str, place: Tensor, values: Tensor) -> None:
        """Write values [N, B, ...] of a buffer, at places [N, B] of which none but the padding's comes twice."""
        self._padded[name].index_put_((place, self.who.expand_as(place)), values.to(self._padded[name].dtype))

    def _leave(self, at: Tensor, place: Tensor, first: Tensor, used: Tensor, largest: Tensor, height: Tensor) -> None:
        """Steps [W, B] that are right, from the first on, leave; where all have left, a sample may have to go back."""
        who, length = self.who, self.length
        # How fast updates fall: of a step no faster than of any before it, so that none leaves by chance.
        rate = (largest / self.sizes[at, who]).nan_to_num(math.inf).masked_fill(first, 0)
        rate = rate.cummax(0).values.clamp(min=_FASTEST)
        left = torch.where(rate < _SLOWEST, largest * rate / (1 - rate), largest).minimum(largest)
        # Of a step that was evaluated once it is not known how it amplifies errors: it must be right but for rounding.
        threshold = torch.where(self.used[at, who] > 1, self.thresholds[at, who], 0) + self.allowance * height
        # What hardly falls and is no larger than what the network rounds, will not be much smaller.
        rounded = self.rounded[at, 0] * (self.coefficients.scale[at].abs() * height / LARGE).clamp_min(1)
        stays = (first | (rate >= _SLOWEST)) & (self.used[at, who] > 1) & (largest <= rounded)
        small = (left <= threshold) | stays
        # To go back for what the network rounds would not help: the loop rounds as much.
        rounds = torch.where(rounded > 0, rounded + self.rounding * height, self.floor * height)
        beyond = (left - rounds).clamp_min(0)
        excess = torch.where((small > first) & ~stays, beyond, 0)
        self._put("excess", place, torch.where(used, excess, self.excess[at, who]))
        jumped = first > small
        if self.coefficients.limit is not None:
            self.jumps += (jumped & (largest > max(self.bound, FAR * self.coefficients.limit))).any(0)
        small[1:] &= ~jumped[:-1]
        unfinished = self.prefix < length
        self.prefix += ((small | first) & used).to(torch.long).cumprod(0).sum(0)
        self._go_back(unfinished & (self.prefix == length))

    def _learn(self, at: Tensor, place: Tensor, used: Tensor, before: Tensor, said: Tensor, values: Tensor) -> None:
        """From what has changed since the network last saw these steps: slopes, and how errors grow."""
        who = self.who
        moved = before - self.inputs[at, who]
        again = used & (self.used[at, who] > 0)
        distance, change = _distance(moved), _distance(values, self.values[at, who])
        told = again & (change > self.told[at, 0] * _distance(values))
        ratio, growth = change / distance, self.growth[at, who]
        ratio = torch.maximum(ratio, ratio.sqrt() * growth.sqrt())
        self._put("growth", place, torch.where(told & (ratio < math.inf), ratio, growth))
        # The prior's part of the slope is known: the secant is of the rest, of all coordinates together.
        move = self.coupling.into(moved[..., :1]).squeeze(-1)
        rest = self.coupling.into((said - self.outputs[at, who]).unsqueeze(-1)).squeeze(-1) - self.slopes[at, 0] * move
        slope = self.slopes[at, 0].mean(-1) + (rest * move).sum(-1) / move.square().sum(-1)
        share = ((slope - self.lowest[at, 0, 0]) / self.range[at, 0, 0]).clamp(-_BEYOND, 1 + _BEYOND)
        heard = (distance > self.heard * _distance(before)) & (distance > self.least_move[at, 0])
        known = again & heard & share.isfinite()
        share = torch.where(known, share, self.share[at, who])
        # Steps that were not seen twice are as the last one is that was.
        number = torch.arange(len(at), device=at.device).unsqueeze(1)
        last = torch.where(known, number, -1).amax(0)
        latest = share.gather(0, last.clamp(min=0).unsqueeze(0)).squeeze(0)
        self._put("share", place, torch.where((number > last) & (last >= 0), latest, share))
        beyond = (self.index >= self.prefix + self.size) & (self.used == 0) & (last >= 0)
        torch.where(beyond, latest, self.share, out=self.share)
        for name, new in (("inputs", before), ("outputs", said), ("values", values)):
            mask = used.reshape(*used.shape, *[1] * (new.ndim - 2))
            self._put(name, place, torch.where(mask, new, getattr(self, name)[at, who]))
        self._put("used", place, (self.used[at, who] + used.to(torch.int8)).clamp(max=2))

    def _slopes(self, at: Tensor) -> Tensor:
        """[N, B, 1 or D]: of the outputs in the samples, in the basis."""
        mean = self.lowest[at, 0] + self.share[at, self.who].unsqueeze(-1) * self.range[at, 0]
        slopes = self.slopes[at, 0]
        return slopes + (mean - slopes.mean(-1, keepdim=True))

    def _expected(self, slope: Tensor, before: Tensor, said: Tensor, used: Tensor) -> Tensor:
        """[W, B, D]: what the network would say ahead of the window, if all but its slope stayed as it is at the window's end."""
        into, out_of = self.coupling.into, self.coupling.out_of
        size = self.size
        end = (used.to(torch.long).cumprod(0).sum(0) - 1).clamp(min=0)  # [B]
        place = end, self.who
        there = into(before[:size][place][..., :1]).squeeze(-1)
        rest = into(said[place].unsqueeze(-1)).squeeze(-1) - slope[:size][place] * there
        samples = into(before[size:][..., :1]).squeeze(-1)
        return out_of((slope[size:] * samples + rest).unsqueeze(-1)).squeeze(-1)

    def _steps(self, at: Tensor, before: Tensor, said: Tensor) -> Tensor:
        """What the steps [N, B] make of states [N, B, D, K] and outputs [N, B, D]."""
        shift = None if self.shift is None else self.shift[at, self.who].flatten(0, 1).unsqueeze(1)
        rows = before.flatten(0, 1).unsqueeze(1), said.flatten(0, 1).unsqueeze(1)
        return self.coefficients.advance(at.flatten(), *rows, shift).view_as(before)

    def _spread(self, at: Tensor, slope: Tensor, residual: Tensor) -> Tensor:
        """The update for the residuals of these steps, from an exact state on."""
        coefficients, slots = self.coefficients, self.coefficients.slots
        keep, gain = coefficients.keep[at, 0, 0], coefficients.slope[at, 0, 0]  # [N, B, K, K], [N, B, K]
        if coefficients.limit is not None:
            keep = keep + (coefficients.weight * coefficients.from_sample)[at, 0, 0, None, None]
        blocks = keep.unsqueeze(2) + slope[..., None, None] * (gain.unsqueeze(-1) * self.seen).unsqueeze(2)
        rows = self.coupling.into(residual)
        couplings: Blocks
        if slots > 1:
            couplings = BlockDiagonal(blocks.expand(*residual.shape, slots))
        elif blocks.shape[2] == 1:
            couplings = Scalar(blocks[:, :, 0, 0, 0])
        else:
            couplings = Diagonal(blocks[..., 0, 0])
        return self.coupling.out_of(self.coupling.solve_with(couplings[1:], rows))


def _pad(buffer: Tensor) -> Tensor:
    return torch.cat([buffer, torch.zeros_like(buffer[:1])])
