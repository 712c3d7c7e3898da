"""What every solver of block bidiagonal systems offers; and forward substitution, the reference every other one is held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .blocks import Blocks


class LinearSolver:
    """Strategy: how a block bidiagonal system is solved. Subclasses give ``solve_coupled``.

    Attributes:
        overflows: whether a product of blocks may overflow or lose digits although the solution does not, and it takes a look at values
            to mend
        roundings: where steps miss by more of them than this, products have lost what steps keep (``refine``): what it misses itself where they
            have not, and some more
        fuses: whether it launches kernels where there are some
        repeatable: whether a recording of its operations may stand for it; a class says so for itself (``runtime.declares``)
    """

    overflows = True
    roundings: ClassVar[float] = 40.0
    fuses = False
    repeatable = False

    def choose(self, couplings: Blocks, rhs: Tensor | None = None) -> tuple[LinearSolver, str]:
        """Who solves such a system, and why; "" where there was nothing to choose from."""
        return self, ""

    def solve_coupled(self, couplings: Blocks, rhs: Tensor, *, reverse: bool = False) -> Tensor:
        """Solve ``z_{j+1} = C_j z_j + b_{j+1}``, ``z_0 = b_0`` (reverse: ``z_j = C_j z_{j+1} + b_j``, the last known).

        Args:
            couplings: L - 1 blocks; ``C_j`` stands between unknowns j and j + 1 in both directions
            rhs: [L, *batch, D], its batch the full (broadcast) one
        """
        raise NotImplementedError


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
