"""One trained denoiser with one number of steps: sampled by the loop, as the paper prints it, and in parallel.

Shapes: L steps, B samples.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import deeppcr
from deeppcr.diffusion import DDPM, GaussianPrior, Noise, Samples, Schedule, Window, sample
from deeppcr.diffusion.start import MeanStart
from deeppcr.jacobian import DenseJacobian
from deeppcr_paper.models import AtSteps, time_of

from .denoisers import Model
from .timing import capture, clocked

#: Calls before the clock starts: libraries set themselves up, and graphs are captured.
WARM_UP = 4
#: Seconds that a first run may take for that, beside its work.
SET_UP = 10.0


@dataclass(frozen=True)
class Draw:
    """What B samples are made from.

    Attributes:
        initial: [B, *shape], the noise that sampling starts from
        added: [L, B, *shape], the noise that each step adds
        classes: [B]; None for an unconditional network
    """

    initial: Tensor
    added: Tensor
    classes: Tensor | None

    @property
    def told(self) -> tuple[Tensor, ...]:
        """What the network is told beside states and times."""
        return () if self.classes is None else (self.classes,)

    def split(self, size: int) -> list[Draw]:
        """Parts of so many samples; what is left over makes a smaller one."""
        found = []
        for start in range(0, len(self.initial), size):
            part = slice(start, start + size)
            classes = None if self.classes is None else self.classes[part]
            found.append(Draw(self.initial[part], self.added[:, part].contiguous(), classes))
        return found

    @staticmethod
    def together(draws: Sequence[Draw]) -> Draw:
        """All their samples in one."""
        classes = [each for draw in draws for each in draw.told]
        initial, added = torch.cat([draw.initial for draw in draws]), torch.cat([draw.added for draw in draws], 1)
        return Draw(initial, added, torch.cat(classes) if classes else None)


class Sampling:
    """DDPM in L steps of the linear schedule, rescaled to L.

    Args:
        tolerance: of the final sample in parallel; all else of the window is as the library has it
    """

    def __init__(self, model: Model, length: int, tolerance: float = 1e-3):
        self.model, self.length, self.device = model, length, model.train.device
        self.schedule = Schedule.linear(length)
        self.denoiser = AtSteps(model.network, self.schedule.alphas_bar).eval()
        # Of whitened states the prior on the Jacobian is a scalar; pixels are anything but alike.
        self.prior = GaussianPrior() if model.white else GaussianPrior.from_data(model.train)
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
        assert noise.steps is not None
        classes = self.model.classes
        told = None if classes is None else torch.arange(samples, device=self.device) % classes
        return Draw(noise.initial, noise.steps, told)

    @torch.no_grad()
    def loop(self, draw: Draw) -> Tensor:
        """The loop as anyone would write it, with the fewest kernels a step: [B, *shape]."""
        z, told, network = draw.initial, draw.told, self.model.network
        for l in range(self.length):
            predicted = network(z, self.times[l].expand(len(z)), *told)
            z = torch.add(self.keep[l] * z, predicted, alpha=self.gain[l])
            if self.deviation[l]:
                z = z.add_(draw.added[l], alpha=self.deviation[l])
        return z

    def captured_loop(self, like: Draw) -> Callable[[Draw], Tensor]:
        """The same loop in a CUDA graph, for draws of that many samples."""
        mine = Draw.together([like])  # a copy
        replay, found = capture(lambda: self.loop(mine))

        def run(draw: Draw) -> Tensor:
            mine.initial.copy_(draw.initial)
            mine.added.copy_(draw.added)
            for kept, each in zip(mine.told, draw.told, strict=True):
                kept.copy_(each)
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
        solver, start = newton or paper_newton(), self.mean if start is None else start
        return self._sample(draw, solver=solver, start=start, on_failure="return", **more)

    @torch.no_grad()
    def parallel(self, draw: Draw, **more: Any) -> Samples:
        """This library's: the prior's Jacobian, a window on the steps that are not finished."""
        return self._sample(draw, **{"solver": self.window, "jacobian": self.prior, **more})

    def _sample(self, draw: Draw, **more: Any) -> Samples:
        return sample(self.denoiser, self.schedule, Noise(draw.initial, draw.added), classes=draw.classes, **more)

    @torch.no_grad()
    def network_seconds(self, repeats: int = 5) -> float:
        """One call of the network on all L steps of a sample; the least of some."""
        z = torch.randn(self.length, *self.model.shape, device=self.device)
        told = () if self.model.classes is None else (torch.zeros(self.length, dtype=torch.long, device=self.device),)
        times = self.times.squeeze(1)
        seconds, _ = timed(lambda _: self.model.network(z, times, *told), range(repeats + WARM_UP), self.device)
        return min(seconds[WARM_UP:])

    def phases(self, draw: Draw, start: Any = None) -> tuple[dict[str, float], Samples]:
        """One run of the paper's method: its seconds in Jacobians and values, in linear systems, and in all; what it found."""
        clock = Clock(self.device)
        newton = paper_newton(jacobian=TimedJacobian(clock=clock), linear=TimedPCR(clock=clock))
        samples, total = clocked(lambda: self.printed(draw, newton, start), self.device)
        return {**clock.seconds, "total": total}, samples

    def time_printed(
        self, draws: Sequence[Draw], reference: Tensor, budget: float, start: Any = None
    ) -> dict[str, Any]:
        """The paper's method on these samples one by one, within so many seconds; with the phases of one run.

        A run that takes longer than all of that is the only one, and ``repeats`` says so. It is a second run, for the first one
        sets up what is not set up yet, unless the first took so long that the second would, too.
        """
        phases, first = self.phases(draws[0], start)
        remark = "none: the first run took far too long; what is set up once is included"
        if budget < phases["total"] <= budget + SET_UP:
            phases, first = self.phases(draws[0], start)
            remark = "none: the second run took too long, too"
        if phases["total"] > budget:
            found = certificate([first], reference)
            return {"seconds": [phases["total"]], "phases": phases, "repeats": remark, **found}
        found = check_and_time(partial(self.printed, start=start), draws, reference, budget)
        phases, _ = self.phases(draws[0], start)
        return {**found, "phases": phases}


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
        found, took = clocked(call, self.device)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + took
        return found


