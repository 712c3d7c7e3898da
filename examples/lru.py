"""A linear recurrent unit: a layer whose state is turned and shrunk by one complex number a channel, in parallel over time.

    z_l = lambda * z_{l-1} + gamma * B u_l,    y_l = Re(C z_l) + D * u_l

The recursion is linear with complex diagonal blocks: ``deeppcr.linear.solve``, exact after one pass, with gradients.
Parallel pays in training at nearly any length on a GPU. It does not when a trained model is run one token at a time: keep
the state and take steps, which is what such models are liked for.

    python examples/lru.py
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from compare import DEVICE, compare
from deeppcr import linear


class LRU(nn.Module):
    """Maps [L, B, inputs] to [L, B, inputs].

    Args:
        states: complex numbers of the state
        shortest, longest: radii between which the eigenvalues begin
    """

    def __init__(self, inputs: int, states: int, shortest: float = 0.9, longest: float = 0.999):
        super().__init__()
        radius = (shortest**2 + (longest**2 - shortest**2) * torch.rand(states)).sqrt()
        self.log_decay = nn.Parameter((-radius.log()).log())  # so that the radius stays below 1
        self.angle = nn.Parameter(2 * math.pi * torch.rand(states))
        self.B = nn.Parameter(torch.randn(states, inputs, dtype=torch.complex64) / math.sqrt(inputs))
        self.C = nn.Parameter(torch.randn(inputs, states, dtype=torch.complex64) / math.sqrt(states))
        self.D = nn.Parameter(torch.randn(inputs))

    def parts(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The eigenvalues [states], and what is added to the state at every step [L, B, states]."""
        decay = self.log_decay.exp()
        gamma = (1 - torch.exp(-2 * decay)).sqrt()  # inputs of size 1 make states of size 1
        return torch.polar(torch.exp(-decay), self.angle), gamma * (u.to(self.B.dtype) @ self.B.mT)

    def read(self, states: Tensor, u: Tensor) -> Tensor:
        return (states @ self.C.mT).real + self.D * u

    def forward(self, u: Tensor) -> Tensor:
        eigenvalues, driven = self.parts(u)
        return self.read(linear.solve(linear.Diagonal(eigenvalues.expand(len(u), -1)), driven), u)

    def by_loop(self, u: Tensor) -> Tensor:
        eigenvalues, driven = self.parts(u)
        state, states = torch.zeros_like(driven[0]), []
        for each in driven:
            state = eigenvalues * state + each
            states.append(state)
        return self.read(torch.stack(states), u)


def main() -> None:
    layer, u = LRU(16, 32).to(DEVICE), torch.randn(2048, 4, 16, device=DEVICE)

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        layer.zero_grad()
        run(u).square().mean().backward()
        return layer.log_decay.grad.clone()

    compare("LRU with gradients, 2,048 steps", lambda: gradient(layer), lambda: gradient(layer.by_loop), allowed=1e-3)


if __name__ == "__main__":
    main()
