"""A recursive filter of order two along time, of many channels: its input is read twice, its output written once, and nothing else is large.

Time is cut into chunks. A lane walks through one chunk of one channel from rest, which gives what the chunk adds to the state at its end;
these are joined, by a power of the filter's block that is the same for all chunks, in groups of them; and each lane walks again, from
where its chunk starts, and writes. States are float64: what chunks lose where they are joined is nothing beside the input's own rounding.

Shapes: L samples in N chunks, K channels. The state is two numbers (the transposed second direct form).
"""

# Triton's kernels are called, indexed and looped over in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import aligned, cdiv, launch, next_power_of_2

#: lanes that keep the device busy: chunks are as long as it takes, from so many samples on
BUSY, SHORTEST = 2**17, 32
#: channels of a program, its warps and the samples it reads before it needs the first of them; and of the one that joins chunks
LANES, WARPS, AHEAD = 64, 2, 16
JOIN_LANES, JOIN_STAGES = 32, 8
#: so few chunks are joined one after the other
FEW = 64


def chunk_length(length: int, channels: int) -> int:
    """Samples of a chunk: a power of two."""
    return max(SHORTEST, next_power_of_2(max(1, cdiv(length * channels, BUSY))))


def run(coefficients: Tensor, x: Tensor, *, reverse: bool = False, chunk: int | None = None) -> Tensor:
    """The filter along the first dimension of x [L, K], from rest; ``reverse``: from the last sample to the first.

    Args:
        coefficients: [5], float64, on the device of x: b_0, b_1, b_2, a_1, a_2
        x: float32 or float64, L and K at least 1
        chunk: samples of a chunk, a power of two, if not chosen by L and K
    """
    (length, channels), x = x.shape, aligned(x)
    chunk = chunk_length(length, channels) if chunk is None else chunk
    chunks, blocks = cdiv(length, chunk), cdiv(channels, LANES)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    added, starts = (torch.empty(chunks, 2, channels, dtype=torch.float64, device=x.device) for _ in range(2))
    places = [(each, (length - 1) * each.stride(0) if reverse else 0, -each.stride(0) if reverse else each.stride(0),
               each.stride(1)) for each in (x, y)]  # fmt: skip
    sizes = (length, channels, chunk, blocks)
    integers = (x.dtype, places[0][3] == 1, max(x.numel(), abs(places[0][1]) + 1) >= 2**31)

    def walk(states: Tensor, writes: bool) -> None:
        given = (coefficients, *places[0], *places[1], states, *sizes)
        constants = (writes, chunks > 1, LANES, min(AHEAD, chunk))
        launch(_walk, chunks * blocks, given, constants, warps=WARPS, integers=integers)

    if chunks > 1:
        walk(added, False)
        _start(coefficients, added, starts, chunk)
    walk(starts, True)
    return y


def _start(coefficients: Tensor, added: Tensor, starts: Tensor, chunk: int) -> None:
    """Fill ``starts`` by what every chunk adds to the state: both [N, 2, K]."""
    chunks, _, channels = added.shape
    blocks, doublings = cdiv(channels, JOIN_LANES), chunk.bit_length() - 1
    large = (chunks * channels >= 2**29,)

    def join(
        added: Tensor, before: Tensor, into: Tensor, group: int, doublings: int, writes: bool, rests: bool
    ) -> None:
        given = (coefficients, added, before, into, len(added), channels, group, blocks)
        constants = (doublings, writes, rests, JOIN_LANES, JOIN_STAGES)
        launch(_join, cdiv(len(added), group) * blocks, given, constants, warps=1, integers=large)

    if chunks <= FEW:
        join(added, added, starts, chunks, doublings, True, True)
        return
    group = next_power_of_2(math.isqrt(chunks))
    ends, begins = (added.new_empty(cdiv(chunks, group), 2, channels) for _ in range(2))
    join(added, added, ends, group, doublings, False, True)
    join(ends, ends, begins, len(ends), doublings + group.bit_length() - 1, True, True)
    join(added, begins, starts, group, doublings, True, False)


