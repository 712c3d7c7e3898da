"""Functions of one step at many steps at once, and what PyTorch refuses to do there."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_functorch = import_module("torch._C._functorch")  # which torch's type stubs leave out
_load_decompositions = getattr(import_module("torch._functorch.vmap"), "lazy_load_decompositions", None)
_PARTS = ("_add_batch_dim", "_remove_batch_dim", "_vmap_increment_nesting", "_vmap_decrement_nesting")
_HAS_PARTS = _load_decompositions is not None and all(hasattr(_functorch, part) for part in _PARTS)


def vmap_over_steps(function: Callable[..., Any], states: Any, xs: Any) -> Any:
    """``torch.vmap(function)(states, xs)``, or of the states alone where xs is None.

    Of a call of PyTorch's own, nine tenths go into looking at nests and in_dims; that is longer than most steps take. Where
    its parts are not what they are today, it is called after all.
    """
    if not _HAS_PARTS or _load_decompositions is None:
        return vmap(function)(states) if xs is None else vmap(function)(states, xs)
    leaves, spec = pytree.tree_flatten((states,) if xs is None else (states, xs))
    size = leaves[0].shape[0]
    _load_decompositions()
    level = _functorch._vmap_increment_nesting(size, "error")
    try:
        batched = [_functorch._add_batch_dim(leaf, 0, level) for leaf in leaves]
        found, found_spec = pytree.tree_flatten(function(*pytree.tree_unflatten(batched, spec)))
        found = [_functorch._remove_batch_dim(leaf, level, size, 0) for leaf in found]
    finally:
        _functorch._vmap_decrement_nesting()
    return pytree.tree_unflatten(found, found_spec)


class Refusals(TorchFunctionMode):
    """Hears of what torch.vmap does not do, where the step catches that itself: it would do the same at every step, and not what the loop does.

    Attributes:
        last: what it said
    """

    last: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if str(error).startswith("vmap:"):
                self.last = str(error)
            raise
