"""What the networks take, checked when they are made."""

from __future__ import annotations

import operator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..newton import Newton

Mode = Literal["parallel", "sequential", "auto"]
MODES = ("parallel", "sequential", "auto")
#: Why a pass is the loop where nothing was chosen.
ASKED, EMPTY = 'mode="sequential"', "an empty batch has nothing to solve"


def check_mode(mode: Any) -> Mode:
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    return mode


def check_newton(newton: Any) -> Newton:
    if newton is None:
        return Newton()
    if not isinstance(newton, Newton):
        raise TypeError(f'newton: expected Newton(...) or None, got {newton!r}; for the plain loop, mode="sequential"')
    return newton


def check_size(name: str, value: Any) -> int:
    """A whole number from 1; booleans are none."""
    try:
        size = operator.index(value)
    except TypeError:
        size = None
    if size is None or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if size < 1:
        raise ValueError(f"{name}: at least 1, got {size}")
    return size


def complaint_of(module: Any, input: Any, hx: Any, least: int = 1) -> Exception | None:
    """What is wrong with the arguments of a recurrent module, of so many steps at least; None where nothing is."""
    packed = isinstance(input, PackedSequence)
    x: Any = input.data if packed else input
    if not isinstance(x, Tensor):
        return TypeError(f"input: expected a tensor or a PackedSequence, got {type(input).__name__}")
    steps = 1 if x.ndim == 3 and module.batch_first else 0
    if x.ndim not in ((2,) if packed else (2, 3)) or x.shape[-1] != module.input_size or x.shape[steps] < least:
        wanted = "[B, T, {0}]" if module.batch_first else "[T, B, {0}]"
        wanted = f"{wanted} or [T, {{0}}]{', T not 0' if least else ''}".format(module.input_size)
        return ValueError(f"input: expected {wanted}, got {list(x.shape)}")
    weight = getattr(module, module._all_weights[0][0])
    if x.device != weight.device:
        return ValueError(f"input: expected it on {weight.device}, where the weights are, got {x.device}")
    loose = not x.is_meta and torch.is_autocast_enabled(x.device.type)  # which brings all to one dtype
    if x.dtype != weight.dtype and not loose:
        return TypeError(f"input: expected {weight.dtype}, the dtype of the weights, got {x.dtype}")
    if hx is None:
        return None
    rows = (int(input.batch_sizes[0]),) if packed else (x.shape[0 if module.batch_first else 1],) * (x.ndim == 3)
    widths, leaves = module._widths(), (hx,) if isinstance(hx, Tensor) else hx
    one = len(widths) == 1
    if not isinstance(leaves, (tuple, list)) or isinstance(hx, Tensor) != one or len(leaves) != len(widths):
        return TypeError(f"hx: expected {'a tensor' if one else 'two tensors, (h, c)'}, got {type(hx).__name__}")
    for leaf, width in zip(leaves, widths, strict=True):
        shape = [len(module._all_weights), *rows, width]
        if not isinstance(leaf, Tensor) or list(leaf.shape) != shape:
            came = list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            return ValueError(f"hx: expected {shape}, got {came}")
        if leaf.device != x.device:
            return ValueError(f"hx: expected it on {x.device}, where the input is, got {leaf.device}")
        if leaf.dtype != x.dtype and not (loose and leaf.is_floating_point()):
            return TypeError(f"hx: expected {x.dtype}, the dtype of the input, got {leaf.dtype}")
    return None
