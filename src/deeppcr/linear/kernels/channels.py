"""Batch and state dimensions seen as channels: what the kernels of every structure share."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


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
