"""What the program reads off the timings of networks: break-even depths, best speed-ups, and where w²L becomes too much."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise, product
from statistics import median
from typing import Any

from .table import shown, table, times
from .timing import calm, counted

#: Sequential code, from the slowest to the strongest.
BASELINES = ("loop", "graph", "fused")
#: What the columns are, for those who meet them in a table or on the page.
MEANINGS = {
    "loop": "layer by layer in eager PyTorch, the paper's baseline",
    "graph": "the loop in a CUDA graph",
    "fused": "the loop in one kernel that goes from layer to layer by itself",
    "printed": "the paper's method: chunks of one layer (chunk=1), its stopping test, parallel cyclic reduction",
    "printed graph": "the same in plain PyTorch, an iteration in a CUDA graph",
    "auto": "this library's defaults: several layers a chunk, a stricter test, kernels of its own on a GPU",
}
#: A pass has left the logarithmic regime when it takes this many times as long as at the smallest width.
SLOWED = 2.0


def repeats_of(entry: dict[str, Any]) -> list[float]:
    """The seconds that count of a column; none where it was not timed."""
    return counted(entry.get("seconds") or [], entry.get("turn", 0))


def seconds(record: dict[str, Any], way: str, column: str) -> float | None:
    """The median of the repeats, which their number does not change; None where the column was not timed."""
    repeats = repeats_of(record.get(way, {}).get(column, {}))
    return median(repeats) if repeats else None


def say_turns(content: dict[str, Any]) -> None:
    """Of results from before it stood in them: columns were timed in turns of the fewest calls."""
    turn = content["settings"].get("fewest", 0)
    for record in content["records"] if turn else ():
        for entry in (*record.get("forward", {}).values(), *record.get("backward", {}).values()):
            if "repeats" not in entry:  # where there was one call, and none in turns
                entry.setdefault("turn", turn)


def loop_seconds(record: dict[str, Any], way: str, over: str) -> float | None:
    """Of a loop, or of the "fastest"; None where one of the loops has no time, which may have been the fastest."""
    names = [name for name in BASELINES if name in record.get(way, {})] if over == "fastest" else [over]
    times = [seconds(record, way, name) for name in names]
    known = [time for time in times if time is not None]
    return min(known) if known and len(known) == len(times) else None


def speedup(record: dict[str, Any], way: str, column: str, over: str) -> float | None:
    mine, other = seconds(record, way, column), loop_seconds(record, way, over)
    return other / mine if mine and other else None


def best_speedup(
    records: Iterable[dict[str, Any]], way: str, column: str, over: str
) -> tuple[float, dict[str, Any]] | None:
    """The greatest speed-up whose times are calm, and its cell; None where there is none."""
    loops = BASELINES if over == "fastest" else (over,)
    known = [
        (ratio, record)
        for record in records
        if (ratio := speedup(record, way, column, over))
        and all(calm(repeats_of(record[way].get(name, {}))) for name in (column, *loops))
    ]
    return max(known, key=lambda pair: pair[0], default=None)


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
    """Where the time stops being independent of the width: for each depth w²L of the width from which on it is more than twice that
    at the smallest, read off between measured ones on log axes. ``widths`` are those widths by depth, where they vary less than
    w²L does."""
    by_depth: dict[int, dict[int, float]] = {}
    for record in records:
        found = seconds(record, way, column)
        if found is not None:
            by_depth.setdefault(record["L"], {})[record["w"]] = found
    crossed: dict[int, float] = {}  # the widths
    for depth, by_width in by_depth.items():
        limit = SLOWED * by_width[min(by_width)]
        ending = sorted(by_width, reverse=True)
        for high, low in pairwise(ending if by_width[ending[0]] > limit else ()):
            if by_width[low] <= limit:
                part = math.log(limit / by_width[low]) / math.log(by_width[high] / by_width[low])
                crossed[depth] = low * (high / low) ** part
                break
    if not crossed:
        return {"by_depth": {}, "w2L": None, "widths": None}
    sizes = {depth: width**2 * depth for depth, width in crossed.items()}
    vary_less = (max(crossed.values()) / min(crossed.values())) ** 2 < max(sizes.values()) / min(sizes.values())
    return {"by_depth": sizes, "w2L": median(sizes.values()), "widths": crossed if vary_less else None}


def _parallel(records: Iterable[dict[str, Any]]) -> list[str]:
    there = {column for record in records for column in record.get("forward", {})}
    return [column for column in MEANINGS if column in there and column not in BASELINES]


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry for every activation, direction and parallel column; and what was not timed, with the reasons."""
    found = []
    for activation in sorted({record["activation"] for record in records}):
        mine = [record for record in records if record["activation"] == activation]
        for way, column in product(("forward", "backward"), _parallel(mine)):
            entry: dict[str, Any] = {"activation": activation, "direction": way, "column": column}
            for over in BASELINES:
                ratios = {(each["w"], each["L"]): speedup(each, way, column, over) for each in mine}
                known = {size: ratio for size, ratio in ratios.items() if ratio is not None}
                if not known:
                    continue
                best = best_speedup(mine, way, column, over)
                entry[f"over_{over}"] = {
                    "best": {"speedup": best[0], "L": best[1]["L"], "w": best[1]["w"]} if best else None,
                    "break_even_depth": {
                        each: break_even({depth: ratio for (width, depth), ratio in known.items() if width == each})
                        for each in sorted({width for width, _ in known})
                    },
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
    there = set(columns)
    return [f"{column}: {meaning}" for column, meaning in MEANINGS.items() if column in there]


def lines(summary: dict[str, Any]) -> list[str]:
    rows = []
    for entry, over in product(summary["entries"], BASELINES):
        if against := entry.get(f"over_{over}"):
            best, even = against["best"] or {}, against["break_even_depth"].values()
            rows.append(
                {
                    "activation": entry["activation"],
                    "direction": entry["direction"],
                    "method": entry["column"],
                    "over": over,
                    "speed-up": shown(best.get("speedup"), times),
                    "at L": best.get("L"),
                    "and w": best.get("w"),
                    "break-even from L": shown(min((each for each in even if each is not None), default=None), ".0f"),
                }
            )
    below = foot(row[which] for row in rows for which in ("method", "over"))
    not_timed = [f"not timed in {count} cells: {reason}" for reason, count in summary["not_timed"].items()]
    return table(rows) + below + not_timed
