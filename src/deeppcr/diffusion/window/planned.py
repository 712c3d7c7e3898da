"""Sampling the way that is fastest: the loop in a CUDA graph, a short window that slides along, or all steps at once.

What rows of the network cost is measured in the first run of a kind, on the run's own steps, so hardly anything is computed for it in
vain; how often steps are evaluated is seen in every run. Where a window turns out to be slower than the loop, the loop goes on.

Shapes: L steps, B samples, D the flattened sample, K slots.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...solution import Plan, Result
from ..prior import Prior
from ..problem import Problem
from ..start import Start
from .forecast import Forecast
from .graphs import Replayed
from .iteration import Iteration
from .looped import Looped
from .prepared import Outcome, Prepared
from .sliding import SlidingIteration

if TYPE_CHECKING:
    from .window import Window

#: A graph of the loop holds so many steps that it takes this long, in seconds, but no more than so many: then its launch costs nothing.
_LONG, _MOST_STEPS = 1e-3, 16
#: How often something is timed: the least counts.
_TIMES = 2
#: Where more is left of a sample that was found in parallel than the tolerance, and than the loop's own rounding leaves, by so many
#: times, nothing is gained. Estimates of what steps leave have a margin of eight.
_WORTHLESS = 16.0
#: So many iterations are looked at to see whether a window still pays, when it has been through so many more.
_LATELY, _FIRST = 6, 6


class GraphLoop:
    """The loop in CUDA graphs, of one kind of run.

    Args:
        problem: of this kind
        settings: of PyTorch around the network, by device
    """

    looped: Looped
    settings: Callable[[torch.device], AbstractContextManager[None]]
    device: torch.device
    network: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __init__(self, problem: Problem, settings: Callable[[torch.device], AbstractContextManager[None]]):
        self.looped, self.settings, self.device = Looped(problem), settings, problem.device
        self.replayed: Replayed = Replayed(problem.device)
        self.step: float = 0.0  # seconds
        self.at_once: int = 1  # steps of a graph

    @property
    def bytes(self) -> int:
        return self.looped.bytes

    def advance(self, count: int) -> None:
        """What is recorded."""
        with self.settings(self.device):
            self.looped.advance(self.network, count)

    @contextmanager
    def loaded(self, problem: Problem) -> Iterator[None]:
        """Inside, the noise and the classes of a run lie where the graphs read them."""
        self.looped.load(problem)
        given, problem.denoiser.given = problem.denoiser.given, self.looped.classes
        self.network = problem.network
        try:
            yield
        finally:
            problem.denoiser.given = given
            del self.network

    def measure(self, problem: Problem) -> None:
        """See how long a step takes, by the first few, and with that how many of them a graph is to hold."""
        with self.loaded(problem):
            self.step = self.seconds(problem, 1)
            self.at_once = max(1, min(_MOST_STEPS, problem.length // 4, int(_LONG / self.step)))
            if self.at_once > 1:
                self.step = self.seconds(problem, self.at_once)

    def seconds(self, problem: Problem, count: int) -> float:
        """Of a step, so many at once; the first call records."""
        found = []
        for _ in range(1 + _TIMES):
            self.looped.begin(problem.initial.detach(), 0)
            found.append(timed(lambda: self.replayed(self.advance, count), self.device) / count)
        return min(found[1:])

    def run(self, problem: Problem, at: int = 0, state: Tensor | None = None) -> Tensor:
        """All states [L, B, D, K], those from a step on computed; ``state`` [B, D, K] is its input."""
        if not self.step:
            self.measure(problem)
        with self.loaded(problem):
            if state is not None:
                self.looped.begin(state, at)
            left = problem.length - at
            while left:
                count = self.at_once if left >= self.at_once else 1
                self.replayed(self.advance, count)
                left -= count
        return self.looped.states

    def outcome(self, problem: Problem) -> Outcome:
        """Of a run of the loop."""
        with self.replayed.turn():
            return self.described(problem, self.run(problem).clone())

    def described(self, problem: Problem, states: Tensor) -> Outcome:
        """What is to be said of states [L, B, D, K] that are all the loop's."""
        samples, length = problem.samples, problem.length
        exact = torch.isfinite(states).all(-1).all(-1).to(torch.long).cumprod(0).sum(0)
        return Outcome(
            states=states,
            results=[Result.LOOP if steps == length else Result.NON_FINITE for steps in exact.tolist()],
            iterations=torch.zeros_like(exact),
            evaluations=torch.full_like(exact, length * problem.denoiser.rows_per_call),
            residual=states.new_zeros(length, samples),
            exact_steps=exact,
            least=states.new_zeros(samples),
            own=states.new_zeros(samples),
        )


