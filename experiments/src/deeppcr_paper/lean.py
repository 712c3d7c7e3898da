"""The paper's algorithm for deep networks in plain PyTorch, as its text prints it: Newton's method and parallel cyclic reduction.

Nothing of `deeppcr.solve` is in it, so that its time is the method's and not the library's. It is for timing: it has no safeguard.
Shapes: L layers of width w, one row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deeppcr.nn.base import ACTIVATIONS

from .mlp import Network
from .timing import capture

#: The paper's settings: residual below this, or below this times the first one; and the most iterations.
TOLERANCE, MOST = 1e-4, 15


def reduce(blocks: Tensor, rhs: Tensor) -> Tensor:
    """Solve z_l = A_l z_{l-1} + b_l in ceil(log2 L) rounds; both arguments are overwritten.

    Args:
        blocks: [L, w, w], the first is not used
        rhs: [L, w]

    >>> reduce(torch.tensor([[[0.0]], [[2.0]], [[3.0]]]), torch.ones(3, 1)).flatten()
    tensor([ 1.,  3., 10.])
    """
    length, reach = len(rhs), 1
    while reach < length:
        # Right-hand sides first: they need the blocks of this round.
        rhs[reach:] += torch.bmm(blocks[reach:], rhs[:-reach].unsqueeze(-1)).squeeze(-1)
        reach *= 2
        if reach < length:
            step = reach // 2
            # Equations that reach the first state have no block left.
            blocks[reach:] = torch.bmm(blocks[reach:], blocks[step:-step])
    return rhs


class Newton:
    """All states of a network at once.

    Args:
        graph: whether an iteration is recorded as a CUDA graph, and replayed until the test holds
    """

    def __init__(self, network: Network, *, graph: bool = False):
        self.network, self.iterations = network, 0
        self.states, self.residual = torch.empty_like(network.biases), torch.empty_like(network.biases)
        self.largest = network.biases.new_zeros(())  # of the residual
        self._begin: Callable[[], object] = self._start
        self._advance: Callable[[], object] = self._iterate
        if graph:
            self._begin, _ = capture(self._start)
            self._advance, _ = capture(self._iterate)

    def _start(self) -> None:
        """From z_0 repeated."""
        self.states.copy_(self.network.z0.expand_as(self.states))
        self._evaluate()

    def _before(self) -> Tensor:
        """z_0 ... z_{L-1}, [L, w]."""
        return torch.cat([self.network.z0, self.states[:-1]])

    def _evaluate(self) -> None:
        inputs = ACTIVATIONS[self.network.activation][0](self._before()).unsqueeze(-1)
        values = torch.baddbmm(self.network.biases.unsqueeze(-1), self.network.weights, inputs)
        torch.sub(values.squeeze(-1), self.states, out=self.residual)
        self.largest.copy_(self.residual.abs().max())

    def _iterate(self) -> None:
        """Jacobians, reduction, update, and the residual of what comes of it."""
        slopes = ACTIVATIONS[self.network.activation][1](self._before())
        self.states += reduce(self.network.weights * slopes.unsqueeze(-2), self.residual)
        self._evaluate()

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """All states, [L, 1, w]; ``iterations`` says how many iterations there were."""
        self._begin()
        self.iterations, first = 0, self.largest.item()
        found = first
        while found > max(TOLERANCE, TOLERANCE * first) and self.iterations < MOST:
            self._advance()
            found = self.largest.item()
            self.iterations += 1
        return self.states.unsqueeze(1)


class Backward:
    """The gradients of the last state's sum, or of the sum of all states, in z0, weights and biases."""

    def __init__(self, network: Network, states: Tensor, *, graph: bool = False, every: bool = False):
        function, slope = ACTIVATIONS[network.activation]
        before = torch.cat([network.z0, states.squeeze(1)[:-1]])
        self.network, self.every = network, every
        self.inputs, self.slopes = function(before), slope(before)
        self._run: Callable[[], object] = self._gradients
        self._found: tuple[Tensor, Tensor, Tensor] | None = None
        if graph:
            self._run, self._found = capture(self._gradients)

    def _gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        jacobians = self.network.weights * self.slopes.unsqueeze(-2)
        rhs = torch.zeros_like(self.inputs)
        if self.every:
            rhs += 1
        else:
            rhs[0] = 1  # of the last state: the adjoints run from there
        # λ_l = A_{l+1}ᵀ λ_{l+1} + g_l, read from the end.
        blocks = torch.cat([jacobians[:1], jacobians[1:].flip(0)]).transpose(-1, -2).contiguous()
        adjoints = reduce(blocks, rhs).flip(0)
        initial = (adjoints[:1].unsqueeze(1) @ jacobians[:1]).squeeze(1)
        return initial, adjoints.unsqueeze(-1) * self.inputs.unsqueeze(-2), adjoints

    @torch.no_grad()
    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        found = self._run()
        return self._found if self._found is not None else found  # type: ignore[return-value]
