"""What ``mode="auto"`` and ``chunk="auto"`` take where there are kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from . import calibrate, cost
from .arguments import Mode

#: Why a pass is the loop where nothing was chosen.
ASKED, EMPTY = 'mode="sequential"', "an empty batch has nothing to solve"

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
