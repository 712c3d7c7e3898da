"""Initial trajectories for Newton's method.

Shapes: L steps, B rows, D the packed state. A guess gives the states after the steps in ``steps``: [len(steps), B, D].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..runtime import is_capturing
from ..sequence import Sequence
from ..sequence.layout import describe
from ..solution import Solution


class Guess:
    """Strategy: the trajectory that the iteration starts from."""

    def states(self, sequence: Sequence, steps: range) -> Tensor:
        """The states after ``steps``, [N, B, D]; need not be contiguous."""
        raise NotImplementedError


@dataclass(frozen=True)
class RepeatInitial(Guess):
    """``z_0`` at every step: the paper's choice for single passes.

    >>> import torch, deeppcr
    >>> newton = deeppcr.Newton()
    >>> deeppcr.solve(torch.sin, torch.ones(2), length=9, solver=newton, guess=deeppcr.RepeatInitial()).result.name
    'CONVERGED'
    """

    def states(self, sequence: Sequence, steps: range) -> Tensor:
        return sequence.initial.expand(len(steps), -1, -1)


@dataclass(frozen=True)
class Zeros(Guess):
    """Zero at every step.

    >>> import torch, deeppcr
    >>> newton = deeppcr.Newton()
    >>> deeppcr.solve(torch.sin, torch.ones(2), length=9, solver=newton, guess=deeppcr.Zeros()).result.name
    'CONVERGED'
    """

    def states(self, sequence: Sequence, steps: range) -> Tensor:
        return torch.zeros_like(sequence.initial).expand(len(steps), -1, -1)


@dataclass(frozen=True, kw_only=True)
class Random(Guess):
    """Normal numbers, independent at every step.

    Args:
        std: their standard deviation
        seed: the same seed gives the same guess on every device

    >>> import torch, deeppcr
    >>> newton = deeppcr.Newton()
    >>> deeppcr.solve(torch.sin, torch.ones(2), length=9, solver=newton, guess=deeppcr.Random(seed=1)).result.name
    'CONVERGED'
    """

    std: float = 1.0
    seed: int = 0

    def states(self, sequence: Sequence, steps: range) -> Tensor:
        layout = sequence.layout
        if is_capturing(layout.device):
            raise RuntimeError(
                "guess: Random() draws its numbers on the host, which a CUDA graph cannot repeat; hand over a tensor, and fill it "
                "before each replay"
            )
        generator = torch.Generator("cpu").manual_seed(self.seed)
        noise = torch.randn(len(steps), layout.rows, layout.width, generator=generator, device="cpu")
        return noise.mul_(self.std).to(layout.device, layout.dtype)


@dataclass(frozen=True)
class Trajectory(Guess):
    """States given by the user, as ``Solution.states`` has them; a tensor or nest handed to ``guess`` becomes this."""

    trajectory: Any

    def states(self, sequence: Sequence, steps: range) -> Tensor:
        layout = sequence.layout
        leaves, spec = pytree.tree_flatten(self.trajectory)
        expected = [(sequence.length, *layout.batch_shape, *shape) for shape in layout.shapes]
        fits = spec == layout.spec and all(isinstance(leaf, Tensor) for leaf in leaves)
        if not fits or [tuple(leaf.shape) for leaf in leaves] != expected:
            wanted = ", ".join(map(str, map(list, expected)))
            raise ValueError(f"guess: expected states of shape {wanted}, got {describe(self.trajectory)}")
        elsewhere = any(each.device != layout.device for each in leaves)
        if elsewhere or tuple(each.dtype for each in leaves) != layout.dtypes:
            wanted = ", ".join(dict.fromkeys(map(str, layout.dtypes)))
            raise TypeError(f"guess: expected {wanted} on {layout.device}, got {describe(self.trajectory)}")
        picked = [leaf.detach()[steps.start : steps.stop : steps.step] for leaf in leaves]
        packed = layout.pack(pytree.tree_unflatten(picked, spec), lead=1)
        if not is_capturing(layout.device) and not torch.isfinite(packed).all():
            raise ValueError("guess: holds values that are not finite")
        return packed


@dataclass(frozen=True)
class BatchMean(Guess):
    """The mean over the batch of an earlier solution, for every row: the paper's choice in training.

    Args:
        solution: of a sequence with the same length and state; its batch may have another size

    >>> import torch, deeppcr
    >>> newton = deeppcr.Newton()
    >>> last = deeppcr.solve(torch.sin, torch.ones(8, 2), length=9, solver=newton)
    >>> deeppcr.solve(torch.sin, torch.ones(5, 2), length=9, solver=newton, guess=deeppcr.BatchMean(last)).result.name
    'CONVERGED'
    """

    solution: Solution

    def __post_init__(self) -> None:
        if not isinstance(self.solution, Solution):
            raise TypeError(f"solution: BatchMean takes an earlier Solution, got {type(self.solution).__name__}")

    def states(self, sequence: Sequence, steps: range) -> Tensor:
        layout = sequence.layout
        batch_dims = len(layout.batch_shape)

        def spread(leaf: Tensor) -> Tensor:
            mean = leaf.detach().mean(tuple(range(1, 1 + batch_dims)), keepdim=True) if batch_dims else leaf
            return mean.expand(-1, *layout.batch_shape, *leaf.shape[1 + batch_dims :])

        return Trajectory(pytree.tree_map(spread, self.solution.states)).states(sequence, steps)


def as_guess(guess: Any, z0: Any, xs: Any) -> Guess:
    """What a user may pass as ``guess``: a strategy, a solution, a function of ``(z0, xs)``, or states."""
    if isinstance(guess, Guess):
        return guess
    if isinstance(guess, type) and issubclass(guess, Guess):
        raise TypeError(f"guess: pass an instance, {guess.__name__}(...)")
    if isinstance(guess, Solution):
        return Trajectory(guess.states)
    if isinstance(guess, Callable):
        return Trajectory(guess(z0, xs))
    if isinstance(guess, str):
        raise TypeError(
            f"guess: expected RepeatInitial(), Zeros(), Random(), BatchMean(solution), states, a solution or a function, got {guess!r}"
        )
    return Trajectory(guess)
