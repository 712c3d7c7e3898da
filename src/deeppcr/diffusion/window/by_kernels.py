"""The iteration as a handful of kernels; its plain reference is ``Iteration``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...launch import aligned, cdiv, launch, next_power_of_2
from ..coupling import Coupling
from ..samplers import Coefficients
from . import kernels
from .iteration import RIDGE, Iteration

#: numbers in a program's tile, where a row is not longer; the most steps and columns of a tile
_TILE, _STEPS, _COLUMNS = 512, 32, 1024
#: how many samples, or steps, a program reads at once where it needs something of all of them
_SAMPLES, _BLOCK = 16, 1024
_WARPS = 4


class FusedIteration(Iteration):
    """See ``Iteration``: same arguments, same results but for rounding. The rows of a sample lie together."""

    in_words: str | None = "iteration: Triton kernels"

    def __init__(self, coefficients: Coefficients, coupling: Coupling, samples: int, width: int, **settings: Any):
        super().__init__(coefficients, coupling, samples, width, **settings)
        # The first row of each sample.
        self.offsets: Tensor = torch.zeros(samples, dtype=torch.long, device=self.states.device)
        columns = min(next_power_of_2(width), _COLUMNS)
        # A program's: its steps (or rows) and columns.
        self.tile: tuple[int, int, int] = (width, min(_STEPS, _TILE // columns) or 1, columns)

    def gather(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        states = self.states
        inputs = states.new_empty(count, self.tile[0])
        times, who = self.times.new_empty(count), self.rows.new_empty(count)
        scaled = self.scale is not None
        with torch.cuda.device_of(states):
            launch(
                kernels.gather,
                cdiv(count, self.tile[1]),
                (
                    *(states, self.scale if scaled else states, self.times, self.counters),
                    *(inputs, times, who, self.offsets),
                    *(count, self.length, self.samples, self.size),
                ),
                (scaled, *self.tile, _SAMPLES),
                warps=_WARPS,
                integers=(self.times.dtype,),  # the one pointer of a kind that may change
            )
        return inputs, times, who

    def advance(self, outputs: Tensor, leave: bool) -> None:
        states, length, samples = self.states, self.length, self.samples
        coefficients, tile, sizes = self.coefficients, self.tile, (length, samples, self.size)
        programs = samples * cdiv(length, self.tile[1])
        residuals, values, used = torch.empty_like(states[1:]), self.values, self.used
        verdict, products = states.new_empty(samples, length), states.new_empty(5, samples, length)
        with torch.cuda.device_of(states):
            launch(
                kernels.judge,
                programs,
                (
                    *(states, aligned(outputs.contiguous()), states if self.shift is None else self.shift),
                    *(coefficients.keep, coefficients.gain, self.counters, self.offsets),
                    *(values, residuals, used, self.measured, self.moved, self.growth),
                    *(self.noise if leave else self.rough_noise, *sizes),
                ),
                (self.shift is not None, *tile),
                warps=_WARPS,
            )
            update = aligned(self.coupling.spread(residuals).contiguous())
            last = (update, update, update)
            if self.accelerate:
                last = (self.last_updates, self.last_plains, self.last_sizes)
                launch(
                    kernels.compare,
                    programs,
                    (update, self.last_updates, self.last_sizes, used, products, *sizes),
                    tile,
                    warps=_WARPS,
                )
            launch(
                kernels.move,
                programs,
                (
                    *(states, values, update, *last, used, products, self.counters, verdict),
                    *(self.moved, self.excess, self.thresholds, self.allowance, self.floor, RIDGE, *sizes),
                ),
                (self.accelerate, leave, *tile, _BLOCK),
                warps=_WARPS,
            )
            launch(
                kernels.count,
                samples,
                (
                    *(verdict, self.counters, self.growth, self.excess, self.thresholds, self.allowance),
                    *(self.floor, self.bound, self.strict, self.settled, *sizes),
                ),
                (leave, _BLOCK),
                warps=_WARPS,
            )
