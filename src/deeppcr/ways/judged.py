"""What the step itself says of the states that were found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..gradient import UNDETERMINED, Adjoint, Gradient, Implicit, refuse_gradients
from ..newton import Newton
from ..newton.certificate import FALSE_DERIVATIVE, steps_have_derivative
from ..newton.iteration import Outcome
from ..sequence import Sequence
from ..sequence.evaluate import StepError
from ..sequence.layout import Layout
from ..sequence.rows import rows_that_differ
from ..sequence.trace import coarser_products
from ..sequence.words import in_words
from ..solution import Plan, Result, Solution, worst_of
from ..tolerance import measure
from .fused import Call, attach_fused

_Adjoint = TypeVar("_Adjoint")
#: So many steps of a solve are taken by themselves, too, at most.
_ALONE = 8


class CoarseStep(StepError):
    """It rounds otherwise when all steps are evaluated at once: the loop alone gives the loop's result."""


@dataclass(frozen=True)
class Judged(Generic[_Adjoint]):
    """An outcome that the step itself has borne out; what it claimed beyond that, it has lost.

    Attributes:
        residual: [B], of the states as they are
        adjoint: what a backward pass needs; None where there can be none
    """

    outcome: Outcome
    residual: Tensor
    adjoint: _Adjoint | None

    @property
    def results(self) -> list[Result]:
        return self.outcome.results


def judge(sequence: Sequence, outcome: Outcome, solver: Newton, *, differentiated: bool = True) -> Judged[Adjoint]:
    """One evaluation of all steps, with a graph where a gradient may be asked for."""
    adjoint = None
    if differentiated and torch.is_grad_enabled() and sequence.needs_gradients:
        adjoint = Adjoint(sequence, outcome.states, solver.jacobian, solver.linear)
        values = adjoint.values
    else:
        # As far as the first step tells nothing needs a gradient; whether the others do shows here.
        with torch.set_grad_enabled(differentiated and torch.is_grad_enabled()):
            previous = torch.cat([sequence.initial.detach().unsqueeze(0), outcome.states[:-1].detach()])
            values = sequence.values(previous, range(sequence.length))
        if values.requires_grad:
            adjoint = Adjoint(sequence, outcome.states, solver.jacobian, solver.linear)
            values = adjoint.values
    return _measured(sequence, outcome, solver, adjoint, values.detach())


@torch.no_grad()
def _measured(
    sequence: Sequence, outcome: Outcome, solver: Newton, adjoint: Adjoint | None, values: Tensor
) -> Judged[Adjoint]:
    states, layout = outcome.states.detach(), sequence.layout
    tolerance = solver.tolerance(layout.dtype)
    initial = sequence.initial.detach()
    residual, held, drift = measure(values, states, initial, tolerance)
    if solver.stop.promises:
        outcome = without_claim(outcome, ~held, torch.zeros_like(outcome.exact_steps))
        drifts = drifting(outcome, solver, drift)
        if drifts.any():
            true = steps_have_derivative(sequence, solver.jacobian, initial, states, values, tolerance.rtol)
            exact = (values == states).all(-1).long().cumprod(0).sum(0)  # steps that follow from the initial state
            outcome = without_derivative(outcome, drifts & ~true, exact)
    return Judged(outcome, residual, adjoint)


