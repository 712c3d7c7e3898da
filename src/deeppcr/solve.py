"""``solve``: the loop in parallel, and what to do where that does not work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .convergence import measure
from .gradient import Adjoint, Implicit, Unrolled, two_newton_steps
from .graphs.cache import captured_solves, may_capture
from .graphs.straight import run_unseen
from .guess import Guess, RepeatInitial, as_guess
from .jacobian import DenseJacobian, GivenJacobian
from .newton import Loop, Newton, Outcome
from .runtime import in_functorch, is_capturing
from .sequence import Rowwise, Sequence
from .sequence.evaluate import StepError
from .sequence.layout import Layout
from .sequence.purity import changes_in_place, version_of
from .sequence.trace import coarser_products
from .solution import ConvergenceError, ConvergenceWarning, Plan, Result, Solution

_FAILED = (Result.NOT_CONVERGED, Result.NON_FINITE)
_TRUSTED = (Result.CONVERGED, Result.PRECISION_FLOOR, Result.FINISHED_BY_LOOP)


def solve(
    step: Callable | list[Callable] | nn.ModuleList,
    z0: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    batch_dims: int | None = None,
    solver: Newton | Loop = Newton(),
    guess: Any = RepeatInitial(),
    gradient: Implicit | Unrolled = Implicit(),
    on_failure: Literal["loop", "raise", "return"] = "loop",
) -> Solution:
    """Run ``for x in xs: z = step(z, x)`` in parallel over its steps.

    Args:
        step: the body of the loop: ``step(z, x)``, or ``step(z)`` without xs; or a list of L such callables. It must be
            free of side effects and of random numbers, and treat the rows of a batch independently; what is seen to be
            otherwise raises StepError, and ``deeppcr.check`` looks for the rest
        z0: the initial state: a floating tensor or a tuple of them, [*batch, ...]
        xs: what changes from step to step: a tensor or a nest of tensors, each [L, ...]; ``step`` sees ``leaf[l]``
        length: L, where there are no xs
        batch_dims: how many leading dimensions of the state are batch. Default: 0 if every tensor of z0 has at most
            one dimension, else 1
        solver: Newton(...), Picard(...), Jacobi(...) or Loop()
        guess: where the iteration starts: RepeatInitial(), Zeros(), Random(), BatchMean(solution), a solution, states,
            or a function of ``(z0, xs)`` that returns states
        gradient: Implicit() or Unrolled()
        on_failure: "loop" finishes the rest one step at a time and warns, "raise" raises ConvergenceError,
            "return" returns what there is, and a backward pass through it raises

    Returns:
        a Solution; ``states`` mirrors z0, each leaf [L, *leaf of z0], differentiable in z0, xs and all that step closes over

    >>> import torch, deeppcr
    >>> weights = torch.randn(1000, 8, 8) / 8**0.5
    >>> solution = deeppcr.solve(lambda z, w: torch.tanh(z) @ w.mT, torch.randn(4, 8), weights)
    >>> solution.states.shape, solution.result.name
    (torch.Size([1000, 4, 8]), 'CONVERGED')
    """
    # Its control flow depends on values, so a compiler steps around it. (As a decorator, disable would import the whole
    # compiler with the library.)
    run: Any = torch.compiler.disable(_solve) if torch.compiler.is_compiling() else _solve
    return run(step, z0, xs, length, batch_dims, solver, guess, gradient, on_failure)


def _solve(
    step: Any,
    z0: Any,
    xs: Any,
    length: int | None,
    batch_dims: int | None,
    solver: Newton | Loop,
    guess: Any,
    gradient: Implicit | Unrolled,
    on_failure: str,
) -> Solution:
    _check_arguments(solver, gradient, on_failure)
    if any(isinstance(leaf, Tensor) and is_capturing(leaf.device) for leaf in pytree.tree_leaves(z0)):
        return _solve_unseen(step, z0, xs, length, batch_dims, solver, guess, gradient, on_failure)
    unrolled = isinstance(gradient, Unrolled) and torch.is_grad_enabled()
    traced = not unrolled and may_capture(solver, z0)
    looped = isinstance(solver, Loop)  # in which a step may keep what it likes
    sequence = Sequence(step, z0, xs, length=length, batch_dims=batch_dims, traced=traced, watched=not looped)
    if looped:
        plan = Plan()
        outcome = _mark_non_finite(_plain_loop(sequence), Result.LOOP)
        if Result.NON_FINITE in outcome.results:
            warnings.warn(_describe(sequence, outcome), ConvergenceWarning, stacklevel=3)
        return _solution(sequence, outcome, plan, torch.zeros_like(sequence.initial.detach()[:, 0]))
    try:
        solution = _solve_sequence(sequence, as_guess(guess, z0, xs), solver, gradient, on_failure, traced=traced)
    except BaseException as error:
        sequence.check_purity(error)  # which may know better what is wrong
        raise
    sequence.check_purity()
    return solution


def _solve_sequence(
    sequence: Sequence, start: Guess, solver: Newton, gradient: Implicit | Unrolled, on_failure: str, *, traced: bool
) -> Solution:
    plan = Plan()
    unrolled = isinstance(gradient, Unrolled) and torch.is_grad_enabled()
    fixed = solver.stop.fixed is not None
    found = captured_solves.solve(solver, sequence, start, plan) if traced else None
    if found is not None:  # and has been checked
        outcome, residual = found
        if not (torch.is_grad_enabled() and sequence.needs_gradients):
            return _solution(sequence, outcome, plan, residual)
        adjoint = Adjoint(sequence, outcome.states, solver.jacobian, solver.linear)
        # Its values come from the step as it is now: what a trace cannot see shows here.
        measured, checked = _measure(sequence, outcome, solver, adjoint.values)
        if checked.results == outcome.results and _is_no_worse(measured, residual, outcome.states, solver):
            if _determines_derivatives(adjoint, outcome, solver, Plan()) is outcome:
                return _solution(sequence, replace(outcome, states=adjoint.attach(outcome.states)), plan, residual)
        else:
            plan.note("not captured: the step gives another result than when it was recorded")

    with torch.set_grad_enabled(unrolled and fixed):
        outcome = solver.run(sequence, start, plan)
    sequence.check_purity()  # before it is judged what came out
    plan.derivative = solver.jacobian.name or sequence.derivative
    adjoint, values = (
        _adjoint(sequence, outcome, solver)
        if isinstance(gradient, Implicit) or (unrolled and not fixed)
        else (None, None)
    )
    residual, outcome = _measure(sequence, outcome, solver, values)
    if adjoint is not None:
        outcome = _determines_derivatives(adjoint, outcome, solver, plan)
    adjoint = adjoint if isinstance(gradient, Implicit) else None
    implicit = adjoint is not None

    if any(result in _FAILED for result in outcome.results):
        if on_failure != "loop":
            outcome = _locate_non_finite(sequence, outcome, plan.chunk)
        if on_failure == "raise":
            raise ConvergenceError(_describe(sequence, outcome))
        if on_failure == "loop":
            with torch.no_grad():
                outcome = _finish_by_loop(sequence, outcome)
            adjoint = Adjoint(sequence, outcome.states, solver.jacobian, solver.linear) if implicit else None
            residual, again = _measure(sequence, outcome, solver, adjoint.values if adjoint else None)
            if again.results != outcome.results:
                raise _differs(sequence)
        warnings.warn(_describe(sequence, outcome), ConvergenceWarning, stacklevel=4)
    states = outcome.states
    if any(result in _FAILED for result in outcome.results) and on_failure == "return" and (implicit or unrolled):
        if adjoint is None:
            values = sequence.values(_previous(sequence, states, attached=True), range(sequence.length))
        else:
            values = adjoint.values
        states = refuse_gradients(states, _describe(sequence, outcome), values)
    elif adjoint is not None:
        states = adjoint.attach(states)
    elif unrolled and not fixed:
        states = two_newton_steps(sequence, states, solver.linear)
    return _solution(sequence, replace(outcome, states=states), plan, residual)


def _solve_unseen(
    step: Any,
    z0: Any,
    xs: Any,
    length: int | None,
    batch_dims: int | None,
    solver: Newton | Loop,
    guess: Any,
    gradient: Implicit | Unrolled,
    on_failure: str,
) -> Solution:
    """While the caller captures a CUDA graph: a fixed number of iterations, and nothing that asks the host."""
    one_step = not isinstance(step, (Rowwise, list, tuple, nn.ModuleList))
    if (
        not (isinstance(solver, Newton) and solver.stop.fixed is not None and solver.quadratic)
        or type(solver.jacobian) not in (DenseJacobian, GivenJacobian)
        or not (one_step and isinstance(gradient, Implicit) and on_failure != "raise")
    ):
        raise RuntimeError(
            "deeppcr.solve looks at values, and while a CUDA graph is captured there are none. What can be captured: one step function "
            "by Newton(stop=FixedIterations(n)) with DenseJacobian() or an exact GivenJacobian, gradient=Implicit(), and rows that fail "
            "come out as NaN. Outside of a capture, solves that repeat become CUDA graphs by themselves"
        )
    sequence = Sequence(step, z0, xs, length=length, batch_dims=batch_dims)  # pyright: ignore[reportArgumentType]
    plan = Plan()
    outcome = run_unseen(solver, sequence, as_guess(guess, z0, xs), plan)
    plan.derivative = solver.jacobian.name or sequence.derivative
    plan.note("inside a CUDA graph of the caller: every replay writes anew to the states and all other tensors")
    adjoint, values = _adjoint(sequence, outcome, solver)
    residual, outcome = _measure(sequence, outcome, solver, values)
    sequence.check_purity()
    states = outcome.states if adjoint is None else adjoint.attach(outcome.states)
    return _solution(sequence, replace(outcome, states=states), plan, residual)


def _check_arguments(solver: Any, gradient: Any, on_failure: Any) -> None:
    if not isinstance(solver, (Newton, Loop)):
        raise TypeError(f"solver: expected Newton(...), Picard(...), Jacobi(...) or Loop(), got {solver!r}")
    if not isinstance(gradient, (Implicit, Unrolled)):
        raise TypeError(f"gradient: expected Implicit() or Unrolled(), got {gradient!r}")
    if on_failure not in ("loop", "raise", "return"):
        raise ValueError(f'on_failure: expected "loop", "raise" or "return", got {on_failure!r}')
    if in_functorch():
        raise RuntimeError(
            "deeppcr.solve cannot run inside a torch.func transform (vmap, grad, jvp, ...): it looks at values to decide when "
            "to stop. Put what you would vmap over into the batch; for gradients use torch.autograd"
        )


def _adjoint(sequence: Sequence, outcome: Outcome, solver: Newton) -> tuple[Adjoint | None, Tensor | None]:
    """What a backward pass needs, if there can be one; and the values of all steps, if they are known."""
    if not torch.is_grad_enabled():
        return None, None
    if not sequence.needs_gradients:  # as far as the first step tells; the others tell here
        values = sequence.values(_previous(sequence, outcome.states), range(sequence.length))
        if not values.requires_grad:
            return None, values
    adjoint = Adjoint(sequence, outcome.states, solver.jacobian, solver.linear)
    return adjoint, adjoint.values


def _plain_loop(sequence: Sequence) -> Outcome:
    state = sequence.first
    assert state is not None
    states = [state]  # no step is taken twice: it may keep what it likes
    for index in range(1, sequence.length):
        version = version_of(state)
        after = sequence.step(index, state)
        if version_of(state) != version:  # which has been kept, or is the caller's
            raise StepError(changes_in_place("its state"))
        state = after
        states.append(state)
    rows, device = sequence.layout.rows, sequence.layout.device
    return Outcome(
        states=torch.stack(states),
        results=[Result.LOOP] * rows,
        iterations=torch.zeros(rows, dtype=torch.long, device=device),
        exact_steps=torch.full((rows,), sequence.length, device=device),
        updates=torch.zeros(0, rows, device=device),
    )


def _previous(sequence: Sequence, states: Tensor, *, attached: bool = False) -> Tensor:
    """The state before each step, if need be with the first still attached to the caller's graph."""
    initial = sequence.initial if attached else sequence.initial.detach()
    return torch.cat([initial.unsqueeze(0), states[:-1].detach()])


