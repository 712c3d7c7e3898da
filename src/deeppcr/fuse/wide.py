"""Triton kernels that join chunks of wide states, whatever the step: what ``joints`` does for lanes.

Shapes: N chunks in G groups, B rows, D the width. ``products`` [N, B, D, D] of the chunks and ``maps`` [G, B, D, D] of the groups have a
tangent a row: what a correction ``d`` [D] before a chunk makes of the one behind it is ``d @ product``. A program has one group of one
row; of products, LEAD rows.
"""

# Triton's kernels are called, indexed and looped over in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from ..linear.kernels.wide import places_of
from .support import FAR, SMOOTH, finite_or_zero, in_units, lives_on, note, settled

#: Sizes that a kernel is not compiled for anew.
_SIZES = ["rows", "chunks", "group_chunks", "passes", "limit", "atol", "rtol", "roughest", "local", "linear"]
_EPS = tl.constexpr(2.0**-23)


@triton.jit(do_not_specialize=_SIZES)
def gather(
    starts, ends, products, sizes, maps, terms, largest, found, rows, chunks, group_chunks, passes,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr, LEAD: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every group as one map, with its term and the size of its states."""
    block, pair = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    group, row = (pair // rows).to(tl.int64), (pair % rows).to(tl.int64)
    i, inside, square = places_of(WIDTH, PADDED)
    if not settled(found, passes, row, rows, row >= 0):
        which = block * LEAD + tl.arange(0, LEAD)
        product = tl.where(which[:, None] == i[None, :], 1.0, 0.0)
        term = tl.zeros((PADDED,), tl.float32)
        size = tl.zeros((PADDED,), tl.float32)
        # Behind the last chunk nobody asks for a correction.
        last = tl.minimum(group_chunks, chunks - 1 - group * group_chunks).to(tl.int32)
        for q in tl.range(0, last, num_stages=STAGES):
            at = (group * group_chunks + q) * rows + row
            p = tl.load(products + at * (WIDTH * WIDTH) + i[:, None] * WIDTH + i[None, :], mask=square, other=0.0)
            end = tl.load(ends + at * WIDTH + i, mask=inside, other=0.0)
            after = tl.load(starts + (at + rows) * WIDTH + i, mask=inside, other=0.0)
            own = tl.load(sizes + at * WIDTH + i, mask=inside, other=0.0)
            size = tl.maximum(size, tl.where(own < float("inf"), own, 0.0))
            term = tl.sum(term[:, None] * p, 0) + (end - after)
            product = tl.dot(product, p, input_precision=PRECISION)
        out = group * rows + row
        tl.store(
            maps + (out * WIDTH + which[:, None]) * WIDTH + i[None, :],
            product,
            mask=(which < WIDTH)[:, None] & inside[None, :],
        )
        if block == 0:
            tl.store(terms + out * WIDTH + i, term, mask=inside)
            tl.store(largest + out * WIDTH + i, size, mask=inside)


@triton.jit
def beyond(values):
    """Infinity where they are not numbers."""
    return tl.where(tl.abs(values) < float("inf"), 0.0, float("inf"))


@triton.jit(do_not_specialize=_SIZES)
def spread(
    starts, ends, products, sizes, maps, terms, largest, found, worst, rows, chunks, group_chunks, passes, atol, rtol, roughest, local, linear,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Correct the starts of a group; and of its row note the largest correction, miss, and miss in units of rounding, and whether a signal
    ``lives_on``: ``worst`` [4, B].

    What is noted is kept number by number: to look for the largest of a row takes as long as all else.
    """
    group, row = (tl.program_id(0) // rows).to(tl.int64), (tl.program_id(0) % rows).to(tl.int64)
    i, inside, square = places_of(WIDTH, PADDED)
    tile = i[:, None] * WIDTH + i[None, :]
    if not settled(found, passes, row, rows, row >= 0):
        d = tl.zeros((PADDED,), tl.float32)
        off, missed, rough, hidden = d, d, d, d
        size = tl.abs(tl.load(starts + row * WIDTH + i, mask=inside, other=0.0))
        for earlier in tl.range(0, group.to(tl.int32), num_stages=STAGES):
            at = earlier * rows + row
            p = tl.load(maps + at * (WIDTH * WIDTH) + tile, mask=square, other=0.0)
            term = tl.load(terms + at * WIDTH + i, mask=inside, other=0.0)
            size = tl.maximum(size, tl.load(largest + at * WIDTH + i, mask=inside, other=0.0))
            d = tl.sum(d[:, None] * p, 0) + term
            off = tl.maximum(off, beyond(d))
            d = finite_or_zero(d)
        count = tl.minimum(group_chunks, chunks - group * group_chunks).to(tl.int32)
        first = group * group_chunks
        before = tl.load(
            ends + ((first - 1) * rows + row) * WIDTH + i,
            mask=inside & (i * 0 + first > 0) & (i * 0 + first < chunks),
            other=0.0,
        )
        last = tl.load(
            sizes + ((first - 1) * rows + row) * WIDTH + i, mask=inside & (i * 0 + first > 0) & (i * 0 + first < chunks), other=0.0
        )  # fmt: skip
        for q in tl.range(0, count, num_stages=STAGES):
            n = first + q
            at = (n * rows + row) * WIDTH + i
            joined = inside & (i * 0 + n > 0)
            p = tl.load(products + (n * rows + row) * (WIDTH * WIDTH) + tile, mask=square, other=0.0)
            start = tl.load(starts + at, mask=inside, other=0.0)
            end = tl.load(ends + at, mask=inside, other=0.0)
            # Behind the group it may be written by now, and nobody here asks for it.
            after = tl.load(
                starts + at + rows * WIDTH, mask=inside & (i * 0 + n < chunks - 1) & (i * 0 + q < count - 1), other=0.0
            )
            own = tl.load(sizes + at, mask=inside, other=0.0)
            # The start is judged by what came before it: what a wrong one leads to may be as large as it likes.
            scale = tl.where(i * 0 + local > 0, last, size)
            unit = atol + rtol * scale  # how far it may be off
            size = tl.maximum(size, tl.where(own < float("inf"), own, 0.0))
            hidden = tl.maximum(
                hidden, tl.where(joined & (i * 0 + local + linear == 0), lives_on(own, last, size, rtol), 0.0)
            )
            miss = before - start
            y = before + (d - miss)
            # Overflow, or far beyond where the linearisation holds: on from the end of the chunk before.
            far = (tl.max((inside & ~(tl.abs(y) <= size * FAR + atol)).to(tl.int32), 0) > 0) & (linear == 0)
            change = tl.maximum(
                in_units(tl.maximum(tl.abs(d), tl.abs(miss)), unit), beyond(d) + beyond(miss) + beyond(end)
            )
            # A state that is not finite settles nothing, wherever it is.
            off = tl.maximum(off, tl.where(inside, tl.where(joined, change, 0.0) + beyond(own), 0.0))
            # An end that does not depend on its start has to be where the next chunk starts: else derivatives are not what the step does.
            inner = inside & (i * 0 + n < chunks - 1) & (i * 0 + q < count - 1) & (i * 0 + linear == 0)
            blind = inner & (tl.max(tl.abs(p), 0) == 0) & (tl.abs(end - after) > size * (SMOOTH * _EPS))
            off = tl.where(blind, float("inf"), off)
            missed = tl.maximum(missed, tl.where(joined, tl.abs(miss), 0.0))
            rough = tl.maximum(rough, tl.where(joined, in_units(tl.abs(miss), scale * _EPS), 0.0))
            unit = atol + rtol * tl.where(i * 0 + local > 0, own, size)
            y = tl.where(far, tl.where(tl.abs(before) < float("inf"), before, start), y)
            y = tl.where(i * 0 + n <= passes + 1, before, y)
            tl.store(starts + at, y, mask=joined)
            d = tl.where(joined, y - start, 0.0)  # which is what the chunks that follow hear of
            pushed = tl.sum(d[:, None] * p, 0)
            # How far the correction of its start moves the end of the chunk: of the last one, nobody else asks.
            moved = in_units(tl.abs(pushed), unit)
            off = tl.maximum(
                off, tl.where(inside, tl.where(i * 0 + n > 0, tl.maximum(moved, beyond(pushed)), moved), 0.0)
            )
            d = finite_or_zero(pushed + (end - after))
            before = end
            last = own
        tl.atomic_max(worst + row, tl.max(off, 0))
        tl.atomic_max(worst + rows + row, tl.max(missed, 0))
        tl.atomic_max(worst + 2 * rows + row, tl.max(rough, 0))
        tl.atomic_max(worst + 3 * rows + row, tl.max(hidden, 0))


@triton.jit(do_not_specialize=_SIZES)
def note_rows(worst, found, unsettled, taken, residual, rows, passes, limit, roughest, linear, LANES: tl.constexpr):
    """What was found of every row."""
    r = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = r < rows
    alive = inside & ~settled(found, passes, r, rows, inside)
    largest = tl.load(worst + r, mask=alive, other=0.0)
    missed = tl.load(worst + rows + r, mask=alive, other=0.0)
    rough = tl.load(worst + 2 * rows + r, mask=alive, other=0.0)
    hidden = tl.load(worst + 3 * rows + r, mask=alive, other=0.0)
    note(
        largest, missed, rough, rough, hidden, found, unsettled, taken, residual,
        r, rows, inside, passes, limit, roughest, linear,
    )  # fmt: skip
