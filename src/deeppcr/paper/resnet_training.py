"""``resnet-training``: residual networks trained layer by layer and in parallel, side by side.

A cell trains one depth from one seed in both modes at once, on the same batches: so the parameters can be compared at
every point without being stored. Long cells keep checkpoints, so little is lost when they are interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from torch import nn

from .experiment import Cell, Context, Experiment
from .resnet import Runner, Settings, adapt, images, last, newton, train
from .table import table, times
from .timing import synchronise

FULL = Settings()
QUICK = Settings(
    depths=(32, 64), epochs=2, rate=0.02, seeds=2, data="digits", train=800, test=300, window=20, eager_steps=20
)


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    images(settings, context)  # bad data is found before anything else is done
    for depth in settings.depths:
        yield {"L": depth, "timing": "eager"}
        for number in range(settings.seeds):
            yield {"L": depth, "seed": settings.seed + number}


def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    data, depth = images(settings, context), cell["L"]
    if "timing" in cell:
        return {"forward_seconds": time_eager(depth, settings, context)}
    runners = {
        "sequential": Runner(settings, depth, cell["seed"], data, "sequential"),
        "parallel": Runner(settings, depth, cell["seed"], data, "parallel", newton(settings)),
    }
    return train(runners, data, settings, cell["seed"], context)


def time_eager(depth: int, settings: Settings, context: Context) -> list[float]:
    """Seconds of each forward pass of the plain loop in training: as the paper's baseline, launched one by one."""
    data, seconds = images(settings, context), []
    runner = Runner(settings, depth, settings.seed, data, "eager")
    for number in range(settings.eager_steps + 3):
        start = number * settings.batch % (len(data.train_labels) - settings.batch + 1)
        x, labels = (each[start : start + settings.batch] for each in (data.train, data.train_labels))
        synchronise(context.device)
        begun = time.perf_counter()
        scores = runner.forward(x)
        synchronise(context.device)
        seconds.append(time.perf_counter() - begun)
        runner.optimiser.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(scores, labels).backward()
        runner.optimiser.step()
    return seconds[3:]  # the first ones set up


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every depth: times, speed-ups and how far the two trainings are apart.

    Lists have an entry for each seed: ``loss`` the mean of the last ten points of its curve, ``loss_difference`` the largest
    difference in a step (files of earlier versions do not have it). Times are means over all steps and seeds.
    """
    found = []
    for depth in sorted({record["L"] for record in records}):
        mine = [record for record in records if record["L"] == depth]
        eager = [fmean(record["forward_seconds"]) for record in mine if "timing" in record]
        runs = [record for record in mine if "runs" in record]
        entry: dict[str, Any] = {"L": depth, "eager_forward_seconds": eager[0] if eager else None}
        for mode in ("sequential", "parallel"):
            curves = [run["runs"][mode]["curves"] for run in runs]
            passes = [fmean(curve["forward_seconds"]) for curve in curves if curve]
            entry[mode] = {
                "forward_seconds": fmean(passes) if passes else None,
                "loss": [last(curve["loss"]) for curve in curves if curve],
                "accuracy": [last(curve["accuracy"]) for curve in curves if curve],
                "test_accuracy": [run["runs"][mode]["test_accuracy"] for run in runs],
            }
        parallel = entry["parallel"]["forward_seconds"]
        for name, other in (
            ("eager", entry["eager_forward_seconds"]),
            ("fastest_loop", entry["sequential"]["forward_seconds"]),
        ):
            entry[f"speedup_over_{name}"] = other / parallel if other and parallel else None
        counts = [run["runs"]["parallel"]["curves"].get("iterations") for run in runs]
        entry["iterations"] = [fmean(each) for each in counts if each]
        entry["parameter_distance"] = [run["parameter_distance"][-1] for run in runs if run["parameter_distance"]]
        entry["loss_difference"] = [max(run["loss_distance"]) for run in runs if run.get("loss_distance")]
        found.append(entry)
    return found


def lines(summary: list[dict[str, Any]]) -> list[str]:
    rows = []
    for entry in summary:
        over = {name: entry[f"speedup_over_{name}"] for name in ("eager", "fastest_loop")}
        rows.append(
            {
                "L": entry["L"],
                "iterations": f"{fmean(entry['iterations']):.1f}" if entry["iterations"] else None,
                "forward over eager loop": times(over["eager"]) if over["eager"] else None,
                "over fastest loop": times(over["fastest_loop"]) if over["fastest_loop"] else None,
                "loss at the end": end_loss(entry, "sequential"),
                "in parallel": end_loss(entry, "parallel"),
                "losses of a step differ by at most": f"{max(apart):.1e}"
                if (apart := entry["loss_difference"])
                else None,
            }
        )
    return table(rows)


def end_loss(entry: dict[str, Any], mode: str) -> str | None:
    """The mean over the seeds, as it is shown; None where every training ended before its first point."""
    known = [loss for loss in entry[mode]["loss"] if loss is not None]
    return f"{fmean(known):.4f}" if known else None


EXPERIMENT = Experiment(
    name="resnet-training",
    paper="figs. 4 and 5, accuracy and seeds figures, fig. 8 right",
    what="training of deep residual networks on MNIST (quick: scikit-learn's digits): time, loss, accuracy, iterations, distance to the loop's training",
    full=FULL,
    quick=QUICK,
    cells=cells,
    measure=measure,
    summarise=summarise,
    lines=lines,
    adapt=adapt,
)
