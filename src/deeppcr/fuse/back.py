"""Running the kernels of a step backwards: cotangents of all that it read.

Shapes: L steps in N chunks of C, B rows of D numbers, R lanes of K numbers (R * K = B * D).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..launch import aligned, kinds, launch
from ..launch import compile_ahead as launch_ahead
from ..runtime import apply_directly, check_backward
from ..sequence.layout import Layout
from ..sequence.product import origin_of, pulled_back
from ..tolerance import Tolerance
from . import tiled
from .bound import Notes
from .cuts import workspace_of
from .kinds import Kind, first_chunk
from .outputs import Outputs
from .run import Run, join_lanes

#: Passes after which cotangents that do not join are taken step by step: the first finds them, the second sees that they do, and one more
#: mends what rounding was amplified to.
_PASSES = 3
#: How far they may be off where chunks join, relative to the largest behind.
_TOLERANCE = {torch.float32: 3e-5, torch.float64: 3e-10}


def pull_back(
    run: Run, states: Tensor, given: Tensor, chunk: int, *, of_start: bool = True
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The cotangents of the initial state [B, D], and of every floating base, in its shape; None for others.

    Args:
        states, given: [L, B, D], the states and their cotangents
        of_start: whether those of the initial state are wanted
    """
    program, rows = run.program, run.rows
    run.kernels.sweep  # noqa: B018 - before anybody asks for numbers, of which its source may bring more
    chunk, chunks, parts, size = _cut(run, chunk)
    if given.is_neg() or not given.is_contiguous():
        given = given.resolve_neg().contiguous()
    given = aligned(given)
    outputs, tiles = Outputs.of(run), run.shape.tiled
    kept = outputs.kept(run, chunks)
    of_initial = torch.empty_like(run.initial) if of_start else None
    tolerance = (0.0, _TOLERANCE[program.dtype], 0.0, 0, 1)  # of linear equations nothing is rough

    def all_of_it() -> None:
        # What nobody reads afterwards is made here: where launches are made again, it is one piece of memory.
        notes = Notes(_PASSES, rows, run.device)
        workspace = torch.empty(size, dtype=program.dtype, device=run.device)
        memory = outputs.memory(run, chunks, kept)
        into = torch.empty_like(run.initial) if of_initial is None else of_initial
        starts, ends, sizes, products, *maps = workspace.split(parts)
        of_chunks = (starts, ends, products, sizes, notes.corrections, notes.unsettled, *(maps[-1:] if tiles else ()))
        join = tiled.join if tiles else join_lanes

        def sweep(passes: int, as_map: bool, whole: bool) -> None:
            cut = chunk, chunks, passes, _PASSES
            _sweep(run, states, given, of_chunks, into, outputs, memory, cut, as_map, whole)

        if chunks > 1:
            for passes in range(_PASSES):
                sweep(passes, passes == 0, False)
                join(run, (starts, ends, sizes, products, *maps), notes, chunks, passes, _PASSES, tolerance)
        sweep(_PASSES if chunks > 1 else 0, False, True)
        outputs.sum_up(memory)

    tensors = [each for each in (of_initial, *kept, states) if each is not None]
    run.repeat(("back", chunk, tolerance, of_start), (given, *tensors), all_of_it)
    return of_initial, outputs.of_bases(run, kept)


def compile_ahead(run: Run, kind: Kind, tolerance: Tolerance, *, gradients: bool) -> None:
    """Have the kernels of a run compiled side by side, where that has not been done: those that chunks of its kind need, which are not those
    of the loop; and those of its gradients."""
    ready = run.shape.ready
    if ready[gradients]:
        return
    ready[gradients] = True
    forwards = partial(run.in_parallel, kind, tolerance, most=2)

    # Nothing is launched: what stands for states is not looked at.
    backwards = partial(pull_back, run, run.initial, run.initial, chunk_of(run, kind.chunk))
    launch_ahead(forwards, *([backwards] if gradients else []))


