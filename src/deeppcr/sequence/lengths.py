"""Rows of different lengths: a step that leaves alone the rows that are done.

Shapes: L steps, B rows in all batch dimensions together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .layout import Layout
from .rows import Rowwise
from .sequence import find_length
from .stack import LISTS


class UpTo(nn.Module):
    """A step that rows take while they are active; afterwards their state stays what it was.

    All rows come in one call, so rows that are done are stepped, too, in vain, from where they stopped: other rows may look at them. No
    gradient goes that way.

    It is a module so that steps of a list are stacked as they are without it.
    """

    def __init__(self, step: Callable[..., Any]):
        super().__init__()
        self.step = step

    def forward(self, z: Any, x: dict[str, Any]) -> Any:
        """``x``: "active" [*batch], and "x" where the step takes one."""
        one = isinstance(z, Tensor)
        leaves, spec = ([z], None) if one else pytree.tree_flatten(z)
        masks = [_beside(x["active"], leaf) for leaf in leaves]
        begun = [torch.where(mask, leaf, leaf.detach()) for mask, leaf in zip(masks, leaves, strict=True)]
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
    if isinstance(lengths, (list, tuple)) and all(type(each) is int for each in pytree.tree_leaves(lengths)):
        with suppress(ValueError, RuntimeError):  # of what is no array of numbers there is more to say
            lengths = torch.tensor(lengths)
    steps = find_length(step, xs, length)
    leaves, spec = ([], None) if xs is None else pytree.tree_flatten(xs)
    layout = Layout.of(z0, batch_dims)
    lengths = _check(lengths, layout.batch_shape, steps).to(layout.device, non_blocking=True)
    active = torch.arange(steps, device=layout.device).view(-1, *(1,) * lengths.ndim) < lengths
    given: dict[str, Any] = {"active": active}
    if spec is not None:
        given["x"] = pytree.tree_unflatten([_without_padding(leaf, lengths, active) for leaf in leaves], spec)
    return _wrapped(step), given


def _check(lengths: Any, batch: torch.Size, steps: int) -> Tensor:
    if not isinstance(lengths, Tensor) or lengths.is_floating_point() or lengths.is_complex():
        came = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"lengths: expected a tensor of integers, or a list of them, one for each row, got {came}")
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
    return lengths


def _wrapped(step: Any) -> Any:
    if isinstance(step, Rowwise):
        return Rowwise(UpTo(step.step))
    if not isinstance(step, LISTS):
        return UpTo(step) if callable(step) else step  # which is refused where all steps are
    known = {id(each): UpTo(each) if callable(each) else each for each in step}
    return [known[id(each)] for each in step]  # those that were one are one


def _without_padding(leaf: Tensor, lengths: Tensor, active: Tensor) -> Tensor:
    """A leaf of xs [L, ...] with the values of the first step where no row is active, and, of a leaf [L, *batch, ...], in place of what is
    not finite where its own row is not: zero times that would be NaN in gradients.

    Whether such a leaf belongs to the rows, or all of them see it and a size happens to be the same, cannot be told for sure: so nothing
    else is touched. A row that takes no step at all is given what the longest row has; where no row does, there is nothing but zeros.
    """
    flat = lengths.flatten()
    longest = flat.argmax()
    first = torch.where(flat[longest] > 0, leaf[0].detach(), torch.zeros_like(leaf[0]))
    leaf = torch.where(_beside(active.flatten(1).any(1), leaf), leaf, first)
    if leaf.shape[1 : active.ndim] != lengths.shape or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    own = torch.where(flat > 0, torch.arange(len(flat), device=flat.device), longest)
    first = first.flatten(0, lengths.ndim - 1)[own].view(first.shape)
    return torch.where(_beside(active, leaf) | leaf.isfinite(), leaf, first)
