"""Running the kernels of a step: all chunks at once until they join, or one step after the other; and backwards.

Shapes: L steps in N chunks of C, B rows of D numbers, R lanes of K numbers (R * K = B * D).
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..launch import aligned, launch, next_power_of_2, repeat
from ..tolerance import Tolerance
from . import tiled
from .compiled import Kernels
from .joints import map_size, parts_of
from .program import Program
from .tile_program import TileProgram

#: Passes that chunks of a size are given: no more than this, and no more than together take half as long as a loop.
_MOST_PASSES = 16
_FEWEST_PASSES = 4
#: So many times chunks are rolled out from the ends of those before them, where corrections from the guess lead astray.
_ROLLS = (2, 8)
#: By so much chunks grow where the passes did not suffice.
_GROWTH = 4
#: Where only the loop sufficed, chunks are tried again after so many solves, then after twice as many: a step's parameters change.
_PATIENCE = 8
#: Lanes of a program: of elementwise steps, of narrow ones.
_LANES = {True: 128, False: 32}
#: What a lane reads is on its way so many steps before: of few numbers, and of many.
_STAGES, _FEW_STAGES, _MANY = 8, 4, 3
#: So many lanes keep the device busy.
_BUSY = 2**18
#: Of a step so many ways are remembered in which what it reads may lie.
_MOST_SHAPES = 64


@dataclass
class Kind:
    """What is known of solves that differ in nothing but numbers.

    Attributes:
        chunk: steps of a chunk that sufficed the last time, or are to be tried next; the whole length where only the loop did
        rolls: how often chunks are rolled out before they are corrected
        passes: that sufficed the last time
        first: steps of a chunk at first
        gave_up: only the loop sufficed
        looped, patience: solves since then, and after how many of them chunks are tried again
    """

    length: int
    chunk: int
    rolls: int = 0
    passes: int = 3
    first: int = 0
    gave_up: bool = False
    looped: int = 0
    patience: int = _PATIENCE

    def __post_init__(self):
        self.first = self.first or self.chunk

    def begin(self) -> None:
        """Before a solve: what is to be tried."""
        if self.gave_up and self.looped == self.patience:
            self.chunk, self.rolls, self.gave_up = self.first, 0, False
            self.looped, self.patience = 0, 2 * self.patience
        self.looped += self.gave_up

    def sufficed(self, passes: int) -> None:
        """After a solve that did not need the loop."""
        self.passes = max(2, passes)
        if not self.gave_up:
            self.patience = _PATIENCE

    def copy(self) -> Kind:
        return Kind(
            self.length, self.chunk, self.rolls, self.passes, self.first, self.gave_up, self.looped, self.patience
        )  # fmt: skip

    def try_harder(self, width: int) -> bool:
        """Where the passes did not suffice: what to try next, if it is not to be the loop."""
        larger, tried_again = _GROWTH * self.chunk, self.patience > _PATIENCE
        if self.rolls < _ROLLS[-1] and not tried_again:
            self.rolls = next(each for each in _ROLLS if each > self.rolls)
        elif _FEWEST_PASSES * larger * (1 + width) <= self.length and not tried_again:
            self.chunk, self.rolls = larger, 0
        else:
            self.chunk, self.gave_up = self.length, True
        self.passes = 3
        return not self.gave_up


def first_chunk(length: int, rows: int, program: Program | TileProgram) -> int:
    """How many steps a chunk has, before anything is known of how a step converges.

    Of an elementwise step memory is what counts: enough lanes to keep it busy. A narrow one is bound by the time of one step after
    the other, those inside a chunk and chunks at a join; and large chunks make marginal loops converge.
    """
    if program.parts.tiled:
        return tiled.first_chunk(length, rows)
    busy = next_power_of_2(max(1, length * rows // _BUSY))
    least = 64 if program.elementwise else min(256, next_power_of_2(max(1, math.isqrt(length))))
    return min(length, max(least, busy))


@dataclass(frozen=True)
class Found:
    """What a run came to.

    Attributes:
        states: [L, B, D]
        notes: what the kernels wrote of each lane
        passes: how many there were; 0 where all was one loop
        chunk: steps of a chunk
        left: lanes that had to be taken one step after the other
        floored: lanes of which rounding is all that is left
        unsettled: lanes that no correction has settled: those that are left, and those all of whose chunks came one after the
            other in the end. What is not finite is among them
    """

    states: Tensor
    notes: Notes
    passes: int
    chunk: int
    left: int
    floored: int
    unsettled: int


class Notes:
    """What the kernels write of R lanes in so many passes, in one piece of memory.

    Attributes:
        corrections: [passes, R], in units of the tolerance
        residual: [R], the largest miss at the last pass of a lane
        taken: [R], passes of a lane; negative where rounding is all that is left
        unsettled: [passes + 1], lanes that were not settled after each; and at last those that are as exact as rounding lets them
    """

    def __init__(self, limit: int, rows: int, device: torch.device):
        self._limit, self._rows, every = limit, rows, _aligned_size(limit * rows)
        self._places = every, every + _aligned_size(rows), every + 2 * _aligned_size(rows)
        self.memory = torch.empty(self._places[-1] + limit + 1, dtype=torch.float32, device=device)

    def on_host(self) -> Notes:
        """The same in the memory of the host: one copy, where each operation on a GPU would take longer than all of them here."""
        found = copy(self)
        found.memory = self.memory.cpu()
        return found

    @property
    def corrections(self) -> Tensor:
        return self.memory[: self._limit * self._rows].view(self._limit, self._rows)

    @property
    def residual(self) -> Tensor:
        return self.memory[self._places[0] :][: self._rows]

    @property
    def taken(self) -> Tensor:
        return self.memory[self._places[1] :][: self._rows].view(torch.int32)

    @property
    def unsettled(self) -> Tensor:
        return self.memory[self._places[2] :].view(torch.int32)


class Shape:
    """What runs on tensors that lie alike have in common.

    Attributes:
        rows: R
        strides: of every leaf how far apart its steps, rows and channels are, and where the first one is
        kinds: what the kernels are compiled for beside their constants
        outputs: where a backward pass writes; None before the first
    """

    def __init__(self, kernels: Kernels, initial: Tensor, bases: list[Tensor], length: int):
        program = kernels.program
        self.length, self.rows = length, initial.numel() // program.width
        self.tiled = program.parts.tiled
        self.block = _LANES[program.elementwise]
        self.warps = max(1, self.block // 32)
        moving = sum(read.value.level for read in program.reads)
        self.stages = _STAGES if moving < _MANY else _FEW_STAGES
        strides: list[int] = []
        for leaf in program.leaves:
            base = bases[leaf.base]
            step = base.stride(0) if leaf.per_step else 0
            row = base.stride(int(leaf.per_step)) if leaf.per_row else 0
            strides += (step, row, leaf.spacing, leaf.offset)
        self.strides = tuple(strides)
        self.kinds = (initial.dtype, tuple([(base.dtype, base.data_ptr() % 16 == 0) for base in bases]))
        self.outputs: Any = None

    @staticmethod
    def of(kernels: Kernels, initial: Tensor, bases: list[Tensor], length: int) -> Shape:
        key = (length, initial.shape, *[(base.stride(), base.data_ptr() % 16 == 0) for base in bases])
        found = kernels.shapes.get(key)
        if found is None:
            if len(kernels.shapes) >= _MOST_SHAPES:
                kernels.shapes.clear()
            found = kernels.shapes[key] = Shape(kernels, initial, bases, length)
        return found


class Run:
    """One solve: what it reads, and the launches on it.

    Args:
        initial: [B, D]
        bases: what the kernels read from, [L, rows, ...] each, without L or rows where they are the same for all
    """

    def __init__(self, kernels: Kernels, initial: Tensor, bases: list[Tensor], length: int):
        program = kernels.program
        self.kernels, self.program, self.length, self.device = kernels, program, length, initial.device
        kernels.roll  # noqa: B018 - before anybody asks for numbers, of which its source may bring more
        # Kernels read memory as it is: what is stored as its negative is copied.
        self.initial = aligned(initial.detach().resolve_neg().contiguous())
        self.bases = [
            _side_by_side(tensor.detach().resolve_neg(), base.per_step + base.per_row)
            for tensor, base in zip(bases, program.parts.bases, strict=True)
        ]
        self.shape = Shape.of(kernels, self.initial, self.bases, length)
        self.rows, self.strides = self.shape.rows, self.shape.strides
        self.block, self.warps, self.stages = self.shape.block, self.shape.warps, self.shape.stages
        self.pointers = tuple([self.bases[leaf.base] for leaf in program.leaves])

    def kinds(self, *sizes: int) -> tuple:
        """What the kernels are compiled for beside their constants."""
        return (*self.shape.kinds, any(abs(size) >= 2**31 for size in (*self.strides, *sizes)))

    def repeat(self, key: tuple, tensors: tuple[Tensor, ...], make: Any) -> None:
        """Make launches, by those of an earlier run that was alike where there was one."""
        tensors = (self.initial, self.kernels.numbers(self.device), *self.bases, *tensors)
        repeat((self.shape, *key), tensors, make)

    def new_states(self) -> Tensor:
        return self.initial.new_empty(self.length, *self.initial.shape)

    def loop(self, states: Tensor, found: Found | None = None) -> None:
        """One step after the other; of a run that was found, the lanes that are not settled, from what is exact on."""
        nothing = self.kernels.numbers(self.device)
        first = 0 if found is None else min(found.passes * found.chunk, self.length - 1)
        start = states[first - 1] if first else self.initial
        corrections = nothing if found is None else found.notes.corrections
        memory = (*[nothing] * 4, corrections, *[nothing] * (1 + self.shape.tiled))
        passes = 0 if found is None else found.passes
        sizes = (0, first, self.length, 1, self.length - first, passes, 0)
        self._launch_roll(start, start, states, memory, sizes, False, True)

    def _roll(
        self, guess: Tensor | None, states: Tensor, memory: tuple[Tensor, ...], chunk: int, chunks: int, passes: int, limit: int, *, product: bool
    ) -> None:  # fmt: skip
        step = 0 if guess is None else self.initial.numel()
        sizes = (step, 0, chunk, chunks, chunk, passes, limit)
        self._launch_roll(self.initial, self.initial if guess is None else guess, states, memory, sizes, product, False)

    def _launch_roll(
        self, initial: Tensor, guess: Tensor, states: Tensor, memory: tuple[Tensor, ...], sizes: tuple[int, ...],
        product: bool, whole: bool,
    ) -> None:  # fmt: skip
        if self.shape.tiled:
            tiled.roll(self, initial, guess, states, memory, sizes, product, whole)
            return
        step, first, chunk, chunks, turns, passes, limit = sizes
        sizes = (step, self.rows, self.program.channels, self.length, first, chunk, chunks, turns, passes, limit)
        arguments = (
            initial, self.kernels.numbers(self.device), guess, states, *memory, *self.pointers, *self.strides, *sizes,
        )  # fmt: skip
        programs = -(-chunks * self.rows // self.block)
        constants = (product, whole, self.block, self.stages)
        integers = (*self.kinds(*sizes), initial.data_ptr() % 16, guess.dtype, guess.data_ptr() % 16, memory[4].dtype)
        launch(self.kernels.roll, programs, arguments, constants, warps=self.warps, integers=integers)

    def in_parallel(
        self, kind: Kind, tolerance: Tolerance, guess: Tensor | None = None, most: int | None = None
    ) -> Found:
        """Passes until all lanes are settled, as many as are worth it.

        Args:
            kind: how large chunks are, and how many passes may be made before anybody looks
            guess: states to start from, [L, B, D]; None: the initial one everywhere
            most: so many passes and no look, as inside a CUDA graph
        """
        width, rows, chunk = self.program.width, self.rows, kind.chunk
        chunks = -(-self.length // chunk)
        limit = (min(chunks, self.limit(chunk)) if most is None else most) if chunks > 1 else 0
        states, notes = self.new_states(), Notes(limit, rows, self.device)
        if chunks == 1:
            self.repeat(("loop",), (states,), partial(self.loop, states))
            notes.memory.zero_()
            return Found(states, notes, 0, chunk, 0, 0, rows)
        if self.shape.tiled:
            parts = [_aligned_size(size) for size in tiled.workspace_sizes(width, rows, chunks, 3)]
        else:
            parts = parts_of_workspace(width, rows, chunks, groups_of(chunks, rows)[0], 3)
        workspace = torch.empty(sum(parts), dtype=self.program.dtype, device=self.device)
        how = (float(tolerance.atol), float(tolerance.rtol), int(tolerance.local))

        def some_passes(first: int, last: int, rolls: int) -> None:
            starts, ends, sizes, products, *maps = workspace.split(parts)
            worst = maps[-1:] if self.shape.tiled else ()
            memory = (starts, ends, products, sizes, notes.corrections, notes.unsettled, *worst)
            guessed = guess
            for left in range(rolls, 0, -1):  # the last of them is not where the passes write
                into = other if left % 2 else states
                self._roll(guessed, into, memory, chunk, chunks, 0, limit, product=False)
                guessed = into
            for passes in range(first, last):
                self._roll(guessed, states, memory, chunk, chunks, passes, limit, product=True)
                join = tiled.join if self.shape.tiled else _join
                join(self, (starts, ends, sizes, products, *maps), notes, chunks, passes, limit, how)

        rolls = kind.rolls
        other = self.new_states() if rolls else states
        given = (workspace, notes.memory, *([] if guess is None else [guess]), *([other] if rolls else []), states)
        done, wanted = 0, limit if most is not None else min(limit, kind.passes)
        while True:
            key = (chunk, limit, done, wanted, rolls, guess is None, how)
            self.repeat(key, given, partial(some_passes, done, wanted, rolls if done == 0 else 0))
            done = wanted
            *left, floored = [0, 0] if most is not None else notes.unsettled.tolist()
            left = left[:done]
            # After as many passes as there are chunks, each has started from where the one before it ended.
            over = 0 in left or done >= chunks
            if over or done >= limit:
                passes = left.index(0) + 1 if 0 in left and most is None else done
                unsettled = 0 if 0 in left else left[-1]
                return Found(states, notes, passes, chunk, 0 if over else unsettled, floored, unsettled)
            wanted = min(limit, done + 2)

    def limit(self, chunk: int) -> int:
        """Passes that are worth it: together they take half of the dependent steps of a loop, in which steps have no tangents."""
        turns = chunk * (1 + self.program.width)
        return max(_FEWEST_PASSES, min(_MOST_PASSES, self.length // (2 * turns)))


def _join(run: Run, memory: tuple[Tensor, ...], notes: Notes, chunks: int, passes: int, limit: int, tolerance: tuple) -> None:
    """``memory``: starts, ends, sizes, products, maps."""
    starts, ends, sizes, products, maps = memory
    rows, width, real = run.rows, run.program.width, run.program.dtype
    groups, lanes = groups_of(chunks, rows)
    sizes_of_join = (rows, chunks, groups, -(-chunks // groups))
    arguments = (
        starts, ends, products, sizes, maps, notes.corrections, notes.unsettled, notes.taken, notes.residual,
        *sizes_of_join, passes, limit, *tolerance,
    )  # fmt: skip
    for part in parts_of(width):
        launch(
            run.kernels.joints.join, -(-rows // lanes), arguments, (part, groups, lanes),
            warps=max(1, groups * lanes // 32), integers=(real, *(size >= 2**31 for size in sizes_of_join)),
        )  # fmt: skip


def _side_by_side(tensor: Tensor, lead: int) -> Tensor:
    """A tensor, or a copy of it, in which the numbers behind its first dimensions lie side by side."""
    expected = 1
    for dim in range(tensor.ndim - 1, lead - 1, -1):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != expected:
            return tensor.contiguous()
        expected *= tensor.shape[dim]
    return tensor


def groups_of(chunks: int, rows: int) -> tuple[int, int]:
    """Groups of chunks that a program joins side by side, and lanes of each."""
    groups = min(64, next_power_of_2(max(1, math.isqrt(2 * chunks))))
    return groups, max(1, min(128 // groups, next_power_of_2(rows)))


def _aligned_size(size: int) -> int:
    """So much memory that what comes after it begins at a multiple of 16 bytes, as kernels are compiled for."""
    return -(-size // 4) * 4


def parts_of_workspace(width: int, rows: int, chunks: int, groups: int, vectors: int) -> list[int]:
    """Of every chunk so many vectors, and a matrix; of every group of chunks its map."""
    sizes = [chunks * width * rows] * vectors + [chunks * width**2 * rows, groups * map_size(width) * rows]
    return [_aligned_size(size) for size in sizes]


def solve(run: Run, kind: Kind, tolerance: Tolerance, guess: Tensor | None = None) -> Found:
    """In parallel, with chunks as large as it takes; where even large ones do not join, the loop finishes the rest.

    What worked is noted in ``kind``, for the next time.
    """
    kind.begin()
    while True:
        found = run.in_parallel(kind, tolerance, guess)
        if not found.left:
            kind.sufficed(found.passes)
            return found
        if not kind.try_harder(run.program.width):
            run.loop(found.states, found)
            return found
