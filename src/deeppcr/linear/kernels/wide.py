"""Kernels for dense blocks too wide for the registers of one program: they are walked over tile by tile.

The columns of a product of blocks never meet, so they are shared among programs. For shapes and the order of steps see
``dense``.
"""

# Triton's kernels are called, indexed and looped over in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

#: Sizes that a kernel is not compiled for anew: a program waits for memory, not for arithmetic on them.
SIZES = ["rows", "steps", "chunks", "chunk_steps"]


#: A chunk whose end misses the start of the next one by more than so many roundings of its largest state, for each component and for 8 at
#: least: products have lost digits that steps keep. Random blocks that contract, turn or grow stay below 3 in chunks of up to 32; filters
#: whose error becomes ten times that of steps over some hundred steps are above.
_LOST, _TINY = tl.constexpr(5 * 2.0**-23), tl.constexpr(2.0**-126)


@triton.jit
def places_of(WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The entries of a vector in a program; which of them there are; and which entries of a block."""
    i = tl.arange(0, PADDED)
    inside = i < WIDTH
    return i, inside, inside[:, None] & inside[None, :]


@triton.jit
def is_missed(end, following, largest, WIDTH: tl.constexpr):
    """Of every component whether ``following``, where the next chunk starts, is not where this one ends; NaN is missed."""
    allowed: tl.constexpr = _LOST * (WIDTH if WIDTH > 8 else 8)
    return ((tl.abs(end - following) <= allowed * tl.maximum(largest, _TINY)) == 0).to(tl.int32)


@triton.jit
def is_finite(values):
    return tl.sum((tl.abs(values) < float("inf")).to(tl.int32), 0) == values.shape[0]


@triton.jit
def _tile(block, top, left, block_i, block_j, WIDTH: tl.constexpr, HALF: tl.constexpr):
    i, j = top + tl.arange(0, HALF), left + tl.arange(0, HALF)
    inside = (i[:, None] < WIDTH) & (j[None, :] < WIDTH)
    return tl.load(block + i[:, None] * block_i + j[None, :] * block_j, mask=inside, other=0.0)


@triton.jit
def _half(vector, top, WIDTH: tl.constexpr, HALF: tl.constexpr):
    i = top + tl.arange(0, HALF)
    return tl.load(vector + i, mask=i < WIDTH, other=0.0)[:, None]


@triton.jit(do_not_specialize=SIZES)
def reduce_wide(
    blocks, block_first, block_step, block_row, block_i, block_j,
    scales, scale_first, scale_step, scale_row,
    products, rows, chunk_steps,
    WIDTH: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Some columns of a chunk's product of blocks, [N-1, B, w, w], in two halves.

    SCALE: "none", or blocks are ``A diag(s)`` ("columns") or ``diag(s) A`` ("rows") with s from ``scales``.
    """
    column_blocks: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    chunk = tl.program_id(0) // (rows * column_blocks)
    row = tl.program_id(0) // column_blocks % rows
    j = tl.program_id(0) % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, HALF)
    block = blocks + block_first + row.to(tl.int64) * block_row
    scale = scales + scale_first + row.to(tl.int64) * scale_row
    upper = (i[:, None] == j[None, :]).to(tl.float32)
    lower = (HALF + i[:, None] == j[None, :]).to(tl.float32)
    for step in tl.range(chunk * chunk_steps, chunk * chunk_steps + chunk_steps, num_stages=STAGES):
        at = block + tl.cast(step, tl.int64) * block_step
        scaled = scale + tl.cast(step, tl.int64) * scale_step
        if SCALE == "columns":
            upper = upper * _half(scaled, 0, WIDTH, HALF)
            lower = lower * _half(scaled, HALF, WIDTH, HALF)
        above = tl.dot(_tile(at, 0, 0, block_i, block_j, WIDTH, HALF), upper, input_precision=PRECISION)
        above = tl.dot(_tile(at, 0, HALF, block_i, block_j, WIDTH, HALF), lower, above, input_precision=PRECISION)
        below = tl.dot(_tile(at, HALF, 0, block_i, block_j, WIDTH, HALF), upper, input_precision=PRECISION)
        below = tl.dot(_tile(at, HALF, HALF, block_i, block_j, WIDTH, HALF), lower, below, input_precision=PRECISION)
        if SCALE == "rows":
            above = above * _half(scaled, 0, WIDTH, HALF)
            below = below * _half(scaled, HALF, WIDTH, HALF)
        upper, lower = above, below
    product = products + (chunk * rows + row).to(tl.int64) * WIDTH * WIDTH + j[None, :]
    tl.store(product + i[:, None] * WIDTH, upper, mask=(i[:, None] < WIDTH) & (j[None, :] < WIDTH))
    tl.store(product + (HALF + i)[:, None] * WIDTH, lower, mask=((HALF + i)[:, None] < WIDTH) & (j[None, :] < WIDTH))


