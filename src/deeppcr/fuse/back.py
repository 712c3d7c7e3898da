"""Running the kernels of a step backwards: cotangents of all that it read.

Shapes: L steps in N chunks of C, B rows of D numbers, R lanes of K numbers (R * K = B * D).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launch import aligned, kinds, launch
from ..runtime import check_backward
from ..sequence.layout import Layout
from . import tiled
from .joints import parts_of
from .parts import Leaf
from .run import Found, Run, first_chunk, groups_of, parts_of_workspace


def pull_back(run: Run, states: Tensor, given: Tensor, chunk: int) -> tuple[Tensor, list[Tensor | None]]:
    """The cotangents of the initial state [B, D], and of every floating base, in its shape; None for others.

    Args:
        states, given: [L, B, D], the states and their cotangents
    """
    program, width, rows = run.program, run.program.width, run.rows
    run.kernels.sweep  # noqa: B018 - before anybody asks for numbers, of which its source may bring more
    chunk = min(chunk, run.length)
    chunks = -(-run.length // chunk)
    given = aligned(given.resolve_neg().contiguous())
    outputs = Outputs.of(run)
    memory = outputs.memory(run, chunks)
    of_initial = torch.empty_like(run.initial)
    place = tiled if run.shape.tiled else _Lanes
    parts = place.backward_sizes(width, rows, chunks)
    workspace = torch.empty(sum(parts), dtype=program.dtype, device=run.device)

    def sweep(as_map: bool) -> None:
        place.sweep(run, states, given, workspace.split(parts), of_initial, outputs, memory, chunk, chunks, as_map)

    def all_of_it() -> None:
        sweep(True)
        place.chain(run, given, workspace.split(parts), chunks)
        sweep(False)

    if chunks > 1:
        run.repeat(("back", chunk), (states, given, workspace, of_initial, *memory), all_of_it)
    else:
        batch = rows // program.channels
        last = given[-1].reshape(batch, width, program.channels)
        last = last.permute(0, 2, 1) if run.shape.tiled else last.permute(1, 0, 2)
        workspace[: width * rows].view(last.shape).copy_(last)
        sweep(False)
    return of_initial, outputs.of_bases(run, memory)


class _Lanes:
    """The launches of lanes; ``tiled`` has those of tiles."""

    @staticmethod
    def backward_sizes(width: int, rows: int, chunks: int) -> list[int]:
        return parts_of_workspace(width, rows, chunks, groups_of(chunks, rows)[0], 1)

    @staticmethod
    def sweep(
        run: Run, states: Tensor, given: Tensor, workspace: tuple[Tensor, ...], of_initial: Tensor, outputs: Outputs,
        memory: list[Tensor], chunk: int, chunks: int, as_map: bool,
    ) -> None:  # fmt: skip
        adjoints, products, _ = workspace
        into = outputs.pointers(run, memory)
        sizes = (run.initial.numel(), run.rows, run.program.channels, run.length, chunk, chunks)
        arguments = (
            run.initial, run.kernels.numbers(run.device), states, given, adjoints, products, of_initial,
            *run.pointers, *into, *run.strides, *outputs.strides, *sizes,
        )  # fmt: skip
        launch(
            run.kernels.sweep, -(-chunks * run.rows // run.block), arguments, (as_map, run.block, run.stages),
            warps=run.warps, integers=(*run.kinds(*sizes, *outputs.strides), kinds(tuple(into))),
        )  # fmt: skip

    @staticmethod
    def chain(run: Run, given: Tensor, workspace: tuple[Tensor, ...], chunks: int) -> None:
        adjoints, products, maps = workspace
        groups, lanes = groups_of(chunks, run.rows)
        sizes = (run.initial.numel(), run.rows, run.program.channels, run.length, chunks, groups, -(-chunks // groups))
        for part in parts_of(run.program.width):
            launch(
                run.kernels.joints.chain, -(-run.rows // lanes), (products, adjoints, given, maps, *sizes), (part, groups, lanes),
                warps=max(1, groups * lanes // 32),
                integers=(run.program.dtype, given.dtype, *(size >= 2**31 for size in sizes)),
            )  # fmt: skip


class Outputs:
    """Where cotangents of what is read are written, of runs of one shape.

    What belongs to one row at one step goes straight to its place in the cotangent of its base, where leaves of the base do not
    overlap. The rest is written by every row, and at every step or by every chunk, and summed: that of all bases side by side, so that
    it is one sum. A base that its leaves cover, each of its numbers once, has there one place; else its leaves have one each, and are
    added up.

    Attributes:
        strides: of every leaf how far apart steps (or chunks), rows and channels are, and where the first one is
    """

    def __init__(self, run: Run):
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
            apart, whole = program.are_apart(leaf.base), program.covers_whole(leaf.base)
            if not leaf.dtype.is_floating_point:  # nothing is written
                self._slots.append(None)
                inside.append((0, 0))
            elif all(kind) and apart:
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
                row = run.bases[slot].shape[2:].numel()
                strides += (self._batch * row, row, *numbers)
        self.strides = tuple(strides)

    @staticmethod
    def of(run: Run) -> Outputs:
        shape = run.shape
        if shape.outputs is None:
            shape.outputs = Outputs(run)
        return shape.outputs

    def memory(self, run: Run, chunks: int) -> list[Tensor]:
        """Tensors to be written: of bases, and [steps or chunks, rows, numbers] to be summed."""
        found = []
        for index, whole in self._direct.items():
            base = run.bases[index]
            found.append((torch.empty if whole else torch.zeros)(base.shape, dtype=base.dtype, device=run.device))
        for (per_step, _), size in self._summed.items():
            parts = self._length if per_step else chunks
            new = torch.zeros if self._added and run.shape.tiled else torch.empty
            found.append(new(parts, self._batch, size, dtype=run.program.dtype, device=run.device))
        return found

    def pointers(self, run: Run, memory: list[Tensor]) -> list[Tensor]:
        """Of every leaf the tensor that it is written to."""
        where = dict(zip((*self._direct, *self._summed), memory, strict=True))
        return [run.initial if slot is None else where[slot] for slot in self._slots]

    def of_bases(self, run: Run, memory: list[Tensor]) -> list[Tensor | None]:
        """One for each base, in its shape."""
        found: dict[int, Tensor] = dict(zip(self._direct, memory, strict=False))
        sums = {}
        for kind, written in zip(self._summed, memory[len(self._direct) :], strict=True):
            over = [dim for dim, each in enumerate(kind) if not each]
            sums[kind] = written.sum(over) if over else written
        for index, (kind, begin) in self._places.items():
            base = run.bases[index]
            part = sums[kind].narrow(-1, begin, base.shape[sum(kind) :].numel())
            found[index] = (part if part.shape == base.shape else part.reshape(base.shape)).to(base.dtype)
        if self._added:
            self._add_up(run, sums, found)
        return [found.get(index) for index in range(len(run.bases))]

    def _add_up(self, run: Run, sums: dict[tuple[bool, bool], Tensor], found: dict[int, Tensor]) -> None:
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


class Apply(torch.autograd.Function):
    """The leaves of the states of a run, [L, *batch, *state] each, as functions of those of the initial state and of the bases."""

    @staticmethod
    def forward(ctx: Any, found: Found, run: Run, layout: Layout, *given: Tensor):
        # Backwards it is a linear system, in parallel whatever the way forwards was.
        usual = first_chunk(run.length, run.rows, run.program)
        ctx.run, ctx.layout, ctx.chunk = run, layout, min(found.chunk, usual)
        ctx.save_for_backward(found.states, *given)  # so that who changes them before a backward pass is told
        return tuple(layout.leaves(found.states))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        check_backward(grad_outputs[0])
        layout, (states, *_) = ctx.layout, ctx.saved_tensors
        of_initial, of_bases = pull_back(ctx.run, states, layout.pack_leaves(grad_outputs, 1), ctx.chunk)
        return None, None, None, *layout.leaves(of_initial), *of_bases
