"""``mlp-timing`` over widths: where w²L becomes too much for the time to be that of log L."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap

from ..mlp_summary import SLOWED, threshold
from ..mlp_summary import seconds as time_of
from . import style
from .drawing import Drawing

Record = dict[str, Any]

#: Slow-down over the smallest width, in steps of colour.
LEVELS = (SLOWED, 4.0, 8.0, 16.0, 32.0, 64.0)


def over_widths(records: list[Record], activation: str, way: str = "forward") -> Drawing | None:
    """Time against width, the speed-up, and maps of the slow-down; None where there are not two widths to compare."""
    columns = [c for c in ("loop", "printed", "auto") if any(time_of(r, way, c) for r in records)]
    widths, depths = ([*sorted({record[key] for record in records})] for key in ("w", "L"))
    parallel = [column for column in columns if column != "loop"]
    if len(widths) < 2 or not parallel:
        return None
    limits = {column: threshold(records, way, column) for column in parallel}
    colours = style.ordered(depths)
    panels = [*columns, *(["ratio"] if columns[0] == "loop" and "printed" in columns else [])]
    rows = math.ceil(len(panels) / 2)
    figure, grid = style.canvas(rows + 1, extra=1.3)
    places = [axes for row in grid[:rows] for axes in row]
    every = [time for record in records for column in columns if (time := time_of(record, way, column))]
    dotted = False
    for axes, panel in zip(places, panels, strict=False):
        axes.set_xlabel("width w (units)")
        style.powers_of_two(axes, widths)
        if panel == "ratio":
            dotted = _ratio(axes, records, way, colours, limits["printed"]["w2L"])
            continue
        style.panel_title(axes, style.LABELS[panel], panel)
        style.lines(axes, records, "w", "L", colours, lambda record, panel=panel: time_of(record, way, panel))
        style.decades(axes, every)
        axes.set_ylabel("time (s)")
    spare = places[len(panels) :]
    for axes, column in zip(grid[rows], parallel, strict=False):
        _map(axes, records, way, column, widths, depths, limits[column])
    spare += grid[rows][len(parallel) :]
    colour_bar = figure.colorbar(
        _shades()[2],
        ax=grid[rows],
        location="bottom",
        extend="both",
        aspect=40,
        label="time over that of the smallest width (×)",
    )
    colour_bar.set_ticks([*LEVELS], labels=[style.plain(level) for level in LEVELS])
    colour_bar.outline.set_linewidth(0.7)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    style.legend(figure, colours, "depth L", place=spare.pop(0) if spare else None, most=7)
    for axes in spare:
        axes.set_axis_off()
    return Drawing(
        f"mlp-timing-{activation}-{way}-width",
        f"{way.capitalize()} pass over widths, {style.activation(activation)}",
        "fig. 11",
        caption(limits, dotted=dotted),
        figure,
    )


def _ratio(axes: Axes, records: list[Record], way: str, colours: dict[Any, str], limit: float | None) -> bool:
    """The speed-up of the paper's method against width; returns whether the line on which w²L is the limit goes through it."""
    found: dict[int, dict[int, float]] = {}
    for record in records:
        mine, loop = time_of(record, way, "printed"), time_of(record, way, "loop")
        if mine and loop:
            found.setdefault(record["L"], {})[record["w"]] = loop / mine
    style.panel_title(axes, "printed over eager loop", "printed")
    style.lines(axes, records, "w", "L", colours, lambda record: found.get(record["L"], {}).get(record["w"]))
    line = isoline(found, limit) if limit else []
    if len(line) > 1:
        x, y = [width for width, _ in line], [ratio for _, ratio in line]
        axes.plot(x, y, linestyle=":", color=style.INK, linewidth=2, zorder=3, gid="isoline")
    axes.axhline(1, color=style.INK, linewidth=0.8)
    style.decades(axes, [ratio for each in found.values() for ratio in each.values()], also=[1.0])
    axes.set_ylabel("speed-up (×)")
    return len(line) > 1


