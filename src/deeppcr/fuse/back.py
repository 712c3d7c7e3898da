"""Running the kernels of a step backwards: cotangents of all that it read.

Shapes: L steps in N chunks of C, B rows of D numbers, R lanes of K numbers (R * K = B * D).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..launch import aligned, launch
from ..runtime import check_backward
from .joints import parts_of
from .parts import Leaf
from .run import Found, Run, first_chunk, groups_of, parts_of_workspace


def pull_back(run: Run, states: Tensor, given: Tensor, chunk: int) -> tuple[Tensor, list[Tensor | None]]:
    """The cotangents of the initial state [B, D], and of every floating base, in its shape; None for others.

    Args:
        states, given: [L, B, D], the states and their cotangents
    """
    program, width, rows = run.program, run.program.width, run.rows
    sweeping, chain, real = run.kernels.sweep, run.kernels.joints.chain, program.dtype
    chunk = min(chunk, run.length)
    chunks = -(-run.length // chunk)
    given = aligned(given.resolve_neg().contiguous())
    outputs = _Outputs(run, chunks)
    of_initial = torch.empty_like(run.initial)
    step, batch = run.initial.numel(), rows // program.channels
    groups, lanes = groups_of(chunks, rows)
    parts = parts_of_workspace(width, rows, chunks, groups, 1)
    workspace = torch.empty(sum(parts), dtype=real, device=run.device)
    adjoints, products, maps = workspace.split(parts)
    sizes = (step, rows, program.channels, run.length, chunk, chunks)

    def sweep(as_map: bool) -> None:
        arguments = (
            run.initial, run.kernels.numbers(run.device), states, given, adjoints, products, of_initial,
            *run.pointers, *outputs.pointers, *run.strides, *outputs.strides, *sizes,
        )  # fmt: skip
        launch(
            sweeping, -(-chunks * rows // run.block), arguments, (as_map, run.block, run.stages),
            warps=run.warps, integers=(*run.kinds(*sizes, *outputs.strides), outputs.kinds),
        )  # fmt: skip

    def all_of_it() -> None:
        sweep(True)
        sizes_of_chain = (step, rows, program.channels, run.length, chunks, groups, -(-chunks // groups))
        for part in parts_of(width):
            launch(
                chain, -(-rows // lanes), (products, adjoints, given, maps, *sizes_of_chain), (part, groups, lanes),
                warps=max(1, groups * lanes // 32), integers=(real, given.dtype, *(size >= 2**31 for size in sizes_of_chain)),
            )  # fmt: skip
        sweep(False)

    if chunks > 1:
        tensors = (states, given, workspace, of_initial, *outputs.tensors)
        run.repeat(("back", chunk, outputs.strides), tensors, all_of_it)
    else:
        last = given[-1].reshape(batch, width, program.channels)
        adjoints[: width * rows].view(width, batch, program.channels).copy_(last.permute(1, 0, 2))
        sweep(False)
    return of_initial, outputs.of_bases()


class _Outputs:
    """Where cotangents of what is read are written.

    What belongs to one row at one step goes straight to its place in the cotangent of its base, where leaves of the base do not
    overlap. The rest is written row by row, or chunk by chunk, and summed.
    """

    def __init__(self, run: Run, chunks: int):
        program, self._run = run.program, run
        batch = run.rows // program.channels
        self._direct: dict[int, Tensor] = {}
        self._summed: list[tuple[Leaf, Tensor]] = []
        self.pointers, strides = [], []
        for leaf in program.leaves:
            base = run.bases[leaf.base]
            real = leaf.dtype.is_floating_point
            count = program.channels if program.elementwise else math.prod(leaf.shape)
            if real and leaf.per_step and leaf.per_row and program.are_apart(leaf.base):
                if leaf.base not in self._direct:
                    whole = program.covers_whole(leaf.base)
                    shape = base.shape
                    self._direct[leaf.base] = (torch.empty if whole else torch.zeros)(
                        shape, dtype=base.dtype, device=base.device
                    )
                output = self._direct[leaf.base]
                numbers = (output.stride(0), output.stride(1), leaf.spacing, leaf.offset)
            elif real:
                parts = run.length if leaf.per_step else chunks
                output = torch.empty(parts, batch, count, dtype=program.dtype, device=run.device)
                self._summed.append((leaf, output))
                numbers = (batch * count, count, 1, 0)
            else:
                output, numbers = run.initial, (0, 0, 0, 0)  # nothing is written
            self.pointers.append(output)
            strides += numbers
        self.strides = tuple(strides)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self._direct.values(), *(output for _, output in self._summed)]

    @property
    def kinds(self) -> tuple:
        return tuple((output.dtype, output.data_ptr() % 16) for output in self.pointers)

    def of_bases(self) -> list[Tensor | None]:
        """One for each base, in its shape."""
        run, program = self._run, self._run.program
        found: dict[int, Tensor] = dict(self._direct)
        for leaf, output in self._summed:
            if not leaf.per_step:
                output = output.sum(0)
            if not leaf.per_row:
                output = output.sum(int(leaf.per_step))
            base = run.bases[leaf.base]
            lead = leaf.per_step + leaf.per_row
            inner = base.shape[lead:].numel()
            if not program.elementwise:
                found[leaf.base] = output.reshape(base.shape).to(base.dtype)
                continue
            if leaf.base not in found:
                found[leaf.base] = torch.zeros(*base.shape[:lead], inner, dtype=program.dtype, device=run.device)
            into = found[leaf.base].view(*base.shape[:lead], inner)
            if leaf.spacing == 0:
                into[..., leaf.offset] += output.sum(-1)
            else:
                last = leaf.offset + leaf.spacing * (program.channels - 1)
                into[..., leaf.offset : last + 1 : leaf.spacing] += output
        return [
            found[index].reshape(base.shape).to(base.dtype) if index in found else None
            for index, base in enumerate(run.bases)
        ]


class Apply(torch.autograd.Function):
    """The states [L, B, D] of a run as a function of the initial state [B, D] and of the bases."""

    @staticmethod
    def forward(ctx: Any, found: Found, run: Run, initial: Tensor, *bases: Tensor):
        # Backwards it is a linear system, in parallel whatever the way forwards was.
        usual = first_chunk(run.length, run.rows, run.program.elementwise)
        ctx.run, ctx.chunk = run, min(found.chunk, usual)
        ctx.save_for_backward(found.states, initial, *bases)  # so that who changes them before a backward pass is told
        return found.states.view_as(found.states)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        check_backward(grad_outputs[0])
        states, *_ = ctx.saved_tensors
        of_initial, of_bases = pull_back(ctx.run, states, grad_outputs[0], ctx.chunk)
        return None, None, of_initial, *of_bases
