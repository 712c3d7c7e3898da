"""What is kept between runs of a window with the same denoiser, sampler and shapes; and a run of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...bounded import Hashed
from ...distributed.ranks import Ranks
from ...graphs.cache import arithmetic, prepared_samplers
from ...linear import Auto
from ...runtime import full_precision, has_triton, is_out_of_memory
from ...sequence.fingerprint import fingerprint, owner_of
from ...solution import Plan, Result
from ..coupling import Coupling
from ..denoiser import layout_of
from ..prior import Prior
from ..problem import TF32, Problem, largest_of_normal
from ..start import Start
from .graphs import Replayed, make_room
from .iteration import STRICTER, Iteration
from .rounding import Rounding, of_network
from .window import Window

#: the share of a window's steps that may still move when TF32 has done what it can
_UNSETTLED = 1 / 4
#: and by what share fewer must move after every iteration that others follow
_GAIN = 0.9
#: of a sample: the estimate of what rounding leaves is not finite
_UNKNOWN = 2
#: Where values are clipped, and so large a share of all steps has jumped when they became exact, in a window of so many steps or more,
#: the iteration has found none of them before its turn, and how small errors grow was not seen: as in a chaotic sampler.
_JUMPED, _WIDE = 2 / 3, 16
#: graphs are made for at most so many counts of rows, when each first occurs; a call is filled up to the next
_BUCKETS = 32


@dataclass(frozen=True, eq=False)
class Outcome:
    """Where the iteration got to: ``states`` [L, B, D, K]; ``results`` of the B samples; the rest [B].

    ``residual`` [L, B] is of every step, relative to states larger than 1; ``least`` the least tolerance that
    rounding leaves of a sample that went through all steps; not finite where that cannot be told. ``own`` is what rounding leaves of
    the loop's sample, by the same estimate.
    """

    states: Tensor
    results: list[Result]
    iterations: Tensor
    evaluations: Tensor
    residual: Tensor
    exact_steps: Tensor
    least: Tensor
    own: Tensor


def kind_for(problem: Problem) -> type[Iteration]:
    """The iteration made of kernels where there is one, else its plain reference."""
    coefficients = problem.coefficients
    plain = coefficients.slots == 1 and coefficients.limit is None
    if plain and problem.device.type == "cuda" and problem.dtype == torch.float32 and has_triton():
        from .by_kernels import FusedIteration  # which takes a second, as Triton does

        return FusedIteration
    return Iteration


def has_tf32(problem: Problem) -> bool:
    """Whether the network multiplies in float32 proper, and faster where it may round its factors to TF32."""
    if problem.device.type != "cuda" or problem.coarsest != torch.float32 or problem.in_tf32:
        return False
    return torch.cuda.get_device_capability(problem.device) >= (8, 0)


class Prepared:
    """What does not change between runs with the same denoiser, sampler and shapes.

    The denoiser itself is not kept: a graph knows where its parameters lie.
    """

    tf32: bool
    kept: Problem
    network: Callable[..., Tensor]
    runs: int
    returned: int

    why: str = "which keep a {} busy"
    #: of the iteration; None: what is fastest for all steps at once
    kind: type[Iteration] | None = None

    def __init__(self, window: Window, problem: Problem, prior: Prior):
        self.prior: Prior = prior
        self.ranks: Ranks | None = problem.ranks
        steps, device, dtype = problem.steps, problem.device, problem.dtype
        self.device: torch.device = device
        self.tolerance: float = window.tolerance_for(problem)
        kind = self.kind or kind_for(problem)
        self.coupling: Coupling = Coupling(prior, steps, problem.width, device, dtype, plain=kind.plain)
        self.start_coupling: Coupling = self.coupling
        if prior.of_path is not prior:
            self.start_coupling = Coupling(prior.of_path, steps, problem.width, device, dtype)
        with window.settings(device):
            eps, rounding, self.tf32 = problem.eps, problem.rounding, has_tf32(problem)
        # As its dtype says, and as it was seen to.
        coarse = kind.margin * of_network(problem, self.coupling, rounding.clamp(max=eps))
        rounded = of_network(problem, self.coupling, rounding)
        bound = window.freeze**0.5 * self.tolerance
        self.iteration: Iteration = kind(
            problem.coefficients,
            self.coupling,
            problem.samples,
            problem.width,
            size=window.size_for(problem),
            freeze=window.thresholds_for(problem) + coarse,
            # To go back would not help where it is the network that rounds.
            bound=math.inf if coarse.max() > bound else bound,
            settled=float(window.tf32 or math.inf),
            accelerate=window.accelerate,
            adds_noise=problem.shift is not None,
            eps=(eps, max(eps, TF32)),
            rounded=rounded,
            outputs=rounding / largest_of_normal(problem.width),
        )
        self.least: Tensor = torch.zeros_like(self.iteration.allowance)
        self.own: Tensor = torch.zeros_like(self.least)
        self.residual: Tensor = torch.zeros_like(self.iteration.measured)
        self.classes: tuple[Any, Any] = kept_classes(problem)
        self.starts: dict[Start, Any] = {}
        self.replayed: Replayed | None = None
        self.rounding: Rounding | None = None
        self.scan: str = "{} ({})".format(*Auto().choose(self.coupling.blocks[1:])) if problem.length > 1 else "none"
        first, last = window.thresholds_for(problem)[[0, -1]].tolist()
        self.leaves: str = f"the first step leaves at an update of {first:.2g}, the last at {last:.2g}"
        self.settings: Callable[[torch.device], AbstractContextManager[None]] = window.settings
        self.runs = self.returned = 0
        self.halved: bool = False
        self.lost: dict[int, int] = {}  # samples of this run that are not finite, and after how many steps

    def run(self, window: Window, problem: Problem, start: Start, plan: Plan) -> Outcome:
        self.runs += 1
        if self.runs > 1:  # a run that stays the only one would not earn its graphs back
            self.replayed = self.replayed or Replayed(problem.device)
        call = self.replayed or _plainly
        with nullcontext() if self.replayed is None else self.replayed.turn():
            given = self.settle(problem)
            try:
                self.loop(window, problem, start, call)
            finally:
                problem.denoiser.given = given
                del self.network, self.kept
            with window.settings(problem.device):  # in which every step was last evaluated
                self.rounding = self.rounding or Rounding(problem, self.coupling)
            call(self.finish)
            outcome = self.outcome(problem)
        self.describe(window, problem, plan)
        return outcome

    @property
    def bytes(self) -> int:
        """Of buffers; what graphs work on, all share."""
        return sum(each.nbytes for each in vars(self.iteration).values() if isinstance(each, Tensor))

    def describe(self, window: Window, problem: Problem, plan: Plan) -> None:
        size, length = self.iteration.size, problem.length
        why = "as asked" if isinstance(window.size, int) else self.why.format(problem.device.type)
        plan.linear = self.scan
        if self.iteration.in_words is not None:
            plan.note(self.iteration.in_words)
        plan.note(f"window: {size} of {length} steps at a time, up to {self.iteration.most_rows} rows a call, {why}")
        plan.note(f"tolerance: {self.tolerance:g} of the final sample; {self.leaves}")
        if self.halved:
            plan.note("memory ran out, and the window was halved")
        if self.returned:
            plan.note(
                f"errors grew more than was expected in {self.returned} of {problem.samples} samples, which took more iterations"
            )
        if self.replayed is not None:
            plan.note(f"no CUDA graphs: {self.replayed.refusal}" if self.replayed.refusal else "CUDA graphs")
        elif window.no_graphs(problem) is None:
            plan.note("no CUDA graphs: the first run of its kind; the next one is recorded")

    def settle(self, problem: Problem) -> tuple[Any, Any]:
        """Have the problem work on the buffers that are kept here; returns the classes that it had."""
        iteration, given = self.iteration, put_classes(problem, self.classes)
        problem.coefficients = iteration.coefficients
        iteration.hold(problem.initial, problem.shift)
        self.kept = problem.with_noise(iteration.states[0], iteration.shift)
        self.network = problem.network if self.runs > 1 else problem.checked_network
        return given

    def loop(self, window: Window, problem: Problem, start: Start, call: Callable[..., None]) -> None:
        iteration, self.lost, self.halved = self.iteration, {}, False
        quantum = 1 if self.replayed is None else -(-iteration.most_rows // _BUCKETS)
        most = window.most_iterations(iteration.length, iteration.size)
        # TF32 would move a good start away from the solution, and of one step there is nothing to learn in advance. Steps that
        # come into the window later would start from a coarse sampler's TF32, and never move enough to show how errors grow.
        gains = iteration.size > 1 and not start.may_be_good and most > 3
        gains = gains and (iteration.size == iteration.length or not start.asks_network)
        rough = window.tf32 is not None and gains and self.tf32 and iteration.may_be_rough
        # What was given from outside is somewhere else in every run.
        begin = _plainly if start.brings_tensors else call
        begin(self.begin, start, rough)
        left, full, before = iteration.most_rows, iteration.length // iteration.size, math.inf
        for number in range(most):
            try:
                call(self.iterate, min(-(-left // quantum) * quantum, iteration.most_rows), rough)
            except RuntimeError as error:
                self.halve(error)
                left, full = iteration.most_rows, 0
                continue
            if rough:
                rough, before = self.goes_on_roughly(before, number, most)
                if not rough:
                    iteration.forget()
                continue
            full -= 1
            if full > 0:
                continue
            rest = self.rest()
            left = sum(min(each, iteration.size) for each in rest)
            if not left:
                break
            # An iteration finishes a window at most: so long all windows stay full, and there is nothing to look for.
            full = min(each for each in rest if each) // iteration.size

    def rest(self) -> list[int]:
        """Of each sample, how many steps are not finished."""
        iteration = self.iteration
        finished, diverged, *_ = iteration.look()
        for row in (row for row, bad in enumerate(diverged) if bad and row not in self.lost):
            self.lost[row] = finished[row]
            iteration.prefix[row] = iteration.length  # it has no rows any more: the others go on by themselves
        return [0 if row in self.lost else iteration.length - each for row, each in enumerate(finished)]

    def halve(self, error: RuntimeError) -> None:
        """Go on with half a window where memory ran out: nothing of the iteration was done yet, or all of it."""
        if self.iteration.size == 1 or not is_out_of_memory(error):
            raise error
        self.iteration.size //= 2
        self.halved = True
        make_room()

    def goes_on_roughly(self, before: float, number: int, most: int) -> tuple[bool, int]:
        """Whether another iteration in TF32 pays, and how many steps still move: before, that many did."""
        iteration = self.iteration
        _, diverged, counts, *_ = iteration.look()
        moving = [count for count, bad in zip(counts, diverged, strict=True) if not bad]
        gains = sum(moving) < _GAIN * before or number < 2
        pays = gains and sum(moving) > _UNSETTLED * iteration.size * len(moving)
        return pays and 2 * (number + 2) <= most, sum(moving)

    def in_precision(self, rough: bool) -> Callable[..., Tensor]:
        """The network, in TF32 or as it is to multiply; what is around it is always in full precision."""

        def network(*rows: Tensor) -> Tensor:
            with full_precision(self.device, tf32=True) if rough else self.settings(self.device):
                return self.network(*rows)

        return network

    def begin(self, start: Start, rough: bool) -> None:
        """Load the start."""
        prepared = self.starts.get(start) or start.prepare(self.kept, self.prior.of_path)
        if not start.brings_tensors:  # a graph that is recorded now works on what was prepared
            self.starts[start] = prepared
        states, rows = prepared.states(self.kept, self.start_coupling, self.in_precision(rough))
        self.iteration.load(states, known=start.may_be_good)
        self.iteration.evaluations += rows

    def iterate(self, count: int, rough: bool) -> None:
        """One iteration on ``count`` rows; ``rough``: in TF32, and no step leaves."""
        self.iteration.run(self.in_precision(rough), count, not rough)
        self.decide_alike()
        self.iteration.show()

    def decide_alike(self) -> None:
        """Where rows are spread over ranks, all go on with as many as the first does: sums may round otherwise on another device."""
        if self.ranks is not None:
            self.iteration.counters.copy_(self.ranks.spread(self.iteration.counters, 0))

    def finish(self) -> None:
        """What is to be known of the states: the last residuals, and what rounding leaves."""
        iteration = self.iteration
        assert self.rounding is not None
        height = torch.linalg.vector_norm(iteration.states[1:], math.inf, dim=(-2, -1))  # [L, B]
        grown = iteration.grown().clamp(max=1 / iteration.floor)
        least, own = self.rounding.least(height, grown)
        # What rounding leaves grows, too. Where a sample went back, it may do so in other directions than were seen.
        room = torch.where(iteration.went_back, STRICTER, 1.0) * iteration.floor
        self.least.copy_(torch.maximum(least, room * (height * grown).amax(0)))
        self.own.copy_(own)
        if iteration.size >= _WIDE:
            self.least.masked_fill_(iteration.jumps > _JUMPED * iteration.length, math.inf)
        torch.div(iteration.measured, height.clamp_min(1), out=self.residual)
        iteration.uncertain.copy_(self.least > self.tolerance)
        iteration.uncertain.masked_fill_(~torch.isfinite(self.least), _UNKNOWN)
        iteration.returned.copy_(iteration.went_back)
        self.decide_alike()
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
            own=self.own.clone(),
        )


def _plainly(function: Callable[..., None], *arguments: Any) -> None:
    function(*arguments)


def kept_classes(problem: Problem) -> tuple[Any, Any]:
    """Buffers for the classes of a kind of run."""
    return pytree.tree_map_only(Tensor, torch.clone, problem.denoiser.given)


def put_classes(problem: Problem, kept: tuple[Any, Any]) -> tuple[Any, Any]:
    """Have the classes of a run lie in such buffers; returns what they were given as."""
    given, problem.denoiser.given = problem.denoiser.given, kept
    for place, new in zip(pytree.tree_leaves(kept), pytree.tree_leaves(given), strict=True):
        if isinstance(place, Tensor):
            place.copy_(new)
    return given


def run_prepared(window: Window, problem: Problem, prior: Prior, start: Start, plan: Plan) -> Outcome:
    """On as many steps at a time as the window has, by graphs of earlier runs where there are some."""
    refusal = window.no_graphs(problem)
    if refusal is not None:
        plan.note(f"no CUDA graphs: {refusal}")
        return Prepared(window, problem, prior).run(window, problem, start, plan)
    with kept_for(window, problem, prior, lambda: Prepared(window, problem, prior)) as prepared:
        return prepared.run(window, problem, start, plan)


@contextmanager
def kept_for(window: Window, problem: Problem, prior: Prior, make: Callable[[], Any], *more: Hashable) -> Iterator[Any]:
    """What is kept of runs of this kind, or else made; after a run that fails nothing is."""
    denoiser = problem.denoiser
    key = Hashed(
        *more,
        window,
        fingerprint(denoiser.function),
        problem.steps.key,
        prior,  # known by its identity
        (problem.samples, problem.shape, problem.network_dtype, problem.device),
        (denoiser.guidance, layout_of(denoiser.given)),
        arithmetic(problem.device),
    )
    found = prepared_samplers.take(key) or make()
    yield found
    prepared_samplers.put(key, found, owner_of(denoiser.function))