def _cut(run: Run, chunk: int) -> tuple[int, int, list[int], int]:
    """Steps of a chunk, how many chunks, and the parts of a workspace and its size."""
    found = run.shape.cuts.get(("back", chunk))
    if found is None:
        steps = min(chunk, run.length)
        chunks = -(-run.length // steps)
        parts = workspace_of(run, chunks)
        found = run.shape.cuts["back", chunk] = steps, chunks, parts, sum(parts)
    return found


def _sweep(
    run: Run, states: Tensor, given: Tensor, of_chunks: tuple[Tensor, ...], of_initial: Tensor, outputs: Outputs,
    memory: list[Tensor], cut: tuple[int, int, int, int], as_map: bool, whole: bool,
) -> None:  # fmt: skip
    """``cut``: steps of a chunk, chunks, passes before this one, and all of them."""
    into, chunks = outputs.pointers(run, memory), 1 if whole else cut[1]
    if run.shape.tiled:
        sizes = (run.initial.numel(), run.rows, run.length, *cut)
        programs, constants, warps = tiled.programs_of(run, chunks, as_map, whole, fine=True)
    else:
        sizes = (run.initial.numel(), run.rows, run.program.channels, run.length, *cut)
        programs, warps = -(-chunks * run.rows // run.block), run.warps
        constants = (as_map, whole, run.block, run.stages)
    arguments = (
        run.initial, run.kernels.numbers(run.device), states, given, *of_chunks, of_initial,
        *run.pointers, *into, *run.strides, *outputs.strides, *sizes,
    )  # fmt: skip
    integers = (*run.kinds(*sizes, *outputs.strides), kinds(tuple(into)))
    launch(run.kernels.sweep, programs, arguments, constants, warps=warps, integers=integers)


def chunk_of(run: Run, forwards: int) -> int:
    """Steps of a chunk backwards: it is a linear system, in parallel whatever the way forwards was. There, a chunk had ``forwards``."""
    return min(forwards, first_chunk(run.length, run.rows, run.program))


class Apply(torch.autograd.Function):
    """The leaves of the states of a run, [L, *batch, *state] each, as functions of those of the initial state and of the bases.

    Bases that are products stand for their factors: these are given behind all others, which takes fewer nodes of autograd.
    """

    @staticmethod
    def of(run: Run, layout: Layout, found: tuple[Tensor, int], starts: list[Tensor], bases: list[Tensor]) -> Any:
        """
        Args:
            found: the states [L, B, D], and steps of a chunk backwards
            starts: the leaves of the initial state
            bases: as they were given to the run
        """
        given, products, factors = [*starts], [], []
        for index, base in enumerate(bases):
            origin = origin_of(base)
            if origin is None:
                given.append(base)
            else:
                products.append(index)
                factors += origin
        return apply_directly(Apply, found, run, layout, products, *given, *factors)

    @staticmethod
    def forward(
        ctx: Any, found: tuple[Tensor, int], run: Run, layout: Layout, products: list[int], *given: Tensor
    ) -> Any:
        """``products``: which of the bases are."""
        states, ctx.chunk = found
        ctx.run, ctx.layout, ctx.products = run, layout, products
        ctx.save_for_backward(states, *given)  # so that who changes them before a backward pass is told
        return tuple(layout.leaves(states))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        check_backward(grad_outputs[0])
        run, layout, (states, *given) = ctx.run, ctx.layout, ctx.saved_tensors
        leaves, wanted = len(layout.shapes), ctx.needs_input_grad[4:]
        grads = layout.pack_leaves(grad_outputs, 1)
        of_start, of_bases = pull_back(run, states, grads, ctx.chunk, of_start=any(wanted[:leaves]))
        of_leaves = [None] * leaves if of_start is None else layout.leaves(of_start)
        of_factors: list[Tensor | None] = []
        for number, index in enumerate(ctx.products):
            at = len(given) + 2 * (number - len(ctx.products))
            of_product = of_bases[index]
            assert of_product is not None, "factors are floating"
            of_factors += pulled_back(of_product, given[at], given[at + 1], wanted[at : at + 2])
        of_others = [each for index, each in enumerate(of_bases) if index not in ctx.products]
        return None, None, None, None, *of_leaves, *of_others, *of_factors
