"""Gradients of a deep network by hand: exact ones to compare with, and the strongest loop, which a CUDA graph can hold.

Shapes: L layers of width w, one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deeppcr.nn.base import ACTIVATIONS

from .mlp import Network

#: From the gradient of an activation's value, and the value, to the gradient of its argument: the kernels of autograd.
_PULL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda gradient, value: torch.ops.aten.threshold_backward(gradient, value, 0),
    "tanh": torch.ops.aten.tanh_backward,
    "sigmoid": torch.ops.aten.sigmoid_backward,
}


def backward_loop(network: Network, inputs: Tensor, *, every: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the last state's sum, layer by layer: what autograd computes, in fewer kernels.

    Only the chain is a loop; the gradients of all weights are one product at its end.

    Args:
        inputs: [L, 1, w], what the weights of each layer were multiplied with
        every: of the sum of all states

    Returns:
        the gradients of z0, weights and biases
    """
    pull, gradient, adjoints = _PULL[network.activation], torch.ones_like(network.z0), []
    for weight, value in zip(reversed(network.weights.unbind()), reversed(inputs.unbind()), strict=True):
        adjoints.append(gradient)
        gradient = pull(gradient @ weight, value)
        if every and len(adjoints) < len(inputs):  # the states are z_1 ... z_L: z_0 is in no sum
            gradient = gradient + 1
    biases = torch.cat(adjoints[::-1])
    return gradient, biases.unsqueeze(-1) * inputs, biases


class Adjoints:
    """The exact gradients of the last state's sum (0) and of the sum of all states (1), from states in float64.

    The gradient of a weight matrix is the product of two vectors, which are all that is stored.
    """

    @torch.no_grad()
    def __init__(self, network: Network, exact: Tensor):
        function, slope = ACTIVATIONS[network.activation]
        before = torch.cat([network.z0.double().unsqueeze(0), exact[:-1]]).squeeze(1)  # [L, w]
        self.inputs, slopes = function(before), slope(before)
        loss = torch.tensor([[0.0], [1.0]], dtype=exact.dtype, device=exact.device)
        gradient = torch.ones_like(exact[0]).expand(2, -1)
        adjoints, self.parts = [], list(network.parts())
        for part in reversed(self.parts):
            weights, derivatives = network.weights[part].double().unbind(), slopes[part].unbind()
            for weight, derivative in zip(reversed(weights), reversed(derivatives), strict=True):
                adjoints.append(gradient)
                gradient = torch.addcmul(loss, gradient @ weight, derivative)
        self.initial = gradient - loss  # the states are z_1 ... z_L: z_0 is in no sum
        self.states = torch.stack(adjoints[::-1], 1)  # [2, L, w]

    @torch.no_grad()
    def error(self, found: Sequence[Tensor], which: int) -> float:
        """Of the gradients of z0, weights and biases: the norm of the difference over the norm, the worst of the three."""
        z0, weights, biases = found
        adjoint, initial = self.states[which], self.initial[which]
        difference, total = torch.zeros_like(adjoint[0, 0]), torch.zeros_like(adjoint[0, 0])
        for part in self.parts:
            reference = adjoint[part].unsqueeze(-1) * self.inputs[part].unsqueeze(-2)
            difference += (weights[part].double() - reference).square().sum()
            total += reference.square().sum()
        return max(
            _ratio(z0.flatten().double() - initial, initial),
            _ratio(biases.double() - adjoint, adjoint),
            _ratio(difference.sqrt(), total.sqrt()),
        )


def _ratio(difference: Tensor, reference: Tensor) -> float:
    """The norm of the difference over the norm; gradients that have vanished in float32 are compared with its smallest."""
    scale = reference.norm().clamp(min=torch.finfo(torch.float32).tiny)
    found = (difference.norm() / scale).item()
    return found if found == found else float("inf")
