"""``resnet-training``: time, loss, accuracy and iterations over training (figs. 4 and 5, accuracy, seeds, fig. 8 right)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ..resnet_training import end_loss, summarise
from ..table import times as as_times
from . import style
from .drawing import Drawing

#: By depth, as the experiment itself sums it up.
Summary = dict[int, dict[str, Any]]
MODES = ("sequential", "parallel")


@dataclass(frozen=True)
class Run:
    """One training: its curves as numbers, with NaN where a file names what is not finite.

    Attributes:
        label: what it is told apart by: a depth, a number of iterations
        x: where the points of the curves are, in epochs or steps
    """

    label: Any
    x: list[float]
    curves: dict[str, list[float]]
    test_accuracy: list[float]
    diverged: int | None

    def curve(self, name: str) -> list[float]:
        return self.curves.get(name, [math.nan] * len(self.x))


@dataclass(frozen=True)
class Clock:
    """Training steps to what the x-axis shows: epochs, where some training went through all of them, else steps."""

    per_epoch: float | None

    @staticmethod
    def of(result: dict[str, Any]) -> Clock:
        ends = [
            run["curves"]["step"][-1]
            for record in result["records"]
            for run in record.get("runs", {}).values()
            if run["diverged"] is None and run["curves"].get("step")
        ]
        cut = result["settings"].get("steps")  # such a training has no whole number of epochs
        return Clock(max(ends) / result["settings"]["epochs"] if ends and not cut else None)

    @property
    def label(self) -> str:
        return "training (epochs)" if self.per_epoch else "training (steps)"

    def run(self, label: Any, run: dict[str, Any]) -> Run:
        curves = {name: [style.number(value) for value in values] for name, values in run["curves"].items()}
        x = [step / (self.per_epoch or 1) for step in curves.get("step", [])]
        return Run(label, x, curves, [style.number(value) for value in run["test_accuracy"]], run["diverged"])


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
    first = min(pair.seed for pair in pairs)
    shown = [pair for pair in pairs if pair.seed == first]
    eager = {
        record["L"]: median(record["forward_seconds"])
        for record in result["records"]
        if record.get("timing") == "eager" and record["forward_seconds"]
    }
    summary = {entry["L"]: entry for entry in summarise(result["records"])}
    method = sequential_method(result, summary[shown[0].depth])
    found = [
        losses(shown, clock, summary),
        accuracies(shown, clock, several=len(pairs) > len(shown)),
        newton(shown, clock, summary),
    ]
    if len({pair.seed for pair in pairs}) > 1:
        found.insert(2, seeds(pairs, clock))
    timed = [pair for pair in pairs if all(run.curves.get("forward_seconds") for run in pair.modes.values())]
    if timed:  # not every seed need be
        first = min(pair.seed for pair in timed)
        found.insert(0, times([pair for pair in timed if pair.seed == first], eager, method, clock, summary))
    return found


def sequential_method(result: dict[str, Any], entry: dict[str, Any]) -> str:
    """How the layers were taken one by one; files of earlier versions do not say."""
    return entry["loop"] or ("graph" if result["device"] == "cuda" else "loop")


def minus(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """As far as both go: one may have stopped early."""
    return [a - b for a, b in zip(one, other, strict=False)]


def over(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a / b if b else math.nan for a, b in zip(one, other, strict=False)]


def finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def curve(axes: Axes, run: Run, name: str, colour: str, *, spread: bool = True, tag: str = "") -> list[float]:
    """Means over windows of steps, with one standard deviation to either side; returns all that is drawn."""
    mean = run.curve(name)
    plot(axes, run.x, mean, colour, tag or f"L={run.label}")
    if not spread or f"{name}_std" not in run.curves:
        return finite(mean)
    deviation = run.curve(f"{name}_std")
    low, high = minus(mean, deviation), [a + b for a, b in zip(mean, deviation, strict=True)]
    style.band(axes, run.x, low, high, colour)
    return finite([*low, *high])


def plot(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str, tag: str) -> None:
    """A curve over training: with dots where it has few points, thin where it has many."""
    axes.plot(x, y, color=colour, marker="o" if len(x) < 12 else None, linewidth=1.0 if len(x) > 100 else 1.5, gid=tag)


def times(pairs: list[Pair], eager: dict[int, float], method: str, clock: Clock, summary: Summary) -> Drawing:
    """Fig. 4: the forward pass layer by layer and in parallel, and how many times as fast it is."""
    loop = {"fused": "fused loop", "graph": "CUDA graph", "loop": "loop"}[method]
    figure, grid = style.canvas(2, extra=1.0)
    colours = style.ordered(pair.depth for pair in pairs)
    (left, right), (against_loop, against_eager) = grid
    every, ratios = [*eager.values()], []
    for pair in pairs:
        colour, (sequential, parallel) = colours[pair.depth], pair.modes.values()
        for axes, run in ((left, sequential), (right, parallel)):
            curve(axes, run, "forward_seconds", colour, spread=False)
            every += finite(run.curve("forward_seconds"))
        if pair.depth in eager:
            left.axhline(eager[pair.depth], color=colour, linestyle="--", gid=f"eager L={pair.depth}")
        mine = parallel.curve("forward_seconds")
        for axes, other in (
            (against_loop, sequential.curve("forward_seconds")),
            (against_eager, [eager.get(pair.depth, math.nan)] * len(mine)),
        ):
            ratio = over(other, mine)
            ratios += finite(ratio)
            plot(axes, parallel.x[: len(ratio)], ratio, colour, f"L={pair.depth}")
    style.panel_title(left, f"{loop} (eager: dashed)", method)
    style.panel_title(right, style.LABELS["parallel"], "parallel")
    style.panel_title(against_loop, f"DeepPCR over {loop}", "parallel")
    style.panel_title(against_eager, "DeepPCR over eager loop", "parallel")
    for axes in (left, right):
        style.decades(axes, every)
        axes.set_ylabel("time of a pass (s)")
    for axes in (against_loop, against_eager):
        axes.axhline(1, color=style.INK, linestyle=":", linewidth=1.2)
        style.decades(axes, ratios, also=[1.0])
        axes.set_ylabel("speed-up (×)")
    if not eager:
        style.remark(against_eager, "the eager loop was not timed")
    _along(grid, clock.label)
    style.legend(figure, colours, "depth L")
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
            f"L = {pair.depth:,}: {sequential} in the {loop}, {parallel} by DeepPCR, "
            f"{as_times(entry['speedup_over_fastest_loop'])}{also}"
        )
    return Drawing(
        "resnet-training-time",
        "Time of the forward pass during training",
        "fig. 4",
        "Median of a forward pass over the timed steps of the timed seeds. " + "; ".join(said) + ".",
        figure,
    )


def losses(pairs: list[Pair], clock: Clock, summary: Summary) -> Drawing:
    """Fig. 5: the loss of both trainings, and their difference."""
    said = []
    for depth in dict.fromkeys(pair.depth for pair in pairs):
        entry = summary[depth]
        ends = " and ".join(f"{end_loss(entry, mode)} ({style.LABELS[mode]})" for mode in MODES)
        apart = entry["loss_difference"]
        most = f", losses of a step differ by at most {style.plain(max(apart))}" if apart else ""
        said.append(f"L = {depth:,}: {ends}{most}")
    return Drawing(
        "resnet-training-loss",
        "Loss during training",
        "fig. 5",
        "Means over windows of steps, and one standard deviation. Loss at the end (mean of the last tenth of the points, ten at "
        f"most, and of all seeds, in nats): {'; '.join(said)}." + _stopped(pairs),
        _both(pairs, clock.label, lambda run: run.x, lambda run: run.curve("loss"), "loss", "loss (nats)"),
    )


def accuracies(pairs: list[Pair], clock: Clock, *, several: bool) -> Drawing:
    """The accuracy on the test images after every epoch."""

    def percent(run: Run) -> list[float]:
        return [100 * value for value in run.test_accuracy]

    ends = {
        mode: [finite(percent(pair.modes[mode]))[-1] for pair in pairs if finite(percent(pair.modes[mode]))]
        for mode in MODES
    }
    said = [f"{style.LABELS[mode]} {style.span(each, '.1f')}%" for mode, each in ends.items() if each]
    apart = [abs(value) for pair in pairs for value in finite(minus(*map(percent, pair.modes.values())))]
    most = ""
    if apart:
        most = (
            f"; after any epoch the two differ by at most {max(apart):.2g} points"
            if max(apart)
            else "; the two are equal after every epoch"
        )
    which = f"Seed {pairs[0].seed}. " if several else ""
    epochs: Callable[[Run], list[float]] = lambda run: [float(n) for n in range(1, len(run.test_accuracy) + 1)]  # noqa: E731
    return Drawing(
        "resnet-training-accuracy",
        "Accuracy on the test images",
        "fig. 15",
        f"{which}At the end of the training: {', '.join(said)}{most}.",
        _both(pairs, clock.label if clock.per_epoch else "tests", epochs, percent, None, "accuracy (%)"),
    )


def _both(
    pairs: list[Pair],
    x_label: str,
    x: Callable[[Run], list[float]],
    y: Callable[[Run], list[float]],
    spread: str | None,
    label: str,
) -> Any:
    """Sequential, DeepPCR, and the difference; the legend takes the fourth place."""
    figure, grid = style.canvas(2, extra=0.6)
    (left, right), (difference, place) = grid
    colours = style.ordered(pair.depth for pair in pairs)
    every: list[float] = []
    apart: list[float] = []
    for pair in pairs:
        colour = colours[pair.depth]
        for axes, run in zip((left, right), pair.modes.values(), strict=True):
            if spread is not None:
                every += curve(axes, run, spread, colour)
            else:
                plot(axes, x(run), y(run), colour, f"L={pair.depth}")
                every += finite(y(run))
        found = minus(*(y(run) for run in pair.modes.values()))
        apart += finite(found)
        where = x(pair.modes["parallel"])[: len(found)]
        plot(difference, where, found, colour, f"L={pair.depth}")
    for axes, mode in ((left, "sequential"), (right, "parallel")):
        style.panel_title(axes, style.LABELS[mode], mode)
        style.free(axes, every)
        axes.set_ylabel(label)
    style.panel_title(difference, "sequential − DeepPCR")
    style.free(difference, apart, also=[0.0])
    difference.set_ylabel("difference (nats)" if spread is not None else "difference (points)")
    for axes in (left, right, difference):
        axes.set_xlabel(x_label)
        if spread is None:  # a point an epoch
            axes.set_xlim(0.5, 0.5 + max(len(y(run)) for pair in pairs for run in pair.modes.values()))
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    style.legend(figure, colours, "depth L", place=place)
    return figure


def seeds(pairs: list[Pair], clock: Clock) -> Drawing:
    """Loss and accuracy from several seeds: the mean, and the span from the least to the most."""
    figure, grid = style.canvas(2, extra=1.0)
    colours = style.ordered(pair.depth for pair in pairs)
    every: tuple[list[float], list[float]] = ([], [])
    for column, mode in enumerate(MODES):
        above, below = grid[0][column], grid[1][column]
        for depth, colour in colours.items():
            runs = [pair.modes[mode] for pair in pairs if pair.depth == depth]
            longest = max(runs, key=lambda run: len(run.x))
            every[0].extend(_span(above, longest.x, [run.curve("loss") for run in runs], colour, depth))
            accuracy = [[100 * value for value in run.test_accuracy] for run in runs]
            epochs = [float(number) for number in range(1, max(map(len, accuracy)) + 1)]
            every[1].extend(_span(below, epochs, accuracy, colour, depth))
        style.panel_title(above, f"{style.LABELS[mode]}, loss", mode)
        style.panel_title(below, f"{style.LABELS[mode]}, test", mode)
        above.set_ylabel("loss (nats)")
        below.set_ylabel("accuracy (%)")
        above.set_xlabel(clock.label)
        below.set_xlabel("training (epochs)")
        below.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    for row, values in zip(grid, every, strict=True):
        for axes in row:
            style.free(axes, values)
    style.legend(figure, colours, "depth L")
    count = len({pair.seed for pair in pairs})
    said = []
    for mode in MODES:
        ends = [
            100 * finite(pair.modes[mode].test_accuracy)[-1] for pair in pairs if finite(pair.modes[mode].test_accuracy)
        ]
        if ends:
            said.append(f"{style.LABELS[mode]} {style.span(ends, '.1f')}%")
    return Drawing(
        "resnet-training-seeds",
        f"Loss and accuracy from {count} seeds",
        "fig. 16",
        f"Mean and span of {count} seeds. Test accuracy after the last epoch: {', '.join(said)}." + _stopped(pairs),
        figure,
    )


def _span(axes: Axes, x: list[float], curves: list[list[float]], colour: str, depth: int) -> list[float]:
    """The mean with the span of the curves that go as far; returns all that is drawn."""
    at = [finite([each[index] for each in curves if index < len(each)]) for index in range(len(x))]
    known = [(where, values) for where, values in zip(x, at, strict=True) if values]
    where = [where for where, _ in known]
    style.band(axes, where, [min(values) for _, values in known], [max(values) for _, values in known], colour)
    plot(axes, where, [fmean(values) for _, values in known], colour, f"L={depth}")
    return [value for _, values in known for value in values]


def newton(pairs: list[Pair], clock: Clock, summary: Summary) -> Drawing:
    """Fig. 8 right: iterations during training, and how far the parameters of the two trainings are apart."""
    figure, grid = style.canvas(1, extra=1.2)
    left, right = grid[0]
    colours = style.ordered(pair.depth for pair in pairs)
    counts, apart, equal = [], [], sum(value == 0 for pair in pairs for value in pair.distance)
    for pair in pairs:
        run, colour = pair.modes["parallel"], colours[pair.depth]
        counts += curve(left, run, "iterations", colour)
        longest = max(pair.modes.values(), key=lambda each: len(each.x)).x[: len(pair.distance)]
        distances = [value if value > 0 else math.nan for value in pair.distance][: len(longest)]
        plot(right, longest, distances, colour, f"L={pair.depth}")
        apart += finite(distances)
    style.panel_title(left, "Newton iterations", "parallel")
    style.panel_title(right, "sequential − DeepPCR")
    style.free(left, counts, also=[0.0])
    style.decades(right, apart)
    left.set_ylabel("iterations (mean)")
    right.set_ylabel("parameters (max-norm)")
    _along(grid, clock.label)
    style.legend(figure, colours, "depth L")
    said = []
    for pair in pairs:
        entry = summary[pair.depth]
        ends = finite([style.number(value) for value in entry["parameter_distance"]])
        if entry["iterations"] and ends:
            said.append(
                f"L = {pair.depth:,}: {fmean(entry['iterations']):.1f} iterations, parameters at most "
                f"{style.plain(max(ends))} apart at the end"
            )
    unseen = f" Equal at {equal} points, which a log axis does not show." if equal else ""
    return Drawing(
        "resnet-training-newton",
        "Newton's method during training",
        "fig. 8 right",
        "Iterations of a forward pass (means over windows of steps, and one standard deviation), and the largest difference of "
        f"a parameter to the sequential training, drawn from seed {pairs[0].seed}. The mean and the largest of all seeds: "
        + "; ".join(said)
        + "."
        + unseen,
        figure,
    )


def _along(grid: list[list[Axes]], label: str) -> None:
    for row in grid:
        for axes in row:
            axes.set_xlabel(label)


def _stopped(pairs: list[Pair]) -> str:
    gone = [
        f"L = {pair.depth:,}, seed {pair.seed}, {style.LABELS[mode]} at step {run.diverged}"
        for pair in pairs
        for mode, run in pair.modes.items()
        if run.diverged is not None
    ]
    return f" Diverged: {'; '.join(gone)}." if gone else ""
