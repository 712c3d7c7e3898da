"""A step as a kernel: traced, written as Triton source, and run in parallel over its steps or one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

from ..sequence.layout import Layout

__all__ = ["source"]


def source(step: Callable, z0: Any, xs: Any = None, *, batch_dims: int | None = None, backward: bool = False) -> str:
    """The Triton source that a step becomes: one line an operation. Nothing is compiled.

    Args:
        step, z0, xs, batch_dims: as for ``deeppcr.solve``
        backward: the kernels of the backward pass instead of those of the forward pass

    Raises:
        NotCovered: there are no kernels for this step; the message names what is missing

    >>> import torch, deeppcr
    >>> text = deeppcr.fuse.source(lambda z, x: 0.5 * torch.sin(z) + x, torch.zeros(4), torch.zeros(10, 4))
    >>> [line.strip() for line in text.splitlines() if "sin(" in line][:1]
    ['v0 = sin(z0)']
    """
    # What traces a step needs NumPy, and takes seconds to import: those wait who have use for it.
    from .compiled import Kernels
    from .program import program_of
    from .trace import one_row

    inputs = None if xs is None else pytree.tree_map(lambda leaf: leaf[0], xs)
    layout = Layout.of(z0, batch_dims)
    kernels = Kernels(program_of(one_row(step, layout, inputs), layout))
    return kernels.backward_source if backward else kernels.forward_source
