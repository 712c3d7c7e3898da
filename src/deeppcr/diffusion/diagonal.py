"""The exact diagonal of a Jacobian that is not diagonal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..jacobian import DenseJacobian, Jacobian
from ..linear import Diagonal
from ..sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class DiagonalPart(Jacobian):
    """The diagonal of every step's full Jacobian, for ``deeppcr.Newton``; the rest is left out.

    It costs what the full Jacobian costs to form, and its systems what diagonal ones cost to solve.

    Args:
        memory_budget: see ``deeppcr.DenseJacobian``

    >>> import torch, deeppcr
    >>> from deeppcr.diffusion import Noise, Schedule, sample
    >>> mix = torch.eye(4) + 0.1
    >>> noise = Noise.draw((1, 4), steps=30)
    >>> sample(
    ...     lambda z, t: torch.sin(z @ mix),
    ...     Schedule.linear(30),
    ...     noise,
    ...     solver=deeppcr.Newton(),
    ...     jacobian=DiagonalPart(),
    ... ).result.name
    'CONVERGED'
    """

    memory_budget: int | None = None
    exact = False

    def evaluate(self, sequence: Sequence, previous: Tensor, steps: range) -> tuple[Tensor, Diagonal]:
        dense = DenseJacobian(memory_budget=self.memory_budget)
        values, diagonals = [], []
        for part in dense.slices(sequence, len(steps)):
            value, blocks = dense.evaluate(sequence, previous[part], steps[part])
            values.append(value)
            diagonals.append(blocks.data.diagonal(dim1=-2, dim2=-1).clone())
        return torch.cat(values), Diagonal(torch.cat(diagonals))
