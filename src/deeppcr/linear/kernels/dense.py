"""Dense blocks: reduce chunks to one equation each, solve for their starts (recursively), substitute back.

Shapes: S = L - 1 steps in N chunks of C, B rows, w the width. In the order of the recurrence, step k takes the state
before it to ``A_k z + b_k``; the known state stands before step 0. ``reverse`` only changes where step k lies in memory,
and transposed blocks only swap two strides, so neither copies anything.

Up to ``NARROW`` a block fits the registers of one program. Wider ones are multiplied tile by tile, the columns of a
product shared among programs: they never meet.
"""

# Triton's kernels are called, indexed and looped over in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import aligned, cdiv, launch, next_power_of_2
from ..blocks import Blocks
from .repair import MARKS, lanes_for, repair
from .wide import SIZES, is_finite, is_missed, reduce_wide, substitute_wide

#: the widest block that one program holds in its registers
NARROW = 64
#: the widest block there is a kernel for
WIDEST = 256
#: so few steps are taken one after the other
_TOP = 32
#: columns of a product of wide blocks that one program takes
_COLUMNS = 32


@triton.jit
def multiply(block, product, PRECISION: tl.constexpr):
    """``block @ product``, square tiles; "sum" where they are too narrow for the matrix units."""
    if PRECISION == "sum":
        found = tl.sum(block[:, :, None] * product[None, :, :], 1)
    else:
        found = tl.dot(block, product, input_precision=PRECISION)
    return found


