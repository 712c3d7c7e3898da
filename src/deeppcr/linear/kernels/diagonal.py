"""Diagonal and scalar couplings: every channel is a recurrence ``z_t = a_t z_{t-1} + b_t`` of its own.

A program owns a few neighbouring channels and walks over time in tiles. A tile is [R, Q, C]: C channels, Q groups of R
consecutive steps, time within the tile q R + r. A group lies in the registers of one thread, so running through it
costs no communication; only the Q groups are joined by a parallel scan. From the product and sum of every group
follows the state each group starts from, and from there the R states are found by forward substitution.

16 channels of float32 or more, if there is enough to do: see ``lookback``.
Many channels: one sweep over memory, each program carrying its channels' states from tile to tile.
Few channels: time is cut into chunks as well. Each chunk is reduced to one equation, and all chunks are swept at once.
The state a chunk starts from follows from the equations before it: where they are few enough to be joined at once,
every program does that for itself, else the same sweep solves them first.

Products of couplings appear between the groups of a tile and between chunks. Where one overflows although the states
do not, the groups that start from it come out infinite or NaN, since neither ever turns finite again by products and
sums, and so does the last state of each such group. The sweep looks at those and redoes such channels by forward
substitution; of chunks it marks each, and whichever program is the last with its channels redoes them, from their
first marked chunk on.

Time t is step t, or with ``reverse`` step L - 1 - t: to the kernels that is a negative stride.
"""

# Triton's kernels are called, indexed and looped over in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import cdiv, kinds, launch, next_power_of_2
from ..blocks import Blocks
from . import lookback
from .recurrence import (
    System,
    as_system,
    compose,
    compose_and_keep,
    first_marked,
    last,
    load,
    multiprocessors,
    places,
    substitute,
)

#: R: the steps a thread walks by itself. A lone sequence is contiguous in time: there R is the widest load.
GROUP_STEPS, GROUP_STEPS_ALONE = 8, 4
#: Q C: neighbouring channels times groups, about 4 to a thread; fewer where several channels are cut into chunks, so that
#: more programs fit a multiprocessor
GROUPS_IN_TILE, GROUPS_IN_CHUNKED_TILE = 512, 256
#: the most channels a program takes: a row of them is read at once, and 8 float32 are the smallest read of memory
MOST_CHANNELS, FEWEST_CHANNELS, CHUNKED_CHANNELS = 32, 8, 16
#: tiles of short systems are not cut further than this
FEWEST_GROUPS = 8
WARPS = 4
#: tiles in flight at once
STAGES = 3
#: numbers (a power of two of equations, times channels) that a program joins by itself to find where its chunk starts
MOST_JOINED = 2048
#: one sweep is enough from this many programs a multiprocessor on; chunks are made until there are that many
ONE_SWEEP_PROGRAMS, CHUNKED_PROGRAMS = 0.9, 4.0


@dataclass(frozen=True)
class Tiling:
    """How a system is cut up: tiles of [steps, groups, channels], and how many tiles in time are a chunk."""

    steps: int
    groups: int
    channels: int
    tiles: int
    warps: int = WARPS
    stages: int = STAGES

    @property
    def chunk(self) -> int:
        """Time in a chunk."""
        return self.steps * self.groups * self.tiles

    @property
    def tile(self) -> tuple[int, ...]:
        """The constants of a kernel."""
        return self.steps, self.groups, self.channels, self.stages


