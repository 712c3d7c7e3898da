"""What a network of equal layers is made of, as its kernels take it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..tolerance import FAINT, GOES_ON, SMALL


class Activation(NamedTuple):
    """An elementwise function and its derivative. In a kernel both are ``kernels.activate``."""

    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _sigmoid_slope(z: Tensor) -> Tensor:
    value = torch.sigmoid(z)
    return value * (1 - value)


#: Sizes of so many chunks are looked at: of the first ones more than of the last ones.
LOOKS = 16
#: What became faint, and in the chunks that are left would fall at least to this part at the same rate, should have fallen.
STILL_TO_FALL = 3e-3
#: Those that have a name; any other elementwise function is differentiated automatically.
ACTIVATIONS = {
    "relu": Activation(torch.relu, lambda z: (z > 0).to(z.dtype)),
    "tanh": Activation(torch.tanh, lambda z: 1 - torch.tanh(z) ** 2),
    "sigmoid": Activation(torch.sigmoid, _sigmoid_slope),
}


@dataclass(frozen=True)
class Layers:
    """What a network is made of.

    Attributes:
        skip: layers in a block
        residual: whether the input of a block is added to its output
        activation: a name
        tolerance: of a state: absolute, relative, and whether (1.0 or 0.0) the initial state counts for its size
        chunk: blocks that are rolled out one after the other; None: chosen by depth. All of them: sequential
        backward: the same for the backward pass; None: as forward
    """

    skip: int
    residual: bool
    activation: str
    tolerance: tuple[float, float, float] = (0.0, 1e-5, 1.0)
    chunk: int | None = None
    backward: int | None = None

    def backward_blocks(self, blocks: int) -> int:
        """Blocks in a chunk of the backward pass."""
        return self.chunk_blocks(blocks) if self.backward is None else min(blocks, self.backward)

    def chunk_blocks(self, blocks: int) -> int:
        """Blocks in a chunk. With about half a square root of the depth, roll-out and solve take equally long."""
        if self.chunk is not None:
            return min(blocks, self.chunk)
        layers = 2 ** max(0, round(math.log2(math.sqrt(blocks * self.skip) / 2)))
        return min(blocks, max(1, layers // self.skip))


def size_at_first(sizes: Tensor, before: Tensor | None, rtol: float) -> Tensor:
    """[B]: by what size of the initial state the tolerance of all later ones is measured: in ``kernels``, the same of a row.

    By its own, but where the first chunks bring it far down, and what it is brought down to lives on to the end: then by the size of that.
    Else a large initial state would hide all that comes after it (``Tolerance.hides``).

    A signal that dies out goes on falling as it fell. So what became faint must have had the time to fall much further at that rate, and
    have not done so. Where a signal has died, chunks hold noise, which is as steady; but it falls from pass to pass.

    Args:
        sizes: [N + 1, B], of the initial state and of the ends of chunks
        before: the same in the pass before; None in the first one
    """
    first, chunks = sizes[0], len(sizes) - 1
    there = [-(-((k + 1) ** 2) * chunks // LOOKS**2) for k in range(LOOKS)]
    size, past = sizes[there], torch.tensor(there, device=sizes.device).unsqueeze(1)
    least = size.flip(0).cummin(0).values.flip(0)
    hidden = (size > 0) & (size <= max(rtol, min(FAINT * rtol, SMALL)) * first) & (least >= GOES_ON * size)
    steady = size >= 2.0**-23 * first
    hidden &= steady if before is None else steady | (size >= GOES_ON * before[there])
    hidden &= torch.log(size / first) * (chunks - past) <= past * math.log(STILL_TO_FALL)
    return torch.where(hidden, size, first).amin(0)
