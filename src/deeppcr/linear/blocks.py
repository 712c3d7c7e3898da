"""The structures a Jacobian block can have.

Shapes: L blocks, ``*batch`` any number of batch dimensions, D the width of a state.
Every structure stores one tensor whose first dimension runs over the blocks, and every operation
broadcasts over the batch dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, eq=False)
class Blocks:
    """L square matrices of one structure. Use a subclass: it says what ``data`` means."""

    data: Tensor

    #: how many trailing dimensions of ``data`` describe one matrix
    core_dims: ClassVar[int]
    #: whether a product of blocks is right to a few roundings of itself, so that a solution by products is as exact as by steps
    exact_products: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if type(self) is Blocks:
            raise TypeError("Blocks is abstract: use Dense, Diagonal, BlockDiagonal or Scalar")

    def __len__(self) -> int:
        return self.data.shape[0]

    def __getitem__(self, steps: slice) -> Blocks:
        return type(self)(self.data[steps])

    @property
    def batch_shape(self) -> torch.Size:
        return self.data.shape[1 : self.data.ndim - self.core_dims]

    @property
    def width(self) -> int | None:
        """D, or None where any width fits (scalar blocks)."""
        return self.data.shape[-1]

    def aligned(self, batch_dims: int) -> Blocks:
        """The same blocks with size-1 batch dimensions put in until there are ``batch_dims``."""
        missing = batch_dims + 1 + self.core_dims - self.data.ndim
        if missing <= 0:
            return self
        length, *rest = self.data.shape
        return type(self)(self.data.reshape(length, *(1,) * missing, *rest))

    def where(self, keep: Tensor) -> Blocks:
        """The same blocks, zero where ``keep`` [L, *batch] is False."""
        return type(self)(torch.where(keep.reshape(*keep.shape, *(1,) * self.core_dims), self.data, 0))

    def apply(self, vectors: Tensor) -> Tensor:
        """``A_l v_l`` for every block; vectors and result are [L, *batch, D]."""
        raise NotImplementedError

    def compose(self, first: Blocks) -> Blocks:
        """The products ``A_l F_l``: ``first`` acts first. Both have the same structure."""
        raise NotImplementedError

    def transpose(self) -> Blocks:
        raise NotImplementedError

    def adjoint(self) -> Blocks:
        """The transposed blocks, conjugated where they are complex: what a backward pass applies."""
        return type(self)(self.data.conj()).transpose()

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """The derivative of ``left_l . A_l right_l`` in ``data``, before summing over broadcast dimensions."""
        raise NotImplementedError

    def as_real(self, vectors: Tensor) -> tuple[Blocks, Tensor]:
        """The same products in real numbers: ``a + bi`` is ``[[a, -b], [b, a]]`` on pairs of a real and an imaginary part.

        Args:
            vectors: [L, *batch, D], complex; ``aligned`` to the blocks

        Returns:
            real blocks, and vectors [L, *batch, 2 D]; of scalar blocks [L, *batch, D, 2], each number a row of its own
        """
        raise NotImplementedError

    def to_dense(self, width: int | None = None) -> Tensor:
        """[L, *batch, D, D]; ``width`` is needed for scalar blocks only."""
        raise NotImplementedError


class _Matrices(Blocks):
    """Blocks whose last two dimensions are matrices."""

    def compose(self, first: Blocks) -> Self:
        return type(self)(self.data @ first.data)

    def transpose(self) -> Self:
        return type(self)(self.data.mT)

    def as_real(self, vectors: Tensor) -> tuple[Blocks, Tensor]:
        return type(self)(_real_matrices(self.data)), _real_pairs(vectors).flatten(-2)


class _Numbers(Blocks):
    """Blocks of which each number stands by itself."""

    exact_products = True  # nothing is summed up, so nothing cancels

    def compose(self, first: Blocks) -> Self:
        return type(self)(self.data * first.data)

    def transpose(self) -> Self:
        return self


class Dense(_Matrices):
    """Full matrices.

    Args:
        data: [L, *batch, D, D]

    >>> import torch
    >>> Dense(torch.eye(2).expand(3, 2, 2)).apply(torch.ones(3, 2)).shape
    torch.Size([3, 2])
    """

    core_dims = 2

    def apply(self, vectors: Tensor) -> Tensor:
        return (self.data @ vectors.unsqueeze(-1)).squeeze(-1)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        return left.unsqueeze(-1) * right.unsqueeze(-2)

    def to_dense(self, width: int | None = None) -> Tensor:
        return self.data


class Diagonal(_Numbers):
    """Diagonal matrices.

    Args:
        data: [L, *batch, D], the diagonals

    >>> import torch
    >>> Diagonal(torch.tensor([[2.0, 3.0]])).to_dense()
    tensor([[[2., 0.],
             [0., 3.]]])
    """

    core_dims = 1

    def apply(self, vectors: Tensor) -> Tensor:
        return self.data * vectors

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        return left * right

    def as_real(self, vectors: Tensor) -> tuple[Blocks, Tensor]:
        return BlockDiagonal(_real_matrices(self.data[..., None, None])), _real_pairs(vectors).flatten(-2)

    def to_dense(self, width: int | None = None) -> Tensor:
        return torch.diag_embed(self.data)


class BlockDiagonal(_Matrices):
    """Matrices made of K small P x P blocks along the diagonal; D = K P.

    Args:
        data: [L, *batch, K, P, P]

    >>> import torch
    >>> BlockDiagonal(torch.ones(5, 3, 2, 2)).width
    6
    """

    core_dims = 3

    @property
    def width(self) -> int:
        return self.data.shape[-3] * self.data.shape[-1]

    def _split(self, vectors: Tensor) -> Tensor:
        return vectors.reshape(*vectors.shape[:-1], self.data.shape[-3], self.data.shape[-1])

    def apply(self, vectors: Tensor) -> Tensor:
        products = (self.data @ self._split(vectors).unsqueeze(-1)).squeeze(-1)
        return products.reshape(*products.shape[:-2], self.width)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        return self._split(left).unsqueeze(-1) * self._split(right).unsqueeze(-2)

    def to_dense(self, width: int | None = None) -> Tensor:
        count, size = self.data.shape[-3], self.data.shape[-1]
        placed = torch.diag_embed(self.data.movedim(-3, -1))  # [..., P, P, K, K]
        return placed.movedim((-2, -4, -1, -3), (-4, -3, -2, -1)).reshape(
            *self.data.shape[:-3], count * size, count * size
        )


class Scalar(_Numbers):
    """Multiples of the identity, of any width.

    Args:
        data: [L, *batch]

    >>> import torch
    >>> Scalar(torch.tensor([2.0])).to_dense(2)
    tensor([[[2., 0.],
             [0., 2.]]])
    """

    core_dims = 0

    @property
    def width(self) -> None:
        return None

    def apply(self, vectors: Tensor) -> Tensor:
        return self.data.unsqueeze(-1) * vectors

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum(-1)

    def as_real(self, vectors: Tensor) -> tuple[Blocks, Tensor]:
        return BlockDiagonal(_real_matrices(self.data[..., None, None, None, None])), _real_pairs(vectors)

    def to_dense(self, width: int | None = None) -> Tensor:
        if width is None:
            raise ValueError("width: scalar blocks fit any width, so to_dense needs to be told one")
        eye = torch.eye(width, dtype=self.data.dtype, device=self.data.device)
        return self.data[..., None, None] * eye


def _real_pairs(vectors: Tensor) -> Tensor:
    """[..., D] to [..., D, 2]."""
    return torch.view_as_real(vectors.resolve_conj())


def _real_matrices(matrices: Tensor) -> Tensor:
    """[..., P, P] to [..., 2 P, 2 P], real and imaginary parts side by side."""
    a, b = matrices.real, matrices.imag
    rows = torch.stack([torch.stack([a, -b], -1), torch.stack([b, a], -1)], -3)  # [..., P, 2, P, 2]
    return rows.flatten(-4, -3).flatten(-2)


STRUCTURES: tuple[type[Blocks], ...] = (Dense, Diagonal, BlockDiagonal, Scalar)

# As pytree nodes, blocks can be returned by a function under torch.vmap.
for _structure in STRUCTURES:
    pytree.register_pytree_node(
        _structure, lambda blocks: ([blocks.data], None), lambda data, _, s=_structure: s(*data)
    )
