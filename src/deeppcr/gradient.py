"""Derivatives of the solution: by the implicit function theorem, or through the iterations.

Shapes: L steps, B rows, D the packed state. With ``z_l = f_l(z_{l-1})`` and gradients ``g_l`` of the states, the
adjoint solves ``a_l = J_{l+1}^T a_{l+1} + g_l`` from the last step to the first; the gradients of parameters,
inputs and initial state are then one vector-Jacobian product of all steps with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .jacobian import DenseJacobian, Jacobian, block_bytes
from .linear import LinearSolver, solve_coupled
from .sequence import Sequence

#: Up to this width the dense adjoint is cheaper than iterating, even where the forward pass approximated.
_DENSE_WIDTH = 32
_MAX_SWEEPS = 60


@dataclass(frozen=True)
class Implicit:
    """Gradients by the implicit function theorem: one evaluation of all steps, one transposed bidiagonal solve.

    Memory does not depend on the number of iterations. The adjoint is checked with one vector-Jacobian product;
    where it fails (rows that influence each other, a step with random numbers), the backward pass raises.
    Second derivatives raise: use ``Unrolled``.

    >>> import torch, deeppcr
    >>> z0 = torch.ones(3, requires_grad=True)
    >>> deeppcr.solve(torch.sin, z0, length=20, gradient=deeppcr.Implicit()).states[-1].sum().backward()
    >>> z0.grad.shape
    torch.Size([3])
    """


@dataclass(frozen=True)
class Unrolled:
    """Gradients through the iterations as they ran, of any order; memory grows with their number.

    >>> import torch, deeppcr
    >>> z0 = torch.ones(3, requires_grad=True)
    >>> deeppcr.solve(torch.sin, z0, length=20, gradient=deeppcr.Unrolled()).states[-1].sum().backward()
    >>> z0.grad.shape
    torch.Size([3])
    """


class Adjoint:
    """What the backward pass needs: all steps evaluated once, with a graph, at the states of the solution."""

    def __init__(self, sequence: Sequence, states: Tensor, jacobian: Jacobian, linear: LinearSolver):
        self.sequence, self.jacobian, self.linear = sequence, jacobian, linear
        device = sequence.layout.device.type
        # The backward pass evaluates the step again: in the precision of the forward pass, wherever it is called from.
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        states = states.detach()
        self.inner = states[:-1].requires_grad_()  # the states that other steps start from
        self.previous = torch.cat([sequence.initial.unsqueeze(0), self.inner])
        self.values = sequence.values(self.previous, range(sequence.length))

    def attach(self, states: Tensor) -> Tensor:
        """``states``, differentiable."""
        return _Attach.apply(self.values, states, self)

    def pull(self, adjoint: Tensor) -> Tensor:
        """``J_{l+1}^T a_{l+1}`` for l = 1 .. L - 1, by the true vector-Jacobian product: [L, B, D] to [L - 1, B, D]."""
        (pulled,) = torch.autograd.grad(
            self.values, self.inner, adjoint, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return pulled

    def solve(self, gradients: Tensor) -> Tensor:
        """The adjoint [L, B, D] of the gradients [L, B, D] of the states, checked."""
        if len(gradients) == 1:
            return gradients
        device, dtype, enabled = self.autocast
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            if not (self.jacobian.true or self.sequence.layout.width <= _DENSE_WIDTH):
                return self._iterative(gradients)
            adjoint = self._direct(gradients)
            self._check(adjoint, gradients)
            return adjoint

    def _direct(self, gradients: Tensor) -> Tensor:
        """Solve with the Jacobians of all steps, as many at a time as the memory budget allows, from the last back."""
        jacobian = self.jacobian if self.jacobian.true else DenseJacobian()
        length = len(gradients)
        parts = [slice(0, length)]
        if isinstance(jacobian, DenseJacobian):
            at_once = max(1, jacobian.budget(self.sequence) // (4 * block_bytes(self.sequence)))
            parts = [slice(start, min(start + at_once, length)) for start in range(0, length, at_once)]
        previous, found, carried = self.previous.detach(), [], None
        for part in reversed(parts):
            _, blocks = jacobian.evaluate(self.sequence, previous[part], range(part.start, part.stop))
            rhs = gradients[part]
            if carried is not None:
                rhs = torch.cat([rhs[:-1], rhs[-1:] + carried])
            transposed = blocks.transpose()
            adjoint = solve_coupled(transposed[1:], rhs, reverse=True, solver=self.linear)
            carried = transposed[:1].apply(adjoint[:1])
            found.append(adjoint)
        return torch.cat(found[::-1])

    def _iterative(self, gradients: Tensor) -> Tensor:
        """Where Jacobians are too large to form: correct the approximate adjoint with true products until it holds.

        After k sweeps the last k steps are exact; if the sweeps do not converge, the rest is done step by step.
        """
        approximate = self.jacobian.evaluate(self.sequence, self.previous.detach(), range(len(gradients)))[1]
        couplings = approximate.transpose()[1:]
        adjoint = torch.zeros_like(gradients)
        missing, size_before = gradients, None
        tolerance = 10 * torch.finfo(gradients.dtype).eps
        for _ in range(_MAX_SWEEPS):
            change = solve_coupled(couplings, missing, reverse=True, solver=self.linear)
            if not torch.isfinite(change).all():
                break
            adjoint = adjoint + change
            missing = gradients - adjoint
            missing = torch.cat([missing[:-1] + self.pull(adjoint), missing[-1:]])
            size, scale = change.abs().amax(), adjoint.abs().amax()
            rate = size / size_before if size_before is not None else torch.ones_like(size)
            if size <= tolerance * scale * (1 - rate).clamp(min=0):
                return adjoint
            size_before = size
        return self._step_by_step(gradients)

    def _step_by_step(self, gradients: Tensor) -> Tensor:
        found = [gradients[-1]]
        for index in range(len(gradients) - 1, 0, -1):
            with torch.enable_grad():
                start = self.previous[index].detach().requires_grad_()
                value = self.sequence.step(index, start)
            (pulled,) = torch.autograd.grad(value, start, found[-1], allow_unused=True, materialize_grads=True)
            found.append(gradients[index - 1] + pulled)
        return torch.stack(found[::-1])

    def _check(self, adjoint: Tensor, gradients: Tensor) -> None:
        pulled = self.pull(adjoint)
        difference = (adjoint[:-1] - gradients[:-1] - pulled).abs()
        # Rounding is relative to the largest terms; what this must find (rows that influence each other, wrong
        # Jacobians) is off by percents.
        scale = torch.maximum(adjoint[:-1].abs().amax((-2, -1)), pulled.abs().amax((-2, -1)))
        allowed = {torch.float64: 1e-7, torch.float32: 2e-3}.get(gradients.dtype, 0.2)
        underflow = 32 * torch.finfo(gradients.dtype).tiny  # far back, a contracting sequence's adjoint is no number
        wrong = ~(difference.amax((-2, -1)) <= allowed * scale + underflow)
        if wrong.any():
            index = int(wrong.nonzero()[-1]) + 2
            raise RuntimeError(
                f"the adjoint does not hold at step {index}: the step's own vector-Jacobian product disagrees. Either "
                "rows of the batch influence each other (is the leading dimension really a batch? see batch_dims), or "
                "the step is random or has side effects, or a given Jacobian is wrong; deeppcr.check(step, z0, xs) tells which"
            )


class _Attach(torch.autograd.Function):
    """The states, with the gradient of the values they satisfy: backward turns gradients into the adjoint."""

    @staticmethod
    def forward(ctx, values, states, adjoint):
        ctx.adjoint = adjoint
        return states.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        (gradients,) = grad_outputs
        if torch.is_grad_enabled():
            raise RuntimeError(
                "second derivatives through deeppcr.solve are not taken by gradient=Implicit(); "
                "use gradient=deeppcr.Unrolled()"
            )
        return ctx.adjoint.solve(gradients), None, None
