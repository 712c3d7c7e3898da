"""A solve by a solver that is given: the ways, and what to do where Newton failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..gradient import Adjoint, Gradient, Implicit
from ..graphs.cache import captured_solves, may_capture
from ..graphs.straight import run_unseen
from ..newton import Loop, Newton, iteration
from ..newton.guess import Guess, RepeatInitial, as_guess
from ..newton.iteration import Outcome
from ..runtime import declares, is_capturing
from ..sequence import Rowwise, Sequence
from ..sequence.layout import refuse_not_finite
from ..solution import Plan, Result, Solution, first_not_finite, loop_on, settle
from ..stopping import UpdateTest
from ..tolerance import Tolerance
from ..warned import warn
from .fused import Call, covers, solve_fused
from .judged import (
    Judged,
    describe,
    determined,
    differentiable,
    differs,
    is_no_worse,
    judge,
    refuse_other_alone,
    refused,
    solution_of,
)
from .looped import Given, by_loop
from .passes import why_not_joined

#: Steps that are left to the loop from which on a kernel is made for them: that takes seconds, and a step by Python a third of a millisecond.
_WORTH_A_KERNEL = 10_000
#: Results of a parallel solve that nobody has to be warned of.
_GOOD = (Result.CONVERGED, Result.PRECISION_FLOOR, Result.ITERATIONS_DONE)


def solve_by(
    loop: Given, solver: Newton | Loop, guess: Any, gradient: Gradient, on_failure: str, every: int = 1
) -> Solution:
    """``every``: the states after every so many steps are to be kept; where all are computed anyway, all are returned."""
    if isinstance(solver, Newton):
        return solve_call(Call(*loop, every), solver, guess, gradient, on_failure)
    if _is_captured(pytree.tree_leaves(loop.z0)):
        _refuse_capture(loop.step, solver, gradient, on_failure)
    if solver.by == "python":
        return by_loop(loop, every)
    if solver.by == "kernel":
        return _loop_in_kernel(Call(*loop, every), gradient)
    sequence = Sequence(*loop, traced=True)
    refuse_not_finite(loop.z0)
    with _watched(sequence):
        return _by_graph(sequence, gradient)


def solve_call(call: Call, solver: Newton, guess: Any, gradient: Gradient, on_failure: str) -> Solution:
    """By Newton's method, through the kernels of the step where it has some."""
    capturing = _is_captured(call.states)
    if capturing:
        _refuse_capture(call.given[0], solver, gradient, on_failure)
    fused = _by_kernels(call, solver, guess, gradient, on_failure, capturing)
    if isinstance(fused, Solution):
        return fused
    (step, xs), z0 = call.given, call.z0
    through = torch.is_grad_enabled() and gradient.goes_through(solver.stop)
    captured = not capturing and not through and may_capture(solver, z0)
    sequence = Sequence(step, z0, xs, call.given_length, call.batch_dims, traced=captured)
    refuse_not_finite(z0)
    plan = Plan()
    if fused is not None:
        plan.note(f"not by kernels: {fused}")
    with _watched(sequence):
        start = as_guess(guess, z0, xs)
        if capturing:
            return _unseen(sequence, start, solver, gradient, plan)
        found = _replayed(sequence, start, solver, gradient, plan) if captured else None
        return found or _in_parallel(call, sequence, start, solver, gradient, on_failure, plan, through=through)


def _is_captured(leaves: list[Any]) -> bool:
    """Whether the caller captures a CUDA graph on the device of one of these."""
    return any(isinstance(leaf, Tensor) and is_capturing(leaf.device) for leaf in leaves)


@contextmanager
def _watched(sequence: Sequence) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        sequence.check_purity(error)  # which may know better what is wrong
        raise
    sequence.stop_watching()


def _refuse_capture(step: Any, solver: Newton | Loop, gradient: Gradient, on_failure: str) -> None:
    """Raise where a solve would ask the host, while the caller captures a CUDA graph."""
    one_step = not isinstance(step, (Rowwise, list, tuple, nn.ModuleList))
    if (
        not (isinstance(solver, Newton) and solver.stop.fixed is not None and solver.quadratic)
        or not declares(solver.jacobian, "asks_nothing")
        or gradient.goes_through(solver.stop)
        or not (one_step and on_failure != "raise")
    ):
        raise RuntimeError(
            "deeppcr.solve looks at values, and while a CUDA graph is captured there are none. What can be captured: one step function "
            "by Newton(stop=FixedIterations(n)) with DenseJacobian() or an exact GivenJacobian, gradient=Implicit(), and rows that fail "
            "come out as NaN. Outside of a capture, solves that repeat become CUDA graphs by themselves"
        )


