"""One sampling problem: steps, noise and network put together, on the device of the noise.

Shapes: L steps, B samples, D the flattened sample, K slots. A state is [B, D, K] with the sample in slot 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .denoiser import Denoiser
from .noise import Noise
from .step import Steps


class Problem:
    """What is to be sampled.

    Attributes:
        steps, length: all L steps
        shape, samples, width: of one sample; B; D
        initial: [B, D, K], still attached to the caller's graph
        shift: [L, B, D], the noise of the steps times its deviation; None where there is none
        coefficients: of the steps, as tensors
    """

    def __init__(
        self,
        denoiser: Callable,
        steps: Steps,
        noise: Noise | Tensor,
        classes: Any = None,
        guidance: float | None = None,
        unconditional: Any = None,
    ):
        noise = Noise(noise) if isinstance(noise, Tensor) else noise
        if not isinstance(noise, Noise):
            raise TypeError(f"noise: expected Noise(...) or a tensor [B, *shape], got {type(noise).__name__}")
        noise.check(len(steps), needed=steps.adds_noise)
        initial = noise.initial
        self.steps, self.length = steps, len(steps)
        self.samples, self.shape = initial.shape[0], initial.shape[1:]
        self.width, self.slots = self.shape.numel(), steps.slots
        self.device, self.dtype = initial.device, initial.dtype
        self.denoiser = Denoiser(denoiser, self.shape, self.samples, classes, guidance, unconditional)
        self.coefficients = steps.to(self.device, self.dtype)
        flat = initial.flatten(1).unsqueeze(-1)
        blank = flat.new_zeros(self.samples, self.width, self.slots - 1)
        self.initial = torch.cat([flat, blank], -1) if self.slots > 1 else flat
        self.shift = None
        if steps.adds_noise:
            assert noise.steps is not None
            self.shift = self.coefficients.deviation * noise.steps.flatten(2)

    def step(self, index: int, state: Tensor) -> Tensor:
        """One step as the loop takes it: [B, D, K] to [B, D, K]."""
        one = slice(index, index + 1)
        coefficients = self.coefficients
        times = coefficients.timesteps[one].expand(self.samples)
        who = torch.arange(self.samples, device=self.device)
        outputs = self.denoiser(coefficients.scale[index] * state[..., 0], times, who)
        shift = self.shift[one] if self.shift is not None else None
        return coefficients.advance(one, state.unsqueeze(0), outputs.unsqueeze(0), shift)[0]

    def unflatten(self, states: Tensor) -> Tensor:
        """Samples [..., D] as the caller knows them, [..., *shape]."""
        return states.reshape(*states.shape[:-1], *self.shape)
