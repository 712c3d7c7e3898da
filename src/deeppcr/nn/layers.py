"""What a network of equal layers is made of, as its kernels take it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Activation(NamedTuple):
    """An elementwise function and its derivative. In a kernel both are ``kernels.activate``."""

    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _sigmoid_slope(z: Tensor) -> Tensor:
    value = torch.sigmoid(z)
    return value * (1 - value)


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
