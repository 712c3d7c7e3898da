"""The loop as a user would write it: states as the step returns them, and no more work than it takes to be sure of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .evaluate import StepError, returned
from .history import Emitting
from .kept import KeptStates
from .layout import Layout, note_call

#: So many entries of xs are taken apart at a time: each is an object, and Python looks through all that there are from time to time.
_ENTRIES = 256


class BareLoop:
    """Takes the steps of a loop, each once, and hands their states to ``kept``.

    Args:
        layout: of a state
        step: ``step(z, x)``, ``step(z)`` where xs is None, or a list of them
        xs: nest of tensors [L, ...], or None
        length: L
        kept: takes the states
        first: how many steps have been taken already

    Attributes:
        outputs: what steps gave beside their states, where they are Emitting
        raised: what a step raised after the first one, and was told how it was called
    """

    def __init__(self, layout: Layout, step: Any, xs: Any, length: int, kept: KeptStates, first: int = 0):
        self._layout, self._kept = layout, kept
        self._emitting = isinstance(step, Emitting)
        self.outputs: list[Any] = []
        self.raised: Exception | None = None
        steps: Iterable[Any] = step[first:] if isinstance(step, (list, tuple, nn.ModuleList)) else repeat(step)
        self._steps: Iterator[tuple[int, Any, tuple[Any, ...]]] = zip(
            range(first, length), steps, _inputs_of_steps(xs, first), strict=False
        )

    def advance(self, z: Any, count: int | None = None, gives_up: Callable[[int], bool] | None = None) -> Any:
        """The state after so many more steps, or all that are left, from the state ``z``; None where it was given up.

        Args:
            gives_up: asked after every step, by its index
        """
        fitting, add = self._layout.fitting, self._kept.add
        for index, step, x in islice(self._steps, count):
            try:
                after = step.both(z, *x) if self._emitting else step(z, *x)
            except Exception as error:
                if index > 0 and not isinstance(error, StepError):  # which says what it is about
                    self.raised = error
                    note_call(error, index, z, *x)
                raise
            if self._emitting:
                after, output = after
                self.outputs.append(output)
            z = after
            leaves = fitting(z)
            add(returned(self._layout, z, *(x or (None,))) if leaves is None else leaves)
            if gives_up is not None and gives_up(index):
                return None
        return z


def _inputs_of_steps(xs: Any, first: int) -> Iterable[tuple[Any, ...]]:
    """Of each step from ``first`` on what it takes beside its state."""
    if xs is None:
        return repeat(())
    leaves, spec = pytree.tree_flatten(xs)
    if not leaves:
        return repeat((xs,))
    inputs = zip(*[_entries(leaf, first) for leaf in leaves], strict=True)
    if isinstance(xs, Tensor):
        return inputs
    # Of one level, to put together a nest of PyTorch's takes as long as a step.
    if type(xs) is tuple and all(isinstance(each, Tensor) for each in xs):
        return zip(inputs, strict=True)
    if type(xs) is dict and all(isinstance(each, Tensor) for each in xs.values()):
        return ((dict(zip(spec.context, entries, strict=True)),) for entries in inputs)
    return ((pytree.tree_unflatten(entries, spec),) for entries in inputs)


def _entries(leaf: Tensor, first: int) -> Iterable[Tensor]:
    """The entries of a tensor from one on, of a long one some at a time: each is an object of its own."""
    leaf = leaf[first:] if first else leaf
    if len(leaf) <= _ENTRIES:
        return leaf.unbind()
    return chain.from_iterable(part.unbind() for part in leaf.split(_ENTRIES))
