"""The solver that is taken where nobody asks for another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime import is_traced
from .blocks import Blocks, Diagonal, Scalar
from .cost import pick, pick_and_explain
from .fused import Fused
from .solver import LinearSolver


@dataclass(frozen=True, kw_only=True)
class Auto(LinearSolver):
    """Fused() where there are kernels, else what is expected to take the least time; ``choose`` says what and why.

    >>> import torch
    >>> from deeppcr import linear
    >>> Auto().choose(linear.Dense(torch.zeros(7, 2, 2)))
    (PCR(), 'expected: 0.039 ms; ForwardSubstitution(): 0.084 ms, Hierarchical(chunk=4): 0.15 ms')
    """

    repeatable = True
    fuses = True

    def choose(self, couplings: Blocks, rhs: Tensor | None = None) -> tuple[LinearSolver, str]:
        length = len(couplings) + 1
        traced = is_traced(couplings.data) or (rhs is not None and is_traced(rhs))
        if not traced and Fused().refusal(couplings) is None:
            return Fused(), "there are kernels for these blocks"
        data = couplings.data
        width = 0 if isinstance(couplings, (Diagonal, Scalar)) else int(data.shape[-1])
        side = max(width, 1)
        blocks = int(data.shape[1:].numel()) // side**2
        vectors = blocks if rhs is None else max(blocks, int(rhs.shape[1:].numel()) // side)
        cpu = data.device.type == "cpu"
        if torch.compiler.is_compiling():  # nobody reads the reason then, and a compiler sees through no cache
            return pick(length, width, blocks, vectors, cpu), ""
        return pick_and_explain(length, width, blocks, vectors, cpu)

    def solve_coupled(self, couplings: Blocks, rhs: Tensor, *, reverse: bool = False) -> Tensor:
        return self.choose(couplings, rhs)[0].solve_coupled(couplings, rhs, reverse=reverse)
