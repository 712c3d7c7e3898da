"""Triton kernels for the forward pass of networks of narrow layers: multiple shooting.

Shapes: T layers in ``blocks`` blocks of SKIP layers (an MLP: T blocks of one), N chunks of blocks, B rows, w the
width. ``x`` [T + 1, B, w] holds the input of every layer and the last output; a chunk's first entry is its start.

Newton's unknowns are the starts of the chunks. One pass rolls all chunks out from their starts to their ``ends``
[N, B, w]; by how much each misses the next one's start is, with the products of the Jacobians [N, B, w, w], the
right-hand side of a bidiagonal system for the corrections of the starts. It is solved in groups of
chunks: every group's product and term, then from these the correction before each group, then those inside.

All this lies in one ``workspace``: see ``parts``. What a pass found is two numbers a row, ``found`` [passes, 2, B]: its largest correction in units of the tolerance, and
its largest miss. From the last two corrections every program of the next pass sees whether its row is done, so nobody
has to ask the host. Behind ``limit`` passes come ``sizes`` [N + 1, 2, B]: the largest number of the initial state and of every end, by
even passes and by odd ones. By them every program sees what a large initial state would hide.
"""

# Triton's kernels are called, indexed and looped over in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

import math

import triton
import triton.language as tl

from ..convergence import ENOUGH, NEGLIGIBLE
from ..fuse.support import finite_or_zero
from ..linear.kernels.narrow import is_finite, multiply
from ..linear.kernels.wide import places_of
from ..tolerance import GOES_ON, LOOKS, STILL_TO_FALL, VISIBLE

#: Sizes that a kernel is not compiled for anew.
_SIZES = ["rows", "first_block", "blocks", "passes", "chunk_blocks", "chunks", "groups", "group_chunks", "initial_step",
          "guess_step", "guess_row", "limit"]  # fmt: skip
#: A start is far away when it is this many times larger than the state it should continue.
_FAR = tl.constexpr(10.0)
_NEGLIGIBLE, _ENOUGH = tl.constexpr(NEGLIGIBLE), tl.constexpr(ENOUGH)
_GOES_ON, _VISIBLE = tl.constexpr(GOES_ON), tl.constexpr(VISIBLE)
#: Of so many of the chunks sizes are looked at.
_LOOKS = tl.constexpr(LOOKS)
#: The logarithm of ``tolerance.STILL_TO_FALL``.
_STILL_TO_FALL = tl.constexpr(math.log(STILL_TO_FALL))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """An activation by its name in ``layers.ACTIVATIONS``, and its derivative; what is not a number stays so."""
    if ACTIVATION == "relu":
        value = tl.where(z <= 0, 0.0, z)
        slope = tl.where(z > 0, 1.0, 0.0)
    elif ACTIVATION == "sigmoid":
        value = 1 / (1 + tl.exp(-z))
        slope = value * (1 - value)
    else:
        tl.static_assert(ACTIVATION == "tanh")
        square = z * z
        series = -5.70498872745e-3 * square + 2.06390887954e-2
        series = series * square - 5.37397155531e-2
        series = series * square + 1.33314422036e-1
        series = series * square - 3.33332819422e-1
        large = 1 - 2 / (tl.exp(2 * tl.abs(z)) + 1)  # which loses the digits of small values
        value = tl.where(tl.abs(z) < 0.625, z + z * square * series, tl.where(z < 0, -large, large))
        slope = 1 - value * value
    return value, slope


@triton.jit
def parts(workspace, rows, chunks, groups, WIDTH: tl.constexpr):
    """products [N, B, w, w], those of the groups [G, B, w, w], ends [N, B, w], terms [G, B, w], starts [N, B, w]."""
    group_products = workspace + tl.cast(chunks * rows, tl.int64) * (WIDTH * WIDTH)
    ends = group_products + tl.cast(groups * rows, tl.int64) * (WIDTH * WIDTH)
    group_terms = ends + chunks * rows * WIDTH
    starts = group_terms + groups * rows * WIDTH
    return workspace, group_products, ends, group_terms, starts


