"""One trained denoiser with one number of steps: sampled by the loop, as the paper prints it, and in parallel.

Shapes: L steps, B samples, R runs, each of one sample.
"""

from __future__ import annotations

import base64
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import deeppcr
from deeppcr.diffusion import DDPM, GaussianPrior, Noise, Samples, Schedule, Window, sample
from deeppcr.diffusion.start import MeanStart
from deeppcr.jacobian import DenseJacobian
from deeppcr_paper.models import AtSteps, time_of

from .denoisers import Model
from .timing import capture, clocked, synchronise

#: Calls before the clock starts: libraries set themselves up, and graphs are captured.
WARM_UP = 4
#: Seconds that a first run may take for that, beside its work.
SET_UP = 10.0


@dataclass(frozen=True)
class Draw:
    """Noise and classes of B samples; the classes are None for an unconditional network."""

    noise: Noise
    classes: Tensor | None

    def __len__(self) -> int:
        return self.noise.samples

    def split(self, size: int) -> list[Draw]:
        """Parts of so many samples; what is left over makes a smaller one."""
        assert self.noise.steps is not None
        initial, steps = self.noise.initial.split(size), self.noise.steps.split(size, 1)
        classes: Sequence[Tensor | None] = [None] * len(initial)
        if self.classes is not None:
            classes = self.classes.split(size)
        return [Draw(Noise(a.contiguous(), b.contiguous()), c) for a, b, c in zip(initial, steps, classes, strict=True)]

    @staticmethod
    def together(draws: Sequence[Draw]) -> Draw:
        """All their samples in one."""
        steps = [draw.noise.steps for draw in draws if draw.noise.steps is not None]
        classes = [draw.classes for draw in draws if draw.classes is not None]
        noise = Noise(torch.cat([draw.noise.initial for draw in draws]), torch.cat(steps, 1))
        return Draw(noise, torch.cat(classes) if classes else None)


@dataclass(frozen=True)
class Runs:
    """Runs of the paper's method.

    Attributes:
        seconds: of each run
        found: its sample
        phases: seconds of one run in Jacobians and values, in linear systems, and in all
        remark: fields of a record that say why there is but one run; empty where there was time for more
    """

    seconds: list[float]
    found: list[Samples]
    phases: dict[str, float]
    remark: dict[str, str]


class Sampling:
    """DDPM in L steps of the linear schedule, rescaled to L.

    Args:
        scalar: whether the states are whitened, so that the prior on the Jacobian is a scalar; else it is that of the
            training set's covariance
        tolerance: of the final sample in parallel; all else of the window is as the library has it
    """

    def __init__(self, model: Model, length: int, *, scalar: bool, tolerance: float):
        self.model, self.length, self.device = model, length, model.train.device
        self.schedule = Schedule.linear(length)
        self.denoiser = AtSteps(model.network, self.schedule.alphas_bar).eval()
        self.prior = GaussianPrior() if scalar else GaussianPrior.from_data(model.train)
        self.window = Window(tolerance=tolerance)
        steps = DDPM().steps(self.schedule)
        assert steps.deviation is not None
        self.keep, self.gain, self.deviation = (
            each.flatten().tolist() for each in (steps.keep, steps.gain, steps.deviation)
        )
        self.times = time_of(self.schedule.before).to(self.device, torch.float32).unsqueeze(1)

    def draw(self, samples: int, seed: int) -> Draw:
        generator = torch.Generator(self.device).manual_seed(seed)
        noise = Noise.draw((samples, *self.model.shape), steps=self.length, generator=generator)
        classes = None
        if self.model.classes is not None:
            classes = torch.arange(samples, device=self.device) % self.model.classes
        return Draw(noise, classes)

    @torch.no_grad()
    def loop(self, draw: Draw) -> Tensor:
        """The loop as anyone would write it, with the fewest kernels a step: [B, *shape]."""
        z, added, more = draw.noise.initial, draw.noise.steps, () if draw.classes is None else (draw.classes,)
        assert added is not None
        for l in range(self.length):
            predicted = self.model.network(z, self.times[l].expand(len(z)), *more)
            z = torch.add(self.keep[l] * z, predicted, alpha=self.gain[l])
            if self.deviation[l]:
                z = z.add_(added[l], alpha=self.deviation[l])
        return z

    def captured_loop(self, like: Draw) -> Callable[[Draw], Tensor]:
        """The same loop in a CUDA graph, for draws of that many samples."""
        assert like.noise.steps is not None
        initial, added = like.noise.initial.clone(), like.noise.steps.clone()
        classes = None if like.classes is None else like.classes.clone()
        replay, found = capture(lambda: self.loop(Draw(Noise(initial, added), classes)))

        def run(draw: Draw) -> Tensor:
            assert draw.noise.steps is not None
            initial.copy_(draw.noise.initial)
            added.copy_(draw.noise.steps)
            if classes is not None and draw.classes is not None:
                classes.copy_(draw.classes)
            replay()
            return found

        return run

    @property
    def mean(self) -> MeanStart:
        """Where the paper starts: the mean of the training set, of each class where there are classes."""
        return MeanStart(self.model.mean if self.model.classes is None else self.model.class_means)

    @torch.no_grad()
    def printed(self, draw: Draw, newton: deeppcr.Newton | None = None, start: Any = None, **more: Any) -> Samples:
        """The paper's method: dense Jacobians, its test, at most 30 iterations, from the training set's mean."""
        solver = newton if newton is not None else paper_newton()
        start = self.mean if start is None else start
        return self._sample(draw, solver=solver, start=start, on_failure="return", **more)

    @torch.no_grad()
    def parallel(self, draw: Draw, **more: Any) -> Samples:
        """This library's: the prior's Jacobian, a window on the steps that are not finished."""
        return self._sample(draw, **{"solver": self.window, "jacobian": self.prior, **more})

    def _sample(self, draw: Draw, **more: Any) -> Samples:
        return sample(self.denoiser, self.schedule, draw.noise, classes=draw.classes, **more)

    @torch.no_grad()
    def network_seconds(self, repeats: int = 5) -> float:
        """One call of the network on all L steps of a sample; the least of some."""
        z = torch.randn(self.length, *self.model.shape, device=self.device)
        more = () if self.model.classes is None else (torch.zeros(self.length, dtype=torch.long, device=self.device),)
        calls = [lambda: self.model.network(z, self.times.squeeze(1), *more)] * (repeats + WARM_UP)
        return min(timed(lambda call: call(), calls, self.device)[0][WARM_UP:])

    def phases(self, draw: Draw, start: Any = None) -> tuple[dict[str, float], Samples]:
        """One run of the paper's method: its seconds in Jacobians and values, in linear systems, and in all; what it found."""
        clock = Clock(self.device)
        newton = paper_newton(jacobian=TimedJacobian(clock), linear=TimedPCR(clock))
        samples, total = clocked(lambda: self.printed(draw, newton, start), self.device)
        return {**clock.seconds, "total": total}, samples

    def time_printed(self, draws: Sequence[Draw], budget: float, start: Any = None) -> Runs:
        """The paper's method on these samples one by one, within so many seconds.

        A run that takes longer than all of that is the only one. It is a second run, for the first one sets up what is not
        set up yet, unless the first took so long that the second would, too.
        """
        phases, first = self.phases(draws[0], start)
        remark = "none: the first run took far too long; what is set up once is included"
        if budget < phases["total"] <= budget + SET_UP:
            phases, first = self.phases(draws[0], start)
            remark = "none: the second run took too long, too"
        if phases["total"] > budget:
            return Runs([phases["total"]], [first], phases, {"repeats": remark})
        seconds, found = timed(lambda draw: self.printed(draw, start=start), draws, self.device, budget=budget)
        phases, _ = self.phases(draws[0], start)
        return Runs(seconds, found, phases, {})


