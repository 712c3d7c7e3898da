"""Sampling as a ``Sequence``: for Newton's method, and for derivatives of what any method found.

Shapes: L steps, B samples, D the flattened sample, K slots. The packed state is [B, D K], in the prior's basis, where
its Jacobians are diagonal (or have blocks K x K).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..gradient import Adjoint
from ..jacobian import GivenJacobian
from ..linear import Auto
from ..sequence import Sequence, rowwise
from .coupling import Coupling
from .problem import Problem


class Rotated:
    """The problem's step in the basis of a coupling, as ``deeppcr.solve`` takes it.

    Args:
        who: [B'], of which samples; None: of all

    Attributes:
        step: ``step(z, x)`` on rows
        z0: [B', D K]
        xs: tensors [L, B', ...] by name
    """

    def __init__(self, problem: Problem, coupling: Coupling, who: Tensor | None = None):
        self.problem: Problem = problem
        self.coupling: Coupling = coupling
        initial, shift = problem.initial, problem.shift
        if who is None:
            who = torch.arange(problem.samples, device=problem.device)
        else:
            initial, shift = initial[who], shift[:, who] if shift is not None else None
        shape = problem.length, len(who)
        index = torch.arange(problem.length, device=problem.device)[:, None].expand(shape)
        self.xs: dict[str, Tensor] = {"index": index, "who": who.expand(shape)}
        if shift is not None:
            self.xs["shift"] = shift
        self.z0: Tensor = self.pack(initial)
        self.step: Callable[..., Any] = rowwise(self._step)

    def pack(self, states: Tensor) -> Tensor:
        """[..., D, K] to [..., D K] in the basis."""
        return self.coupling.into(states).flatten(-2)

    def unpack(self, packed: Tensor) -> Tensor:
        return self.coupling.out_of(packed.unflatten(-1, (self.problem.width, self.problem.slots)))

    def _step(self, packed: Tensor, x: dict[str, Tensor]) -> Tensor:
        return self.pack(self.problem.row_step(self.unpack(packed), x["index"], x["who"], x.get("shift")))

    @property
    def jacobian(self) -> GivenJacobian:
        return GivenJacobian(self.coupling.blocks)


def attach(problem: Problem, coupling: Coupling, states: Tensor, who: Tensor | None = None) -> Tensor:
    """``states`` [L, B', D, K] that satisfy all steps, of the samples ``who``, differentiable in noise and denoiser.

    One evaluation of all steps with a graph; backward, the adjoint is found by the prior's iteration with the
    steps' own vector-Jacobian products (see ``deeppcr.gradient``).
    """
    rotated = Rotated(problem, coupling, who)
    sequence = Sequence(rotated.step, rotated.z0, rotated.xs, batch_dims=1)
    if not sequence.needs_gradients:
        return states
    adjoint = Adjoint(sequence, rotated.pack(states), rotated.jacobian, Auto())
    sequence.stop_watching()
    return rotated.unpack(adjoint.attach(rotated.pack(states)))
