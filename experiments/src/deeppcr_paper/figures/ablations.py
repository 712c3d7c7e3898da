"""``resnet-iterations`` and ``resnet-guess``: training with a fixed number of Newton iterations, and from other guesses."""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes

from ..resnet import last
from . import style
from .drawing import Drawing
from .training import Clock, Run, curve, finite

GUESSES = {
    "batch-mean": "last step's batch mean",
    "random": "random numbers",
    "zeros": "zeros",
    "first-layer": "first layer",
}
_GUESS_COLOURS = {"batch-mean": "#0072b2", "random": "#e69f00", "zeros": "#cc79a7", "first-layer": "#009e73"}
TESTED = "by test"


def _runs(result: dict[str, Any]) -> dict[tuple[int, str], list[Run]]:
    """The runs of the first seed with any points, by depth and guess; told apart by their number of iterations."""
    clock, found = Clock.of(result), {}
    first = min((record["seed"] for record in result["records"]), default=0)
    for record in result["records"]:
        run = clock.run(record["iterations"], record["runs"]["parallel"])
        if run.x and record["seed"] == first:
            found.setdefault((record["L"], record["guess"]), []).append(run)
    return {key: sorted(runs, key=lambda run: run.label) for key, runs in found.items()}


def _colours(runs: list[Run]) -> dict[Any, str]:
    """By number of iterations; the run with the paper's test has the ink."""
    colours = style.ordered((run.label for run in runs if run.label), style.COLD)
    return {**colours, **({0: style.INK} if any(run.label == 0 for run in runs) else {})}


def _end(run: Run) -> float:
    """The loss at the end; a training that diverged has none."""
    value = last(finite(run.curve("loss")))
    return value if value is not None and run.diverged is None else math.nan


def _seconds(run: Run) -> float:
    values = finite(run.curve("forward_seconds"))
    return median(values) if values else math.nan


def _loss_curves(axes: Axes, runs: list[Run], colours: dict[Any, str], label: str) -> list[float]:
    for run in runs:
        curve(axes, run, "loss", colours[run.label], spread=False, tag=f"iterations={run.label}")
    axes.set_xlabel(label)
    axes.set_ylabel("loss (nats)")
    return [value for run in runs for value in finite(run.curve("loss"))]


def _legend(figure: Any, colours: dict[Any, str], **place: Any) -> None:
    names = {TESTED if count == 0 else str(count): colour for count, colour in colours.items()}
    style.legend(figure, names, "Newton iterations", **place)


def _loss_axis(axes: Axes, values: list[float]) -> None:
    """A training that is about to diverge must not hide the others."""
    ordered = sorted(values) or [0.0]
    usual = ordered[int(0.5 * (len(ordered) - 1))]
    style.free(axes, [value for value in values if value <= max(3.0, 3 * usual)])


def iterations(result: dict[str, Any]) -> list[Drawing]:
    """Loss, time and speed-up over the number of iterations, a line a depth; and the loss curves of the deepest."""
    runs = _runs(result)
    if not runs:
        return []
    label = Clock.of(result).label
    guess = next(iter(runs))[1]
    by_depth = {depth: each for (depth, name), each in sorted(runs.items()) if name == guess}
    figure, grid = style.canvas(2, extra=1.5)
    (loss, time), (speed, curves) = grid
    colours = style.ordered(by_depth)
    ends, seconds, ratios, said = [], [], [], []
    counts = sorted({run.label for each in by_depth.values() for run in each if run.label})
    for depth, each in by_depth.items():
        fixed = [run for run in each if run.label]
        tested = next((run for run in each if not run.label), None)
        colour, x = colours[depth], [run.label for run in fixed]
        lines = {loss: [_end(run) for run in fixed], time: [_seconds(run) for run in fixed]}
        if tested is not None:
            lines[speed] = [_seconds(tested) / _seconds(run) for run in fixed]
            ratios += finite(lines[speed])
            for axes, value in ((loss, _end(tested)), (time, _seconds(tested))):
                axes.axhline(value, color=colour, linestyle="--", linewidth=1, gid=f"tested L={depth}")
                (ends if axes is loss else seconds).extend(finite([value]))
            three = next((ratio for count, ratio in zip(x, lines[speed], strict=True) if count == 3), math.nan)
            if math.isfinite(three):
                said.append(
                    f"L = {depth:,}: 3 iterations are {three:.2g}× as fast as the paper's test, "
                    f"loss {_text(_end(next(run for run in fixed if run.label == 3)))} against {_text(_end(tested))}"
                )
        ends += finite(lines[loss])
        seconds += finite(lines[time])
        for axes, values in lines.items():
            axes.plot(x, values, color=colour, marker="o", gid=f"L={depth}")
        gone = [run.label for run in fixed if run.diverged is not None]
        if gone:
            crosses = {"linestyle": "none", "marker": "x", "markersize": 6, "gid": f"diverged L={depth}"}
            loss.plot(gone, [0.95] * len(gone), color=colour, transform=loss.get_xaxis_transform(), **crosses)
    for axes in (loss, time, speed):
        axes.set_xlabel("Newton iterations (fixed)")
        axes.set_xticks(counts)
    style.panel_title(loss, "loss at the end")
    style.free(loss, ends)
    loss.set_ylabel("loss (nats)")
    style.panel_title(time, "forward pass")
    style.free(time, seconds, also=[0.0])
    time.set_ylabel("time of a pass (s)")
    style.panel_title(speed, "against the paper's test")
    speed.axhline(1, color=style.INK, linestyle=":", linewidth=1.2)
    style.free(speed, ratios, also=[1.0])
    speed.set_ylabel("speed-up (×)")
    if not ratios:
        style.remark(speed, "no run with the paper's test")
    deepest = max(by_depth)
    shades = _colours(by_depth[deepest])
    style.panel_title(curves, f"loss curves, L = {deepest:,}")
    _loss_axis(curves, _loss_curves(curves, by_depth[deepest], shades, label))
    style.legend(figure, colours, "depth L (the paper's test dashed)")
    _below(figure, shades)
    diverged = {
        depth: [str(run.label) if run.label else "the paper's test" for run in each if run.diverged is not None]
        for depth, each in by_depth.items()
    }
    gone = [f"L = {depth:,} with {style.listed(labels)}" for depth, labels in diverged.items() if labels]
    text = "; ".join(said) + "." if said else "Trainings with fixed numbers of Newton iterations."
    return [
        Drawing(
            "resnet-iterations",
            "Training with a fixed number of Newton iterations",
            "fig. 19",
            text + (f" Diverged (crosses): {'; '.join(gone)}." if gone else ""),
            figure,
        )
    ]


