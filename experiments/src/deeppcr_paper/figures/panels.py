"""What all figures are made of: panels two side by side, their axes and lines, and a legend. Made to be read on a phone."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from .style import COLOURS, INK, plain, power

WIDTH, ROW = 5.8, 2.3  # inches of a figure and of a row of panels, for 10 pt letters


def panels(count: int, columns: int = 2) -> tuple[Canvas, list[Axes]]:
    """A figure and its panels, row by row; a place of the grid that is left over is for the legend."""
    rows, columns = math.ceil(count / columns), min(count, columns)
    figure = Canvas(figsize=(WIDTH, 0.1 + rows * ROW), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in grid[count:]:
        spare.set_axis_off()
    return figure, grid[:count]


def describe(axes: Axes, title: str, x: str, y: str, method: str | None = None) -> None:
    """What a panel shows and what its axes are; a bar above it in the method's colour."""
    axes.set(title=title, xlabel=x, ylabel=y)
    if method is not None:
        axes.spines["top"].set(color=COLOURS[method], linewidth=3)


def legend(figure: Canvas, colours: dict[Any, str], title: str = "", *, across: int = 6, place: str = "upper") -> None:
    """Colours and what they stand for: where the grid has a free place, else above or below the panels."""
    # Numbers as they stand in the text and on the command line; powers of two are for the ticks of an axis.
    names = [f"{name:,}" if isinstance(name, (int, float)) else name for name in colours]
    handles = [Line2D([], [], color=colour, linewidth=2.5) for colour in colours.values()]
    free = [axes for axes in figure.axes if not axes.axison]
    if free:
        free[0].legend(handles, names, title=title, ncols=2 if len(names) > 5 else 1, loc="center", borderaxespad=0)
        return
    rows = math.ceil(len(names) / across)
    figure.set_figheight(figure.get_figheight() + 0.22 * (rows + bool(title)) + 0.15)
    where: Any = f"outside {place} center"
    figure.legend(handles, names, title=title, ncols=math.ceil(len(names) / rows), loc=where)


def lines(
    axes: Axes,
    records: Iterable[dict[str, Any]],
    values: Iterable[float | None],
    colours: dict[Any, str],
    *,
    x: str = "L",
    group: str = "w",
    otherwise: str = "not timed",
) -> None:
    """A line for each colour's ``group`` over ``x``, a log axis; broken where there is no value.

    Args:
        values: of the records, one each
        otherwise: what the panel says where there is no value at all
    """
    found: dict[Any, dict[float, float]] = {key: {} for key in colours}
    for record, value in zip(records, values, strict=True):
        found[record[group]][record[x]] = math.nan if value is None else value
    for key, points in found.items():
        where = sorted(points)
        heights = [points[each] for each in where]
        axes.plot(where, heights, color=colours[key], marker="o", gid=f"{group}={key}")
    binary(axes)
    if all(math.isnan(value) for points in found.values() for value in points.values()):
        remark(axes, otherwise)


def band(axes: Axes, x: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str) -> None:
    axes.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0)


def guide(axes: Axes, height: float) -> None:
    """A dotted line across the panel, to compare with."""
    axes.axhline(height, linestyle=":", color=INK, linewidth=1.2, zorder=1.5, gid="guide")


def remark(axes: Axes, text: str) -> None:
    """What a panel without data says."""
    axes.text(0.5, 0.5, textwrap.fill(text, 26), transform=axes.transAxes, ha="center", va="center", fontsize=9)


def binary(axes: Axes, form: Callable[[float], str] = lambda value: power(value, 2), which: str = "x") -> None:
    """A log axis with a tick at every power of two; as many with numbers as there is room for."""
    axis, set_scale = (axes.xaxis, axes.set_xscale) if which == "x" else (axes.yaxis, axes.set_yscale)
    set_scale("log", base=2)
    axis.set_minor_locator(LogLocator(base=2, numticks=99))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(lambda value, _: form(value))


def same_y(places: Sequence[Axes], *, log: bool = False, zero: bool = False) -> None:
    """One y-axis for panels that are compared, around all that they show.

    Args:
        log: with ticks at powers of ten, or at numbers between them where there are few
        zero: it begins there
    """
    first, *others = places
    for axes in others:
        axes.sharey(first)
    log = log and any(math.isfinite(axes.dataLim.minposy) for axes in places)  # else nothing has a place on it
    if log:
        first.set_yscale("log")
    first.autoscale(axis="y")
    if zero:
        # Room above in parts of all that is shown, not of how far the values are apart: those at the top stay clear of the bar.
        tops = [
            1.08 * axes.dataLim.ymax for axes in places if math.isfinite(axes.dataLim.ymax)
        ]  # of panels that are not empty
        first.set_ylim(0, max([first.get_ylim()[1], *tops]))
    low, high = first.get_ylim()
    if log:
        ratio = high / low
        between = (1, 1.5, 2, 3, 4, 6, 8) if ratio < 5 else (1, 2, 5) if ratio < 150 else (1,)
        first.yaxis.set_major_locator(LogLocator(subs=between))
        first.yaxis.set_minor_locator(NullLocator())
        as_power = ratio >= 150 and (low < 1e-3 or high > 1e4)
        first.yaxis.set_major_formatter(lambda value, _: power(value, 10) if as_power else plain(value, 6))
    elif max(-low, high) < 1e-3:
        first.yaxis.set_major_formatter(lambda value, _: plain(value, 6))