@triton.jit(do_not_specialize=SIZES)
def substitute_wide(
    blocks, block_first, block_step, block_row, block_i, block_j,
    scales, scale_first, scale_step, scale_row,
    rhs, rhs_first, rhs_step, rhs_row, rhs_i,
    starts, states, state_first, state_step, state_row, rows, steps, chunks, chunk_steps, ends,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    SCALE: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """``narrow.substitute_narrow`` tile by tile.

    WALK: "states" as there. "terms": start every chunk from zero, and write its end to entry c + 1 of ``ends``, which are
    the starts. "misses": start where the starts are, and write there by how much the next one is missed.
    """
    chunk, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    i, all_j = tl.arange(0, TILE), tl.arange(0, PADDED)
    inside = all_j < WIDTH
    block = blocks + block_first + row.to(tl.int64) * block_row
    scale = scales + scale_first + row.to(tl.int64) * scale_row
    vector = rhs + rhs_first + row.to(tl.int64) * rhs_row
    state = states + state_first + row.to(tl.int64) * state_row
    start = starts + (chunk * rows + row).to(tl.int64) * WIDTH

    first = chunk * chunk_steps
    if WALK == "terms":
        last = first + chunk_steps
        tl.store(state + (first - 1).to(tl.int64) * state_step + all_j, tl.zeros((PADDED,), tl.float32), mask=inside)
        if chunk == 0:
            known = tl.load(vector - rhs_step + all_j * rhs_i, mask=inside, other=0.0)
            tl.store(start + all_j, known, mask=inside)
    elif WALK == "misses":
        last = first + chunk_steps
        z = tl.load(start + all_j, mask=inside, other=0.0)
        tl.store(state + (first - 1).to(tl.int64) * state_step + all_j, z, mask=inside)
        if chunk == 0:
            tl.store(ends + row.to(tl.int64) * WIDTH + all_j, tl.zeros((PADDED,), tl.float32), mask=inside)
    else:
        last = tl.where(chunk == chunks - 1, steps, first + chunk_steps - 1)
        final = tl.load(starts + ((chunks - 1) * rows + row).to(tl.int64) * WIDTH + all_j, mask=inside, other=0.0)
        if not is_finite(final):
            last = tl.where(chunk == 0, steps, first - 1)
        if last >= first:
            z = tl.load(start + all_j, mask=inside, other=0.0)
            tl.store(state + (first - 1).to(tl.int64) * state_step + all_j, z, mask=inside)
    tl.debug_barrier()
    for step in range(first, last):
        at = tl.cast(step, tl.int64)
        z = tl.load(state + (at - 1) * state_step + all_j, mask=inside, other=0.0)
        for top in range(0, WIDTH, TILE):
            rows_inside = top + i < WIDTH
            a = tl.load(
                block + at * block_step + (top + i)[:, None] * block_i + all_j[None, :] * block_j,
                mask=rows_inside[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            b = tl.load(vector + at * rhs_step + (top + i) * rhs_i, mask=rows_inside, other=0.0)
            found = tl.sum(a * z[None, :], 1)
            if SCALE == "rows":
                found = found * tl.load(scale + at * scale_step + top + i, mask=rows_inside, other=0.0)
            found += b
            if WALK != "states" and step == last - 1:
                if WALK == "misses":
                    found -= tl.load(start + rows * WIDTH + top + i, mask=rows_inside, other=0.0)
                end = ends + ((chunk + 1) * rows + row).to(tl.int64) * WIDTH
                tl.store(end + top + i, found, mask=rows_inside)
            else:
                tl.store(state + at * state_step + top + i, found, mask=rows_inside)
        tl.debug_barrier()
