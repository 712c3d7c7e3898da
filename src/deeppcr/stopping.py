"""When Newton's iteration stops: the tests that a user chooses from."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor


class StoppingTest:
    """Strategy: when Newton's iteration has done enough for a row.

    Attributes:
        promises: whether CONVERGED says how far the states are off: it is then held against the tolerance, and certified
        by_residual: whether a small residual ends the iteration by itself
        repeatable: whether a recording of its operations may stand for it; a class says so for itself (``runtime.declares``)
    """

    promises = False
    by_residual = False
    repeatable = False

    @property
    def fixed(self) -> int | None:
        """So many iterations whatever they find, and nothing is tested; None: until the test is met."""
        return None

    def residual_suffices(self, residual: Tensor, at_first: Tensor) -> Tensor:
        """[B]: by the residual [n, B, D] after an update, and its size [B] at first, may the row be done?"""
        return torch.isfinite(residual).all(-1).all(0)


@dataclass(frozen=True)
class UpdateTest(StoppingTest):
    """Stop when the last update of every step, leaf and row is within the tolerance, and the residual is too.

    The update estimates the error of the trajectory; a residual alone does not (with small time steps it is small
    for any guess). With an approximate Jacobian the estimate is scaled by the observed rate of convergence.

    >>> import torch, deeppcr
    >>> newton = deeppcr.Newton(stop=deeppcr.UpdateTest(), atol=1e-6, rtol=0.0)
    >>> deeppcr.solve(torch.cos, torch.ones(1), length=64, solver=newton).result.name
    'CONVERGED'
    """

    promises = True
    repeatable = True


@dataclass(frozen=True)
class PaperTest(StoppingTest):
    """Stop when the largest residual is below ``absolute``, or below ``relative`` times that of the first iteration.

    The rule of the paper, per row. It says little about the error of the trajectory: for reproducing the paper's
    figures, not for results.

    >>> import torch, deeppcr
    >>> newton = deeppcr.Newton(stop=deeppcr.PaperTest(1e-4, 1e-4), chunk=1)
    >>> deeppcr.solve(torch.cos, torch.ones(1), length=64, solver=newton).result.name
    'CONVERGED'
    """

    absolute: float = 1e-4
    relative: float = 1e-4
    by_residual = True
    repeatable = True

    def __post_init__(self) -> None:
        for name in ("absolute", "relative"):
            value = getattr(self, name)
            if not isinstance(value, Real):
                raise TypeError(f"{name}: expected a number, got {value!r}")
            if not float(value) >= 0:  # nor NaN
                raise ValueError(f"{name}: expected a number of at least 0, got {value}")

    def residual_suffices(self, residual: Tensor, at_first: Tensor) -> Tensor:
        size = residual.abs().amax((0, -1))
        return (size <= self.absolute) | (size <= self.relative * at_first)


@dataclass(frozen=True)
class FixedIterations(StoppingTest):
    """Run ``count`` iterations and test nothing.

    Where nothing but rounding is left before, ``solution.iterations`` counts no further ones. They are spared, too, except in
    a solve that is replayed as a CUDA graph, which runs all of them. As many as the ``iterations`` of a solve that tests give
    its states; by fused kernels (``plan.evaluation``) one less does, as their last one only confirms.

    While the caller captures a CUDA graph, nothing in such a solve asks the host, forward or backward. What would be
    mended or raised cannot be there: the states of a row that fails come out as NaN from its ``exact_steps`` on, and so do
    gradients that fail their check.

    >>> import torch, deeppcr
    >>> newton = deeppcr.Newton(stop=deeppcr.FixedIterations(3), chunk=1)
    >>> deeppcr.solve(torch.cos, torch.ones(1), length=64, solver=newton).iterations
    tensor(3)
    """

    count: int
    repeatable = True

    def __post_init__(self) -> None:
        if not isinstance(self.count, Integral):
            raise TypeError(f"count: expected a whole number, got {self.count!r}")
        if self.count < 1:
            raise ValueError(f"count: at least one iteration, got {self.count}")

    @property
    def fixed(self) -> int | None:
        return self.count
