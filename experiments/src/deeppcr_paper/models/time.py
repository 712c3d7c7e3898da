"""Noise levels on a scale of their own, and how a network is told of them.

Shapes: N rows, E the width of an embedding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

#: The linear schedule of DDPM in the limit of many steps: its rate goes from the first to the second of these over [0, 1].
FIRST_RATE, LAST_RATE = 0.1, 20.0
#: The networks are told a time in these units: those of DDPM, whose schedule has so many steps.
UNITS = 1000.0


def signal_at(time: Tensor) -> Tensor:
    """ᾱ, the share of the signal in the variance, at a time in [0, 1] of the linear schedule in continuous time.

    >>> signal_at(torch.tensor([0.0, 0.5, 1.0]))
    tensor([1.0000e+00, 7.9064e-02, 4.3186e-05])
    """
    return torch.exp(-(FIRST_RATE * time + (LAST_RATE - FIRST_RATE) * time.square() / 2))


def time_of(signal: Tensor) -> Tensor:
    """The time at which ᾱ is what it is in ``signal``; the inverse of `signal_at`.

    Every noise level has its time, whatever schedule it comes from: so a network that knows the time serves them all. Use
    float64: ᾱ near 1 has few digits left in float32.
    """
    half, depth = (LAST_RATE - FIRST_RATE) / 2, -torch.log(signal)
    # The root without cancellation: near ᾱ = 1 the other formula subtracts equal numbers.
    return 2 * depth / (FIRST_RATE + torch.sqrt(FIRST_RATE**2 + 4 * half * depth))


class Embedding(nn.Module):
    """Time, and class where the network is conditional: sinusoids, two layers for each, added.

    Args:
        width: E
        classes: how many there are; one more index, ``classes``, says "no class" (for guidance). None: unconditional
    """

    frequencies: Tensor

    def __init__(self, width: int, classes: int | None = None):
        super().__init__()
        if width < 2 or width % 2:
            raise ValueError(f"embedding: expected an even width, got {width}")
        self.classes = classes
        # Those of Vaswani et al., falling from 1 to 1/10,000; no part of what is learnt, so not of checkpoints.
        falling = torch.arange(width // 2) / (width // 2)
        self.register_buffer("frequencies", torch.exp(-math.log(10_000) * falling), persistent=False)
        self.time = _two_layers(width)
        self.label = _two_layers(width) if classes is not None else None

    def forward(self, t: Tensor, classes: Tensor | None, dtype: torch.dtype) -> Tensor:
        """t [N] in [0, 1], classes [N] or None to [N, E]."""
        found = self.time(self.sinusoids(UNITS * t.to(dtype)))
        if self.label is None:
            if classes is not None:
                raise ValueError("classes: this network is unconditional, it was made without classes")
            return found
        if classes is None:
            raise ValueError(f"classes: this network is conditional; {self.classes} says no class")
        return found + self.label(self.sinusoids(classes.to(dtype)))

    def sinusoids(self, values: Tensor) -> Tensor:
        """[N] to [N, E]: sines and cosines."""
        angles = values.unsqueeze(-1) * self.frequencies
        return torch.cat([angles.sin(), angles.cos()], -1)


def _two_layers(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))


class AtSteps(nn.Module):
    """A network of this package as a denoiser of one schedule.

    Args:
        network: is called with times in [0, 1]
        alphas_bar: [T], the share of signal at diffusion times 0 ... T - 1, as a schedule has them
    """

    times: Tensor

    def __init__(self, network: nn.Module, alphas_bar: Tensor):
        super().__init__()
        self.network = network
        parameter = next(network.parameters())
        times = time_of(alphas_bar.detach().double().cpu())
        self.register_buffer("times", times.to(parameter.device, parameter.dtype), persistent=False)

    def forward(self, z: Tensor, t: Tensor, classes: Tensor | None = None) -> Tensor:
        """z [N, *shape], t [N] whole numbers, classes [N]: what the network predicts."""
        times = self.times[t.long()]
        return self.network(z, times) if classes is None else self.network(z, times, classes)