def paper_newton(**more: Any) -> deeppcr.Newton:
    settings: dict[str, Any] = {
        "stop": deeppcr.PaperTest(1e-4, 1e-4),
        "max_iterations": 30,
        "chunk": 1,
        "jacobian": DenseJacobian(),
        "linear": deeppcr.PCR(),
    }
    return deeppcr.Newton(**{**settings, **more})


class Clock:
    """Seconds spent in phases; waits for the device at their ends."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, {}

    def time(self, phase: str, call: Callable[[], Any]) -> Any:
        synchronise(self.device)
        begun = time.perf_counter()
        found = call()
        synchronise(self.device)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begun
        return found


class TimedJacobian(DenseJacobian):
    """Dense Jacobians, under a clock."""

    def __init__(self, clock: Clock):
        super().__init__()
        object.__setattr__(self, "clock", clock)

    def evaluate(self, sequence: Any, previous: Tensor, steps: range) -> Any:
        clock: Clock = self.clock  # pyright: ignore[reportAttributeAccessIssue]
        return clock.time("jacobian", lambda: DenseJacobian.evaluate(self, sequence, previous, steps))


class TimedPCR(deeppcr.PCR):
    """Cyclic reduction, under a clock."""

    def __init__(self, clock: Clock):
        object.__setattr__(self, "clock", clock)

    def solve_coupled(self, *arguments: Any, **more: Any) -> Any:
        clock: Clock = self.clock  # pyright: ignore[reportAttributeAccessIssue]
        return clock.time("linear", lambda: deeppcr.PCR.solve_coupled(self, *arguments, **more))


def timed(
    call: Callable[[Any], Any],
    inputs: Sequence[Any],
    device: torch.device,
    *,
    budget: float = math.inf,
    fewest: int = 1,
) -> tuple[list[float], list[Any]]:
    """Call it on every input: the seconds of each call, and what each returned.

    Args:
        budget: seconds after which no further input is taken, once there were ``fewest``
    """
    seconds, found = [], []
    for each in inputs:
        result, took = clocked(lambda each=each: call(each), device)
        seconds.append(took)
        found.append(result)
        if len(seconds) >= fewest and sum(seconds) >= budget:
            break
    return seconds, found


def errors(found: Tensor, reference: Tensor) -> list[float]:
    """The largest difference of each sample: [B, *shape] twice to B numbers."""
    return (found - reference).abs().flatten(1).amax(1).tolist()


def pack(images: Tensor) -> dict[str, Any]:
    """Images [N, channels, side, side] in [-1, 1] as a result file keeps them: bytes, packed, in letters."""
    pixels = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu().contiguous()
    content = zlib.compress(pixels.numpy().tobytes(), 9)
    return {"shape": list(pixels.shape), "zlib_base64": base64.b64encode(content).decode()}


def unpack(packed: dict[str, Any]) -> Tensor:
    """The bytes of the images, [N, channels, side, side].

    >>> unpack(pack(torch.tensor([[[[-1.0, 1.0]]]]))).tolist()
    [[[[0, 255]]]]
    """
    content = zlib.decompress(base64.b64decode(packed["zlib_base64"]))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(packed["shape"])
