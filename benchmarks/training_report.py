"""What ``trainings.py`` measured, as tables for a page.

    python benchmarks/training_report.py [results/trainings-*.json] [--page docs/recurrent.md]

Of several files the newest counts; without any, those of results/. With --page the tables are written into the page, between its two marks;
otherwise they are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_report import number
from report_page import report

BEGIN = "<!-- the tables of the trainings begin: written by benchmarks/training_report.py -->"
END = "<!-- the tables of the trainings end -->"
NOTHING_YET = "No measurements are stored yet: `python benchmarks/trainings.py` on a GPU makes them."
NAMES = {"mnist": "Sequential MNIST, GRU of 32", "amplifier": "Amplifier, LSTM of 16"}
SIDES = {"torch": "`torch.nn`", "deeppcr": "`deeppcr.nn.convert`", "reordered": "`torch.nn`, another order"}


def markdown(record: Mapping[str, Any], file_name: str) -> str:
    software = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    head = (
        f"{record['machine']['hardware']}, {record['date'][:10]}, commit {record['commit']}, {software}; `results/{file_name}`. Float32 without "
        "TF32; the sides take turns, step by step. Losses are means over tenths of a training."
    )
    return "\n\n".join([head, *map(_training, record["cases"]), _claims(record)])


def _training(case: Mapping[str, Any]) -> str:
    last = case["scores"][-1] if case["scores"] else {}
    count = len(next(iter(case["losses"].values()), []))
    head = [NAMES[case["name"]], "ms a step", *[f"{part + 1}" for part in range(count)], case["measure"]]
    rows = [
        [
            SIDES[side],
            number(case["milliseconds"][side]),
            *[f"{loss:.3g}" for loss in losses],
            f"{last[side]:.4g}" if side in last else "",
        ]
        for side, losses in case["losses"].items()
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])
    solves = ", ".join(f"{count:,} {name}" for name, count in case["solves"].items())
    return f"{table}\n\n{case['done']:,} of {case['steps']:,} steps; solves in parallel ended so: {solves}."


def _claims(record: Mapping[str, Any]) -> str:
    said = []
    for claim in record["targets"]:
        found = "not measured" if claim["value"] is None else number(claim["value"])
        said.append(f"{claim['name']}: {found} ({claim['limit']:.2g} asked, {'met' if claim['met'] else '**missed**'})")
    return "; ".join(said) + "."


def main(arguments: Sequence[str] | None = None) -> int:
    return report(arguments, __doc__, "trainings", markdown, (BEGIN, END), nothing_yet=NOTHING_YET)


if __name__ == "__main__":
    sys.exit(main())
