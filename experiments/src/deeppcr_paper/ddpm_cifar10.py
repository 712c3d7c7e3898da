"""``ddpm-cifar10``: a UNet of real size, trained here for a given time; sampled by the loop, in a CUDA graph, and in parallel."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import deeppcr
from deeppcr.diffusion import DDIM, DDPM, Noise, Samples, Schedule, Window, sample
from deeppcr.runtime import full_precision

from . import ddpm, frechet
from .experiment import Cell, Context, Experiment, OutOfTime
from .pictures import Pictures, pictures
from .sampling import errors, pack
from .settings import setting
from .store import PaperError
from .timing import clocked

PRECISIONS = ("float32", "tf32", "bfloat16")
#: Images are compared as averages of so many pixels a side: of a thousand samples no more numbers have a covariance.
_POOLED = 8


@dataclass(frozen=True)
class Settings:
    """What is trained and measured.

    Attributes:
        data: "cifar10" or "digits"
        base: channels of the UNet's first level: 128 is that of google/ddpm-cifar10-32
        seconds: of training
        batch: of training
        samplers: "ddpm-1000" is DDPM in 1,000 steps
        precisions: of the network; on a CPU "float32" alone
        runs: samples that are timed, each with noise of its own, and kept as images
        samples: whose distance to the test set is found, by the loop and in parallel, with the last sampler
        draws: of the bootstrap for its interval
        beside: samples at a time for that
    """

    data: str = setting("cifar10", choices=("cifar10", "digits"))
    base: int = 128
    seconds: float = 120.0
    batch: int = 128
    samplers: tuple[str, ...] = ("ddpm-1000", "ddim-100", "ddim-50")
    precisions: tuple[str, ...] = setting(PRECISIONS, choices=PRECISIONS)
    runs: int = 5
    samples: int = 1000
    draws: int = 100
    beside: int = 16
    seed: int = 0


FULL = Settings()
QUICK = Settings(
    data="digits",
    base=8,
    seconds=4.0,
    batch=32,
    samplers=("ddim-20",),
    precisions=("float32",),
    runs=2,
    samples=32,
    draws=20,
    beside=16,
)


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    for name in settings.samplers:
        sampler(name)  # a bad name is found before anything is trained
    yield {"part": "training"}
    for name in settings.samplers:
        for precision in settings.precisions if context.device.type == "cuda" else ("float32",):
            yield {"sampler": name, "precision": precision}
    yield {"part": "distance", "sampler": settings.samplers[-1]}


def sampler(name: str) -> tuple[DDPM | DDIM, Schedule, int]:
    """By name: the step, the schedule, and how many steps it has.

    >>> sampler("ddim-50")[2]
    50
    """
    kind, _, count = name.partition("-")
    if kind not in ("ddpm", "ddim") or not count.isdigit() or not 1 < int(count) <= ddpm.LEVELS:
        raise PaperError(f"samplers: expected ddpm-N or ddim-N with 2 to {ddpm.LEVELS} steps, got {name!r}")
    whole = Schedule.linear(ddpm.LEVELS)
    length = int(count)
    return DDPM() if kind == "ddpm" else DDIM(), whole if length == ddpm.LEVELS else whole.take(length), length


def network(settings: Settings, context: Context) -> tuple[ddpm.Denoiser, Pictures, dict[str, Any]]:
    """Trained, or loaded; once a run."""
    if "ddpm" not in context.cache:
        images = pictures(settings.data, context.data_dir).to(context.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            found = ddpm.unet(images.side, images.channels, settings.base).to(context.device)
        name = f"ddpm-{settings.data}-{settings.base}-{settings.seconds:g}s-{settings.seed}.safetensors"
        known = {record["network"] for record in context.finished if "network" in record}
        path = None if context.models is None else context.models / name
        if not (path and path.exists()):
            _check_training(settings, context, known)
        record = ddpm.trained(
            found,
            images.train,
            settings.seconds,
            batch=settings.batch,
            rate=2e-4 if settings.base > 32 else 2e-3,
            seed=settings.seed,
            path=path,
            told=context.watcher.part,
        )
        record["parameters"] = sum(each.numel() for each in found.parameters())
        record["network"] = _name_of(found)
        if known - {record["network"]}:
            raise PaperError(_OTHER)
        context.cache["ddpm"] = found, images, record
    return context.cache["ddpm"]


#: What is trained for a time is never the same twice.
_OTHER = "the cells that are there are of another network: give the folder that has it as --models, or begin anew in another --out"


def _check_training(settings: Settings, context: Context, known: set[str]) -> None:
    """A training that would be of no use is not begun: there are cells of another one, or it would be cut off."""
    if known:
        raise PaperError(_OTHER)
    if context.deadline is not None and time.monotonic() + settings.seconds > context.deadline:
        raise PaperError(f"--time-limit: the training alone takes {settings.seconds:g} seconds, in one go")


def _name_of(network: nn.Module) -> str:
    """By its parameters."""
    digest = hashlib.sha256()
    for tensor in network.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def multiplies(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Inside, the network works in this precision."""
    if precision == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return full_precision(device, tf32=precision == "tf32") if device.type == "cuda" else nullcontext()