_SIZES = ["x_first", "x_step", "x_channel", "y_first", "y_step", "y_channel", "length", "channels", "chunk", "blocks", "chunks", "group"]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def _walk(
    coefficients, x_ptr, x_first, x_step, x_channel, y_ptr, y_first, y_step, y_channel, states,
    length, channels, chunk, blocks,
    WRITES: tl.constexpr, SEVERAL: tl.constexpr, LANES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One chunk of some channels. WRITES: from its start in ``states`` [N, 2, K], and its outputs are written; else from rest, and
    ``states`` gets its end, which of the last chunk nobody reads. SEVERAL: it is not the only chunk, which starts from rest in any case.
    """
    part, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    channel = (block * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = channel < channels
    b0, b1, b2 = tl.load(coefficients), tl.load(coefficients + 1), tl.load(coefficients + 2)
    a1, a2 = tl.load(coefficients + 3), tl.load(coefficients + 4)
    place = states + part.to(tl.int64) * 2 * channels + channel
    one, two = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.float64)
    if WRITES and SEVERAL:
        one = tl.load(place, mask=inside, other=0.0)
        two = tl.load(place + channels, mask=inside, other=0.0)
    for time in range(part * chunk, tl.minimum(part * chunk + chunk, length), AHEAD):
        # Registers hold what is on its way: through shared memory, a step of many programs would wait for a barrier each.
        given = ()
        for ahead in tl.static_range(AHEAD):
            now = tl.cast(time + ahead, tl.int64)
            there = x_ptr + x_first + now * x_step + channel * x_channel
            given += (tl.load(there, mask=inside & (channel * 0 + now < length), other=0.0),)
        for ahead in tl.static_range(AHEAD):
            x = given[ahead].to(tl.float64)
            y = b0 * x + one
            one = (b1 * x + two) - a1 * y
            two = b2 * x - a2 * y
            if WRITES:
                now = tl.cast(time + ahead, tl.int64)
                there = y_ptr + y_first + now * y_step + channel * y_channel
                tl.store(there, y.to(given[ahead].dtype), mask=inside & (channel * 0 + now < length))
    if not WRITES:
        tl.store(place, one, mask=inside)
        tl.store(place + channels, two, mask=inside)


@triton.jit
def _times(block, state):
    """Of nothing, nothing: the powers of an unstable filter's block may be beyond the numbers."""
    return tl.where(state == 0, 0.0, block * state)


@triton.jit(do_not_specialize=_SIZES)
def _join(
    coefficients, added, before, into, chunks, channels, group, blocks,
    DOUBLINGS: tl.constexpr, WRITES: tl.constexpr, RESTS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A group of chunks, by what each adds to the state [N, 2, K]: from rest, or from where ``before`` [groups, 2, K] says.

    WRITES: ``into`` gets where every chunk starts; else where the group ends.
    """
    number, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    channel = (block * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = channel < channels
    a1, a2 = tl.load(coefficients + 3), tl.load(coefficients + 4)
    # Without input a sample takes (one, two) to (two - a1 one, -a2 one): its block, to the power of a chunk.
    m11, m12, m21, m22 = -a1, a1 * 0 + 1, -a2, a1 * 0
    for _ in tl.static_range(DOUBLINGS):
        p11, p12 = m11 * m11 + m12 * m21, m11 * m12 + m12 * m22
        p21, p22 = m21 * m11 + m22 * m21, m21 * m12 + m22 * m22
        m11, m12, m21, m22 = p11, p12, p21, p22
    one, two = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.float64)
    place = number.to(tl.int64) * 2 * channels + channel
    if not RESTS:
        one = tl.load(before + place, mask=inside, other=0.0)
        two = tl.load(before + place + channels, mask=inside, other=0.0)
    for part in tl.range(number * group, tl.minimum(number * group + group, chunks), num_stages=STAGES):
        at = tl.cast(part, tl.int64) * 2 * channels + channel
        if WRITES:
            tl.store(into + at, one, mask=inside)
            tl.store(into + at + channels, two, mask=inside)
        more = tl.load(added + at, mask=inside, other=0.0)
        more_two = tl.load(added + at + channels, mask=inside, other=0.0)
        next_one = _times(m11, one) + _times(m12, two) + more
        two = _times(m21, one) + _times(m22, two) + more_two
        one = next_one
    if not WRITES:
        tl.store(into + place, one, mask=inside)
        tl.store(into + place + channels, two, mask=inside)
