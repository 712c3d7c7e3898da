"""``resnet-training``: time, loss, accuracy and iterations over training (figs. 4 and 5, accuracy, seeds, fig. 8 right)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from ..resnet_training import end_loss, summarise
from ..table import times as as_times
from . import style
from .drawing import Drawing
from .panels import band, describe, guide, legend, panels, remark, same_y
from .style import finite

#: By depth, as the experiment itself sums it up.
Summary = dict[int, dict[str, Any]]
MODES = ("sequential", "parallel")


@dataclass(frozen=True)
class Run:
    """One training, with NaN where a file names what is not finite.

    Attributes:
        label: what it is told apart by: a depth, a number of iterations
        x: where the points of the curves are, in epochs or steps
        curves: values by name; under "test" the accuracy on the test images after every epoch, in percent
    """

    label: Any
    x: list[float]
    curves: dict[str, list[float]]
    diverged: int | None

    def points(self, name: str) -> tuple[list[float], list[float]]:
        if name == "test":
            return [float(epoch + 1) for epoch in range(len(self.curves["test"]))], self.curves["test"]
        return self.x, self.curves.get(name, [math.nan] * len(self.x))

    def values(self, name: str) -> list[float]:
        """Those of a curve that are finite."""
        return finite(self.points(name)[1])


@dataclass(frozen=True)
class Clock:
    """Training steps to what the x-axis shows: epochs, where some training went through all of them, else steps.

    Attributes:
        how: by which method it was trained in parallel: "as printed" or "defaults"
    """

    per_epoch: float | None
    how: str = "as printed"

    @staticmethod
    def of(result: dict[str, Any]) -> Clock:
        ends = [
            run["curves"]["step"][-1]
            for record in result["records"]
            for run in record.get("runs", {}).values()
            if run["diverged"] is None and run["curves"].get("step")
        ]
        cut = result["settings"].get("steps")  # such a training has no whole number of epochs
        how = "defaults" if result["settings"].get("solver") == "default" else "as printed"
        return Clock(max(ends) / result["settings"]["epochs"] if ends and not cut else None, how)

    def name(self, mode: str) -> str:
        return self.how if mode == "parallel" else style.LABELS[mode]

    def method(self, mode: str = "parallel") -> str:
        """Whose colour stands above a panel: as printed and the defaults have their own, as in all figures."""
        return mode if mode != "parallel" else "auto" if self.how == "defaults" else "printed"

    def label(self, name: str = "loss") -> str:
        """Of the axis along which a curve is drawn."""
        if self.per_epoch:
            return "training (epochs)"
        return "tests (number)" if name == "test" else "training (steps)"

    def run(self, label: Any, run: dict[str, Any]) -> Run:
        curves = {name: [style.number(value) for value in values] for name, values in run["curves"].items()}
        x = [step / (self.per_epoch or 1) for step in curves.get("step", [])]
        curves["test"] = [100 * style.number(value) for value in run["test_accuracy"]]
        return Run(label, x, curves, run["diverged"])


@dataclass(frozen=True)
class Pair:
    """Both trainings of one depth and seed."""

    depth: int
    seed: int
    modes: dict[str, Run]
    distance: list[float]


def draw(result: dict[str, Any]) -> list[Drawing]:
    clock = Clock.of(result)
    pairs = [
        Pair(
            record["L"],
            record["seed"],
            {mode: clock.run(record["L"], record["runs"][mode]) for mode in MODES},
            [style.number(value) for value in record["parameter_distance"]],
        )
        for record in result["records"]
        if "runs" in record
    ]
    pairs = [pair for pair in pairs if all(run.x for run in pair.modes.values())]
    if not pairs:
        return []
    shown = _first_seed(pairs)
    summary = {entry["L"]: entry for entry in summarise(result["records"])}
    found = []
    timed = [pair for pair in pairs if all(run.curves.get("forward_seconds") for run in pair.modes.values())]
    if timed:  # not every seed need be
        eager = {
            record["L"]: median(record["forward_seconds"])
            for record in result["records"]
            if record.get("timing") == "eager" and record["forward_seconds"]
        }
        # Files of earlier versions do not say how the layers were taken one by one.
        method = summary[shown[0].depth]["loop"] or ("graph" if result["device"] == "cuda" else "loop")
        found.append(times(_first_seed(timed), eager, method, clock, summary))
    found += [losses(shown, clock, summary), accuracies(shown, clock, several=len(pairs) > len(shown))]
    if len({pair.seed for pair in pairs}) > 1:
        found.append(seeds(pairs, clock))
    return [*found, newton(shown, clock, summary)]


def _first_seed(pairs: list[Pair]) -> list[Pair]:
    first = min(pair.seed for pair in pairs)
    return [pair for pair in pairs if pair.seed == first]


def minus(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """As far as both go: one may have stopped early."""
    return [a - b for a, b in zip(one, other, strict=False)]


def curve(axes: Axes, run: Run, name: str, colour: str, *, spread: bool = True, tag: str = "") -> None:
    """Means over windows of steps, with one standard deviation to either side where there is one."""
    x, mean = run.points(name)
    plot(axes, x, mean, colour, tag or f"L={run.label}")
    if spread and f"{name}_std" in run.curves:
        deviation = run.curves[f"{name}_std"]
        band(axes, x, minus(mean, deviation), [a + b for a, b in zip(mean, deviation, strict=True)], colour)


def plot(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str, tag: str) -> None:
    """A curve over training: with dots where it has few points, thin where it has many. It may end before ``x`` does."""
    marker, width = "o" if len(y) < 12 else None, 1.0 if len(y) > 100 else 1.5
    axes.plot(x[: len(y)], y, color=colour, marker=marker, linewidth=width, gid=tag)


def times(pairs: list[Pair], eager: dict[int, float], method: str, clock: Clock, summary: Summary) -> Drawing:
    """Fig. 4: the forward pass layer by layer and in parallel, and how many times as fast it is."""
    loop = {"fused": "fused loop", "graph": "CUDA graph", "loop": "loop"}[method]
    figure, (left, right, against_loop, against_eager) = panels(4)
    colours = style.ordered(pair.depth for pair in pairs)
    describe(left, f"{loop} (eager: dashed)", clock.label(), "time of a pass (s)", method)
    describe(right, f"DeepPCR, {clock.how}", clock.label(), "time of a pass (s)", clock.method())
    describe(against_loop, f"{clock.how} over {loop}", clock.label(), "speed-up (×)", clock.method())
    describe(against_eager, f"{clock.how} over eager loop", clock.label(), "speed-up (×)", clock.method())
    for pair in pairs:
        colour, tag = colours[pair.depth], f"L={pair.depth}"
        for axes, run in zip((left, right), pair.modes.values(), strict=True):
            curve(axes, run, "forward_seconds", colour, spread=False)
        x, mine = pair.modes["parallel"].points("forward_seconds")
        _, loops = pair.modes["sequential"].points("forward_seconds")
        plot(against_loop, x, [other / own for other, own in zip(loops, mine, strict=False)], colour, tag)
        if pair.depth in eager:
            left.axhline(eager[pair.depth], color=colour, linestyle="--", gid=f"eager {tag}")
            plot(against_eager, x, [eager[pair.depth] / own for own in mine], colour, tag)
    for axes in (against_loop, against_eager):
        guide(axes, 1)
    if not eager:
        remark(against_eager, "the eager loop was not timed")
    same_y([left, right], log=True)
    same_y([against_loop, against_eager], log=True)
    legend(figure, colours, "depth L")
    said = []
    for pair in pairs:
        entry = summary[pair.depth]
        sequential, parallel = (style.seconds(entry[mode]["forward_seconds"]) for mode in MODES)
        over_eager = entry["speedup_over_eager"]
        also = f" ({as_times(over_eager)} over the eager loop)" if over_eager else ""
        if entry["printed_speedup_over_eager"]:
            also += f"; as the paper prints it {style.seconds(entry['printed_forward_seconds'])}, "
            also += f"{as_times(entry['printed_speedup_over_eager'])} over the eager loop"
        said.append(
            f"L = {pair.depth:,}: {sequential} in the {loop}, {parallel} in parallel ({clock.how}), "
            f"{as_times(entry['speedup_over_fastest_loop'])}{also}"
        )
    text = f"Median of a forward pass over the timed steps of the timed seeds. {'; '.join(said)}.{_nearly_the_loop(clock, summary)}"
    return Drawing("resnet-training-time", "Time of the forward pass during training", "fig. 4", text, figure)


def losses(pairs: list[Pair], clock: Clock, summary: Summary) -> Drawing:
    """Fig. 5: the loss of both trainings, and their difference."""
    said = []
    for pair in pairs:
        entry = summary[pair.depth]
        ends = " and ".join(f"{end_loss(entry, mode)} ({clock.name(mode)})" for mode in MODES)
        apart = entry["loss_difference"]
        most = f", losses of a step differ by at most {style.plain(max(apart))}" if apart else ""
        said.append(f"L = {pair.depth:,}: {ends}{most}")
    text = (
        "Means over windows of steps, and one standard deviation. Loss at the end (mean of the last tenth of the points, ten at "
        f"most, and of all seeds, in nats): {'; '.join(said)}." + _stopped(pairs, clock)
    )
    figure = _both(pairs, clock, "loss", "loss (nats)", "difference (nats)")
    return Drawing("resnet-training-loss", "Loss during training", "fig. 5", text, figure)


def accuracies(pairs: list[Pair], clock: Clock, *, several: bool) -> Drawing:
    """The accuracy on the test images after every epoch."""
    most = ""
    apart = [abs(value) for pair in pairs for value in finite(_apart(pair, "test"))]
    if apart:
        points = f"differ by at most {max(apart):.2g} points"
        most = f"; after any epoch the two {points}" if max(apart) else "; the two are equal after every epoch"
    text = f"Seed {pairs[0].seed}. " if several else ""
    text += f"At the end of the training: {_tested(pairs, clock)}{most}."
    figure = _both(pairs, clock, "test", "accuracy (%)", "difference (points)")
    return Drawing("resnet-training-accuracy", "Accuracy on the test images", "fig. 15", text, figure)


def _tested(pairs: list[Pair], clock: Clock) -> str:
    """The last accuracy of either way."""
    ends = {mode: [each[-1] for pair in pairs if (each := pair.modes[mode].values("test"))] for mode in MODES}
    return ", ".join(f"{clock.name(mode)} {style.span(each, '.1f')}%" for mode, each in ends.items() if each)


def _apart(pair: Pair, name: str) -> list[float]:
    return minus(*(run.points(name)[1] for run in pair.modes.values()))


def _both(pairs: list[Pair], clock: Clock, name: str, label: str, difference: str) -> Canvas:
    """A curve of the sequential training, of DeepPCR, and the difference; the legend takes the fourth place."""
    figure, (left, right, below) = panels(3)
    colours = style.ordered(pair.depth for pair in pairs)
    describe(left, style.LABELS["sequential"], clock.label(name), label, "sequential")
    describe(right, f"DeepPCR, {clock.how}", clock.label(name), label, clock.method())
    describe(below, f"sequential − {clock.how}", clock.label(name), difference)
    for pair in pairs:
        colour = colours[pair.depth]
        for axes, run in zip((left, right), pair.modes.values(), strict=True):
            curve(axes, run, name, colour)
        plot(below, pair.modes["parallel"].points(name)[0], _apart(pair, name), colour, f"L={pair.depth}")
    guide(below, 0)
    same_y([left, right])
    legend(figure, colours, "depth L")
    return figure


def seeds(pairs: list[Pair], clock: Clock) -> Drawing:
    """Loss and accuracy from several seeds: the mean, and the span from the least to the most."""
    figure, places = panels(4)
    colours = style.ordered(pair.depth for pair in pairs)
    for column, mode in enumerate(MODES):
        above, below = places[column], places[2 + column]
        describe(above, f"{clock.name(mode)}, loss", clock.label("loss"), "loss (nats)", clock.method(mode))
        describe(below, f"{clock.name(mode)}, test", clock.label("test"), "accuracy (%)", clock.method(mode))
        for depth, colour in colours.items():
            runs = [pair.modes[mode] for pair in pairs if pair.depth == depth]
            _span(above, runs, "loss", colour)
            _span(below, runs, "test", colour)
    same_y(places[:2])
    same_y(places[2:])
    legend(figure, colours, "depth L")
    count = len({pair.seed for pair in pairs})
    text = f"Mean and span of {count} seeds. Test accuracy after the last epoch: {_tested(pairs, clock)}." + _stopped(
        pairs, clock
    )
    return Drawing("resnet-training-seeds", f"Loss and accuracy from {count} seeds", "fig. 16", text, figure)


def _span(axes: Axes, runs: list[Run], name: str, colour: str) -> None:
    """The mean with the span of the curves that go as far."""
    found: dict[float, list[float]] = {}
    for run in runs:
        for x, y in zip(*run.points(name), strict=True):
            if math.isfinite(y):
                found.setdefault(x, []).append(y)
    x = sorted(found)
    band(axes, x, [min(found[each]) for each in x], [max(found[each]) for each in x], colour)
    plot(axes, x, [fmean(found[each]) for each in x], colour, f"L={runs[0].label}")


def newton(pairs: list[Pair], clock: Clock, summary: Summary) -> Drawing:
    """Fig. 8 right: iterations during training, and how far the parameters of the two trainings are apart."""
    figure, (left, right) = panels(2)
    colours = style.ordered(pair.depth for pair in pairs)
    describe(left, f"iterations, {clock.how}", clock.label(), "iterations (mean)", clock.method())
    describe(right, f"sequential − {clock.how}", clock.label(), "apart (max-norm)")
    for pair in pairs:
        colour = colours[pair.depth]
        curve(left, pair.modes["parallel"], "iterations", colour)
        longest = max((run.x for run in pair.modes.values()), key=len)
        distances = [value if value > 0 else math.nan for value in pair.distance][: len(longest)]
        plot(right, longest, distances, colour, f"L={pair.depth}")
    same_y([left], zero=True)
    same_y([right], log=True)
    legend(figure, colours, "depth L")
    said = []
    for pair in pairs:
        entry = summary[pair.depth]
        ends = finite([style.number(value) for value in entry["parameter_distance"]])
        if entry["iterations"] and ends:
            said.append(
                f"L = {pair.depth:,}: {fmean(entry['iterations']):.1f} iterations, parameters at most "
                f"{style.plain(max(ends))} apart at the end"
            )
    equal = sum(value == 0 for pair in pairs for value in pair.distance)
    unseen = f" Equal at {equal} points, which a log axis does not show." if equal else ""
    text = (
        "Iterations of a forward pass (means over windows of steps, and one standard deviation), and the largest difference of "
        f"a parameter to the sequential training, drawn from seed {pairs[0].seed}. The mean and the largest of all seeds: "
        f"{'; '.join(said)}.{unseen}{_nearly_the_loop(clock, summary)}"
    )
    return Drawing("resnet-training-newton", "Newton's method during training", "fig. 8 right", text, figure)


def _nearly_the_loop(clock: Clock, summary: Summary) -> str:
    """Two chunks are exact after one iteration, whatever the weights: that says nothing of Newton's method."""
    depths = [depth for depth, entry in summary.items() if entry["iterations"] and set(entry["iterations"]) == {1.0}]
    if not depths or clock.how != "defaults":
        return ""
    return f" At L = {style.listed(depths)} the defaults are two chunks and one iteration: nearly the loop."


def _stopped(pairs: list[Pair], clock: Clock) -> str:
    gone = [
        f"L = {pair.depth:,}, seed {pair.seed}, {clock.name(mode)} at step {run.diverged}"
        for pair in pairs
        for mode, run in pair.modes.items()
        if run.diverged is not None
    ]
    return f" Diverged: {'; '.join(gone)}." if gone else ""
