"""``mlp-timing``: time and speed-up over depths (fig. 3 and its kin)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import chain, zip_longest
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ..mlp_summary import best_speedup, break_even, speedup
from ..mlp_summary import seconds as time_of
from ..table import times as as_times
from . import style
from .drawing import Drawing
from .mlp_width import over_widths
from .panels import describe, guide, legend, lines, panels, same_y

Record = dict[str, Any]

_PAPER = {"relu": "fig. 3", "tanh": "fig. 9", "sigmoid": "fig. 10"}
_SHORT = {"printed": "as printed", "printed graph": "in a CUDA graph", "auto": "defaults"}
#: What is compared with; "fastest" stands for whichever loop took least in a cell.
_OVER = {"loop": "eager loop", "fastest": "fastest loop"}


def draw(result: dict[str, Any]) -> list[Drawing]:
    found: list[Drawing | None] = []
    for activation, mine in style.grouped(result["records"], "activation").items():
        found += [over_depths(mine, activation, way, result["experiment"]) for way in ("forward", "backward")]
        found.append(over_widths(mine, activation) if result["experiment"] == "mlp-timing" else None)
    return [drawing for drawing in found if drawing is not None]


def over_depths(records: list[Record], activation: str, way: str, experiment: str = "mlp-timing") -> Drawing | None:
    """Time against depth, loops on the left and DeepPCR on the right; below, how many times as fast DeepPCR is."""
    if not any(time_of(record, way, column) for record in records for column in record.get(way, {})):
        return None
    tried = {column for record in records for column in record.get(way, {})}
    loops, parallel = ([column for column in kind if column in tried] for kind in (style.SEQUENTIAL, _SHORT))
    overs = ["loop"] if loops == ["loop"] else ["loop", "fastest"]
    rows = max(len(loops), len(parallel))
    figure, places = panels(2 * (rows + len(overs)))
    colours = style.ordered(record["w"] for record in records)
    shown = _placed(places[: 2 * rows], chain(*zip_longest(loops, parallel)))
    for column, axes in shown.items():
        describe(axes, style.LABELS[column], "depth L (layers)", "time (s)", column)
        times = [time_of(record, way, column) for record in records]
        lines(axes, records, times, colours, otherwise=why_not(records, way, column))
        _law(axes, records, times, column)
    same_y([*shown.values()], log=True)
    for row, over in enumerate(overs, rows):
        shown = _placed(places[2 * row : 2 * row + 2], parallel)
        for column, axes in shown.items():
            short = _SHORT[column].replace("CUDA ", "")  # the panel is not wide enough for more
            describe(axes, f"{short} over {_OVER[over]}", "depth L (layers)", "speed-up (×)", column)
            ratios = [speedup(record, way, column, over) for record in records]
            lines(axes, records, ratios, colours, otherwise="not timed on both sides")
            guide(axes, 1)
        same_y([*shown.values()], log=True)
    legend(figure, colours, "width w")
    name, paper = f"{experiment}-{activation}-{way}", _PAPER.get(activation, "fig. 3")
    title = f"{way.capitalize()} pass, {style.activation(activation)}"
    title += ", in plain PyTorch" if experiment == "mlp-printed" else ""
    return Drawing(name, title, paper, caption(records, way, overs, parallel), figure)


def _placed(places: Iterable[Axes], columns: Iterable[str | None]) -> dict[str, Axes]:
    """The panel of every column; one that no column takes is left free."""
    found = {}
    for axes, column in zip_longest(places, columns):
        if column is None:
            axes.set_axis_off()
        else:
            found[column] = axes
    return found


def _law(axes: Axes, records: list[Record], values: list[float | None], column: str) -> None:
    """The law that the paper expects, just below the curves: proportional to L for loops, to log L for DeepPCR."""
    known = [(record["L"], time) for record, time in zip(records, values, strict=True) if time and record["L"] >= 2]
    depths = sorted({depth for depth, _ in known})
    if len(depths) < 2:
        return
    name, law = ("∝ L", float) if column in style.SEQUENTIAL else ("∝ log L", math.log2)
    scale = 0.6 * min(time / law(depth) for depth, time in known)
    heights = [scale * law(depth) for depth in depths]
    # An artist only: the axis has room for its name, but need not hold all of it.
    axes.add_artist(Line2D(depths, heights, linestyle=":", color=style.INK, linewidth=1.2, gid="guide"))
    named = depths[2 * len(depths) // 3], heights[2 * len(depths) // 3]
    axes.annotate(name, named, xytext=(3, -3), textcoords="offset points", va="top", fontsize=9)
    axes.update_datalim([(named[0], 0.3 * named[1])])


def why_not(records: list[Record], way: str, column: str) -> str:
    reasons = Counter(record.get(way, {}).get(column, {}).get("status", "not tried") for record in records)
    return f"not timed: {reasons.most_common(1)[0][0]}"


def caption(records: list[Record], way: str, overs: list[str], parallel: list[str]) -> str:
    """The best speed-ups, the depths from which on there is one, and how much is missing."""
    said = []
    for over in overs:
        known = {column: depths for column in parallel if (depths := _even_depths(records, way, column, over))}
        if known:
            best = {column: found for column in known if (found := best_speedup(records, way, column, over))}
            each = [
                f"{as_times(ratio)} {_SHORT[c].replace('defaults', 'with the defaults')} (L = {at['L']:,}, w = {at['w']:,})"
                for c, (ratio, at) in best.items()
            ]
            even = [f"{_SHORT[c]} {_ahead(depths, records)}" for c, depths in known.items()]
            most = f"at best {' and '.join(each)}" if each else "no size is timed calmly"
            said.append(f"Over the {_OVER[over]} {most}; {', '.join(even)}.")
    holes: dict[str, list[Record]] = {}
    for record in records:
        for column, entry in record.get(way, {}).items():
            if not entry.get("seconds"):
                holes.setdefault(column, []).append(entry)
    if holes:
        each = [
            f"{style.LABELS.get(column, column)} in {style.cells(len(entries))}{_reasons(entries)}"
            for column, entries in holes.items()
        ]
        said.append(f"Not timed: {', '.join(each)}.")
    return " ".join(said)


def _reasons(entries: list[Record]) -> str:
    """Why cells were not timed: results that failed their check first."""
    wrong = [entry["error"] for entry in entries if str(entry.get("status")).startswith("differs")]
    said = [f"{len(wrong)} gave a result that is off by up to {100 * max(wrong):.2g}%"] if wrong else []
    full = sum(entry.get("status") == "out of memory" for entry in entries)
    long = sum(str(entry.get("status")).startswith("not timed") for entry in entries)
    rest = len(entries) - len(wrong) - full - long
    reasons = {"ran out of memory": full, "would have taken too long": long, "failed": rest}
    said += [f"{count} {reason}" for reason, count in reasons.items() if count]
    return f" ({', '.join(said)})"


def _ahead(depths: list[float | None], records: list[Record]) -> str:
    """From which depths on, of all widths; one between measured depths is not known to more than two digits."""
    known = sorted(depth for depth in depths if depth is not None)
    if not known:
        return "nowhere ahead"
    some = "" if len(known) == len(depths) else f" at {len(known)} of {len(depths)} widths"
    if known[-1] <= min(record["L"] for record in records):
        return f"ahead at every depth{some}"
    return f"ahead from L ≈ {style.span([float(f'{depth:.2g}') for depth in known], ',.0f')}{some}"


def _even_depths(records: list[Record], way: str, column: str, over: str) -> list[float | None]:
    """For each width that was timed the depth from which on it stays ahead."""
    by_width: dict[int, dict[int, float]] = {}
    for record in records:
        if ratio := speedup(record, way, column, over):
            by_width.setdefault(record["w"], {})[record["L"]] = ratio
    return [break_even(each) for each in by_width.values()]