def _text(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "not finite"


def _below(figure: Any, colours: dict[Any, str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, linewidth=2.5) for colour in colours.values()]
    names = [TESTED if count == 0 else str(count) for count in colours]
    figure.legend(
        handles, names, title="Newton iterations, in the loss curves", ncols=len(names), loc="outside lower center"
    )


def guess(result: dict[str, Any]) -> list[Drawing]:
    """For each depth: loss curves by guess and number of iterations, and the iterations that the paper's test takes."""
    runs = _runs(result)
    label = Clock.of(result).label
    found = []
    several = len({depth for depth, _ in runs}) > 1
    for depth in sorted({depth for depth, _ in runs}):
        mine = {name: each for (each_depth, name), each in runs.items() if each_depth == depth}
        end = f"-{depth}" if several else ""
        found.append(_guess_losses(mine, depth, label, end))
        if any(run.label == 0 for each in mine.values() for run in each):
            found.append(_guess_iterations(mine, depth, label, end))
    return found


def _guess_losses(mine: dict[str, list[Run]], depth: int, label: str, end: str) -> Drawing:
    """The paper's figure: a panel a guess, a line a number of iterations."""
    rows = math.ceil(len(mine) / 2)
    figure, grid = style.canvas(rows, extra=0.7 + 0.4 * (len(mine) % 2 == 0))
    places = [axes for row in grid for axes in row]
    colours = _colours([run for each in mine.values() for run in each])
    every: list[float] = []
    for axes, (name, each) in zip(places, mine.items(), strict=False):
        style.panel_title(axes, GUESSES.get(name, name))
        every += _loss_curves(axes, each, colours, label)
    for axes in places[: len(mine)]:
        _loss_axis(axes, every)
    spare = places[len(mine) :]
    _legend(figure, colours, **({"place": spare[0]} if spare else {}))
    said = []
    for name, each in mine.items():
        tested = next((_end(run) for run in each if run.label == 0), math.nan)
        close = [run.label for run in each if run.label and _end(run) <= 1.1 * tested]
        if close:
            said.append(f"{GUESSES.get(name, name)}: {min(close)}")
        elif math.isfinite(tested):
            said.append(f"{GUESSES.get(name, name)}: more than {max(run.label for run in each)}")
    few = f" Iterations that bring the loss within 10% of the paper's test: {'; '.join(said)}." if said else ""
    return Drawing(
        f"resnet-guess-loss{end}",
        f"Loss by initial guess, L = {depth:,}",
        "fig. 22",
        f"Training of a residual network of {depth:,} layers, by where Newton starts.{few}",
        figure,
    )


def _guess_iterations(mine: dict[str, list[Run]], depth: int, label: str, end: str) -> Drawing:
    """Iterations under the paper's test over training, a line a guess."""
    figure, grid = style.canvas(1, 1, extra=1.2)
    axes = grid[0][0]
    tested = {name: run for name, each in mine.items() for run in each if run.label == 0}
    counts: list[float] = []
    for name, run in tested.items():
        counts += curve(axes, run, "iterations", _GUESS_COLOURS.get(name, style.INK), tag=name)
    style.free(axes, counts, also=[0.0])
    axes.set_xlabel(label)
    axes.set_ylabel("Newton iterations (mean)")
    colours = {GUESSES.get(name, name): _GUESS_COLOURS.get(name, style.INK) for name in tested}
    style.legend(figure, colours, "Newton starts from", most=3)
    said = [
        f"{fmean(values):.1f} from {GUESSES.get(name, name)}"
        for name, run in tested.items()
        if (values := finite(run.curve("iterations")))
    ]
    return Drawing(
        f"resnet-guess-iterations{end}",
        f"Newton iterations by initial guess, L = {depth:,}",
        "fig. 22",
        f"Under the paper's test, mean over the training: {', '.join(said)}.",
        figure,
    )
