"""Diagonal and scalar couplings of many channels: everything is read once, in one kernel.

A tile is Q groups of R consecutive steps, of C neighbouring channels. A thread holds a group of one channel (or of a
few neighbouring ones): rows are read as they lie in memory, all of them before the first is used, and walked in
registers. Only the groups of a tile are joined between threads. A tile then

1. publishes what it does to the state before it, ``z_end = product z_start + sum``;
2. looks back: the equations of the tiles before it in its run (a fixed number of tiles), and the state at the end of
   the run before, give the state it starts from; the last tile of a run publishes the state at the run's end;
3. substitutes forwards from there, and writes its states.

Whichever tile comes first, the same numbers are joined in the same order: results do not depend on timing. States
pass from run to run, so the chain of waiting is as long as there are runs, not tiles.

Progress: a program takes its tile from a counter when it starts, and tiles are counted along time first in all
channels, then on. So every tile that a program waits for was taken by a program that runs already, and the first of
them waits for none.

What is published are words of 4 or 8 bytes that are written in one piece: two float32, or one. A word that is not
there yet has all bits set, which no published word has. So there is nothing to keep in order between words, and no
fence: a reader that finds a word has all of it.

Overflowing products are found and repaired as in ``diagonal``.
"""

# Triton's kernels are called, indexed and looped over in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import cdiv, kinds, launch
from ..blocks import Blocks
from .recurrence import as_system, compose, compose_and_keep, places, repair

#: Measured on an H200 down to these: at 64 channels of 16,384 steps, two thirds of the time that ``diagonal`` takes.
FEWEST_CHANNELS, FEWEST_NUMBERS = 64, 2**20
#: The same of long sequences: at 16 or 32 channels of 16,384 steps, and 300 of 2,000. Rows of 8 are too short for either way.
FEWEST_LONG_CHANNELS, FEWEST_LONG_NUMBERS, LONG = 16, 2**18, 2000
#: From so many channels on memory is the limit; with fewer, the chain of runs, and then runs are longer; with very few of
#: them, tiles are too, where there are that many numbers.
_MANY_CHANNELS, _FEW_CHANNELS, _MANY_NUMBERS = 1024, 64, 2**20
#: Words that a program clears.
CLEARED = 1024
#: a word that is not there yet, and what stands for it in the only case it were to be published: two NaN, or one
_ABSENT = tl.constexpr(-1)
_TWO_NAN = tl.constexpr(0x7FC00000_7FC00000)
_NAN = tl.constexpr(0x7FC00000)
#: the equation that changes nothing, a product of 1 and a sum of 0, as a word
_IDENTITY = tl.constexpr(0x3F800000_00000000)


@dataclass(frozen=True)
class Tiling:
    """Tiles of [steps, groups, channels], and how many of them in time are a run."""

    steps: int = 32
    groups: int = 4
    channels: int = 32
    run: int = 4
    warps: int = 4
    #: data that is used once leaves the caches first
    stream: bool = False
    #: the most of a thread: fewer make room for more programs at once; None: as many as the compiler likes
    registers: int | None = 128

    def __post_init__(self) -> None:
        # The compiler would let several threads hold the same element, and take their copies for equal. Two threads
        # that wait for a word need not see it at once.
        if self.groups * self.channels < 32 * self.warps:
            raise ValueError(f"{self.warps} warps for {self.groups} groups of {self.channels} channels: too many")

    @property
    def time(self) -> int:
        """Steps of a tile."""
        return self.steps * self.groups


def pays(length: int, channels: int) -> bool:
    """Whether to read everything once is faster than the ways of ``diagonal``."""
    numbers = length * channels
    many = channels >= FEWEST_CHANNELS and numbers >= FEWEST_NUMBERS
    return many or (length >= LONG and channels >= FEWEST_LONG_CHANNELS and numbers >= FEWEST_LONG_NUMBERS)


