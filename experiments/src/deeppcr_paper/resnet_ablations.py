"""``resnet-iterations`` and ``resnet-guess``: how few Newton iterations suffice in training, and from which start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

from .experiment import Cell, Context, Experiment
from .resnet import Settings, adapt, images, last, middle, newton, untimed
from .resnet_runner import Runner, train
from .table import shown, table

COUNTS = (0, 1, 2, 3, 5, 8, 13)

# The paper does not say for how long it trained here.
ITERATIONS = Settings(steps=2000, seeds=1, iterations=COUNTS)
ITERATIONS_QUICK = Settings(
    depths=(64,), epochs=2, rate=0.02, seeds=1, data="digits", train=400, test=200, window=10, iterations=COUNTS
)
# From which start a training begins changes what it learns, and no time that Figure 22 shows.
GUESS = replace(ITERATIONS, depths=(1024,), guesses=("batch-mean", "random", "zeros"), timed_seeds=0)
GUESS_QUICK = replace(ITERATIONS_QUICK, train=240, iterations=(0, 1, 3, 5), guesses=GUESS.guesses)


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    images(settings, context)  # bad data is found before anything else is done
    seeds = range(settings.seed, settings.seed + settings.seeds)
    for depth, guess, count, seed in product(settings.depths, settings.guesses, settings.iterations, seeds):
        yield {"L": depth, "guess": guess, "iterations": count, "seed": seed}


def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    data, seed = images(settings, context), cell["seed"]
    method, timed = newton(settings, cell["iterations"]), seed < settings.seed + settings.timed_seeds
    runner = Runner(settings, cell["L"], seed, data, "parallel", method, cell["guess"], timed)
    return train({"parallel": runner}, data, settings, seed, context)


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every run its end; with a fixed number of iterations also the speed-up over the run with the paper's test.

    Times are medians over the points of a curve.
    """
    found = []
    for record in records:
        run = record["runs"]["parallel"]
        curves = run["curves"]
        found.append(
            {
                **{name: record[name] for name in ("L", "guess", "iterations", "seed")},
                **{name: last(curves[name]) if curves else None for name in ("loss", "accuracy")},
                "test_accuracy": run["test_accuracy"],
                "diverged": run["diverged"],
                "forward_seconds": middle(curves.get("forward_seconds")),
                "mean_iterations": fmean(curves["iterations"]) if curves else None,
            }
        )
    tested = {
        _like(entry): seconds for entry in found if not entry["iterations"] and (seconds := entry["forward_seconds"])
    }
    for entry in found:
        mine, other = entry["forward_seconds"], tested.get(_like(entry))
        entry["speedup_over_tested"] = other / mine if mine and other else None
    return found


def _like(entry: dict[str, Any]) -> tuple:
    return entry["L"], entry["guess"], entry["seed"]


def lines(summary: list[dict[str, Any]]) -> list[str]:
    rows = []
    for entry in summary:
        count, mean = entry["iterations"], entry["mean_iterations"]
        rows.append(
            {
                "L": entry["L"],
                "guess": entry["guess"],
                "iterations": count or (f"{mean:.1f} by the test" if mean else None),
                "loss": "diverged" if entry["diverged"] is not None else shown(entry["loss"], ".3f"),
                "speed-up over the test": shown(entry["speedup_over_tested"] if count else None, "{:.2g}x".format),
            }
        )
    return table(rows)


_experiment = partial(
    Experiment, cells=cells, measure=measure, summarise=summarise, lines=lines, adapt=adapt, untimed=untimed
)
ITERATIONS_EXPERIMENT = _experiment(
    name="resnet-iterations",
    paper="fig. 19",
    what="training with 1, 2, 3, 5, 8, 13 Newton iterations a pass, against the paper's test",
    full=ITERATIONS,
    quick=ITERATIONS_QUICK,
)
GUESS_EXPERIMENT = _experiment(
    name="resnet-guess",
    paper="fig. 22",
    what="training with Newton started from the last step's batch mean, from random numbers, from zeros",
    full=GUESS,
    quick=GUESS_QUICK,
)
