"""After how many steps states have digits that the tolerance vouches for: ``Tolerance.known_steps``, by one kernel for each tensor of a state.

Operation by operation it takes the host longer than to launch a solve, and a look at the device.
"""

# Triton's kernels are called in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch, next_power_of_2
from ..tolerance import Tolerance

#: Numbers that a program looks at at a time, and of these of one state.
_NUMBERS, _COLUMNS = 2048, 128


def note_known_steps(run: Any, states: Tensor, sizes: Tensor, known: Tensor, chunks: int, tolerance: Tolerance) -> None:
    """Launch the kernel for each tensor of a state: of all of them the fewest are noted.

    Args:
        run: a ``run.Run``
        states: [L, B, D]
        sizes: [N * K * R], of every number the largest in each chunk, as lanes note them
        known: [B], integers
    """
    assert not tolerance.local, "where digits of every state are asked for, all are known"
    rows, width = run.initial.shape
    channels = width if run.shape.tiled else run.program.channels
    begin = 0
    for numbers in run.leaves:
        columns = min(_COLUMNS, next_power_of_2(numbers))
        arguments = (
            states, run.initial, sizes, known, rows, width, channels, len(states), chunks, begin, begin + numbers,
            float(tolerance.atol) / tolerance.faint, tolerance.faint,
        )  # fmt: skip
        large = max(states.numel(), sizes.numel()) >= 2**31
        integers = (states.dtype, run.initial.dtype, run.initial.data_ptr() % 16 == 0, sizes.dtype, large)
        constants = (begin > 0, _NUMBERS // columns, columns)
        launch(_note, rows, arguments, constants, warps=4, integers=integers)
        begin += numbers


@triton.jit(do_not_specialize=["rows", "width", "channels", "length", "chunks", "begin", "end"])
def _note(
    states, initial, sizes, known, rows, width, channels, length, chunks, begin, end, least, faint,
    LATER: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """From the last states back to one that has digits: names as in ``Tolerance.last_of``. LATER: not the first tensor of the state."""
    row = tl.program_id(0).to(tl.int64)
    beside = rows.to(tl.int64) * width
    i = tl.arange(0, STEPS)
    of_known, of_lost, last = 0, 0, length
    while (last > 0) & (of_known == 0):
        step = last - 1 - i
        known_here, some_here = tl.zeros((STEPS,), tl.int32), tl.zeros((STEPS,), tl.int32)
        column = begin
        while column < end:
            d = column + tl.arange(0, COLUMNS)
            inside = d < end
            scale = tl.abs(tl.load(initial + row * width + d, mask=inside, other=0.0)).to(sizes.dtype.element_ty)
            at = (d // channels) * (rows.to(tl.int64) * channels) + row * channels + d % channels
            chunk = 0
            while chunk < chunks:
                n = chunk + i
                of_chunks = (n < chunks)[:, None] & inside[None, :]
                scale = tl.maximum(
                    scale, tl.max(tl.load(sizes + n[:, None] * beside + at[None, :], mask=of_chunks, other=0.0), 0)
                )
                chunk += STEPS
            of_states = (step >= 0)[:, None] & inside[None, :]
            size = tl.abs(
                tl.load(states + step[:, None] * beside + row * width + d[None, :], mask=of_states, other=0.0)
            )
            known_here = known_here | tl.max((size > (faint * (least + scale))[None, :]).to(tl.int32), 1)
            some_here = some_here | tl.max((size > 0).to(tl.int32), 1)
            column += COLUMNS
        of_known = tl.max(known_here * (step + 1), 0)
        of_lost = tl.maximum(of_lost, tl.max((some_here & ~known_here) * (step + 1), 0))
        last -= STEPS
    found = tl.where(of_lost > of_known, of_known, length)
    if LATER:
        found = tl.minimum(found, tl.load(known + row))
    tl.store(known + row, found)