def choose(length: int, channels: int) -> Tiling:
    """The fastest of 23 plans, at 2,048 channels (87% of the bandwidth of a copy) and from 64 to 512; of 3 at 16 and 32."""
    if channels >= _MANY_CHANNELS:
        return Tiling()
    if channels >= _FEW_CHANNELS:
        return Tiling(groups=8, run=8, warps=8, stream=True)
    width, warps = (32 if channels >= 32 else 16), (16 if length * channels >= _MANY_NUMBERS else 8)
    return Tiling(groups=32 * warps // width, channels=width, run=16, warps=warps)


def run(couplings: Blocks, rhs: Tensor, reverse: bool, tiling: Tiling) -> Tensor:
    """``diagonal.solve_coupled`` by a given tiling, in float32."""
    system = as_system(couplings, rhs, reverse)
    channels = system.channels
    tiles, blocks = cdiv(system.length, tiling.time), cdiv(channels, tiling.channels)
    marks = system.empty(tiles, channels, dtype=torch.int8)
    # The counter, an equation a tile and channel, a state a run and channel: each from a multiple of 16 bytes on.
    equations, ends = tiles * channels + tiles * channels % 2, cdiv(tiles, tiling.run) * channels
    words = 2 + equations + (ends + 1) // 2
    room = system.empty(words, dtype=torch.int64)
    launch(_clear, cdiv(words, CLEARED), (room, words), (CLEARED,), warps=4, integers=kinds((room, words)))
    counter, published = room[:2].view(torch.int32), room[2:]
    states = room[2 + equations :].view(torch.int32)
    arguments = (
        *(*system.equations, *system.states),
        *(counter, published, states, marks),
        *(system.length, channels, system.inner, blocks),
    )
    constants = (tiling.steps, tiling.groups, tiling.channels, tiling.run, "evict_first" if tiling.stream else "")
    options = {"warps": tiling.warps, "registers": tiling.registers}
    launch(_solve, tiles * blocks, arguments, constants, integers=kinds(arguments), **options)
    repair(system, marks, tiling.time)
    return system.states[0]


@triton.jit
def _clear(words_ptr, words, SIZE: tl.constexpr):
    """No word is there yet."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tl.store(words_ptr + place, tl.zeros([SIZE], tl.int64) + _ABSENT, mask=place < words)


@triton.jit
def _word(product, total):
    """An equation in one word."""
    high = product.to(tl.int32, bitcast=True).to(tl.int64)
    low = total.to(tl.uint32, bitcast=True).to(tl.int64)
    word = (high << 32) | low
    return tl.where(word == _ABSENT, _TWO_NAN, word)


@triton.jit
def _equation(word):
    product = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return product, word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _joined(equation_at, row, channel, channels, count, RUN: tl.constexpr):
    """The first ``count`` equations of a run as one, joined from the first on; waits until all are there."""
    missing = 1
    product = tl.full(channel.shape, 1, tl.float32)
    total = tl.zeros(channel.shape, tl.float32)
    while missing > 0:
        absent = tl.zeros(channel.shape, tl.int32)
        product = tl.full(channel.shape, 1, tl.float32)
        total = tl.zeros(channel.shape, tl.float32)
        for k in tl.static_range(RUN - 1):
            wanted = channel < tl.where(k < count, channels, 0)
            word = tl.load(equation_at + k * row, mask=wanted, other=_IDENTITY, volatile=True)
            absent |= (word == _ABSENT).to(tl.int32)
            then_product, then_total = _equation(word)
            product, total = compose(product, total, then_product, then_total)
        missing = tl.max(tl.max(absent, 1), 0)
    return product, total, missing


@triton.jit(do_not_specialize=["length", "blocks"])  # they only count: compiled once for all of them
def _solve(
    a_ptr, a_start, a_step, a_outer, a_inner, b_ptr, b_start, b_step, b_outer, b_inner, z_ptr, z_start, z_step,
    counter_ptr, equations_ptr, ends_ptr, marks_ptr, length, channels, inner, blocks,
    STEPS: tl.constexpr, GROUPS: tl.constexpr, CHANNELS: tl.constexpr, RUN: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """The states of one tile, and per channel a mark where one of them is not finite."""
    taken = tl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu") + 1
    part, block = taken // blocks, taken % blocks
    q = tl.arange(0, GROUPS)[:, None]
    # [Q, C], not [1, C]: what is waited for is read into every group on its own. See ``Tiling``.
    channel = tl.broadcast_to((block * CHANNELS + tl.arange(0, CHANNELS))[None, :], [GROUPS, CHANNELS])
    exists = channel < channels
    time = (part * GROUPS + q) * STEPS
    far = time.to(tl.int64)
    a_at = a_ptr + (far * a_step + places(a_start, a_outer, a_inner, channel, inner))
    b_at = b_ptr + (far * b_step + places(b_start, b_outer, b_inner, channel, inner))
    z_at = z_ptr + (far * z_step + (z_start + channel.to(tl.int64)))
    steps = tl.where(exists, length - time, 0)  # that are left

    # Beyond the end both are 0, and so is the coupling of time 0.
    a = (tl.load(a_at, mask=(steps > 0) & (time > 0), other=0, eviction_policy=EVICT),)
    b = (tl.load(b_at, mask=steps > 0, other=0, eviction_policy=EVICT),)
    for r in tl.static_range(1, STEPS):
        a_at += a_step
        b_at += b_step
        a = a + (tl.load(a_at, mask=steps > r, other=0, eviction_policy=EVICT),)  # noqa: RUF005
        b = b + (tl.load(b_at, mask=steps > r, other=0, eviction_policy=EVICT),)  # noqa: RUF005
    product, total = a[0], b[0]
    for r in tl.static_range(1, STEPS):
        product, total = compose(product, total, a[r], b[r])
    identity, nothing = tl.full([GROUPS, CHANNELS], 1, tl.float32), tl.zeros([GROUPS, CHANNELS], tl.float32)
    product, total, before_product, before_total = tl.associative_scan(
        (product, total, identity, nothing), 0, compose_and_keep
    )

    before, at = part // RUN - 1, part % RUN  # the run before, and where in its own run the tile is
    row = tl.zeros([], tl.int64) + channels
    equation_at = equations_ptr + ((part - at).to(tl.int64) * row + channel)
    end_at = ends_ptr + (before.to(tl.int64) * row + channel)
    # The last group knows the whole tile. The last tile of a run publishes a state, all others an equation.
    publishes = tl.where(at < RUN - 1, GROUPS - 1, GROUPS)
    tl.store(equation_at + at * row, _word(product, total), mask=exists & (q == publishes), cache_modifier=".cg")
    # As a rule the state is there before the equations are: so it is asked for first, and again only if need be.
    follows = channel < tl.where(before >= 0, channels, 0)
    end = tl.load(end_at, mask=follows, other=0, volatile=True)
    run_product, run_total, missing = _joined(equation_at, row, channel, channels, at, RUN)
    # Triton 3.6 cannot compile a loop with a result that nobody uses: so 0 is written as what is missing now.
    while tl.max(tl.max((end == _ABSENT).to(tl.int32), 1), 0) > missing:
        end = tl.load(end_at, mask=follows, other=0, volatile=True)
    state = run_product * end.to(tl.float32, bitcast=True) + run_total
    end = (product * state + total).to(tl.int32, bitcast=True)
    end = tl.where(end == _ABSENT, _NAN, end)
    publishes = tl.where(at == RUN - 1, GROUPS - 1, GROUPS)
    tl.store(end_at + row, end, mask=exists & (q == publishes), cache_modifier=".cg")

    z = before_product * state + before_total
    for r in tl.static_range(STEPS):
        z = a[r] * z + b[r]
        tl.store(z_at, z, mask=steps > r, eviction_policy=EVICT)
        z_at += z_step
    spoilt = (tl.abs(z) < float("inf")).to(tl.int32) ^ 1
    mark = marks_ptr + (part.to(tl.int64) * channels + block * CHANNELS + tl.arange(0, CHANNELS))
    tl.store(mark, tl.max(spoilt, 0), mask=block * CHANNELS + tl.arange(0, CHANNELS) < channels)
