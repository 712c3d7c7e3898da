"""What ``trainings.py`` measured, as tables for a page.

    python benchmarks/training_report.py [results/trainings-*.json] [--page docs/recurrent.md]

Of several files the newest counts; without any, those of results/. With --page the tables are written into the page, between its two marks;
otherwise they are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_report import goals, measured_by, number
from report_page import report

BEGIN = "<!-- the tables of the trainings begin: written by benchmarks/training_report.py -->"
END = "<!-- the tables of the trainings end -->"
NOTHING_YET = "No measurements are stored yet: `python benchmarks/trainings.py` on a GPU makes them."
NAMES = {"mnist": "Sequential MNIST, GRU of 32", "amplifier": "Amplifier, LSTM of 16"}
SIDES = {"torch": "`torch.nn`", "deeppcr": "`deeppcr.nn.convert`", "reordered": "`torch.nn`, another order"}


def markdown(record: Mapping[str, Any], file_name: str) -> str:
    head = f"{measured_by(record, file_name)} Float32 without TF32; the sides take turns, step by step. Losses are means over tenths of a training."
    return "\n\n".join(
        [
            head,
            *map(_training, record["cases"]),
            f"{goals([each['met'] for each in record['targets']])}; the file lists them.",
        ]
    )


def _training(case: Mapping[str, Any]) -> str:
    last = case["scores"][-1] if case["scores"] else {}
    count = len(next(iter(case["losses"].values()), []))
    shown = sorted({0, count // 3, 2 * count // 3, count - 1} - {-1})
    heads = [f"{'loss, tenth ' if part == 0 else ''}{part + 1}" for part in shown]
    head = [NAMES[case["name"]], "ms a step", *heads, case["measure"]]
    rows = [
        [
            SIDES[side],
            number(case["milliseconds"][side]),
            *[f"{losses[part]:.3g}" for part in shown],
            f"{last[side]:.4g}" if side in last else "",
        ]
        for side, losses in case["losses"].items()
    ]
    first, *others = (f"| {' | '.join(line)} |" for line in (head, *rows))
    table = "\n".join([first, "|---" * len(head) + "|", *others])
    solves = ", ".join(f"{count:,} {name}" for name, count in case["solves"].items())
    return f"{table}\n\n{case['done']:,} of {case['steps']:,} steps; solves in parallel ended so: {solves}."


def main(arguments: Sequence[str] | None = None) -> int:
    return report(arguments, __doc__, "trainings", markdown, (BEGIN, END), nothing_yet=NOTHING_YET)


if __name__ == "__main__":
    sys.exit(main())
