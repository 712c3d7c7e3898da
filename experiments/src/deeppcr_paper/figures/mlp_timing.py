"""``mlp-timing``: time and speed-up over depths (fig. 3 and its kin)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes

from ..mlp_summary import break_even
from ..mlp_summary import seconds as time_of
from ..table import times as as_times
from . import style
from .drawing import Drawing
from .mlp_width import over_widths

Record = dict[str, Any]
#: Of a record: a number, or None where there is none.
Value = Callable[[Record], float | None]

_PAPER = {"relu": "fig. 3", "tanh": "fig. 9", "sigmoid": "fig. 10"}
_SHORT = {"printed": "as printed", "auto": "defaults"}
#: "fastest" stands for whichever loop took least in a cell.
FASTEST = "fastest"


def draw(result: dict[str, Any]) -> list[Drawing]:
    found: list[Drawing] = []
    records: list[Record] = result["records"]
    activations = list(dict.fromkeys(record["activation"] for record in records))
    for activation in activations:
        mine = [record for record in records if record["activation"] == activation]
        for way in ("forward", "backward"):
            if any(_times(mine, way).values()):
                found.append(over_depths(mine, activation, way))
        widths = over_widths(mine, activation)
        found += [widths] if widths is not None else []
    return found


def _times(records: list[Record], way: str) -> dict[str, bool]:
    """The columns that were tried, in the order of the style, and whether any cell of theirs was timed."""
    tried = {column for record in records for column in record.get(way, {})}
    known = [column for column in (*style.SEQUENTIAL, *style.PARALLEL) if column in tried]
    return {column: any(time_of(record, way, column) is not None for record in records) for column in known}


def loop_time(record: Record, way: str, over: str) -> float | None:
    """Of the loop that is compared with; None where one of the loops has no time, which may have been the fastest."""
    names = [name for name in style.SEQUENTIAL if name in record.get(way, {})] if over == FASTEST else [over]
    times = [time_of(record, way, name) for name in names]
    known = [time for time in times if time is not None]
    return min(known) if known and len(known) == len(times) else None


def speedup(record: Record, way: str, column: str, over: str) -> float | None:
    mine, other = time_of(record, way, column), loop_time(record, way, over)
    return other / mine if mine and other else None


def over_depths(records: list[Record], activation: str, way: str) -> Drawing:
    """Time against depth, loops on the left and DeepPCR on the right; below, how many times as fast DeepPCR is."""
    columns = _times(records, way)
    loops = [column for column in style.SEQUENTIAL if column in columns]
    parallel = [column for column in style.PARALLEL if column in columns]
    overs = ["loop"] if loops == ["loop"] else ["loop", FASTEST]
    rows = max(len(loops), len(parallel))
    figure, grid = style.canvas(rows + len(overs), extra=1.0)
    colours = style.ordered(record["w"] for record in records)
    depths = sorted({record["L"] for record in records})
    every = [time for record in records for column in columns if (time := time_of(record, way, column))]
    laws = {column: _law(records, way, column) for column in columns}
    # A law stands below its curves, and its name below it: the axis has room for both.
    every += [0.3 * style.guide_label(*law)[1] for law in laws.values() if law]
    spare: list[Axes] = []
    for side, names in enumerate((loops, parallel)):
        for row in range(rows):
            axes = grid[row][side]
            if row >= len(names):
                spare.append(axes)
                continue
            column = names[row]
            style.panel_title(axes, style.LABELS[column], column)
            style.lines(axes, records, "L", "w", colours, lambda record, column=column: time_of(record, way, column))
            if law := laws[column]:
                style.guide(axes, *law, "∝ L" if column in style.SEQUENTIAL else "∝ log L")
            _axis(axes, depths, every)
            if not columns[column]:
                style.remark(axes, why_not(records, way, column))
    for row, over in enumerate(overs, rows):
        ratios = {
            column: [ratio for record in records if (ratio := speedup(record, way, column, over))]
            for column in parallel
        }
        both = [ratio for each in ratios.values() for ratio in each]
        for side in range(2):
            axes = grid[row][side]
            if side >= len(parallel):
                spare.append(axes)
                continue
            column = parallel[side]
            name = "eager loop" if over == "loop" else "fastest loop"
            style.panel_title(axes, f"{_SHORT[column]} over {name}", column)
            style.lines(axes, records, "L", "w", colours, _ratio(way, column, over))
            style.guide(axes, [depths[0] / 2, depths[-1] * 2], [1, 1])
            style.powers_of_two(axes, depths)
            style.decades(axes, both, also=[1.0])
            axes.set_ylabel("speed-up (×)")
            axes.set_xlabel("depth L (layers)")
            if not ratios[column]:
                style.remark(axes, "not timed on both sides")
    style.legend(figure, colours, "width w", place=spare.pop(0) if spare else None)
    for axes in spare:
        axes.set_axis_off()
    return Drawing(
        f"mlp-timing-{activation}-{way}",
        f"{way.capitalize()} pass of a deep network, {style.activation(activation)}",
        _PAPER.get(activation, "fig. 3"),
        caption(records, way, overs, parallel),
        figure,
    )


def _ratio(way: str, column: str, over: str) -> Value:
    return lambda record: speedup(record, way, column, over)


def _axis(axes: Axes, depths: list[int], times: list[float]) -> None:
    style.powers_of_two(axes, depths)
    style.decades(axes, times)
    axes.set_ylabel("time (s)")
    axes.set_xlabel("depth L (layers)")


def _law(records: list[Record], way: str, column: str) -> tuple[list[float], list[float]] | None:
    """The law that the paper expects, just below the curves: proportional to L for loops, to log L for DeepPCR."""
    times: dict[int, float] = {}
    for record in records:
        time = time_of(record, way, column)
        if time is not None and record["L"] >= 2:
            times[record["L"]] = min(time, times.get(record["L"], math.inf))
    if len(times) < 2:
        return None
    depths = [2**k for k in range(1, math.floor(math.log2(max(times))) + 1) if 2**k >= min(times)] or sorted(times)
    law = (lambda depth: depth) if column in style.SEQUENTIAL else (lambda depth: math.log2(depth))
    scale = 0.6 * min(time / law(depth) for depth, time in times.items())
    return [*map(float, depths)], [scale * law(depth) for depth in depths]


def why_not(records: list[Record], way: str, column: str) -> str:
    reasons = Counter(record.get(way, {}).get(column, {}).get("status", "not tried") for record in records)
    return f"not timed: {reasons.most_common(1)[0][0]}"


def caption(records: list[Record], way: str, overs: list[str], parallel: list[str]) -> str:
    """The best speed-ups, the depths from which on there is one, and how much is missing."""
    said = []
    for over in overs:
        name = "the eager loop" if over == "loop" else "the fastest loop"
        best = {column: found for column in parallel if (found := _best(records, way, column, over))}
        if not best:
            continue
        each = [
            f"{as_times(ratio)} {_SHORT[c].replace('defaults', 'with the defaults')} (L = {where['L']:,}, w = {where['w']:,})"
            for c, (ratio, where, _) in best.items()
        ]
        even = [f"{_SHORT[c]} {_ahead(depths, records)}" for c, (_, _, depths) in best.items()]
        said.append(f"Over {name} at best {' and '.join(each)}; {', '.join(even)}.")
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
    full = sum(entry.get("status") == "out of memory" for entry in entries)
    said = [f"{len(wrong)} gave a result that is off by up to {100 * max(wrong):.2g}%"] if wrong else []
    said += [f"{full} ran out of memory"] if full else []
    long = sum(str(entry.get("status")).startswith("not timed") for entry in entries)
    said += [f"{long} would have taken too long"] if long else []
    rest = len(entries) - len(wrong) - full - long
    said += [f"{rest} failed"] if rest else []
    return f" ({', '.join(said)})"


def _ahead(depths: list[float | None], records: list[Record]) -> str:
    """From which depths on, of all widths; one between measured depths is not known to more than two digits."""
    known = sorted(depth for depth in depths if depth is not None)
    if not known:
        return "nowhere ahead"
    some = "" if len(known) == len(depths) else f" at {len(known)} of {len(depths)} widths"
    if known[-1] <= min(record["L"] for record in records):
        return f"ahead at every depth{some}"
    low, high = (f"{float(f'{depth:.2g}'):,.0f}" for depth in (known[0], known[-1]))
    return f"ahead from L ≈ {low}{'' if low == high else f' to {high}'}{some}"


def _best(records: list[Record], way: str, column: str, over: str) -> tuple[float, Record, list[float | None]] | None:
    """The greatest speed-up, where, and for each width the depth from which on it stays ahead."""
    known = [(ratio, record) for record in records if (ratio := speedup(record, way, column, over))]
    if not known:
        return None
    by_width: dict[int, dict[int, float]] = {}
    for ratio, record in known:
        by_width.setdefault(record["w"], {})[record["L"]] = ratio
    return *max(known, key=lambda pair: pair[0]), [break_even(each) for each in by_width.values()]
