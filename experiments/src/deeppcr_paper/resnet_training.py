"""``resnet-training``: residual networks trained layer by layer and in parallel, side by side.

A cell trains one depth from one seed in both modes at once, on the same batches: so the parameters can be compared at
every point without being stored. Long cells keep checkpoints, so little is lost when they are interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from torch import nn

from .experiment import Cell, Context, Experiment
from .resnet import Runner, Settings, adapt, images, last, newton, train
from .store import PaperError
from .table import table, times
from .timing import synchronise

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
    data, depth = images(settings, context), cell["L"]
    if "timing" in cell:
        return time_forward(depth, cell["timing"], settings, context)
    timed = cell["seed"] < settings.seed + settings.timed_seeds
    runners = {
        "sequential": Runner(settings, depth, cell["seed"], data, "sequential", timed=timed),
        "parallel": Runner(settings, depth, cell["seed"], data, "parallel", newton(settings), timed=timed),
    }
    return train(runners, data, settings, cell["seed"], context)


def time_forward(depth: int, method: str, settings: Settings, context: Context) -> dict[str, Any]:
    """Seconds of each forward pass in training by the plain loop, launched layer by layer, or as the paper prints it."""
    data, seconds, iterations = images(settings, context), [], []
    if method == "eager":
        runner = Runner(settings, depth, settings.seed, data, "eager")
    else:
        runner = Runner(settings, depth, settings.seed, data, "parallel", newton(replace(settings, solver="paper")))
    for number in range(settings.eager_steps + 3):
        start = number * settings.batch % (len(data.train_labels) - settings.batch + 1)
        x, labels = (each[start : start + settings.batch] for each in (data.train, data.train_labels))
        synchronise(context.device)
        begun = time.perf_counter()
        scores = runner.forward(x)
        synchronise(context.device)
        seconds.append(time.perf_counter() - begun)
        if runner.network.solution is not None:
            iterations.append(runner.network.solution.iterations.float().mean().item())
        runner.optimiser.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(scores, labels).backward()
        runner.optimiser.step()
    found = {"forward_seconds": seconds[3:]}  # the first ones set up
    return found | ({"iterations": iterations[3:]} if iterations else {})


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every depth: times, speed-ups and how far the two trainings are apart.

    Lists have an entry for each seed: ``loss`` the mean of the end of its curve (see ``last``), ``loss_difference`` the largest
    difference in a step (files of earlier versions do not have it), as long as neither has diverged. ``loop`` is how the layers were taken one by one:
    "fused" (one kernel), "graph" or "loop". Times are medians over the steps that were timed, or the points of a curve, and
    over the seeds that were timed; ``replayed_seconds`` are of a whole step inside a CUDA graph.
    """
    found = []
    for depth in sorted({record["L"] for record in records}):
        mine = [record for record in records if record["L"] == depth]
        timed = {record["timing"]: record for record in mine if "timing" in record}
        runs = [record for record in mine if "runs" in record]
        entry: dict[str, Any] = {"L": depth}
        for name in ("eager", "printed"):
            entry[f"{name}_forward_seconds"] = median(timed[name]["forward_seconds"]) if name in timed else None
        entry["loop"] = next((run["runs"]["sequential"].get("method") for run in runs), None)
        entry["printed_iterations"] = fmean(timed["printed"]["iterations"]) if "printed" in timed else None
        for mode in ("sequential", "parallel"):
            curves = [run["runs"][mode]["curves"] for run in runs]
            entry[mode] = {
                "forward_seconds": _middle(curves, "forward_seconds"),
                "replayed_seconds": _middle(curves, "replayed_seconds"),
                "loss": [last(curve["loss"]) for curve in curves if curve],
                "accuracy": [last(curve["accuracy"]) for curve in curves if curve],
                "test_accuracy": [run["runs"][mode]["test_accuracy"] for run in runs],
                "diverged": sum(run["runs"][mode]["diverged"] is not None for run in runs),
            }
        eager, printed = entry["eager_forward_seconds"], entry["printed_forward_seconds"]
        entry["printed_speedup_over_eager"] = eager / printed if eager and printed else None
        parallel = entry["parallel"]["forward_seconds"]
        for name, other in (
            ("eager", eager),
            ("fastest_loop", entry["sequential"]["forward_seconds"]),
        ):
            entry[f"speedup_over_{name}"] = other / parallel if other and parallel else None
        counts = [run["runs"]["parallel"]["curves"].get("iterations") for run in runs]
        entry["iterations"] = [fmean(each) for each in counts if each]
        entry["parameter_distance"] = [run["parameter_distance"][-1] for run in runs if run["parameter_distance"]]
        entry["loss_difference"] = [max(run["loss_distance"]) for run in runs if run.get("loss_distance")]
        found.append(entry)
    return found


def _middle(curves: list[dict[str, Any]], name: str) -> float | None:
    """The median over seeds of the median over points; None where nothing was timed."""
    found = [median(curve[name]) for curve in curves if curve.get(name)]
    return median(found) if found else None


def lines(summary: list[dict[str, Any]]) -> list[str]:
    rows = []
    for entry in summary:
        over = {name: entry[f"speedup_over_{name}"] for name in ("eager", "fastest_loop")}
        rows.append(
            {
                "L": entry["L"],
                "iterations": f"{fmean(entry['iterations']):.1f}" if entry["iterations"] else None,
                "as printed over eager loop": times(printed)
                if (printed := entry["printed_speedup_over_eager"])
                else None,
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
    """The mean over the seeds, as it is shown, with how many diverged; None where every training ended before its first point."""
    known = [loss for loss in entry[mode]["loss"] if loss is not None]
    shown = f"{fmean(known):.4f}" if known else None
    diverged = entry[mode].get("diverged")  # which files of earlier versions do not have
    return f"{diverged} diverged, {shown or 'at once'}" if diverged else shown


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
)
