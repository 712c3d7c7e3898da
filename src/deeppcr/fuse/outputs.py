"""Where cotangents of what a step reads are written.

Shapes: L steps in N chunks, B rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launch import cdiv, launch
from . import support
from .bound import BoundKernels
from .parts import Leaf

#: What is the same for all steps and rows.
_OF_ALL = (False, False)
#: Of a program that sums it: parts at a time, columns, and warps.
_PARTS, _COLUMNS, _WARPS = 64, 32, 4


class Outputs:
    """Where cotangents of what is read are written, of runs of one shape.

    What belongs to one row at one step goes straight to its place in the cotangent of its base, where leaves of the base do not
    overlap. The rest is written by every row, and at every step or by every chunk, and summed: that of all bases side by side, so that
    it is one sum. A base that its leaves cover, each of its numbers once, has there one place; else its leaves have one each, and are
    added up.

    Attributes:
        strides: of every leaf how far apart steps (or chunks), rows and channels are, and where the first one is
    """

    def __init__(self, run: BoundKernels):
        program = run.program
        self._batch, self._length = run.rows // program.channels, run.length
        self._direct: dict[int, bool] = {}  # of a base, whether it is written in all of its places
        self._summed: dict[tuple[bool, bool], int] = {}  # by what is per step and per row: numbers side by side
        self._places: dict[int, tuple[tuple[bool, bool], int]] = {}  # of a base, where it begins among these
        self._added: list[tuple[Leaf, int]] = []  # and of a leaf
        self._slots: list[int | tuple[bool, bool] | None] = []  # of every leaf: its base, or which sum
        inside: list[tuple[int, int]] = []  # of every leaf, its channels' spacing and its offset
        for leaf in program.leaves:
            base, kind = run.bases[leaf.base], (leaf.per_step, leaf.per_row)
            apart, whole = program.parts.shown[leaf.base]
            alone = leaf.per_step and (leaf.per_row or self._batch == 1)  # of a single row there is no sum over rows
            if not leaf.dtype.is_floating_point:  # nothing is written
                self._slots.append(None)
                inside.append((0, 0))
            elif alone and apart:
                self._direct[leaf.base] = whole
                self._slots.append(leaf.base)
                inside.append((leaf.spacing, leaf.offset))
            else:
                begin = end = self._summed.get(kind, 0)
                if apart and whole:
                    _, begin = self._places.setdefault(leaf.base, (kind, begin))
                    inside.append((leaf.spacing, begin + leaf.offset))
                    end = max(end, begin + base.shape[sum(kind) :].numel())
                else:
                    self._added.append((leaf, begin))
                    # In tiles strides stand in the source: as much room as the base has.
                    tiled = program.parts.tiled
                    inside.append((1, begin + leaf.offset) if tiled else (1, begin))
                    end = begin + (base.shape[sum(kind) :].numel() if tiled else program.channels)
                self._summed[kind] = end
                self._slots.append(kind)
        strides: list[int] = []
        for slot, numbers in zip(self._slots, inside, strict=True):
            if slot is None:
                strides += (0, 0, *numbers)
            elif isinstance(slot, tuple):
                strides += (self._batch * self._summed[slot], self._summed[slot], *numbers)
            else:
                row = run.bases[slot].shape[1:].numel() // self._batch
                strides += (self._batch * row, row, *numbers)
        self.strides: tuple[int, ...] = tuple(strides)
        #: Of bases that are one sum: how their numbers lie in it.
        self._views = {at: torch.empty(run.bases[at].shape, device="meta").stride()
                       for at, (kind, _) in self._places.items() if not any(kind)}  # fmt: skip

    @staticmethod
    def of(run: BoundKernels) -> Outputs:
        shape = run.shape
        if shape.outputs is None:
            shape.outputs = Outputs(run)
        return shape.outputs

    def kept(self, run: BoundKernels, chunks: int) -> list[Tensor | None]:
        """Tensors to be written: of bases, [steps or chunks, rows, numbers] to be summed, and the sum of what is the same for all. None
        for what is summed up by a kernel, and nobody else reads."""
        found: list[Tensor | None] = []
        for index, whole in self._direct.items():
            base = run.bases[index]
            found.append((torch.empty if whole else torch.zeros)(base.shape, dtype=base.dtype, device=run.device))
        zeroed = bool(self._added) and run.shape.tiled
        for kind in self._summed:
            new = torch.zeros if zeroed else torch.empty
            made = kind != _OF_ALL or zeroed
            found.append(new(self._parts(kind, chunks), dtype=run.program.dtype, device=run.device) if made else None)
        if _OF_ALL in self._summed:
            found.append(torch.empty(self._summed[_OF_ALL], dtype=run.program.dtype, device=run.device))
        return found

    def memory(self, run: BoundKernels, chunks: int, kept: list[Tensor | None]) -> list[Tensor]:
        """The same, all of it."""
        return [
            torch.empty(self._parts(_OF_ALL, chunks), dtype=run.program.dtype, device=run.device)
            if each is None
            else each
            for each in kept
        ]

    def _parts(self, kind: tuple[bool, bool], chunks: int) -> tuple[int, int, int]:
        """The shape of what is summed."""
        return self._length if kind[0] else chunks, self._batch, self._summed[kind]

    def pointers(self, run: BoundKernels, memory: list[Tensor]) -> list[Tensor]:
        """Of every leaf the tensor that it is written to."""
        where = self._where(memory)
        return [run.initial if slot is None else where[slot] for slot in self._slots]

    def _where(self, memory: list[Tensor]) -> dict[int | tuple[bool, bool], Tensor]:
        """By base, and by which sum."""
        return dict(zip((*self._direct, *self._summed), memory, strict=False))

    def sum_up(self, memory: list[Tensor]) -> None:
        """What is the same for all steps and rows: by a kernel, which is launched with all others."""
        size = self._summed.get(_OF_ALL)
        if size is not None:
            written = self._where(memory)[_OF_ALL]
            arguments = (written, memory[-1], written.shape[0] * written.shape[1], size)
            integers = (written.dtype, written.numel() >= 2**31)
            launch(
                support.sum_parts, cdiv(size, _COLUMNS), arguments, (_PARTS, _COLUMNS), warps=_WARPS, integers=integers
            )

    def of_bases(self, run: BoundKernels, kept: list[Any]) -> list[Tensor | None]:
        """One for each base, in its shape."""
        found: dict[int, Tensor] = dict(zip(self._direct, kept, strict=False))
        sums = {}
        for kind, written in zip(self._summed, kept[len(self._direct) :], strict=False):
            over = [dim for dim, each in enumerate(kind) if not each]
            sums[kind] = kept[-1] if kind == _OF_ALL else written.sum(over) if over else written
        for index, (kind, begin) in self._places.items():
            base = run.bases[index]
            if index in self._views:  # in one view instead of two
                part = sums[kind].as_strided(base.shape, self._views[index], begin)
            else:
                part = sums[kind].narrow(-1, begin, base.shape[sum(kind) :].numel()).reshape(base.shape)
            found[index] = part if part.dtype is base.dtype else part.to(base.dtype)
        if self._added:
            self._add_up(run, sums, found)
        return [found.get(index) for index in range(len(run.bases))]

    def _add_up(self, run: BoundKernels, sums: dict[tuple[bool, bool], Tensor], found: dict[int, Tensor]) -> None:
        """Leaves that share numbers of their base, or leave some out."""
        channels, totals = run.program.channels, {}
        for leaf, begin in self._added:
            base, kind = run.bases[leaf.base], (leaf.per_step, leaf.per_row)
            total = totals.get(leaf.base)
            if total is None:
                shape = (*base.shape[: sum(kind)], base.shape[sum(kind) :].numel())
                total = totals[leaf.base] = torch.zeros(shape, dtype=run.program.dtype, device=run.device)
            if run.shape.tiled:
                total += sums[kind].narrow(-1, begin, total.shape[-1])
                continue
            of_leaf = sums[kind].narrow(-1, begin, channels)
            if leaf.spacing == 0:
                total[..., leaf.offset] += of_leaf.sum(-1)
            else:
                last = leaf.offset + leaf.spacing * (channels - 1)
                total[..., leaf.offset : last + 1 : leaf.spacing] += of_leaf
        for index, total in totals.items():
            base = run.bases[index]
            found[index] = total.reshape(base.shape).to(base.dtype)
