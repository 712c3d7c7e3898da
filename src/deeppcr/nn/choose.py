"""What ``mode="auto"`` and ``chunk="auto"`` take where there are kernels, looked up after the first call of its kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from . import calibrate, cost

#: Why a pass is the loop where nothing was chosen.
ASKED, EMPTY = 'mode="sequential"', "an empty batch has nothing to solve"

#: So that a call only looks it up, and the same call is never done in two ways.
_choices: dict[tuple, cost.Choice] = {}
_MOST = 4096
#: Layers wider than this go back by other kernels than forward, whose loop is slow: on an H200, chunks were the faster way from
#: 128 layers of width 128 and 64 of width 256 on, where forward the loop still was. Measured with one row: the products of
#: Jacobians cost as much for every further one, the loop next to nothing.
_WIDE, _WIDE_BACKWARD = 64, 2**14


def choose(
    shape: torch.Size,
    rows: int,
    activation: str,
    chunk: int | Literal["auto"],
    most_products: int,
    device: torch.device,
) -> cost.Choice:
    """Chunk and mode for weights of this shape: [blocks, (skip,) w, w], with ``skip`` a residual network."""
    key = (shape, rows, activation, chunk, device)
    found = _choices.get(key)
    if found is None:
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
        if chunk == "auto" and width > _WIDE and rows == 1 and blocks * width >= _WIDE_BACKWARD:
            found = replace(found, backward="parallel")
        if len(_choices) >= _MOST:
            _choices.clear()
        _choices[key] = found
    return found
