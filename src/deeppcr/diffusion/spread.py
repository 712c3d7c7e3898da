"""A denoiser whose rows are spread over ranks: each evaluates some of those of a call, and all have all of the outputs.

Shapes: N rows of a call. What is done with the outputs is done by all ranks alike: it is little beside the network.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from ..distributed.ranks import Ranks, Trouble
from ..runtime import in_functorch


def spread(denoiser: Callable, ranks: Ranks) -> Callable:
    """``denoiser``, called by all ranks with the same rows."""

    def spread_denoiser(rows: Tensor, *more: Any) -> Tensor:
        size = -(-len(rows) // ranks.count)  # rows of a rank, but for the last ones
        begin, end = (min(each * size, len(rows)) for each in (ranks.rank, ranks.rank + 1))
        # So few rows take as long as one. (A derivative is a sum over ranks, in which each row is to count once.)
        few = len(rows) < 2 * ranks.count and not torch.is_grad_enabled()
        if few or ranks.count == 1 or in_functorch():
            return denoiser(rows, *more)
        trouble, found = Trouble(), rows[:0]
        own, *about = pytree.tree_map_only(
            Tensor, lambda each: _Slice.apply(each, ranks, begin, end, size), (rows, *more)
        )
        if end > begin:
            with trouble.kept():
                found = denoiser(own, *about)
                if not isinstance(found, Tensor) or found.shape != own.shape:
                    came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                    raise ValueError(
                        f"denoiser: must return the shape of its input, {tuple(own.shape)}, returned {came}"
                    )
        if trouble.error is not None:
            found = own
        return _Join.apply(found.to(rows.dtype), own, ranks, trouble, begin, len(rows), size)  # type: ignore[return-value]

    return spread_denoiser


class _Slice(torch.autograd.Function):
    """Of rows that all ranks have, those of this rank; backwards, each has the gradient of its own, and all hear of them."""

    @staticmethod
    def forward(ctx, rows, ranks, begin, end, size):
        ctx.ranks, ctx.size, ctx.total = ranks, size, len(rows)
        return rows[begin:end].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # type: ignore[override]
        return _together(grad_outputs[0], ctx.ranks, ctx.size)[: ctx.total], None, None, None, None


class _Join(torch.autograd.Function):
    """The rows of all ranks; backwards, each takes the gradient of its own."""

    @staticmethod
    def forward(ctx, found, rows, ranks, trouble, begin, total, size):
        ctx.begin, ctx.count = begin, len(rows)
        told = found.new_zeros(size + 1, *found.shape[1:])
        told[: len(found)] = found
        told[size].view(-1)[0] = float(trouble.error is not None)
        heard = ranks.gather(told)
        if (heard[:, size].flatten(1)[:, 0] != 0).any():
            ranks.fail(trouble.error)
        return heard[:, :size].flatten(0, 1)[:total].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # type: ignore[override]
        own = grad_outputs[0][ctx.begin : ctx.begin + ctx.count]
        # Also where no output depends on rows, or there are none: ``_Slice`` is to come by on all ranks, which speak there.
        return own, torch.zeros_like(own), None, None, None, None, None


def _together(part: Tensor, ranks: Ranks, size: int) -> Tensor:
    padded = part.new_zeros(size, *part.shape[1:])
    padded[: len(part)] = part
    return ranks.gather(padded).flatten(0, 1)


def check_alike(ranks: Ranks, initial: Tensor, steps: Tensor | None) -> None:
    """Raise on all ranks where they were given different noise."""
    shapes = zlib.crc32(repr((initial.shape, None if steps is None else steps.shape, initial.dtype)).encode())
    total = float(initial.detach().double().sum() + (0 if steps is None else steps.detach().double().sum()))
    kinds, sums = ranks.gather(torch.tensor([shapes, total], dtype=torch.float64)).T
    same = sums.max() - sums.min() <= 1e-6 * sums.abs().max() or sums.isnan().any()
    if len(kinds.unique()) > 1 or not same:
        raise ValueError("noise: must be the same on every rank")
