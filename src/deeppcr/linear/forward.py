"""Forward substitution: one step after the other. The reference every other solver is held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import Blocks
from .solver import LinearSolver


@dataclass(frozen=True, kw_only=True)
class ForwardSubstitution(LinearSolver):
    """L steps one after the other: the least work and memory, no parallelism over steps.

    >>> import torch
    >>> from deeppcr import linear
    >>> halves, ones = linear.Scalar(torch.full((3,), 0.5)), torch.ones(3, 1)
    >>> linear.solve(halves, ones, solver=ForwardSubstitution()).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """

    overflows = False
    repeatable = True

    def solve_coupled(self, couplings: Blocks, rhs: Tensor, *, reverse: bool = False) -> Tensor:
        last = rhs.shape[0] - 1
        if reverse:
            states = [rhs[last:]]
            for j in range(last - 1, -1, -1):
                states.append(couplings[j : j + 1].apply(states[-1]) + rhs[j : j + 1])
            states.reverse()
        else:
            states = [rhs[:1]]
            for j in range(last):
                states.append(couplings[j : j + 1].apply(states[-1]) + rhs[j + 1 : j + 2])
        return torch.cat(states)