@torch.no_grad()
def refuse_other_alone(sequence: Sequence, judged: Judged[Adjoint], solver: Newton) -> None:
    """Raise where some steps, each by itself as in the loop, do not give the states that all of them at once have borne out: a step may
    catch the error of an operation that one of the others made fail, say, and go on otherwise."""
    outcome, layout, length = judged.outcome, sequence.layout, sequence.length
    claimed = torch.tensor([not result.failed for result in outcome.results], device=layout.device)
    if not solver.stop.promises or sequence.evaluation == "loop" or not claimed.any():
        return
    states, initial = outcome.states.detach(), sequence.initial.detach()
    count = min(_ALONE, 3 + length // 16)  # of few steps, to take many again would take long
    places = sorted({0, length - 1, *(int(length * (0.618034 * n % 1)) for n in range(1, count - 1))})
    alone = torch.stack([sequence.step(at, states[at - 1] if at else initial) for at in places])
    # Rounding depends on what stands beside a step: in products that is a part of the largest number, and of numbers that cancel all of it.
    tolerance, eps = solver.tolerance(layout.dtype), torch.finfo(layout.dtype).eps
    sizes = torch.maximum(states.abs().amax(0), initial.abs())
    allowed = 10 * (tolerance.atol + max(tolerance.rtol, eps**0.5) * sizes) + 1000 * eps * sizes.amax(-1, keepdim=True)
    if (claimed & rows_that_differ(alone, states[places], allowed).any(0)).any():
        error = differs(sequence)
        if not isinstance(error, CoarseStep):  # whose roundings the caller has asked for
            raise error


def drifting(outcome: Outcome, solver: Newton, drift: Tensor) -> Tensor:
    """[B]: rows that updates by Jacobians say are right, though by ``tolerance.Measured.drift`` they are so only if the Jacobians are.

    Approximate ones have a certificate.
    """
    updated = [result in (Result.CONVERGED, Result.PRECISION_FLOOR) for result in outcome.results]
    return torch.tensor(updated, device=drift.device) & (drift > 1) & solver.quadratic


def without_derivative(outcome: Outcome, lost: Tensor, exact_steps: Tensor) -> Outcome:
    """Rows [B] whose steps do not change as their Jacobians say lose their claim; so many of their states are exact."""
    return without_claim(outcome, lost, exact_steps, FALSE_DERIVATIVE) if lost.any() else outcome


def without_claim(outcome: Outcome, lost: Tensor, exact_steps: Tensor, *reasons: str) -> Outcome:
    """Rows [B] that claimed to be right lose that claim; so many of their states are exact."""
    lost = lost & torch.tensor([not result.failed for result in outcome.results], device=lost.device)
    results = [
        Result.NOT_CONVERGED if bad else result for bad, result in zip(lost.tolist(), outcome.results, strict=True)
    ]
    exact = torch.where(lost, exact_steps, outcome.exact_steps)
    return replace(outcome, results=results, exact_steps=exact, reasons=(*outcome.reasons, *reasons))


def determined(judged: Judged[Adjoint], solver: Newton, plan: Plan) -> Judged[Adjoint]:
    """Rows whose states do not determine the derivatives of their steps lose their claim, and the plan says why."""
    outcome, adjoint = judged.outcome, judged.adjoint
    kept = torch.tensor([not result.failed for result in outcome.results], device=outcome.states.device)
    if adjoint is None or not solver.stop.promises or not kept.any():
        return judged
    tolerance = solver.tolerance(outcome.states.dtype)
    adjoint.promised = tolerance.rtol
    steps = adjoint.determined(outcome.states.detach(), tolerance, kept)
    exact = torch.minimum(steps, outcome.exact_steps)
    lost = kept & (steps < outcome.states.shape[0])
    if not lost.any():
        return judged
    plan.note(UNDETERMINED)
    return replace(judged, outcome=without_claim(outcome, lost, exact, UNDETERMINED))


def differentiable(judged: Judged[Adjoint], gradient: Gradient) -> Outcome:
    """The outcome, its states differentiable where a backward pass may come."""
    outcome = judged.outcome
    if judged.adjoint is None:
        return outcome
    return replace(outcome, states=gradient.attach(judged.adjoint, outcome.states))


def refused(sequence: Sequence, judged: Judged[Adjoint]) -> Outcome:
    """The outcome, rows of which failed; a backward pass through its states raises."""
    outcome, depends_on = judged.outcome, () if judged.adjoint is None else (judged.adjoint.values,)
    states = refuse_gradients(outcome.states, describe(sequence, outcome), *depends_on)
    return replace(outcome, states=states)


def differs(sequence: Sequence) -> StepError:
    """Said of a step that gives another result when all steps are evaluated at once than one after the other."""
    what = "step: gives another result when all steps are evaluated at once than one after the other: "
    dtype, first = sequence.layout.dtype, sequence.initial.detach()
    coarse = coarser_products(lambda: sequence.step(0, first), dtype)
    if coarse is not None:
        rounding = 2 * torch.finfo(coarse).eps
        return CoarseStep(
            f"{what}it multiplies in {coarse}, while its state is {dtype}. Have it compute in that precision, or loosen the "
            f"tolerance to what it can hold, about Newton(atol={rounding:.0e}, rtol={rounding:.0e})"
        )
    return StepError(
        f"{what}it is random, keeps a state of its own, its rows influence each other, or it catches an error that several steps at once "
        "raise and one does not. deeppcr.check(step, z0, xs) may tell which; solver=deeppcr.Loop() takes them one by one"
    )


def is_no_worse(measured: Tensor, residual: Tensor, states: Tensor, solver: Newton) -> bool:
    """Whether a residual [B], measured anew, is what it was, but for rounding."""
    tolerance = solver.tolerance(states.dtype)
    allowed = 2 * residual + tolerance.atol + tolerance.rtol * states.abs().amax((0, 2))
    return bool((measured <= allowed).all())


def describe(sequence: Sequence, outcome: Outcome) -> str:
    """The worst result in words, with the step where it happened and why Newton gave up."""
    return in_words(outcome.results, outcome.exact_steps, sequence.given_inputs, sequence.layout, *outcome.reasons)


def solution_of(
    outcome: Outcome, states: Tensor, residual: Tensor, initial: Tensor, layout: Layout, plan: Plan, **more: Any
) -> Solution:
    """An outcome as it is told: in the shapes of the state that was given.

    Args:
        states: [L, B, D], with their derivatives
        residual, initial: [B] and [B, D]
        more: other attributes of a Solution
    """
    batch = layout.batch_shape
    return Solution(
        states=layout.unpack(states),
        iterations=outcome.iterations.reshape(batch),
        residual=residual.reshape(batch),
        result=worst_of(outcome.results),
        results=tuple(outcome.results),
        exact_steps=outcome.exact_steps.reshape(batch),
        updates=outcome.updates.reshape(-1, *batch),
        plan=plan,
        z0=layout.unpack(initial.detach()),
        local=None if outcome.local is None else outcome.local.reshape(batch),
        **more,
    )


def attach(step: Any, z0: Any, xs: Any, states: tuple[Tensor, ...], newton: Newton, *, batch_dims: int) -> list[Tensor]:
    """The leaves of states that an earlier solve has found, differentiable by the implicit function theorem in z0, xs and all that the step closes over.

    Args:
        step, z0, xs, batch_dims: as ``solve`` was given them
        states: the leaves of what it found, [L, *batch, *state] each
        newton: its solver; of a loop the usual one
    """
    call = Call(step, z0, xs, None, batch_dims)
    if call.has_kernels and not call.known[0].kernels.no_gradients:
        return attach_fused(call, call.known[0].layout.pack_leaves(states, 1))
    sequence = Sequence(step, z0, xs, length=None, batch_dims=batch_dims, watched=False)
    packed = sequence.layout.pack_leaves(states, 1)
    adjoint = Adjoint(sequence, packed, newton.jacobian, newton.linear)
    promised = newton.promised(packed.dtype)
    adjoint.promised = None if promised is None else promised.rtol
    return sequence.layout.leaves(Implicit().attach(adjoint, packed))
