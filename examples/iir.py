"""A recursive (IIR) filter: ``scipy.signal.lfilter(b, a, x, axis=0)`` in parallel over the samples, with gradients.

The recursion of order p is linear in its last p outputs: ``deeppcr.linear.solve`` with one p x p block for all samples.
Parallel pays on a GPU for signals of thousands of samples, and where gradients of the coefficients are wanted, which
scipy has not. It does not on a CPU without gradients, where scipy's loop in C is hard to beat.
High orders are better given as a cascade of biquads, here as everywhere.

    python examples/iir.py
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from compare import DEVICE, compare
from deeppcr import linear


def lfilter(b: Tensor, a: Tensor, x: Tensor) -> Tensor:
    """The filter with numerator b and denominator a along the first dimension of x [L, *batch]; starts at rest."""
    b, a = b / a[0], a / a[0]
    driven = b[0] * x
    for k in range(1, min(len(b), len(x))):
        driven[k:] += b[k] * x[:-k]
    order = len(a) - 1
    if order == 0:
        return driven
    # The state is y_l, ..., y_{l-p+1}: the first row makes a new output, the others move the old ones on.
    block = torch.cat([-a[None, 1:], torch.eye(order, dtype=a.dtype, device=a.device)[:-1]])
    rhs = pad(driven.unsqueeze(-1), (0, order - 1))
    return linear.solve(linear.Dense(block.expand(len(x), order, order)), rhs)[..., 0]


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
