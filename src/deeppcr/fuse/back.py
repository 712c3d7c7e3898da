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
from .outputs import Outputs
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
