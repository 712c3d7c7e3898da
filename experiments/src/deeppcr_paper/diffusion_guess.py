"""``diffusion-guess``: where the iteration starts, and what that saves; with and without classes.

Starts: the mean of the training set, that of the sample's class, zeros, the path of Gaussian data (with the training set's
covariance; of unit variance for the paper's method), and a coarse sampler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch

from deeppcr.diffusion.start import CoarseStart, GaussianStart, MeanStart
from deeppcr.runtime import full_precision

from .denoisers import Model, TrainingSettings, pixel_model
from .diffusion_timing import cost
from .experiment import Cell, Context, Experiment
from .pixel_diffusion import CONDITIONAL, check_sides
from .sampling import WARM_UP, Draw, Sampling, check_and_time, timed
from .settings import setting
from .table import shown, table, times

GUESSES = ("mean", "class-mean", "zeros", "prior", "coarse")


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """Sizes, and what is compared.

    Attributes:
        guesses: "mean", "class-mean" (of networks that are told a class), "zeros", "prior", "coarse"
        runs: samples of each start
        loop_runs: of the eager loop
        budget: seconds for the paper's method; at least one run
        printed_sides: of the images that it is run on: on larger ones it takes a second a sample, from any start
        stride, sweeps: of the coarse sampler: it evaluates every so manyth step, so often
        data, sides, conditional, steps, tolerance: see pixel-diffusion
    """

    data: str = setting("mnist", choices=("mnist", "cifar10", "digits"))
    sides: tuple[int, ...] = setting((4, 8, 16), least=4)
    conditional: tuple[str, ...] = setting(CONDITIONAL, choices=CONDITIONAL)
    steps: tuple[int, ...] = (256, 512, 1024)
    guesses: tuple[str, ...] = setting(GUESSES, choices=GUESSES)
    runs: int = 10
    loop_runs: int = 3
    budget: float = 1.0
    printed_sides: tuple[int, ...] = setting((4, 8), least=4)
    stride: int = setting(8, least=2)
    sweeps: int = 4
    tolerance: float = 1e-3


FULL = Settings()
QUICK = Settings(data="digits", sides=(4, 8), steps=(64,), runs=3, loop_runs=2, budget=0.1, training="quick")


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    check_sides(settings, settings.data, settings.sides, context)
    for side, conditional, length, guess in product(
        settings.sides, settings.conditional, settings.steps, settings.guesses
    ):
        if guess != "class-mean" or conditional == "yes":
            yield {"side": side, "conditional": conditional, "L": length, "guess": guess}


@torch.no_grad()
def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    """Seconds, iterations and errors of both methods from this start, and the seconds of the loop."""
    model = pixel_model(settings, settings.data, cell["side"], cell["conditional"] == "yes", context)
    sampling = Sampling(model, cell["L"], settings.tolerance)
    start = start_of(cell["guess"], model, settings)
    with full_precision(sampling.device):
        before, counted, reference, loop = looped(sampling, cell, settings, context)
        parallel = partial(sampling.parallel, start=start)
        timed(parallel, before, context.device)
        record = {"loop": {"seconds": loop}, "auto": check_and_time(parallel, counted, reference)}
        if cell["side"] in settings.printed_sides:
            record["printed"] = sampling.time_printed(counted, reference, settings.budget, start)
            del record["printed"]["phases"]
    return record


def looped(
    sampling: Sampling, cell: Cell, settings: Settings, context: Context
) -> tuple[list[Draw], list[Draw], torch.Tensor, list[float]]:
    """Noise to set up with and to count, the loop's samples of it and its seconds: the next cell, with another start, has the same."""
    key = (cell["side"], cell["conditional"], cell["L"])
    kept = context.cache.get("looped")
    if kept is None or kept[0] != key:
        draws = sampling.draw(settings.runs + WARM_UP, settings.seed)
        reference, single = sampling.loop(draws)[WARM_UP:], draws.split(1)
        seconds, _ = timed(sampling.loop, single[WARM_UP:][: settings.loop_runs], context.device)
        kept = context.cache["looped"] = key, (single[:WARM_UP], single[WARM_UP:], reference, seconds)
    return kept[1]


def start_of(guess: str, model: Model, settings: Settings) -> MeanStart | GaussianStart | CoarseStart:
    if guess == "mean":
        return MeanStart(model.mean)
    if guess == "class-mean":
        return MeanStart(model.class_means)
    if guess == "zeros":
        return MeanStart(torch.zeros_like(model.mean))
    if guess == "prior":
        return GaussianStart()
    return CoarseStart(stride=settings.stride, sweeps=settings.sweeps)


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every cell: iterations, evaluations in units of L, error, and the speed-up over the eager loop."""
    found = []
    for record in records:
        loop = median(record["loop"]["seconds"])
        entry: dict[str, Any] = {name: record[name] for name in ("side", "conditional", "L", "guess")}
        entry |= {name: cost(record[name], record["L"], loop) for name in ("printed", "auto") if name in record}
        found.append(entry)
    return found


def lines(summary: list[dict[str, Any]]) -> list[str]:
    return table(
        [
            {
                "side": entry["side"],
                "classes": entry["conditional"],
                "L": entry["L"],
                "start": entry["guess"],
                "Newton's iterations": shown(entry.get("printed", {}).get("iterations"), ".1f"),
                "with the prior": f"{entry['auto']['iterations']:.1f}",
                "evaluations / L": f"{entry['auto']['evaluations']:.1f}",
                "over eager loop": times(entry["auto"]["over_loop"]),
                "error": f"{entry['auto']['error']:.1e}",
            }
            for entry in summary
        ]
    )


EXPERIMENT = Experiment(
    name="diffusion-guess",
    paper="fig. 23",
    what="where sampling in parallel starts: training mean, class mean, zeros, the path of Gaussian data, a coarse sampler; with and without classes",
    full=FULL,
    quick=QUICK,
    cells=cells,
    measure=measure,
    summarise=summarise,
    lines=lines,
)