@triton.jit(do_not_specialize=SIZES)
def _reduce(
    blocks, block_first, block_step, block_row, block_i, block_j,
    rhs, rhs_first, rhs_step, rhs_row, rhs_i,
    products, starts, rows, chunk_steps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Chunk c of a row, as one equation: its product of blocks [N-1, B, w, w], and its term to starts[c + 1]."""
    chunk, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    i = tl.arange(0, PADDED)
    inside = i < WIDTH
    square = inside[:, None] & inside[None, :]
    block = blocks + block_first + row.to(tl.int64) * block_row + i[:, None] * block_i + i[None, :] * block_j
    vector = rhs + rhs_first + row.to(tl.int64) * rhs_row + i * rhs_i
    product = (i[:, None] == i[None, :]).to(tl.float32)
    term = tl.zeros((PADDED,), tl.float32)
    for step in tl.range(chunk * chunk_steps, chunk * chunk_steps + chunk_steps, num_stages=STAGES):
        a = tl.load(block + tl.cast(step, tl.int64) * block_step, mask=square, other=0.0)
        b = tl.load(vector + tl.cast(step, tl.int64) * rhs_step, mask=inside, other=0.0)
        term = tl.sum(a * term[None, :], 1) + b
        product = multiply(a, product, PRECISION)
    out = (chunk * rows + row).to(tl.int64)
    tl.store(products + out * WIDTH * WIDTH + i[:, None] * WIDTH + i[None, :], product, mask=square)
    tl.store(starts + (out + rows) * WIDTH + i, term, mask=inside)
    if chunk == 0:
        known = tl.load(vector - rhs_step, mask=inside, other=0.0)
        tl.store(starts + row * WIDTH + i, known, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _substitute(
    blocks, block_first, block_step, block_row, block_i, block_j,
    rhs, rhs_first, rhs_step, rhs_row, rhs_i,
    starts, states, state_first, state_step, state_row, marks, rows, steps, chunks, chunk_steps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr, MARKED: tl.constexpr,
):  # fmt: skip
    """From the start of every chunk its other states. Where the last start is not finite, a product overflowed although
    the solution may not: then the first program takes all steps of its row one after the other.

    MARKED: chunks that do not end where the next one starts are noted in ``marks`` [N, B].
    """
    chunk, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    i = tl.arange(0, PADDED)
    inside = i < WIDTH
    square = inside[:, None] & inside[None, :]
    block = blocks + block_first + row.to(tl.int64) * block_row + i[:, None] * block_i + i[None, :] * block_j
    vector = rhs + rhs_first + row.to(tl.int64) * rhs_row + i * rhs_i
    state = states + state_first + row.to(tl.int64) * state_row + i

    last_start = tl.load(starts + ((chunks - 1) * rows + row).to(tl.int64) * WIDTH + i, mask=inside, other=0.0)
    first = chunk * chunk_steps
    # The state after a chunk is the next one's start: whoever starts there writes it.
    last = tl.where(chunk == chunks - 1, steps, first + chunk_steps - 1)
    if not is_finite(last_start):
        last = tl.where(chunk == 0, steps, first - 1)
    z = tl.zeros((PADDED,), tl.float32)
    largest = z
    if last >= first:
        z = tl.load(starts + (chunk * rows + row).to(tl.int64) * WIDTH + i, mask=inside, other=0.0)
        tl.store(state + (first - 1).to(tl.int64) * state_step, z, mask=inside)
        largest = tl.abs(z)
        for step in tl.range(first, last, num_stages=STAGES):
            a = tl.load(block + tl.cast(step, tl.int64) * block_step, mask=square, other=0.0)
            b = tl.load(vector + tl.cast(step, tl.int64) * rhs_step, mask=inside, other=0.0)
            z = tl.sum(a * z[None, :], 1) + b
            if MARKED:
                largest = tl.maximum(largest, tl.abs(z))
            tl.store(state + tl.cast(step, tl.int64) * state_step, z, mask=inside)
    if MARKED:
        missed = 0
        if (chunk < chunks - 1) & (last == first + chunk_steps - 1):
            a = tl.load(block + last.to(tl.int64) * block_step, mask=square, other=0.0)
            b = tl.load(vector + last.to(tl.int64) * rhs_step, mask=inside, other=0.0)
            end = tl.sum(a * z[None, :], 1) + b
            following = tl.load(starts + ((chunk + 1) * rows + row).to(tl.int64) * WIDTH + i, mask=inside, other=0.0)
            missed = tl.max(is_missed(end, following, tl.maximum(largest, tl.abs(end)), WIDTH), 0)
        tl.store(marks + (chunk * rows + row).to(tl.int64), missed)


@triton.jit(do_not_specialize=SIZES)
def _miss(
    blocks, block_first, block_step, block_row, block_i, block_j,
    rhs, rhs_first, rhs_step, rhs_row, rhs_i,
    starts, misses, rows, chunk_steps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """By how much a chunk, walked from its start, misses the start of the next one: [N, B, w], the first entry zero."""
    chunk, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    i = tl.arange(0, PADDED)
    inside = i < WIDTH
    square = inside[:, None] & inside[None, :]
    block = blocks + block_first + row.to(tl.int64) * block_row + i[:, None] * block_i + i[None, :] * block_j
    vector = rhs + rhs_first + row.to(tl.int64) * rhs_row + i * rhs_i
    at = (chunk * rows + row).to(tl.int64) * WIDTH + i
    z = tl.load(starts + at, mask=inside, other=0.0)
    for step in tl.range(chunk * chunk_steps, chunk * chunk_steps + chunk_steps, num_stages=STAGES):
        a = tl.load(block + tl.cast(step, tl.int64) * block_step, mask=square, other=0.0)
        b = tl.load(vector + tl.cast(step, tl.int64) * rhs_step, mask=inside, other=0.0)
        z = tl.sum(a * z[None, :], 1) + b
    following = tl.load(starts + at + rows * WIDTH, mask=inside, other=0.0)
    tl.store(misses + at + rows * WIDTH, z - following, mask=inside)
    if chunk == 0:
        tl.store(misses + at, tl.zeros((PADDED,), tl.float32), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _add(values, more, count, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.load(values + at, mask=at < count) + tl.load(more + at, mask=at < count)
    tl.store(values + at, total, mask=at < count)


#: So few programs do not fill a device: an H200 has as many multiprocessors.
_FEW = 132


@dataclass(frozen=True)
class Shape:
    """How a width is laid out in a program; what is best was measured (docs/performance.md)."""

    width: int

    @property
    def padded(self) -> int:
        return next_power_of_2(self.width)

    @property
    def precision(self) -> str:
        """Of products. On the matrix units, three TF32 products make one of float32's grade; narrow blocks gain nothing
        there, and the narrowest do not fit them."""
        return "sum" if self.padded < 16 else "ieee" if self.padded <= 32 else "tf32x3"

    @property
    def with_products(self) -> tuple[int, int]:
        """Warps of a program that multiplies blocks, and blocks on their way to it."""
        return (1, 4) if self.padded <= 8 else (2, 4) if self.padded <= 32 else (4, 1)

    @property
    def without(self) -> tuple[int, int]:
        """The same where blocks only meet vectors."""
        return (1, 4) if self.padded <= 16 else (1, 6) if self.padded <= 32 else (4, 4)

    def reducing(self, programs: int) -> tuple[int, int]:
        """``with_products`` for so many programs: where they are few, no other one is there to hide what each waits for."""
        warps, stages = self.with_products
        return (4 if programs <= _FEW and self.padded == 32 else warps), stages

    def walking(self, programs: int) -> tuple[int, int]:
        """``without`` for so many programs."""
        warps, stages = self.without
        return ({16: 2, 32: 4}.get(self.padded, warps) if programs <= _FEW else warps), stages


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

    tensor: Tensor
    reverse: bool
    steps: int

    __slots__ = ("arguments", "integers", "reverse", "steps", "tensor")

    def __init__(self, tensor: Tensor, known: int, reverse: bool, core: int = 1):
        shape, strides = tensor.shape, tensor.stride()
        self.tensor, self.reverse, self.steps = tensor, reverse, shape[0] - known
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
        launch(_substitute, programs, arguments, (*constants, marked), warps=warps, integers=integers)
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
        launch(_miss, (chunks - 1) * rows, arguments, constants, warps=warps, integers=integers)
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
        launch(_reduce, programs, arguments, constants, warps=warps, integers=(blocks.integers, rhs.integers))
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
