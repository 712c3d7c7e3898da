"""The loop as a user would write it: states as the step returns them, and no more work than it takes to be sure of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .evaluate import StepError, returned
from .history import Emitting
from .kept import KeptStates, writes_of
from .layout import Layout, note_call

#: So many entries of xs are taken apart at a time: each is an object, and Python looks through all that there are from time to time.
_ENTRIES = 256
#: So many steps are taken before somebody looks whether they give states.
_UNSEEN = 256


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
        self._layout, self._kept, self._length = layout, kept, length
        self._emitting, self._call = isinstance(step, Emitting), step
        if self._emitting:
            self._call = step.both
        elif isinstance(step, (list, tuple, nn.ModuleList)):
            steps = iter(step[first:])
            self._call = lambda *given: next(steps)(*given)
        self._has_inputs = xs is not None
        self._inputs: Iterator[Any] = iter(_inputs_of_steps(xs, first))
        self.outputs: list[Any] = []
        self.raised: Exception | None = None

    def advance(self, z: Any, count: int | None = None, gives_up: Callable[[int], bool] | None = None) -> Any:
        """The state after so many more steps, or all that are left, from the state ``z``; None where it was given up.

        Args:
            gives_up: asked after every step, by its index
        """
        kept = self._kept
        last = self._length if count is None else kept.count + count
        while kept.count < last and z is not None:
            z = self._advance(z, min(last - kept.count, kept.room, _UNSEEN), gives_up)
            kept.check(latest=True)
            kept.close_if_full()
        return z

    def _advance(self, z: Any, count: int, gives_up: Callable[[int], bool] | None) -> Any:
        """So many steps, which ``kept`` has room for. What is done beside them here takes time of every loop."""
        kept, call, has_inputs, inputs, x = self._kept, self._call, self._has_inputs, islice(self._inputs, count), None
        hold, note = (None, None) if self._emitting or gives_up is not None else kept.holders()
        several = len(self._layout.shapes) if self._layout.is_tuple else 0
        try:
            if hold is None or note is None:
                for x in inputs:
                    z = self._next(z, x)
                    if gives_up is not None and gives_up(kept.count - 1):
                        return None
            elif several:
                for x in inputs:
                    after = call(z, x) if has_inputs else call(z)
                    if type(after) is tuple and len(after) == several:
                        hold(after)
                        note(map(writes_of, after))
                    else:
                        kept.add(returned(self._layout, after, x))
                    z = after
            else:
                for x in inputs:
                    after = call(z, x) if has_inputs else call(z)
                    hold(after)
                    note(after._version)
                    z = after
        except Exception as error:
            kept.check()  # a state that is none may be why
            if kept.count > 0 and not isinstance(error, StepError):  # which says what it is about
                self.raised = error
                note_call(error, kept.count, z, *((x,) if has_inputs else ()))
            raise
        return z

    def _next(self, z: Any, x: Any) -> Any:
        """The next state, looked at."""
        after = self._call(z, x) if self._has_inputs else self._call(z)
        if self._emitting:
            after, output = after
            self.outputs.append(output)
        self._kept.add(returned(self._layout, after, x))
        return after


def _inputs_of_steps(xs: Any, first: int) -> Iterable[Any]:
    """Of each step from ``first`` on what it takes beside its state."""
    if isinstance(xs, Tensor):
        return _entries(xs, first)
    leaves, spec = pytree.tree_flatten(xs)
    if xs is None or not leaves:
        return repeat(xs)
    inputs = zip(*[_entries(leaf, first) for leaf in leaves], strict=True)
    # Of one level, to put together a nest of PyTorch's takes as long as a step.
    if type(xs) is tuple and all(isinstance(each, Tensor) for each in xs):
        return inputs
    if type(xs) is dict and all(isinstance(each, Tensor) for each in xs.values()):
        return (dict(zip(spec.context, entries, strict=True)) for entries in inputs)
    return (pytree.tree_unflatten(entries, spec) for entries in inputs)


def _entries(leaf: Tensor, first: int) -> Iterable[Tensor]:
    """The entries of a tensor from one on, of a long one some at a time: each is an object of its own."""
    leaf = leaf[first:] if first else leaf
    if len(leaf) <= _ENTRIES:
        return leaf.unbind()
    return chain.from_iterable(part.unbind() for part in leaf.split(_ENTRIES))
