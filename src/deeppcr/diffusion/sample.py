"""``sample``: images from noise, the denoising steps in parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..jacobian import Jacobian
from ..newton import Loop, Newton
from ..solution import Plan, Result
from .noise import Noise
from .prior import GaussianPrior
from .problem import Problem
from .samples import Samples
from .schedule import Schedule
from .step import DDPM, Prediction, Sampler, Steps
from .window import Window


def sample(
    denoiser: Callable,
    schedule: Schedule | Steps,
    noise: Noise | Tensor,
    *,
    step: Sampler = DDPM(),
    prediction: Prediction = "epsilon",
    classes: Any = None,
    guidance: float | None = None,
    unconditional: Any = None,
    solver: Window | Newton | Loop = Window(),
    jacobian: GaussianPrior | Jacobian | None = None,
    start: Any = None,
    keep_states: bool = False,
    on_failure: Literal["loop", "raise", "return"] = "loop",
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
        solver: Window(...), deeppcr.Newton(...) or deeppcr.Loop()
        jacobian: GaussianPrior(...), by default of unit variance; deeppcr.ScalarJacobian(1.0) is Picard's iteration. With
            Newton any Jacobian of deeppcr; by default the solver's own
        start: where the iteration starts: see ``deeppcr.diffusion.start``
        keep_states: return the sample after every step too
        on_failure: "loop" finishes the rest one step at a time and warns, "raise" raises ConvergenceError, "return"
            returns what there is, and a backward pass through it raises

    Returns:
        Samples; ``final`` and ``states`` are differentiable in the noise and in all that the denoiser closes over

    >>> import torch
    >>> from deeppcr.diffusion import DDPM, Noise, Schedule, sample
    >>> schedule = Schedule.linear(100)
    >>> sample(lambda z, t: 0.9 * z, schedule, Noise.draw((2, 5), steps=100)).final.shape
    torch.Size([2, 5])
    """
    steps = schedule if isinstance(schedule, Steps) else _steps(schedule, step, prediction)
    problem = Problem(denoiser, steps, noise, classes, guidance, unconditional)
    if isinstance(solver, Loop):
        return _loop(problem, keep_states)
    raise NotImplementedError


def _steps(schedule: Schedule, step: Sampler, prediction: Prediction) -> Steps:
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule: expected a Schedule or Steps, got {type(schedule).__name__}")
    if not hasattr(step, "steps"):
        raise TypeError(f"step: expected DDPM(...) or DDIM(...), got {step!r}")
    return step.steps(schedule, prediction)


def _loop(problem: Problem, keep_states: bool) -> Samples:
    """The plain loop."""
    states, state = [], problem.initial
    for index in range(problem.length):
        state = problem.step(index, state)
        if keep_states:
            states.append(state[..., 0])
    samples, device = problem.samples, problem.device
    evaluations = problem.length * problem.denoiser.rows_per_call
    return Samples(
        final=problem.unflatten(state[..., 0]),
        states=problem.unflatten(torch.stack(states)) if keep_states else None,
        iterations=torch.zeros(samples, dtype=torch.long, device=device),
        evaluations=torch.full((samples,), evaluations, device=device),
        residual=torch.zeros(samples, dtype=problem.dtype, device=device),
        exact_steps=torch.full((samples,), problem.length, device=device),
        results=(Result.LOOP,) * samples,
        plan=Plan(),
        message=Result.LOOP.value,
    )
