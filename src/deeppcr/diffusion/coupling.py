"""How corrections spread along the steps: the prior's bidiagonal system in its own basis.

Shapes: L steps, B samples, D the flattened sample, K slots. States and residuals are [L, B, D, K].
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ..linear import PCR, Auto, BlockDiagonal, Blocks, Diagonal, Scalar, solve_coupled
from .prior import Prior
from .samplers import Steps, exactly, multiply


class Coupling:
    """The derivatives of all steps as the prior has them, on the device of the states.

    Args:
        plain: systems are solved by PyTorch's own operations: there is nothing to compile, for any length, and the host looks at
            nothing. Else by what is fastest

    Attributes:
        basis: [D, D] or None: coordinates in which the derivatives are diagonal
        blocks: L of them, in that basis, for rows [L, B, D K]
        offsets: [L, 1, D] or None: what the ideal output holds, in the basis, beside its slope times the sample
    """

    slots: int

    def __init__(
        self,
        prior: Prior,
        steps: Steps,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        plain: bool = False,
    ):
        self.prior: Prior = prior
        self.steps: Steps = steps
        self.plain: bool = plain
        self.slots, length = steps.slots, len(steps)
        self.basis: Tensor | None = None
        data = prior.couplings(steps).to(device, dtype)
        if prior.basis is not None:
            self.basis = prior.basis.detach().to(device, dtype)
        self.blocks: Blocks
        if self.slots > 1:
            small = data.expand(length, width, self.slots, self.slots)
            self.blocks = BlockDiagonal(small.unsqueeze(1))
        elif data.shape[1] == 1:
            self.blocks = Scalar(data)
        else:
            self.blocks = Diagonal(data.unsqueeze(1))

    @cached_property
    def offsets(self) -> Tensor | None:
        prior, like = self.prior.of_path, self.blocks.data
        if prior.mean is None:
            return None
        mean = self.into(prior.mean.to(like).reshape(1, -1, 1)).squeeze(-1)
        return prior.offsets(self.steps).to(like).reshape(len(self.steps), 1, -1) * mean

    def into(self, states: Tensor) -> Tensor:
        """[..., D, K] in the basis."""
        return states if self.basis is None else _rotate(states, self.basis)

    def out_of(self, states: Tensor) -> Tensor:
        """Back from the basis."""
        return states if self.basis is None else _rotate(states, self.basis.mT)

    def solve(self, terms: Tensor) -> Tensor:
        """``y_l = A_l y_{l-1} + terms_l`` from ``y_0 = 0``, in the basis: [L, B, D, K]."""
        return self.solve_with(self.blocks[1:], terms)

    def solve_with(self, couplings: Blocks, terms: Tensor) -> Tensor:
        """The same with other blocks between the steps."""
        solver = PCR() if self.plain else Auto()
        with exactly(terms.device):
            found = solve_coupled(couplings, terms.flatten(2), reverse=False, solver=solver, look=not self.plain)
        return found.view_as(terms)

    def spread(self, residuals: Tensor) -> Tensor:
        """The correction of all states for the residuals of all steps: [L, B, D, K]."""
        return self.out_of(self.solve(self.into(residuals)))


def _rotate(states: Tensor, matrix: Tensor) -> Tensor:
    if states.shape[-1] == 1:
        return multiply(states.squeeze(-1), matrix).unsqueeze(-1)
    return multiply(states.mT, matrix).mT.contiguous()
