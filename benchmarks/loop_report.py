"""What the measurements of ``loops.py`` amount to, as a table for a page.

    python benchmarks/loop_report.py results/loops-nvidia-*.json [--page docs/kernels.md]

Of several files the newest counts. With --page the table is written into the page, between its two marks; otherwise it is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from kernel_report import goals, measured_by, number
from report_page import newest, report, stored

BEGIN = "<!-- the table of loops begins: written by benchmarks/loop_report.py -->"
END = "<!-- the table of loops ends -->"
SOLVE = "solve"
DIRECTIONS = ("forward", "forward and backward")
#: What a loop is called on a page.
NAMES = {
    "gru": "elementwise GRU", "gru-long": "elementwise GRU", "gru-wide": "elementwise GRU", "lstm": "elementwise LSTM",
    "pendulum": "damped pendulum, RK4", "pendulum-float64": "the same in float64", "van-der-pol": "Van der Pol, RK4",
    "lorenz": "Lorenz-63 (chaotic), RK4", "predator-prey": "predator and prey, forced", "langevin": "Langevin",
    "kalman": "Kalman filter, mean and covariance", "mlp": "MLP, weights of its own at each step", "dense-gru-16": "GRU",
    "dense-gru-32": "GRU", "dense-gru-64": "GRU", "dense-gru-rows": "GRU", "dense-gru-long": "GRU", "dense-lstm": "LSTM",
    "langevin-10": "Langevin", "descent": "gradient descent, logistic regression", "kalman-4": "Kalman filter, mean and covariance",
    "lorenz-96": "Lorenz-96, F = 2, RK4",
}  # fmt: skip
#: What a user has without this library, for the same states.
_OTHERS = {
    "cuDNN": "cuDNN", "pararnn-torch": "pararnn-torch", "bare loop": "bare loop", "bare loop in a CUDA graph": "CUDA graph",
}  # fmt: skip
#: Of loops of one kind a page shows some; all stand in the file.
_NOT_SHOWN = {
    "gru-long",
    "gru-wide",
    "pendulum-float64",
    "van-der-pol",
    "dense-gru-32",
    "dense-gru-rows",
    "langevin-10",
    "kalman-4",
}
_IN_ONE, _CAPTURED = 'Loop(by="kernel")', f"{SOLVE}, captured"


def markdown(record: Mapping[str, Any], file_name: str) -> str:
    lines = [
        f"{measured_by(record, file_name)} Medians of whole calls with default settings, in milliseconds; the fastest is bold; in brackets, as "
        "many iterations inside a CUDA graph of the caller. Without this library: the fastest of cuDNN, pararnn-torch, a bare loop and one in a "
        "CUDA graph; bare loops are timed over 256 steps and scaled. Iterations: of Newton's method, or the loop that `solve` chose.",
        "",
        "| loop | L, B, D | solve | loop in one kernel | without this library | solve, with gradients | loop in one kernel | without this library | iterations |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    taken = _best(record["cases"])
    for loop in [loop for loop in NAMES if loop not in _NOT_SHOWN and (loop, DIRECTIONS[0]) in taken]:
        found = [taken.get((loop, way), {}) for way in DIRECTIONS]
        sizes = found[0][SOLVE]["parameters"]
        cells = [cell for cases in found for cell in _times(cases)]
        size = f"{sizes['L']:,}, {sizes['B']:,}, {sizes['D']:,}"
        lines.append(f"| {NAMES[loop]} | {size} | {' | '.join(cells)} | {_how(found)} |")
    lines += ["", f"{goals([each['met'] for each in record['targets']])}; the file lists them.", "", *_beside(record)]
    return "\n".join(lines)


def _beside(record: Mapping[str, Any]) -> Iterator[str]:
    """What a call takes beside the device, and what kernels take until they are there."""
    host = [each for each in record["targets"] if each["name"].endswith(", host, ms") and each["value"] is not None]
    if host:
        met = sum(each["met"] for each in host)
        yield f"- beside the device, a warm call takes {_between(host)} ms (goal: at most {host[0]['limit']:g}, met by {met} of {len(host)})"
    if files := stored("compile-time-nvidia"):
        path, compiling = newest(files)
        later = [each for each in compiling["targets"] if "second process" in each["name"]]
        first = [each for each in compiling["targets"] if each not in later]
        yield (
            f"- all kernels of a loop, gradients included, are compiled in {_between(first)} s, once for all lengths; a later process has them "
            f"in {_between(later)} s (`results/{path.name}`)"
        )


def _between(targets: Sequence[Mapping[str, Any]]) -> str:
    values = [each["value"] for each in targets]
    return f"{min(values):.2g} to {max(values):.2g}"


def _best(cases: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Mapping[str, Any]]]:
    """Of every loop and direction a case of each method: of the same call in several parts of a run that in which the host was least busy."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for case in cases:
        if case["suite"] in ("table", "choice", "captured") and case["passed"]:
            of_loop = found.setdefault((case["parameters"]["loop"], case["parameters"]["direction"]), {})
            known = of_loop.setdefault(case["method"], case)
            of_loop[case["method"]] = min(known, case, key=lambda each: median(each["seconds"]))
    return {place: methods for place, methods in found.items() if SOLVE in methods}


def _times(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Cells: by ``solve``, by the loop in one kernel, by the fastest of what a user has without this library."""
    taken = {method: median(case["seconds"]) for method, case in cases.items()}
    other = min((method for method in taken if method in _OTHERS), key=taken.__getitem__, default=None)
    methods = [method if method in taken else None for method in (SOLVE, _IN_ONE, other)]
    fastest = min((taken[method] for method in methods if method), default=None)
    cells = []
    for method in methods:
        cell = _ms(taken[method]) if method else ""
        cell = f"**{cell}**" if method and taken[method] == fastest else cell
        if method == SOLVE and _CAPTURED in taken:
            cell = f"{cell} ({_ms(taken[_CAPTURED])})"
        cells.append(f"{cell}, {_OTHERS[method]}" if method in _OTHERS else cell)
    return cells


def _how(found: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    ways = []
    for case in [cases[SOLVE] for cases in found if SOLVE in cases]:
        ways.append("loop" if case["result"] == "LOOP" else f"{case['iterations']}")
    return "; ".join(dict.fromkeys(ways))


def _ms(seconds: float) -> str:
    return number(1e3 * seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    return report(arguments, __doc__, "loops", markdown, (BEGIN, END))


if __name__ == "__main__":
    sys.exit(main())
