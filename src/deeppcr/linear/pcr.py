"""Parallel cyclic reduction: Algorithm 1 of the paper, with the signs put right.

The paper's equations (pcr1, pcr2) print ``r_l - A_l r_{l-1}``; that sign belongs to its Algorithm 1, where A_l is the
entry of the matrix and so carries a minus of its own. Here ``z_l = A_l z_{l-1} + r_l``, hence in each round
``r_l <- r_l + A_l r_{l-i}`` and ``A_l <- A_l A_{l-i}``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import Blocks, Dense
from .solver import LinearSolver


@dataclass(frozen=True, kw_only=True)
class PCR(LinearSolver):
    """Parallel cyclic reduction: ceil(log2 L) rounds, each a batched product of blocks.

    The shortest chain of dependent operations, at O(L log L) block products of work.

    >>> import torch
    >>> from deeppcr import linear
    >>> halves, ones = linear.Scalar(torch.full((3,), 0.5)), torch.ones(3, 1)
    >>> linear.solve(halves, ones, solver=PCR()).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """

    repeatable = True

    def solve_coupled(self, couplings: Blocks, rhs: Tensor, *, reverse: bool = False) -> Tensor:
        if isinstance(couplings, Dense) and couplings.batch_shape == rhs.shape[1:-1]:
            return _solve_dense(couplings.data, rhs, reverse)
        length, stride = rhs.shape[0], 1
        while stride < length:
            # Row l now depends on row l - stride; rows below stride are solved and need no block any more, so
            # the blocks kept are those of the other length - stride rows.
            if reverse:
                rhs = torch.cat([rhs[:-stride] + couplings.apply(rhs[stride:]), rhs[-stride:]])
            else:
                rhs = torch.cat([rhs[:stride], rhs[stride:] + couplings.apply(rhs[:-stride])])
            if 2 * stride < length:
                near, far = couplings[stride:], couplings[:-stride]
                couplings = far.compose(near) if reverse else near.compose(far)
            stride *= 2
        return rhs


def _solve_dense(data: Tensor, rhs: Tensor, reverse: bool) -> Tensor:
    """The same with the batch in the first dimension: a third of the calls, which on a GPU are what a round costs."""
    width, rows = rhs.shape[-1], rhs.shape[1:-1].numel()
    length, stride = rhs.shape[0] * rows, rows
    blocks, vectors = data.reshape(length - stride, width, width), rhs.reshape(length, width, 1)
    while stride < length:
        if reverse:
            moved = torch.baddbmm(vectors[:-stride], blocks, vectors[stride:])
            vectors = torch.cat([moved, vectors[-stride:]])
        else:
            moved = torch.baddbmm(vectors[stride:], blocks, vectors[:-stride])
            vectors = torch.cat([vectors[:stride], moved])
        if 2 * stride < length:
            near, far = blocks[stride:], blocks[:-stride]
            blocks = torch.bmm(far, near) if reverse else torch.bmm(near, far)
        stride *= 2
    return vectors.reshape(rhs.shape)
