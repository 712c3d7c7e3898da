"""``sample``: images from noise, the denoising steps in parallel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from ..distributed.ranks import Ranks
from ..gradient import refuse_gradients
from ..jacobian import Jacobian
from ..newton import Loop, Newton
from ..runtime import has_tangent, in_functorch
from ..solution import Plan, Result, Solution, check_on_failure, first_not_finite, loop_on, settle, worst_of, worst_rows
from ..solve import solve
from ..warned import warn
from .coupling import Coupling
from .implicit import Rotated, attach
from .noise import Noise
from .prior import UNIT, GaussianPrior, Prior, as_prior
from .problem import Problem
from .result import Samples
from .samplers import DDIM, DDPM, Prediction, Sampler, Steps
from .schedule import Schedule
from .spread import check_alike, spread
from .start import as_start
from .window.looped import loop_by_graph
from .window.planned import run
from .window.prepared import Outcome
from .window.window import Window

#: Where rounding leaves a little more than was asked for, the result says so and nobody is disturbed: the estimate is from above, and
#: the loop is no better. From so many times on two of the digits that were asked for are missing.
_FAR = 100.0
#: the steps of so many samplers on a schedule: their numbers take longer to find than a few iterations
_MOST_KNOWN = 16
_known: WeakKeyDictionary[Schedule, dict[tuple[Any, ...], Steps]] = WeakKeyDictionary()


def sample(
    denoiser: Callable[..., Any],
    schedule: Schedule | Steps,
    noise: Noise | Tensor,
    *,
    step: Sampler = DDPM(),
    prediction: Prediction = "epsilon",
    classes: Any = None,
    guidance: float | None = None,
    unconditional: Any = None,
    solver: Window | Newton | Loop = Window(size="auto"),
    jacobian: GaussianPrior | Jacobian | None = None,
    start: Any = None,
    keep_states: bool = False,
    on_failure: Literal["loop", "raise", "return"] = "loop",
    mesh: Any = None,
) -> Samples:
    """Sample from a diffusion model, all denoising steps at once.

    Args:
        denoiser: ``denoiser(z, t)``, or ``denoiser(z, t, classes)`` where classes are given: z [rows, *shape], t [rows],
            returns [rows, *shape]. Every row must be treated by itself, and any number of rows may come
        schedule: the noise and the times visited; or Steps, where the sampler is known in numbers already
        noise: Noise(initial, steps), drawn before; a tensor [B, *shape] for samplers that add none
        step: DDPM(...) or DDIM(...); not used where Steps are given
        prediction: what the network predicts: "epsilon", "v" or "x0"; not used where Steps are given
        classes: labels [B], or a nest of tensors [B, ...]
        guidance: weight of classifier-free guidance; both halves are rows of one call
        unconditional: what stands for no class: a label, or a nest like classes
        solver: Window(...), deeppcr.Newton(...) or deeppcr.Loop(); by default, on a GPU, what is expected to be fastest for this
            network and batch: see ``Window(size="auto")``. ``Loop(by="graph")`` is the loop in a CUDA graph
        jacobian: GaussianPrior(...), by default of unit variance; deeppcr.ScalarJacobian(1.0) is Picard's iteration. With
            Newton any Jacobian of deeppcr; by default the solver's own
        start: where the iteration starts: GaussianStart(), MeanStart(mean), CoarseStart(...), states [L, B, *shape], or earlier
            Samples that keep their states. By default the first, and CoarseStart() where a Window holds all of 512 steps or
            more. It changes the work, not the result
        keep_states: return the sample after every step too
        on_failure: "loop" finishes the rest one step at a time and warns, "raise" raises ConvergenceError, "return"
            returns what there is, and a backward pass through it raises. Where rounding leaves a hundred times the tolerance
            or more, "raise" raises too; the others warn and keep the sample, since the loop's rounding grows as much
        mesh: a one-dimensional DeviceMesh over whose ranks the rows of each call of the denoiser are spread. Every rank has the denoiser,
            is given the same, and gets all samples; a Window is as many times larger by default, and no CUDA graphs are made. For
            gradients every rank takes the same loss: that of the noise is on all, and of parameters each has its part of the sum

    Returns:
        Samples; ``final`` and ``states`` are differentiable in the noise and in all that the denoiser closes over

    >>> import torch
    >>> from deeppcr.diffusion import DDPM, Noise, Schedule, sample
    >>> schedule = Schedule.linear(100)
    >>> sample(lambda z, t: 0.9 * z, schedule, Noise.draw((2, 5), steps=100)).final.shape
    torch.Size([2, 5])
    """
    check_on_failure(on_failure)
    _refuse_transforms(solver, noise)
    steps = schedule if isinstance(schedule, Steps) else _steps(schedule, step, prediction)
    ranks = None if mesh is None else Ranks.of(mesh)
    if ranks is not None:
        if isinstance(solver, Newton) or (isinstance(solver, Loop) and solver.by != "python"):
            raise ValueError(f"solver: with a mesh, expected Window(...) or deeppcr.Loop(), got {solver!r}")
        if isinstance(solver, Window):
            solver = replace(solver, graphs=False)
        denoiser = spread(denoiser, ranks)
    problem = Problem(denoiser, steps, noise, classes, guidance, unconditional, ranks)
    if ranks is not None:
        check_alike(ranks, problem.noise.initial, problem.noise.steps)
    if isinstance(solver, Loop):
        problem.check_finite()
        if solver.by == "graph":
            return _by_graph(problem, keep_states)
        if solver.by != "python":
            raise ValueError(f'solver: sample has no {solver!r}; expected Loop() or Loop(by="graph")')
        return _by_loop(problem, keep_states)
    if isinstance(solver, Newton):
        problem.check_finite()
        return _by_newton(problem, solver, jacobian, start, keep_states, on_failure)
    if isinstance(solver, Window):
        return _by_window(problem, solver, jacobian, start, keep_states, on_failure)
    raise TypeError(f"solver: expected Window(...), deeppcr.Newton(...) or deeppcr.Loop(), got {solver!r}")


def _refuse_transforms(solver: Any, noise: Any) -> None:
    """Raise where derivatives or batches are asked for in a way that only the plain loop has, or not even that."""
    tensors = [noise.initial, noise.steps] if isinstance(noise, Noise) else [noise]
    looped = isinstance(solver, Loop)
    if in_functorch() and (not looped or any(isinstance(n, Tensor) and is_batchedtensor(n) for n in tensors)):
        raise RuntimeError(
            "sample: cannot run inside a torch.func transform (vmap, grad, jvp, ...): it looks at values to decide when to stop. "
            "Put what you would vmap over into the batch; for gradients use torch.autograd, or solver=deeppcr.Loop()"
        )
    if not looped and any(has_tangent(n) for n in tensors):
        raise RuntimeError(
            "sample: has no forward-mode derivative; use reverse mode (backward), or solver=deeppcr.Loop()"
        )


def _steps(schedule: Schedule, step: Sampler, prediction: Prediction) -> Steps:
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule: expected a Schedule or Steps, got {type(schedule).__name__}")
    if not isinstance(step, (DDPM, DDIM)):
        raise TypeError(f"step: expected DDPM(...) or DDIM(...), got {step!r}")
    if schedule.alphas_bar.is_inference() or schedule.timesteps.is_inference():  # who knows whether they were changed
        return step.steps(schedule, prediction)
    key = step, prediction, schedule.last_alpha_bar, schedule.alphas_bar._version, schedule.timesteps._version
    known = _known.setdefault(schedule, {})
    if key not in known:
        if len(known) == _MOST_KNOWN:
            known.clear()
        known[key] = step.steps(schedule, prediction)
    return known[key]


def _by_loop(problem: Problem, keep_states: bool) -> Samples:
    states, state = [], problem.initial
    for index in range(problem.length):
        state = problem.step(index, state)
        if keep_states:
            states.append(state[..., 0])
    samples, device = problem.samples, problem.device
    finite = torch.isfinite(state.detach()).all(-1).all(-1).tolist()
    results = [Result.LOOP if fine else Result.NON_FINITE for fine in finite]
    message = Result.LOOP.value
    if not all(finite):
        message = "the denoiser's outputs led to samples that are not finite; keep_states=True shows where"
        warn(message)
    return Samples(
        final=problem.unflatten(state[..., 0]),
        states=problem.unflatten(torch.stack(states)) if keep_states else None,
        iterations=torch.zeros(samples, dtype=torch.long, device=device),
        evaluations=torch.full((samples,), problem.rows_seen // samples, device=device),
        residual=torch.zeros(samples, dtype=problem.dtype, device=device),
        exact_steps=torch.full((samples,), problem.length, device=device),
        results=tuple(results),
        plan=Plan(notes=["one step after the other, as asked"]),
        message=message,
    )


def _by_graph(problem: Problem, keep_states: bool) -> Samples:
    """The loop in CUDA graphs, recorded at the first run of a kind; gradients are those of a parallel solve."""
    plan = Plan()
    outcome = loop_by_graph(problem, plan)
    message = _describe(problem, outcome)
    if worst_of(outcome.results).failed:
        warn(message)
    return _samples(problem, outcome, UNIT, keep_states, plan, message)


def _by_window(
    problem: Problem, window: Window, jacobian: Any, start: Any, keep_states: bool, on_failure: str
) -> Samples:
    prior = as_prior(jacobian)
    prior.check(problem.shape)
    plan = Plan(evaluation="rowwise", derivative="given")
    start = window.start_for(problem, start)
    plan.note(f"jacobian: {prior.in_words}")
    plan.note(start.in_words(_name_of(prior)))
    try:
        outcome = run(window, problem, prior, start, plan)
    except Exception:
        problem.check_finite()
        raise
    failed = any(result.failed for result in outcome.results)
    if failed:
        problem.check_finite()  # before the run it would have cost a wait for the device
    if failed or _is_far_off(problem, outcome, window):
        finish, describe = partial(_finished_by_loop, problem, window), partial(_describe, problem)
        outcome = settle(outcome, on_failure, finish, describe)
    message = _describe(problem, outcome)
    if any(result not in (Result.CONVERGED, Result.LOOP) for result in outcome.results):
        plan.note(message)
    return _samples(problem, outcome, prior, keep_states, plan, message)


def _samples(problem: Problem, outcome: Outcome, prior: Prior, keep_states: bool, plan: Plan, message: str) -> Samples:
    """``prior``: by which gradients are found."""
    states = outcome.states
    if torch.is_grad_enabled() and problem.needs_gradients:
        coupling = Coupling(prior, problem.steps, problem.width, problem.device, problem.dtype)
        states = _differentiable(problem, coupling, outcome, message)
    about: dict[str, Any] = {"residual": outcome.residual.amax(0), "plan": plan, "message": message}
    return _told(problem, states[..., 0], keep_states, outcome, evaluations=outcome.evaluations, **about)


def _name_of(prior: Prior) -> str:
    """What the prior of the path to start from is called."""
    return "a prior of unit variance" if prior is not prior.of_path else "the prior"


def _told(problem: Problem, states: Tensor, keep_states: bool, found: Outcome | Solution, **more: Any) -> Samples:
    """From the states [L, B, D] of what was found. A view of the last one would keep the memory of all."""
    return Samples(
        final=problem.unflatten(states[-1] if keep_states else states[-1].clone()),
        states=problem.unflatten(states) if keep_states else None,
        iterations=found.iterations,
        exact_steps=found.exact_steps,
        results=tuple(found.results),
        **more,
    )


def _differentiable(problem: Problem, coupling: Coupling, outcome: Outcome, message: str) -> Tensor:
    """The states [L, B, D, K]; those of samples that did not get there raise where a gradient reaches them."""
    states, bad = outcome.states, [result.failed for result in outcome.results]
    if not any(bad):
        return attach(problem, coupling, states)
    lost = torch.tensor(bad, device=problem.device)
    good, lost = (~lost).nonzero().flatten(), lost.nonzero().flatten()
    parts = [refuse_gradients(states[:, lost], message, problem.step(0, problem.initial))]
    if len(good):
        parts.append(attach(problem, coupling, states[:, good], good))
    return torch.cat(parts, 1)[:, torch.cat([lost, good]).argsort()]


def _finished_by_loop(problem: Problem, window: Window, outcome: Outcome) -> Outcome:
    """Keep the finished steps of the samples that failed and take their others one at a time."""
    failed = [row for row, result in enumerate(outcome.results) if result.failed]
    who, length = torch.tensor(failed, device=problem.device), problem.length
    exact, states = outcome.exact_steps[who], outcome.states
    with window.settings(problem.device):
        step = partial(problem.step, who=who)
        states[:, who] = loop_on(step, problem.initial.detach()[who], states[:, who], exact, length)
    spent = torch.zeros_like(outcome.evaluations)
    spent[who] = (length - exact.min()) * problem.denoiser.rows_per_call
    at = first_not_finite(states[:, who])
    results, exact_steps = list(outcome.results), outcome.exact_steps.clone()
    exact_steps[who] = torch.where(at >= 0, at, exact)
    for row, index in zip(failed, at.tolist(), strict=True):
        results[row] = Result.FINISHED_BY_LOOP if index < 0 else Result.NON_FINITE
    looped = torch.arange(length, device=problem.device).unsqueeze(1) >= outcome.exact_steps  # [L, B]
    return replace(
        outcome,
        states=states,
        results=results,
        evaluations=outcome.evaluations + spent,
        residual=outcome.residual.masked_fill(looped, 0),  # of the states that were thrown away
        exact_steps=exact_steps,
    )


def _is_far_off(problem: Problem, outcome: Outcome, window: Window) -> bool:
    """Whether rounding leaves far more of a sample than the tolerance, or than the network's precision, where that is coarser."""
    rows = [row for row, result in enumerate(outcome.results) if result is Result.PRECISION_FLOOR]
    if not rows:
        return False
    with window.settings(problem.device):
        eps, tolerance = problem.eps, window.tolerance_for(problem)
    coarse = eps if eps > torch.finfo(problem.dtype).eps else 0.0
    sizes = outcome.states[-1, rows, :, 0].abs().amax(-1)
    return bool((outcome.least[rows] >= _FAR * (coarse * sizes).clamp_min(tolerance)).any())