@torch.no_grad()
def _measure(sequence: Sequence, outcome: Outcome, solver: Newton, values: Tensor | None) -> tuple[Tensor, Outcome]:
    """The residual of the states as they are, [B]; rows that claim more than it bears out lose their claim."""
    states, layout = outcome.states.detach(), sequence.layout
    if values is None:
        values = sequence.values(_previous(sequence, states), range(sequence.length))
    residual, held = measure(layout, values.detach(), states, *solver.tolerances(layout.dtype))
    if not solver.stop.promises:
        return residual, outcome
    results = [
        Result.NOT_CONVERGED if not fine and result in _TRUSTED else result
        for fine, result in zip(held.tolist(), outcome.results, strict=True)
    ]
    changed = torch.tensor([a is not b for a, b in zip(results, outcome.results, strict=True)], device=layout.device)
    exact = torch.where(changed, 0, outcome.exact_steps)
    return residual, replace(outcome, results=results, exact_steps=exact)


def _determines_derivatives(adjoint: Adjoint, outcome: Outcome, solver: Newton, plan: Plan) -> Outcome:
    """The outcome; rows whose states do not determine the derivatives of their steps lose their claim, and the plan says why."""
    trusted = torch.tensor([result in _TRUSTED for result in outcome.results], device=outcome.states.device)
    if not solver.stop.promises or not trusted.any():
        return outcome
    atol, _ = solver.tolerances(outcome.states.dtype)
    exact = torch.minimum(adjoint.determined(outcome.states.detach(), atol, trusted), outcome.exact_steps)
    lost = trusted & (exact < outcome.exact_steps)
    if not lost.any():
        return outcome
    reason = (
        f"gave up on states that are smaller than atol = {atol:g}: the derivative of the step depends on their signs (as that of a "
        "ReLU does), which a tolerance says nothing of; Newton(atol=0) asks for digits of every state"
    )
    plan.note(reason)
    results = [
        Result.NOT_CONVERGED if bad else result for bad, result in zip(lost.tolist(), outcome.results, strict=True)
    ]
    exact, reasons = torch.where(lost, exact, outcome.exact_steps), (*outcome.reasons, reason)
    return replace(outcome, results=results, exact_steps=exact, reasons=reasons)


