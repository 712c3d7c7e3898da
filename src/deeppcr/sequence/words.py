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
    if worst is Result.NON_FINITE:
        held = _not_finite_in(inputs(step - 1), layout, row)
        if held is not None:
            text = f"step {step} produced a value that is not finite; {held} there, and the loop does so too"
    if len(results) > 1:
        text += f" (row {row}; {count} of {len(results)} rows)"
    return "; ".join([text, *reasons])


def _not_finite_in(inputs: Any, layout: Layout, row: int) -> str | None:
    """Which of a step's inputs holds what is not finite, in its part for a row where it has one: NaN first, as an infinity may be a mask."""
    batch, infinite = layout.batch_shape, None
    for path, leaf in pytree.tree_flatten_with_path(inputs)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            if leaf.shape[: len(batch)] == batch:
                leaf = leaf.reshape(layout.rows, -1)[row]
            name = "xs" + pytree.keystr(path)
            if torch.isnan(leaf).any():
                return f"{name} holds NaN"
            if infinite is None and torch.isinf(leaf).any():
                infinite = f"{name} holds an infinity"
    return infinite
