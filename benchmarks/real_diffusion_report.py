"""What the measurements of ``real_diffusion.py`` amount to: two tables for a page.

    python benchmarks/real_diffusion_report.py results/real-diffusion-*.json [--page docs/diffusion.md]

Of several files the newest counts. With --page the tables are written into the page, between its two marks; otherwise they are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_report import measured_by, number
from report_page import report

BEGIN = "<!-- the tables of real networks begin: written by benchmarks/real_diffusion_report.py -->"
END = "<!-- the tables of real networks end -->"
PRECISIONS = {"float32": "float32", "tf32": "TF32", "bfloat16": "bfloat16"}

Line = Mapping[str, Any]


def markdown(record: Mapping[str, Any], file_name: str) -> str:
    lines = [line for line in record["lines"] if "failed" not in line]
    table = [line for line in lines if line["name"].endswith("one sample")]
    looped = [line for line in lines if line not in table and _by_loop(line) and line["good"]]
    others = [line for line in lines if line not in table and line not in looped]
    network = record["network"]
    firsts = sorted(line["first"] for line in lines)
    parts = [
        f"{measured_by(record, file_name)} The UNet was trained for {network['seconds']:.0f} s ({network['steps']} batches of 128). Medians of "
        "whole warm calls with default settings, in ms, against the loop in a CUDA graph in the same precision. Error: the largest of any "
        "number of the final sample, against that loop; in brackets what that loop differs by from itself, if each row comes in a call of 2, 32 or 64.",
        _rows(table),
        "Other samplers, batches and networks:",
        _rows(others),
        _taken(looped),
        f"A first call of a kind takes {number(firsts[0])} to {number(firsts[-1])} s: it measures, and captures graphs. "
        f"All calls together reserved {record['reserved']:.1f} GiB at most.",
    ]
    earlier = sorted({line["commit"] for line in lines if "commit" in line})
    if earlier:
        parts.append(f"With a star: measured at {' and '.join(earlier)}.")
    if any(not line["good"] for line in lines):
        parts.append("A gain in (brackets): the error is beyond its limit, so the time does not count.")
    return "\n\n".join(part for part in parts if part)


def _by_loop(line: Line) -> bool:
    return not any(note.startswith("window: ") for note in line["notes"])


def _taken(lines: Sequence[Line]) -> str:
    """Where ``sample`` took the loop, in a sentence: a table would say the same in every row."""
    if not lines:
        return ""
    gains = sorted(line["gain"] for line in lines)
    by_count: dict[str, list[str]] = {}
    for line in lines:
        sampler, _, count = _spoken(line["name"]).rpartition(", ")
        by_count.setdefault(count, []).append(sampler.replace(", ", " ") + _star(line))
    named = "; ".join(f"{count} of {', '.join(samplers)}" for count, samplers in by_count.items())
    return f"`sample` took the loop, {gains[0]:.2f}x to {gains[-1]:.2f}x as fast as the loop beside it: {named}."


def _rows(lines: Sequence[Line]) -> str:
    found = [
        "| sampler | loop | `sample` | gain | rows a step | error |",
        "|---|---|---|---|---|:---|",
    ]
    for line in lines:
        gain, own = f"{line['gain']:.2f}x", _error(line["itself"])
        cells = [
            _spoken_line(line), number(1e3 * line["loop"]), number(1e3 * line["found"]), gain if line["good"] else f"({gain})",
            f"{line['rows']:.1f}", _error(line["error"]) + (f" ({own})" if own else ""),
        ]  # fmt: skip
        found.append(f"| {' | '.join(cells)} |")
    return "\n".join(found)


def _spoken_line(line: Line) -> str:
    return f"{_spoken(line['name'])}, {PRECISIONS[line['precision']]}{_star(line)}"


def _star(line: Line) -> str:
    return r" \*" if "commit" in line else ""


def _spoken(name: str) -> str:
    """
    >>> _spoken("DDPM 1000, 1 samples")
    'DDPM 1,000, 1 sample'
    """
    return name.replace(" 1000", " 1,000").replace(" 1 samples", " 1 sample").replace(", one sample", "")


def _error(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-")


def main(arguments: Sequence[str] | None = None) -> int:
    return report(arguments, __doc__, "real_diffusion", markdown, (BEGIN, END))


if __name__ == "__main__":
    sys.exit(main())
