"""Kernels of narrow dense blocks: one fits the registers of a program. See ``dense`` for the shapes, and for what they are parts of."""

# Triton's kernels are called, indexed and looped over in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ...launch import next_power_of_2
from .wide import SIZES, is_finite, is_missed

#: So few programs do not fill a device: an H200 has as many multiprocessors.
_FEW = 132


@triton.jit
def multiply(block, product, PRECISION: tl.constexpr):
    """``block @ product``, square tiles; "sum" where they are too narrow for the matrix units."""
    if PRECISION == "sum":
        found = tl.sum(block[:, :, None] * product[None, :, :], 1)
    else:
        found = tl.dot(block, product, input_precision=PRECISION)
    return found


@triton.jit
def _of_row(row, i, blocks, block_first, block_row, block_i, block_j, rhs, rhs_first, rhs_row, rhs_i):
    """Where a row's block and vector of step 0 lie."""
    block = blocks + block_first + row.to(tl.int64) * block_row + i[:, None] * block_i + i[None, :] * block_j
    vector = rhs + rhs_first + row.to(tl.int64) * rhs_row + i * rhs_i
    return block, vector


@triton.jit
def _of_step(block, vector, step, block_step, rhs_step, inside):
    """The block and the vector of a step."""
    at = tl.cast(step, tl.int64)
    a = tl.load(block + at * block_step, mask=inside[:, None] & inside[None, :], other=0.0)
    b = tl.load(vector + at * rhs_step, mask=inside, other=0.0)
    return a, b


@triton.jit(do_not_specialize=SIZES)
def reduce_narrow(
    blocks, block_first, block_step, block_row, block_i, block_j,
    rhs, rhs_first, rhs_step, rhs_row, rhs_i,
    products, starts, rows, chunk_steps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Chunk c of a row, as one equation: its product of blocks [N-1, B, w, w], and its term to starts[c + 1]."""
    chunk, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    i = tl.arange(0, PADDED)
    inside = i < WIDTH
    block, vector = _of_row(row, i, blocks, block_first, block_row, block_i, block_j, rhs, rhs_first, rhs_row, rhs_i)
    product = (i[:, None] == i[None, :]).to(tl.float32)
    term = tl.zeros((PADDED,), tl.float32)
    for step in tl.range(chunk * chunk_steps, chunk * chunk_steps + chunk_steps, num_stages=STAGES):
        a, b = _of_step(block, vector, step, block_step, rhs_step, inside)
        term = tl.sum(a * term[None, :], 1) + b
        product = multiply(a, product, PRECISION)
    out = (chunk * rows + row).to(tl.int64)
    tl.store(
        products + out * WIDTH * WIDTH + i[:, None] * WIDTH + i[None, :],
        product,
        mask=inside[:, None] & inside[None, :],
    )
    tl.store(starts + (out + rows) * WIDTH + i, term, mask=inside)
    if chunk == 0:
        known = tl.load(vector - rhs_step, mask=inside, other=0.0)
        tl.store(starts + row * WIDTH + i, known, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def substitute_narrow(
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
    block, vector = _of_row(row, i, blocks, block_first, block_row, block_i, block_j, rhs, rhs_first, rhs_row, rhs_i)
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
            a, b = _of_step(block, vector, step, block_step, rhs_step, inside)
            z = tl.sum(a * z[None, :], 1) + b
            if MARKED:
                largest = tl.maximum(largest, tl.abs(z))
            tl.store(state + tl.cast(step, tl.int64) * state_step, z, mask=inside)
    if MARKED:
        missed = 0
        if (chunk < chunks - 1) & (last == first + chunk_steps - 1):
            a, b = _of_step(block, vector, last, block_step, rhs_step, inside)
            end = tl.sum(a * z[None, :], 1) + b
            following = tl.load(starts + ((chunk + 1) * rows + row).to(tl.int64) * WIDTH + i, mask=inside, other=0.0)
            missed = tl.max(is_missed(end, following, tl.maximum(largest, tl.abs(end)), WIDTH), 0)
        tl.store(marks + (chunk * rows + row).to(tl.int64), missed)


@triton.jit(do_not_specialize=SIZES)
def miss_narrow(
    blocks, block_first, block_step, block_row, block_i, block_j,
    rhs, rhs_first, rhs_step, rhs_row, rhs_i,
    starts, misses, rows, chunk_steps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """By how much a chunk, walked from its start, misses the start of the next one: [N, B, w], the first entry zero."""
    chunk, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    i = tl.arange(0, PADDED)
    inside = i < WIDTH
    block, vector = _of_row(row, i, blocks, block_first, block_row, block_i, block_j, rhs, rhs_first, rhs_row, rhs_i)
    at = (chunk * rows + row).to(tl.int64) * WIDTH + i
    z = tl.load(starts + at, mask=inside, other=0.0)
    for step in tl.range(chunk * chunk_steps, chunk * chunk_steps + chunk_steps, num_stages=STAGES):
        a, b = _of_step(block, vector, step, block_step, rhs_step, inside)
        z = tl.sum(a * z[None, :], 1) + b
    following = tl.load(starts + at + rows * WIDTH, mask=inside, other=0.0)
    tl.store(misses + at + rows * WIDTH, z - following, mask=inside)
    if chunk == 0:
        tl.store(misses + at, tl.zeros((PADDED,), tl.float32), mask=inside)


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
