"""Tensors cut up along the steps, and put together again; both can be differentiated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .ranks import Ranks


def shard(tensor: Tensor, mesh: Any, dim: int = 0, *, lengths: Sequence[int] | None = None) -> Tensor:
    """This rank's part of a tensor that all ranks have: contiguous, as long as the others or longer by one.

    Its gradient is this rank's part of the whole: zero outside of the part. The sum over ranks is the gradient.

    Args:
        tensor: the same on every rank. A DTensor on this mesh is redistributed, and stays one
        mesh: a one-dimensional DeviceMesh
        dim: along which it is cut
        lengths: of the parts, where they are to be others; they may be 0, and add up to the size along ``dim``

    >>> import torch, torch.distributed as dist, deeppcr
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun sets up more of them
    >>> deeppcr.distributed.shard(torch.arange(7), init_device_mesh("cpu", (1,)))
    tensor([0, 1, 2, 3, 4, 5, 6])
    >>> dist.destroy_process_group()
    """
    if _is_dtensor(tensor):
        return _redistributed(tensor, mesh, dim)
    ranks = Ranks.of(mesh)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor: expected a tensor, got {type(tensor).__name__}")
    size = tensor.shape[dim]
    if lengths is None:
        lengths = [size // ranks.count + (rank < size % ranks.count) for rank in range(ranks.count)]
    if len(lengths) != ranks.count or sum(lengths) != size or min(lengths) < 0:
        raise ValueError(f"lengths: expected {ranks.count} parts of {size} in all, got {list(lengths)}")
    return tensor.narrow(dim, sum(lengths[: ranks.rank]), lengths[ranks.rank])


def gather(tensor: Tensor, mesh: Any, dim: int = 0) -> Tensor:
    """The parts of all ranks, put together along ``dim``, on every rank.

    Every rank's loss counts: the gradient of a part is the sum of what the losses of all ranks say of it. Where all compute the same loss
    from the whole, it is P times that of one; so divide, or let one rank alone have a loss.

    Args:
        tensor: this rank's part; its size along ``dim`` may differ, and be 0. A DTensor on this mesh is redistributed, and stays one
        mesh: a one-dimensional DeviceMesh

    >>> import torch, torch.distributed as dist, deeppcr
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> deeppcr.distributed.gather(torch.arange(7), init_device_mesh("cpu", (1,)))
    tensor([0, 1, 2, 3, 4, 5, 6])
    >>> dist.destroy_process_group()
    """
    if _is_dtensor(tensor):
        return _redistributed(tensor, mesh, None)
    ranks = Ranks.of(mesh)
    moved = tensor.movedim(dim, 0)
    lengths, differentiated = zip(*ranks.agree(None, moved.shape[0], moved.requires_grad), strict=True)
    if any(differentiated) and not moved.requires_grad:  # a backward pass is to come by here on every rank
        moved = moved.detach().requires_grad_()
    return _Gather.apply(moved, ranks, lengths).movedim(0, dim)  # type: ignore[union-attr]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, ranks, lengths):
        ctx.ranks, ctx.lengths = ranks, lengths
        padded = part.new_zeros(max(lengths), *part.shape[1:])
        padded[: len(part)] = part
        heard = ranks.gather(padded)
        return torch.cat([each[:length] for each, length in zip(heard, lengths, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # type: ignore[override]
        ranks, lengths = ctx.ranks, ctx.lengths
        begin = sum(lengths[: ranks.rank])
        return ranks.total(grad_outputs[0])[begin : begin + lengths[ranks.rank]], None, None


def _is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # who has one has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def _redistributed(tensor: Any, mesh: Any, dim: int | None) -> Any:
    """With the steps cut up along ``dim`` over the ranks of a mesh, or None: whole; as it was along other dimensions of its mesh."""
    from torch.distributed.tensor import Replicate, Shard

    wanted = Replicate() if dim is None else Shard(dim % tensor.ndim)
    if tensor.device_mesh == mesh:
        return tensor.redistribute(mesh, [wanted])
    names, name = tensor.device_mesh.mesh_dim_names, mesh.mesh_dim_names
    if mesh.ndim != 1 or not name or not names or name[0] not in names:
        raise ValueError("mesh: expected the DTensor's own, or one of its dimensions by name")
    placements = list(tensor.placements)
    placements[names.index(name[0])] = wanted
    return tensor.redistribute(tensor.device_mesh, placements)
