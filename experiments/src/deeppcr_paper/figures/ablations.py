"""``resnet-iterations`` and ``resnet-guess``: training with a fixed number of Newton iterations, and from other guesses."""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes

from ..resnet import last
from . import style
from .drawing import Drawing
from .panels import describe, guide, legend, panels, remark, same_y
from .style import finite
from .training import Clock, Run, curve

GUESSES = {
    "batch-mean": "last step's batch mean",
    "random": "random numbers",
    "zeros": "zeros",
    "first-layer": "first layer",
}
_GUESS_COLOURS = dict(zip(GUESSES, (style.BLUE, style.ORANGE, style.PINK, style.GREEN), strict=True))


def _runs(result: dict[str, Any]) -> dict[tuple[int, str], dict[int, Run]]:
    """The runs of the first seed with any points, by depth and guess, and by their number of iterations: 0 is the paper's test."""
    clock, found = Clock.of(result), {}
    first = min((record["seed"] for record in result["records"]), default=0)
    for record in sorted(result["records"], key=lambda record: record["iterations"]):
        run = clock.run(record["iterations"], record["runs"]["parallel"])
        if run.x and record["seed"] == first:
            found.setdefault((record["L"], record["guess"]), {})[run.label] = run
    return found


def _colours(counts: set[int]) -> dict[Any, str]:
    """By number of iterations; the run with the paper's test has the ink."""
    colours = style.ordered(counts - {0}, style.COLD)
    return {**colours, **({"by test": style.INK} if 0 in counts else {})}


def _end(run: Run | None) -> float:
    """The loss at the end; a training that diverged has none."""
    value = last(run.values("loss")) if run is not None and run.diverged is None else None
    return math.nan if value is None else value


def _seconds(run: Run | None) -> float:
    values = run.values("forward_seconds") if run is not None else []
    return median(values) if values else math.nan


def _loss_curves(axes: Axes, runs: dict[int, Run], colours: dict[Any, str]) -> None:
    for count, run in runs.items():
        curve(axes, run, "loss", colours[count or "by test"], spread=False, tag=f"iterations={count}")


def _top(axes: Axes, runs: list[dict[int, Run]]) -> None:
    """A training that is about to diverge must not hide the others."""
    values = [value for each in runs for run in each.values() for value in run.values("loss")]
    axes.set_ylim(top=min(axes.get_ylim()[1], max(3.0, 3 * median(values or [0.0]))))


def iterations(result: dict[str, Any]) -> list[Drawing]:
    """Loss, time and speed-up over the number of iterations, a line a depth; and the loss curves of the deepest."""
    runs = _runs(result)
    if not runs:
        return []
    guess = next(iter(runs))[1]
    by_depth = {depth: each for (depth, name), each in sorted(runs.items()) if name == guess}
    figure, (loss, time, speed, curves) = panels(4)
    colours = style.ordered(by_depth)
    describe(loss, "loss at the end", "Newton iterations (fixed)", "loss (nats)")
    describe(time, "forward pass", "Newton iterations (fixed)", "time of a pass (s)")
    describe(speed, "against the paper's test", "Newton iterations (fixed)", "speed-up (×)")
    said, gone, compared = [], [], False
    for depth, each in by_depth.items():
        colour, counts, tested = colours[depth], [count for count in each if count], each.get(0)
        for axes, value in ((loss, _end), (time, _seconds)):
            axes.plot(counts, [value(each[c]) for c in counts], color=colour, marker="o", gid=f"L={depth}")
            axes.axhline(value(tested), color=colour, linestyle="--", linewidth=1, gid=f"tested L={depth}")
        ratios = {count: _seconds(tested) / _seconds(each[count]) for count in counts}
        speed.plot(counts, [*ratios.values()], color=colour, marker="o", gid=f"L={depth}")
        compared = compared or bool(finite(ratios.values()))
        if math.isfinite(ratios.get(3, math.nan)):
            said.append(
                f"L = {depth:,}: 3 iterations are {ratios[3]:.2g}× as fast as the paper's test, "
                f"loss {_text(_end(each[3]))} against {_text(_end(tested))}"
            )
        diverged = [count for count, run in each.items() if run.diverged is not None]
        crosses = [count for count in diverged if count]
        where = {"transform": loss.get_xaxis_transform(), "gid": f"diverged L={depth}"}
        loss.plot(crosses, [0.95] * len(crosses), "x", color=colour, markersize=6, **where)
        if diverged:
            names = style.listed(str(count) if count else "the paper's test" for count in diverged)
            gone.append(f"L = {depth:,} with {names}")
    for axes in (loss, time, speed):
        axes.set_xticks(sorted({count for each in by_depth.values() for count in each if count}))
    same_y([time], zero=True)
    guide(speed, 1)
    if not compared:
        remark(speed, "no run with the paper's test")
    deepest = max(by_depth)
    shades = _colours({*by_depth[deepest]})
    describe(curves, f"loss curves, L = {deepest:,}", Clock.of(result).label(), "loss (nats)")
    _loss_curves(curves, by_depth[deepest], shades)
    _top(curves, [by_depth[deepest]])
    legend(figure, colours, "depth L (the paper's test dashed)")
    legend(figure, shades, "Newton iterations, in the loss curves", across=7, place="lower")
    text = "; ".join(said) + "." if said else "Trainings with fixed numbers of Newton iterations."
    text += f" Diverged (crosses): {'; '.join(gone)}." if gone else ""
    return [Drawing("resnet-iterations", "Training with a fixed number of Newton iterations", "fig. 19", text, figure)]


