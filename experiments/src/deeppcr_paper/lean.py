"""The paper's algorithm for deep networks in plain PyTorch, as its text prints it: Newton's method and parallel cyclic reduction.

Nothing of `deeppcr.solve` is in it, so that its time is the method's and not the library's. It is for timing: it has no safeguard.
Shapes: L layers (or blocks of layers) of width w, B rows; states of all layers and rows lie in one tensor [L B, w].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from deeppcr.nn.base import ACTIVATIONS

from .mlp import Network
from .timing import capture

#: The paper's settings: residual below this, or below this times the first one; and the most iterations.
TOLERANCE, MOST = 1e-4, 15


def reduce(blocks: Tensor, rhs: Tensor, rows: int = 1) -> Tensor:
    """Solve z_l = A_l z_{l-1} + b_l in ceil(log2 L) rounds, for every row by itself; both arguments are overwritten.

    Args:
        blocks: [L B, w, w], those of the first step are not used
        rhs: [L B, w]
        rows: B

    >>> reduce(torch.tensor([[[0.0]], [[2.0]], [[3.0]]]), torch.ones(3, 1)).flatten()
    tensor([ 1.,  3., 10.])
    """
    length, reach = len(rhs), rows
    while reach < length:
        # Right-hand sides first: they need the blocks of this round.
        rhs[reach:] += torch.bmm(blocks[reach:], rhs[:-reach].unsqueeze(-1)).squeeze(-1)
        reach *= 2
        if reach < length:
            step = reach // 2
            # Equations that reach the first state have no block left.
            blocks[reach:] = torch.bmm(blocks[reach:], blocks[step:-step])
    return rhs


def adjoints(jacobians: Tensor, last: Tensor, every: Tensor | None = None) -> Tensor:
    """λ_l = J_{l+1}ᵀ λ_{l+1} + g_l, read from the end.

    Args:
        jacobians: [L B, w, w]
        last: [B, w], what is known of the gradient in the last state
        every: [w] or more, the same for all other states; None for zero
    """
    rows, width = last.shape
    blocks = jacobians.reshape(-1, rows, width, width)
    turned = torch.cat([blocks[:1], blocks[1:].flip(0)]).transpose(-1, -2).reshape(-1, width, width)
    rhs = last.new_zeros(len(blocks), rows, width)
    if every is not None:
        rhs += every
    rhs[0] = last
    return reduce(turned, rhs.view(-1, width), rows).view_as(rhs).flip(0).view(-1, width)


class Layers(Protocol):
    """What Newton's method asks of a network."""

    @property
    def initial(self) -> Tensor:
        """The state before the first layer, [B, w]."""
        ...

    @property
    def length(self) -> int: ...

    def values(self, before: Tensor) -> Tensor:
        """The layers' outputs from the states before them, both [L B, w]."""
        ...

    def jacobians(self, before: Tensor) -> Tensor:
        """[L B, w, w]"""
        ...

    def guess(self) -> Tensor:
        """Where the states begin: expands to [L, B, w]."""
        ...


class DeepMLP:
    """The layers of a network without skip connections, one row; from z_0 repeated."""

    def __init__(self, network: Network):
        self.network, self.initial, self.length = network, network.z0, len(network.biases)
        self.function, self.slope = ACTIVATIONS[network.activation]

    def values(self, before: Tensor) -> Tensor:
        inputs = self.function(before).unsqueeze(-1)
        return torch.baddbmm(self.network.biases.unsqueeze(-1), self.network.weights, inputs).squeeze(-1)

    def jacobians(self, before: Tensor) -> Tensor:
        return self.network.weights * self.slope(before).unsqueeze(-2)

    def guess(self) -> Tensor:
        return self.initial


class Newton:
    """All states of a network at once, [L B, w]; ``iterations`` says how many iterations the last call took.

    Args:
        graph: whether an iteration is recorded as a CUDA graph, and replayed until the test holds
    """

    def __init__(self, layers: Layers, *, graph: bool = False):
        self.layers, self.iterations, self.is_met = layers, 0, True
        self.rows, width = layers.initial.shape
        self.states = layers.initial.new_empty(layers.length * self.rows, width)
        self.residual = torch.empty_like(self.states)
        self.largest = self.states.new_zeros(())  # of the residual
        self._begin: Callable[[], object] = self._start
        self._advance: Callable[[], object] = self._iterate
        if graph:
            self._begin, _ = capture(self._start)
            self._advance, _ = capture(self._iterate)

    def before(self) -> Tensor:
        """z_0 ... z_{L-1}"""
        return torch.cat([self.layers.initial, self.states[: -self.rows]])

    def _start(self) -> None:
        self.states.view(-1, *self.layers.initial.shape).copy_(self.layers.guess())
        self._evaluate()

    def _evaluate(self) -> None:
        torch.sub(self.layers.values(self.before()), self.states, out=self.residual)
        self.largest.copy_(self.residual.abs().max())

    def _iterate(self) -> None:
        """Jacobians, reduction, update, and the residual of what comes of it."""
        self.states += reduce(self.layers.jacobians(self.before()), self.residual, self.rows)
        self._evaluate()

    @torch.no_grad()
    def __call__(self) -> Tensor:
        self._begin()
        first = self.largest.item()
        found, enough, self.iterations = first, max(TOLERANCE, TOLERANCE * first), 0
        while not found <= enough < math.inf and self.iterations < MOST:  # what is not finite is never enough
            self._advance()
            found = self.largest.item()
            self.iterations += 1
        self.is_met = found <= enough < math.inf
        return self.states


class Backward:
    """The gradients of the last state's sum, or of the sum of all states, in z0, weights and biases of a `DeepMLP`."""

    def __init__(self, network: Network, states: Tensor, *, graph: bool = False, every: bool = False):
        layers = DeepMLP(network)
        before = torch.cat([network.z0, states[:-1]])
        self.network, self.every = network, every
        self.inputs, self.slopes = layers.function(before), layers.slope(before)
        self._run: Callable[[], object] = self._gradients
        self._found: tuple[Tensor, Tensor, Tensor] | None = None
        if graph:
            self._run, self._found = capture(self._gradients)

    def _gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        jacobians = self.network.weights * self.slopes.unsqueeze(-2)
        one = torch.ones_like(self.network.z0)
        found = adjoints(jacobians, one, one if self.every else None)
        initial = (found[:1].unsqueeze(1) @ jacobians[:1]).squeeze(1)
        return initial, found.unsqueeze(-1) * self.inputs.unsqueeze(-2), found

    @torch.no_grad()
    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        found = self._run()
        return self._found if self._found is not None else found  # type: ignore[return-value]
