"""How a solve ended, in words: the worst of its rows, with the step where it happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..solution import Result, worst_of, worst_rows
from .layout import Layout


def in_words(
    results: Sequence[Result], exact_steps: Tensor, inputs: Callable[[int], Any], layout: Layout, *reasons: str
) -> str:
    """The worst result.

    Args:
        results, exact_steps: of every row
        inputs: what a step sees of xs, by its index
        reasons: why Newton gave up
    """
    worst = worst_of(results)
    if worst.severity <= Result.PRECISION_FLOOR.severity:
        return worst.value
    row, exact, count = worst_rows(results, exact_steps)
    step = exact + 1 if worst is Result.NON_FINITE else exact
    text = worst.value.format(step=step)
    if worst is Result.NON_FINITE and _has_nan(inputs(step - 1), layout, row):
        text = f"step {step} produced a value that is not finite; xs holds NaN there, and the loop does so too"
    if len(results) > 1:
        text += f" (row {row}; {count} of {len(results)} rows)"
    return "; ".join([text, *reasons])


def _has_nan(inputs: Any, layout: Layout, row: int) -> bool:
    """Whether a step's inputs hold NaN, in their part for a row where they have one. An infinity is as a rule a mask."""
    batch = layout.batch_shape
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            if leaf.shape[: len(batch)] == batch:
                leaf = leaf.reshape(layout.rows, -1)[row]
            if torch.isnan(leaf).any():
                return True
    return False
