"""``pixel-diffusion``: small images sampled pixel by pixel, with and without classes, by the loop and in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from .denoisers import TrainingSettings, pixel_model
from .diffusion_timing import TimingSettings, lines, sampling_record, summarise, training_record, untimed
from .experiment import Cell, Context, Experiment
from .sampling import Sampling
from .settings import setting
from .store import PaperError

CONDITIONAL = ("no", "yes")


@dataclass(frozen=True)
class Settings(TimingSettings):
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
    check_sides(settings, settings.data, settings.sides, context)
    for side, conditional in product(settings.sides, settings.conditional):
        model = {"data": settings.data, "side": side, "conditional": conditional}
        yield {**model, "part": "training"}
        for length in settings.steps:
            yield {**model, "L": length}


def check_sides(settings: TrainingSettings, data: str, sides: tuple[int, ...], context: Context) -> None:
    """Bad data, and sides that images cannot be pooled to, are found before anything else is done."""
    whole = settings.pictures(data, context).side
    for side in sides:
        if whole % side or side % 4:
            raise PaperError(f"sides: expected divisors of {whole}, the side of the images, that 4 divides; got {side}")


def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    model = pixel_model(settings, cell["data"], cell["side"], cell["conditional"] == "yes", context)
    if "part" in cell:
        return training_record(model)
    return sampling_record(Sampling(model, cell["L"], settings.tolerance), settings, context)


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
    untimed=untimed,
)
