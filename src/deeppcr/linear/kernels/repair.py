"""Rows in which products of blocks have lost digits that steps keep, found again: in float64 and in parallel, else one step after the other.

The steps that are left of a row are cut into parts. A lane walks through one part with one column of the identity and no terms, or with zero
and the terms: so each part becomes one equation, as in ``dense``, but in float64, where what is lost of twice as many digits is nothing beside
float32's. These are joined one after the other, and the lanes walk again, from where their parts start. Whether that was enough is seen as
everywhere, by where parts end; where it was not, or where something leaves float32's range, there is still forward substitution.
"""

# Triton's kernels are called, indexed and looped over in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .wide import SIZES, is_missed, places_of

#: The widest blocks whose rows are repaired in parallel; marks that are looked at in one go.
WIDEST, MARKS = 8, 128
#: Numbers of blocks that a thread holds.
_HELD = 16
#: Up to so many rows a program has so many warps: where rows are few, they are all that keeps a device busy. More rows keep it busy by
#: themselves, and programs that have nothing to do, as a rule all of them, would take longer to come and go.
_WARPS = ((132, 8), (2048, 4))
_LARGEST = tl.constexpr(3.4028234663852886e38)


def lanes_for(rows: int, padded: int) -> tuple[int, int]:
    """Lanes of a program, of which each part of a row takes one more than a block is wide, and its warps. One lane: no parts."""
    for most, warps in _WARPS:
        if rows <= most and padded <= WIDEST:
            return min(64, 32 * _HELD // padded**2) * warps, warps
    return 1, 0


@triton.jit
def _advanced(
    state, block, block_step, block_i, block_j, vector, rhs_step, rhs_i, step, inside, takes_terms,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One step of every lane, state [PADDED, LANES]; those that are not ``inside`` stay."""
    i, j = tl.arange(0, PADDED)[:, None, None], tl.arange(0, PADDED)[None, :, None]
    entry, far = tl.arange(0, PADDED)[:, None], step.to(tl.int64)
    a = tl.load(
        block + (far * block_step)[None, None, :] + (i * block_i + j * block_j),
        mask=inside[None, None, :] & (i < WIDTH) & (j < WIDTH), other=0.0,
    )  # fmt: skip
    b = tl.load(
        vector + (far * rhs_step)[None, :] + entry * rhs_i,
        mask=(inside & takes_terms)[None, :] & (entry < WIDTH), other=0.0,
    )  # fmt: skip
    found = tl.sum(a.to(tl.float64) * state[None, :, :], 1) + b.to(tl.float64)
    return tl.where(inside[None, :], found, state)


@triton.jit
def _in_parts(
    block, block_step, block_i, block_j, vector, rhs_step, rhs_i, state, state_step, begin, steps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the states from step ``begin`` on; 0 where they are right."""
    parts: tl.constexpr = LANES // (WIDTH + 1)
    lane, entry = tl.arange(0, LANES), tl.arange(0, PADDED)[:, None]
    part, column = lane // (WIDTH + 1), lane % (WIDTH + 1)
    count = (steps - begin + parts - 1) // parts
    first = begin + part * count
    last = tl.where(part < parts, tl.minimum(first + count, steps), 0)
    is_term = column == WIDTH

    z = (entry == column[None, :]).to(tl.float64)
    z = tl.where(is_term[None, :], 0.0, z)
    for k in tl.range(0, count, num_stages=STAGES):
        z = _advanced(
            z, block, block_step, block_i, block_j, vector, rhs_step, rhs_i, first + k, first + k < last, is_term,
            WIDTH, PADDED,
        )  # fmt: skip

    i = tl.arange(0, PADDED)
    known = tl.load(state + (begin - 1).to(tl.int64) * state_step + i, mask=i < WIDTH, other=0.0).to(tl.float64)
    start = tl.zeros((PADDED, LANES), tl.float64)
    following = start
    for p in range(parts):
        here = (part == p)[None, :]
        start = tl.where(here, known[:, None], start)
        factor = tl.sum(tl.where(entry == column[None, :], known[:, None], 0.0), 0)
        factor = tl.where(is_term, 1.0, factor)
        known = tl.sum(tl.where(here, z * factor[None, :], 0.0), 1)
        following = tl.where(here, known[:, None], following)

    z, largest = start, tl.abs(start)
    at = state + tl.broadcast_to(entry, (PADDED, LANES))
    written = (entry < WIDTH) & (column == 0)[None, :]
    for k in tl.range(0, count, num_stages=STAGES):
        inside = first + k < last
        z = _advanced(
            z, block, block_step, block_i, block_j, vector, rhs_step, rhs_i, first + k, inside, inside, WIDTH, PADDED
        )
        largest = tl.maximum(largest, tl.abs(z))
        tl.store(
            at + ((first + k).to(tl.int64) * state_step)[None, :], z.to(tl.float32), mask=written & inside[None, :]
        )
    missed = is_missed(z, following, largest, WIDTH) | ((largest <= _LARGEST) == 0).to(tl.int32)
    return tl.max(tl.max(tl.where((part < parts)[None, :] & (entry < WIDTH), missed, 0), 1), 0)


@triton.jit(do_not_specialize=SIZES)
def repair(
    blocks, block_first, block_step, block_row, block_i, block_j,
    rhs, rhs_first, rhs_step, rhs_row, rhs_i,
    marks, states, state_first, state_step, state_row, rows, steps, chunks, chunk_steps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, MARKS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From the first marked chunk of a row on: no steps at all where none is marked. LANES: 1, or those that parts are walked by."""
    row = tl.program_id(0)
    i, inside, square = places_of(WIDTH, PADDED)
    block = blocks + block_first + row.to(tl.int64) * block_row
    vector = rhs + rhs_first + row.to(tl.int64) * rhs_row
    state = states + state_first + row.to(tl.int64) * state_row
    first = tl.min(tl.zeros((MARKS,), tl.int32), 0) + chunks
    for at in range(0, chunks, MARKS):
        part = at + tl.arange(0, MARKS)
        mark = tl.load(marks + part.to(tl.int64) * rows + row, mask=part < chunks, other=0)
        first = tl.minimum(first, tl.min(tl.where(mark != 0, part, chunks), 0))
    begin = first * chunk_steps
    walks = first < chunks
    if LANES > 1:  # noqa: SIM102 - which is known to the compiler
        if walks:
            walks = (
                _in_parts(
                    block, block_step, block_i, block_j, vector, rhs_step, rhs_i, state, state_step, begin, steps,
                    WIDTH, PADDED, LANES, STAGES,
                ) != 0
            )  # fmt: skip
    if walks:
        tl.debug_barrier()  # other threads have written there
        z = tl.load(state + (begin - 1).to(tl.int64) * state_step + i, mask=inside, other=0.0)
        for step in tl.range(begin, steps, num_stages=STAGES):
            far = tl.cast(step, tl.int64)
            a = tl.load(
                block + far * block_step + (i[:, None] * block_i + i[None, :] * block_j), mask=square, other=0.0
            )
            b = tl.load(vector + far * rhs_step + i * rhs_i, mask=inside, other=0.0)
            z = tl.sum(a * z[None, :], 1) + b
            tl.store(state + far * state_step + i, z, mask=inside)
