"""A step as a kernel: traced, written as Triton source, and run in parallel over its steps or one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..sequence import Rowwise
from ..sequence.evaluate import entry_of
from ..sequence.layout import Layout
from ..sequence.lengths import up_to
from ..sequence.sequence import find_length
from ..sequence.stack import LISTS, as_one_step

__all__ = ["source"]


def source(
    step: Callable[..., Any] | list[Callable[..., Any]] | nn.ModuleList,
    z0: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    batch_dims: int | None = None,
    lengths: Tensor | None = None,
    backward: bool = False,
) -> str:
    """The Triton source that a step becomes: one line an operation. Nothing is compiled.

    It is the same for any number of steps. A list of modules that are alike is one step, whose inputs are their parameters.

    Args:
        step, z0, xs, length, batch_dims, lengths: as for ``deeppcr.solve``; without xs, no length is needed
        backward: the kernels of the backward pass instead of those of the forward pass

    Raises:
        NotCovered: there are no kernels for this step; the message names what is missing

    >>> import torch, deeppcr
    >>> text = deeppcr.fuse.source(lambda z, x: 0.5 * torch.sin(z) + x, torch.zeros(4), torch.zeros(10, 4))
    >>> [line.strip() for line in text.splitlines() if "sin(" in line][:1]
    ['v0 = sin(z0)']
    """
    # What traces a step needs NumPy, and takes seconds to import: those wait who have use for it.
    from .compiled import kernels_of
    from .expressions import NotCovered
    from .trace import one_row

    if isinstance(step, LISTS) or xs is not None or length is not None:
        find_length(step, xs, length)  # which names what is wrong
    if lengths is not None:
        step, xs = up_to(lengths, step, z0, xs, length, batch_dims)
    one: Any = step.step if isinstance(step, Rowwise) else step
    if isinstance(one, LISTS):
        found = (one[0], xs) if len(one) == 1 else as_one_step(one, xs)
        if found is None:
            raise NotCovered("a list of steps that are not alike is not covered")
        one, xs = found
    inputs = entry_of(xs, 0)
    layout = Layout.of(z0, batch_dims)
    kernels = kernels_of(one_row(one, layout, inputs), layout)
    return kernels.backward_source if backward else kernels.forward_source
