"""Sampling the way that is fastest: the loop in a CUDA graph, a short window that slides along, or all steps at once.

What rows of the network cost is measured in the first run of a kind, on the run's own steps, so hardly anything is computed for it in
vain; how often steps are evaluated is seen in every run. Where a window turns out to be slower than the loop, the loop goes on.

Shapes: L steps, B samples, D the flattened sample, K slots.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from ...solution import Plan, Result
from ..prior import GaussianPrior, Prior
from ..problem import Problem
from ..start import GaussianStart, Start
from .forecast import Forecast
from .graphs import Replayed
from .iteration import Iteration
from .looped import TIMES, GraphLoop, timed
from .prepared import Outcome, Prepared, kept_for, run_prepared
from .sliding import SlidingIteration
from .window import Window

#: Where more is left of a sample that was found in parallel than the tolerance, and than the loop's own rounding leaves, by so many
#: times, nothing is gained. Estimates of what steps leave have a margin of eight.
_WORTHLESS = 16.0
#: So many iterations are looked at to see whether a window still pays, when it has been through so many more.
_LATELY, _FIRST = 6, 6


class Sliding(Prepared):
    """A window that slides, and gives way to the loop where that is faster."""

    halved: bool
    lost: dict[int, int]

    kind: type[Iteration] | None = SlidingIteration
    why: str = "which is expected to be fastest"

    def __init__(self, window: Window, problem: Problem, prior: Prior, forecast: Forecast, loop: GraphLoop):
        super().__init__(window, problem, prior)
        self.forecast: Forecast = forecast
        self.graph_loop: GraphLoop = loop
        self.replayed: Replayed | None = Replayed(problem.device)
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
            elif number == TIMES and not forecast.evaluations:
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

    def __init__(self, window: Window, problem: Problem):
        self.forecast: Forecast = Forecast(problem.length, problem.samples)
        self.loop: GraphLoop = GraphLoop(problem, window.settings)
        self.sliding: Sliding | None = None
        self.at_once: Window = replace(window, size=None)
        self.runs_at_once: int = 0
        self.tolerance: float = window.tolerance_for(problem)
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
        seconds = timed(lambda: found.append(run_prepared(self.at_once, problem, prior, start, plan)), problem.device)
        if self.runs_at_once > TIMES:  # the first two set up, and record
            self.forecast.all_at_once = min(seconds, self.forecast.all_at_once or seconds)
        return found[0]


def run(window: Window, problem: Problem, prior: Prior, start: Start, plan: Plan) -> Outcome:
    """Iterate until every sample is finished or the iterations are used up: in the way that a window asks for, or that is expected to be
    fastest; where nothing is to be chosen, all steps at once."""
    with torch.inference_mode(False), torch.no_grad():
        if window.size == "auto":
            free = start == GaussianStart() and isinstance(prior, GaussianPrior)
            if free and window.no_graphs(problem) is None:
                with kept_for(window, problem, prior, lambda: Planned(window, problem)) as planned:
                    return planned.run(window, problem, prior, start, plan)
            window = replace(window, size=None)
        return run_prepared(window, problem, prior, start, plan)
