"""What a recurrent layer does at one step, as steps for ``deeppcr.solve``: they close over the recurrent weights alone.

The inputs of all steps are projected before, in one product. Biases are the cell's, that of the projection too: a product alone is asked of
the host in a third of the time, and their gradients come with those of the recurrent weights. A cell is an object and not a function so that a layer keeps one, and what
is known of it (its kernels) is found again.

Shapes: T steps, B rows, H the hidden size, P that of the output of a projected LSTM (else H).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..runtime import has_kernels, is_transformed
from ..sequence.fingerprint import Told
from ..sequence.product import product

State = Tensor | tuple[Tensor, Tensor]
#: A layer's parameters in one direction by their names without the layer: "weight_ih", "weight_hh", "bias_ih", ...
Weights = dict[str, Tensor]


class Cell(Told):
    """What a cell does depends on its class and the shapes of its weights, where it does not tell otherwise."""

    #: Of a layer's parameters, those that the cell has.
    uses: tuple[str, ...] = ("weight_hh", "bias_ih", "bias_hh")

    def __init__(self, weights: Weights):
        self.weights: Weights = {name: weights[name] for name in self.uses if name in weights}
        self.weight: Tensor = weights["weight_hh"]
        self.bias: Tensor | None = weights.get("bias_ih")
        self.recurrent_bias: Tensor | None = weights.get("bias_hh")

    def told(self) -> tuple[Hashable, tuple[Tensor, ...]]:
        return tuple(self.weights), tuple(self.weights.values())

    def from_state(self, h: Tensor) -> Tensor:
        """What gates get of the state, and both biases."""
        return _plus(linear(h, self.weight, self.recurrent_bias), self.bias)

    def biases(self, gates: int) -> tuple[Tensor | None, ...]:
        """That of the projection, gate by gate."""
        return (None,) * gates if self.bias is None else self.bias.chunk(gates, -1)

    @staticmethod
    def project(x: Tensor, weights: Weights) -> Tensor:
        """What gates get of the inputs."""
        # Of other devices, transforms and precisions that differ PyTorch's own product knows what is to be known.
        alone = has_kernels(x.device) and not (is_transformed() or torch.is_autocast_enabled(x.device.type))
        return (product if alone else linear)(x, weights["weight_ih"])


class ElmanCell(Cell):
    """``h' = f(x + W h)``, the gates of all steps [T, B, H]."""

    def __init__(self, weights: Weights, activation: Callable[[Tensor], Tensor] = torch.tanh):
        super().__init__(weights)
        self.activation: Callable[[Tensor], Tensor] = activation

    def __call__(self, h: Tensor, gates: Tensor) -> Tensor:
        return self.activation(gates + self.from_state(h))

    def told(self) -> tuple[Hashable, tuple[Tensor, ...]]:
        names, tensors = super().told()
        return (self.activation, names), tensors


class GRUCell(Cell):
    """PyTorch's gated recurrent unit, the gates of all steps [T, B, 3 H]: reset, update, new."""

    def __call__(self, h: Tensor, gates: Tensor) -> Tensor:
        to_reset, to_update, to_new = gates.chunk(3, -1)
        from_reset, from_update, from_new = linear(h, self.weight, self.recurrent_bias).chunk(3, -1)
        of_reset, of_update, of_new = self.biases(3)
        reset = torch.sigmoid(to_reset + _plus(from_reset, of_reset))
        update = torch.sigmoid(to_update + _plus(from_update, of_update))
        new = torch.tanh(to_new + _plus(reset * from_new, of_new))
        return new + update * (h - new)


class LSTMCell(Cell):
    """PyTorch's long short-term memory, the gates of all steps [T, B, 4 H]: write, forget, new, read; the state is (h [B, P], c [B, H])."""

    uses: tuple[str, ...] = (*Cell.uses, "weight_hr")

    def __init__(self, weights: Weights):
        super().__init__(weights)
        self.projection: Tensor | None = weights.get("weight_hr")

    def __call__(self, state: tuple[Tensor, Tensor], gates: Tensor) -> tuple[Tensor, Tensor]:
        h, c = state
        write, forget, new, read = (gates + self.from_state(h)).chunk(4, -1)
        c = torch.sigmoid(forget) * c + torch.sigmoid(write) * torch.tanh(new)
        h = torch.sigmoid(read) * torch.tanh(c)
        return h if self.projection is None else linear(h, self.projection), c


class DiagonalGRUCell(Cell):
    """A GRU each of whose channels sees itself alone: recurrent weights [3, H] for reset, update, new."""

    def __call__(self, h: Tensor, gates: Tensor) -> Tensor:
        to_reset, to_update, to_new = gates.chunk(3, -1)
        of_reset, of_update, of_new = self.biases(3)
        reset = torch.sigmoid(to_reset + _plus(self.weight[0] * h, of_reset))
        update = torch.sigmoid(to_update + _plus(self.weight[1] * h, of_update))
        new = torch.tanh(to_new + _plus(self.weight[2] * (reset * h), of_new))
        return h + update * (new - h)


class DiagonalLSTMCell(Cell):
    """An LSTM each of whose channels sees itself alone, that writes as much as it forgets: recurrent weights [3, H] for forget, new, read;
    and [2, H] by which the gates that forget and read see the memory."""

    uses: tuple[str, ...] = (*Cell.uses, "weight_ch")

    def __init__(self, weights: Weights):
        super().__init__(weights)
        self.peephole: Tensor = weights["weight_ch"]

    def __call__(self, state: tuple[Tensor, Tensor], gates: Tensor) -> tuple[Tensor, Tensor]:
        h, c = state
        to_forget, to_new, to_read = gates.chunk(3, -1)
        of_forget, of_new, of_read = self.biases(3)
        forget = torch.sigmoid(to_forget + _plus(self.weight[0] * h + self.peephole[0] * c, of_forget))
        new = torch.tanh(to_new + _plus(self.weight[1] * h, of_new))
        c = new + forget * (c - new)
        read = torch.sigmoid(to_read + _plus(self.weight[2] * h + self.peephole[1] * c, of_read))
        return read * torch.tanh(c), c


def _plus(value: Tensor, bias: Tensor | None) -> Tensor:
    """To what comes of the state: what does not would be computed for all steps before, as an operation of its own."""
    return value if bias is None else value + bias


class Restarting(Told):
    """A cell whose state is zero before those steps that begin anew: what it sees at a step is (gates, reset [B])."""

    def __init__(self, cell: Any):
        self.cell = cell

    def told(self) -> tuple[Hashable, tuple[Tensor, ...]]:
        known, tensors = self.cell.told()
        return (type(self.cell), known), tensors

    def __call__(self, state: State, x: tuple[Tensor, Tensor]) -> State:
        gates, reset = x
        anew = reset.unsqueeze(-1)
        if isinstance(state, Tensor):
            return self.cell(torch.where(anew, torch.zeros_like(state), state), gates)
        h, c = (torch.where(anew, torch.zeros_like(leaf), leaf) for leaf in state)
        return self.cell((h, c), gates)
