"""Running the kernels of a step: all chunks at once until they join, or one step after the other; and backwards.

Shapes: L steps in N chunks of C, B rows of D numbers, R lanes of K numbers (R * K = B * D).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..launch import aligned, launch, next_power_of_2
from ..tolerance import Tolerance
from .compiled import Kernels

#: Passes that chunks of a size are given: no more than this, and no more than together take half as long as a loop.
_MOST_PASSES = 16
_FEWEST_PASSES = 4
#: So many times chunks are rolled out from the ends of those before them, where corrections from the guess lead astray.
_ROLLS = 8
#: By so much chunks grow where the passes did not suffice.
_GROWTH = 4
#: Lanes of a program: of elementwise steps, of narrow ones.
_LANES = {True: 128, False: 32}
#: What a lane reads is on its way so many steps before: of few numbers, and of many.
_STAGES, _FEW_STAGES, _MANY = 8, 4, 3
#: So many lanes keep the device busy.
_BUSY = 2**18


@dataclass
class Kind:
    """What is known of solves that differ in nothing but numbers.

    Attributes:
        chunk: steps of a chunk that sufficed the last time, or are to be tried next; the whole length where only the loop did
        rolls: how often chunks are rolled out before they are corrected
        passes: that sufficed the last time
    """

    length: int
    chunk: int
    rolls: int = 0
    passes: int = 3

    def try_harder(self, width: int) -> bool:
        """Where the passes did not suffice: what to try next, if it is not to be the loop."""
        larger = _GROWTH * self.chunk
        if self.rolls == 0:
            self.rolls = _ROLLS
        elif _FEWEST_PASSES * larger * (1 + width) <= self.length:
            self.chunk, self.rolls = larger, 0
        else:
            self.chunk = self.length
        self.passes = 3
        return self.chunk < self.length


def first_chunk(length: int, rows: int, elementwise: bool) -> int:
    """How many steps a chunk has, before anything is known of how a step converges.

    Of an elementwise step memory is what counts: enough lanes to keep it busy. A narrow one is bound by the time of one step after
    the other, those inside a chunk and chunks at a join; and large chunks make marginal loops converge.
    """
    busy = next_power_of_2(max(1, length * rows // _BUSY))
    least = 64 if elementwise else min(256, next_power_of_2(max(1, math.isqrt(length))))
    return min(length, max(least, busy))


@dataclass(frozen=True)
class Found:
    """What a run came to.

    Attributes:
        states: [L, B, D]
        corrections: [passes, R], in units of the tolerance
        taken, residual: [R], passes of each lane, and its largest miss at the last of them
        passes: how many there were; 0 where all was one loop
        chunk: steps of a chunk
        left: lanes that had to be taken one step after the other
    """

    states: Tensor
    corrections: Tensor
    taken: Tensor
    residual: Tensor
    passes: int
    chunk: int
    left: int


@dataclass(frozen=True)
class Placed:
    """A leaf where it lies: how far apart its steps, rows and channels are."""

    tensor: Tensor
    strides: tuple[int, int, int]


def place(kernels: Kernels, leaves: list[Tensor], shape: torch.Size) -> list[Placed]:
    """Leaves as the kernels read them: the numbers of a row side by side, or, of an elementwise step, evenly spaced.

    Args:
        leaves: [L, rows, ...] each, without L or rows where they are the same for all
        shape: of the state of a row
    """
    program, placed = kernels.program, []
    for leaf, tensor in zip(program.leaves, leaves, strict=True):
        lead = leaf.per_step + leaf.per_row
        if tensor.device != leaves[0].device and tensor.ndim == 0:
            tensor = tensor.to(leaves[0].device)
        strides = [tensor.stride(0) if leaf.per_step else 0, tensor.stride(lead - 1) if leaf.per_row else 0]
        if program.elementwise:
            channel = _spacing(tensor, lead, shape)
            if channel is None:
                tensor = tensor.expand(*tensor.shape[:lead], *shape).contiguous()
                strides = [tensor.stride(0) if leaf.per_step else 0, tensor.stride(lead - 1) if leaf.per_row else 0]
                channel = 1
            strides.append(channel)
        else:
            if not _is_side_by_side(tensor, lead):
                tensor = tensor.contiguous()
                strides = [tensor.stride(0) if leaf.per_step else 0, tensor.stride(lead - 1) if leaf.per_row else 0]
            strides.append(0)
        placed.append(Placed(tensor, tuple(strides)))  # pyright: ignore[reportArgumentType]
    return placed


def _spacing(tensor: Tensor, lead: int, shape: torch.Size) -> int | None:
    """How far apart the channels lie: 0 where one number serves all, None where they are not evenly spaced."""
    inner = tensor.shape[lead:]
    while len(inner) > len(shape) and inner[0] == 1:  # the rows' own dimensions
        inner, lead = inner[1:], lead + 1
    if inner.numel() == 1:
        return 0
    if inner != shape:
        return None
    spacing = tensor.stride(-1)
    for dim in range(tensor.ndim - 2, lead - 1, -1):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != tensor.stride(dim + 1) * tensor.shape[dim + 1]:
            return None
    return spacing


def _is_side_by_side(tensor: Tensor, lead: int) -> bool:
    expected = 1
    for dim in range(tensor.ndim - 1, lead - 1, -1):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != expected:
            return False
        expected *= tensor.shape[dim]
    return True


class Run:
    """One solve: its memory, and the launches on it."""

    def __init__(self, kernels: Kernels, initial: Tensor, leaves: list[Placed], length: int):
        program = kernels.program
        self.kernels, self.program, self.length = kernels, program, length
        self.initial = aligned(initial.detach().contiguous())
        self.leaves = leaves
        self.rows = initial.numel() // program.width  # R
        self.device = initial.device
        self.block = _LANES[program.elementwise]
        self.warps = max(1, self.block // 32)
        moving = sum(read.value.level for read in program.reads)
        self.stages = _STAGES if moving < _MANY else _FEW_STAGES

    def pointers(self) -> tuple[Tensor, ...]:
        return tuple(each.tensor for each in self.leaves)

    def strides(self) -> tuple[int, ...]:
        return tuple(number for each in self.leaves for number in each.strides)

    def kinds(self, *sizes: int) -> tuple:
        """What the kernels are compiled for beside their constants."""
        dtypes = tuple((each.tensor.dtype, each.tensor.data_ptr() % 16 == 0) for each in self.leaves)
        large = tuple(abs(size) >= 2**31 for size in (*self.strides(), *sizes))
        return self.initial.dtype, dtypes, large

    def new_states(self) -> Tensor:
        return self.initial.new_empty(self.length, *self.initial.shape)

    def loop(self, states: Tensor, found: Found | None = None) -> None:
        """One step after the other; of a run that was found, the lanes that are not settled, from what is exact on."""
        nothing = self.kernels.numbers(self.device)
        first = 0 if found is None else min(found.passes * found.chunk, self.length - 1)
        start = states[first - 1] if first else self.initial
        memory = (nothing, nothing, nothing, nothing, nothing if found is None else found.corrections)
        passes = 0 if found is None else found.passes
        self._launch_roll(
            start, start, states, memory, (0, first, self.length, 1, self.length - first, passes), False, True
        )

    def _roll(
        self, guess: Tensor | None, states: Tensor, memory: tuple[Tensor, ...], chunk: int, chunks: int, passes: int, *, product: bool
    ) -> None:  # fmt: skip
        step = 0 if guess is None else self.initial.numel()
        sizes = (step, 0, chunk, chunks, chunk, passes)
        self._launch_roll(self.initial, self.initial if guess is None else guess, states, memory, sizes, product, False)

    def _launch_roll(
        self, initial: Tensor, guess: Tensor, states: Tensor, memory: tuple[Tensor, ...], sizes: tuple[int, ...],
        product: bool, whole: bool,
    ) -> None:  # fmt: skip
        step, first, chunk, chunks, turns, passes = sizes
        sizes = (step, self.rows, self.program.channels, self.length, first, chunk, chunks, turns, passes)
        kernel = self.kernels.forward.roll  # before the numbers, of which its source may bring more
        arguments = (
            initial, self.kernels.numbers(self.device), guess, states, *memory, *self.pointers(), *self.strides(), *sizes,
        )  # fmt: skip
        programs = -(-chunks * self.rows // self.block)
        constants = (product, whole, self.block, self.stages)
        integers = (*self.kinds(*sizes), initial.data_ptr() % 16, guess.dtype, guess.data_ptr() % 16)
        launch(kernel, programs, arguments, constants, warps=self.warps, integers=integers)

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
        real = self.program.dtype
        notes = torch.zeros(limit * (rows + 1) + 2 * rows, dtype=torch.float32, device=self.device)
        corrections, residual, taken, unsettled = notes.split([limit * rows, rows, rows, limit])
        taken, unsettled = taken.view(torch.int32), unsettled.view(torch.int32)
        states = self.new_states()
        if chunks == 1:
            self.loop(states)
            return Found(states, corrections.view(limit, rows), taken, residual, 0, chunk, 0)
        groups = min(64, next_power_of_2(max(1, math.isqrt(2 * chunks))))
        lanes = max(1, min(128 // groups, next_power_of_2(rows)))
        per_chunk, per_group = width * rows, (width * width + 2 * width) * rows
        whole = torch.empty(chunks * per_chunk * (3 + width) + groups * per_group, dtype=real, device=self.device)
        starts, ends, sizes, products, maps = whole.split(
            [chunks * per_chunk] * 3 + [chunks * per_chunk * width, groups * per_group]
        )
        memory = (starts, ends, products, sizes, corrections)
        for _ in range(kind.rolls):
            self._roll(guess, states, memory, chunk, chunks, 0, product=False)
            guess, states = states, self.new_states() if guess is None else guess
        sizes_of_join = (rows, chunks, groups, -(-chunks // groups))
        how = (float(tolerance.atol), float(tolerance.rtol), int(tolerance.local))
        done, wanted = 0, limit if most is not None else min(limit, kind.passes)
        while True:
            for passes in range(done, wanted):
                self._roll(guess, states, memory, chunk, chunks, passes, product=True)
                launch(
                    self.kernels.forward.join, -(-rows // lanes),
                    (starts, ends, products, sizes, maps, corrections, unsettled, taken, residual, *sizes_of_join, passes, *how),
                    (groups, lanes), warps=max(1, groups * lanes // 32), integers=(real, *(s >= 2**31 for s in sizes_of_join)),
                )  # fmt: skip
            done = wanted
            left = [0] if most is not None else unsettled[:done].tolist()
            # After as many passes as there are chunks, each has started from where the one before it ended.
            over = 0 in left or done >= chunks
            if over or done >= limit:
                passes = left.index(0) + 1 if 0 in left and most is None else done
                return Found(
                    states, corrections.view(limit, rows), taken, residual, passes, chunk, 0 if over else left[-1]
                )
            wanted = min(limit, done + 2)

    def limit(self, chunk: int) -> int:
        """Passes that are worth it: together they take half of the dependent steps of a loop, in which steps have no tangents."""
        turns = chunk * (1 + self.program.width)
        return max(_FEWEST_PASSES, min(_MOST_PASSES, self.length // (2 * turns)))


def solve(run: Run, kind: Kind, tolerance: Tolerance, guess: Tensor | None = None) -> Found:
    """In parallel, with chunks as large as it takes; where even large ones do not join, the loop finishes the rest.

    What worked is noted in ``kind``, for the next time.
    """
    while True:
        found = run.in_parallel(kind, tolerance, guess)
        if not found.left:
            kind.passes = max(2, found.passes)
            return found
        if not kind.try_harder(run.program.width):
            run.loop(found.states, found)
            return found


def pull_back(run: Run, states: Tensor, given: Tensor, chunk: int) -> tuple[Tensor, list[Tensor | None]]:
    """The cotangents of the initial state [B, D], and of every floating leaf, as the leaves were given; None for others.

    Args:
        states, given: [L, B, D], the states and their cotangents
    """
    program, width, rows = run.program, run.program.width, run.rows
    chunk = min(chunk, run.length)
    chunks = -(-run.length // chunk)
    kernels, real = run.kernels.backward, program.dtype
    given = aligned(given.contiguous())
    adjoints = torch.empty(chunks, width, rows, dtype=real, device=run.device)
    products = torch.empty(chunks if chunks > 1 else 0, width, width, rows, dtype=real, device=run.device)
    of_initial = torch.empty_like(run.initial)
    batch = rows // program.channels
    outputs = []
    for leaf in program.leaves:
        count = program.channels if program.elementwise else math.prod(leaf.shape)
        real_leaf = leaf.dtype.is_floating_point
        outputs.append(
            torch.empty(run.length if leaf.per_step else chunks, batch, count, dtype=real, device=run.device)
            if real_leaf else adjoints
        )  # fmt: skip
    step = run.initial.numel()
    sizes = (step, rows, program.channels, run.length, chunk, chunks)
    programs = -(-chunks * rows // run.block)

    def sweep(as_map: bool) -> None:
        arguments = (
            run.initial, run.kernels.numbers(run.device), states, given, adjoints, products, of_initial,
            *run.pointers(), *outputs, *run.strides(), *sizes,
        )  # fmt: skip
        launch(
            kernels.sweep,
            programs,
            arguments,
            (as_map, run.block, run.stages),
            warps=run.warps,
            integers=run.kinds(*sizes),
        )

    if chunks > 1:
        sweep(True)
        groups = min(64, next_power_of_2(max(1, math.isqrt(2 * chunks))))
        lanes = max(1, min(128 // groups, next_power_of_2(rows)))
        maps = torch.empty(groups * (width * width + 2 * width) * rows, dtype=real, device=run.device)
        sizes_of = (step, rows, program.channels, run.length, chunks, groups, -(-chunks // groups))
        launch(
            kernels.chain, -(-rows // lanes), (products, adjoints, given, maps, *sizes_of), (groups, lanes),
            warps=max(1, groups * lanes // 32), integers=(real, given.dtype, *(s >= 2**31 for s in sizes_of)),
        )  # fmt: skip
    else:
        last = given[-1].reshape(batch, width, program.channels)
        adjoints.copy_(last.permute(1, 0, 2).reshape(1, width, rows))
    sweep(False)
    return of_initial, [
        _summed(output, each.tensor, leaf.per_step, leaf.per_row) if leaf.dtype.is_floating_point else None
        for output, each, leaf in zip(outputs, run.leaves, program.leaves, strict=True)
    ]


def _summed(found: Tensor, like: Tensor, per_step: bool, per_row: bool) -> Tensor:
    """[L or N, B, numbers] to the shape of a leaf."""
    if not per_step:
        found = found.sum(0)
    if not per_row:
        found = found.sum(int(per_step))
    lead = per_step + per_row
    inner = like.shape[lead:]
    if found.shape[lead:].numel() != inner.numel():  # one number served all channels
        found = found.sum(-1) if inner.numel() == 1 else found
    return found.reshape(like.shape).to(like.dtype)


class Apply(torch.autograd.Function):
    """The states [L, B, D] of a run as a function of the initial state [B, D] and of the leaves."""

    @staticmethod
    def forward(ctx: Any, found: Found, run: Run, initial: Tensor, *leaves: Tensor):
        ctx.run, ctx.chunk = run, found.chunk
        ctx.save_for_backward(found.states)
        return found.states.view_as(found.states)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):
        (states,) = ctx.saved_tensors
        of_initial, of_leaves = pull_back(ctx.run, states, grad_outputs[0], ctx.chunk)
        return None, None, of_initial, *of_leaves
