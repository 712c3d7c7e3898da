"""What the measurements of ``loops.py`` amount to, as a table for a page.

    python benchmarks/loop_report.py results/loops-nvidia-*.json [--page docs/kernels.md]

Of several files the newest counts. Below its table stand the calls of a newer run that compared less, where one is stored
(``results/loops-calls-nvidia-*.json``). With --page the table is written into the page, between its two marks; otherwise it is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
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
_IN_ONE = 'Loop(by="kernel")'


def markdown(record: Mapping[str, Any], file_name: str) -> str:
    lines = [
        f"{measured_by(record, file_name)} Medians of whole calls with default settings, in milliseconds; the fastest is bold. Without this "
        "library: the fastest of cuDNN, pararnn-torch, a bare loop and one in a CUDA graph; bare loops are timed over 256 steps and scaled. "
        "Iterations: of Newton's method, or the loop that `solve` chose.",
        "",
        "| loop | L, B, D | solve | loop in one kernel | without this library | solve, with gradients | loop in one kernel | without this library | iterations |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    cases = [case for case in record["cases"] if case["suite"] == "table" and case["passed"]]
    cases = [case for case in cases if case["parameters"]["loop"] not in _NOT_SHOWN]
    for loop in dict.fromkeys(case["parameters"]["loop"] for case in cases):
        found = [
            [case for case in cases if case["parameters"]["loop"] == loop and case["parameters"]["direction"] == way]
            for way in DIRECTIONS
        ]
        sizes = found[0][0]["parameters"]
        cells = [cell for cases in found for cell in _times(cases)]
        name, size = NAMES.get(loop, loop), f"{sizes['L']:,}, {sizes['B']:,}, {sizes['D']:,}"
        lines.append(f"| {name} | {size} | {' | '.join(cells)} | {_how(found)} |")
    lines += ["", f"{goals([each['met'] for each in record['targets']])}; the file lists them."]
    later = stored("loops-calls-nvidia")
    if later:
        path, calls = newest(later)
        lines += ["", *_calls(calls, path.name)] if calls["date"] > record["date"] else []
    return "\n".join(lines)


def _calls(record: Mapping[str, Any], file_name: str) -> list[str]:
    """Of a run by which what a user has without this library was left out: the calls, and those inside a CUDA graph of the caller."""
    taken: dict[str, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for case in record["cases"]:
        if (
            case["suite"] in ("table", "captured")
            and case["passed"]
            and case["method"] in (SOLVE, f"{SOLVE}, captured")
        ):
            sizes = case["parameters"]
            taken.setdefault(sizes["loop"], {})[case["suite"], sizes["direction"]] = case
    lines = [
        f"Since then, {measured_by(record, file_name)} The same calls, and as many iterations in a CUDA graph of the caller:",
        "",
        "| loop | L, B, D | solve | captured | solve, with gradients | captured |",
        "|---|---|---|---|---|---|",
    ]
    for loop, cases in taken.items():
        if loop in _NOT_SHOWN or ("table", DIRECTIONS[0]) not in cases:
            continue
        sizes = cases["table", DIRECTIONS[0]]["parameters"]
        found = [cases.get((suite, way)) for way in DIRECTIONS for suite in ("table", "captured")]
        cells = ["" if case is None else _ms(median(case["seconds"])) for case in found]
        size = f"{sizes['L']:,}, {sizes['B']:,}, {sizes['D']:,}"
        lines.append(f"| {NAMES.get(loop, loop)} | {size} | {' | '.join(cells)} |")
    return [*lines, "", f"{goals([each['met'] for each in record['targets']])}; the file lists them."]


def _times(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Cells: by ``solve``, by the loop in one kernel, by the fastest of what a user has without this library."""
    taken = {case["method"]: median(case["seconds"]) for case in cases}
    other = min((method for method in taken if method in _OTHERS), key=taken.__getitem__, default=None)
    methods = [method if method in taken else None for method in (SOLVE, _IN_ONE, other)]
    fastest = min((taken[method] for method in methods if method), default=None)
    cells = []
    for method in methods:
        cell = _ms(taken[method]) if method else ""
        cell = f"**{cell}**" if method and taken[method] == fastest else cell
        cells.append(f"{cell}, {_OTHERS[method]}" if method in _OTHERS else cell)
    return cells


def _how(found: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    ways = []
    for cases in found:
        case = next((case for case in cases if case["method"] == SOLVE), None)
        if case is not None:
            ways.append("loop" if case["result"] == "LOOP" else f"{case['iterations']}")
    return "; ".join(dict.fromkeys(ways))


def _ms(seconds: float) -> str:
    return number(1e3 * seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    return report(arguments, __doc__, "loops", markdown, (BEGIN, END))


if __name__ == "__main__":
    sys.exit(main())
