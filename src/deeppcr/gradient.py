"""Derivatives of the solution: by the implicit function theorem, or through the iterations.

Shapes: L steps, B rows, D the packed state. With ``z_l = f_l(z_{l-1})`` and gradients ``g_l`` of the states, the
adjoint solves ``a_l = J_{l+1}^T a_{l+1} + g_l`` from the last step to the first; the gradients of parameters,
inputs and initial state are then one vector-Jacobian product of all steps with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .jacobian import DenseJacobian, Jacobian
from .linear import LinearSolver, solve_coupled
from .linearised import Linearised, Transposed
from .runtime import check_backward, is_out_of_memory, values_can_be_read
from .sequence import Sequence
from .sequence.evaluate import first_line
from .stopping import StoppingTest
from .warned import warn

#: Up to this width the dense adjoint is cheaper than iterating, even where the forward pass approximated.
DENSE_WIDTH = 32
MAX_SWEEPS = 60
#: What a product of a step is taken to round, relative to its largest terms; of half precision see where it is used.
_ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5}
#: By so much of itself an adjoint may be off, before somebody is to blame; of half precision see where it is used.
_ALLOWED = {torch.float64: 1e-7, torch.float32: 2e-3}
#: Directions in which rounding is sent back through all steps: a single one may be one that they do not let through.
_PROBES = 3
#: What is missing in a step may change the loss by so many tolerances of what its state does.
_MATTERS = 100
#: Why a solve that converged may not be differentiated where it is.
UNDETERMINED = (
    "gave up on states that have died out below the tolerance: the derivative of the step depends on their signs (as that of a "
    'ReLU does), which a tolerance says nothing of; Newton(scale="local") asks for digits of every state'
)


class Gradient:
    """Strategy: how the states come by their derivatives."""

    def goes_through(self, stop: StoppingTest) -> bool:
        """Whether the iterations themselves are differentiated: then the states need no more."""
        return False

    def attach(self, adjoint: Adjoint, states: Tensor) -> Tensor:
        """The states [L, B, D] of a solution, differentiable."""
        raise NotImplementedError


@dataclass(frozen=True)
class Implicit(Gradient):
    """Gradients by the implicit function theorem: one evaluation of all steps, one transposed bidiagonal solve.

    Memory does not depend on the number of iterations. The adjoint is checked with one vector-Jacobian product; where it
    fails it is found step by step, as the loop finds it, and the backward pass raises where the step is the reason (rows that
    influence each other, random numbers).
    Rows whose gradients arrive as inf or NaN pass them on as the loop does, unchecked, step by step. While a CUDA graph
    is captured nothing can be raised: there, rows that fail the check, or whose gradients are not finite, come out as NaN.
    Second derivatives raise: use ``Unrolled``.

    >>> import torch, deeppcr
    >>> z0 = torch.ones(3, requires_grad=True)
    >>> solution = deeppcr.solve(torch.sin, z0, length=20, solver=deeppcr.Newton(), gradient=deeppcr.Implicit())
    >>> solution.states[-1].sum().backward()
    >>> z0.grad.shape
    torch.Size([3])
    """

    def attach(self, adjoint: Adjoint, states: Tensor) -> Tensor:
        return adjoint.attach(states)


@dataclass(frozen=True)
class Unrolled(Gradient):
    """Gradients through Newton's iterations; second derivatives too.

    Two further iterations are made at the solution, with a graph: through them first and second derivatives are exact,
    however the solution was found. Where their Jacobians are not the step's (rows that influence each other), it raises. After ``FixedIterations`` there is no solution, and the graph goes through all of them.

    >>> import torch, deeppcr
    >>> z0 = torch.ones(3, requires_grad=True)
    >>> solution = deeppcr.solve(torch.sin, z0, length=20, solver=deeppcr.Newton(), gradient=deeppcr.Unrolled())
    >>> solution.states[-1].sum().backward()
    >>> z0.grad.shape
    torch.Size([3])
    """

    def goes_through(self, stop: StoppingTest) -> bool:
        return stop.fixed is not None

    def attach(self, adjoint: Adjoint, states: Tensor) -> Tensor:
        sequence, states = adjoint.sequence, states.detach()
        adjoint.check()  # derivatives of the iterations are wrong where their Jacobians are not the step's, and nobody would see it
        for _ in range(2):  # more iterations with true Jacobians
            previous = torch.cat([sequence.initial.unsqueeze(0), states[:-1]])
            values, blocks = DenseJacobian().evaluate(sequence, previous, range(sequence.length))
            states = states + solve_coupled(blocks[1:], values - states, reverse=False, solver=adjoint.linear)
        return states


class Adjoint(Linearised):
    """What the backward pass needs: all steps at the states of the solution, and how to solve a system of their Jacobians.

    Attributes:
        promised: the relative tolerance that the states are said to be within; None where nothing is said
        failed: is told why where a backward pass raises; None where nobody wants to know
    """

    promised: float | None = None
    failed: Callable[[str], None] | None = None

    def __init__(self, sequence: Sequence, states: Tensor, jacobian: Jacobian, linear: LinearSolver):
        super().__init__(sequence, states)
        self.jacobian: Jacobian = jacobian
        self.linear: LinearSolver = linear

    def attach(self, states: Tensor) -> Tensor:
        """``states``, differentiable."""
        return _Attach.apply(self.values, states, self)

    def checked(self, gradients: Tensor) -> Tensor:
        """``solve``; what it raises is told to who wants to know."""
        try:
            return self.solve(gradients)
        except Exception as error:
            if self.failed is not None and not is_out_of_memory(error):
                self.failed(first_line(error))
            raise

    def solve(self, gradients: Tensor) -> Tensor:
        """The adjoint [L, B, D] of the gradients [L, B, D] of the states, checked."""
        if len(gradients) == 1:
            return gradients
        device, dtype, enabled = self.autocast
        seen = values_can_be_read(gradients)
        finite = torch.isfinite(gradients).all(-1).all(0).unsqueeze(-1) if seen else None  # row by row
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            if finite is not None and not finite.all():
                # Loss scaling counts on inf and NaN to come through. No check has a meaning there, and a solver would spread
                # them to other steps than the loop does.
                known = self.solve(gradients.where(finite, 0)) if finite.any() else gradients
                return known.where(finite, self.walk(gradients))
            direct = self.jacobian.exact or self.sequence.layout.width <= DENSE_WIDTH
            if not seen and not direct:
                raise RuntimeError(
                    "the adjoint of wide states with an approximate Jacobian is found by iterating until it holds, which a CUDA "
                    "graph cannot capture"
                )
            adjoint, wrong = self._direct(gradients) if direct else self._iterative(gradients)
            if not seen:
                return adjoint.where(~wrong.any(0).unsqueeze(-1), torch.nan)
            if wrong.any():
                # Products of many Jacobians lose what steps keep, or the Jacobians are not the step's.
                adjoint = self.walk(gradients)
                jacobian = self._true_jacobian() if direct else None
                self.refuse(adjoint, adjoint[:-1] - gradients[:-1], jacobian, jacobians_count=self.jacobian.given)
            return adjoint

    def warn_of_lost_digits(self, adjoint: Tensor, matters: Tensor | None = None, offset: int = 0) -> None:
        """Say so where the gradients rest on digits of states that a tolerance does not vouch for.

        The adjoint times what is missing in every step is what that changes of the loss. It is to be little beside what
        a change of the states by their own size does. It is not where a signal dies out and is normalised afterwards.

        Args:
            matters: [B], what such a change of any state does, where these are not all of them; ``offset`` steps come before
        """
        if self.promised is None or not values_can_be_read(adjoint):
            return
        missing = (adjoint * (self.values.detach() - self.states)).abs().amax(-1)  # [L, B]
        matters = self.matters(adjoint) if matters is None else matters
        lost = missing > _MATTERS * self.promised * matters
        lost &= torch.isfinite(missing)
        if lost.any():
            index, row = (int(i) for i in lost.nonzero()[0])
            warn(
                f"the gradient is not the loop's: it depends on digits of the state at step {offset + index + 1} (row {row}) that are below the "
                'tolerance, as where a signal dies out and is normalised afterwards. Newton(scale="local") asks for them, or use '
                "solver=deeppcr.Loop()",
            )

    def matters(self, adjoint: Tensor) -> Tensor:
        """[B]: what a change of a state by its own size does to the loss, at most."""
        return (adjoint * self.states).abs().amax(-1).amax(0)

    def defect(self, adjoint: Tensor, gradients: Tensor) -> Tensor:
        """What is missing in ``a_l = J_{l+1}^T a_{l+1} + g_l``, by the step's own vector-Jacobian product."""
        missing = gradients - adjoint
        return torch.cat([missing[:-1] + self.pull(adjoint), missing[-1:]])

    def _direct(self, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Solve with the Jacobians of all steps, then once more for what the step itself says is missing.

        That correction is the error to first order. Where it is not small, the Jacobians may not be the step's: a check
        step by step would miss what adds up over a long sequence.

        Returns:
            the adjoint [L, B, D], and where it is off by more than rounding can explain, [L, B]
        """
        transposed = Transposed(self, self._true_jacobian())
        adjoint = self._substitute(gradients, transposed)
        defect = self.defect(adjoint, gradients)
        correction = self._substitute(defect, transposed)
        if self.arithmetic not in (torch.float32, torch.float64):
            # A Jacobian that is rounded once, 0.99 to 0.988, is off at every step in the same direction, which the step itself is not. But the
            # rounding of its products adds up in the correction as in the loop's own pass: it is no measure of what is wrong.
            return adjoint + correction, self._wrong(adjoint, self._significant(defect, adjoint), gradients)
        wrong = self._wrong(adjoint, correction, gradients)
        if values_can_be_read(adjoint) and wrong.any() and torch.isfinite(adjoint).all():
            error = (correction.abs() - self._room(adjoint, transposed)).clamp(min=0)
            wrong = self._wrong(adjoint, error, gradients)
        return adjoint + correction, wrong

    def _true_jacobian(self) -> Jacobian:
        return self.jacobian if self.jacobian.exact else DenseJacobian()

    def _substitute(self, rhs: Tensor, transposed: Transposed, carried: Tensor | None = None) -> Tensor:
        """Solve the transposed system part by part, from the last back; ``carried``: what steps behind all of these hand back, [1, B, D]."""
        found = []
        for part, blocks in reversed(transposed):
            terms = rhs[part]
            if carried is not None:
                terms = torch.cat([terms[:-1], terms[-1:] + carried])
            solution = solve_coupled(blocks[1:], terms, reverse=True, solver=self.linear)
            carried = blocks[:1].apply(solution[:1])
            found.append(solution)
        return torch.cat(found[::-1])

    def _iterative(self, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Where Jacobians are too large to form: correct the approximate adjoint with true products until it holds.

        Returns:
            as ``_direct``: wrong is all of it where the sweeps do not converge
        """
        wrong = torch.zeros_like(gradients[..., 0], dtype=torch.bool)
        approximate = self.jacobian.evaluate(self.sequence, self.previous.detach(), range(len(gradients)))[1]
        couplings = approximate.transpose()[1:]
        adjoint, missing = torch.zeros_like(gradients), gradients
        tolerance = 10 * torch.finfo(gradients.dtype).eps
        size_before = None
        for _ in range(MAX_SWEEPS):
            change = solve_coupled(couplings, missing, reverse=True, solver=self.linear)
            if not torch.isfinite(change).all():
                break
            adjoint = adjoint + change
            missing = self.defect(adjoint, gradients)
            size, scale = change.abs().amax((0, -1)), adjoint.abs().amax((0, -1))  # row by row
            rate = size / size_before if size_before is not None else torch.ones_like(size)
            if ((size <= tolerance * scale * (1 - rate).clamp(min=0)) | (size == 0)).all():
                return adjoint, wrong
            size_before = size
        return adjoint, ~wrong

    def _room(self, adjoint: Tensor, transposed: Transposed) -> Tensor:
        """How far rounding alone may put the adjoint off, [L, B, D].

        A gradient that a step does not let through, such as that of the sum of a softmax, leaves nothing but rounding further
        back: two ways to find it agree in no digit. What the products of all steps round is sent back through them, in a
        few directions of no meaning: it decays as everything does, so that a mistake further back still shows.
        """
        products = [type(blocks)(blocks.data.abs()).apply(adjoint[part].abs()) for part, blocks in transposed]
        rounded = torch.cat([torch.cat(products)[1:], torch.zeros_like(adjoint[:1])])
        generator, room = torch.Generator().manual_seed(0), torch.zeros_like(adjoint)
        for _ in range(_PROBES):
            probe = torch.randn(rounded.shape, generator=generator, dtype=rounded.dtype).to(rounded.device)
            room = torch.maximum(room, self._substitute(probe * rounded, transposed).abs())
        return _ROUNDING[adjoint.dtype] * room.amax(-1, keepdim=True)

    def _significant(self, defect: Tensor, adjoint: Tensor) -> Tensor:
        """The defect of each step by itself, but for what products with the adjoint of the step after it round."""
        rounding = _ROUNDING.get(self.arithmetic, 0.02)
        room = rounding * adjoint[1:].abs().amax(-1, keepdim=True)
        inner = defect[:-1]
        return torch.cat([inner - torch.minimum(torch.maximum(inner, -room), room), defect[-1:]])

    def _wrong(self, adjoint: Tensor, error: Tensor, gradients: Tensor) -> Tensor:
        """Where an error, step by step and row by row, is more than rounding can explain: [L, B]."""
        return ~((error.abs().amax(-1) <= self.explained(adjoint, gradients)) & torch.isfinite(adjoint).all(-1))

    def explained(self, adjoint: Tensor, gradients: Tensor) -> Tensor:
        """[L, B]: by how much rounding may put an adjoint off."""
        scale = torch.maximum(adjoint.abs().amax(-1), gradients.abs().amax(-1))
        scale[:-1] = torch.maximum(scale[:-1], (adjoint[:-1] - gradients[:-1]).abs().amax(-1))
        underflow = 32 * torch.finfo(gradients.dtype).tiny  # far back, a contracting sequence's adjoint is no number
        return _ALLOWED.get(self.arithmetic, 0.2) * scale + underflow


class _Attach(torch.autograd.Function):
    """The states, with the gradient of the values they satisfy: backward turns gradients into the adjoint."""

    @staticmethod
    def forward(ctx, values, states, adjoint):
        ctx.adjoint = adjoint
        return states.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        (gradients,) = grad_outputs
        check_backward(gradients)
        adjoint = ctx.adjoint.checked(gradients)
        ctx.adjoint.warn_of_lost_digits(adjoint)
        return adjoint, None, None


def refuse_gradients(states: Tensor, message: str, *depends_on: Tensor) -> Tensor:
    """The states, with a backward pass that raises with this message, unless its gradient is zero.

    Args:
        depends_on: tensors through which the states depend on whatever a gradient may be asked for, where they do not know it
            themselves. A backward pass visits only what lies on the way to that
    """
    return _Refuse.apply(states, message, *depends_on)


class _Refuse(torch.autograd.Function):
    """States that did not converge: usable, but not to be differentiated."""

    @staticmethod
    def forward(ctx, states, message, *depends_on):
        ctx.message, ctx.count = message, len(depends_on)
        return states.detach().clone()

    @staticmethod
    def backward(ctx, *gradients):
        if not gradients[0].any():  # what the loss leaves out is not differentiated
            return None, None, *(None,) * ctx.count
        raise RuntimeError(f"no gradient: the solve did not converge. {ctx.message}")
