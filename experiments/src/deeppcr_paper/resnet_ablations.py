"""``resnet-iterations`` and ``resnet-guess``: how few Newton iterations suffice in training, and from which start."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

from .experiment import Cell, Context, Experiment
from .resnet import Runner, Settings, adapt, images, last, newton, train
from .table import table

COUNTS = (0, 1, 2, 3, 5, 8, 13)

# The paper does not say for how long it trained here.
ITERATIONS = Settings(steps=2000, seeds=1, iterations=COUNTS)
ITERATIONS_QUICK = Settings(
    depths=(64,), epochs=2, rate=0.02, seeds=1, data="digits", train=400, test=200, window=10, iterations=COUNTS
)
GUESS = Settings(depths=(1024,), steps=2000, seeds=1, iterations=COUNTS, guesses=("batch-mean", "random", "zeros"))
GUESS_QUICK = Settings(
    depths=(64,),
    epochs=2,
    rate=0.02,
    seeds=1,
    data="digits",
    train=240,
    test=200,
    window=10,
    iterations=(0, 1, 3, 5),
    guesses=GUESS.guesses,
)


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    images(settings, context)  # bad data is found before anything else is done
    for depth in settings.depths:
        for guess in settings.guesses:
            for count in settings.iterations:
                for number in range(settings.seeds):
                    yield {"L": depth, "guess": guess, "iterations": count, "seed": settings.seed + number}


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
        seconds = median(curves["forward_seconds"]) if curves.get("forward_seconds") else None
        entry = {
            **{name: record[name] for name in ("L", "guess", "iterations", "seed")},
            "loss": last(curves["loss"]) if curves else None,
            "accuracy": last(curves["accuracy"]) if curves else None,
            "test_accuracy": run["test_accuracy"],
            "diverged": run["diverged"],
            "forward_seconds": seconds,
            "mean_iterations": fmean(curves["iterations"]) if curves else None,
        }
        found.append(entry)
    for entry in found:
        same = ("L", "guess", "seed")
        tested = [e for e in found if not e["iterations"] and all(e[name] == entry[name] for name in same)]
        seconds = [e["forward_seconds"] for e in tested if e["forward_seconds"]]
        known = seconds and entry["forward_seconds"]
        entry["speedup_over_tested"] = seconds[0] / entry["forward_seconds"] if known else None
    return found


def lines(summary: list[dict[str, Any]]) -> list[str]:
    rows = []
    for entry in summary:
        count, ratio, loss = entry["iterations"], entry["speedup_over_tested"], entry["loss"]
        rows.append(
            {
                "L": entry["L"],
                "guess": entry["guess"],
                "iterations": count
                or (f"{entry['mean_iterations']:.1f} by the test" if entry["mean_iterations"] else None),
                "loss": "diverged" if entry["diverged"] is not None else None if loss is None else f"{loss:.3f}",
                "speed-up over the test": f"{ratio:.2g}x" if ratio and count else None,
            }
        )
    return table(rows)


def _experiment(name: str, paper: str, what: str, full: Settings, quick: Settings) -> Experiment:
    return Experiment(
        name=name,
        paper=paper,
        what=what,
        full=full,
        quick=quick,
        cells=cells,
        measure=measure,
        summarise=summarise,
        lines=lines,
        adapt=adapt,
    )


ITERATIONS_EXPERIMENT = _experiment(
    "resnet-iterations",
    "fig. 19",
    "training with 1, 2, 3, 5, 8, 13 Newton iterations a pass, against the paper's test",
    ITERATIONS,
    ITERATIONS_QUICK,
)
GUESS_EXPERIMENT = _experiment(
    "resnet-guess",
    "fig. 22",
    "training with Newton started from the last step's batch mean, from random numbers, from zeros",
    GUESS,
    GUESS_QUICK,
)
