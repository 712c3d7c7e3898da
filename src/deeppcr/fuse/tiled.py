"""Launches of the kernels of a step on tiles. ``run`` and ``back`` say when; those of lanes stand there."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..launch import launch, next_power_of_2
from . import wide
from .bound import BoundKernels, Notes
from .tile_program import TileProgram
from .tiles import padded

#: Rows whose notes one program writes.
_LANES = 32
#: Programs that keep the device busy; a chunk has as many steps as it takes, from so many on.
_BUSY, _LEAST = 2048, 16
#: A step that reads so many matrices of its width takes long beside a join, and as many programs as a GPU has processors keep it busy: more
#: would share them. Then fewer, longer chunks cost no more in a pass, and take fewer passes.
_HEAVY, _PROCESSORS = 8, 128

#: Chunks on their way where they are joined: fewer of the widest, for which shared memory would not do.
_STAGES = 3
#: Numbers that the registers of a warp hold beside all else.
_OF_A_WARP = 2048
#: So many numbers the kernels note of a row in a pass.
WORST = 4


def first_chunk(length: int, rows: int, program: TileProgram, local: bool) -> int:
    """How many steps a chunk has, before anything is known of how a step converges: see ``kinds.first_chunk``.

    Digits of every state are found by short chunks: of gradient descent with 200 rows of data those of 16 steps joined, of 32 to 64 not.
    """
    if not local and program.numbers >= _HEAVY * padded(program.width) ** 2:
        return min(length, _LEAST * -(-length * rows // (_LEAST * _PROCESSORS)))
    return min(length, max(_LEAST, next_power_of_2(max(1, length * rows // _BUSY))))


def groups_of(chunks: int) -> int:
    """Groups of chunks: as many as a group has chunks."""
    return -(-chunks // max(1, math.isqrt(chunks)))


def workspace_sizes(width: int, rows: int, chunks: int, vectors: int) -> list[int]:
    """Of every chunk so many vectors and a matrix; of every group a matrix and two vectors; of every row ``WORST`` numbers."""
    groups = groups_of(chunks)
    matrices = [chunks * rows * width * width, groups * rows * width * width]
    return [*[chunks * rows * width] * vectors, *matrices, groups * rows * width, groups * rows * width, WORST * rows]


class _How:
    """How a width is laid out: constants of the kernels, and their warps; what is best was measured.

    Attributes:
        rough: the precision of products that later passes mend
        fine: that of cotangents, whose first pass is to be the last that is corrected
    """

    def __init__(self, run: BoundKernels):
        program = run.program
        assert isinstance(program, TileProgram)
        self.width, self.blocks, self.lead = program.width, program.blocks, program.lead
        self.padded = max(16, next_power_of_2(self.width))
        self.rough, self.fine = "tf32", "tf32x3"
        # How far apart steps and rows are, of every leaf: what begins at multiples of four numbers is read four at a time.
        self.even = all(each % 4 == 0 for at, each in enumerate(run.strides) if at % 4 < 2)
        self.warps = max(1, min(8, next_power_of_2(-(-program.numbers // _OF_A_WARP))))
        self.join_warps = 1 if self.padded <= 32 else 4
        self.stages = 2 if self.padded <= 32 else 1
        self.join_stages = _STAGES if self.padded <= 64 else _STAGES - 1


def programs_of(
    run: BoundKernels, chunks: int, product: bool, whole: bool, *, fine: bool = False
) -> tuple[int, tuple[Any, ...], int]:
    """Of the kernels that run chunks, with the products of their Jacobians or without: how many programs there are, constants, and warps."""
    how = _How(run)
    blocks, precision = how.blocks if product else 1, how.fine if fine else how.rough
    constants = (product, whole, how.even, blocks, how.lead, precision, how.stages)
    return chunks * run.rows * blocks, constants, how.warps


def join(
    run: BoundKernels,
    memory: tuple[Tensor, ...],
    notes: Notes,
    chunks: int,
    passes: int,
    limit: int,
    tolerance: tuple[Any, ...],
) -> None:
    """``memory``: starts, ends, sizes, products, maps, terms, largest, worst."""
    starts, ends, sizes, products, maps, terms, largest, worst = memory
    how, rows = _How(run), run.rows
    groups = groups_of(chunks)
    each = -(-chunks // groups)
    common = (starts, ends, products, sizes, maps, terms, largest, notes.corrections)
    shape = (how.width, how.padded)
    integers = (chunks * rows * how.width**2 >= 2**31,)
    launch(
        wide.gather, groups * rows * how.blocks, (*common, rows, chunks, each, passes), (*shape, how.blocks, how.lead, how.fine if tolerance[-1] else how.rough, how.join_stages),
        warps=how.join_warps, integers=integers,
    )  # fmt: skip
    launch(
        wide.spread, groups * rows, (*common, worst, rows, chunks, each, passes, *tolerance), (*shape, how.join_stages),
        warps=how.join_warps, integers=integers,
    )  # fmt: skip
    launch(
        wide.note_rows, -(-rows // _LANES), (worst, notes.corrections, notes.unsettled, notes.taken, notes.residual, rows, passes, limit, tolerance[2], tolerance[-1]),
        (_LANES,), warps=1,
    )  # fmt: skip