def isoline(ratios: dict[int, dict[int, float]], limit: float) -> list[tuple[float, float]]:
    """Where each depth's curve has w²L = limit: width and ratio, read off between measured widths on log axes."""
    found = []
    for depth, by_width in ratios.items():
        width = math.sqrt(limit / depth)
        below = [each for each in by_width if each <= width]
        above = [each for each in by_width if each >= width]
        if not below or not above:
            continue
        low, high = max(below), min(above)
        part = 0.0 if low == high else math.log(width / low) / math.log(high / low)
        found.append((width, by_width[low] ** (1 - part) * by_width[high] ** part))
    return sorted(found)


def _shades() -> tuple[ListedColormap, BoundaryNorm, ScalarMappable]:
    shades = colormaps["cividis_r"]
    count = len(LEVELS) + 1
    colours = ListedColormap([shades(0.15 + 0.85 * number / (count - 1)) for number in range(count)])
    norm = BoundaryNorm(LEVELS, count, extend="both")
    return colours, norm, ScalarMappable(norm, colours)


def _map(
    axes: Axes,
    records: list[Record],
    way: str,
    column: str,
    widths: list[int],
    depths: list[int],
    limit: dict[str, Any],
) -> None:
    """The slow-down of every cell; a cell that was not timed stays empty."""
    times = {(record["L"], record["w"]): time_of(record, way, column) for record in records}
    slow = [[math.nan] * len(widths) for _ in depths]
    for row, depth in enumerate(depths):
        known = {width: time for width in widths if (time := times.get((depth, width)))}
        for width, time in known.items():
            slow[row][widths.index(width)] = time / known[min(known)]
    colours, norm, _ = _shades()
    axes.grid(False)
    axes.pcolormesh(_edges(widths), _edges(depths), slow, cmap=colours, norm=norm, linewidth=0, gid=f"map {column}")
    style.panel_title(axes, f"slow-down, {'printed' if column == 'printed' else 'defaults'}", column)
    style.powers_of_two(axes, widths)
    style.powers_of_two(axes, depths, which="y")
    axes.set_xlabel("width w (units)")
    axes.set_ylabel("depth L (layers)")
    axes.set_xlim(_edges(widths)[0], _edges(widths)[-1])
    axes.set_ylim(_edges(depths)[0], _edges(depths)[-1])
    if limit["widths"]:
        along = sorted(limit["widths"].items())
        axes.plot([w for _, w in along], [depth for depth, _ in along], color="#d55e00", linestyle="--", gid="isoline")
    elif limit["w2L"]:
        ends = [_edges(widths)[0], _edges(widths)[-1]]
        axes.plot(ends, [limit["w2L"] / end**2 for end in ends], color="#d55e00", linestyle="--", gid="isoline")


def _edges(values: list[int]) -> list[float]:
    """Borders of cells around the values, half-way between them on a log axis."""
    if len(values) == 1:
        return [values[0] / math.sqrt(2), values[0] * math.sqrt(2)]
    inner = [math.sqrt(one * other) for one, other in pairwise(values)]
    return [values[0] ** 2 / inner[0], *inner, values[-1] ** 2 / inner[-1]]


def limit_in_words(limit: dict[str, Any]) -> str:
    """What ``threshold`` found: a size, or the widths where these vary less."""
    if limit["widths"]:
        (low, first), *_, (high, last) = sorted(limit["widths"].items())
        return f"w ≈ {first:.0f} (L = {low:,}) to {last:.0f} (L = {high:,})"
    return f"w²L ≈ {style.plain(limit['w2L'])}"


def caption(limits: dict[str, dict[str, Any]], *, dotted: bool) -> str:
    said = [
        f"from {limit_in_words(limit)} on for {style.LABELS[column]}"
        if limit["w2L"]
        else f"nowhere on this grid for {style.LABELS[column]}"
        for column, limit in limits.items()
    ]
    drawn = "; dashed in the maps" if any(limit["w2L"] for limit in limits.values()) else ""
    if dotted:
        drawn += ", dotted in the speed-up"
    slow = f"A pass takes {SLOWED:g} times as long as at the smallest width"
    return f"{slow} {', '.join(said)} (w²L: median over depths){drawn}."
