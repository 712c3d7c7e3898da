"""Rows of different lengths: a step that leaves alone the rows that are done.

Shapes: L steps, B rows in all batch dimensions together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..bounded import Bounded
from .fingerprint import structure_of
from .layout import Layout
from .rows import rounding_of, rows_that_differ, sizes_of
from .sequence import Rowwise, find_length

#: So many kinds of loops are remembered: how many batch dimensions they have, and which leaves of xs have rows.
_MOST_KINDS = 1024
_kinds = Bounded(_MOST_KINDS)


class UpTo(nn.Module):
    """A step that rows take while they are active; afterwards their state stays what it was.

    All rows come in one call, so rows that are done are stepped, too, in vain: from where they began, on inputs that were met before. What
    pads their inputs, or a state that the step is not made for, would come back as NaN in gradients: zero times what is not finite.

    It is a module so that steps of a list are stacked as they are without it.
    """

    def __init__(self, step: Callable):
        super().__init__()
        self.step = step

    def forward(self, z: Any, x: dict[str, Any]) -> Any:
        """``x``: "active" [*batch], "start" like z, and "x" where the step takes one."""
        one = isinstance(z, Tensor)
        leaves, spec = ([z], None) if one else pytree.tree_flatten(z)
        starts = [x["start"]] if one else pytree.tree_leaves(x["start"])
        masks = [_beside(x["active"], leaf) for leaf in leaves]
        begun = [torch.where(*each) for each in zip(masks, leaves, starts, strict=True)]
        state = begun[0] if spec is None else pytree.tree_unflatten(begun, spec)
        found = self.step(state, x["x"]) if "x" in x else self.step(state)
        try:
            after = [found] if spec is None else spec.flatten_up_to(found)
        except ValueError:
            return found
        if [_kind_of(leaf) for leaf in after] != [_kind_of(leaf) for leaf in leaves]:
            return found  # no state, which whoever called says in its own words
        kept = [torch.where(*each) for each in zip(masks, after, leaves, strict=True)]
        return kept[0] if spec is None else pytree.tree_unflatten(kept, spec)


def _beside(active: Tensor, leaf: Tensor) -> Tensor:
    """[*batch] as [*batch, 1, ...], beside a leaf [*batch, ...]."""
    return active.reshape(active.shape + (1,) * (leaf.ndim - active.ndim))


def _kind_of(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else type(leaf)


def up_to(lengths: Any, step: Any, z0: Any, xs: Any, length: int | None, batch_dims: int | None) -> tuple[Any, Any]:
    """The step and xs of a loop each of whose rows takes its first ``lengths`` [*batch] steps.

    Lengths on the CPU are held against L. To look at them on an accelerator, it would have to be waited for: there less than 0 is 0, and
    more than L is L.

    Args:
        step, z0, xs, length, batch_dims: as for ``deeppcr.solve``
    """
    several = isinstance(step, (list, tuple, nn.ModuleList))
    steps = find_length(step if several else None, xs, length)
    leaves, spec = ([], None) if xs is None else pytree.tree_flatten(xs)
    dims, have_rows = _rows_of(step[0] if several else step, z0, leaves, spec, batch_dims)
    states = pytree.tree_leaves(z0)
    batch, device = states[0].shape[:dims], states[0].device
    _check(lengths, batch, steps)
    lengths = lengths.to(device, non_blocking=True)
    given = {
        "active": torch.arange(steps, device=device).view(-1, *(1,) * dims) < lengths,
        "start": pytree.tree_map(lambda leaf: leaf.detach().expand(steps, *leaf.shape), z0),
    }
    if spec is not None:
        padded = [
            _without_padding(leaf, lengths, given["active"], rows) for leaf, rows in zip(leaves, have_rows, strict=True)
        ]
        given["x"] = pytree.tree_unflatten(padded, spec)
    return _wrapped(step), given


def _check(lengths: Any, batch: torch.Size, steps: int) -> None:
    if not isinstance(lengths, Tensor) or lengths.is_floating_point() or lengths.is_complex():
        came = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"lengths: expected a tensor of integers, one for each row, got {came}")
    if lengths.dtype is torch.bool:
        raise TypeError(
            "lengths: expected a tensor of integers, one for each row, got torch.bool (a mask? mask.sum(0))"
        )
    if not batch:
        raise ValueError(
            "lengths: the states have no batch dimension, and so no rows of different lengths; batch_dims says how many they have"
        )
    if lengths.shape != batch:
        raise ValueError(f"lengths: expected one for each row, {list(batch)}, got {list(lengths.shape)}")
    if lengths.device.type == "cpu":
        least, most = (int(each) for each in lengths.aminmax())
        if least < 0 or most > steps:
            raise ValueError(f"lengths: expected numbers from 0 to L = {steps}, got {least if least < 0 else most}")


def _wrapped(step: Any) -> Any:
    if isinstance(step, Rowwise):
        return Rowwise(UpTo(step.step))
    if not isinstance(step, (list, tuple, nn.ModuleList)):
        return UpTo(step) if callable(step) else step  # which is refused where all steps are
    known = {id(each): UpTo(each) if callable(each) else each for each in step}
    return [known[id(each)] for each in step]  # those that were one are one


def _without_padding(leaf: Tensor, lengths: Tensor, active: Tensor, has_rows: bool) -> Tensor:
    """A leaf of xs [L, ...] with other values where no row, or not its own, is active: those of the first step.

    A row that takes no step at all is given what the longest row has; where no row does, there is nothing but zeros.
    """
    dims, flat = lengths.ndim, lengths.flatten()
    longest = flat.argmax()
    first = leaf[0].detach()
    if has_rows:
        own = torch.where(flat > 0, torch.arange(len(flat), device=flat.device), longest)
        first = first.flatten(0, dims - 1)[own].view(first.shape)
    else:
        active = active.flatten(1).any(1)
    first = torch.where(flat[longest] > 0, first, torch.zeros_like(first))
    return torch.where(_beside(active, leaf), leaf, first)


def _rows_of(
    step: Any, z0: Any, leaves: list[Tensor], spec: Any, batch_dims: int | None
) -> tuple[int, tuple[bool, ...]]:
    """How many batch dimensions there are, and which leaves of xs have them; of a kind of loop found out once."""
    states, structure = pytree.tree_flatten(z0)
    inner = step.step if isinstance(step, Rowwise) else step
    key = (
        structure_of(inner)[0] if callable(inner) else None, type(step) is Rowwise, structure, spec, batch_dims,
        *[(leaf.shape, leaf.dtype, leaf.device) for leaf in states if isinstance(leaf, Tensor)],
        *[(leaf.shape[1:], leaf.dtype, leaf.device) for leaf in leaves],
    )  # fmt: skip
    found = _kinds.get(key)
    if found is None:
        layout = Layout.of(z0, batch_dims)
        found = len(layout.batch_shape), _have_rows(step, layout, z0, leaves, spec)
        _kinds.put(key, found)
    return found


@torch.no_grad()
def _have_rows(step: Any, layout: Layout, z0: Any, leaves: list[Tensor], spec: Any) -> tuple[bool, ...]:
    """Of leaves [L, *batch, ...] those that belong to the rows, and not to all of them with a size that happens to be the same.

    What the first row has of a leaf of its own changes no other row's result.
    """
    batch, dims = layout.batch_shape, len(layout.batch_shape)
    able = [dims > 0 and leaf.shape[1 : 1 + dims] == batch for leaf in leaves]
    if layout.rows < 2 or isinstance(
        step, Rowwise
    ):  # of one row it is the same; and who declares it is believed, and checked
        return tuple(able)

    def results(inputs: list[Tensor]) -> Tensor:
        return layout.pack(layout.in_order(step(z0, pytree.tree_unflatten(inputs, spec))))

    first = [leaf[0] for leaf in leaves]
    for at in [at for at, each in enumerate(able) if each]:
        changed = first[at].clone(memory_format=torch.contiguous_format)
        rows = changed.view(layout.rows, *changed.shape[dims:])
        rows[0] = torch.nan if changed.is_floating_point() else rows[-1]
        try:
            expected, found = results(first), results([*first[:at], changed, *first[at + 1 :]])
            allowed = rounding_of(layout) * (1 + sizes_of(expected))
            able[at] = not rows_that_differ(found, expected, allowed)[1:].any()
        except Exception:  # what is wrong with a step shows in the solve, where it is said what it is
            continue
    return tuple(able)


def forget_rows() -> None:
    """Let go of what is remembered of loops."""
    _kinds.clear()
