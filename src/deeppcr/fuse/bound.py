"""The kernels of a step with what they read in one solve, and where they note how it went.

Shapes: L steps, B rows of D numbers, R lanes of K numbers (R * K = B * D).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..launch import aligned, compiles_ahead, repeat
from .compiled import Kernels
from .program import Program
from .tile_program import TileProgram

#: Lanes of a program: of elementwise steps, of narrow ones.
_LANES = {True: 128, False: 32}
#: What a lane reads is on its way so many steps before: of few numbers, and of many.
_STAGES, _FEW_STAGES, _MANY = 8, 4, 3
#: So many numbers take no longer to be copied to the host than one.
_FEW = 4096
#: Of a step so many ways are remembered in which what it reads may lie.
_MOST_SHAPES = 64


class Notes:
    """What the kernels write of R lanes in so many passes, in one piece of memory.

    Attributes:
        corrections: [passes, R], in units of the tolerance
        residual: [R], the largest miss at the last pass of a lane
        taken: [R], passes of a lane; negative where rounding is all that is left
        known: [B], the steps of a row up to the last of which states have digits, where somebody asked for that
        unsettled: [passes + 3], lanes that were not settled after each; and at last those that are as exact as rounding lets them, those
            in which something that was large may hide what came after it, and whether it does, where somebody looked
    """

    _copied: Tensor | None

    def __init__(self, limit: int, rows: int, device: torch.device, batch: int = 0):
        """``batch``: B where ``known`` is asked for, else 0."""
        self._limit, self._rows, self._batch, self._copied = limit, rows, batch, None
        self._places = _places(limit, rows, batch)
        self.memory: Tensor = torch.empty(self._places[-1] + limit + 3, dtype=torch.float32, device=device)

    def counts(self) -> list[int]:
        """``unsettled``, waited for; and all else that is little, since somebody may ask for it.

        Not by way of pinned memory: to let go of that while a graph is captured ends the capture.
        """
        few = self.memory.numel() <= _FEW
        self._copied = (self.memory if few else self.memory[self._places[3] :]).cpu()
        # By NumPy: the host has nothing else to do now, and a view of PyTorch's takes as long as a launch.
        return self._copied.numpy()[-(self._limit + 3) :].view("int32").tolist()

    def on_host(self) -> Notes:
        """The same in the memory of the host: one copy, where each operation on a GPU would take longer than all of them here. Who asks has
        waited for ``counts``, or for nothing that is still to be written."""
        if self._copied is None or self._copied.numel() < self.memory.numel():
            self._copied = self.memory.cpu()
        return self.moved_to(self._copied)

    def moved_to(self, memory: Tensor) -> Notes:
        """The same in a copy of the memory."""
        made = object.__new__(Notes)  # by ``copy`` it takes as long as the copy of the memory
        made.__dict__.update(self.__dict__, memory=memory, _copied=memory if memory is self._copied else None)
        return made

    def rough(self, rows: int) -> list[bool]:
        """Of each of so many rows, whether rounding is all that is left in some lane; looked at on the host."""
        first = self._places[1]
        taken = self.on_host().memory.numpy()[first : first + self._rows].view("int32")
        return (taken.reshape(rows, -1).min(1) < 0).tolist()

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
    def known(self) -> Tensor | None:
        return self.memory[self._places[2] :][: self._batch].view(torch.int32) if self._batch else None

    @property
    def unsettled(self) -> Tensor:
        return self.memory[self._places[3] :].view(torch.int32)


@lru_cache(maxsize=1024)
def _places(limit: int, rows: int, batch: int) -> tuple[int, int, int, int]:
    """Where residuals, passes, known steps and what is not settled begin."""
    every, lanes = aligned_size(limit * rows), aligned_size(rows)
    return every, every + lanes, every + 2 * lanes, every + 2 * lanes + aligned_size(batch)


class Shape:
    """What runs on tensors that lie alike have in common.

    Attributes:
        rows: R
        copied: the bases that kernels cannot read as they lie
        strides: of every leaf how far apart its steps, rows and channels are, and where the first one is
        kinds: what the kernels are compiled for beside their constants
        cuts: into chunks, by what they depend on
        of_runs: what every run has as its own
        ready: whether all kernels of a run were compiled, without those of gradients, and with them
        eps: of the numbers that the kernels compute with
        fits: whether the kernels of gradients are known to fit the device
        outputs: where a backward pass writes; None before the first
    """

    length: int
    rows: int

    def __init__(self, kernels: Kernels, initial: Tensor, bases: list[Tensor], length: int):
        program = kernels.program
        self.length, self.rows = length, initial.numel() // program.width
        self.tiled: bool = program.parts.tiled
        self.block: int = _LANES[program.elementwise]
        self.warps: int = max(1, self.block // 32)
        moving = sum(read.value.level for read in program.reads)
        self.stages = _STAGES if moving < _MANY else _FEW_STAGES
        self.copied: tuple[int, ...] = tuple(
            [index for index, (tensor, base) in enumerate(zip(bases, program.parts.bases, strict=True))
             if tensor.is_neg() or not _lies_side_by_side(tensor, base.per_step + base.per_row)]
        )  # fmt: skip
        bases = self.read_from(bases)
        strides: list[int] = []
        for leaf in program.leaves:
            base = bases[leaf.base]
            step = base.stride(0) if leaf.per_step else 0
            row = base.stride(int(leaf.per_step)) if leaf.per_row else 0
            strides += (step, row, leaf.spacing, leaf.offset)
        self.strides: tuple[int, ...] = tuple(strides)
        self.kinds: tuple[Any, ...] = _kinds(initial, bases)
        self.eps: float = torch.finfo(program.dtype).eps
        self.cuts: dict[tuple[Any, ...], Any] = {}
        self.outputs: Any = None
        self.fits: bool = False
        self.ready: dict[bool, bool] = {False: False, True: False}
        self.of_runs: dict[str, Any] = {
            "kernels": kernels, "program": program, "length": length, "device": initial.device, "rows": self.rows,
            "strides": self.strides, "block": self.block, "warps": self.warps, "stages": self.stages,
        }  # fmt: skip

    def read_from(self, bases: list[Tensor]) -> list[Tensor]:
        """The bases, or copies of them, in which the numbers of a step and row lie side by side."""
        if not self.copied:
            return bases
        # Kernels read memory as it is: what is stored as its negative is copied, too.
        return [
            base.detach().resolve_neg().contiguous() if at in self.copied else base for at, base in enumerate(bases)
        ]

    @staticmethod
    def of(kernels: Kernels, initial: Tensor, bases: list[Tensor], length: int) -> Shape:
        """
        Args:
            bases: as they were given
        """
        key = (
            length, initial.shape, initial.device, _kinds(initial, bases),
            *[(base.stride(), base.shape, base.is_neg()) for base in bases],
        )  # fmt: skip
        found = kernels.shapes.get(key)
        if found is None:
            if len(kernels.shapes) >= _MOST_SHAPES:
                kernels.shapes.clear()
            found = kernels.shapes[key] = Shape(kernels, initial, bases, length)
        return found


def _kinds(initial: Tensor, bases: list[Tensor]) -> tuple:
    return initial.dtype, tuple([(base.dtype, base.data_ptr() % 16 == 0) for base in bases])


class BoundKernels:
    """The kernels of a step, and what they read.

    Args:
        initial: [B, D]
        bases: what the kernels read from, [L, rows, ...] each, without L or rows where they are the same for all
        shape: what it has in common with other runs, where that is known
    """

    initial: Tensor
    bases: list[Tensor]
    shape: Shape
    length: int
    rows: int
    block: int
    warps: int
    stages: int
    strides: tuple[int, ...]
    kernels: Kernels
    program: Program | TileProgram
    device: torch.device

    def __init__(self, kernels: Kernels, initial: Tensor, bases: list[Tensor], length: int, shape: Shape | None = None):
        if not initial.is_contiguous() or initial.is_neg() or (initial.requires_grad and torch.is_grad_enabled()):
            initial = initial.detach().resolve_neg().contiguous()
        initial = aligned(initial)
        if shape is None:
            kernels.roll  # noqa: B018 - before anybody asks for numbers, of which its source may bring more
            shape = Shape.of(kernels, initial, bases, length)
        assert shape.length == length, "launches that are made again are those of as many steps"
        self.__dict__.update(shape.of_runs, shape=shape, initial=initial, bases=shape.read_from(bases))

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        """Of every leaf the tensor that it is read from. Launches that are made again have no need of it."""
        return tuple([self.bases[leaf.base] for leaf in self.program.leaves])

    def kinds(self, *sizes: int) -> tuple[Any, ...]:
        """What the kernels are compiled for beside their constants."""
        return (*self.shape.kinds, any(abs(size) >= 2**31 for size in (*self.strides, *sizes)))

    def repeat(self, key: tuple[Any, ...], tensors: tuple[Tensor, ...], make: Any) -> None:
        """Make launches, by those of an earlier run that was alike where there was one."""
        if compiles_ahead():
            make()
            return
        tensors = (self.initial, self.kernels.numbers(self.device), *self.bases, *tensors)
        repeat((self.shape, *key), tensors, make)


def _lies_side_by_side(tensor: Tensor, lead: int) -> bool:
    """Whether the numbers behind a tensor's first dimensions lie side by side."""
    expected = 1
    for dim in range(tensor.ndim - 1, lead - 1, -1):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != expected:
            return False
        expected *= tensor.shape[dim]
    return True


def aligned_size(size: int) -> int:
    """So much memory that what comes after it begins at a multiple of 16 bytes, as kernels are compiled for."""
    return -(-size // 4) * 4
