"""The solver made of Triton kernels; its plain references are the other solvers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..runtime import has_triton, launching
from .blocks import BlockDiagonal, Blocks, Dense
from .solver import LinearSolver

#: the widest dense blocks, and the largest of block-diagonal ones
_DENSE, _SMALL = 256, 8
#: the widest dense blocks whose kernels do with the shared memory that every device has; the others need so many bytes
_DENSE_ANYWHERE, _ROOM = 128, 136 * 1024


@dataclass(frozen=True, kw_only=True)
class Fused(LinearSolver):
    """Fused kernels on a GPU: reduce chunks, solve for their starts, substitute back, in float32.

    Dense blocks up to a width of 256, block-diagonal ones up to 8 x 8, diagonal and scalar ones; of complex64, which are solved as
    pairs of real numbers, up to half of that. Where a product of blocks overflows although the solution does not, or loses digits that
    steps keep, the kernels find out by themselves, and solve what is left in float64 (of dense blocks up to a width of 8), else step by step; of dense
    blocks wider than 64, where it overflows.

    >>> import torch
    >>> from deeppcr import linear
    >>> Fused().refusal(linear.Scalar(torch.full((3,), 0.5)))
    'the kernels need a CUDA device, the blocks are on cpu'
    """

    overflows = False  # it finds out by itself, without asking the host
    repeatable = True
    fuses = True

    def refusal(self, couplings: Blocks) -> str | None:
        """Why there is no kernel for these blocks, or None."""
        data = couplings.data
        if not data.is_cuda:
            return f"the kernels need a CUDA device, the blocks are on {data.device.type}"
        if data.dtype not in (torch.float32, torch.complex64):
            return f"the kernels work in float32, the blocks are {data.dtype}"
        parts = 2 if data.dtype.is_complex else 1
        if isinstance(couplings, Dense) and parts * data.shape[-1] > _DENSE_ANYWHERE:
            widest = (_DENSE if has_room(data.device) else _DENSE_ANYWHERE) // parts
            if data.shape[-1] > widest:
                return f"there are kernels for widths up to {widest}, the blocks have {data.shape[-1]}"
        if isinstance(couplings, BlockDiagonal) and parts * data.shape[-1] > _SMALL:
            return f"there are kernels for small blocks up to {_SMALL // parts}, these have {data.shape[-1]}"
        if not has_triton():
            return "the kernels need Triton, which is not installed"
        return None

    def solve_coupled(self, couplings: Blocks, rhs: Tensor, *, reverse: bool = False) -> Tensor:
        refusal = self.refusal(couplings)
        if refusal is not None:
            raise ValueError(f"solver: Fused() cannot solve this: {refusal}; use Auto()")
        if rhs.is_complex():
            found = self.solve_coupled(*couplings.as_real(rhs), reverse=reverse)
            return torch.view_as_complex(found.reshape(*rhs.shape, 2))
        if couplings.data.is_neg() or rhs.is_neg():  # kernels read memory as it is
            couplings, rhs = type(couplings)(couplings.data.resolve_neg()), rhs.resolve_neg()
        with launching(rhs.device):
            return _launch(couplings, rhs, reverse)

    def noted(self, couplings: Blocks, rhs: Tensor, *, reverse: bool = False) -> Any:
        """The launches that ``solve_coupled`` made for such tensors, to be made again; None where they cannot be."""
        if self.refusal(couplings) is not None:
            return None
        from ..launch import noted

        return noted(layout_of(couplings, rhs, reverse))


def _launch(couplings: Blocks, rhs: Tensor, reverse: bool) -> Tensor:
    from ..launch import repeat  # which imports Triton

    kernels, key = _kernels(type(couplings)), layout_of(couplings, rhs, reverse)
    states = repeat(key, (couplings.data, rhs), lambda: kernels.solve_coupled(couplings, rhs, reverse=reverse))
    assert states is not None
    return states


def layout_of(blocks: Blocks, rhs: Tensor, reverse: bool) -> tuple[Any, ...]:
    """What launches depend on: all but what the tensors hold, and where they lie."""
    data = blocks.data
    return (
        type(blocks), data.shape, data.stride(), data.dtype, data.device, data.data_ptr() % 16,
        rhs.shape, rhs.stride(), rhs.dtype, rhs.device, rhs.data_ptr() % 16, reverse,
    )  # fmt: skip


@cache
def has_room(device: torch.device) -> bool:
    """Whether a program may have the shared memory that the widest layers and blocks need: as on an A100, H100 or H200."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= _ROOM


@cache
def _kernels(structure: type[Blocks]) -> Any:
    """The module with the kernels of a structure: imported when it is first used, since that takes a second."""
    if structure is Dense:
        from .kernels import dense as found
    elif structure is BlockDiagonal:
        from .kernels import block_diagonal as found
    else:
        from .kernels import diagonal as found
    return found