def _text(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "not finite"


def guess(result: dict[str, Any]) -> list[Drawing]:
    """For each depth: loss curves by guess and number of iterations, and the iterations that the paper's test takes."""
    runs, label = _runs(result), Clock.of(result).label()
    depths = sorted({depth for depth, _ in runs})
    found = []
    for depth in depths:
        mine = {name: each for (each_depth, name), each in runs.items() if each_depth == depth}
        end = f"-{depth}" if len(depths) > 1 else ""
        found.append(_guess_losses(mine, depth, label, end))
        if any(0 in each for each in mine.values()):
            found.append(_guess_iterations(mine, depth, label, end))
    return found


def _guess_losses(mine: dict[str, dict[int, Run]], depth: int, label: str, end: str) -> Drawing:
    """The paper's figure: a panel a guess, a line a number of iterations."""
    figure, places = panels(len(mine))
    colours = _colours({count for each in mine.values() for count in each})
    said = []
    for axes, (guess, each) in zip(places, mine.items(), strict=True):
        name = GUESSES.get(guess, guess)
        describe(axes, name, label, "loss (nats)")
        _loss_curves(axes, each, colours)
        tested = _end(each.get(0))
        close = [count for count, run in each.items() if count and _end(run) <= 1.1 * tested]
        if close:
            said.append(f"{name}: {min(close)}")
        elif math.isfinite(tested):
            said.append(f"{name}: more than {max(each)}")
    same_y(places)
    _top(places[0], [*mine.values()])
    legend(figure, colours, "Newton iterations")
    text = f"Training of a residual network of {depth:,} layers, by where Newton starts."
    text += f" Iterations that bring the loss within 10% of the paper's test: {'; '.join(said)}." if said else ""
    return Drawing(f"resnet-guess-loss{end}", f"Loss by initial guess, L = {depth:,}", "fig. 22", text, figure)


def _guess_iterations(mine: dict[str, dict[int, Run]], depth: int, label: str, end: str) -> Drawing:
    """Iterations under the paper's test over training, a line a guess."""
    figure, (axes,) = panels(1)
    describe(axes, "", label, "Newton iterations (mean)")
    colours, said = {}, []
    for guess, each in mine.items():
        if 0 in each:
            name, colour = GUESSES.get(guess, guess), _GUESS_COLOURS.get(guess, style.INK)
            colours[name] = colour
            curve(axes, each[0], "iterations", colour, tag=guess)
            if values := each[0].values("iterations"):
                said.append(f"{fmean(values):.1f} from {name}")
    same_y([axes], zero=True)
    legend(figure, colours, "Newton starts from", across=3)
    title = f"Newton iterations by initial guess, L = {depth:,}"
    text = f"Under the paper's test, mean over the training: {', '.join(said)}."
    return Drawing(f"resnet-guess-iterations{end}", title, "fig. 22", text, figure)
