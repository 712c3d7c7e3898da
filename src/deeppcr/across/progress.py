"""The status of every row of a solve over ranks: by what all of them said, so that all decide alike.

Shapes: N chunks on this rank (n of them from chunk ``first`` on), B rows, D the packed state.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..convergence import Progress, error_left, still_to_come
from ..newton import Newton
from ..newton.safeguards import largest_of
from ..solution import Result
from ..tolerance import ROUNDED, Bounds
from .part import Part

#: Of so many groups of chunks, all ranks together, it is told how large they are.
_GROUPS = 256


class Shared(Progress):
    """The status of every row, the same on all ranks; chunks are counted through all of them."""

    stuck: Tensor

    def __init__(self, part: Part, newton: Newton, chunk: int):
        counts, before = part.cut(chunk)
        settings = newton.of_progress(part.layout.dtype)
        super().__init__(part.layout, part.total, chunk, chunks=before[-1], **settings)
        self.part: Part = part
        self.before: int = before[part.ranks.rank]
        own = torch.arange(counts[part.ranks.rank], device=part.layout.device)
        self.index: Tensor = own.unsqueeze(1) + self.before

    @property
    def exact_steps(self) -> Tensor:
        trusted = self.codes < Result.UNCERTIFIED.severity
        return torch.where(trusted, self.length, self.part.steps_before(self.prefix, self.chunk))

    def leading(self, fine: Tensor, first: int = 0) -> Tensor:
        """On this rank alone: how many chunks of the whole come before the first that is not ``fine``."""
        if not len(fine):
            return torch.full_like(self.prefix, self.chunks)
        return super().leading(fine, first)

    def hides(self, sizes: Tensor, errors: Tensor, closer: Tensor | None, entry: Tensor) -> Tensor:
        """[B]: ``Tolerance.hides`` of the whole, on all ranks alike.

        Ranks tell each other the largest of groups of their chunks, so many that the message does not depend on the number of steps. By
        those a transient is seen that hides something on another rank; what is finer than a group, each rank sees in its own part.

        Args:
            sizes, errors, closer: [N, B, D], of this rank; not below 0
            entry: [B, D], the state that this rank starts from
        """
        dtype = torch.promote_types(sizes.dtype, torch.float32)
        series = torch.stack([sizes, errors, sizes if closer is None else closer]).to(dtype)
        group = -(-self.chunks // _GROUPS)
        counts = [-(-each // group) for each in self.part.cut(self.chunk)[0]]
        padded = series.new_zeros(3, max(counts) * group, *series.shape[2:])
        padded[:, : len(sizes)] = series
        grouped = padded.unflatten(1, (-1, group)).amax(2)
        own = torch.zeros_like(self.active)
        if group > 1 and len(sizes):
            own = self.tolerance.hides(series[0], entry.to(dtype), series[1], series[2])
        told = self.part.ranks.gather(torch.cat([grouped.flatten(), own.to(dtype)]))
        hidden = (told[:, -len(own) :] > 0).any(0)
        groups = told[:, : -len(own)].unflatten(1, grouped.shape)
        joined = torch.cat([each[:, :count] for each, count in zip(groups, counts, strict=True)], 1)
        return hidden | self.tolerance.hides(joined[0], self.part.initial.detach().to(dtype), joined[1], joined[2])

    def seem_done(self, found: dict[str, Tensor]) -> Tensor:
        """[B]: by what all ranks said after an iteration, rows of which the one before was enough."""
        self.finish(found["lost"] > 0, Result.NON_FINITE)
        if self._first_residual is None:
            self._first_residual = found["residual"].to(self.layout.dtype)
        if not self.count or self.stop.fixed is not None:
            return torch.zeros_like(self.active)
        size = found["residual"].to(self.layout.dtype)[None, :, None]
        done = self.active & self.stop.residual_suffices(size, self._first_residual)
        if not self.stop.by_residual:
            worst = found["worst"]
            done &= (found["off"] <= 1) & (error_left(worst, worst, self.updates[-1]) <= 1) & self.quadratic
        return done

    def heard(self, found: dict[str, Tensor], done: Tensor, *, counts: bool) -> None:
        """After an iteration, and what all ranks said of it.

        Args:
            done: [B], rows that are done by it alone
            counts: False for a look after the last iteration, at what it left
        """
        self.finish(done, Result.CONVERGED)
        if not counts:
            return
        worst, off = found["worst"], found["off"]
        if self.active.any() or not self.updates:
            self.updates.append(torch.where(done, 0, worst))
        self.advance_one(-found["unsettled"].long())
        if self.stop.fixed is not None:
            return
        self.finish(self.prefix >= self.chunks, Result.CONVERGED)
        if self.stop.promises:
            if not self.quadratic:
                self.finish((self._estimate(found) <= 1) & (off <= 1), Result.CONVERGED)
            self.stuck = self.find_stuck(worst, off, found["large"] == 0)
        prefix = torch.where(self.active, self.prefix, self.chunks)
        self._trend.append((prefix.amin(), torch.where(self.active, worst, 0).amax()))

    def _estimate(self, found: dict[str, Tensor]) -> Tensor:
        """[B]: the error that is left, in units of the tolerance, if updates go on falling as they did: see ``Progress``."""
        largest = found["largest"].to(self.layout.dtype)
        before, factor_before = self._last
        factor = still_to_come(largest, before)
        self._last = (largest, factor)
        scaled = found["creeping"] * torch.maximum(factor, factor_before).double()
        return torch.maximum(found["harmless"], torch.where(found["creeping"] > 0, scaled, 0).amax(-1))

    def rates(self, delta: Tensor, bounds: Bounds) -> dict[str, Tensor]:
        """What ``_estimate`` has to know of an update [n, B, D] by approximate Jacobians."""
        size = delta.abs()
        unit = torch.maximum(bounds.allowed, ROUNDED * bounds.rounding)
        ratio = torch.where(size == 0, 0, size / unit).double().nan_to_num(math.inf, math.inf)
        harmless = size <= torch.maximum(bounds.allowed / self.chunks, ROUNDED * bounds.rounding)
        return {
            "largest": largest_of(size),
            "creeping": largest_of(torch.where(harmless, 0, ratio)),
            "harmless": largest_of(torch.where(harmless, ratio, 0)).amax(-1),
        }