@torch.no_grad()
def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    denoiser, images, record = network(settings, context)
    if cell.get("part") == "training":
        return record
    run, about = Runs(denoiser, cell["sampler"], images, context.device), {"network": record["network"]}
    with multiplies(cell.get("precision", "tf32"), context.device):  # distances of images need no more digits
        return about | (distance(run, settings, images, context) if "part" in cell else times(run, settings, context))


class Runs:
    """One sampler with one network."""

    def __init__(self, denoiser: ddpm.Denoiser, name: str, images: Pictures, device: torch.device):
        self.denoiser, self.device = denoiser, device
        self.step, self.schedule, self.length = sampler(name)
        self.shape = images.train.shape[1:]

    def noise(self, samples: int, seed: int) -> Noise:
        generator = torch.Generator(self.device).manual_seed(seed)
        return Noise.draw((samples, *self.shape), steps=self.length, generator=generator)

    def __call__(self, noise: Noise, **more: Any) -> Samples:
        return sample(self.denoiser, self.schedule, noise, step=self.step, **more)

    @property
    def loop(self) -> deeppcr.Loop:
        return deeppcr.Loop(by="graph" if self.device.type == "cuda" else "python")


def times(run: Runs, settings: Settings, context: Context) -> dict[str, Any]:
    """One sample at a time: first compared, then timed."""

    def clock(noise: Noise, **more: Any) -> tuple[Samples, float]:
        context.check_time()
        return clocked(lambda: run(noise, **more), run.device)

    noises = [run.noise(1, settings.seed + 1 + number) for number in range(settings.runs)]
    _, eager = clock(noises[0], solver=deeppcr.Loop())
    _, first = clock(noises[0])
    clock(noises[0], solver=run.loop)
    clock(noises[0])  # what is seen in the first run may change what is chosen
    loop = [clock(noise, solver=run.loop) for noise in noises]
    found = [clock(noise) for noise in noises]
    expected, samples = [each.final for each, _ in loop], [each for each, _ in found]
    return {
        "eager": eager,
        "first": first,
        "loop": [seconds for _, seconds in loop],
        "parallel": [seconds for _, seconds in found],
        "errors": [max(errors(each.final, other)) for each, other in zip(samples, expected, strict=True)],
        "results": [each.result.name for each in samples],
        "iterations": [int(each.iterations.max()) for each in samples],
        "rows": [float(each.evaluations.double().mean()) / run.length for each in samples],
        "plan": samples[-1].plan.notes,
        "images": pack(torch.cat([each.final for each in samples])),
    }


def distance(run: Runs, settings: Settings, images: Pictures, context: Context) -> dict[str, Any]:
    """Of samples to the test set, by the loop and in parallel, from the same noise."""
    kept = context.load_checkpoint() or {"step": 0, "loop": [], "parallel": []}
    both: dict[str, list[Tensor]] = {name: kept[name] for name in ("loop", "parallel")}
    window = Window(size=min(16, run.length // 2))  # also where the loop would be faster
    for begin in range(kept["step"], settings.samples, settings.beside):
        try:
            context.check_time()
        except OutOfTime:
            context.save_checkpoint({"step": begin, **both})
            raise
        noise = run.noise(min(settings.beside, settings.samples - begin), settings.seed + 10_000 + begin)
        both["loop"].append(_pooled(run(noise, solver=run.loop).final).cpu())
        both["parallel"].append(_pooled(run(noise, solver=window).final).cpu())
        context.watcher.part(begin / settings.samples)
    sets = {name: torch.cat(each) for name, each in both.items()}
    return frechet.compare(
        _pooled(images.test), sets["loop"], sets["parallel"], draws=settings.draws, seed=settings.seed
    )


def _pooled(images: Tensor) -> Tensor:
    """[N, channels x 8 x 8 or fewer]"""
    return functional.adaptive_avg_pool2d(images, min(_POOLED, images.shape[-1])).flatten(1)


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            **{name: record[name] for name in ("sampler", "precision", "eager", "first")},
            **{name: median(record[name]) for name in ("loop", "parallel", "iterations", "rows")},
            "error": max(record["errors"]),
            "gain": median(record["loop"]) / median(record["parallel"]),
        }
        for record in records
        if "errors" in record
    ]


def lines(summary: list[dict[str, Any]]) -> list[str]:
    return [
        f"{each['sampler']}, {each['precision']}: loop {1e3 * each['loop']:.0f} ms (eager {1e3 * each['eager']:.0f}), in parallel "
        f"{1e3 * each['parallel']:.0f} ms, {each['gain']:.2f}x, {each['rows']:.1f} rows a step, error {each['error']:.0e}"
        for each in summary
    ]


EXPERIMENT = Experiment(
    name="ddpm-cifar10",
    paper="beyond the paper",
    what="sampling with a UNet of 36 million parameters, trained here for two minutes: time, error, images, distance to the test set",
    full=FULL,
    quick=QUICK,
    cells=cells,
    measure=measure,
    summarise=summarise,
    lines=lines,
)