# The ways of a solve.


def _by_graph(sequence: Sequence, gradient: Gradient) -> Solution:
    """One step after the other by a CUDA graph; as autograd sees none of it, gradients are those of a parallel solve."""
    states = captured_solves.loop(sequence)
    outcome, plan = _outcome_of_loop(sequence, states), Plan()
    plan.note("one step after the other, by a graph")
    if not (torch.is_grad_enabled() and sequence.needs_gradients):
        return _solution(sequence, outcome, plan, torch.zeros_like(sequence.initial.detach()[:, 0]))
    judged = judge(sequence, outcome, Newton())
    if judged.results != outcome.results:
        raise differs(sequence)
    return _solution(sequence, differentiable(judged, gradient), plan, judged.residual)


def _loop_in_kernel(call: Call, gradient: Gradient) -> Solution:
    found = call.make()
    if not isinstance(found, str):
        found = solve_fused(call, Newton(), None, loop=True, every=call.every)
    if isinstance(found, str) or not isinstance(gradient, Implicit):
        why = found if isinstance(found, str) else "its gradients are those of Implicit()"
        raise ValueError(f'solver: Loop(by="kernel"): there is no kernel for this step: {why}. Loop() takes any step')
    found.plan.note("one step after the other, by a kernel")
    if found.result is Result.NON_FINITE:
        warn(found.description)
    return found


def _by_kernels(
    call: Call, newton: Newton, guess: Any, gradient: Gradient, on_failure: str, capturing: bool
) -> Solution | str | None:
    """By the kernels of the step where there are some, or are worth making; else why not, or None where nobody would expect them."""
    if call.refusal is not None or not isinstance(gradient, Implicit) or not isinstance(guess, RepeatInitial):
        return None
    fixed = newton.stop.fixed
    if not covers(newton if fixed is None else replace(newton, stop=UpdateTest())):
        return None
    if fixed is None:
        call.begin(newton)
    fused = call.fused
    if fused is None and fixed is None:
        fused = call.make() if call.comes_again() else "the first of its kind"
    if fused is None or isinstance(fused, str):
        return fused
    if fixed is not None and not capturing and not fused.solves[call.differentiated]:
        return None  # a solve that tests nothing cannot hold them against the step: another one has to
    found = solve_fused(call, newton, None, fixed=fixed, every=call.every)
    if isinstance(found, str):
        return found
    if fixed is not None and not capturing and not all(e.isfinite().all() for e in pytree.tree_leaves(found.states)):
        return "numbers of it are not finite"  # which the other ways tell of
    if found.result in _GOOD:
        return found
    if on_failure != "loop":
        return "the chunks did not join"
    if found.result is Result.LOOP:
        found.plan.note(f"one step after the other: {why_not_joined(fused)}")
        found = found.told_as(Result.FINISHED_BY_LOOP)
    warn(found.description)
    return found


def _outcome_of_loop(sequence: Sequence, states: Tensor) -> Outcome:
    """Of states [L, B, D] that a loop found; warns where they are not finite."""
    outcome = Outcome.of_loop(states, Result.LOOP, sequence.layout.rows, sequence.length)
    outcome = outcome.marked(Result.LOOP, first_not_finite(states))
    if Result.NON_FINITE in outcome.results:
        warn(describe(sequence, outcome))
    return outcome


def _unseen(sequence: Sequence, start: Guess, solver: Newton, gradient: Gradient, plan: Plan) -> Solution:
    """While the caller captures a CUDA graph: a fixed number of iterations, and nothing that asks the host."""
    outcome = run_unseen(solver, sequence, start, plan)
    plan.derivative = solver.jacobian.name or sequence.derivative
    plan.note("inside a CUDA graph of the caller: every replay writes anew to the states and all other tensors")
    judged = judge(sequence, outcome, solver)
    return _solution(sequence, differentiable(judged, gradient), plan, judged.residual)


def _replayed(sequence: Sequence, start: Guess, solver: Newton, gradient: Gradient, plan: Plan) -> Solution | None:
    """By CUDA graphs of an earlier solve of its kind; None where there are none, or the step is no longer what they hold."""
    replayed = Plan(notes=[*plan.notes])
    found = captured_solves.solve(solver, sequence, start, replayed)
    if found is None:
        plan.notes = replayed.notes
        return None
    outcome, residual = found  # which has been checked
    judged: Judged[Adjoint] = Judged(outcome, residual, None)
    if torch.is_grad_enabled() and sequence.needs_gradients:
        # These values come from the step as it is now: what a trace cannot see shows here.
        judged = judge(sequence, outcome, solver)
        if judged.results != outcome.results or not is_no_worse(judged.residual, residual, outcome.states, solver):
            plan.note("not captured: the step gives another result than when it was recorded")
            return None
        if determined(judged, solver, Plan()) is not judged:
            return None
    promised = solver.promised(sequence.layout.dtype)
    return _solution(sequence, differentiable(judged, gradient), replayed, residual, promised)


