"""``latent-diffusion``: latent vectors of images sampled by the loop and in parallel: time, iterations, error, distance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deeppcr.runtime import full_precision

from . import frechet
from .denoisers import latent_model
from .diffusion_timing import TimingSettings, lines, sampling_record, summarise, training_record, untimed
from .experiment import Cell, Context, Experiment
from .pictures import SOURCES
from .sampling import Draw, Sampling
from .settings import setting

#: Images in colour need wider latents.
COLOUR = ("cifar10", "celeba")


@dataclass(frozen=True)
class Settings(TimingSettings):
    """What else is measured of latent models.

    Attributes:
        data: "mnist", "cifar10", "celeba" (a folder of images) or "digits"
        widths: of the latents of images in grey
        colour_widths: of those in colour
        samples: whose distance to the test set is found, sequentially and in parallel
        draws: of the bootstrap for its interval
    """

    data: tuple[str, ...] = setting(("mnist", "cifar10"), choices=SOURCES)
    widths: tuple[int, ...] = (16, 32, 64, 128)
    colour_widths: tuple[int, ...] = (128, 256)
    samples: int = 1024
    draws: int = 200


FULL = Settings()
QUICK = Settings(
    data=("digits",),
    widths=(4, 8),
    steps=(32, 128),
    training="quick",
    loop_runs=3,
    runs=8,
    budget=0.5,
    batch=64,
    samples=128,
    draws=100,
)


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    for data in settings.data:
        settings.pictures(data, context)  # bad data is found before anything else is done
    for data, width in models_of(settings):
        yield {"data": data, "w": width, "part": "training"}
        for length in settings.steps:
            yield {"data": data, "w": width, "L": length}


def models_of(settings: Settings) -> Iterator[tuple[str, int]]:
    for data in settings.data:
        for width in settings.colour_widths if data in COLOUR else settings.widths:
            yield data, width


def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    model = latent_model(settings, cell["data"], cell["w"], context)
    if "part" in cell:
        return training_record(model)
    sampling = Sampling(model, cell["L"], settings.tolerance)
    return {**sampling_record(sampling, settings, context), "frechet": distances(sampling, settings)}


def distances(sampling: Sampling, settings: Settings) -> dict[str, Any]:
    """Of samples to the latents of the test set, for the loop and for the parallel solve."""
    with full_precision(sampling.device):
        draws = [
            sampling.draw(min(settings.batch, settings.samples - number), settings.seed + 10_000 + number)
            for number in range(0, settings.samples, settings.batch)
        ]
        # The loop takes as long for all samples as for one.
        sequential = sampling.loop(Draw.together(draws))
        parallel = torch.cat([sampling.parallel(draw).final for draw in draws])
    return frechet.compare(sampling.model.test, sequential, parallel, draws=settings.draws, seed=settings.seed)


EXPERIMENT = Experiment(
    name="latent-diffusion",
    paper="figs. 1, 6, 7, 17 and 18, table 2",
    what="sampling latents of MNIST and CIFAR-10 (quick: scikit-learn's digits): time, speed-up, iterations, error, distance to the test set, images",
    full=FULL,
    quick=QUICK,
    cells=cells,
    measure=measure,
    summarise=summarise,
    lines=lines,
    untimed=untimed,
)
