"""What the measurements of ``real_diffusion.py`` amount to: two tables for a page.

    python benchmarks/real_diffusion_report.py results/real-diffusion-*.json [--page docs/diffusion.md]

Of several files the newest counts. With --page the tables are written into the page, between its two marks; otherwise they are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_report import number
from report_page import report

BEGIN = "<!-- the tables of real networks begin: written by benchmarks/real_diffusion_report.py -->"
END = "<!-- the tables of real networks end -->"
PRECISIONS = {"float32": "float32", "tf32": "TF32", "bfloat16": "bfloat16"}

Line = Mapping[str, Any]


def markdown(record: Mapping[str, Any], file_name: str) -> str:
    lines = [line for line in record["lines"] if "failed" not in line]
    table = [line for line in lines if line["name"].endswith("one sample")]
    others = [line for line in lines if line not in table]
    network, versions = record["network"], ", ".join(f"{name} {each}" for name, each in record["versions"].items())
    firsts = sorted(line["first"] for line in lines)
    parts = [
        f"{record['machine']['hardware']}, {record['date'][:10]}, commit {record['commit']}, {versions}; `results/{file_name}`. "
        f"The UNet was trained for {network['seconds']:.0f} s ({network['steps']} batches of 128). Whole calls with default settings, "
        "ms, medians, warm, against the loop in a CUDA graph in the same precision. The error is the largest of any number of "
        "the final sample, against that loop; beside it that loop's own, where each row comes in a call of 2, 32 or 64.",
        _rows(table),
        "Other samplers, batches and networks:",
        _rows(others),
        f"A first call of a kind takes {number(firsts[0])} to {number(firsts[-1])} s: it measures, and captures graphs. "
        f"All calls together reserved {record['reserved']:.1f} GiB at most.",
    ]
    earlier = sorted({line["commit"] for line in lines if "commit" in line})
    if earlier:
        parts.append(f"With a star: measured at {' and '.join(earlier)}.")
    if any(not line["good"] for line in lines):
        parts.append("In (brackets): the error is beyond its limit, so the time does not count.")
    return "\n\n".join(parts)


def _rows(lines: Sequence[Line]) -> str:
    found = [
        "| | loop | `sample` | | window | rows a step | error | the loop's own |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        window = next((note.split()[1] for note in line["notes"] if note.startswith("window: ")), "the loop")
        gain, star = f"{line['gain']:.2f}x", r" \*" if "commit" in line else ""
        cells = [
            f"{_spoken(line['name'])}, {PRECISIONS[line['precision']]}{star}", number(1e3 * line["loop"]), number(1e3 * line["found"]),
            gain if line["good"] else f"({gain})", window, f"{line['rows']:.1f}", _error(line["error"]), _error(line["itself"]),
        ]  # fmt: skip
        found.append(f"| {' | '.join(cells)} |")
    return "\n".join(found)


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
