"""Noise schedules: how much of the signal is left at each time of a diffusion.

At time t a sample is ``sqrt(abar_t) x0 + sqrt(1 - abar_t) noise``. Training knows T times, 0 (almost clean) to T - 1
(almost noise); sampling visits L of them, from the noisiest to the cleanest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

#: beyond this, a cosine schedule would destroy all that is left in one step
_MOST_BETA = 0.999


@dataclass(frozen=True, eq=False)
class Schedule:
    """The signal left at every training time, and the times that sampling visits.

    Args:
        alphas_bar: [T], decreasing in (0, 1): the share of variance that is signal at times 0 .. T - 1
        timesteps: [L], the times visited, from noisy to clean; None: all of them
        last_alpha_bar: the share of signal that the last step arrives at

    >>> from deeppcr.diffusion import Schedule
    >>> schedule = Schedule.linear(1000).take(50)
    >>> schedule.steps, schedule.training_steps, schedule.timesteps[:3].tolist()
    (50, 1000, [980, 960, 940])
    """

    alphas_bar: Tensor
    timesteps: Tensor = None  # type: ignore[assignment]
    last_alpha_bar: float = 1.0

    def __post_init__(self) -> None:
        bars = torch.as_tensor(self.alphas_bar).detach().to("cpu", torch.float64)
        if bars.ndim != 1 or not len(bars):
            raise ValueError(f"alphas_bar: expected [T], got shape {tuple(bars.shape)}")
        if not bool(((bars > 0) & (bars < 1)).all()) or bool((bars[1:] > bars[:-1]).any()):
            raise ValueError("alphas_bar: expected shares of signal in (0, 1) that decrease from time 0 to T - 1")
        times = torch.arange(len(bars) - 1, -1, -1) if self.timesteps is None else torch.as_tensor(self.timesteps)
        times = times.detach().to("cpu", torch.long)
        if times.ndim != 1 or not len(times) or bool((times[1:] >= times[:-1]).any()):
            raise ValueError("timesteps: expected [L] whole numbers that decrease, from noisy to clean")
        if int(times[0]) >= len(bars) or int(times[-1]) < 0:
            raise ValueError(
                f"timesteps: expected times in 0 .. {len(bars) - 1}, got {int(times[-1])} .. {int(times[0])}"
            )
        object.__setattr__(self, "alphas_bar", bars)
        object.__setattr__(self, "timesteps", times)

    @staticmethod
    def from_betas(betas: Tensor) -> Schedule:
        """From the variances ``beta_t`` that the T training steps add.

        >>> import torch
        >>> Schedule.from_betas(torch.full((3,), 0.5)).alphas_bar
        tensor([0.5000, 0.2500, 0.1250], dtype=torch.float64)
        """
        return Schedule(torch.cumprod(1 - torch.as_tensor(betas).to(torch.float64), 0))

    @staticmethod
    def linear(training_steps: int = 1000, *, start: float = 1e-4, end: float = 0.02) -> Schedule:
        """DDPM's: betas grow linearly. Those of 1,000 steps are rescaled, so that every T from 21 on destroys as much signal;
        with fewer steps the largest betas are cut at 0.999, and nearly all signal is lost at once.

        >>> Schedule.linear(250).alphas_bar.shape
        torch.Size([250])
        """
        scale = 1000 / _whole(training_steps)
        betas = torch.linspace(start * scale, end * scale, training_steps, dtype=torch.float64)
        return Schedule.from_betas(betas.clamp(max=_MOST_BETA))

    @staticmethod
    def scaled_linear(training_steps: int = 1000, *, start: float = 0.00085, end: float = 0.012) -> Schedule:
        """Latent diffusion's: the square roots of the betas grow linearly; rescaled as ``linear`` is.

        >>> Schedule.scaled_linear().steps
        1000
        """
        scale = 1000 / _whole(training_steps)
        betas = torch.linspace(start**0.5, end**0.5, training_steps, dtype=torch.float64) ** 2 * scale
        return Schedule.from_betas(betas.clamp(max=_MOST_BETA))

    @staticmethod
    def cosine(training_steps: int = 1000, *, offset: float = 0.008) -> Schedule:
        """The cosine schedule of Nichol and Dhariwal.

        >>> Schedule.cosine().steps
        1000
        """
        times = torch.linspace(0, 1, _whole(training_steps) + 1, dtype=torch.float64)
        signal = torch.cos((times + offset) / (1 + offset) * math.pi / 2) ** 2
        return Schedule.from_betas((1 - signal[1:] / signal[:-1]).clamp(max=_MOST_BETA))

    @property
    def training_steps(self) -> int:
        return len(self.alphas_bar)

    @property
    def steps(self) -> int:
        """L, the steps of a sampler."""
        return len(self.timesteps)

    def take(self, steps: int, spacing: Literal["leading", "trailing", "linspace"] = "leading") -> Schedule:
        """The same noise, sampled in so many steps.

        Args:
            steps: L, at most T
            spacing: which of the T times: every (T // L)-th from 0 on ("leading"), every (T / L)-th down from the
                noisiest ("trailing"), or equally spaced with both ends ("linspace")

        >>> Schedule.linear(10).take(5, "trailing").timesteps
        tensor([9, 7, 5, 3, 1])
        """
        total = self.training_steps
        if not 1 <= _whole(steps) <= total:
            raise ValueError(f"steps: expected 1 to {total} of the training steps, got {steps}")
        if spacing == "leading":
            times = torch.arange(steps).flip(0) * (total // steps)
        elif spacing == "trailing":
            times = total - 1 - (torch.arange(steps, dtype=torch.float64) * total / steps).round().long()
        elif spacing == "linspace":
            times = torch.linspace(0, total - 1, steps, dtype=torch.float64).round().long().flip(0)
        else:
            raise ValueError(f'spacing: expected "leading", "trailing" or "linspace", got {spacing!r}')
        return replace(self, timesteps=times)

    @property
    def before(self) -> Tensor:
        """[L] float64: the share of signal before each step."""
        return self.alphas_bar[self.timesteps]

    @property
    def after(self) -> Tensor:
        """[L] float64: the share of signal after each step."""
        return torch.cat([self.before[1:], torch.tensor([self.last_alpha_bar], dtype=torch.float64)])


def _whole(value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"steps: expected a whole number from 1, got {value!r}")
    return value
