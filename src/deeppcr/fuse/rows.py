"""Whether a step does to each of its rows what it does to one row by itself, which is all that kernels know of it.

Rows that are held together through inputs or closures (``x - x.mean(0)``, statistics of a batch) do not show in a trace on one row, nor in
a solve whose inputs happen to be zeros. So the step itself is asked, on numbers of its own.

Shapes: B rows, each leaf of a state [*batch, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..runtime import full_precision
from ..sequence.layout import Layout
from ..sequence.rows import rounding_of, rows_that_differ, sizes_of
from .hoisted import compute
from .trace import OneRow, StandIns, on_leaves

#: By so much numbers are varied around those of the call.
_VARIED = 0.1
#: What a step closes over that is smaller may be a gate that is still closed.
_FAINT = 1e-3
#: A change of so many units of rounding shows what rounding does to a step; two ways to compute it may differ by so many times that.
_NUDGED, _AMPLIFIED = 4, 100


def rows_agree(
    step: Callable[..., Any], row: OneRow, layout: Layout, z0: Any, inputs: Any, closures: list[Tensor], *, gradients: bool = False
) -> bool:  # fmt: skip
    """Whether some rows of a step are those of its graph on one row; what is not finite in both is the step's own doing.

    Args:
        z0, inputs: a state, and what the step sees of xs at one step
        closures: the tensors that it closes over
        gradients: look at the gradients of what has rows, too
    """
    call, given = on_leaves(step, layout, inputs)
    leaves, have_rows = [*pytree.tree_leaves(z0), *given], [True] * row.states + list(row.has_rows)
    nodes, holders, batch = row.nodes, row.given_nodes, len(layout.batch_shape)
    places = sorted({0, layout.rows // 2, layout.rows - 1})
    nudge = 1 + _NUDGED * torch.finfo(layout.dtype).eps

    def by_step(*tensors: Tensor) -> list[Tensor]:
        known = dict(zip(map(id, closures), tensors[len(leaves) :], strict=True))
        with StandIns(known):
            return call(tensors[: row.states], tensors[row.states : len(leaves)])

    def by_graph(*tensors: Tensor) -> list[Tensor]:
        return compute(row.graph, nodes, dict(zip(holders, tensors, strict=True)), layout.device)

    def one_of(tensor: Tensor, rows: bool, place: int) -> Tensor:
        if not rows or not batch:
            return tensor
        return tensor.flatten(0, batch - 1)[place].reshape((1,) * batch + tensor.shape[batch:])

    with torch.enable_grad(), full_precision(layout.device):
        for tensors in _numbers(leaves, have_rows, closures, layout):
            wanted = [i for i, each in enumerate(tensors) if gradients and have_rows[i] and each.is_floating_point()]
            ones = [[one_of(*each, place) for each in zip(tensors, have_rows, strict=True)] for place in places]
            ours = torch.cat([_evaluated(by_graph, one, wanted, 1) for one in ones])
            nudged = [each * nudge if each.is_floating_point() else each for each in tensors]
            try:
                theirs, other = (_evaluated(by_step, each, wanted, layout.rows) for each in (tensors, nudged))
            except Exception:  # of a step that is not defined there, nothing is to be learned
                continue
            noise = sizes_of((theirs - other)[places])
            theirs = theirs[places]
            if rows_that_differ(ours, theirs, rounding_of(layout) * sizes_of(theirs) + _AMPLIFIED * noise).any():
                return False
    return True


def _numbers(
    leaves: list[Tensor], have_rows: list[bool], closures: list[Tensor], layout: Layout
) -> Iterator[list[Tensor]]:
    """Near those of the call, for a step that is defined nowhere else; positive ones; and ones of both signs.

    What a step closes over stays as it is, in copies, since the step may change it. But for what is next to nothing, at the last two: a gate that is
    zero before it is trained hides what it will let through.
    """
    generator = torch.Generator(layout.device).manual_seed(0)  # the caller's is left alone

    def drawn(leaf: Tensor, rows: bool, vary: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        if not leaf.is_floating_point():  # of which others may be no indices, but those of other rows are
            return leaf.roll(1, 0) if rows and layout.batch_shape else leaf
        random = torch.rand(leaf.shape, device=layout.device, generator=generator)
        return vary(leaf.detach(), random.to(leaf))

    def filled(tensor: Tensor, vary: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.detach().clone()
        return torch.where(tensor.detach().abs() < _FAINT, drawn(tensor, False, vary), tensor.detach())

    for vary in (
        lambda leaf, random: leaf * (1 + _VARIED * random),
        lambda _, random: 0.5 + random,
        lambda _, random: 4 * random - 2,
    ):
        numbers = [drawn(leaf, rows, vary) for leaf, rows in zip(leaves, have_rows, strict=False)]
        yield [*numbers, *(filled(each, vary) for each in closures)]


def _evaluated(function: Callable[..., list[Tensor]], tensors: list[Tensor], wanted: list[int], rows: int) -> Tensor:
    """[rows, numbers]: what a function gives, and the gradients of a sum over it by the wanted tensors."""
    tensors = [each.detach().requires_grad_() if i in wanted else each for i, each in enumerate(tensors)]
    values = function(*tensors)
    sources, total = [tensors[i] for i in wanted], torch.stack([value.sin().sum() for value in values]).sum()
    if total.requires_grad:
        values = [*values, *torch.autograd.grad(total, sources, materialize_grads=True)]
    elif sources:
        values = [*values, *map(torch.zeros_like, sources)]
    return torch.cat([value.detach().reshape(rows, -1) for value in values], -1)
