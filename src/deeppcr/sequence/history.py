"""Loops whose steps look back further than one state, as sequences of steps that do not; and steps that give more than a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def collapse(
    layer: Callable[..., Any], xs: Any, skip: int, *, connect: Callable[[Any, Any], Any] = torch.add
) -> tuple[Callable[..., Any], Any]:
    """Collapse the layers inside each skip connection into one step (appendix B of the paper).

    With ``z_l = connect(layer(z_{l-1}), z_{l-skip})`` at every ``skip``-th layer and plain layers between, only the states
    at the connections form a sequence in which each depends on the one before.

    Args:
        layer: ``layer(z, x)``
        xs: nest of tensors [L, ...], the parameters of the layers; L must be a multiple of ``skip``
        skip: layers in a skip connection
        connect: ``connect(output of the last layer, state before the first)``, the sum by default

    Returns:
        a step over ``skip`` layers, and xs with leaves [L / skip, skip, ...]: arguments for ``deeppcr.solve``

    >>> import torch, deeppcr
    >>> weights = torch.randn(64, 8, 8) / 8
    >>> step, xs = deeppcr.collapse(lambda z, w: torch.relu(z) @ w.mT, weights, skip=4)
    >>> deeppcr.solve(step, torch.randn(8), xs).states.shape  # one state for each connection
    torch.Size([16, 8])
    """
    if skip < 1:
        raise ValueError(f"skip: at least 1 layer, got {skip}")
    for leaf in pytree.tree_leaves(xs):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            raise TypeError("xs: expected tensors [L, ...], one entry for each layer")
        if leaf.shape[0] % skip or leaf.shape[0] == 0:
            raise ValueError(
                f"xs: {leaf.shape[0]} layers are not a multiple of skip = {skip}; apply the layers left over after the solve"
            )

    def step(z: Any, group: Any) -> Any:
        inner = z
        for k in range(skip):
            inner = layer(inner, pytree.tree_map(lambda leaf, k=k: leaf[k], group))
        return pytree.tree_map(connect, inner, z)

    grouped = pytree.tree_map(lambda leaf: leaf.unflatten(0, (-1, skip)), xs)
    return step, grouped


class WithHistory:
    """A step on the window of the last states; made by ``with_history``."""

    def __init__(self, step: Callable[..., Any], window: int):
        self.step: Callable[..., Any] = step
        self.history: int = window

    def __call__(self, states: tuple[Any, ...], *x: Any) -> tuple[Any, ...]:
        if not isinstance(states, tuple) or len(states) != self.history:
            came = f"a tuple of {len(states)}" if isinstance(states, tuple) else type(states).__name__
            raise ValueError(
                f"z0: with_history(step, {self.history}) starts from a tuple of {self.history} states (the latest first), got {came}"
            )
        return (self.step(states, *x), *states[:-1])


def with_history(step: Callable[..., Any], window: int | Literal["all"]) -> Callable[..., Any]:
    """A step that sees the last ``window`` states, as a step from window to window.

    ``step(states, x)`` gets a tuple, the latest state first, and returns the next state. Start the solve from a tuple of
    ``window`` states; ``solution.states[0]`` is the trajectory. Passing states on costs nothing: with a chunk of at least
    ``window`` (which "auto" sees to), no product of matrices of the whole window's width is formed for a step.

    Args:
        step: ``step((z_{l-1}, ..., z_{l-window}), x)``, or without x
        window: how many states it sees

    >>> import torch, deeppcr
    >>> fibonacci = deeppcr.with_history(lambda states: states[0] + states[1], 2)
    >>> one = torch.ones(1)
    >>> deeppcr.solve(fibonacci, (one, one), length=6).states[0].flatten()
    tensor([ 2.,  3.,  5.,  8., 13., 21.])
    """
    if window == "all":
        raise ValueError(
            "window: a step that sees all earlier states (as in a DenseNet, or attention over the whole past) gives a full "
            "lower-triangular system, not a bidiagonal one: there is no window to carry along, and parallel cyclic "
            "reduction does not apply. Use a finite window, or collapse the steps that see each other into one"
        )
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"window: expected a whole number from 1, got {window!r}")
    return WithHistory(step, window)


class Emitting:
    """A step ``both(z, x)`` that gives the next state and an output; called, the state alone."""

    def both(self, z: Any, x: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def __call__(self, z: Any, x: Any) -> Any:
        return self.both(z, x)[0]
