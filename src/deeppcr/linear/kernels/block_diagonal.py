"""Block-diagonal couplings, P x P with P up to 8: every small block is a channel ``z_t = C_t z_{t-1} + b_t`` of its own.

Time is cut into chunks. A lane walks through one chunk of one channel with a vector of P numbers in registers: first
with each column of the identity and no terms, and once with zero and the terms, which gives the product and the sum
that a chunk amounts to; these are a system of the same kind with one step a chunk, solved in the same way; last from
the state each chunk starts from, which gives all states. Several lanes read the same block at the same time, so it
leaves memory once for all of them.

Products appear only between chunks. Where one overflows although the states do not, the chunk that starts from it
comes out infinite or NaN to its end, since neither ever turns finite again by products and sums. Where products are
large and the states are not (a filter's blocks are far from normal), digits are lost, maybe all: a chunk then does not end
where the next one starts. Such chunks are marked, and a last kernel redoes marked channels by forward substitution, from
their first marked chunk on; it has nothing to do where there is none.

Time t is step t, or with ``reverse`` step L - 1 - t: to the kernels that is a negative stride.
"""

# Triton's kernels are called, indexed and looped over in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import cdiv, kinds, launch, next_power_of_2
from ..blocks import Blocks
from .recurrence import Channels, as_channels, first_marked, in_time, multiprocessors, places
from .wide import is_missed

LARGEST = 8
#: steps a chunk has at least: each level of the recursion has this many fewer chunks
SHORTEST_CHUNK = 32
#: lanes to a multiprocessor that keep it busy: chunks are made until there are that many
BUSY_LANES = 1024
#: lanes of a program, its warps and the steps it reads ahead
LANES, WARPS, STAGES = 64, 2, 3
#: of the repair: a program's channels, and the steps it reads ahead
REPAIR_LANES, REPAIR_STAGES = 32, 4


@dataclass(frozen=True)
class Tiling:
    """How a system is cut up: chunks of ``chunk`` steps, ``lanes`` of them (or of their columns) to a program."""

    chunk: int
    lanes: int = LANES
    warps: int = WARPS
    stages: int = STAGES


@lru_cache(maxsize=1024)
def tiling_for(length: int, channels: int, processors: int = 132) -> Tiling:
    """Chunks as long as the channels alone can keep all multiprocessors busy, but not short ones.

    Args:
        length: L
        channels: how many small blocks a step has, all batches together
        processors: multiprocessors of the device
    """
    chunks = cdiv(BUSY_LANES * processors, channels)
    return Tiling(min(length, max(SHORTEST_CHUNK, cdiv(length, chunks))))


