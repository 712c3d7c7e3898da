"""Dense blocks: reduce chunks to one equation each, solve for their starts (recursively), substitute back.

Shapes: S = L - 1 steps in N chunks of C, B rows, w the width. In the order of the recurrence, step k takes the state
before it to ``A_k z + b_k``; the known state stands before step 0. ``reverse`` only changes where step k lies in memory,
and transposed blocks only swap two strides, so neither copies anything.

Up to ``NARROW`` a block fits the registers of one program. Wider ones are multiplied tile by tile, the columns of a
product shared among programs: they never meet.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import aligned, cdiv, launch, next_power_of_2
from ..blocks import Blocks
from .narrow import Shape, miss_narrow, reduce_narrow, substitute_narrow
from .repair import MARKS, lanes_for, repair
from .wide import reduce_wide, substitute_wide

#: the widest block that one program holds in its registers
NARROW = 64
#: the widest block there is a kernel for
WIDEST = 256
#: so few steps are taken one after the other
_TOP = 32
#: columns of a product of wide blocks that one program takes
_COLUMNS = 32


@triton.jit(do_not_specialize=["count"])
def _add(values, more, count, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.load(values + at, mask=at < count) + tl.load(more + at, mask=at < count)
    tl.store(values + at, total, mask=at < count)


def chunk_length(steps: int, width: int) -> int:
    """C: few dependent steps in all levels together, and no more chunks than there is room for at once."""
    if steps <= _TOP:
        return max(steps, 1)
    if steps <= 32 * _TOP:
        return next_power_of_2(cdiv(steps, _TOP))
    return 32 if width <= 32 else 64


class Cut(NamedTuple):
    """Into how many chunks a chain is cut, and how the kernels of narrow blocks are launched for them."""

    chunk: int
    chunks: int
    precision: str
    reduce: tuple[int, tuple[Any, ...], int]  # programs, constants and warps
    substitute: tuple[int, tuple[Any, ...], int]


@lru_cache(maxsize=1024)
def cut_for(steps: int, rows: int, width: int, chunk: int | None) -> Cut:
    """``chunk``: steps in a chunk, if not chosen by width and length."""
    shape = Shape(width)
    chunk = chunk_length(steps, width) if chunk is None else min(chunk, max(steps, 1))
    chunks = max(1, cdiv(steps, chunk))
    reducing, walking = (chunks - 1) * rows, chunks * rows
    (warps, stages), (walking_warps, walking_stages) = shape.reducing(reducing), shape.walking(walking)
    reduce = (reducing, (width, shape.padded, shape.precision, stages), warps)
    return Cut(chunk, chunks, shape.precision, reduce, (walking, (width, shape.padded, walking_stages), walking_warps))


def solve_coupled(couplings: Blocks, rhs: Tensor, *, reverse: bool = False, chunk: int | None = None) -> Tensor:
    """See ``LinearSolver.solve_coupled``: same arguments, same result. ``chunk`` is C on the lowest level."""
    data = couplings.data
    if rhs.ndim > 3:  # all batch dimensions become rows; what is the same for all of them is not copied
        length, *batch, width = rhs.shape
        rows, core = math.prod(batch), data.shape[-2:]
        shared = data.shape[1:-2].numel() == 1
        data = data if shared else data.expand(length - 1, *batch, *core)
        flat = type(couplings)(data.reshape(length - 1, 1 if shared else rows, *core))
        found = solve_coupled(flat, rhs.reshape(length, rows, width), reverse=reverse, chunk=chunk)
        return found.view(rhs.shape)
    data, rhs = aligned(data), aligned(rhs)
    states = torch.empty_like(rhs, memory_format=torch.contiguous_format)
    solve_chain(Chain(data, 0, reverse, 2), Chain(rhs, 1, reverse), Chain(states, 1, reverse), chunk, repaired=True)
    return states


class Chain:
    """Tensors [S or S + 1, B, ...] in the order of the recurrence. Without B, or where it is 1, all rows have the same.

    Args:
        tensor: along its first dimension
        known: how many entries lie before step 0: 0 or 1
        reverse: whether the last entry is the first in the order of the recurrence
        core: dimensions behind B: 1 for vectors, 2 for blocks

    Attributes:
        steps: how many there are, without the known one
        arguments: of a kernel: the tensor, the element where step 0 begins, elements from one step to the next, strides
        integers: those that kernels are specialised on
    """

    __slots__ = ("arguments", "integers", "reverse", "steps", "tensor")

    def __init__(self, tensor: Tensor, known: int, reverse: bool, core: int = 1):
        shape, strides = tensor.shape, tensor.stride()
        self.tensor: Tensor = tensor
        self.reverse: bool = reverse
        self.steps: int = shape[0] - known
        row = strides[1] if len(shape) == core + 2 and shape[1] > 1 else 0
        first, step = ((self.steps - 1) * strides[0], -strides[0]) if reverse else (known * strides[0], strides[0])
        self.integers: tuple[int, ...] = (first, step, row, *strides[-core:])
        self.arguments: tuple[Any, ...] = (tensor, *self.integers)

    def before_first(self) -> Tensor:
        """What begins with the known state, [B, w]."""
        if not self.reverse and self.tensor.is_contiguous():
            return self.tensor
        return aligned(self.tensor[-1 if self.reverse else 0].contiguous())


def solve_in_place(products: Tensor, vectors: Tensor, *, refined: bool = True) -> None:
    """``vectors`` [N, B, w] become the states of the chain with blocks ``products`` [N - 1, B, w, w], both contiguous."""
    chain = Chain(vectors, 1, False)
    solve_chain(Chain(products, 0, False, 2), chain, chain, refined=refined)


def solve_chain(
    blocks: Chain,
    rhs: Chain,
    states: Chain,
    chunk: int | None = None,
    scales: Chain | None = None,
    *,
    refined: bool = True,
    repaired: bool = False,
) -> None:
    """Fill ``states`` (which may be ``rhs``), the known one before the first step included.

    Args:
        blocks: S blocks, in the order of the recurrence
        rhs, states: S + 1 vectors each
        chunk: steps in a chunk, if not chosen by width and length
        scales: S vectors s, for blocks ``diag(s) A``; for wide blocks only
        refined: to float32 proper; else up to what products on the matrix units lose
        repaired: rows in which products lost digits that steps keep are found again (``repair``); for narrow blocks, and other ``states``
            than ``rhs``
    """
    steps, size = blocks.steps, rhs.tensor.shape
    rows, width = (size[1] if len(size) == 3 else 1), size[-1]
    cut = cut_for(steps, rows, width, chunk)
    if cut.chunks == 1:
        starts = rhs.before_first()
    else:
        starts = rhs.tensor.new_empty(cut.chunks, rows, width)
        products = _reduce_chunks(blocks, rhs, starts, cut, scales)
        solve_in_place(products, starts, refined=refined)
        if refined and cut.precision == "tf32x3":
            _refine(blocks, rhs, starts, products, cut, scales)
    sizes, integers = (rows, steps, cut.chunks, cut.chunk), (blocks.integers, rhs.integers, states.integers)
    if width <= NARROW:
        programs, constants, warps = cut.substitute
        marked = repaired and cut.chunks > 1
        marks = starts.new_empty(cut.chunks, rows, dtype=torch.int8) if marked else starts
        system, into = (*blocks.arguments, *rhs.arguments), states.arguments[:-1]
        arguments = (*system, starts, *into, marks, *sizes)
        launch(substitute_narrow, programs, arguments, (*constants, marked), warps=warps, integers=integers)
        if marked:
            width, padded, stages = constants
            lanes, more_warps = lanes_for(rows, padded)
            constants, warps = (width, padded, MARKS, lanes, stages), max(warps, more_warps)
            launch(repair, rows, (*system, marks, *into, *sizes), constants, warps=warps, integers=integers)
    else:
        given, constants = _scaling(blocks, scales, width, "states")
        arguments = (*blocks.arguments, *given, *rhs.arguments, starts, *states.arguments[:-1], *sizes, starts)
        launch(substitute_wide, cut.chunks * rows, arguments, constants, warps=8, integers=(integers, given[1:]))


def _refine(blocks: Chain, rhs: Chain, starts: Tensor, products: Tensor, cut: Cut, scales: Chain | None) -> None:
    """Correct the starts by what the chunks miss when they are walked.

    The matrix units cut off the last bits of a sum instead of rounding it, so products of many blocks err to one side; the
    correction sees them only in what is left.
    """
    chunks, rows, width = starts.shape
    misses = torch.empty_like(starts)
    if width <= NARROW:
        arguments = (*blocks.arguments, *rhs.arguments, starts, misses, rows, cut.chunk)
        shape, integers = Shape(width), (blocks.integers, rhs.integers)
        warps, stages = shape.without
        constants = (width, shape.padded, stages)
        launch(miss_narrow, (chunks - 1) * rows, arguments, constants, warps=warps, integers=integers)
    else:
        _walk_wide(blocks, rhs, starts, misses, cut.chunk, scales, "misses")
    solve_in_place(products, misses)
    # A product that overflowed is found where the states are, by a start that is not finite.
    count = starts.numel()
    launch(_add, cdiv(count, 1024), (starts, misses, count), (1024,), warps=4)


def _scaling(blocks: Chain, scales: Chain | None, width: int, walk: str) -> tuple[tuple, tuple]:
    """Arguments of ``substitute_wide``, and its constants."""
    given, scale = ((blocks.tensor, 0, 0, 0), "none") if scales is None else (scales.arguments[:-1], "rows")
    return given, (width, next_power_of_2(width), 16, scale, walk)


def _reduce_chunks(blocks: Chain, rhs: Chain, starts: Tensor, cut: Cut, scales: Chain | None) -> Tensor:
    """The products of all chunks but the last, [N - 1, B, w, w]; their terms go to ``starts`` [N, B, w]."""
    chunks, rows, width = starts.shape
    if width <= NARROW:
        products = starts.new_empty(chunks - 1, rows, width, width)
        arguments = (*blocks.arguments, *rhs.arguments, products, starts, rows, cut.chunk)
        programs, constants, warps = cut.reduce
        launch(reduce_narrow, programs, arguments, constants, warps=warps, integers=(blocks.integers, rhs.integers))
        return products
    _walk_wide(blocks, rhs, starts, starts, cut.chunk, scales, "terms")
    return multiply_wide(blocks, scales, "none" if scales is None else "rows", chunks - 1, rows, cut.chunk)


def _walk_wide(
    blocks: Chain, rhs: Chain, starts: Tensor, ends: Tensor, chunk: int, scales: Chain | None, walk: str
) -> None:
    """Take all chunks but the last; only where they end is kept."""
    chunks, rows, width = starts.shape
    scratch = Chain(starts.new_empty(chunks * chunk + 1, rows, width), 1, False)
    given, constants = _scaling(blocks, scales, width, walk)
    arguments = (
        *blocks.arguments, *given, *rhs.arguments, starts, *scratch.arguments[:-1], rows, 0, chunks, chunk, ends,
    )  # fmt: skip
    integers = (blocks.integers, rhs.integers, scratch.integers, given[1:])
    launch(substitute_wide, (chunks - 1) * rows, arguments, constants, warps=8, integers=integers)


def multiply_wide(blocks: Chain, scales: Chain | None, scale: str, chunks: int, rows: int, chunk: int) -> Tensor:
    """The products of the blocks of each chunk, [chunks, B, w, w]; the blocks are scaled on the way."""
    tensor, width = blocks.tensor, blocks.tensor.shape[-1]
    products = tensor.new_empty(chunks, rows, width, width)
    given = scales.arguments[:-1] if scales is not None else (tensor, 0, 0, 0)
    half = next_power_of_2(width) // 2
    arguments = (*blocks.arguments, *given, products, rows, chunk)
    programs = chunks * rows * cdiv(width, _COLUMNS)
    constants, integers = (width, half, _COLUMNS, scale, "tf32x3", 1), (blocks.integers, given[1:])
    launch(reduce_wide, programs, arguments, constants, warps=half // 16, integers=integers)
    return products