@dataclass(frozen=True, kw_only=True)
class TimedJacobian(DenseJacobian):
    """Dense Jacobians, under a clock."""

    clock: Clock = field(compare=False)

    def evaluate(self, *arguments: Any, **more: Any) -> Any:
        return self.clock.time("jacobian", partial(super().evaluate, *arguments, **more))


@dataclass(frozen=True, kw_only=True)
class TimedPCR(deeppcr.PCR):
    """Cyclic reduction, under a clock."""

    clock: Clock = field(compare=False)

    def solve_coupled(self, *arguments: Any, **more: Any) -> Any:
        return self.clock.time("linear", partial(super().solve_coupled, *arguments, **more))


def timed(
    call: Callable[[Any], Any], inputs: Sequence[Any], device: torch.device, budget: float = math.inf, fewest: int = 1
) -> tuple[list[float], list[Any]]:
    """Call it on every input: the seconds of each call, and what each returned.

    Args:
        budget: seconds after which no further input is taken, once there were ``fewest``
    """
    seconds, found = [], []
    for each in inputs:
        result, took = clocked(partial(call, each), device)
        seconds.append(took)
        found.append(result)
        if len(seconds) >= fewest and sum(seconds) >= budget:
            break
    return seconds, found


def check_and_time(
    call: Callable[[Draw], Samples], draws: Sequence[Draw], reference: Tensor, budget: float = math.inf
) -> dict[str, Any]:
    """Runs of one sample each, as a record has them: the seconds of every run, what it took and how far off it is."""
    seconds, found = timed(call, draws, reference.device, budget)
    return {"seconds": seconds, **certificate(found, reference)}


def certificate(found: list[Samples], reference: Tensor) -> dict[str, Any]:
    """Of runs of one sample each: iterations, evaluations of the network, how they ended, and the error of the sample."""
    finals = torch.cat([each.final for each in found])
    return {
        "iterations": [int(each.iterations.max()) for each in found],
        "evaluations": [int(each.evaluations.max()) for each in found],
        "results": [each.result.name for each in found],
        "error": errors(finals, reference[: len(finals)]),
    }


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