def _in_parallel(
    call: Call,
    sequence: Sequence,
    start: Guess,
    solver: Newton,
    gradient: Gradient,
    on_failure: str,
    plan: Plan,
    *,
    through: bool,
) -> Solution:
    """By Newton's iteration.

    Args:
        through: the iterations themselves are differentiated
    """
    with torch.set_grad_enabled(through):
        outcome = iteration.run(solver, sequence, start, plan)
    sequence.check_purity()  # before it is judged what came out
    plan.derivative = solver.jacobian.name or sequence.derivative
    judged = judge(sequence, outcome, solver, differentiated=not through)
    refuse_other_alone(sequence, judged, solver)
    judged = determined(judged, solver, plan)
    if any(result.failed or result is Result.UNCERTIFIED for result in judged.results):
        if on_failure != "loop":
            judged = replace(judged, outcome=_locate_non_finite(sequence, judged.outcome, plan.chunk))
        judged = settle(
            judged,
            on_failure,
            lambda failed: _finished_by_loop(call, sequence, failed.outcome, solver, plan),
            lambda failed: describe(sequence, failed.outcome),
        )
    failed = on_failure == "return" and any(result.failed for result in judged.results)
    outcome = refused(sequence, judged) if failed else differentiable(judged, gradient)
    return _solution(sequence, outcome, plan, judged.residual, solver.promised(sequence.layout.dtype))


# Where Newton failed.


def _finished_by_loop(call: Call, sequence: Sequence, outcome: Outcome, solver: Newton, plan: Plan) -> Judged[Adjoint]:
    failed = torch.tensor([result.failed for result in outcome.results], device=sequence.layout.device)
    exact = torch.where(failed, outcome.exact_steps, sequence.length)
    states = None
    if sequence.length - int(exact.min()) >= _WORTH_A_KERNEL:
        states = _finished_by_kernel(call, outcome.states, failed)
    if states is None:
        states = loop_on(sequence.step, sequence.initial, outcome.states, exact, sequence.length)
    else:
        plan.note("the rest was computed one step after the other by a kernel")
    outcome = replace(outcome, states=states).marked(Result.FINISHED_BY_LOOP, first_not_finite(states))
    judged = judge(sequence, outcome, solver)
    if judged.results != outcome.results:
        raise differs(sequence)
    return judged


@torch.no_grad()
def _finished_by_kernel(call: Call, states: Tensor, failed: Tensor) -> Tensor | None:
    """States [L, B, D] whose failed rows come from one kernel, from the first step on, which takes it no time; None where there is none."""
    found = call.make()
    if not isinstance(found, str):
        found = solve_fused(call, Newton(), None, loop=True)
    if isinstance(found, str):
        return None
    packed = pytree.tree_leaves(found.states)
    packed = torch.cat([leaf.reshape(*states.shape[:2], -1) for leaf in packed], -1)
    return torch.where(failed.unsqueeze(-1), packed, states)


def _locate_non_finite(sequence: Sequence, outcome: Outcome, chunk: int) -> Outcome:
    """Newton knows in which chunk a value stopped being finite; the steps of that chunk tell which it was."""
    rows = torch.tensor([r is Result.NON_FINITE for r in outcome.results], device=sequence.layout.device)
    if not rows.any():
        return outcome
    stop = min(int(outcome.exact_steps[rows].max()) + chunk, sequence.length)
    exact = torch.where(rows, outcome.exact_steps, sequence.length)
    at = first_not_finite(loop_on(sequence.step, sequence.initial, outcome.states, exact, stop))
    return replace(outcome, exact_steps=torch.where(rows & (at >= 0), at, outcome.exact_steps))


def _solution(
    sequence: Sequence, outcome: Outcome, plan: Plan, residual: Tensor, tolerance: Tolerance | None = None
) -> Solution:
    """``tolerance``: that the states were found within; None where it is asked of none."""
    plan.evaluation = sequence.evaluation
    for note in sequence.all_notes:
        plan.note(note)
    about: dict[str, Any] = {"description": describe(sequence, outcome), "tolerance": tolerance}
    return solution_of(outcome, outcome.states, residual, sequence.initial, sequence.layout, plan, **about)
