"""Recurrent layers whose channels see themselves alone, so that all of their steps are a matter of elementwise operations.

These are the cells of ParaRNN (Danieli et al., 2025): dense projections of the inputs, diagonal recurrences.

Shapes: T steps, B rows, F features of the input, H the hidden size, K layers times directions.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..newton import USUAL, Loop, Newton
from .arguments import Mode, check_size, complaint_of
from .cells import Cell, DiagonalGRUCell, DiagonalLSTMCell
from .operator import operated
from .recurrent import Recurrent


class Diagonal(Recurrent):
    """What the two share: parameters by the names that those of ``torch.nn.GRU`` have, and what is checked of arguments."""

    #: By name, how many recurrent vectors [H] there are.
    _recurrent: ClassVar[dict[str, int]]
    _gates: ClassVar[int] = 3

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        mode: Mode = "auto",
        newton: Newton | None = None,
    ):
        super().__init__(mode=mode, newton=newton)
        self.input_size: int = check_size("input_size", input_size)
        self.hidden_size: int = check_size("hidden_size", hidden_size)
        self.num_layers: int = check_size("num_layers", num_layers)
        self.bias: bool = bias
        self.batch_first: bool = batch_first
        self.bidirectional: bool = bidirectional
        self.dropout: float = float(dropout)
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout: expected a probability, from 0 to 1, got {dropout!r}")
        if self.dropout and self.num_layers == 1:
            warnings.warn("dropout: it comes between layers, and there is one layer alone", stacklevel=2)
        directions = 2 if bidirectional else 1
        self._all_weights = []
        for layer in range(self.num_layers):
            features = self.input_size if layer == 0 else directions * self.hidden_size
            for suffix in ("", "_reverse")[:directions]:
                shapes: dict[str, tuple[int, ...]] = {"weight_ih": (self._gates * self.hidden_size, features)}
                shapes |= {name: (count, self.hidden_size) for name, count in self._recurrent.items()}
                if bias:
                    shapes["bias_ih"] = (self._gates * self.hidden_size,)
                for name, shape in shapes.items():
                    made = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    self.register_parameter(f"{name}_l{layer}{suffix}", made)
                self._all_weights.append([f"{name}_l{layer}{suffix}" for name in shapes])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ParaRNN does: projections uniform between plus and minus 1 / sqrt(fan in), recurrences normal with 1 / sqrt(H), biases zero."""
        for name, weight in self.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(weight)
            elif name.startswith("weight_ih"):
                bound = 1 / math.sqrt(weight.shape[1])
                nn.init.uniform_(weight, -bound, bound)
            else:
                nn.init.normal_(weight, std=1 / math.sqrt(self.hidden_size))

    def _run(self, input: Any, hx: Any, reset: Tensor | None, mode: Mode) -> Any:
        self._is_proper(input, hx)
        # Which way of several takes least time, ``solve`` knows best.
        solver = self.newton if mode == "parallel" else Loop() if mode == "sequential" else None
        return self._by_solve(input, hx, reset, solver)

    def _newton_in(self, mode: Mode) -> Newton:
        return self.newton if mode == "parallel" else USUAL

    def _is_proper(self, input: Any, hx: Any) -> bool:
        wrong = complaint_of(self, input, hx)
        if wrong is not None:
            raise wrong
        return True

    def extra_repr(self) -> str:
        said = [f"{self.input_size}, {self.hidden_size}"]
        usual = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        said += [f"{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value]
        return ", ".join([*said, f"mode={self.run_mode}"])


@operated
class DiagonalGRU(Diagonal):
    """A GRU whose recurrences are elementwise, the one of ParaRNN; every channel is a loop by itself, so any width runs in parallel.

    With the projected input ``(r, u, n)`` of a step, ``*`` elementwise, and three recurrent vectors a:
    ``reset = sigmoid(r + a_0 * h)``, ``update = sigmoid(u + a_1 * h)``, ``new = tanh(n + a_2 * (reset * h))``,
    ``h' = h + update * (new - h)``: an update gate that is open takes the new state, where that of ``torch.nn.GRU`` keeps the old one.

    Shapes, outputs, ``hx``, PackedSequence, ``reset`` and ``cu_seqlens`` are those of ``GRU``. There is one bias, that of the projection.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as for ``torch.nn.GRU``
        mode: "parallel", "sequential" (the loop), or "auto": the way that ``deeppcr.solve`` expects to take least time
        newton: settings of the parallel mode

    >>> import torch, deeppcr.nn
    >>> gru = deeppcr.nn.DiagonalGRU(3, 8, mode="parallel")
    >>> outputs, last = gru(torch.randn(50, 2, 3))
    >>> outputs.shape, last.shape, gru.weight_hh_l0.shape
    (torch.Size([50, 2, 8]), torch.Size([1, 2, 8]), torch.Size([3, 8]))
    """

    _recurrent: ClassVar[dict[str, int]] = {"weight_hh": 3}

    _cell_type: type[Cell] = DiagonalGRUCell


@operated
class DiagonalLSTM(Diagonal):
    """An LSTM whose recurrences are elementwise, the one of ParaRNN: it writes as much as it forgets, and gates see the memory.

    With the projected input ``(f, n, r)`` of a step, ``*`` elementwise, three recurrent vectors a and two peepholes p:
    ``forget = sigmoid(f + a_0 * h + p_0 * c)``, ``new = tanh(n + a_1 * h)``, ``c' = forget * c + (1 - forget) * new``,
    ``read = sigmoid(r + a_2 * h + p_1 * c')``, ``h' = read * tanh(c')``.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype, mode, newton: as for ``DiagonalGRU``

    >>> import torch, deeppcr.nn
    >>> lstm = deeppcr.nn.DiagonalLSTM(3, 8, mode="parallel")
    >>> outputs, (h, c) = lstm(torch.randn(50, 2, 3))
    >>> outputs.shape, c.shape, lstm.weight_ch_l0.shape
    (torch.Size([50, 2, 8]), torch.Size([1, 2, 8]), torch.Size([2, 8]))
    """

    _recurrent: ClassVar[dict[str, int]] = {"weight_hh": 3, "weight_ch": 2}

    _cell_type: type[Cell] = DiagonalLSTMCell

    def _widths(self) -> tuple[int, ...]:
        return self.hidden_size, self.hidden_size
