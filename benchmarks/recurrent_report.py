"""What the measurements of ``recurrent.py`` amount to: tables and a picture for a page.

    python benchmarks/recurrent_report.py [results/recurrent-*.json] [--page docs/recurrent.md]

Of several files the newest counts; without any, those of results/. With --page the tables are written into the page, between its two marks,
and the picture into figures/ beside it; otherwise the tables are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kernel_report import number
from recurrent import FACTOR, OVERHEAD
from recurrent_map import NAME, Place, draw, places
from recurrent_methods import AUTO, CAPTURED, PARALLEL, TORCH
from report_page import report

BEGIN = "<!-- the tables of recurrent layers begin: written by benchmarks/recurrent_report.py -->"
END = "<!-- the tables of recurrent layers end -->"
NOTHING_YET = "No measurements are stored yet: `python benchmarks/recurrent.py` on a GPU makes them."
OURS, PEER = "DiagonalGRU", "pararnn-torch"

Record = Mapping[str, Any]


def markdown(record: Record, file_name: str) -> str:
    software = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    parts = [
        f"{about(record)}, commit {record['commit']}, {software}; `results/{file_name}`. Milliseconds, medians of calls in turn; float32 without "
        "TF32. What is captured is replayed as a CUDA graph of the caller, and compared with what is captured.",
        _targets(record),
        _diagonal(record),
        _grid(record),
        _too_long(record),
    ]
    return "\n\n".join(part for part in parts if part)


def about(record: Record) -> str:
    return f"{record['machine']['hardware']}, {record['date'][:10]}"


def _times(record: Record, suite: str) -> dict[tuple, dict[str, float]]:
    """By size, the seconds of every method."""
    found: dict[tuple, dict[str, float]] = {}
    for case in record["cases"]:
        if case["suite"] == suite:
            times = found.setdefault(tuple(case["parameters"].values()), {})
            if case["passed"]:
                times[case["method"]] = median(case["seconds"])
    return found


def _verdicts(record: Record, size: tuple, other: str) -> str:
    """Of each of its targets, which, and whether it was met."""
    said, name = [], " ".join(map(str, size))
    for claim in record["targets"]:
        of, _, what = claim["name"].partition(": ")
        if of == name and what.endswith((f" over {other}", f" over {other}{CAPTURED}")):
            which = "captured" if CAPTURED in what else "called"
            share = "not measured" if claim["value"] is None else f"{1 / claim['value']:.1f}x"
            said.append(f"{which} {1 / claim['limit']:g}x: {share}, {'met' if claim['met'] else '**missed**'}")
    return "; ".join(said)


def _ms(times: Mapping[str, float], method: str) -> str:
    return number(1e3 * times[method]) if method in times else ""


def _sizes(size: tuple) -> str:
    return ", ".join(f"{number:,}" for number in size[1:4])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def _targets(record: Record) -> str:
    ways = (TORCH, AUTO, PARALLEL, TORCH + CAPTURED, PARALLEL + CAPTURED)
    rows = [
        [size[0], _sizes(size), *(_ms(times, way) for way in ways), _verdicts(record, size, TORCH)]
        for size, times in _times(record, "targets").items()
    ]
    return _table(["forward and backward", "T, B, H", *ways, f"times as fast as {TORCH}"], rows)


def _diagonal(record: Record) -> str:
    rows = [
        [_sizes(size), size[4], _ms(times, OURS), _ms(times, PEER), _verdicts(record, size, PEER)]
        for size, times in _times(record, "diagonal").items()
    ]
    return _table([f"{OURS}: T, B, H", "", OURS, f"ParaGRU of {PEER}", f"times as fast as {PEER}"], rows)


def _grid(record: Record) -> str:
    found = places(record)
    if not found:
        return ""
    slow = [place for place in found if is_slow(place)]
    taken = [place for place in found if place.parallel]
    text = (
        f'Over {len(found)} layers, `mode="auto"` is within {FACTOR:g} of the time of `torch.nn` and {1e6 * OVERHEAD:.0f} µs in '
        f"{len(found) - len(slow)}. It takes {len(taken)} of them in parallel"
    )
    if taken:
        speeds = [place.speed for place in taken]
        text += f", {min(speeds):.1f} to {max(speeds):.1f} times as fast (median {median(speeds):.1f})"
    text += "."
    if slow:
        named = (
            f"{each.size.kind} T {each.size.T:,} B {each.size.B} H {each.size.H} {each.size.direction} ({_pair(each)})"
            for each in slow
        )
        text += f" Slower than that: {'; '.join(named)}."
    left = record["settings"]["left_out"]
    text += f" {left} sizes were left out for want of time." if left else ""
    return f"{text}\n\n![How many times as fast as torch.nn, by T, B and H](figures/{NAME}.svg)"


def is_slow(place: Place) -> bool:
    return place.auto > FACTOR * place.torch + OVERHEAD


def _pair(place: Place) -> str:
    return f"{number(1e3 * place.auto)} ms against {number(1e3 * place.torch)}"


def _too_long(record: Record) -> str:
    """A layer of more steps than PyTorch takes: what became of it."""
    cases = {case["method"]: case for case in record["cases"] if case["suite"] == "too long"}
    if AUTO not in cases or not cases[AUTO]["passed"] or cases.get(TORCH, cases[AUTO])["passed"]:
        return ""
    auto, size = cases[AUTO], cases[AUTO]["parameters"]
    return (
        f"With T = {size['T']:,}, B = {size['B']}, H = {size['H']} a {size['kind']} of `torch.nn` raises (`{cases[TORCH]['failure']}`); by "
        f'`mode="auto"`, in parallel, {size["direction"]} take {number(1e3 * median(auto["seconds"]))} ms.'
    )


def picture(record: Record) -> str:
    """An SVG file of the grid."""
    return draw(places(record), about(record)).figure().file()


def _draw_beside(record: Record, folder: Path) -> None:
    if places(record):
        (folder / "figures").mkdir(exist_ok=True)
        (folder / "figures" / f"{NAME}.svg").write_text(picture(record), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    marks = BEGIN, END
    return report(arguments, __doc__, "recurrent", markdown, marks, nothing_yet=NOTHING_YET, beside=_draw_beside)


if __name__ == "__main__":
    sys.exit(main())