def _differs(sequence: Sequence) -> StepError:
    """Said of a step that gives another result when all steps are evaluated at once than one after the other."""
    what = "step: gives another result when all steps are evaluated at once than one after the other: "
    dtype, first = sequence.layout.dtype, sequence.initial.detach()
    coarse = coarser_products(lambda: sequence.step(0, first), dtype)
    if coarse is not None:
        rounding = 2 * torch.finfo(coarse).eps
        return StepError(
            f"{what}it multiplies in {coarse}, while its state is {dtype}. Have it compute in that precision, or loosen the "
            f"tolerance to what it can hold, about Newton(atol={rounding:.0e}, rtol={rounding:.0e})"
        )
    return StepError(
        f"{what}it is random, keeps a state of its own, or its rows are not what they seem; deeppcr.check(step, z0, xs) tells which"
    )


def _is_no_worse(measured: Tensor, residual: Tensor, states: Tensor, solver: Newton) -> bool:
    """Whether a residual [B], measured anew, is what it was, but for rounding."""
    atol, rtol = solver.tolerances(states.dtype)
    allowed = 2 * residual + atol + rtol * states.abs().amax((0, 2))
    return bool((measured <= allowed).all())


def _loop_on(sequence: Sequence, outcome: Outcome, rows: Tensor, stop: int) -> Tensor:
    """Keep the exact states of ``rows`` [B] and compute their others one step at a time, up to step ``stop``.

    Every step sees all rows, as in the loop; only the rows that need it take its result.
    """
    first = int(outcome.exact_steps[rows].min())
    states = list(outcome.states[:first])
    state = states[-1] if states else sequence.initial
    for index in range(first, stop):
        stepped = sequence.step(index, state)
        taken = rows & (outcome.exact_steps <= index)
        state = torch.where(taken.unsqueeze(-1), stepped, outcome.states[index])
        states.append(state)
    return torch.stack(states)


