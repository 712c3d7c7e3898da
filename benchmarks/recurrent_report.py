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

from kernel_report import goals, measured_by, number
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
    parts = [
        f"{measured_by(record, file_name)} Milliseconds, medians of calls in turn; float32 without TF32. T steps, B rows, hidden size H. "
        "Captured: replayed as a CUDA graph of the caller.",
        _targets(record),
        _diagonal(record),
        f"{goals([each['met'] for each in record['targets']])}; the file lists them.",
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


def _gain(times: Mapping[str, float], ours: str, other: str) -> str:
    """How many times as fast one is as the other."""
    return f"{times[other] / times[ours]:.1f}x" if {ours, other} <= set(times) else ""


def _ms(times: Mapping[str, float], method: str) -> str:
    return number(1e3 * times[method]) if method in times else ""


def _sizes(size: tuple) -> str:
    return ", ".join(f"{number:,}" for number in size[1:4])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([first, "|---" * len(head) + "|", *others]) if rows else ""


def _targets(record: Record) -> str:
    rows, (torch, ours) = [], (TORCH + CAPTURED, PARALLEL + CAPTURED)
    for size, times in _times(record, "targets").items():
        called = [_ms(times, TORCH), _ms(times, PARALLEL), _gain(times, PARALLEL, TORCH)]
        rows.append([size[0], _sizes(size), *called, _ms(times, torch), _ms(times, ours), _gain(times, ours, torch)])
    heads = [TORCH, PARALLEL, "gain", torch, ours, "gain"]
    return _table(["forward and backward", "T, B, H", *heads], rows)


def _diagonal(record: Record) -> str:
    rows = [
        [_sizes(size), size[4], _ms(times, OURS), _ms(times, PEER), _gain(times, OURS, PEER)]
        for size, times in _times(record, "diagonal").items()
    ]
    return _table(["T, B, H", "direction", OURS, f"ParaGRU of {PEER}", "gain"], rows)


def _grid(record: Record) -> str:
    found = places(record)
    if not found:
        return ""
    slow = [place for place in found if is_slow(place)]
    taken = [place for place in found if place.parallel]
    text = (
        f'Of {len(found)} layers by `mode="auto"`, {len(found) - len(slow)} take at most {FACTOR:g} times as long as `torch.nn`, or '
        f"{1e6 * OVERHEAD:.0f} µs more. {len(taken)} run in parallel"
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
        text += f" Slower: {'; '.join(named)}."
    left = record["settings"]["left_out"]
    text += f" {left} more sizes were not timed." if left else ""
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
        f"With T = {size['T']:,}, B = {size['B']}, H = {size['H']} a {size['kind']} of `torch.nn` raises (`{cases[TORCH]['failure'].partition('. ')[0]}`); by "
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
