"""``mlp-timing`` over widths: where w²L becomes too much for the time to be that of log L."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import BoundaryNorm, ListedColormap

from ..mlp_summary import SLOWED, speedup, threshold
from ..mlp_summary import seconds as time_of
from . import style
from .drawing import Drawing
from .panels import binary, describe, legend, lines, panels, same_y

Record = dict[str, Any]

#: Slow-down over the smallest width, in steps of colour.
LEVELS = (SLOWED, 4.0, 8.0, 16.0, 32.0, 64.0)


def over_widths(records: list[Record], activation: str, way: str = "forward") -> Drawing | None:
    """Time against width, the speed-up, and maps of the slow-down; None where there are not two widths to compare."""
    columns = [c for c in ("loop", "printed", "auto") if any(time_of(r, way, c) for r in records)]
    parallel = [column for column in columns if column != "loop"]
    if len({record["w"] for record in records}) < 2 or not parallel:
        return None
    limits = {column: threshold(records, way, column) for column in parallel}
    colours = style.ordered(record["L"] for record in records)
    compared = {"loop", "printed"} <= {*columns}
    upper = 2 * math.ceil((len(columns) + compared) / 2)
    figure, places = panels(upper + 2)
    for axes, column in zip(places, columns, strict=False):
        describe(axes, style.LABELS[column], "width w (units)", "time (s)", column)
        lines(axes, records, [time_of(record, way, column) for record in records], colours, x="w", group="L")
    same_y(places[: len(columns)], log=True)
    dotted = compared and _ratio(places[len(columns)], records, way, colours, limits["printed"]["w2L"])
    maps = places[upper : upper + len(parallel)]
    shades = [_map(axes, records, way, *each) for axes, each in zip(maps, limits.items(), strict=True)]
    bar = figure.colorbar(shades[0], ax=maps, location="bottom", aspect=40, format=lambda level, _: style.plain(level))
    bar.set_label("time over that of the smallest width (×)")
    for axes in (*places[len(columns) + compared : upper], *places[upper + len(parallel) :]):
        axes.set_axis_off()
    legend(figure, colours, "depth L", across=7)
    title = f"{way.capitalize()} pass over widths, {style.activation(activation)}"
    return Drawing(f"mlp-timing-{activation}-{way}-width", title, "fig. 11", caption(limits, dotted=dotted), figure)


def _ratio(axes: Axes, records: list[Record], way: str, colours: dict[Any, str], limit: float | None) -> bool:
    """The speed-up of the paper's method against width; returns whether the line on which w²L is the limit goes through it."""
    ratios = [speedup(record, way, "printed", "loop") for record in records]
    describe(axes, "printed over eager loop", "width w (units)", "speed-up (×)", "printed")
    lines(axes, records, ratios, colours, x="w", group="L")
    found: dict[int, dict[int, float]] = {}
    for record, ratio in zip(records, ratios, strict=True):
        if ratio:
            found.setdefault(record["L"], {})[record["w"]] = ratio
    line = isoline(found, limit) if limit else []
    if len(line) > 1:
        axes.plot(*zip(*line, strict=True), linestyle=":", color=style.INK, linewidth=2, zorder=3, gid="isoline")
    axes.axhline(1, color=style.INK, linewidth=0.8)
    same_y([axes], log=True)
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


def _map(axes: Axes, records: list[Record], way: str, column: str, limit: dict[str, Any]) -> QuadMesh:
    """The slow-down of every cell; a cell that was not timed stays empty."""
    widths, depths = (sorted({record[key] for record in records}) for key in ("w", "L"))
    times = {(record["L"], record["w"]): time_of(record, way, column) or math.nan for record in records}
    slow = []
    for depth in depths:
        row = [times.get((depth, width), math.nan) for width in widths]
        least = next(iter(style.finite(row)), math.nan)  # of the smallest width that was timed
        slow.append([time / least for time in row])
    across, up = _edges(widths), _edges(depths)
    steps = len(LEVELS) + 1
    colours = ListedColormap(colormaps["cividis_r"](np.linspace(0.15, 1, steps)))
    norm = BoundaryNorm(LEVELS, steps, extend="both")
    axes.grid(False)
    shades = axes.pcolormesh(across, up, slow, cmap=colours, norm=norm, linewidth=0)
    name = "printed" if column == "printed" else "defaults"
    describe(axes, f"slow-down, {name}", "width w (units)", "depth L (layers)", column)
    dashed: dict[str, Any] = {"color": style.VERMILION, "linestyle": "--", "gid": "isoline"}
    if limit["widths"]:
        along = sorted(limit["widths"].items())
        axes.plot([width for _, width in along], [depth for depth, _ in along], **dashed)
    elif limit["w2L"]:
        axes.plot([across[0], across[-1]], [limit["w2L"] / end**2 for end in (across[0], across[-1])], **dashed)
    binary(axes)
    binary(axes, which="y")
    axes.set(xlim=(across[0], across[-1]), ylim=(up[0], up[-1]))
    return shades


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