@lru_cache(maxsize=1024)
def tiling_for(length: int, channels: int, processors: int = 132, *, one_sweep: bool = False) -> Tiling:
    """Choose tiles and chunks: wide rows first, then enough programs to keep all multiprocessors busy.

    Args:
        length: L
        channels: how many independent sequences
        processors: multiprocessors of the device
        one_sweep: do not cut time into chunks
    """
    steps = GROUP_STEPS if channels > 1 else GROUP_STEPS_ALONE
    widest = min(next_power_of_2(channels), MOST_CHANNELS)
    busy = ONE_SWEEP_PROGRAMS * processors
    width = widest
    while width > FEWEST_CHANNELS and cdiv(channels, width) < busy:
        width //= 2
    cut = cdiv(channels, width) < busy and not one_sweep
    if cut:  # then programs are made of time, and rows may be wider
        width = min(widest, CHUNKED_CHANNELS)
    blocks = cdiv(channels, width)
    in_tile = GROUPS_IN_CHUNKED_TILE if cut and channels > 1 else GROUPS_IN_TILE
    groups = min(in_tile // width, next_power_of_2(cdiv(length, steps)))
    while cut and groups > FEWEST_GROUPS and blocks * cdiv(length, steps * groups) < busy:
        groups //= 2
    warps = max(1, min(WARPS, groups * width * WARPS // GROUPS_IN_TILE))
    tiles = cdiv(length, steps * groups)
    chunks = min(tiles, cdiv(int(CHUNKED_PROGRAMS * processors), blocks)) if cut else 1
    return Tiling(steps, groups, width, cdiv(tiles, chunks), warps)


def solve_coupled(couplings: Blocks, rhs: Tensor, *, reverse: bool = False) -> Tensor:
    """See ``LinearSolver.solve_coupled``: same arguments, same result, for ``Diagonal`` and ``Scalar``."""
    channels = max(1, rhs.shape[1:].numel())
    tiling = choose(rhs.shape[0], channels, multiprocessors(rhs.device), rhs.dtype)
    return run(couplings, rhs, reverse, tiling)


def choose(length: int, channels: int, processors: int, dtype: torch.dtype) -> Tiling | lookback.Tiling:
    """Which way, and how it is cut up."""
    if dtype == torch.float32 and lookback.pays(length, channels):
        return lookback.choose(length, channels)
    return tiling_for(length, channels, processors)


def run(couplings: Blocks, rhs: Tensor, reverse: bool, tiling: Tiling | lookback.Tiling) -> Tensor:
    """``solve_coupled`` by a given tiling."""
    if isinstance(tiling, lookback.Tiling):
        return lookback.run(couplings, rhs, reverse, tiling)
    system = as_system(couplings, rhs, reverse)
    length, channels = system.length, system.channels
    chunks, blocks = cdiv(length, tiling.chunk), cdiv(channels, tiling.channels)
    states = system.states[0]
    marks = arrived = products = starts = states  # not used, unless there are chunks
    joined = 0
    if chunks > 1:
        marks = system.empty(chunks, channels, dtype=torch.int8)
        arrived = system.empty(blocks, dtype=torch.int32)
        products, starts = _equations(system, tiling, arrived)
        joined = next_power_of_2(chunks - 1)
        if joined * tiling.channels > MOST_JOINED:
            joined, starts = 0, _between_chunks(system, products, starts)
    sizes = length, channels, system.inner, tiling.tiles, blocks, chunks
    arguments = (*system.equations, *system.states, products, starts, marks, arrived, *sizes)
    constants = (*tiling.tile, joined, chunks > 1)
    launch(_sweep, blocks * chunks, arguments, constants, warps=tiling.warps, integers=kinds(arguments))
    return states


def _equations(system: System, tiling: Tiling, arrived: Tensor) -> tuple[Tensor, Tensor]:
    """[chunks - 1, channels] twice: products and sums of every chunk but the last. Sets ``arrived`` to zero."""
    length, channels = system.length, system.channels
    count, blocks = cdiv(length, tiling.chunk) - 1, cdiv(channels, tiling.channels)
    products, sums = (system.empty(count, channels) for _ in range(2))
    sizes = length, channels, system.inner, tiling.tiles, blocks
    arguments = (*system.equations, products, sums, arrived, *sizes)
    launch(_reduce, blocks * count, arguments, tiling.tile, warps=tiling.warps, integers=kinds(arguments))
    return products, sums


def _between_chunks(system: System, products: Tensor, sums: Tensor) -> Tensor:
    """[chunks - 1, channels]: the state every chunk but the first starts from."""
    count, channels = products.shape
    ends = system.empty(count, channels)
    few = tiling_for(count, channels, one_sweep=True)
    blocks = cdiv(channels, few.channels)
    arguments = (
        *(products, 0, channels, 0, 1),
        *(sums, 0, channels, 0, 1),
        *(ends, 0, channels, *(ends,) * 4),
        *(count, channels, channels, few.tiles, blocks, 1),
    )
    launch(_sweep, blocks, arguments, (*few.tile, 0, False), warps=few.warps, integers=kinds(arguments))
    return ends


@triton.jit
def _reduce(
    a_ptr, a_start, a_step, a_outer, a_inner, b_ptr, b_start, b_step, b_outer, b_inner,
    products_ptr, sums_ptr, arrived_ptr, length, channels, inner, tiles, blocks,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk becomes ``z_end = product z_start + sum``. Here a group runs through the whole chunk."""
    part, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    r = tl.arange(0, STEPS)[:, None, None]
    q = tl.arange(0, GROUPS)
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    exists = (channel < channels)[None, None, :]
    a_place = places(a_start, a_outer, a_inner, channel, inner)[None, None, :]
    b_place = places(b_start, b_outer, b_inner, channel, inner)[None, None, :]

    span, chunk = tiles * STEPS, tiles * STEPS * GROUPS
    product = tl.full([GROUPS, CHANNELS], 1, products_ptr.dtype.element_ty)
    total = tl.zeros([GROUPS, CHANNELS], products_ptr.dtype.element_ty)
    for at in tl.range(0, span, STEPS, num_stages=STAGES):
        time = part * chunk + at + (q[None, :, None] * span + r)
        a, b = load(a_ptr, a_place, a_step, b_ptr, b_place, b_step, time, length, exists)
        a, b = tl.associative_scan((a, b), 0, compose)
        product, total = compose(product, total, last(a, r, STEPS), last(b, r, STEPS))
    product, total = tl.associative_scan((product, total), 0, compose)
    place = part.to(tl.int64) * channels + channel
    tl.store(products_ptr + place, last(product, q[:, None], GROUPS), mask=channel < channels)
    tl.store(sums_ptr + place, last(total, q[:, None], GROUPS), mask=channel < channels)
    if part == 0:
        tl.store(arrived_ptr + block, 0)


@triton.jit
def _joined(products_ptr, sums_ptr, count, channel, channels, MOST: tl.constexpr):
    """The state after the first ``count`` equations, joined by a parallel scan."""
    k = tl.arange(0, MOST)[:, None]
    given = (k < count) & (channel < channels)
    place = k.to(tl.int64) * channels + channel
    product = tl.load(products_ptr + place, mask=given, other=1)
    total = tl.load(sums_ptr + place, mask=given, other=0)
    product, total = tl.associative_scan((product, total), 0, compose)
    return last(total, k, MOST)


@triton.jit(do_not_specialize=["chunks"])
def _sweep(
    a_ptr, a_start, a_step, a_outer, a_inner, b_ptr, b_start, b_step, b_outer, b_inner,
    z_ptr, z_start, z_step, products_ptr, starts_ptr, marks_ptr, arrived_ptr,
    length, channels, inner, tiles, blocks, chunks,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr,
    JOINED: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """The states of one chunk; those that are not finite once more, by whom nobody follows.

    JOINED: ``products`` and ``starts`` are the equations of the chunks before, as many as this at most; 0: ``starts`` are
    the states between chunks. CHUNKED: there are several.
    """
    part, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    r = tl.arange(0, STEPS)[:, None, None]
    q = tl.arange(0, GROUPS)
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    exists = (channel < channels)[None, None, :]
    a_place = places(a_start, a_outer, a_inner, channel, inner)
    b_place = places(b_start, b_outer, b_inner, channel, inner)
    z_place = z_start + channel.to(tl.int64)

    if JOINED:
        state = _joined(products_ptr, starts_ptr, part, channel, channels, JOINED)
    else:
        before = (part - 1).to(tl.int64) * channels + channel
        state = tl.load(starts_ptr + before, mask=channel < tl.where(part > 0, channels, 0), other=0)
    identity = tl.full([GROUPS, CHANNELS], 1, state.dtype)
    nothing = tl.zeros([GROUPS, CHANNELS], state.dtype)
    spoilt = tl.zeros([GROUPS, CHANNELS], tl.int32)
    begin, chunk = part * tiles * STEPS * GROUPS, tiles * STEPS * GROUPS
    for at in tl.range(begin, tl.minimum(begin + chunk, length), STEPS * GROUPS, num_stages=STAGES):
        time = at + (q[None, :, None] * STEPS + r)
        a, b = load(
            a_ptr, a_place[None, None, :], a_step, b_ptr, b_place[None, None, :], b_step, time, length, exists
        )  # fmt: skip
        product, total = tl.associative_scan((a, b), 0, compose)
        _, _, product, total = tl.associative_scan(
            (last(product, r, STEPS), last(total, r, STEPS), identity, nothing), 0, compose_and_keep
        )
        start = product * state[None, :] + total
        # With its start added to the first term, a group's running sums are its states; the products go unused.
        b = tl.where(r == 0, a * start[None, :, :] + b, b)
        _, z = tl.associative_scan((a, b), 0, compose)
        tl.store(z_ptr + (time.to(tl.int64) * z_step + z_place[None, None, :]), z, mask=exists & (time < length))
        ends = last(z, r, STEPS)
        spoilt |= (tl.abs(ends) < float("inf")).to(tl.int32) ^ 1
        state = last(ends, q[:, None], GROUPS)

    again = length
    if CHUNKED:
        place = part.to(tl.int64) * channels + channel
        tl.store(marks_ptr + place, tl.max(spoilt, 0), mask=channel < channels)
        tl.debug_barrier()  # all that this program wrote is there before it is counted
        if tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel", scope="gpu") == chunks - 1:
            again = first_marked(marks_ptr, channel, channels, chunks, CHANNELS) * chunk
    else:
        tl.debug_barrier()  # states that one thread wrote another may write again
        again = tl.where(tl.max(tl.max(spoilt, 0), 0) > 0, 0, length)
    substitute(
        a_ptr, a_place, a_step, b_ptr, b_place, b_step, z_ptr, z_place, z_step, again, length, channel, channels,
        CHANNELS,
    )  # fmt: skip
