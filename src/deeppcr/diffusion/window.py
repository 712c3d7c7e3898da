"""The sliding window: a quasi-Newton iteration on the steps that are not finished yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..jacobian import ScalarJacobian
from ..solution import Plan, Result
from .coupling import Coupling
from .graphs import Graphs, full_precision
from .iteration import Iteration
from .prior import GaussianPrior
from .problem import Problem
from .start import start_states


@dataclass(frozen=True, kw_only=True)
class Window:
    """All unfinished steps at once: one call of the network an iteration, corrections spread by the prior's Jacobian.

    A step leaves the window when its update is far below the tolerance; every sample has a window of its own. On a GPU
    the network works in full float32 precision, whatever is set for TF32 (see ``tf32``), and from the second call on with
    the same denoiser, sampler and shapes the iterations are replayed from CUDA graphs. Graphs read the denoiser's
    parameters where they lie: changes in place are seen; where they were replaced, or anything else that can be
    found in the denoiser or its closure was, graphs are made anew. A denoiser whose result depends on global variables
    needs ``graphs=False``.

    Args:
        tolerance: of the final sample, absolute; default 1e-3 in float32 and below, 1e-8 in float64
        size: at most so many steps of a sample are evaluated at a time, which bounds the network's memory; None: all
        freeze: a step leaves the window when its update is below this share of the tolerance
        accelerate: extrapolate from the last two updates
        max_iterations: the loop takes over after these
        tf32: until the largest update is below this, a GPU multiplies in TF32, and no step leaves; None: never
        graphs: replay iterations from CUDA graphs

    >>> import torch
    >>> from deeppcr.diffusion import DDIM, Noise, Schedule, Window, sample
    >>> window = Window(tolerance=1e-4, size=64)
    >>> sample(torch.sin, Schedule.linear(200), torch.randn(1, 5), step=DDIM(), solver=window).final.shape
    torch.Size([1, 5])
    """

    tolerance: float | None = None
    size: int | None = None
    freeze: float = 0.1
    accelerate: bool = True
    max_iterations: int = 200
    tf32: float | None = None
    graphs: bool = True
    _graphs: Graphs = field(default_factory=Graphs, init=False, repr=False, compare=False)

    def __post_init__(self):
        for name in ("tolerance", "tf32"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"{name}: expected a positive number or None, got {value!r}")
        if not isinstance(self.freeze, (int, float)) or not 0 < self.freeze <= 1:
            raise ValueError(f"freeze: expected a share of the tolerance in (0, 1], got {self.freeze!r}")
        for name, least in (("size", 1), ("max_iterations", 1)):
            value = getattr(self, name)
            if (value is not None or name == "max_iterations") and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name}: expected a whole number from {least}, got {value!r}")

    def tolerance_for(self, dtype: torch.dtype) -> float:
        if self.tolerance is not None:
            return self.tolerance
        return 1e-8 if dtype == torch.float64 else 1e-3

    @torch.no_grad()
    def run(self, problem: Problem, jacobian: GaussianPrior | ScalarJacobian, start: Any, plan: Plan) -> Outcome:
        """Iterate until every sample is finished or the iterations are used up."""
        keep = self.graphs and problem.device.type == "cuda"
        prepared = self._graphs.find(self, problem, jacobian) if keep else None
        if prepared is None:
            prepared = self.prepare(problem, jacobian)
            if keep:
                self._graphs.keep(self, problem, jacobian, prepared)
        return prepared.run(self, problem, start, plan)

    def prepare(self, problem: Problem, jacobian: GaussianPrior | ScalarJacobian) -> Prepared:
        return Prepared(self, problem, jacobian)


@dataclass(frozen=True, eq=False)
class Outcome:
    """Where the iteration got to: ``states`` [L, B, D, K]; ``results`` of the B samples; the rest [B]."""

    states: Tensor
    results: list[Result]
    iterations: Tensor
    evaluations: Tensor
    residual: Tensor
    exact_steps: Tensor


class Prepared:
    """What does not change between runs with the same denoiser, sampler and shapes."""

    def __init__(self, window: Window, problem: Problem, jacobian: GaussianPrior | ScalarJacobian):
        self.jacobian = jacobian
        steps, device, dtype = problem.steps, problem.device, problem.dtype
        self.coupling = Coupling(jacobian, steps, problem.width, device, dtype)
        self.prior = jacobian if isinstance(jacobian, GaussianPrior) else GaussianPrior()
        self.start_coupling = self.coupling
        if self.prior is not jacobian:
            self.start_coupling = Coupling(self.prior, steps, problem.width, device, dtype)
        self.iteration = Iteration(
            problem.coefficients,
            self.coupling,
            problem.samples,
            problem.width,
            size=window.size or len(steps),
            freeze=window.freeze * window.tolerance_for(dtype),
            accelerate=window.accelerate,
            adds_noise=problem.shift is not None,
        )

    def run(self, window: Window, problem: Problem, start: Any, plan: Plan) -> Outcome:
        iteration = self.iteration
        with full_precision(problem.device):
            states, rows = start_states(start, problem, self.prior, self.start_coupling)
        iteration.load(problem.initial, problem.shift, states)
        iteration.evaluations += rows
        rough = window.tf32 is not None and problem.device.type == "cuda"
        count = iteration.most_rows
        iterations = 0
        while count and iterations < window.max_iterations:
            self.iterate(window, problem, count, rough, plan)
            iterations += 1
            left, largest, diverged = iteration.summary.tolist()  # the one look of the host
            count = int(left)
            if diverged:
                break
            if rough and largest < window.tf32:
                rough = False
        return self.outcome(problem)

    def iterate(self, window: Window, problem: Problem, count: int, rough: bool, plan: Plan) -> None:
        """One iteration on ``count`` rows."""

        def network(*rows: Tensor) -> Tensor:
            with full_precision(problem.device, tf32=rough):
                return problem.network(*rows)

        with full_precision(problem.device):
            self.iteration.run(network, count, not rough)

    def outcome(self, problem: Problem) -> Outcome:
        iteration = self.iteration
        exact = iteration.prefix.clone()
        results = []
        for done, bad in torch.stack([exact == iteration.length, iteration.diverged.bool()], 1).tolist():
            results.append(Result.NON_FINITE if bad else Result.CONVERGED if done else Result.NOT_CONVERGED)
        return Outcome(
            states=iteration.states[1:].clone(),
            results=results,
            iterations=iteration.iterations.clone(),
            evaluations=iteration.evaluations * problem.denoiser.rows_per_call,
            residual=iteration.measured.amax(0),
            exact_steps=exact,
        )
