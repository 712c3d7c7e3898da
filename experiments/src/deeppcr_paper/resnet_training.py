"""``resnet-training``: residual networks trained layer by layer and in parallel, side by side.

A cell trains one depth from one seed in both modes at once, on the same batches: so the parameters can be compared at
every point without being stored. Long cells keep checkpoints, so little is lost when they are interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

from .experiment import Cell, Context, Experiment
from .resnet import Settings, adapt, images, last, middle, newton, untimed
from .resnet_runner import WARM_UP, Runner, train
from .store import PaperError
from .table import shown, table, times

# Trained with the library's defaults; the paper's own method is timed beside the eager loop.
FULL = Settings(solver="default", eager_steps=100)
QUICK = Settings(
    solver="default",
    depths=(32, 64),
    epochs=2,
    rate=0.02,
    seeds=2,
    data="digits",
    train=800,
    test=300,
    window=20,
    eager_steps=20,
)


def adapt_training(settings: Settings, context: Context) -> Settings:
    for name, other in (("iterations", "resnet-iterations"), ("guesses", "resnet-guess")):
        if getattr(settings, name) != getattr(FULL, name):
            raise PaperError(f"{name}: not a setting of resnet-training; {other} compares them")
    return adapt(settings, context)


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    """All depths from one seed before the next seed: so much is most of what there is to see."""
    images(settings, context)  # bad data is found before anything else is done
    for depth in settings.depths:
        yield {"L": depth, "timing": "eager"}
        yield {"L": depth, "timing": "printed"}
    for number in range(settings.seeds):
        for depth in settings.depths:
            yield {"L": depth, "seed": settings.seed + number}


def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    if "timing" in cell:
        return time_forward(cell["L"], cell["timing"], settings, context)
    data, seed = images(settings, context), cell["seed"]
    timed, mode = seed < settings.seed + settings.timed_seeds, "printed" if settings.solver == "paper" else "parallel"
    runners = {
        "sequential": Runner(settings, cell["L"], seed, data, "sequential", timed=timed),
        "parallel": Runner(settings, cell["L"], seed, data, mode, newton(settings), timed=timed),
    }
    return train(runners, data, settings, seed, context)


def time_forward(depth: int, method: str, settings: Settings, context: Context) -> dict[str, Any]:
    """Seconds of each forward pass in training by the plain loop, launched layer by layer, or as the paper prints it."""
    data = images(settings, context)
    runner = Runner(settings, depth, settings.seed, data, method)
    for number in range(settings.eager_steps + WARM_UP):
        start = number * settings.batch % (len(data.train_labels) - settings.batch + 1)
        batch = slice(start, start + settings.batch)
        runner.take_step(data.train[batch], data.train_labels[batch], number)
    return {name: runner.window[name][WARM_UP:] for name in ("forward_seconds", "iterations") if name in runner.window}


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every depth: times, speed-ups and how far the two trainings are apart.

    Lists have an entry for each seed: ``loss`` the mean of the end of its curve (see ``last``), ``loss_difference`` the largest
    difference in a step (files of earlier versions do not have it), as long as neither has diverged. ``loop`` is how the layers were taken one by one:
    "fused" (one kernel), "graph" or "loop". Times are medians over the steps that were timed, or the points of a curve, and
    over the seeds that were timed; ``replayed_seconds`` are of a whole step inside a CUDA graph, ``graphed_forward_seconds`` of a
    pass as printed whose iterations are CUDA graphs.
    """
    found = []
    for depth in sorted({record["L"] for record in records}):
        mine = [record for record in records if record["L"] == depth]
        timed = {record["timing"]: record for record in mine if "timing" in record}
        both = [record for record in mine if "runs" in record]
        by_mode = {mode: [record["runs"][mode] for record in both] for mode in ("sequential", "parallel")}
        eager, printed = (middle(timed.get(name, {}).get("forward_seconds")) for name in ("eager", "printed"))
        entry: dict[str, Any] = {
            "L": depth,
            "eager_forward_seconds": eager,
            "printed_forward_seconds": printed,
            "loop": next((run.get("method") for run in by_mode["sequential"]), None),
            "printed_iterations": fmean(counts) if (counts := timed.get("printed", {}).get("iterations")) else None,
            **{mode: _end_of(runs) for mode, runs in by_mode.items()},
        }
        loop, parallel = (entry[mode]["forward_seconds"] for mode in by_mode)
        entry["printed_speedup_over_eager"] = _ratio(eager, printed)
        entry["speedup_over_eager"] = _ratio(eager, parallel)
        entry["speedup_over_fastest_loop"] = _ratio(loop, parallel)
        counts = [run["curves"].get("iterations") for run in by_mode["parallel"]]
        entry["iterations"] = [fmean(each) for each in counts if each]
        entry["parameter_distance"] = [run["parameter_distance"][-1] for run in both if run["parameter_distance"]]
        entry["loss_difference"] = [max(run["loss_distance"]) for run in both if run.get("loss_distance")]
        found.append(entry)
    return found


def _end_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of trainings from several seeds: times are medians over seeds of medians over points."""
    curves = [run["curves"] for run in runs]
    middles = {
        name: [median(curve[name]) for curve in curves if curve.get(name)]
        for name in ("forward_seconds", "replayed_seconds", "graphed_forward_seconds")
    }
    return {
        **{name: middle(each) for name, each in middles.items()},
        **{name: [last(curve[name]) for curve in curves if curve] for name in ("loss", "accuracy")},
        "test_accuracy": [run["test_accuracy"] for run in runs],
        "diverged": sum(run["diverged"] is not None for run in runs),
    }


def _ratio(slow: float | None, fast: float | None) -> float | None:
    return slow / fast if slow and fast else None


def lines(summary: list[dict[str, Any]]) -> list[str]:
    return table(
        [
            {
                "L": entry["L"],
                "iterations": f"{fmean(entry['iterations']):.1f}" if entry["iterations"] else None,
                "as printed over eager loop": shown(entry["printed_speedup_over_eager"], times),
                "forward over eager loop": shown(entry["speedup_over_eager"], times),
                "over fastest loop": shown(entry["speedup_over_fastest_loop"], times),
                "loss at the end": end_loss(entry, "sequential"),
                "in parallel": end_loss(entry, "parallel"),
                "losses of a step differ by at most": shown(max(entry["loss_difference"], default=None), ".1e"),
            }
            for entry in summary
        ]
    )


def end_loss(entry: dict[str, Any], mode: str) -> str | None:
    """The mean over the seeds, as it is shown, with how many diverged; None where every training ended before its first point."""
    known = [loss for loss in entry[mode]["loss"] if loss is not None]
    mean = f"{fmean(known):.4f}" if known else None
    diverged = entry[mode].get("diverged")  # which files of earlier versions do not have
    return f"{diverged} diverged, {mean or 'at once'}" if diverged else mean


EXPERIMENT = Experiment(
    name="resnet-training",
    paper="figs. 4, 5, 8 right, 15 and 16",
    what="training of deep residual networks on MNIST (quick: scikit-learn's digits): time, loss, accuracy, iterations, distance to the loop's training",
    full=FULL,
    quick=QUICK,
    cells=cells,
    measure=measure,
    summarise=summarise,
    lines=lines,
    adapt=adapt_training,
    untimed=untimed,
)
