"""``mlp-gain``: Newton iterations against the gain of the weights, and the largest Lyapunov exponent of the layers."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..mlp_gain import MARKS, mean_exponent, mean_iterations, summarise
from . import style
from .drawing import Drawing

Record = dict[str, Any]

#: In the records, and in the style.
SOLVERS = {"paper": "printed", "default": "auto"}


def left(record: Record, solver: str) -> bool:
    """Some network of the cell was left to the loop, or its states overflow."""
    return any(result != "CONVERGED" for result in record[solver]["results"])


def draw(result: dict[str, Any]) -> list[Drawing]:
    records: list[Record] = result["records"]
    activations = dict.fromkeys(record["activation"] for record in records)
    return [by_activation([r for r in records if r["activation"] == name], name) for name in activations]


def by_activation(records: list[Record], activation: str) -> Drawing:
    """Iterations of the paper's method and of the defaults against the gain; the exponent; the iterations against it."""
    figure, grid = style.canvas(2, extra=1.0)
    (printed, auto), (growth, both) = grid
    colours = style.ordered(record["L"] for record in records)
    gains = sorted({record["gain"] for record in records})
    counts = [count for record in records for solver in SOLVERS if (count := mean_iterations(record, solver))]
    for axes, (solver, method) in zip((printed, auto), SOLVERS.items(), strict=True):
        style.panel_title(axes, style.LABELS[method], method)
        style.lines(axes, records, "gain", "L", colours, lambda record, solver=solver: mean_iterations(record, solver))
        _crosses(axes, records, solver, colours)
    exponents = [value for record in records if (value := mean_exponent(record)) is not None]
    style.panel_title(growth, "Lyapunov exponent")
    style.lines(growth, records, "gain", "L", colours, mean_exponent)
    growth.axhline(0, color=style.INK, linestyle=":", linewidth=1.2)
    style.free(growth, exponents, also=[0.0])
    growth.set_ylabel("exponent (per layer)")
    _marks(growth, activation, records, gains)
    for axes in (printed, auto, growth):
        _gains(axes, gains)
    style.panel_title(both, "iterations by exponent", "printed")
    for depth, colour in colours.items():
        points = [(mean_exponent(r), mean_iterations(r, "paper")) for r in records if r["L"] == depth]
        known = sorted((x, y) for x, y in points if x is not None and y is not None)
        if known:
            x, y = zip(*known, strict=True)
            both.plot(x, y, color=colour, marker="o", linestyle="none", markersize=4, gid=f"L={depth}")
    both.axvline(0, color=style.INK, linestyle=":", linewidth=1.2)
    both.set_xlabel("exponent (per layer)")
    for axes in (printed, auto, both):
        style.decades(axes, counts)
        axes.set_ylabel("iterations (mean)")
        if not axes.lines:
            style.remark(axes, "none converged")
    style.legend(figure, colours, "depth L")
    return Drawing(
        f"mlp-gain-{activation}",
        f"Iterations by the gain of the weights, {style.activation(activation)}",
        "not in it; extends section 4.4",
        caption(records),
        figure,
    )


def _crosses(axes: Axes, records: list[Record], solver: str, colours: dict[int, str]) -> None:
    """At the upper edge, a row a depth: cells that did not converge have no honest height."""
    for row, (depth, colour) in enumerate(reversed(colours.items())):
        gone = [record["gain"] for record in records if record["L"] == depth and left(record, solver)]
        if gone:
            heights, where = [0.95 - 0.06 * row] * len(gone), axes.get_xaxis_transform()
            look = {"linestyle": "none", "marker": "x", "markersize": 5, "gid": f"not converged L={depth}"}
            axes.plot(gone, heights, color=colour, transform=where, **look)


def _gains(axes: Axes, gains: list[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(gains[0] / 1.1, gains[-1] * 1.1)
    exponents = range(math.floor(math.log2(gains[0])), math.ceil(math.log2(gains[-1])) + 1)
    ticks = [2.0**k for k in exponents] if len(gains) > 1 else gains
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.plain(value)))
    axes.set_xlabel("gain of the weights (×)")


def _marks(axes: Axes, activation: str, records: list[Record], gains: list[float]) -> None:
    """The gains that have a name, upright along their lines, above or below the curve."""
    middle = sum(axes.get_ylim()) / 2
    for name, gain in MARKS.get(activation, {}).items():
        if gains[0] <= gain <= gains[-1]:
            axes.axvline(gain, color=style.INK, linewidth=0.8, linestyle="--", gid=f"mark {name}")
            known = [(abs(r["gain"] - gain), value) for r in records if (value := mean_exponent(r)) is not None]
            high = bool(known) and min(known)[1] < middle
            where = {"rotation": 90, "ha": "right", "va": "top" if high else "bottom", "fontsize": 8.5}
            axes.text(gain, 0.96 if high else 0.04, f"{name} ", transform=axes.get_xaxis_transform(), **where)


def caption(records: list[Record]) -> str:
    (entry,) = summarise(records)
    said, deepest, worst = [], entry["deepest"], entry["worst"]
    if entry["most_iterations_at_default"] is not None:
        said.append(
            f"With PyTorch's default (gain 1) at most {entry['most_iterations_at_default']} iterations at every depth."
        )
    if worst is not None:
        depths, means = zip(*worst["mean_iterations_by_depth"].items(), strict=True)
        exponent = f" (exponent {style.signed(worst['exponent'])})" if worst["exponent"] is not None else ""
        said.append(
            f"The most of {style.LABELS['printed']} at gain {worst['gain']:g}{exponent}: in the mean over networks "
            f"{style.listed(f'{mean:.0f}' for mean in means)} iterations at L = {style.listed(depths)}, "
            f"the largest {worst['most_iterations']}."
        )
    if entry["positive_from_gain"] is not None:
        said.append(f"The layers amplify errors (positive exponent) from gain {entry['positive_from_gain']:g} on.")
    else:
        said.append("The exponent is negative at every gain.")
    if entry["overflow_from_gain"] is not None:
        said.append(f"At L = {deepest:,} the states overflow from gain {entry['overflow_from_gain']:g} on.")
    crossed = {method: sum(left(record, solver) for record in records) for solver, method in SOLVERS.items()}
    each = [f"{style.LABELS[method]} in {style.cells(count)}" for method, count in crossed.items() if count]
    if each:
        said.append(f"Left to the loop, or overflowing (crosses): {', '.join(each)}.")
    return " ".join(said)