def _finish_by_loop(sequence: Sequence, outcome: Outcome) -> Outcome:
    failed = torch.tensor([r in _FAILED for r in outcome.results], device=sequence.layout.device)
    states = _loop_on(sequence, outcome, failed, sequence.length)
    return _mark_non_finite(replace(outcome, states=states), Result.FINISHED_BY_LOOP)


def _mark_non_finite(outcome: Outcome, otherwise: Result) -> Outcome:
    """Rows that failed are NON_FINITE where the loop's states say so, ``otherwise`` where they do not.

    They are looked at afterwards, all steps at once: a look at every step would stop an accelerator every time.
    """
    bad = ~torch.isfinite(outcome.states.detach()).all(-1)  # [L, B]
    at = torch.where(bad.any(0), bad.long().argmax(0), -1)
    results = [
        result if result not in (*_FAILED, otherwise) else Result.NON_FINITE if index >= 0 else otherwise
        for result, index in zip(outcome.results, at.tolist(), strict=True)
    ]
    exact = torch.where(at >= 0, at, outcome.exact_steps)
    return replace(outcome, results=results, exact_steps=exact)


@torch.no_grad()
def _locate_non_finite(sequence: Sequence, outcome: Outcome, chunk: int) -> Outcome:
    """Newton knows in which chunk a value stopped being finite; the steps of that chunk tell which it was."""
    rows = torch.tensor([r is Result.NON_FINITE for r in outcome.results], device=sequence.layout.device)
    if not rows.any():
        return outcome
    stop = min(int(outcome.exact_steps[rows].max()) + chunk, sequence.length)
    bad = ~torch.isfinite(_loop_on(sequence, outcome, rows, stop)).all(-1)
    exact = torch.where(rows & bad.any(0), bad.long().argmax(0), outcome.exact_steps)
    return replace(outcome, exact_steps=exact)


