"""How a solve ended, in words: the worst of its rows, with the step where it happened."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..runtime import tensors_in
from ..solution import Result, worst_of, worst_rows
from .layout import Layout

#: How many steps there are, or there are of each row [B], where they are taken from the last to the first; None: from the first on.
_backwards: ContextVar[int | Tensor | None] = ContextVar("backwards", default=None)


@contextmanager
def read_backwards(length: int | Tensor | None) -> Iterator[None]:
    """Steps of a sequence that was turned round are told in the caller's numbers.

    Args:
        length: of the sequence, or [B], of each row; None: it was not turned round
    """
    token = _backwards.set(length)
    try:
        yield
    finally:
        _backwards.reset(token)


def in_words(
    results: Sequence[Result],
    exact_steps: Tensor,
    inputs: Callable[[int], Any],
    layout: Layout,
    *reasons: str,
    start: str | None = None,
) -> str:
    """The worst result.

    Args:
        results, exact_steps: of every row
        inputs: what a step sees of xs, by its index; None of another rank's
        reasons: why Newton gave up
        start: what z0 holds that is not finite
    """
    worst = worst_of(results)
    if worst.severity <= Result.PRECISION_FLOOR.severity:
        return worst.value
    row, exact, count = worst_rows(results, exact_steps)
    step = exact + 1 if worst is Result.NON_FINITE else exact
    length, told = _backwards.get(), step
    if length is not None:
        told = int(length if isinstance(length, int) else length[row]) + 1 - step
    text = worst.value.format(step=told)
    if worst is Result.NON_FINITE:
        held = f"z0 holds {start}" if start and step == 1 else _not_finite_in(inputs, step - 1, layout, row)
        if held is not None:
            text = f"step {told} produced a value that is not finite; {held} there, and the loop does so too"
    if length is not None:
        text += ", in a sequence that is read from its last step to its first"
    if len(results) > 1:
        text += f" (row {row}; {count} of {len(results)} rows)"
    return "; ".join([text, *reasons])


def _not_finite_in(inputs: Callable[[int], Any], index: int, layout: Layout, row: int) -> str | None:
    """Which input of a step holds what is not finite, in its part for a row where it has one: NaN first, then an infinity, but for one
    that did no harm in the step before: that is as a rule a mask."""
    infinite = None
    earlier = inputs(index - 1) if index else None
    before = None if earlier is None else pytree.tree_leaves(earlier)  # another rank's, perhaps
    for at, (path, leaf) in enumerate(pytree.tree_flatten_with_path(inputs(index))[0]):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            leaf, name = _of_row(leaf, layout, row), "xs" + pytree.keystr(path)
            if torch.isnan(leaf).any():
                return f"{name} holds NaN"
            is_new = before is None or not torch.isinf(_of_row(before[at], layout, row)).any()
            if infinite is None and is_new and torch.isinf(leaf).any():
                infinite = f"{name} holds an infinity"
    return infinite


def _of_row(leaf: Tensor, layout: Layout, row: int) -> Tensor:
    batch = layout.batch_shape
    return leaf.reshape(layout.rows, -1)[row] if leaf.shape[: len(batch)] == batch else leaf


def what_does_not_fit(step: Any, z0: Any, xs: Any, batch_dims: int | None) -> list[str]:
    """Of a step that raised: what the caller may have meant otherwise, to be told beside what was raised."""
    notes, inputs, states = [], tensors_in(xs), tensors_in(z0)
    called = "step(z)" if xs is None else "step(z, x)"
    if callable(step):
        try:
            inspect.signature(step).bind(*("z",) if xs is None else ("z", "x"))
        except TypeError as error:
            why = "without xs" if xs is None else "since xs is given"
            notes.append(f"deeppcr: {why} a step is called as {called}, and this one does not take that: {error}")
        except ValueError:
            pass  # nobody knows what a builtin takes
    rows = states[0].shape[0] if states and states[0].ndim > 1 and batch_dims in (None, 1) else None
    for leaf in inputs if rows is not None else []:
        if leaf.ndim == states[0].ndim + 1 and leaf.shape[1] not in (1, rows):
            shapes = (
                f"{[*leaf.shape]}, of which a step sees {[*leaf.shape[1:]]}, beside a state of {[*states[0].shape]}"
            )
            notes.append(f"deeppcr: xs has {leaf.shape[1]} rows where z0 has {rows}: {shapes}")
    return notes
