"""The loop itself in CUDA graphs, some steps at a time on buffers that stay where they are.

Shapes: L steps, B samples, D the flattened sample, K slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ...solution import Plan, Result
from ..prior import UNIT
from ..problem import Problem
from ..samplers import Coefficients
from .graphs import Replayed
from .prepared import Outcome, kept_classes, kept_for, put_classes
from .window import Window

#: A graph of the loop holds so many steps that it takes this long, in seconds, but no more than so many: then its launch costs nothing.
_LONG, _MOST_STEPS = 1e-3, 16
#: How often something is timed: the least counts.
TIMES = 2


class GraphLoop:
    """The loop of one kind of run: its state, and which step is the next, lie on the device, so one recording serves all steps.

    Args:
        problem: of this kind
        settings: of PyTorch around the network, by device

    Attributes:
        states: [L, B, D, K], after every step that was taken
        step: seconds of one
        at_once: steps of a graph
    """

    network: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __init__(self, problem: Problem, settings: Callable[[torch.device], AbstractContextManager[None]]):
        self.settings: Callable[[torch.device], AbstractContextManager[None]] = settings
        self.device: torch.device = problem.device
        self.replayed: Replayed = Replayed(problem.device)
        self.step: float = 0.0
        self.at_once: int = 1
        self.coefficients: Coefficients = problem.coefficients
        self.state: Tensor = torch.zeros_like(problem.initial.detach())
        like = self.state
        self.shift: Tensor | None = None
        if problem.shift is not None:
            self.shift = like.new_zeros(problem.length, *like.shape[:2])
        self.states: Tensor = like.new_zeros(problem.length, *like.shape)
        self.next: Tensor = torch.zeros(1, dtype=torch.long, device=like.device)
        self.classes: tuple[Any, Any] = kept_classes(problem)
        self.who: Tensor = torch.arange(problem.samples, device=like.device)

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in vars(self).values() if isinstance(each, Tensor))

    def begin(self, state: Tensor, at: int) -> None:
        """Go on from a state [B, D, K] with a step."""
        self.state.copy_(state)
        self.next.fill_(at)

    def advance(self, count: int) -> None:
        """What is recorded: so many steps from the next one on, of which there are as many left."""
        with self.settings(self.device):
            state, steps = self.state, self.next + torch.arange(count, device=self.state.device)
            coefficients, shifts = self.coefficients.taken(steps), None if self.shift is None else self.shift[steps]
            states = []
            for number in range(count):
                inputs = coefficients.scale[number] * state[..., 0] if coefficients.scaled else state[..., 0]
                outputs = self.network(inputs, coefficients.timesteps[number].expand(len(state)), self.who)
                one = slice(number, number + 1)
                shift = None if shifts is None else shifts[one]
                state = coefficients.advance(one, state[None], outputs[None], shift)[0]
                states.append(state)
            self.state.copy_(state)
            self.states.index_copy_(0, steps, torch.stack(states))
            self.next += count

    @contextmanager
    def loaded(self, problem: Problem) -> Iterator[None]:
        """Inside, the noise and the classes of a run lie where the graphs read them, and it begins with its first step."""
        given = put_classes(problem, self.classes)
        if self.shift is not None and problem.shift is not None:
            self.shift.copy_(problem.shift.detach())
        self.begin(problem.initial.detach(), 0)
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
        for _ in range(1 + TIMES):
            self.begin(problem.initial.detach(), 0)
            found.append(timed(lambda: self.replayed(self.advance, count), self.device) / count)
        return min(found[1:])

    def run(self, problem: Problem, at: int = 0, state: Tensor | None = None) -> Tensor:
        """All states [L, B, D, K], those from a step on computed; ``state`` [B, D, K] is its input."""
        if not self.step:
            self.measure(problem)
        with self.loaded(problem):
            if state is not None:
                self.begin(state, at)
            left = problem.length - at
            while left:
                count = self.at_once if left >= self.at_once else 1
                self.replayed(self.advance, count)
                left -= count
        return self.states

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


def loop_by_graph(problem: Problem, plan: Plan) -> Outcome:
    """The loop in CUDA graphs.

    Raises:
        ValueError, RuntimeError: there are no graphs on this device, or of this denoiser, and why
    """
    window = Window()
    refusal = window.no_graphs(problem)
    if refusal is not None:
        raise ValueError(f'solver: Loop(by="graph") needs a CUDA device, and {refusal}. Loop() runs everywhere')
    with (
        torch.inference_mode(False),  # in this order: to leave inference mode is to ask for gradients
        torch.no_grad(),
        kept_for(window, problem, UNIT, lambda: GraphLoop(problem, window.settings), GraphLoop) as loop,
        loop.replayed.turn(),
    ):
        if not loop.step:
            loop.measure(problem)
        refusal = loop.replayed.refusal
        if refusal is not None:
            raise RuntimeError(
                f'solver: Loop(by="graph") cannot record this denoiser as a CUDA graph: {refusal}. Loop() takes any denoiser'
            )
        outcome = loop.outcome(problem)
    plan.note(f"one step after the other, as asked, in CUDA graphs of {loop.at_once} steps")
    return outcome


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, until the device is done with it."""
    _wait(device)
    begun = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - begun


def _wait(device: torch.device) -> None:
    if device.type == "cuda":  # and not for what others do there
        torch.cuda.current_stream(device).synchronize()
