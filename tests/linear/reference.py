"""Block bidiagonal systems solved in the plainest ways, and what the tests of ``deeppcr.linear`` share.

Shapes: L steps, ``*batch`` any number of batch dimensions, D the width of a state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deeppcr import linear

STRUCTURES = (linear.Dense, linear.Diagonal, linear.BlockDiagonal, linear.Scalar)
SOLVERS = (
    linear.ForwardSubstitution(),
    linear.PCR(),
    linear.Hierarchical(chunk=2),
    linear.Hierarchical(chunk=3),
    linear.Hierarchical(chunk=4),
    linear.Hierarchical(chunk=7),
    linear.Auto(),
)
# Those that multiply blocks with each other, which forward substitution does not.
PARALLEL_SOLVERS = SOLVERS[1:]


def one_after_the_other(matrices: Tensor, rhs: Tensor, initial: Tensor | None = None, reverse: bool = False) -> Tensor:
    """[L, *batch, D] from [L, *batch, D, D] matrices: the loop itself."""
    length = rhs.shape[0]
    state = torch.zeros_like(rhs[0]) if initial is None else initial
    states = [state] * length
    for step in reversed(range(length)) if reverse else range(length):
        state = torch.einsum("...ij,...j->...i", matrices[step], state) + rhs[step]
        states[step] = state
    return torch.stack(states)


def as_one_matrix(matrices: Tensor, rhs: Tensor, initial: Tensor | None = None, reverse: bool = False) -> Tensor:
    """The same states from one dense system of size L D, with the identity on the diagonal and -A_l beside it."""
    length, width = rhs.shape[0], rhs.shape[-1]
    initial = rhs.new_zeros(width) if initial is None else initial
    batch = torch.broadcast_shapes(matrices.shape[1:-2], rhs.shape[1:-1], initial.shape[:-1])
    system = torch.eye(length * width, dtype=rhs.dtype, device=rhs.device).repeat(*batch, 1, 1)
    known = torch.zeros(*batch, length * width, dtype=rhs.dtype, device=rhs.device)
    for step in range(length):
        rows = slice(step * width, (step + 1) * width)
        known[..., rows] += rhs[step]
        before = step + 1 if reverse else step - 1
        if 0 <= before < length:
            system[..., rows, before * width : (before + 1) * width] -= matrices[step]
        else:
            known[..., rows] += (matrices[step] @ initial.unsqueeze(-1)).squeeze(-1)
    return torch.linalg.solve(system, known).unflatten(-1, (length, width)).movedim(-2, 0)


def random_blocks(structure, length, batch=(), width=3, *, dtype=torch.float64, device=None, gain=0.7):
    """Blocks that shrink a random vector by about ``gain`` each."""
    size = smallest_factor(width)
    core, fan_in = {
        linear.Dense: ((width, width), width),
        linear.Diagonal: ((width,), 1),
        linear.BlockDiagonal: ((width // size, size, size), size),
        linear.Scalar: ((), 1),
    }[structure]
    return structure(torch.randn(length, *batch, *core, dtype=dtype, device=device) * (gain / fan_in**0.5))


def smallest_factor(width: int) -> int:
    """The smallest factor of ``width`` above 1: the size of a small block."""
    return next((factor for factor in range(2, width + 1) if width % factor == 0), 1)


def error_by_step(actual: Tensor, expected: Tensor) -> Tensor:
    """[L, *batch]: the distance of each state from the expected one, relative to the expected one's own size."""
    distance = torch.linalg.vector_norm((actual.double() - expected.double()), dim=-1)
    return distance / torch.linalg.vector_norm(expected.double(), dim=-1)


def assert_same_steps(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Every state is right relative to its own size, however small or large its neighbours are."""
    assert actual.shape == expected.shape
    assert torch.isfinite(expected).all()
    worst = error_by_step(actual, expected).max().item()
    assert worst <= tolerance, f"a state is off by {worst:.1e} of its size, {tolerance:.1e} is allowed"
