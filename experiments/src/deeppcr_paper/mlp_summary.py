"""What the program reads off the timings of networks: break-even depths, best speed-ups, and where w²L becomes too much."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import Any

from .table import table, times

#: Sequential code, from the slowest to the strongest.
BASELINES = ("loop", "graph", "fused")
#: What the columns are, for those who meet them in a table or on the page.
MEANINGS = {
    "loop": "layer by layer in eager PyTorch, the paper's baseline",
    "graph": "the loop in a CUDA graph",
    "fused": "the loop in one kernel that goes from layer to layer by itself",
    "printed": "the paper's method: chunks of one layer (chunk=1), its stopping test, parallel cyclic reduction",
    "auto": "this library's defaults: several layers a chunk, a stricter test, kernels of its own on a GPU",
}
#: A pass has left the logarithmic regime when it takes this many times as long as at the smallest width.
SLOWED = 2.0


def seconds(record: dict[str, Any], way: str, column: str) -> float | None:
    """The shortest repeat; None where the column was not timed."""
    repeats = record.get(way, {}).get(column, {}).get("seconds")
    return min(repeats) if repeats else None


def speedup(record: dict[str, Any], way: str, column: str, over: str) -> float | None:
    mine, other = seconds(record, way, column), seconds(record, way, over)
    return other / mine if mine and other else None


def break_even(ratios: dict[int, float]) -> float | None:
    """The depth from which on the speed-up stays above 1, read off between measured depths on log axes.

    Args:
        ratios: speed-up by depth

    >>> break_even({2: 0.25, 8: 1.0, 32: 4.0})
    8.0
    """
    found, above = None, None
    for depth in sorted(ratios, reverse=True):
        if ratios[depth] < 1:
            if above is not None:
                low, high = math.log2(ratios[depth]), math.log2(ratios[above])
                found = 2 ** (math.log2(depth) + math.log2(above / depth) * -low / (high - low))
            break
        found, above = float(depth), depth
    return found


def threshold(records: Iterable[dict[str, Any]], way: str, column: str) -> dict[str, Any]:
    """Where the time stops being independent of the width: for each depth w²L of the width that takes twice as long, read
    off between measured ones on log axes. ``widths`` are those widths by depth, where they vary less than w²L does."""
    times: dict[int, dict[int, float]] = {}
    for record in records:
        found = seconds(record, way, column)
        if found is not None:
            times.setdefault(record["L"], {})[record["w"]] = found
    crossed: dict[int, float] = {}
    for depth, by_width in times.items():
        least = by_width[min(by_width)]
        every, limit = sorted(by_width), SLOWED * least
        for low, high in pairwise(every):
            if by_width[high] > limit:
                part = math.log(limit / by_width[low]) / math.log(by_width[high] / by_width[low])
                crossed[depth] = (low * (high / low) ** part) ** 2 * depth
                break
    if not crossed:
        return {"by_depth": {}, "w2L": None, "widths": None}
    sizes, widths = [*crossed.values()], [math.sqrt(size / depth) for depth, size in crossed.items()]
    by_width = len(crossed) > 1 and (max(widths) / min(widths)) ** 2 < max(sizes) / min(sizes)  # squared as in w²L
    return {
        "by_depth": crossed,
        "w2L": median(sizes),
        "widths": dict(zip(crossed, widths, strict=True)) if by_width else None,
    }


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry for every activation, direction and parallel column; and what was not timed, with the reasons."""
    found = []
    for activation in sorted({record["activation"] for record in records}):
        mine = [record for record in records if record["activation"] == activation]
        for way in ("forward", "backward"):
            for column in ("printed", "auto"):
                entry: dict[str, Any] = {"activation": activation, "direction": way, "column": column}
                for over in BASELINES:
                    ratios = [(speedup(record, way, column, over), record) for record in mine]
                    known = [(ratio, record) for ratio, record in ratios if ratio is not None]
                    if not known:
                        continue
                    best, where = max(known, key=lambda pair: pair[0])
                    by_width: dict[int, dict[int, float]] = {}
                    for ratio, record in known:
                        by_width.setdefault(record["w"], {})[record["L"]] = ratio
                    depths = {width: break_even(each) for width, each in sorted(by_width.items())}
                    entry[f"over_{over}"] = {
                        "best": {"speedup": best, "L": where["L"], "w": where["w"]},
                        "break_even_depth": depths,
                    }
                entry["threshold"] = threshold(mine, way, column)
                found.append(entry)
    reasons = Counter(
        f"{way} {column}: {entry['status']}"
        for record in records
        for way in ("forward", "backward")
        for column, entry in record[way].items()
        if entry["status"] != "ok"
    )
    return {"entries": found, "not_timed": dict(reasons)}


def foot(columns: Iterable[str]) -> list[str]:
    """Below a table: what its columns are."""
    shown = set(columns)
    return [f"{column}: {meaning}" for column, meaning in MEANINGS.items() if column in shown]


def lines(summary: dict[str, Any]) -> list[str]:
    rows = []
    for entry in summary["entries"]:
        for over in BASELINES:
            against = entry.get(f"over_{over}")
            if against is None:
                continue
            best = against["best"]
            even = [depth for depth in against["break_even_depth"].values() if depth is not None]
            rows.append(
                {
                    "activation": entry["activation"],
                    "direction": entry["direction"],
                    "method": entry["column"],
                    "over": over,
                    "speed-up": times(best["speedup"]),
                    "at L": best["L"],
                    "and w": best["w"],
                    "break-even from L": f"{min(even):.0f}" if even else None,
                }
            )
    below = foot(str(row[which]) for row in rows for which in ("method", "over"))
    return (
        table(rows)
        + below
        + [f"not timed in {count} cells: {reason}" for reason, count in summary["not_timed"].items()]
    )
