"""``deeppcr::linear_solve``: a system as one operation of a compiler's graph.

Traced through, every length has a graph of its own: the rounds of a solver are as many as its length asks for. As an operation that
nobody looks into, a system of any length stands in one graph, runs as it does eagerly (kernels, looks at values), and is exported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime import is_transformed
from .auto import Auto
from .blocks import STRUCTURES, Blocks
from .fused import Fused
from .hierarchical import Hierarchical
from .pcr import PCR
from .solver import ForwardSubstitution, LinearSolver
from .system import pull_back, solution

# A graph holds tensors, numbers and strings: others find structures and solvers by their names.
_STRUCTURES: dict[str, type[Blocks]] = {each.__name__: each for each in STRUCTURES}
_SOLVERS: dict[str, type[LinearSolver]] = {
    each.__name__: each for each in (Auto, Fused, PCR, ForwardSubstitution, Hierarchical)
}


@torch.library.custom_op("deeppcr::linear_solve", mutates_args=())
def linear_solve(
    data: Tensor, rhs: Tensor, structure: str, solver: str, chunk: int, reverse: bool, refined: bool
) -> Tensor:
    """The solution [L, *batch, D], contiguous.

    Args:
        data: [L - 1, ...], of the couplings; aligned to the batch
        rhs: [L, *batch, D]
        structure, solver: names of classes
        chunk: of Hierarchical; 0 for the others
    """
    if data.shape[0] == 0:
        return rhs.clone(memory_format=torch.contiguous_format)
    made = _SOLVERS[solver](**({"chunk": chunk} if chunk else {}))
    with torch.autocast(rhs.device.type, enabled=False):
        return solution(_STRUCTURES[structure](data), rhs, made, reverse, refined).contiguous()


@linear_solve.register_fake
def _(data: Tensor, rhs: Tensor, *settings: Any) -> Tensor:
    return torch.empty_like(rhs, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    data, _, *ctx.settings = inputs
    ctx.save_for_backward(data, output)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    data, states = ctx.saved_tensors
    structure, solver, chunk, reverse, _ = ctx.settings

    def solve_adjoint(couplings: Blocks) -> Tensor:
        return linear_solve(couplings.data, grad, structure, solver, chunk, not reverse, True)

    couplings = _STRUCTURES[structure](data)
    of_data, of_rhs = pull_back(couplings, states, reverse, solve_adjoint, ctx.needs_input_grad[0])
    return of_data, of_rhs, None, None, None, None, None


linear_solve.register_autograd(_backward, setup_context=_setup_context)


def has_operator(couplings: Blocks, solver: LinearSolver) -> bool:
    """Whether the operator stands for such a call: not for classes of the caller's, and not inside a transform.

    PyTorch has no ``torch.func.grad`` and no forward mode of a registered operator.
    """
    known = _STRUCTURES.get(type(couplings).__name__) is type(couplings)
    return known and _SOLVERS.get(type(solver).__name__) is type(solver) and not is_transformed()


def solve_by_operator(couplings: Blocks, rhs: Tensor, solver: LinearSolver, reverse: bool, refined: bool) -> Tensor:
    chunk = solver.chunk if isinstance(solver, Hierarchical) else 0
    return linear_solve(couplings.data, rhs, type(couplings).__name__, type(solver).__name__, chunk, reverse, refined)
