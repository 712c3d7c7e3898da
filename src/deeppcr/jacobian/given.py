"""Jacobians that the user gives.

Shapes: N steps or chunks at a time, B rows, D the packed state, K tangents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..linear import Blocks, Scalar
from ..sequence import Sequence
from .base import Jacobian


@dataclass(frozen=True, eq=False)
class ScalarJacobian(Jacobian):
    """A multiple of the identity, given by the user: nothing is differentiated.

    Args:
        value: one number for all steps, or a tensor [L] or [L, B]

    >>> import torch, deeppcr
    >>> newton = deeppcr.Newton(jacobian=deeppcr.ScalarJacobian(0.5))
    >>> deeppcr.solve(lambda z: 0.5 * torch.sin(z), torch.ones(3), length=50, solver=newton).result.name
    'CONVERGED'
    """

    value: float | Tensor
    exact = False
    name = "given"

    def __post_init__(self) -> None:
        if not isinstance(self.value, (int, float, Tensor)):
            raise TypeError(f"value: expected a number or a tensor [L] or [L, B], got {type(self.value).__name__}")

    def evaluate(self, sequence: Sequence, previous: Tensor, steps: range) -> tuple[Tensor, Scalar]:
        layout = sequence.layout
        data = torch.as_tensor(self.value, dtype=layout.dtype, device=layout.device)
        if data.ndim and (data.ndim > 2 or data.shape[0] != sequence.length):
            raise ValueError(
                f"jacobian: ScalarJacobian takes a number or a tensor [L] or [L, B] with L = {sequence.length}, "
                f"got shape {tuple(data.shape)}"
            )
        if data.ndim == 2 and data.shape[1] not in (1, layout.rows):
            raise ValueError(f"jacobian: ScalarJacobian has {data.shape[1]} rows for a batch of {layout.rows}")
        each = data[steps.start : steps.stop : steps.step] if data.ndim else data
        each = each.reshape(-1, 1) if each.ndim < 2 else each
        return sequence.values(previous, steps), Scalar(each.expand(len(steps), layout.rows))


@dataclass(frozen=True)
class GivenJacobian(Jacobian):
    """Blocks given by the user: fixed ones (a prior), or a function of the state.

    Args:
        blocks: L blocks with batch shape [], [1] or [B] of the flattened state of width D; or a
            function that takes what ``step`` takes, so ``(z, x)``, or ``(z)`` alone without xs, and returns blocks for that
            one step (``linear.Dense`` of a tensor [*batch, D, D], ``linear.Diagonal`` of [*batch, D], ...); it is evaluated
            by ``torch.vmap``
        exact: they are the true Jacobians (``deeppcr.check`` can tell), so Newton converges quadratically

    >>> import torch, deeppcr
    >>> weights = torch.randn(200, 5, 5) / 5
    >>> jacobian = lambda z, w: deeppcr.linear.Dense(w * (1 - torch.tanh(z) ** 2).unsqueeze(-2))
    >>> newton = deeppcr.Newton(jacobian=deeppcr.GivenJacobian(jacobian, exact=True))
    >>> step = lambda z, w: torch.tanh(z) @ w.mT
    >>> deeppcr.solve(step, torch.ones(5), weights, solver=newton).result.name
    'CONVERGED'
    """

    blocks: Blocks | Callable[..., Blocks]
    exact: bool = False
    repeatable = asks_nothing = given = True
    name = "given"

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, Blocks) and (isinstance(self.blocks, Tensor) or not callable(self.blocks)):
            raise TypeError(
                "blocks: expected linear.Dense, Diagonal, BlockDiagonal or Scalar around a tensor, or a function, got "
                f"{type(self.blocks).__name__}"
            )

    def evaluate(self, sequence: Sequence, previous: Tensor, steps: range) -> tuple[Tensor, Blocks]:
        return sequence.values(previous, steps), self.blocks_at(sequence, previous, steps)

    def trace(self, sequence: Sequence) -> None:
        trace, given = sequence.trace, self.blocks
        assert trace is not None
        if isinstance(given, Blocks):
            trace.run(type(given), lambda: given.data)
            return
        state, x = sequence.layout.unpack(sequence.initial.detach().clone()), sequence.inputs(0)
        inputs = (state,) if x is None else (state, pytree.tree_map(lambda leaf: leaf.detach().clone(), x))
        trace.run(given, given, *inputs)

    def contradiction(self, sequence: Sequence, index: int, state: Tensor, true: Tensor, rounding: float) -> str | None:
        try:
            given = self.blocks_at(sequence, state.unsqueeze(0), range(index, index + 1))
        except (TypeError, ValueError) as error:
            return str(error)
        off, largest = (given.to_dense(sequence.layout.width) - true).abs().max(), true.abs().max()
        if off <= 100 * rounding * (1 + largest):
            return None
        return (
            f"GivenJacobian is claimed to be exact, but at step {index + 1} it is off by {float(off):.2g} "
            f"(the true Jacobian's largest entry: {float(largest):.2g})"
        )

    @staticmethod
    def _map(function: Callable, sequence: Sequence, previous: Tensor, steps: range) -> Any:
        try:
            return sequence.map(function, previous, steps)
        except TypeError as error:
            takes = "(z): there are no xs" if sequence.xs is None else "(z, x)"
            try:
                signature(function).bind(*(None,) * (1 if sequence.xs is None else 2))
            except TypeError:
                raise TypeError(f"jacobian: the function is called as step is, with {takes}. {error}") from error
            except ValueError:  # not every function has a signature
                pass
            raise

    def blocks_at(self, sequence: Sequence, previous: Tensor, steps: range) -> Blocks:
        layout = sequence.layout
        if isinstance(self.blocks, Blocks):
            if len(self.blocks) != sequence.length:
                raise ValueError(f"jacobian: {len(self.blocks)} blocks were given for {sequence.length} steps")
            found = self.blocks[steps.start : steps.stop : steps.step].aligned(1)
            batch = found.batch_shape
            fits = len(batch) == 1 and batch[0] in (1, layout.rows)
        else:
            found = self._map(self.blocks, sequence, previous, steps)
            if not isinstance(found, Blocks):
                raise TypeError(
                    f"jacobian: the function must return linear.Dense, Diagonal, BlockDiagonal or Scalar, got {type(found).__name__}"
                )
            fits = found.batch_shape in (layout.batch_shape, torch.Size())
            core = found.data.shape[found.data.ndim - found.core_dims :]
            found = type(found)(found.data.reshape(len(steps), -1, *core)) if fits else found
        if found.data.is_complex():
            raise TypeError(
                "jacobian: the blocks are complex, while states are solved for as pairs of real numbers; give the blocks of these: a + bi is "
                "[[a, -b], [b, a]]"
            )
        square = found.core_dims < 2 or found.data.shape[-1] == found.data.shape[-2]
        if not fits or not square or found.width not in (None, layout.width):
            raise ValueError(
                f"jacobian: expected blocks of batch shape {tuple(layout.batch_shape)} and width {layout.width} for each "
                f"step, got {type(found).__name__} of shape {tuple(found.data.shape[1:])}"
            )
        if found.data.dtype != layout.dtype or found.data.device != layout.device:
            raise TypeError(
                f"jacobian: the blocks are {found.data.dtype} on {found.data.device}, the states {layout.dtype} on {layout.device}"
            )
        core = found.data.shape[2:]
        return type(found)(found.data.expand(len(steps), layout.rows, *core))