def _describe(problem: Problem, outcome: Outcome) -> str:
    worst = worst_of(outcome.results)
    if worst in (Result.CONVERGED, Result.LOOP):
        return worst.value
    row, at, count = worst_rows(outcome.results, outcome.exact_steps)
    share = f"sample {row}; {count} of {len(outcome.results)} samples"
    if worst is Result.PRECISION_FLOOR:
        network = problem.coarsest
        whose, finer = "", "use float64"
        if torch.finfo(network).eps > torch.finfo(problem.dtype).eps:
            whose = f" of a network that computes in {str(network).removeprefix('torch.')}"
            finer = "have it compute in a finer precision"
        return (
            f"the iteration went as far as rounding{whose} lets it; what it leaves of the final sample is estimated as {float(outcome.least.max()):.0e}, "
            f"more than the tolerance ({share}); the loop rounds as much. Loosen the tolerance, or {finer}"
        )
    if worst is Result.NON_FINITE:
        time = problem.steps.timesteps[at].item()
        return f"the denoiser returned a value that is not finite at step {at + 1} (t = {time}); {share}"
    looped = worst is Result.FINISHED_BY_LOOP
    if not math.isfinite(float(outcome.least[row])):
        did = "it was computed one step at a time instead" if looped else "it is not to be trusted"
        return (
            "how far the final sample is from the loop's cannot be estimated: by the Jacobian, or by what was seen, errors grow beyond "
            "all numbers, or values are clipped and every step moved far until it had its turn, as in a chaotic sampler; "
            f"{did} ({share}). Try a GaussianPrior of your data, or float64"
        )
    did = "the rest was computed one step at a time" if looped else "the rest is not to be trusted"
    return (
        f"the iteration stopped with {at} of {problem.length} steps finished; {did} ({share}). Try more max_iterations, a "
        "GaussianPrior of your data, or a looser tolerance"
    )