@triton.jit
def settled(found, passes, row, rows):
    """Whether by the last of so many passes the error left of a row's states is small enough: see ``convergence.error_left``.

    The correction it found is the error of the states it rolled out, as far as the Jacobians are right. A pass that finds
    its row settled does nothing and leaves its number zero: the row stays settled. ``Report`` sees it in the same way.
    """
    done = False
    if passes >= 2:
        before = tl.load(found + (passes - 2) * 2 * rows + row)
        last = tl.load(found + (passes - 1) * 2 * rows + row)
        left = last * tl.maximum(last / (before - last), 1.0)
        done = (last <= _NEGLIGIBLE) | ((last < before) & (left <= _ENOUGH))
    return done


@triton.jit
def sizes_of(found, limit, passes, row, rows):
    """Where the sizes of a row lie that this pass sees: the next chunk's is two times ``rows`` further on."""
    return found + (limit * 2 + passes % 2) * rows + row


@triton.jit(do_not_specialize=_SIZES)
def roll(
    weights, biases, initial, guess, guess_step, guess_row, x, workspace, found, limit,
    rows, first_block, blocks, passes, chunk_blocks, chunks, groups,
    SKIP: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
    WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Roll a chunk out from its start. PRODUCT: with the product of its Jacobians.

    The first pass starts from ``initial`` [B, w] and, behind the first chunk, from what ``guess`` holds for the block before,
    whose entries lie ``guess_step`` apart for blocks and ``guess_row`` for rows: 0 where one state serves all.
    WHOLE: one chunk from ``first_block`` to the end, and nothing but ``x``.
    """
    chunk, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    i, inside, square = places_of(WIDTH, PADDED)
    products, _, ends, _, starts = parts(workspace, rows, chunks, groups, WIDTH)
    if (chunk == 0) & (not WHOLE):  # before anybody adds to it; a pass that does nothing leaves zeros too
        tl.store(found + passes * 2 * rows + row, 0.0)
        tl.store(found + passes * 2 * rows + rows + row, 0.0)
    if not settled(found, passes, row, rows):
        source = starts + (chunk * rows + row) * WIDTH
        if WHOLE:
            source = initial + row * WIDTH
        elif passes == 0:
            source = guess + tl.cast(chunk * chunk_blocks - 1, tl.int64) * guess_step + row * guess_row
            if chunk == 0:
                source = initial + row * WIDTH
        z = tl.load(source + i, mask=inside, other=0.0)
        if not WHOLE:
            tl.store(starts + (chunk * rows + row) * WIDTH + i, z, mask=inside)
            if chunk == 0:
                tl.store(sizes_of(found, limit, passes, row, rows), tl.max(tl.abs(z), 0))
        if PRODUCT:
            product = (i[:, None] == i[None, :]).to(tl.float32)
        first = first_block + chunk * chunk_blocks
        last = blocks if WHOLE else tl.minimum(first + chunk_blocks, blocks)
        state = x + tl.cast(row, tl.int64) * WIDTH + i
        tl.store(state + tl.cast(first, tl.int64) * SKIP * rows * WIDTH, z, mask=inside)
        for block in tl.range(first, last, num_stages=STAGES):
            before = z
            if PRODUCT:
                product_before = product
            for k in tl.static_range(SKIP):
                layer = tl.cast(block, tl.int64) * SKIP + k
                w = tl.load(
                    weights + layer * WIDTH * WIDTH + i[:, None] * WIDTH + i[None, :], mask=square, other=0.0
                )  # fmt: skip
                b = tl.load(biases + layer * WIDTH + i, mask=inside, other=0.0)
                value, slope = activate(z, ACTIVATION)
                if PRODUCT:
                    product = multiply(w * slope[None, :], product, PRECISION)
                z = tl.sum(w * value[None, :], 1) + b
                if RESIDUAL and k == SKIP - 1:
                    z += before
                    if PRODUCT:
                        product += product_before
                # The state after a chunk is the next one's start: that one writes it.
                tl.store(
                    state + (layer + 1) * rows * WIDTH, z,
                    mask=inside & ((k < SKIP - 1) | (block < last - 1) | (last == blocks)),
                )  # fmt: skip
        if not WHOLE:
            out = tl.cast(chunk * rows + row, tl.int64)
            tl.store(ends + out * WIDTH + i, z, mask=inside)
            tl.store(sizes_of(found, limit, passes, row, rows) + (chunk + 1) * 2 * rows, tl.max(tl.abs(z), 0))
            if PRODUCT:
                tile = i[:, None] * WIDTH + i[None, :]
                tl.store(products + out * WIDTH * WIDTH + tile, product, mask=square)


@triton.jit(do_not_specialize=_SIZES)
def gather(
    workspace, found, rows, passes, group_chunks, chunks, groups,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One equation for a group of chunks: from the correction before it to the one after it. The last group needs none."""
    group, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    i, inside, square = places_of(WIDTH, PADDED)
    products, group_products, ends, group_terms, starts = parts(workspace, rows, chunks, groups, WIDTH)
    if not settled(found, passes, row, rows):
        term = tl.zeros((PADDED,), tl.float32)
        if PRODUCT:
            product = (i[:, None] == i[None, :]).to(tl.float32)
        for chunk in tl.range(group * group_chunks, group * group_chunks + group_chunks, num_stages=STAGES):
            at = tl.cast(chunk, tl.int64) * rows + row
            p = tl.load(products + at * WIDTH * WIDTH + i[:, None] * WIDTH + i[None, :], mask=square, other=0.0)
            p = finite_or_zero(p)
            end = tl.load(ends + at * WIDTH + i, mask=inside, other=0.0)
            start = tl.load(starts + (at + rows) * WIDTH + i, mask=inside, other=0.0)
            term = tl.sum(p * term[None, :], 1) + finite_or_zero(end - start)
            if PRODUCT:
                product = multiply(p, product, PRECISION)
        out = tl.cast(group * rows + row, tl.int64)
        tl.store(group_terms + out * WIDTH + i, term, mask=inside)
        if PRODUCT:
            tl.store(group_products + out * WIDTH * WIDTH + i[:, None] * WIDTH + i[None, :], product, mask=square)


@triton.jit
def size_at_first(found, limit, passes, row, rows, chunks, faint):
    """``tolerance.size_at_first`` of a row: that says what is meant."""
    k = tl.arange(0, _LOOKS)
    there = ((k + 1) * (k + 1) * chunks + _LOOKS * _LOOKS - 1) // (_LOOKS * _LOOKS)
    sizes, sizes_before = sizes_of(found, limit, passes, row, rows), sizes_of(found, limit, passes + 1, row, rows)
    first, size = tl.load(sizes), tl.load(sizes + there * 2 * rows)
    # From each of them on, to the end.
    least = tl.min(tl.load(sizes + tl.maximum(there[:, None], there[None, :]) * 2 * rows), 1)
    lives = (least >= _GOES_ON * size) & (tl.log(size / first) * (chunks - there) <= there * _STILL_TO_FALL)
    before = tl.load(sizes_before + there * 2 * rows, mask=k * 0 + passes > 0, other=0.0)
    hidden = (size > _VISIBLE) & (size <= faint * first) & (lives | (size < _GOES_ON * before))
    return tl.min(tl.where(hidden, size, first), 0)


@triton.jit
def correct(start, delta, end, exact, least, rtol):
    """The corrected start of a chunk, the correction in units of the tolerance (as by ``Bounds.ratio``, but that the size of a
    layer is that of its largest unit: they all mix), and by how much ``end`` missed it.

    Args:
        end: where the chunk before came out
        exact: whether that one started right; so does this one then, whatever else happens
        least: what is allowed however small the states are
    """
    miss = end - start
    corrected = end + (delta - miss)
    size = tl.max(tl.abs(corrected), 0)
    # Overflow, or a step far beyond where the linearisation holds: go on from the end of the chunk before.
    sane = is_finite(corrected) & (size <= tl.max(tl.abs(end), 0) * _FAR + least)
    corrected = tl.where(sane, corrected, tl.where(is_finite(end), end, start))
    corrected = tl.where(exact, end, corrected)
    change = tl.maximum(tl.max(tl.abs(delta), 0), tl.max(tl.abs(miss), 0))
    ratio = tl.where(change == 0, 0.0, change / tl.maximum(least, rtol * size))
    known = is_finite(delta) & is_finite(miss)
    off = tl.where(known, tl.max(tl.abs(miss), 0), float("inf"))
    return corrected, tl.where(known & (ratio == ratio), ratio, float("inf")), off


@triton.jit(do_not_specialize=_SIZES)
def spread(
    workspace, found, rows, passes, group_chunks, chunks, groups, limit, atol, rtol, first, faint,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Correct the starts of a group of chunks, and note the largest correction as the number of this pass.

    Units do not matter: ``rtol`` is relative to the size of a state, or to ``first`` (0 or 1) times that of the initial one; ``faint`` is
    ``Tolerance.faint``.
    """
    group, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    i, inside, square = places_of(WIDTH, PADDED)
    tile = i[:, None] * WIDTH + i[None, :]
    products, group_products, ends, group_terms, starts = parts(workspace, rows, chunks, groups, WIDTH)
    if not settled(found, passes, row, rows):
        least = atol + rtol * first * size_at_first(found, limit, passes, row, rows, chunks, faint)
        delta = tl.zeros((PADDED,), tl.float32)
        largest, missed = 0.0, 0.0
        for earlier in tl.range(0, group, num_stages=STAGES):
            at = tl.cast(earlier, tl.int64) * rows + row
            p = tl.load(group_products + at * WIDTH * WIDTH + tile, mask=square, other=0.0)
            term = tl.load(group_terms + at * WIDTH + i, mask=inside, other=0.0)
            delta = tl.sum(p * delta[None, :], 1) + term
            largest = tl.where(is_finite(delta), largest, float("inf"))
            delta = finite_or_zero(delta)
        last = tl.minimum(group * group_chunks + group_chunks, chunks)
        for chunk in tl.range(group * group_chunks, last, num_stages=STAGES):
            at = tl.cast(chunk, tl.int64) * rows + row
            start = tl.load(starts + at * WIDTH + i, mask=inside, other=0.0)
            # Nobody comes before the first chunk, and it starts where it should.
            before = tl.load(ends + (at - rows) * WIDTH + i, mask=inside & (i + chunk > i), other=0.0)
            before = tl.where(i + chunk > i, before, start)
            corrected, ratio, off = correct(start, delta, before, i + chunk <= i + passes + 1, least, rtol)
            tl.store(starts + at * WIDTH + i, corrected, mask=inside)
            largest, missed = tl.maximum(largest, ratio), tl.maximum(missed, off)
            p = tl.load(products + at * WIDTH * WIDTH + tile, mask=square, other=0.0)
            end = tl.load(ends + at * WIDTH + i, mask=inside, other=0.0)
            # Behind the last chunk there is no start: what is read there is an end, and nobody asks for what comes of it.
            after = tl.load(starts + (at + rows) * WIDTH + i, mask=inside & (i + chunk < i + chunks - 1), other=0.0)
            # By how much the correction of its start moves the end of the chunk: of the last one, nobody else asks.
            pushed = tl.sum(finite_or_zero(p) * delta[None, :], 1)
            moved = tl.max(tl.abs(pushed), 0)
            moved = tl.where(moved == 0, 0.0, moved / tl.maximum(least, rtol * tl.max(tl.abs(end), 0)))
            lost = tl.sum(tl.sum((tl.abs(p) < float("inf")).to(tl.int32), 1), 0) < PADDED * PADDED
            known = is_finite(end) & (moved < float("inf")) & (lost == 0)
            largest = tl.where(known, tl.maximum(largest, moved), float("inf"))
            delta = finite_or_zero(pushed + (end - after))
        tl.atomic_max(found + passes * 2 * rows + row, largest)
        tl.atomic_max(found + passes * 2 * rows + rows + row, missed)


@triton.jit(do_not_specialize=_SIZES)
def roll_wide(
    weights, biases, initial, initial_step, x, starts, ends, found, limit,
    rows, first_block, blocks, passes, chunk_blocks,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``roll`` for layers that no program holds at once, tile by tile and without products."""
    chunk, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    i, j = tl.arange(0, TILE), tl.arange(0, PADDED)
    inside = j < WIDTH
    if (chunk == 0) & (not WHOLE):
        tl.store(found + passes * 2 * rows + row, 0.0)
        tl.store(found + passes * 2 * rows + rows + row, 0.0)
    if not settled(found, passes, row, rows):
        source, source_step = starts, rows * WIDTH
        if WHOLE or passes == 0:
            source, source_step = initial, initial_step
        start = tl.load(source + chunk * source_step + row * WIDTH + j, mask=inside, other=0.0)
        sizes = sizes_of(found, limit, passes, row, rows)
        if not WHOLE:
            tl.store(starts + (chunk * rows + row) * WIDTH + j, start, mask=inside)
            if chunk == 0:
                tl.store(sizes, tl.max(tl.abs(start), 0))
        largest = 0.0
        first = first_block + chunk * chunk_blocks
        last = blocks if WHOLE else tl.minimum(first + chunk_blocks, blocks)
        state = x + tl.cast(row, tl.int64) * WIDTH
        tl.store(state + tl.cast(first, tl.int64) * rows * WIDTH + j, start, mask=inside)
        tl.debug_barrier()
        for layer in range(first, last):
            at = tl.cast(layer, tl.int64)
            value = activate(tl.load(state + at * rows * WIDTH + j, mask=inside, other=0.0), ACTIVATION)[0]
            for top in range(0, WIDTH, TILE):
                here = top + i < WIDTH
                w = tl.load(
                    weights + at * WIDTH * WIDTH + (top + i)[:, None] * WIDTH + j[None, :],
                    mask=here[:, None] & inside[None, :], other=0.0,
                )  # fmt: skip
                b = tl.load(biases + at * WIDTH + top + i, mask=here, other=0.0)
                z = tl.sum(w * value[None, :], 1) + b
                if (layer == last - 1) & (not WHOLE):
                    tl.store(ends + (chunk * rows + row) * WIDTH + top + i, z, mask=here)
                    largest = tl.maximum(largest, tl.max(tl.abs(z), 0))
                if (layer == last - 1) & (last < blocks):
                    pass  # the next chunk's start, which that one writes
                else:
                    tl.store(state + (at + 1) * rows * WIDTH + top + i, z, mask=here)
            tl.debug_barrier()
        if not WHOLE:
            tl.store(sizes + (chunk + 1) * 2 * rows, largest)


@triton.jit(do_not_specialize=_SIZES)
def correct_wide(
    deltas, ends, starts, found, limit, rows, passes, atol, rtol, first, faint,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Correct the start of one chunk by its entry of ``deltas`` [N, B, w]."""
    chunk, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    i = tl.arange(0, PADDED)
    inside = i < WIDTH
    if not settled(found, passes, row, rows):
        chunks = tl.num_programs(0) // rows
        least = atol + rtol * first * size_at_first(found, limit, passes, row, rows, chunks, faint)
        at = (chunk * rows + row) * WIDTH + i
        start = tl.load(starts + at, mask=inside, other=0.0)
        delta = tl.load(deltas + at, mask=inside, other=0.0)
        before = tl.load(ends + at - rows * WIDTH, mask=inside & (i + chunk > i), other=0.0)
        before = tl.where(i + chunk > i, before, start)
        corrected, ratio, off = correct(start, delta, before, i + chunk <= i + passes + 1, least, rtol)
        end = tl.load(ends + at, mask=inside, other=0.0)
        ratio = tl.where(is_finite(end), ratio, float("inf"))
        tl.store(starts + at, corrected, mask=inside)
        tl.atomic_max(found + passes * 2 * rows + row, ratio)
        tl.atomic_max(found + passes * 2 * rows + rows + row, off)
