"""A residual network's pass in training as the paper prints it, in plain PyTorch: forward by Newton's method, backward by one reduction.

Shapes: as in `lean`; every step is a block of s layers inside a skip connection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import deeppcr
from deeppcr.nn.base import ACTIVATIONS

from . import lean
from .timing import capture


class Blocks:
    """The blocks of layers of a `deeppcr.nn.ResNet`, whose parameters are read where they lie.

    The states begin where the last step of training had them on average, and in the first step from z_0 repeated.
    """

    def __init__(self, network: deeppcr.nn.ResNet, rows: int):
        self.network, self.rows = network, rows
        self.initial = network.activations.new_zeros(rows, network.activations.shape[-1])
        self.length, self.skip = network.weight.shape[:2]
        self.function, self.slope = ACTIVATIONS[str(network.activation)]
        self.identity = torch.eye(self.initial.shape[1], dtype=self.initial.dtype, device=self.initial.device)

    def inner(self, before: Tensor) -> list[Tensor]:
        """The states inside the blocks, [L, B, w] each: before every layer, and after the last."""
        found = [before.view(self.length, *self.initial.shape)]
        for layer in range(self.skip):
            bias, weight = self.network.bias[:, layer].unsqueeze(1), self.network.weight[:, layer]
            found.append(torch.baddbmm(bias, self.function(found[-1]), weight.mT))
        return found

    def values(self, before: Tensor) -> Tensor:
        found = self.inner(before)
        return (found[-1] + found[0]).view_as(before)

    def jacobians(self, before: Tensor) -> Tensor:
        width, product = before.shape[-1], None
        for layer, z in enumerate(self.inner(before)[:-1]):
            block = (self.network.weight[:, layer].unsqueeze(1) * self.slope(z).unsqueeze(-2)).view(-1, width, width)
            product = block if product is None else torch.bmm(block, product)
        assert product is not None
        return product + self.identity

    def guess(self) -> Tensor:
        return self.network.activations.unsqueeze(1) if self.network._warm else self.initial

    def gradients(self, before: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In the first state, the weights and the biases, from the gradient [B, w] in the last state."""
        above = lean.adjoints(self.jacobians(before), last).view(self.length, *self.initial.shape)
        inner, weights, biases, gradient = self.inner(before), [], [], above
        for layer in reversed(range(self.skip)):
            weights.append(torch.bmm(gradient.mT, self.function(inner[layer])))
            biases.append(gradient.sum(1))
            gradient = torch.bmm(gradient, self.network.weight[:, layer]) * self.slope(inner[layer])
        return gradient[0] + above[0], torch.stack(weights[::-1], 1), torch.stack(biases[::-1], 1)


class Pass:
    """From images [B, pixels] to scores, differentiable; the backward pass has to follow its forward pass at once.

    Args:
        graph: whether iterations, and the backward pass, are CUDA graphs: the same operations, launched faster
    """

    def __init__(self, network: deeppcr.nn.ResNet, rows: int, *, graph: bool = False):
        self.network, self.blocks, self.graph = network, Blocks(network, rows), graph
        self.gradient = torch.zeros_like(self.blocks.initial)
        self.newton = self._eager = lean.Newton(self.blocks)
        self._recorded: lean.Newton | None = None

    def __call__(self, x: Tensor) -> Tensor:
        network = self.network
        last = _Implicit.apply(network.input(x), network.weight, network.bias, self)
        return network.output(network._apply_activation(last))

    @torch.no_grad()
    def forward(self, hidden: Tensor) -> Tensor:
        self.blocks.initial.copy_(hidden)
        # The first pass begins elsewhere than the others, of which there are graphs.
        self.newton = self._in_graphs() if self.graph and self.network._warm else self._eager
        states = self.newton()
        torch.mean(states.view(-1, *hidden.shape), 1, out=self.network.activations)
        self.network._warm = True
        return states[-len(hidden) :].clone()

    def _in_graphs(self) -> lean.Newton:
        if self._recorded is None:
            self.newton = self._recorded = lean.Newton(self.blocks, graph=True)
            self._replay, self._found = capture(self._gradients)
        return self._recorded

    def _gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.blocks.gradients(self.newton.before(), self.gradient)

    @torch.no_grad()
    def backward(self, gradient: Tensor) -> tuple[Tensor, ...]:
        self.gradient.copy_(gradient)
        if self.newton is not self._recorded:
            return self._gradients()
        self._replay()
        return tuple(each.clone() for each in self._found)  # the next replay overwrites them


class _Implicit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, owner: Pass) -> Tensor:
        ctx.owner = owner
        return owner.forward(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *ctx.owner.backward(gradient), None
