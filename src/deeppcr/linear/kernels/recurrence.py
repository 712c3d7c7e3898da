"""What kernels of diagonal and block-diagonal couplings share: a system as strided arrays of channels, joining steps, and the repair.

Time t is step t, or with ``reverse`` step L - 1 - t: to the kernels that is a negative stride.
"""

# Triton's kernels are called, indexed and looped over in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import cdiv, kinds, launch
from ..blocks import Blocks, Scalar

#: of the repair: a program's channels, the marks it looks at in one go, the steps it reads ahead
REPAIR_CHANNELS = 32
_MARKS, _STAGES = tl.constexpr(64), tl.constexpr(8)


class Channels(NamedTuple):
    """Where channel n of a tensor lies: ``(n // inner) * outer_stride + (n % inner) * inner_stride`` from its step."""

    tensor: Tensor
    outer_stride: int
    inner_stride: int


def as_channels(tensors: list[Tensor], dims: int) -> tuple[int, list[Channels]]:
    """Merge dimensions 1 to ``dims`` of tensors that agree in them into two, for all tensors alike.

    Broadcast and transposed dimensions merge like all others. Only where more than two are left, such as after
    broadcasting over a dimension between two others, is what is not contiguous copied.

    Args:
        tensors: [L, *channels, ...] each, ``dims`` dimensions of channels
        dims: how many dimensions to merge

    Returns:
        the size of the inner of the two dimensions, and each tensor with its strides
    """
    merged: list[tuple[int, list[int]]] = []
    for dim in range(1, dims + 1):
        size, strides = tensors[0].shape[dim], [tensor.stride(dim) for tensor in tensors]
        if size == 1:
            continue
        if merged and merged[-1][1] == [stride * size for stride in strides]:
            merged[-1] = (merged[-1][0] * size, strides)
        else:
            merged.append((size, strides))
    if len(merged) > 2:
        return as_channels([tensor.contiguous() for tensor in tensors], dims)
    none = [0] * len(tensors)
    outer = merged[0][1] if len(merged) == 2 else none
    inner_size, inner = merged[-1] if merged else (1, none)
    return inner_size, [Channels(*found) for found in zip(tensors, outer, inner, strict=True)]


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at least; an H200's where kernels are interpreted on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class System(NamedTuple):
    """Every channel a recurrence ``z_t = a_t z_{t-1} + b_t``, and room for its states."""

    equations: tuple[Any, ...]  # a's and b's tensor, start, step, outer and inner stride: as the kernels take them
    states: tuple[Any, ...]  # z's tensor, start, step
    length: int
    channels: int
    inner: int

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Scratch memory."""
        return self.states[0].new_empty(*shape, dtype=dtype)


def as_system(couplings: Blocks, rhs: Tensor, reverse: bool) -> System:
    """Couplings and right-hand side as the kernels take them, and memory for the states, laid out in rows."""
    data = couplings.data.unsqueeze(-1) if isinstance(couplings, Scalar) else couplings.data
    inner, (a, b) = as_channels([data.expand(data.shape[0], *rhs.shape[1:]), rhs], rhs.ndim - 1)
    length, states = rhs.shape[0], torch.empty_like(rhs, memory_format=torch.contiguous_format)
    channels = states.numel() // length
    of_a, of_b, of_z = in_time((a.tensor.stride(0), b.tensor.stride(0), channels), length, reverse)
    equations = (
        *(a.tensor, *of_a, a.outer_stride, a.inner_stride),
        *(b.tensor, *of_b, b.outer_stride, b.inner_stride),
    )
    return System(equations, (states, *of_z), length, channels, inner)


def in_time(strides: tuple[int, int, int], length: int, reverse: bool) -> list[tuple[int, int]]:
    """Of couplings, terms and states that lie so far apart from step to step: where time 0 is, and how far it is to the next."""
    if reverse:
        return [((length - 1) * stride, -stride) for stride in strides]
    # Time 0 has no coupling: the address of one before the first is only ever computed.
    couplings, *others = strides
    return [(-couplings, couplings), *((0, stride) for stride in others)]


def repair(system: System, marks: Tensor, chunk: int) -> None:
    """Redo marked channels by forward substitution, from their first marked chunk on.

    Args:
        marks: [chunks, channels], not 0 where states of the chunk are not finite
        chunk: time in a chunk
    """
    arguments = (
        *system.equations,
        *(*system.states, marks),
        *(system.length, system.channels, system.inner, chunk, marks.shape[0]),
    )
    programs = cdiv(system.channels, REPAIR_CHANNELS)
    launch(_repair, programs, arguments, (REPAIR_CHANNELS,), warps=1, integers=kinds(arguments))


@triton.jit
def compose(a, b, then_a, then_b):
    return then_a * a, then_a * b + then_b


@triton.jit
def compose_and_keep(a, b, before_a, before_b, then_a, then_b, then_before_a, then_before_b):
    """Composes, and carries along what came before the last element: an inclusive scan that is exclusive too."""
    return then_a * a, then_a * b + then_b, then_before_a * a, then_before_a * b + then_before_b


@triton.jit
def last(values, index, SIZE: tl.constexpr):
    """The last entry along the first axis; ``index`` counts it and broadcasts."""
    return tl.sum(tl.where(index == SIZE - 1, values, 0), 0)


@triton.jit
def places(start, outer_stride, inner_stride, channel, inner):
    channel = channel.to(tl.int64)
    return start + channel // inner * outer_stride + channel % inner * inner_stride


@triton.jit
def load(a_ptr, a_place, a_step, b_ptr, b_place, b_step, time, length, exists):
    """Couplings and terms of a tile; beyond the end both are 0, and so is the coupling of time 0."""
    far = time.to(tl.int64)
    a = tl.load(a_ptr + (far * a_step + a_place), mask=exists & (time < length) & (time > 0), other=0)
    b = tl.load(b_ptr + (far * b_step + b_place), mask=exists & (time < length), other=0)
    return a, b


@triton.jit
def first_marked(marks_ptr, channel, channels, chunks, CHANNELS: tl.constexpr):
    """The first chunk in which one of these channels is marked; ``chunks`` where none is."""
    first = tl.full([CHANNELS], 0, tl.int32) + chunks
    for at in range(0, chunks, _MARKS):
        part = at + tl.arange(0, _MARKS)[:, None]
        exists = (channel < channels) & (part < chunks)
        marks = tl.load(marks_ptr + (part.to(tl.int64) * channels + channel), mask=exists, other=0)
        first = tl.minimum(first, tl.min(tl.where(marks != 0, part, chunks), 0))
    return tl.min(first, 0)


@triton.jit
def substitute(
    a_ptr, a_place, a_step, b_ptr, b_place, b_step, z_ptr, z_place, z_step, begin, length, channel, channels,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Forward substitution of these channels from time ``begin`` on; nothing from ``length`` on."""
    exists = channel < channels
    known = tl.where(begin > 0, tl.where(begin < length, channels, 0), 0)
    state = tl.load(z_ptr + ((begin - 1).to(tl.int64) * z_step + z_place), mask=channel < known, other=0)
    for step in tl.range(begin, length, num_stages=_STAGES):
        time = step + tl.zeros([CHANNELS], tl.int32)
        a, b = load(a_ptr, a_place, a_step, b_ptr, b_place, b_step, time, length, exists)
        state = a * state + b
        tl.store(z_ptr + (time.to(tl.int64) * z_step + z_place), state, mask=exists)


@triton.jit
def _repair(
    a_ptr, a_start, a_step, a_outer, a_inner, b_ptr, b_start, b_step, b_outer, b_inner,
    z_ptr, z_start, z_step, marks_ptr, length, channels, inner, chunk, chunks,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Forward substitution from the first marked chunk of these channels on: no steps at all where none is marked."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    begin = first_marked(marks_ptr, channel, channels, chunks, CHANNELS) * chunk
    a_place = places(a_start, a_outer, a_inner, channel, inner)
    b_place = places(b_start, b_outer, b_inner, channel, inner)
    z_place = z_start + channel.to(tl.int64)
    substitute(
        a_ptr, a_place, a_step, b_ptr, b_place, b_step, z_ptr, z_place, z_step, begin, length, channel, channels,
        CHANNELS,
    )  # fmt: skip
