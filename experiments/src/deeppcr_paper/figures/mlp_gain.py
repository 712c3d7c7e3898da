"""``mlp-gain``: Newton iterations against the gain of the weights, and the largest Lyapunov exponent of the layers."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from ..mlp_gain import MARKS, mean_exponent, mean_iterations, summarise
from . import style
from .drawing import Drawing
from .panels import binary, describe, guide, legend, lines, panels, remark, same_y

Record = dict[str, Any]

#: In the records, and in the style.
SOLVERS = {"paper": "printed", "default": "auto"}


def left(record: Record, solver: str) -> bool:
    """Some network of the cell was left to the loop, or its states overflow."""
    return any(result != "CONVERGED" for result in record[solver]["results"])


def draw(result: dict[str, Any]) -> list[Drawing]:
    return [by_activation(mine, name) for name, mine in style.grouped(result["records"], "activation").items()]


def by_activation(records: list[Record], activation: str) -> Drawing:
    """Iterations of the paper's method and of the defaults against the gain; the exponent; the iterations against it."""
    figure, (printed, auto, growth, both) = panels(4)
    colours = style.ordered(record["L"] for record in records)
    exponents = [mean_exponent(record) for record in records]
    counts = {solver: [mean_iterations(record, solver) for record in records] for solver in SOLVERS}
    for axes, (solver, method) in zip((printed, auto), SOLVERS.items(), strict=True):
        describe(axes, style.LABELS[method], "gain of the weights (×)", "iterations (mean)", method)
        lines(axes, records, counts[solver], colours, x="gain", group="L", otherwise="none converged")
        _crosses(axes, records, solver, colours)
    describe(growth, "Lyapunov exponent", "gain of the weights (×)", "exponent (per layer)")
    lines(growth, records, exponents, colours, x="gain", group="L", otherwise="unknown")
    guide(growth, 0)
    _marks(growth, activation, records)
    describe(both, "iterations by exponent", "exponent (per layer)", "iterations (mean)", "printed")
    for depth, colour in colours.items():
        points = [
            (x, y)
            for record, x, y in zip(records, exponents, counts["paper"], strict=True)
            if record["L"] == depth and x is not None and y is not None
        ]
        if points:
            both.plot(*zip(*sorted(points), strict=True), "o", color=colour, markersize=4, gid=f"L={depth}")
    if not both.lines:
        remark(both, "none converged")
    both.axvline(0, color=style.INK, linestyle=":", linewidth=1.2)
    for axes in (printed, auto, growth):
        binary(axes, style.plain)
    same_y([printed, auto, both], log=True)
    legend(figure, colours, "depth L")
    title = f"Iterations by the gain of the weights, {style.activation(activation)}"
    return Drawing(f"mlp-gain-{activation}", title, "not in it; extends section 4.4", caption(records), figure)


def _crosses(axes: Axes, records: list[Record], solver: str, colours: dict[int, str]) -> None:
    """At the upper edge, a row a depth: cells that did not converge have no honest height."""
    for row, (depth, colour) in enumerate(reversed(colours.items())):
        gone = [record["gain"] for record in records if record["L"] == depth and left(record, solver)]
        heights, where = [0.95 - 0.06 * row] * len(gone), axes.get_xaxis_transform()
        axes.plot(gone, heights, "x", color=colour, transform=where, markersize=5, gid=f"not converged L={depth}")


def _marks(axes: Axes, activation: str, records: list[Record]) -> None:
    """The gains that have a name, upright along their lines, above or below the curve."""
    gains = [record["gain"] for record in records]
    middle = sum(axes.get_ylim()) / 2
    for name, gain in MARKS.get(activation, {}).items():
        if min(gains) <= gain <= max(gains):
            axes.axvline(gain, color=style.INK, linewidth=0.8, linestyle="--", gid=f"mark {name}")
            known = [(abs(r["gain"] - gain), value) for r in records if (value := mean_exponent(r)) is not None]
            high = bool(known) and min(known)[1] < middle
            where = {"rotation": 90, "ha": "right", "va": "top" if high else "bottom", "fontsize": 8.5}
            low, top = axes.get_ylim()
            # Below the dotted line at zero, which else goes through the letters.
            height = min(0.96, (0 - low) / (top - low) - 0.02) if high else 0.04
            axes.text(gain, height, f"{name} ", transform=axes.get_xaxis_transform(), **where)


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
