"""How a run is cut into chunks, and what it needs for them: settled once for all runs that are alike.

Shapes: L steps in N chunks of C, B rows of D numbers, R lanes of K numbers (R * K = B * D).
"""

from __future__ import annotations

import math
from typing import Any

from ..launch import next_power_of_2
from ..tolerance import Tolerance
from . import tiled
from .bound import BoundKernels, aligned_size
from .joints import map_size
from .kinds import FEWEST_PASSES, Kind
from .transients import can_look

#: Passes that chunks of a size are given: no more than this, and no more than together take half as long as a loop.
_MOST_PASSES = 16
#: So many tolerances rounding may add up to in a chunk; what misses by more is not called that.
_TOLERANCES = 4
#: So many ways in which runs of a shape are cut are remembered.
_MOST_CUTS = 64


class Cut:
    """All that the launches of a run depend on beside its shape, its guess and how many passes are made. Those of an earlier run with
    the same one can be made again.

    Attributes:
        chunk, chunks: C and N
        most: so many passes and no look; None: as many as it takes, but no more than ``limit``
        every: the states after every so many steps are written
        rolls: how often chunks are rolled out before they are corrected
        parts, size: of a workspace
        how: what is asked of states, as the kernels take it
        looks: whether it is looked for something large that hides what came after it
        digits: whether it is noted after how many steps states have digits
    """

    chunk: int
    chunks: int
    most: int | None
    every: int
    rolls: int

    def __init__(self, run: Any, kind: Kind, tolerance: Tolerance, most: int | None, every: int):
        chunk, local = kind.chunk, tolerance.local
        self.chunk, self.most, self.every, self.rolls = chunk, most, every, kind.rolls
        self.chunks = chunks = -(-run.length // chunk)
        several, seen = chunks > 1, most is None and not local
        self.limit: int = min(chunks, _limit(run, chunk) if most is None else most) if several else 0
        self.parts: list[int] = workspace_of(run, chunks)
        self.size: int = sum(self.parts)
        # Misses of so many units of rounding may be what adds up in a chunk: one in each step, but hardly more than the tolerance.
        roughest = min(float(chunk), _TOLERANCES * tolerance.rtol / run.shape.eps)
        self.how: tuple[Any, ...] = (float(tolerance.atol), float(tolerance.rtol), roughest, int(local), 0)
        self.looks: bool = kind.looks and several and seen and can_look(chunks)
        self.digits: bool = bool(run.leaves) and several and seen

    @staticmethod
    def of(run: Any, kind: Kind, tolerance: Tolerance, most: int | None, every: int) -> Cut:
        """
        Args:
            run: a ``run.Run``
        """
        key = (
            kind.chunk, kind.rolls, kind.looks, tolerance.atol, tolerance.rtol, tolerance.local, most, every, run.leaves,
        )  # fmt: skip
        cuts = run.shape.cuts
        found = cuts.get(key)
        if found is None:
            if len(cuts) >= _MOST_CUTS:
                cuts.clear()
            found = cuts[key] = Cut(run, kind, tolerance, most, every)
        return found


def _limit(run: BoundKernels, chunk: int) -> int:
    """Passes that are worth it: together they take half of the dependent steps of a loop, in which steps have no tangents."""
    turns = chunk * (1 + run.program.width)
    return max(FEWEST_PASSES, min(_MOST_PASSES, run.length // (2 * turns)))


def workspace_of(run: BoundKernels, chunks: int) -> list[int]:
    """Sizes of what kernels note of so many chunks: starts, ends, sizes, products, and what they are joined by."""
    width, rows = run.program.width, run.rows
    if run.shape.tiled:
        return [aligned_size(size) for size in tiled.workspace_sizes(width, rows, chunks, 3)]
    # Of every chunk three vectors, and a matrix; of every group of chunks its map.
    sizes = [chunks * width * rows] * 3 + [
        chunks * width**2 * rows,
        groups_of(chunks, rows)[0] * map_size(width) * rows,
    ]
    return [aligned_size(size) for size in sizes]


def groups_of(chunks: int, rows: int) -> tuple[int, int]:
    """Groups of chunks that a program joins side by side, and lanes of each."""
    groups = min(64, next_power_of_2(max(1, math.isqrt(2 * chunks))))
    return groups, max(1, min(128 // groups, next_power_of_2(rows)))
