"""Whether steps may be folded into the rows of one call: rows of such a call against real steps.

Shapes: L steps, B rows, D the packed state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .steps import StepError, StepGroup, is_out_of_memory


@torch.no_grad()
def check_fold(group: StepGroup, initial: Tensor, first: Tensor, length: int) -> None:
    """Raise where rows of a folded call differ from those of real steps.

    Folded are the first step, the last, and one that is made up of rows from all over the sequence, every value of them
    changed: a step that takes one row's input for another's shows there even where inputs are constant.

    Args:
        initial, first: [B, D], the states before and after the first step
    """
    starts, inputs = [initial, first, varied(initial)], [group.inputs(0), group.inputs(length - 1)]
    inputs.append(pytree.tree_map(_spread_rows, group.xs) if group.xs is not None else None)
    try:
        try:
            folded, exact = _both_ways(group, starts, inputs, first)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # Not every step takes values that are made up.
            folded, exact = _both_ways(group, starts[:2], inputs[:2], first)
    except (RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise StepError(f"step: declared rowwise, but it does not take another number of rows: {error}") from error
    finite = torch.isfinite(exact)
    scale = exact.where(finite, 0).abs().max()
    allowed = 100 * torch.finfo(group.layout.dtype).eps * max(1.0, group.layout.width**0.5)
    same = (folded.double() - exact).abs() <= allowed * (1 + scale)
    # What is not finite is the step's own doing where it is so in both; the solve will say where it comes from.
    if not (same | (~finite & ~torch.isfinite(folded))).all():
        raise StepError(
            "step: declared rowwise, but rows of a folded call differ from those of a real step: "
            "something it closes over has rows of its own, or its rows influence each other"
        )


def _both_ways(group: StepGroup, starts: list[Tensor], inputs: list[Any], first: Tensor) -> tuple[Tensor, Tensor]:
    """The steps as rows of one call, and each by itself."""
    xs = pytree.tree_map(lambda *leaves: torch.stack(leaves), *inputs) if group.xs is not None else None
    folded = group.fold(xs)(torch.cat(starts)).unflatten(0, (len(starts), -1))
    alone = [group.call(start, x) for start, x in zip(starts[1:], inputs[1:], strict=True)]
    return folded, torch.stack([first, *alone]).double()


def _spread_rows(leaf: Tensor) -> Tensor:
    """[L, B, ...] to [B, ...]: rows from all over the sequence, varied."""
    length, rows = leaf.shape[:2]
    picked = (2 * torch.arange(rows, device=leaf.device) + 1) * (length * rows) // (2 * rows)
    picked = picked.roll(-(rows // 2))  # so that the first row is from afar
    return varied(leaf[picked // rows, picked % rows])


def varied(tensor: Tensor) -> Tensor:
    """Other numbers of the same sign and much the same size, each changed differently; whole numbers stay as they are."""
    if not tensor.is_floating_point():
        return tensor
    # Multiples of the golden ratio: as good as random here, and the caller's random numbers are left alone.
    between = (torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float32) * 0.618034).frac()
    between = between.view(tensor.shape).to(tensor.dtype)
    return torch.where(tensor == 0, 0.1 + 0.1 * between, tensor * (1 + 0.1 * between))
