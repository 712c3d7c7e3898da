"""A recursive (IIR) filter: ``scipy.signal.lfilter(b, a, x, axis=0)`` in parallel over the samples, with gradients.

The recursion of order p is linear in its last p outputs: one p x p block for all samples, which ``deeppcr.linear.lfilter`` makes.
Parallel pays on a GPU for signals of thousands of samples, and where gradients of the coefficients are wanted, which
scipy has not. It does not on a CPU without gradients, where scipy's loop in C is hard to beat.
High orders are better given as a cascade of biquads, here as everywhere.

    python examples/iir.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from compare import DEVICE, compare
from deeppcr.linear import lfilter


def lfilter_by_loop(b: Tensor, a: Tensor, x: Tensor) -> Tensor:
    b, a = b / a[0], a / a[0]
    outputs: list[Tensor] = []
    for l in range(len(x)):
        y = sum(b[k] * x[l - k] for k in range(min(len(b), l + 1)))
        outputs.append(y - sum(a[k] * outputs[l - k] for k in range(1, min(len(a), l + 1))))
    return torch.stack(outputs)


def resonator(frequency: float, radius: float) -> tuple[Tensor, Tensor]:
    """A biquad that lets one frequency through (in radians a sample); its poles lie at that radius."""
    turn = torch.cos(torch.tensor(frequency, dtype=torch.float64))
    a = torch.stack([torch.ones(()), -2 * radius * turn, torch.tensor(radius**2)])
    return (1 - radius) * torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), a


def main() -> None:
    b, a = (each.to(DEVICE, torch.float32) for each in resonator(0.1, 0.99))
    x = torch.randn(4096, 8, device=DEVICE)
    compare("biquad, 4,096 samples", lambda: lfilter(b, a, x), lambda: lfilter_by_loop(b, a, x), allowed=1e-4)


if __name__ == "__main__":
    main()
