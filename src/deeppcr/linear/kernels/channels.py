"""Batch and state dimensions seen as channels: what the kernels of every structure share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...launch import Launches, repeat
from ..blocks import Blocks


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


def repeat_solve(
    noted: dict[Any, Launches],
    tiling: Any,
    couplings: Blocks,
    rhs: Tensor,
    reverse: bool,
    make: Callable[[Tensor, Launches], None],
) -> Tensor:
    """See ``LinearSolver.solve_coupled``: the launches that were noted for such tensors, made again.

    Args:
        noted: where launches are noted
        tiling: what they depend on besides the tensors
        make: makes them for the first time: gets the states to fill, and what makes launches
    """
    data = couplings.data
    # Not as rhs is laid out: the kernels write rows.
    states = torch.empty_like(rhs, memory_format=torch.contiguous_format)
    if states.numel() == 0:
        return states
    key = key_of(tiling, couplings, rhs, reverse)
    repeat(noted, key, (data, rhs, states), lambda launches: make(states, launches))
    return states


def key_of(tiling: Any, couplings: Blocks, rhs: Tensor, reverse: bool) -> tuple:
    """What the launches of a solve depend on."""
    data = couplings.data
    layout = data.shape, data.stride(), rhs.shape, rhs.stride(), rhs.device
    return (type(couplings), tiling, reverse, *layout, *kind_of(data, rhs))


def kind_of(*tensors: Tensor) -> tuple:
    """What kernels are compiled for besides constants and integers: a dtype, and which tensors begin at multiples of 16
    bytes."""
    return (tensors[-1].dtype, *(tensor.data_ptr() % 16 == 0 for tensor in tensors))


def launch(
    launches: Launches,
    kernel: Any,
    programs: int,
    arguments: tuple,
    constants: tuple,
    kind: tuple,
    *,
    warps: int,
    registers: int | None = None,
) -> None:
    """Launch a kernel that is compiled for its integers, and for a ``kind`` of tensors."""
    integers = (*kind, *(each for each in arguments if isinstance(each, int)))
    launches.launch(kernel, programs, arguments, constants, warps=warps, integers=integers, registers=registers)


def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at least; an H200's where kernels are interpreted on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
