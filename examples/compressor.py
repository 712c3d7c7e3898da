"""A dynamic-range compressor with attack and release, in parallel over the samples, with gradients of its settings.

The gain follows its target quickly where it must fall (attack) and slowly where it may rise (release). Which of the two
a sample takes depends on the gain before it: the recursion has a kink, and is no linear filter. It is the smaller of two
linear ones, so Newton's method settles which samples attack within a few iterations.
Parallel pays for a second of audio and more on a GPU, above all with gradients (a compressor in a training loop). It
does not on a CPU without gradients, where a loop in C or Numba takes nanoseconds a sample, nor for live audio.

    python examples/compressor.py
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import deeppcr
from compare import DEVICE, compare


def target_gain(x: Tensor, threshold: Tensor | float, ratio: Tensor | float) -> Tensor:
    """The gain in dB that brings x to the curve: above the threshold (dB), ratio dB more give one dB more."""
    level = 20 * torch.log10(x.abs().clamp(min=1e-6))
    return (threshold - level).clamp(max=0) * (1 - 1 / ratio)


def follow(gain: Tensor, now: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """One sample: the gain moves towards its target, keeping ``attack`` or ``release`` of the distance."""
    target, attack, release = now
    return target + torch.where(target < gain, attack, release) * (gain - target)


def keeping(ms: Tensor | float, rate: float) -> Tensor:
    """What is left of a distance after one sample, for a time constant in milliseconds."""
    return torch.exp(-1e3 / (rate * torch.as_tensor(ms)))


def settings(target: Tensor, attack_ms: Tensor | float, release_ms: Tensor | float, rate: float) -> Any:
    """What ``follow`` reads: the target [L, B], and one attack and release for all samples."""
    both = (keeping(ms, rate).to(target).expand(len(target), 1) for ms in (attack_ms, release_ms))
    return target, *both


def smooth(xs: tuple[Tensor, Tensor, Tensor], **options: Any) -> Tensor:
    """The gain in dB after every sample [L, B]; it starts at 0 dB. Options are those of ``deeppcr.solve``."""
    start = torch.zeros_like(xs[0][0]).unsqueeze(-1)
    xs = tuple(each.unsqueeze(-1) for each in xs)
    return deeppcr.solve(follow, start, xs, **options).states.squeeze(-1)


def smooth_by_loop(xs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    gains = [torch.zeros_like(xs[0][0])]
    for now in zip(*xs, strict=True):
        gains.append(follow(gains[-1], now))
    return torch.stack(gains[1:])


def compress(x: Tensor, gain: Tensor) -> Tensor:
    return x * 10 ** (gain / 20)


def main() -> None:
    rate, length = 48_000, 4_800
    t = torch.arange(length, device=DEVICE) / rate
    loudness = 0.55 + 0.45 * torch.sin(2 * math.pi * 30 * t)
    x = (loudness * torch.sin(2 * math.pi * 440 * t)).unsqueeze(-1)
    xs = settings(target_gain(x, threshold=-20, ratio=4), attack_ms=5, release_ms=50, rate=rate)
    compare(
        "compressor, 4,800 samples",
        lambda: compress(x, smooth(xs, solver=deeppcr.Newton())),
        lambda: compress(x, smooth_by_loop(xs)),
        allowed=1e-3,
    )


if __name__ == "__main__":
    main()