def solve_coupled(couplings: Blocks, rhs: Tensor, *, reverse: bool = False) -> Tensor:
    """See ``LinearSolver.solve_coupled``: same arguments, same result, for ``BlockDiagonal`` up to 8 x 8."""
    channels = max(1, rhs.shape[1:].numel() // couplings.data.shape[-1])
    return run(couplings, rhs, reverse, tiling_for(rhs.shape[0], channels, multiprocessors(rhs.device)))


def run(couplings: Blocks, rhs: Tensor, reverse: bool, tiling: Tiling) -> Tensor:
    """``solve_coupled`` by a given tiling (for the outermost chunks)."""
    count, size = couplings.data.shape[-3], couplings.data.shape[-1]
    if size > LARGEST:
        raise ValueError(f"blocks: this kernel takes blocks up to {LARGEST} x {LARGEST}, got {size} x {size}")
    data = couplings.data.expand(-1, *rhs.shape[1:-1], count, size, size)
    terms = rhs.unflatten(-1, (count, size))
    inner, (c, b) = as_channels([data, terms], terms.ndim - 2)
    states = rhs.new_empty(rhs.shape[0], rhs.shape[1:].numel() // size, size)
    _solve(c, b, states, inner, reverse, tiling, outermost=True)
    return states.view(rhs.shape)


def _solve(
    c: Channels,
    b: Channels,
    states: Tensor,
    inner: int,
    reverse: bool,
    tiling: Tiling,
    *,
    outermost: bool = False,
) -> None:
    """Fill ``states`` [L, channels, P] from c [L - 1, *channels, P, P] (its first dimension may be longer) and b [L, *channels, P]."""
    length, channels, size = states.shape
    of_c, of_b, of_z = in_time((c.tensor.stride(0), b.tensor.stride(0), channels * size), length, reverse)
    system = (*(c.tensor, *of_c, c.outer_stride), *(b.tensor, *of_b, b.outer_stride))
    # Constants, so that the compiler sees how far a block is contiguous and aligned.
    layout = (
        *(c.inner_stride, c.tensor.stride(-2), c.tensor.stride(-1)),
        *(b.inner_stride, b.tensor.stride(-1)),
        *(size, next_power_of_2(size)),
    )
    tile = (*layout, tiling.lanes, tiling.stages)
    chunks = cdiv(length, tiling.chunk)

    starts = states
    if chunks > 1:
        products = states.new_empty(chunks - 1, channels, size, size)
        sums = states.new_empty(chunks - 1, channels, size)
        starts = states.new_empty(chunks - 1, channels, size)
        lanes = (chunks - 1) * channels * (size + 1)
        arguments = (*system, products, sums, length, channels, inner, tiling.chunk, lanes)
        launch(_reduce, cdiv(lanes, tiling.lanes), arguments, tile, warps=tiling.warps, integers=kinds(arguments))
        # The coupling into a chunk is the product over that chunk: one lies before the first, which has none.
        outer_tiling = tiling_for(chunks - 1, channels, multiprocessors(states.device))
        inside = Channels(products[1:], 0, size * size), Channels(sums, 0, size)
        _solve(*inside, starts, channels, False, outer_tiling)
    lanes = chunks * channels
    marks = states.new_empty(lanes, dtype=torch.int8)
    arguments = (*system, states, *of_z, starts, marks, length, channels, inner, tiling.chunk, lanes)
    launch(_sweep, cdiv(lanes, tiling.lanes), arguments, tile, warps=tiling.warps, integers=kinds(arguments))
    if outermost:  # what is not finite further in spoils the chunk that starts from it
        arguments = (*system, states, *of_z, marks, length, channels, inner, tiling.chunk, chunks)
        constants = (*layout, REPAIR_LANES, REPAIR_STAGES)
        launch(_repair, cdiv(channels, REPAIR_LANES), arguments, constants, warps=1, integers=kinds(arguments))


@triton.jit
def _advance(
    state, c_ptr, c_place, c_step, b_ptr, b_place, b_step, time, length, exists, has_terms,
    C_ROW: tl.constexpr, C_COLUMN: tl.constexpr, B_ENTRY: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One step of every lane: state [P, lanes]. Beyond the end couplings and terms are 0, as is time 0's coupling."""
    i = tl.arange(0, PADDED)[:, None, None]
    j = tl.arange(0, PADDED)[None, :, None]
    entry = tl.arange(0, PADDED)[:, None]
    far = time.to(tl.int64)
    inside = exists & (time < length)
    block = tl.load(
        c_ptr + ((far * c_step + c_place)[None, None, :] + (i * C_ROW + j * C_COLUMN)),
        mask=(inside & (time > 0))[None, None, :] & (i < SIZE) & (j < SIZE),
        other=0,
    )
    term = tl.load(
        b_ptr + ((far * b_step + b_place)[None, :] + entry * B_ENTRY),
        mask=(inside & has_terms)[None, :] & (entry < SIZE),
        other=0,
    )
    return tl.sum(block * state[None, :, :], 1) + term


@triton.jit
def _reduce(
    c_ptr, c_start, c_step, c_outer, b_ptr, b_start, b_step, b_outer,
    products_ptr, sums_ptr, length, channels, inner, chunk, lanes,
    C_INNER: tl.constexpr, C_ROW: tl.constexpr, C_COLUMN: tl.constexpr, B_INNER: tl.constexpr, B_ENTRY: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``z_end = product z_start + sum`` of a chunk: lanes 0 to P - 1 find the columns of the product, lane P the sum."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    exists = lane < lanes
    column = (lane % (SIZE + 1)).to(tl.int32)
    chain = lane // (SIZE + 1)
    channel, begin = chain % channels, (chain // channels * chunk).to(tl.int32)
    c_place = places(c_start, c_outer, C_INNER, channel, inner)
    b_place = places(b_start, b_outer, B_INNER, channel, inner)
    entry = tl.arange(0, PADDED)[:, None]
    state = (entry == column[None, :]).to(sums_ptr.dtype.element_ty)
    state = tl.where(column[None, :] == SIZE, 0, state)
    for step in tl.range(0, chunk, num_stages=STAGES):
        state = _advance(
            state, c_ptr, c_place, c_step, b_ptr, b_place, b_step, begin + step, length, exists, column == SIZE,
            C_ROW, C_COLUMN, B_ENTRY, SIZE, PADDED,
        )  # fmt: skip
    mask = exists[None, :] & (entry < SIZE)
    product = products_ptr + (chain * (SIZE * SIZE) + column)[None, :] + entry * SIZE
    tl.store(product, state, mask=mask & (column < SIZE)[None, :])
    tl.store(sums_ptr + (chain * SIZE)[None, :] + entry, state, mask=mask & (column == SIZE)[None, :])


@triton.jit
def _sweep(
    c_ptr, c_start, c_step, c_outer, b_ptr, b_start, b_step, b_outer,
    z_ptr, z_start, z_step, starts_ptr, marks_ptr, length, channels, inner, chunk, lanes,
    C_INNER: tl.constexpr, C_ROW: tl.constexpr, C_COLUMN: tl.constexpr, B_INNER: tl.constexpr, B_ENTRY: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The states of a chunk to each lane, and a mark where its last is not finite, or not where the next chunk starts."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    exists = lane < lanes
    channel, begin = lane % channels, (lane // channels * chunk).to(tl.int32)
    c_place = places(c_start, c_outer, C_INNER, channel, inner)
    b_place = places(b_start, b_outer, B_INNER, channel, inner)
    entry = tl.arange(0, PADDED)[:, None]
    z_place = (z_start + channel * SIZE)[None, :] + entry
    real = exists[None, :] & (entry < SIZE)
    before = starts_ptr + ((lane - channels) * SIZE)[None, :] + entry
    state = tl.load(before, mask=real & (begin > 0)[None, :], other=0)
    largest = tl.abs(state)
    for step in tl.range(0, chunk, num_stages=STAGES):
        time = begin + step
        state = _advance(
            state, c_ptr, c_place, c_step, b_ptr, b_place, b_step, time, length, exists, exists,
            C_ROW, C_COLUMN, B_ENTRY, SIZE, PADDED,
        )  # fmt: skip
        largest = tl.maximum(largest, tl.abs(state))
        z = z_ptr + (time.to(tl.int64) * z_step)[None, :] + z_place
        tl.store(z, state, mask=real & (time < length)[None, :])
    has_next = real & (lane < lanes - channels)[None, :]
    following = tl.load(starts_ptr + (lane * SIZE)[None, :] + entry, mask=has_next, other=0)
    missed = tl.where(has_next, is_missed(state, following, largest, SIZE), 0)
    spoilt = (tl.abs(state) < float("inf")).to(tl.int32) ^ 1
    tl.store(marks_ptr + lane, tl.max(tl.maximum(spoilt, missed), 0), mask=exists)


@triton.jit
def _repair(
    c_ptr, c_start, c_step, c_outer, b_ptr, b_start, b_step, b_outer,
    z_ptr, z_start, z_step, marks_ptr, length, channels, inner, chunk, chunks,
    C_INNER: tl.constexpr, C_ROW: tl.constexpr, C_COLUMN: tl.constexpr, B_INNER: tl.constexpr, B_ENTRY: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Forward substitution from the first marked chunk of these channels on: no steps at all where none is marked."""
    channel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    exists = channel < channels
    begin = first_marked(marks_ptr, channel, channels, chunks, LANES) * chunk
    c_place = places(c_start, c_outer, C_INNER, channel, inner)
    b_place = places(b_start, b_outer, B_INNER, channel, inner)
    entry = tl.arange(0, PADDED)[:, None]
    z_place = (z_start + channel.to(tl.int64) * SIZE)[None, :] + entry
    known = tl.where(begin > 0, tl.where(begin < length, channels, 0), 0)
    before = z_ptr + ((begin - 1).to(tl.int64) * z_step + z_place)
    state = tl.load(before, mask=(channel < known)[None, :] & (entry < SIZE), other=0)
    for step in tl.range(begin, length, num_stages=STAGES):
        time = step + tl.zeros([LANES], tl.int32)
        state = _advance(
            state, c_ptr, c_place, c_step, b_ptr, b_place, b_step, time, length, exists, exists,
            C_ROW, C_COLUMN, B_ENTRY, SIZE, PADDED,
        )  # fmt: skip
        z = z_ptr + (time.to(tl.int64) * z_step)[None, :] + z_place
        tl.store(z, state, mask=exists[None, :] & (entry < SIZE))
