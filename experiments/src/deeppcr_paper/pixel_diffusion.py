"""``pixel-diffusion``: small images sampled pixel by pixel, with and without classes, by the loop and in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .denoisers import Model, pixel_model
from .diffusion_timing import Settings as Shared
from .diffusion_timing import row, show_images, summarise, time_columns
from .experiment import Cell, Context, Experiment
from .sampling import Sampling
from .settings import setting
from .store import PaperError
from .table import table

CONDITIONAL = ("no", "yes")


@dataclass(frozen=True)
class Settings(Shared):
    """What else is measured of pixel models.

    Attributes:
        data: "mnist" or "digits"
        sides: of the images, in pixels
        conditional: whether the network is told a class
    """

    data: str = setting("mnist", choices=("mnist", "cifar10", "digits"))
    sides: tuple[int, ...] = setting((4, 8, 16), least=4)
    conditional: tuple[str, ...] = setting(CONDITIONAL, choices=CONDITIONAL)


FULL = Settings()
QUICK = Settings(
    data="digits",
    sides=(4, 8),
    steps=(64,),
    training="quick",
    loop_runs=3,
    runs=6,
    budget=0.2,
    batch=16,
)


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    side = settings.source.pictures(settings.data, context).side
    wrong = [each for each in settings.sides if side % each or each % 4]
    if wrong:
        raise PaperError(f"sides: expected divisors of {side}, the side of the images, that 4 divides; got {wrong[0]}")
    for each in settings.sides:
        for conditional in settings.conditional:
            yield {"data": settings.data, "side": each, "conditional": conditional, "part": "training"}
            for length in settings.steps:
                yield {"data": settings.data, "side": each, "conditional": conditional, "L": length}


def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    model = pixel_model(settings.source, cell["data"], cell["side"], cell["conditional"] == "yes", context)
    if "part" in cell:
        return {"training": model.training, "images": {"train": len(model.train), "test": len(model.test)}}
    sampling = pixel_sampling(model, cell["L"], settings)
    context.watcher.part(0.2)
    return {**time_columns(sampling, settings, context), "pictures": show_images(sampling, settings)}


def pixel_sampling(model: Model, length: int, settings: Shared) -> Sampling:
    """The prior is that of the training set's covariance: pixels are anything but alike."""
    return Sampling(model, length, scalar=False, tolerance=settings.tolerance)


def lines(summary: list[dict[str, Any]]) -> list[str]:
    return table([row(entry) for entry in summary])


EXPERIMENT = Experiment(
    name="pixel-diffusion",
    paper="table 2, fig. 23",
    what="sampling images of 4 x 4 to 16 x 16 pixels, with and without classes: time, speed-up, iterations, error, images",
    full=FULL,
    quick=QUICK,
    cells=cells,
    measure=measure,
    summarise=summarise,
    lines=lines,
)
