"""The sliding window: a quasi-Newton iteration on the steps that are not finished yet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...graphs.cache import prepared_samplers
from ...linear import Auto
from ...runtime import full_precision, has_triton
from ...sequence.fingerprint import fingerprint, owner_of
from ...solution import Plan, Result
from ..coupling import Coupling
from ..denoiser import layout_of
from ..prior import Prior
from ..problem import Problem
from ..start import CoarseStart, GaussianStart, Start, as_start
from .graphs import Replayed
from .iteration import STRICTER, Iteration
from .rounding import Rounding, of_network

#: rows that keep a device busy: up to these a call of the network costs about the same
_FILLING = {"cuda": 1024, "cpu": 64}
#: An error left at the first step may grow on its way to the final sample, one left at the last does not. By how much is the
#: network's and the sample's affair: 2 to 60 times in DDIM with networks trained well and badly, hundreds of times in a few
#: samples of DDPM. Where more was seen in the end, a sample goes back (``Iteration``).
_GROWTH = 100.0
#: where one window holds all of so many steps or more, the network is first asked at some of them
_MANY = 512
#: the share of a window's steps that may still move when TF32 has done what it can
_UNSETTLED = 1 / 4
#: and by what share fewer must move after every iteration that others follow
_GAIN = 0.9
#: relative precision of what is multiplied in TF32
_TF32 = 2.0**-10
#: of a sample: the estimate of what rounding leaves is not finite
_UNKNOWN = 2
#: Where values are clipped, and so large a share of all steps has jumped when they became exact, in a window of so many steps or more,
#: the iteration has found none of them before its turn, and how small errors grow was not seen: as in a chaotic sampler.
_JUMPED, _WIDE = 2 / 3, 16
#: graphs are made for at most so many counts of rows, when each first occurs; a call is filled up to the next
_BUCKETS = 32


@dataclass(frozen=True, kw_only=True)
class Window:
    """All unfinished steps at once: one call of the network an iteration, corrections spread by the prior's Jacobian.

    A step leaves the window when its update is far below the tolerance; every sample has a window of its own. On a GPU
    the network works in full float32 precision, whatever is set for TF32, but for the first iterations, in which no step
    leaves (see ``tf32``). From the second call on with the same denoiser, sampler and shapes the iterations are replayed
    from CUDA graphs. Graphs read the denoiser's parameters where they lie: changes in place are seen; where they were
    replaced, or anything else that the denoiser reaches was, graphs are made anew: also global variables that its code names.
    Changes outside of Python, in global variables of libraries or in large arrays of NumPy are not seen: a denoiser whose
    result depends on them needs ``graphs=False``.

    Args:
        tolerance: of the final sample, absolute; default 1e-3 in float32 and below, 1e-8 in float64
        size: at most so many steps of a sample are evaluated at a time, which bounds the network's memory. Fewer steps are
            less work in more iterations; None: enough to keep the device busy with this batch, at least L / 8
        freeze: the last step leaves the window when its update is below this share of the tolerance; earlier ones when it
            is below less, the first a hundredth of it, since what is left may grow on its way to the final sample. Where the
            iterates showed that it has grown to more than the square root of this share, the sample goes back
        accelerate: extrapolate from the last three updates
        max_iterations: the loop takes over after these; None: 200, or where that is more, eight times as many as there are
            windows of ``size`` in all steps: small windows that were tried took about four times as many
        tf32: until the updates of three quarters of the window's steps are below this, and only while their number grows, a GPU
            multiplies in TF32, and no step leaves: what has left was last seen in full precision. Not where the start is
            earlier samples or given states: these may be better than TF32 can tell. None: never
        graphs: replay iterations from CUDA graphs

    >>> import torch
    >>> from deeppcr.diffusion import DDIM, Noise, Schedule, Window, sample
    >>> window = Window(tolerance=1e-4, size=64)
    >>> denoiser = lambda z, t: torch.sin(z)
    >>> sample(denoiser, Schedule.linear(200), torch.randn(1, 5), step=DDIM(), solver=window).final.shape
    torch.Size([1, 5])
    """

    tolerance: float | None = None
    size: int | None = None
    freeze: float = 0.05
    accelerate: bool = True
    max_iterations: int | None = None
    tf32: float | None = 0.01
    graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("tolerance", "tf32"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"{name}: expected a positive number or None, got {value!r}")
        if not isinstance(self.freeze, (int, float)) or not 0 < self.freeze <= 1:
            raise ValueError(f"freeze: expected a share of the tolerance in (0, 1], got {self.freeze!r}")
        for name, least in (("size", 1), ("max_iterations", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name}: expected a whole number from {least}, got {value!r}")

    def tolerance_for(self, dtype: torch.dtype) -> float:
        if self.tolerance is not None:
            return self.tolerance
        return 1e-8 if dtype == torch.float64 else 1e-3

    def size_for(self, problem: Problem) -> int:
        length, rows = problem.length, _FILLING.get(problem.device.type, 1024)
        return min(length, self.size or max(-(-rows // problem.samples), -(-length // 8)))

    def most_iterations(self, length: int, size: int) -> int:
        """After how many iterations the loop takes over, of so many steps in windows of this size."""
        return self.max_iterations or max(200, 8 * -(-length // size))

    def start_for(self, problem: Problem, start: Any) -> Start:
        """Where a run starts.

        A coarse sampler saves more evaluations than it takes where all its steps are in the window at once, and many: those
        of 1,024 steps fell from 5.9 to 4.9 rows a step for latents of MNIST, not at all in windows of an eighth.
        """
        if start is not None:
            return as_start(start)
        whole = self.size_for(problem) == problem.length >= _MANY
        return CoarseStart() if whole and problem.slots == 1 and problem.steps.clip is None else GaussianStart()

    def thresholds_for(self, problem: Problem) -> Tensor:
        """[L] float64: below which update each step leaves."""
        left = 1 - torch.arange(1, problem.length + 1, dtype=torch.float64) / problem.length
        return self.freeze * self.tolerance_for(problem.dtype) * _GROWTH**-left

    def run(self, problem: Problem, prior: Prior, start: Start, plan: Plan) -> Outcome:
        """Iterate until every sample is finished or the iterations are used up."""
        with torch.inference_mode(False), torch.no_grad():
            refusal = self.no_graphs(problem)
            if refusal is not None:
                plan.note(f"no CUDA graphs: {refusal}")
                return Prepared(self, problem, prior).run(self, problem, start, plan)
            key = _key(self, problem, prior)
            prepared = prepared_samplers.take(key) or Prepared(self, problem, prior)
            outcome = prepared.run(self, problem, start, plan)
            prepared_samplers.put(key, prepared, owner_of(problem.denoiser.function))
            return outcome

    def no_graphs(self, problem: Problem) -> str | None:
        """Why iterations are not replayed, if they are not."""
        if problem.device.type != "cuda":
            return f"the noise is on the {problem.device.type}"
        if not self.graphs:
            return "graphs=False"
        return "autocast is on" if torch.is_autocast_enabled("cuda") else None


def _key(window: Window, problem: Problem, prior: Prior) -> tuple:
    """What a prepared run depends on."""
    denoiser = problem.denoiser
    return (
        window,
        fingerprint(denoiser.function),
        problem.steps.key,
        prior,  # known by its identity
        (problem.samples, problem.shape, problem.network_dtype, problem.device),
        (denoiser.guidance, layout_of(denoiser.given)),
    )


@dataclass(frozen=True, eq=False)
class Outcome:
    """Where the iteration got to: ``states`` [L, B, D, K]; ``results`` of the B samples; the rest [B].

    ``residual`` [L, B] is of every step, relative to states larger than 1; ``least`` the least tolerance that
    rounding leaves of a sample that went through all steps; not finite where that cannot be told.
    """

    states: Tensor
    results: list[Result]
    iterations: Tensor
    evaluations: Tensor
    residual: Tensor
    exact_steps: Tensor
    least: Tensor


def kind_for(problem: Problem) -> type[Iteration]:
    """The iteration made of kernels where there is one, else its plain reference."""
    coefficients = problem.coefficients
    plain = coefficients.slots == 1 and coefficients.limit is None
    if plain and problem.device.type == "cuda" and problem.dtype == torch.float32 and has_triton():
        from .by_kernels import FusedIteration  # which takes a second, as Triton does

        return FusedIteration
    return Iteration


def has_tf32(problem: Problem) -> bool:
    """Whether the network multiplies faster where it may round its factors to TF32."""
    if problem.device.type != "cuda" or problem.coarsest != torch.float32:
        return False
    return torch.cuda.get_device_capability(problem.device) >= (8, 0)


class Prepared:
    """What does not change between runs with the same denoiser, sampler and shapes.

    The denoiser itself is not kept: a graph knows where its parameters lie.
    """

    tolerance: float
    device: torch.device
    tf32: bool
    runs: int
    returned: int
    network: Callable[[Tensor, Tensor, Tensor], Tensor]
    kept: Problem

    def __init__(self, window: Window, problem: Problem, prior: Prior):
        self.prior = prior
        steps, device, dtype = problem.steps, problem.device, problem.dtype
        self.device, self.tolerance = device, window.tolerance_for(dtype)
        self.coupling: Coupling = Coupling(prior, steps, problem.width, device, dtype)
        self.start_coupling: Coupling = self.coupling
        if prior.of_path is not prior:
            self.start_coupling = Coupling(prior.of_path, steps, problem.width, device, dtype)
        with full_precision(device):
            eps = problem.eps
        coarse, self.tf32 = of_network(problem, self.coupling, eps), has_tf32(problem)
        self.iteration: Iteration = kind_for(problem)(
            problem.coefficients,
            self.coupling,
            problem.samples,
            problem.width,
            size=window.size_for(problem),
            freeze=window.thresholds_for(problem) + coarse,
            # To go back would not help where it is the network that rounds.
            bound=math.inf if coarse.any() else window.freeze**0.5 * self.tolerance,
            settled=float(window.tf32 or math.inf),
            accelerate=window.accelerate,
            adds_noise=problem.shift is not None,
            eps=(eps, max(eps, _TF32)),
        )
        self.least: Tensor = torch.zeros_like(self.iteration.allowance)
        self.residual: Tensor = torch.zeros_like(self.iteration.measured)
        self.classes: Any = pytree.tree_map_only(Tensor, torch.clone, problem.denoiser.given)
        self.starts: dict[Start, Any] = {}
        self.replayed: Replayed | None = None
        self.rounding: Rounding | None = None
        self.scan: str = "{} ({})".format(*Auto().choose(self.coupling.blocks[1:])) if problem.length > 1 else "none"
        first, last = window.thresholds_for(problem)[[0, -1]].tolist()
        self.leaves: str = f"the first step leaves at an update of {first:.2g}, the last at {last:.2g}"
        self.runs = self.returned = 0
        self.lost: dict[int, int] = {}  # samples of this run that are not finite, and after how many steps

    def run(self, window: Window, problem: Problem, start: Start, plan: Plan) -> Outcome:
        self.runs += 1
        call: Callable[..., None] = _plainly
        quantum = 1
        if self.runs > 1:  # a run that stays the only one would not earn its graphs back
            call = self.replayed = self.replayed or Replayed(problem.device)
            quantum = -(-self.iteration.most_rows // _BUCKETS)
        given = problem.denoiser.given
        self.settle(problem)
        try:
            self.loop(window, problem, start, call, quantum)
        finally:
            problem.denoiser.given = given
            del self.network, self.kept
        with full_precision(problem.device):  # in which every step was last evaluated
            self.rounding = self.rounding or Rounding(problem, self.coupling)
        call(self.finish)
        outcome = self.outcome(problem)
        self.describe(window, problem, plan)
        return outcome

    def describe(self, window: Window, problem: Problem, plan: Plan) -> None:
        size, length = self.iteration.size, problem.length
        why = "as asked" if window.size else f"which keep a {problem.device.type} busy"
        plan.linear = self.scan
        if type(self.iteration) is not Iteration:
            plan.note("iteration: Triton kernels")
        plan.note(f"window: {size} of {length} steps at a time, up to {self.iteration.most_rows} rows a call, {why}")
        plan.note(f"tolerance: {self.tolerance:g} of the final sample; {self.leaves}")
        if self.returned:
            plan.note(
                f"errors grew more than was expected in {self.returned} of {problem.samples} samples, which took more iterations"
            )
        if self.replayed is not None:
            plan.note(f"no CUDA graphs: {self.replayed.refusal}" if self.replayed.refusal else "CUDA graphs")
        elif window.no_graphs(problem) is None:
            plan.note("no CUDA graphs: the first run of its kind; the next one is recorded")

    def settle(self, problem: Problem) -> None:
        """Have the problem work on the buffers that are kept here."""
        given = pytree.tree_leaves(problem.denoiser.given)
        for kept, new in zip(pytree.tree_leaves(self.classes), given, strict=True):
            if isinstance(kept, Tensor):
                kept.copy_(new)
        iteration = self.iteration
        problem.denoiser.given = self.classes
        problem.coefficients = iteration.coefficients
        iteration.hold(problem.initial, problem.shift)
        self.kept = problem.with_noise(iteration.states[0], iteration.shift)
        self.network = problem.network if self.runs > 1 else problem.checked_network

    def loop(self, window: Window, problem: Problem, start: Start, call: Callable[..., None], quantum: int) -> None:
        iteration, self.lost = self.iteration, {}
        most = window.most_iterations(iteration.length, iteration.size)
        # TF32 would move a good start away from the solution, and of one step there is nothing to learn in advance. Steps that
        # come into the window later would start from a coarse sampler's TF32, and never move enough to show how errors grow.
        gains = iteration.size > 1 and not start.may_be_good and most > 3
        gains = gains and (iteration.size == iteration.length or not start.asks_network)
        rough = window.tf32 is not None and gains and self.tf32
        # What was given from outside is somewhere else in every run.
        begin = _plainly if start.brings_tensors else call
        begin(self.begin, start, rough)
        left, full, before = iteration.most_rows, iteration.length // iteration.size, math.inf
        for number in range(most):
            call(self.iterate, min(-(-left // quantum) * quantum, iteration.most_rows), rough)
            if rough:
                rough, before = self.goes_on_roughly(before, number, most)
                if not rough:
                    iteration.forget()
                continue
            full -= 1
            if full > 0:
                continue
            finished, diverged, *_ = iteration.look()
            for row in (row for row, bad in enumerate(diverged) if bad and row not in self.lost):
                self.lost[row] = finished[row]
                iteration.prefix[row] = iteration.length  # it has no rows any more: the others go on by themselves
            rest = [0 if row in self.lost else iteration.length - each for row, each in enumerate(finished)]
            left = sum(min(each, iteration.size) for each in rest)
            if not left:
                break
            # An iteration finishes a window at most: so long all windows stay full, and there is nothing to look for.
            full = min(each for each in rest if each) // iteration.size

    def goes_on_roughly(self, before: float, number: int, most: int) -> tuple[bool, int]:
        """Whether another iteration in TF32 pays, and how many steps still move: before, that many did."""
        iteration = self.iteration
        _, diverged, counts, *_ = iteration.look()
        moving = [count for count, bad in zip(counts, diverged, strict=True) if not bad]
        gains = sum(moving) < _GAIN * before or number < 2
        pays = gains and sum(moving) > _UNSETTLED * iteration.size * len(moving)
        return pays and 2 * (number + 2) <= most, sum(moving)

    def in_precision(self, rough: bool) -> Callable[..., Tensor]:
        """The network, in TF32 or in full precision; what is around it is always in full."""

        def network(*rows: Tensor) -> Tensor:
            with full_precision(self.device, tf32=rough):
                return self.network(*rows)

        return network

    def begin(self, start: Start, rough: bool) -> None:
        """Load the start."""
        with full_precision(self.device):
            prepared = self.starts.get(start) or start.prepare(self.kept, self.prior.of_path)
            if not start.brings_tensors:  # a graph that is recorded now works on what was prepared
                self.starts[start] = prepared
            network = self.in_precision(rough)
            states, rows = start.states(self.kept, self.start_coupling, network, prepared)
            self.iteration.load(states, known=start.may_be_good)
            self.iteration.evaluations += rows

    def iterate(self, count: int, rough: bool) -> None:
        """One iteration on ``count`` rows; ``rough``: in TF32, and no step leaves."""
        with full_precision(self.device):
            self.iteration.run(self.in_precision(rough), count, not rough)
            self.iteration.show()

    def finish(self) -> None:
        """What is to be known of the states: the last residuals, and what rounding leaves."""
        iteration = self.iteration
        assert self.rounding is not None
        height = torch.linalg.vector_norm(iteration.states[1:], math.inf, dim=(-2, -1))  # [L, B]
        least = self.rounding.least(height)
        # What rounding leaves grows, too. Where a sample went back, it may do so in other directions than were seen.
        room = torch.where(iteration.went_back, STRICTER, 1.0) * iteration.floor
        grown = (height * iteration.grown().clamp(max=1 / iteration.floor)).amax(0)
        self.least.copy_(torch.maximum(least, room * grown))
        if iteration.size >= _WIDE:
            self.least.masked_fill_(iteration.jumps > _JUMPED * iteration.length, math.inf)
        torch.div(iteration.measured, height.clamp_min(1), out=self.residual)
        iteration.uncertain.copy_(self.least > self.tolerance)
        iteration.uncertain.masked_fill_(~torch.isfinite(self.least), _UNKNOWN)
        iteration.returned.copy_(iteration.went_back)
        iteration.show()

    def outcome(self, problem: Problem) -> Outcome:
        iteration, results = self.iteration, []
        states, counters = iteration.states[1:].clone(), iteration.counters.clone()
        least, residual = self.least.clone(), self.residual.clone()
        exact, iterations, evaluations = counters[0], *counters[5:]
        finished, diverged, _, uncertain, returned = iteration.look()
        self.returned = sum(returned)
        for row, (count, bad, rough) in enumerate(zip(finished, diverged, uncertain, strict=True)):
            if bad or count < iteration.length:
                results.append(Result.NON_FINITE if bad else Result.NOT_CONVERGED)
                least[row] = 0
            elif rough == _UNKNOWN:  # nothing is known of it, however small the updates are
                results.append(Result.NOT_CONVERGED)
                exact[row] = 0
            else:
                results.append(Result.PRECISION_FLOOR if rough else Result.CONVERGED)
        for row, count in self.lost.items():
            exact[row] = count
        return Outcome(
            states=states,
            results=results,
            iterations=iterations,
            evaluations=evaluations * problem.denoiser.rows_per_call,
            residual=residual,
            exact_steps=exact,
            least=least,
        )


def _plainly(function: Callable[..., None], *arguments: Any) -> None:
    function(*arguments)