def _describe(sequence: Sequence, outcome: Outcome) -> str:
    """The worst result in words, with the step where it happened and why Newton gave up."""
    worst = max(outcome.results, key=lambda result: result.severity)
    if worst.severity <= Result.PRECISION_FLOOR.severity:
        return worst.value
    rows = [row for row, result in enumerate(outcome.results) if result is worst]
    exact = outcome.exact_steps.tolist()
    row = min(rows, key=lambda r: exact[r])
    step = exact[row] + 1 if worst is Result.NON_FINITE else exact[row]
    text = worst.value.format(step=step)
    if worst is Result.NON_FINITE and _has_nan(sequence.inputs(step - 1), sequence.layout, row):
        text = f"step {step} produced a value that is not finite; xs holds NaN there, and the loop does so too"
    if len(outcome.results) > 1:
        text += f" (row {row}; {len(rows)} of {len(outcome.results)} rows)"
    return "; ".join([text, *outcome.reasons])


def _has_nan(inputs: Any, layout: Layout, row: int) -> bool:
    """Whether a step's inputs hold NaN, in their part for a row where they have one. Infinities may be masks."""
    batch = layout.batch_shape
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            if leaf.shape[: len(batch)] == batch:
                leaf = leaf.reshape(layout.rows, -1)[row]
            if torch.isnan(leaf).any():
                return True
    return False


def _solution(sequence: Sequence, outcome: Outcome, plan: Plan, residual: Tensor) -> Solution:
    layout = sequence.layout
    plan.evaluation = sequence.evaluation
    for note in sequence.all_notes:
        plan.note(note)
    batch = layout.batch_shape
    return Solution(
        states=layout.unpack(outcome.states),
        iterations=outcome.iterations.reshape(batch),
        residual=residual.reshape(batch),
        result=max(outcome.results, key=lambda result: result.severity),
        results=tuple(outcome.results),
        exact_steps=outcome.exact_steps.reshape(batch),
        updates=outcome.updates.reshape(-1, *batch),
        plan=plan,
        message=_describe(sequence, outcome),
    )


def refuse_gradients(states: Tensor, message: str, *depends_on: Tensor) -> Tensor:
    """The states, with a backward pass that raises with this message, unless its gradient is zero.

    Args:
        depends_on: tensors through which the states depend on whatever a gradient may be asked for. A backward pass visits
            only what lies on the way to that; without any, states that nothing leads away from
    """
    return _Refuse.apply(states, message, *(depends_on or (torch.zeros((), requires_grad=True),)))


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
