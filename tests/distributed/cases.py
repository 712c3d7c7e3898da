"""What ranks are asked to do in tests; each returns tensors of this rank's part."""

from __future__ import annotations

import torch
from torch import Tensor

from deeppcr import distributed, linear
from linear.test_refine import butterworth

STRUCTURES = {
    "dense": linear.Dense,
    "diagonal": linear.Diagonal,
    "block": linear.BlockDiagonal,
    "scalar": linear.Scalar,
}


def cut(whole: Tensor, mesh, lengths, dim: int = 0) -> Tensor:
    """This rank's part, with a gradient of its own."""
    part = distributed.shard(whole, mesh, dim, lengths=lengths).detach().clone()
    return part.requires_grad_() if part.is_floating_point() or part.is_complex() else part


def system(kind: str, length: int, batch: tuple[int, ...] = (2,), width: int = 4, dtype=torch.float64, gain=0.9):
    """Blocks' data, right-hand side, initial state and weights of a loss."""
    torch.manual_seed(length)
    core = {"dense": (width, width), "diagonal": (width,), "block": (width // 2, 2, 2), "scalar": ()}[kind]
    scale = gain / {"dense": width, "block": 2}.get(kind, 1) ** 0.5
    data = scale * torch.randn(length, *batch, *core, dtype=dtype)
    rhs, weights = (torch.randn(length, *batch, width, dtype=dtype) for _ in range(2))
    return data, rhs, torch.randn(*batch, width, dtype=dtype), weights


def linear_solve(mesh, kind, lengths, reverse, dtype=torch.float64, initial=True, twice=False, gain=0.9, width=4):
    data, rhs, start, weights = system(kind, sum(lengths), dtype=dtype, gain=gain, width=width)
    data, rhs, weights = (cut(each, mesh, lengths) for each in (data, rhs, weights))
    start = start.requires_grad_()
    states = linear.solve(STRUCTURES[kind](data), rhs, start if initial else None, reverse=reverse, mesh=mesh)
    leaves = [data, rhs, *([start] if initial else [])]
    loss = (states * weights.detach()).abs().square().sum()
    if not twice:
        gradients = torch.autograd.grad(loss, leaves)
        return states.detach(), *gradients
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    second = torch.autograd.grad(sum(each.abs().square().sum() for each in first), leaves)
    return states.detach(), *second


def overflowing(mesh, lengths):
    """A product of all blocks is infinite, while that direction is never taken."""
    length = sum(lengths)
    torch.manual_seed(0)
    data = torch.diag(torch.tensor([30.0, 0.5], dtype=torch.float64)).expand(length, 2, 2)
    rhs = torch.randn(length, 1, 2, dtype=torch.float64)
    rhs[..., 0] = 0
    return _solved(mesh, data, rhs, lengths)


def filtering(mesh, lengths):
    """The companion matrix of a low-pass filter: products of it lose most of their digits."""
    length = sum(lengths)
    torch.manual_seed(0)
    data = butterworth(8, 0.1).expand(length, 8, 8)
    rhs = torch.zeros(length, 1, 8, dtype=torch.float64)
    rhs[..., 0] = torch.randn(length, 1, dtype=torch.float64)
    return _solved(mesh, data, rhs, lengths)


def _solved(mesh, data, rhs, lengths):
    if mesh is None:
        return linear.solve(linear.Dense(data), rhs, solver=linear.ForwardSubstitution())
    data, rhs = (distributed.shard(each, mesh, lengths=lengths) for each in (data, rhs))
    return linear.solve(linear.Dense(data), rhs, mesh=mesh)


def refused(mesh, wrong):
    """Rank 1 gives something else than the others."""
    odd = mesh.get_local_rank() == 1
    rhs = torch.zeros(3, 2)
    if wrong == "structure":
        return linear.solve(
            linear.Scalar(torch.zeros(3)) if odd else linear.Diagonal(torch.zeros(3, 2)), rhs, mesh=mesh
        )
    return linear.solve(linear.Diagonal(torch.zeros(3, 5 if odd else 2)), rhs, mesh=mesh)
