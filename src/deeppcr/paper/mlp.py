"""The paper's first example: a deep ReLU network with PyTorch's default initialisation, one row at a time.

Shapes: L layers of width w.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import deeppcr


def layer(z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
    """One layer of the network: the body of the loop."""
    weight, bias = x
    return torch.nn.functional.linear(torch.relu(z), weight, bias)


def slope(z: Tensor, x: tuple[Tensor, Tensor]) -> deeppcr.linear.Dense:
    """The Jacobian of a layer, [1, w, w]: what ``DenseJacobian()`` finds by itself, in about twice the time."""
    weight, _ = x
    return deeppcr.linear.Dense(weight * (z > 0).unsqueeze(-2))


@dataclass(frozen=True)
class Network:
    """Parameters and input.

    Attributes:
        z0: [1, w]
        weights: [L, w, w]
        biases: [L, w]
    """

    z0: Tensor
    weights: Tensor
    biases: Tensor

    @staticmethod
    def make(length: int, width: int, device: torch.device, seed: int = 0) -> Network:
        generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device sees the same network
        bound = width**-0.5
        weights = torch.empty(length, width, width).uniform_(-bound, bound, generator=generator)
        biases = torch.empty(length, width).uniform_(-bound, bound, generator=generator)
        z0 = torch.randn(1, width, generator=generator)
        return Network(z0.to(device), weights.to(device), biases.to(device))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.z0, self.weights, self.biases

    def double(self) -> Network:
        return Network(*(each.detach().double() for each in self.tensors))

    def trainable(self) -> Network:
        return Network(*(each.detach().clone().requires_grad_() for each in self.tensors))

    def loop(self) -> list[Tensor]:
        """All states, one after the other. The parameters are unbound once: indexing them costs more."""
        z, states = self.z0, []
        for x in zip(self.weights.unbind(), self.biases.unbind(), strict=True):
            z = layer(z, x)
            states.append(z)
        return states

    def parallel(self, solver: deeppcr.Newton) -> deeppcr.Solution:
        """All states at once."""
        return deeppcr.solve(layer, self.z0, (self.weights, self.biases), solver=solver)