class Sliding(Prepared):
    """A window that slides, and gives way to the loop where that is faster."""

    forecast: Forecast
    graph_loop: GraphLoop
    replayed: Replayed | None
    halved: bool
    lost: dict[int, int]

    kind: type[Iteration] | None = SlidingIteration
    why: str = "which is expected to be fastest"

    def __init__(self, window: Window, problem: Problem, prior: Prior, forecast: Forecast, loop: GraphLoop):
        super().__init__(window, problem, prior)
        self.forecast, self.graph_loop, self.replayed = forecast, loop, Replayed(problem.device)
        self.gave_way: int | None = None

    def loop(self, window: Window, problem: Problem, start: Start, call: Callable[..., None]) -> None:
        iteration, forecast, length = self.iteration, self.forecast, problem.length
        self.lost, self.gave_way, self.halved = {}, None, False
        call(self.begin, start, False)
        size = forecast.best() if forecast.iterations else forecast.probe
        lately: deque[tuple[float, float]] = deque(maxlen=_LATELY)
        done = 0.0  # steps of a sample, on average
        for number in range(window.max_iterations or 8 * length):
            if size is None:
                break
            iteration.size = size
            try:
                self.iterate_timed(call)
            except RuntimeError as error:
                self.halve(error)
                size = forecast.largest = iteration.size
                continue
            rest = self.rest()
            if not any(rest):
                break
            before, done = done, length - sum(rest) / len(rest)
            if done < before:  # a sample went back
                lately.clear()
            else:
                lately.append((done - before, forecast.iteration(size)))
            steps, seconds = (
                (sum(each) for each in zip(*lately, strict=True)) if len(lately) == _LATELY else (math.inf, 0)
            )
            if number >= _FIRST + _LATELY and steps * forecast.step < seconds:
                size = None
            elif number == _TIMES and not forecast.evaluations:
                size = forecast.best()  # what rows cost is known now
        seen = float(iteration.evaluations.double().mean())
        if size is None:
            self.give_way(problem, length - max(self.rest()))
            # It was no faster in its best part, if it was in any.
            seen = max(seen * length / max(done, 1), forecast.evaluations_in(iteration.size) * length)
        forecast.evaluations[iteration.size] = seen / length

    def iterate_timed(self, call: Callable[..., None]) -> None:
        """One iteration; where it is replayed it is seen how long it takes."""
        rows, size, known = self.iteration.most_rows, self.iteration.size, self.forecast.iterations
        replays = self.replayed is not None and self.replayed.knows(self.iterate, rows, False)
        seconds = timed(lambda: call(self.iterate, rows, False), self.device)
        if replays:
            known[size] = min(seconds, known.get(size, seconds))

    def give_way(self, problem: Problem, at: int) -> None:
        """The loop goes on from the first step that is not finished in all samples; from the very first, where that is not far back."""
        at = at if 2 * at > problem.length else 0
        iteration, self.gave_way = self.iteration, at
        states = self.graph_loop.run(problem, at, iteration.states[at])
        iteration.states[at + 1 :].copy_(states[at:])
        iteration.evaluations += problem.length - at
        iteration.prefix.fill_(problem.length)
        # Of the steps that the window took, it is looked at how many jumped: the others say nothing of them.
        iteration.jumps.copy_(iteration.jumps * problem.length // max(at, 1))
        iteration.show()

    def describe(self, window: Window, problem: Problem, plan: Plan) -> None:
        super().describe(window, problem, plan)
        if self.gave_way is not None:
            took = f"went on from step {self.gave_way}" if self.gave_way else "took all steps again"
            plan.note(f"the loop in a CUDA graph {took}: the window was not faster")


class Planned:
    """What is known of one kind of run, and what it needs: the loop's graphs, and a window's buffers where one is worth it."""

    at_once: Window
    runs_at_once: int
    tolerance: float

    def __init__(self, window: Window, problem: Problem):
        self.forecast: Forecast = Forecast(problem.length, problem.samples)
        self.loop: GraphLoop = GraphLoop(problem, window.settings)
        self.sliding: Sliding | None = None
        self.at_once, self.runs_at_once = replace(window, size=None), 0
        self.tolerance = window.tolerance_for(problem)
        self.doubt: str = ""  # why nothing is to be found in parallel

    @property
    def bytes(self) -> int:
        return self.loop.bytes + (self.sliding.bytes if self.sliding else 0)

    def run(self, window: Window, problem: Problem, prior: Prior, start: Start, plan: Plan) -> Outcome:
        forecast, loop = self.forecast, self.loop
        with loop.replayed.turn():
            if not loop.step:
                loop.measure(problem)
            forecast.step = loop.step
            if self.doubt:
                outcome = self.run_loop(problem, plan)
            elif loop.replayed.refusal is not None or forecast.is_best_all_at_once(self.at_once.size_for(problem)):
                outcome = self.run_at_once(problem, prior, start, plan)
            elif (forecast.best() if forecast.iterations else forecast.probe) is not None:
                self.sliding = self.sliding or Sliding(window, problem, prior, forecast, loop)
                outcome = self.sliding.run(window, problem, start, plan)
                if self.sliding.gave_way == 0:
                    spent = {"iterations": outcome.iterations, "evaluations": outcome.evaluations}
                    outcome = replace(loop.described(problem, outcome.states), **spent)
                if self.sliding.replayed is not None and self.sliding.replayed.refusal:
                    forecast.largest = 0  # without graphs it is not worth another try
            else:
                outcome = self.run_loop(problem, plan)
            if self.is_worthless(outcome) and loop.replayed.refusal is None:
                outcome = self.run_loop(problem, plan)
        plan.note(forecast.in_words())
        return outcome

    def is_worthless(self, outcome: Outcome) -> bool:
        """Whether samples were found in parallel of which too little is known: from now on the loop takes all of this kind."""
        if not self.doubt and any(each not in (Result.CONVERGED, Result.LOOP) for each in outcome.results):
            left, loop = float(outcome.least.max()), float(outcome.own.max())
            if any(each.failed for each in outcome.results):
                self.doubt = "in parallel some samples were not found"
            elif left > _WORTHLESS * max(self.tolerance, loop):
                self.doubt = f"what is left of a sample that was found in parallel was estimated as {left:.0e}, the loop's own rounding as {loop:.0e}"
            return bool(self.doubt)
        return False

    def run_loop(self, problem: Problem, plan: Plan) -> Outcome:
        plan.note(f"one step after the other, in a CUDA graph{': ' if self.doubt else ', '}{self.doubt or Sliding.why}")
        found: list[Outcome] = []
        seconds = timed(lambda: found.append(self.loop.outcome(problem)), problem.device)
        self.loop.step = min(self.loop.step, seconds / problem.length)
        return found[0]

    def run_at_once(self, problem: Problem, prior: Prior, start: Start, plan: Plan) -> Outcome:
        self.runs_at_once += 1
        found: list[Outcome] = []
        start = self.at_once.start_for(problem, None)
        seconds = timed(lambda: found.append(self.at_once.run(problem, prior, start, plan)), problem.device)
        if self.runs_at_once > _TIMES:  # the first two set up, and record
            self.forecast.all_at_once = min(seconds, self.forecast.all_at_once or seconds)
        return found[0]


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, until the device is done with it."""
    _wait(device)
    begun = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - begun


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