def _by_newton(
    problem: Problem, newton: Newton, jacobian: Any, start: Any, keep_states: bool, on_failure: Any
) -> Samples:
    prior = jacobian if isinstance(jacobian, GaussianPrior) else UNIT
    prior.check(problem.shape)
    start = as_start(start)
    problem.check_times()
    coupling = Coupling(prior, problem.steps, problem.width, problem.device, problem.dtype)
    with torch.no_grad():
        states, _ = start.prepare(problem, prior).states(problem, coupling, problem.network)
    if jacobian is not prior:
        coupling = Coupling(UNIT, problem.steps, problem.width, problem.device, problem.dtype)
    rotated = Rotated(problem, coupling)
    if jacobian is not None:
        newton = replace(newton, jacobian=rotated.jacobian if jacobian is prior else jacobian)
    solution = solve(
        rotated.step,
        rotated.z0,
        rotated.xs,
        batch_dims=1,
        solver=newton,
        guess=rotated.pack(states),
        on_failure=on_failure,
    )
    plan = solution.plan
    plan.note(f"jacobian: {prior.in_words if jacobian is prior else newton.jacobian}")
    plan.note(start.in_words(_name_of(prior)))
    found = rotated.unpack(solution.states)[..., 0]
    spent = torch.full_like(solution.iterations, problem.rows_seen // problem.samples)
    about: dict[str, Any] = {"residual": solution.residual, "plan": plan, "message": solution.message}
    return _told(problem, found, keep_states, solution, evaluations=spent, **about)
