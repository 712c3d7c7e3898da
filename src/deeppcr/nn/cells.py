"""What a recurrent layer does at one step, as steps for ``deeppcr.solve``: they close over the recurrent weights alone.

The inputs of all steps are projected before, in one product. A cell is an object and not a function so that a layer keeps one, and what
is known of it (its kernels) is found again.

Shapes: T steps, B rows, H the hidden size, P that of the output of a projected LSTM (else H).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..sequence.fingerprint import Told

State = Tensor | tuple[Tensor, Tensor]
#: A layer's parameters in one direction by their names without the layer: "weight_ih", "weight_hh", "bias_ih", ...
Weights = dict[str, Tensor]


class Cell(Told):
    """What a cell does depends on its class and the shapes of its weights, where it does not tell otherwise."""

    weight: Tensor

    def __init__(self, weights: Weights):
        self.weight = weights["weight_hh"]

    def told(self) -> tuple[Hashable, tuple[Tensor, ...]]:
        return None, (self.weight,)


class ElmanCell(Cell):
    """``h' = f(x + W h)``, the gates of all steps [T, B, H]."""

    activation: Callable[[Tensor], Tensor]

    def __init__(self, weights: Weights, activation: Callable[[Tensor], Tensor] = torch.tanh):
        super().__init__(weights)
        self.activation = activation

    def __call__(self, h: Tensor, gates: Tensor) -> Tensor:
        return self.activation(gates + linear(h, self.weight))

    def told(self) -> tuple[Hashable, tuple[Tensor, ...]]:
        return self.activation, (self.weight,)

    @staticmethod
    def project(x: Tensor, weights: Weights) -> Tensor:
        bias, recurrent = weights.get("bias_ih"), weights.get("bias_hh")
        return linear(x, weights["weight_ih"], bias if bias is None or recurrent is None else bias + recurrent)


class GRUCell(Cell):
    """PyTorch's gated recurrent unit, the gates of all steps [T, B, 3 H]: reset, update, new."""

    bias: Tensor | None

    def __init__(self, weights: Weights):
        super().__init__(weights)
        self.bias = weights.get("bias_hh")

    def __call__(self, h: Tensor, gates: Tensor) -> Tensor:
        to_reset, to_update, to_new = gates.chunk(3, -1)
        # With the recurrent bias: the reset gate multiplies a part of it, and to tell that part from the rest takes longer than to add all.
        from_reset, from_update, from_new = linear(h, self.weight, self.bias).chunk(3, -1)
        reset, update = torch.sigmoid(to_reset + from_reset), torch.sigmoid(to_update + from_update)
        new = torch.tanh(to_new + reset * from_new)
        return new + update * (h - new)

    def told(self) -> tuple[Hashable, tuple[Tensor, ...]]:
        return None, (self.weight,) if self.bias is None else (self.weight, self.bias)

    @staticmethod
    def project(x: Tensor, weights: Weights) -> Tensor:
        return linear(x, weights["weight_ih"], weights.get("bias_ih"))


class LSTMCell(Cell):
    """PyTorch's long short-term memory, the gates of all steps [T, B, 4 H]: write, forget, new, read; the state is (h [B, P], c [B, H])."""

    projection: Tensor | None

    def __init__(self, weights: Weights):
        super().__init__(weights)
        self.projection = weights.get("weight_hr")

    def __call__(self, state: tuple[Tensor, Tensor], gates: Tensor) -> tuple[Tensor, Tensor]:
        h, c = state
        write, forget, new, read = (gates + linear(h, self.weight)).chunk(4, -1)
        c = torch.sigmoid(forget) * c + torch.sigmoid(write) * torch.tanh(new)
        h = torch.sigmoid(read) * torch.tanh(c)
        return h if self.projection is None else linear(h, self.projection), c

    def told(self) -> tuple[Hashable, tuple[Tensor, ...]]:
        return None, (self.weight,) if self.projection is None else (self.weight, self.projection)

    project: Callable[[Tensor, Weights], Tensor] = staticmethod(ElmanCell.project)


class DiagonalGRUCell(Cell):
    """A GRU each of whose channels sees itself alone: recurrent weights [3, H] for reset, update, new."""

    def __call__(self, h: Tensor, gates: Tensor) -> Tensor:
        to_reset, to_update, to_new = gates.chunk(3, -1)
        reset = torch.sigmoid(to_reset + self.weight[0] * h)
        update = torch.sigmoid(to_update + self.weight[1] * h)
        new = torch.tanh(to_new + self.weight[2] * (reset * h))
        return h + update * (new - h)

    project: Callable[[Tensor, Weights], Tensor] = staticmethod(ElmanCell.project)


class DiagonalLSTMCell(Cell):
    """An LSTM each of whose channels sees itself alone, that writes as much as it forgets: recurrent weights [3, H] for forget, new, read;
    and [2, H] by which the gates that forget and read see the memory."""

    peephole: Tensor

    def __init__(self, weights: Weights):
        super().__init__(weights)
        self.peephole = weights["weight_ch"]

    def __call__(self, state: tuple[Tensor, Tensor], gates: Tensor) -> tuple[Tensor, Tensor]:
        h, c = state
        to_forget, to_new, to_read = gates.chunk(3, -1)
        forget = torch.sigmoid(to_forget + self.weight[0] * h + self.peephole[0] * c)
        new = torch.tanh(to_new + self.weight[1] * h)
        c = new + forget * (c - new)
        read = torch.sigmoid(to_read + self.weight[2] * h + self.peephole[1] * c)
        return read * torch.tanh(c), c

    def told(self) -> tuple[Hashable, tuple[Tensor, ...]]:
        return None, (self.weight, self.peephole)

    project: Callable[[Tensor, Weights], Tensor] = staticmethod(ElmanCell.project)


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
