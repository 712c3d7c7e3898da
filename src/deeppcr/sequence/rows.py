"""Whether a row gives the same beside other rows: the ONE comparison; steps that are folded into rows of one call, or stand in for others.

Shapes: L steps, B rows, D the packed state.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..runtime import is_out_of_memory
from .evaluate import StepError, StepGroup
from .layout import Layout, describe


def rows_that_differ(found: Tensor, expected: Tensor, allowed: Tensor | float) -> Tensor:
    """Which rows are further apart than is allowed [..., 1]; what is not finite in both is the function's own doing.

    Args:
        found, expected: [..., D], the same rows of two calls, with others beside them

    Returns:
        [...], bool
    """
    same = (found - expected).abs() <= allowed
    return ~(same | ~(torch.isfinite(found) | torch.isfinite(expected))).all(-1)


def sizes_of(rows: Tensor) -> Tensor:
    """The largest finite value of each row: [..., D] to [..., 1]."""
    return rows.where(torch.isfinite(rows), 0).abs().amax(-1, keepdim=True)


def rounding_of(layout: Layout) -> float:
    """What rounding may change in a step of values up to 1, which depends on how many rows there are."""
    return 100 * torch.finfo(layout.dtype).eps * max(1.0, layout.width**0.5)


def find_influence(step: Callable[[Tensor], Tensor], state: Tensor, layout: Layout) -> tuple[int, int] | None:
    """A row of the state [B, D], and another row of what the step makes of it that changes with it; None where none is found."""
    reference = step(state)
    for row in {0, layout.rows - 1} if layout.rows > 1 else ():
        moved = state.clone()
        moved[row] += 0.1 * (1 + moved[row].abs())
        changed = rows_that_differ(step(moved), reference, rounding_of(layout) * (1 + sizes_of(reference)))
        changed[row] = False
        if changed.any():
            return row, int(changed.nonzero()[0])
    return None


#: Times the root of the unit of rounding, in half precision the unit itself: modules that differ by less from their stand-in do so by rounding.
_COARSE = 10


class Rowwise:
    """A step that takes any number of rows; made by ``rowwise``."""

    def __init__(self, step: Callable[..., Any]):
        self.step = step

    def __call__(self, *args: Any) -> Any:
        return self.step(*args)


def rowwise(step: Callable[..., Any]) -> Rowwise:
    """Declare that ``step`` treats every row by itself and takes any number of them.

    All L steps are then evaluated as L * B rows of one call, which is how recurrent cells (``nn.GRUCell``,
    ``nn.LSTMCell``), for which ``torch.vmap`` has no rule, run fast. Every leaf of ``xs`` must be [L, B, ...], and
    nothing that ``step`` closes over may have rows of its own. In every solve the first step, the last, and one made up of
    values from the whole range of ``xs`` are compared with a folded call; where they differ, StepError.

    >>> import torch, deeppcr
    >>> cell = torch.nn.LSTMCell(3, 4)
    >>> step = deeppcr.rowwise(lambda state, x: cell(x, state))
    >>> zeros = torch.zeros(2, 4)
    >>> h, c = deeppcr.solve(step, (zeros, zeros), torch.randn(100, 2, 3)).states
    >>> h.shape
    torch.Size([100, 2, 4])
    """
    if not callable(step):
        raise TypeError(f"step: expected a callable, got {type(step).__name__}")
    return Rowwise(step)


def check_rows(xs: Any, length: int, layout: Layout) -> None:
    """Raise where inputs do not lie as those of a step that takes any number of rows."""
    if not layout.batch_shape:
        raise ValueError("step: declared rowwise, but the states have no batch dimension (batch_dims=0)")
    rows = layout.batch_shape[0]
    for leaf in pytree.tree_leaves(xs) if xs is not None else []:
        if leaf.ndim < 2 or leaf.shape[1] != rows:
            raise ValueError(
                f"xs: step is declared rowwise, so every leaf must be [L, B, ...] = [{length}, {rows}, ...], got {describe(leaf)}"
            )


@torch.no_grad()
def check_fold(group: StepGroup, initial: Tensor, first: Tensor, length: int) -> None:
    """Raise where rows of a folded call differ from those of real steps.

    Folded are the first step, the last, and one that is made up of rows from all over the sequence, their values drawn from
    the whole range of the inputs: a step that takes one row's input for another's shows there even if only one step in
    thousands has another input. No value lies outside that range, and states are those of the loop, in other rows: steps take
    them as indices, too.

    Args:
        initial, first: [B, D], the states before and after the first step
    """
    starts, inputs = [initial, first], [group.inputs(0), group.inputs(length - 1)]
    try:
        try:
            made_up = _made_up(group.xs) if group.xs is not None else None
            folded, exact = _both_ways(group, [*starts, torch.cat([first, initial])[::2]], [*inputs, made_up], first)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # Not every step takes values that are made up.
            folded, exact = _both_ways(group, starts, inputs, first)
    except (RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise StepError(f"step: declared rowwise, but it does not take another number of rows: {error}") from error
    allowed = rounding_of(group.layout) * (1 + sizes_of(exact).max())
    if rows_that_differ(folded.double(), exact, allowed).any():
        raise StepError(
            "step: declared rowwise, but rows of a folded call differ from those of a real step: "
            "something it closes over has rows of its own, or its rows influence each other"
        )


@torch.no_grad()
def differs_from(group: StepGroup, real: dict[int, tuple[StepGroup, Any]], state: Tensor) -> bool:
    """Whether some of the modules of a group do something else by themselves: they may look at what a stand-in does not share, as at
    whether their parameters are trained, or at their own place among others.

    Args:
        real: by place in the group, a module and what it sees of xs
        state: [B, D], from which each of them takes a step
    """
    # Products of many rows may be coarser than those of few, in tensor cores say.
    rounding = torch.finfo(state.dtype).eps
    coarse = _COARSE * (rounding if state.dtype.itemsize == 2 else rounding**0.5)
    differ = [torch.zeros((), dtype=torch.bool, device=state.device)]
    with suppress(Exception):  # not every module takes the state of another
        for place, (module, x) in real.items():
            alone = module.call(state.clone(), x)
            (together,) = group.values(state.clone().unsqueeze(0), slice(place, place + 1))
            differ.append(rows_that_differ(together, alone, coarse * (1 + sizes_of(alone))).any())
    return bool(torch.stack(differ).any())


def _both_ways(group: StepGroup, starts: list[Tensor], inputs: list[Any], first: Tensor) -> tuple[Tensor, Tensor]:
    """The steps as rows of one call, and each by itself."""
    xs = pytree.tree_map(lambda *leaves: torch.stack(leaves), *inputs) if group.xs is not None else None
    folded = group.fold(xs)(torch.cat(starts)).unflatten(0, (len(starts), -1))
    alone = [group.call(start, x) for start, x in zip(starts[1:], inputs[1:], strict=True)]
    return folded, torch.stack([first, *alone]).double()


def _made_up(xs: Any) -> Any:
    """Leaves [L, B, ...] to [B, ...]: rows from all over the sequence; what is floating and finite, anew within its range."""
    leaves = pytree.tree_leaves(xs)
    length, rows = leaves[0].shape[:2]
    picked = (2 * torch.arange(rows, device=leaves[0].device) + 1) * (length * rows) // (2 * rows)
    whole = [leaf for leaf in leaves if not leaf.is_floating_point()]
    if whole:  # which stay as they are: the first row and the last at least are to differ from the first of all
        differ = torch.stack([(leaf != leaf[:1, :1]).reshape(length * rows, -1).any(-1) for leaf in whole]).any(0)
        picked[0] = picked[-1] = torch.where(differ.any(), differ.int().argmax(), picked[0])

    def take(leaf: Tensor) -> Tensor:
        found = leaf[picked // rows, picked % rows]
        if not leaf.is_floating_point():
            return found
        share = shares(found)
        made_up = leaf.amin((0, 1)) * (1 - share) + leaf.amax((0, 1)) * share
        return torch.where(torch.isfinite(made_up), made_up, found)

    return pytree.tree_map(take, xs)


def shares(like: Tensor) -> Tensor:
    """Numbers between 0 and 1, all different, and the caller's random numbers left alone."""
    golden = 0.618034  # whose multiples are spread evenly
    return (torch.arange(like.numel(), device=like.device) * golden).frac().view(like.shape).to(like.dtype)
