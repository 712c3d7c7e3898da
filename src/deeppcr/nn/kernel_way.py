"""Which networks the fused kernels run, and how.

Shapes: [L, (s,) w, w] of the weights: L steps of the solve, s layers inside a skip connection, w the width.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch

from ..linear.fused import has_room
from . import calibrate, cost
from .arguments import ASKED, Mode

#: Widths up to which the kernels hold a layer in the registers of one program, and up to which they walk over its tiles
#: (without skip connections); and rows, each walked by a program of its own.
_NARROW, WIDEST, _MOST_ROWS = 64, 256, 4096
#: Elements of the products of Jacobians, one for every chunk and row, that the kernels make room for: 4 GiB.
_MOST_PRODUCTS = 2**30


def kernels() -> Any:
    """The module that runs networks by kernels: imported with Triton, which takes a second, when it is first used."""
    from . import forward

    return forward


#: Layers wider than this go back by other kernels than forward. Measured on an H200 with one row (the products of Jacobians cost
#: as much for every further one, the loop next to nothing), for widths of 72 to 256 and 64 to 4,096 layers; deeper networks are taken to be like those.
_WIDE = 64


def _back_in_chunks(layers: int, width: int) -> int | None:
    """Layers in a chunk of the backward pass of a wide network with one row, where chunks are the faster way."""
    if layers < (128 if width <= 128 else 64):
        return None
    return 8 if layers < 512 else 16


def choose(
    shape: torch.Size,
    rows: int,
    activation: str,
    chunk: int | Literal["auto"],
    most_products: int,
    device: torch.device,
) -> cost.Choice:
    """Chunk and mode for weights of this shape: [blocks, (skip,) w, w], with ``skip`` a residual network."""
    blocks, width, residual = shape[0], shape[-1], len(shape) == 4
    skip = shape[1] if residual else 1
    kind = calibrate.Kind.of(width, activation, skip, residual)
    times, source = calibrate.find(device, kind, width, blocks * skip)
    found = cost.choose(
        times,
        source,
        blocks=blocks,
        rows=rows,
        skip=skip,
        activation=activation,
        residual=residual,
        most_chunks=most_products // (rows * width**2),
        chunk=None if chunk == "auto" else min(chunk, blocks),
    )
    if chunk == "auto" and width > _WIDE and rows == 1 and (back := _back_in_chunks(blocks, width)) is not None:
        found = replace(found, backward="parallel", backward_chunk=back)
    return found


def choose_without_kernels(shape: torch.Size, rows: int, device: torch.device) -> tuple[Mode, str]:
    """Whether in parallel, and why: by a rule of thumb."""
    steps, width = shape[0], shape[-1]
    if device.type == "cpu":
        deep = steps >= 4096 and width <= 16 and rows <= 4
        rule = "on a CPU the loop wins below 4,096 steps, above width 16 or with more than 4 rows"
    else:
        deep = steps >= 64 and width <= 64
        rule = "without kernels the loop wins below 64 steps or above width 64"
    return "parallel" if deep else "sequential", rule


class Way(NamedTuple):
    """How the kernels run a network.

    Attributes:
        layers: ``Layers``, what they need to know besides the tensors
        choice: the cost model's, in parallel
        why: the loop, where it is the loop
    """

    layers: Any
    choice: cost.Choice | None
    why: str = ""


def covered(shape: torch.Size, rows: int, device: torch.device, chunk: int | str, usual: bool) -> tuple[bool, bool]:
    """Whether there are kernels of this size for the loop, and in parallel."""
    width = shape[-1]
    if width > _NARROW and (len(shape) == 4 or width > WIDEST or (device.type == "cuda" and not has_room(device))):
        return False, False
    chunks = 2 * math.isqrt(shape[:-2].numel()) if isinstance(chunk, str) else -(-shape[0] // chunk)
    room = 0 < rows * chunks * width**2 <= _MOST_PRODUCTS
    return 0 < rows <= _MOST_ROWS, room and usual and chunk != 1


@lru_cache(maxsize=4096)  # found once for a kind of call, which then is always done in the same way
def find(
    shape: torch.Size,
    rows: int,
    device: torch.device,
    mode: Mode,
    usual: bool,
    activation: str,
    chunk: int | Literal["auto"],
    atol: float,
    rtol: float,
    local: bool,
) -> Way | None:
    """How the fused kernels run weights of this shape on so many rows; None where they do not do what is asked."""
    in_loop, in_parallel = covered(shape, rows, device, chunk, usual)
    choice, backward, why = None, None, ASKED if mode == "sequential" else ""
    if mode == "auto" and not in_loop:
        mode, _ = choose_without_kernels(shape, rows, device)
    if mode != "sequential" and in_parallel:
        choice = choose(shape, rows, activation, chunk, _MOST_PRODUCTS, device)
        backward = choice.backward_chunk if mode == "parallel" or choice.backward == "parallel" else shape[0]
        loop = mode == "auto" and choice.mode == "sequential"
        if backward != (shape[0] if loop else choice.chunk):
            back = f"in chunks of {backward}" if backward < shape[0] else "one after the other"
            choice = replace(choice, why=f"{choice.why}; backward {back}")
        if loop:
            choice, why = None, choice.why
    elif mode == "auto":
        why = "there are kernels for the loop only"
    if choice is None and (mode == "parallel" or not in_loop):
        return None
    layers = kernels().Layers(
        skip=shape[1] if len(shape) == 4 else 1,
        residual=len(shape) == 4,
        activation=activation,
        tolerance=(float(atol), float(rtol), 0.0 if local else 1.0),
        chunk=shape[0] if choice is None else choice.chunk,
        backward=backward,
    )
    return Way(layers, choice, why)
