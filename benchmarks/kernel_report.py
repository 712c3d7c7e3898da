"""What the measurements of ``kernels.py`` amount to: times, targets and ratios, as a table for the terminal or a page.

    python benchmarks/kernel_report.py results/kernels-*.json [--page docs/performance.md]

Of several files the newest counts. With --page the table is written into the page, between its two marks; otherwise it
is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from report_page import report

OURS = ("call", "captured")
#: No baselines: a training step in the mode that "auto" chooses (a call is in parallel), and with nothing in the layers' place.
DEFAULT, REST = "default mode", "all but the layers"
_NO_BASELINES = (DEFAULT, f"{DEFAULT}, captured", REST)
BEGIN = "<!-- the table begins: written by benchmarks/kernel_report.py -->"
END = "<!-- the table ends -->"
NOTHING_YET = "No measurements are stored yet: the commands above make them."
#: The targets of networks are for this many layers. Milliseconds by width: the forward pass of a network as a call and captured, its backward pass captured.
_LAYERS = 16_384
_FORWARD = {
    4: {"call": 0.25, "captured": 0.11},
    8: {"call": 0.25, "captured": 0.11},
    16: {"call": 0.25, "captured": 0.11},
    32: {"captured": 0.22},
    64: {"captured": 0.42},
    128: {"captured": 3.0},
}
_BACKWARD = {width: {"captured": 0.10} for width in (4, 8, 16)}
#: The depth from which on the parallel method is to win: over the eager loop, over the fused loop.
_BREAK_EVEN = {"eager loop": 2**4, "fused loop": 2**9}
_MEMORY = 1.25
_BANDWIDTH = 0.8


@dataclass
class Row:
    """One problem. Times are minima in seconds; ``limits`` are those of "call" and "captured"."""

    name: str
    suite: str
    parameters: dict[str, Any]
    times: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    iterations: int | None = None
    finished_by_loop: bool = False
    failures: dict[str, str] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    @property
    def met(self) -> dict[str, bool]:
        """Whether each limit holds; what could not be timed does not hold."""
        return {of: of in self.times and self.times[of] <= limit for of, limit in self.limits.items()}

    @property
    def ratios(self) -> dict[str, float]:
        """Every baseline's time over ours: over the captured one where it is captured itself, else over the call."""
        found = {}
        for name, seconds in self.times.items():
            ours = self.times.get("captured" if is_captured(name) else "call")
            if name not in (*OURS, *_NO_BASELINES) and ours is not None:
                found[name] = seconds / ours
        return found


@dataclass(frozen=True)
class Claim:
    """A number that several rows give together, and what it is to be at most."""

    name: str
    value: float | None
    limit: float

    @property
    def met(self) -> bool:
        return self.value is not None and self.value <= self.limit


def is_captured(method: str) -> bool:
    """Whether a method is inside a CUDA graph.

    >>> is_captured("fused loop, captured"), is_captured("loop in a CUDA graph"), is_captured("eager loop")
    (True, True, False)
    """
    return method.endswith(("captured", "in a CUDA graph"))


def limits(suite: str, parameters: Mapping[str, Any], times: Mapping[str, float]) -> dict[str, float]:
    """Seconds that the call and the captured call may take; some are fractions of another method's time."""
    width, plain = parameters.get("w", 0), parameters.get("weights") == "default ReLU"
    if suite in ("forward", "backward"):
        if parameters["L"] != _LAYERS:
            return {}
        if suite == "forward" and width == 256:
            pairs = {"call": "fused loop", "captured": "fused loop, captured"}
            return {ours: times[other] for ours, other in pairs.items() if other in times}
        table = _FORWARD if suite == "forward" else _BACKWARD
        return {of: 1e-3 * ms * (1 if plain else 2) for of, ms in table.get(width, {}).items()}
    if suite == "dense solve" and "jax.lax.associative_scan" in times:
        limit = times["jax.lax.associative_scan"] / (2 if width == 64 else 3)
        return dict.fromkeys(OURS, limit)
    if suite == "diagonal solve":
        if parameters["sequences"] == 1:
            return {"captured": 0.03e-3} if parameters["L"] == 2**20 else {}
        return {"captured": times["copy, captured"] / _BANDWIDTH} if "copy, captured" in times else {}
    if suite == "ResNet step" and parameters["depth"] == 1_024:
        return dict.fromkeys(["call", DEFAULT] if DEFAULT in times else ["call"], 0.9e-3)
    return {}


def rows(cases: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The cases of a file, problem by problem."""
    found: dict[str, Row] = {}
    for case in cases:
        suite, parameters = case["suite"], case["parameters"]
        named = [f"{key} = {value:,}" if isinstance(value, int) else value for key, value in parameters.items()]
        name = ", ".join([suite, *named])
        row = found.setdefault(name, Row(name, suite, dict(parameters)))
        method = case["method"]
        if case["passed"]:
            row.times[method] = min(case["seconds"])
        else:
            row.failures[method] = case["failure"]
        if method in OURS and case["iterations"] is not None:
            row.iterations = max(row.iterations or 0, case["iterations"])
            row.finished_by_loop |= case["result"] == "FINISHED_BY_LOOP"
        if case["peak_bytes"] is not None:
            row.bytes[method] = case["peak_bytes"]
    for row in found.values():
        row.limits = limits(row.suite, row.parameters, row.times)
    return list(found.values())


def break_even(ours: Mapping[int, float], theirs: Mapping[int, float]) -> int | None:
    """The depth from which on ours is faster at every depth that was measured.

    >>> break_even({8: 3.0, 16: 3.0, 32: 3.0}, {8: 1.0, 16: 4.0, 32: 9.0})
    16
    >>> break_even({8: 3.0, 16: 3.0}, {8: 4.0, 16: 2.0}) is None
    True
    """
    found = None
    for depth in sorted(set(ours) & set(theirs), reverse=True):
        if ours[depth] >= theirs[depth]:
            break
        found = depth
    return found


def claims(found: Sequence[Row]) -> list[Claim]:
    """Depths of break-even, and the peak memory in parallel over that layer by layer."""
    result = []
    even = [row for row in found if row.suite == "break-even"]

    def times(method: str) -> dict[int, float]:
        return {row.parameters["L"]: row.times[method] for row in even if method in row.times}

    for other, limit in _BREAK_EVEN.items():
        for ours in OURS:
            theirs = f"{other}, captured" if ours == "captured" and other == "fused loop" else other
            if times(ours) and times(theirs):
                depth = break_even(times(ours), times(theirs))
                result.append(Claim(f"break-even depth, {ours} against {theirs}", depth, limit))
    for row in found:
        if {"call", "fused loop"} <= set(row.bytes):
            weights = 4 * row.parameters["L"] * row.parameters["w"] * (row.parameters["w"] + 1)
            ours, theirs = row.bytes["call"], row.bytes["fused loop"]
            name = f"peak memory, {row.name}, over the fused loop"
            result.append(Claim(f"{name}, weights included", (ours + weights) / (theirs + weights), _MEMORY))
            if theirs:
                result.append(Claim(f"{name}, weights excluded", ours / theirs, float("inf")))
    return result


def number(value: float) -> str:
    """Four digits, as many as a time is worth.

    >>> number(0.10151), number(436.04), number(13245.0)
    ('0.1015', '436', '13,245')
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 10 else f"{value:.3f}" if value >= 1 else f"{value:.4f}"


def _cells(row: Row) -> list[str]:
    """call, captured, target, met, baselines."""
    times = [number(1e3 * row.times[of]) if of in row.times else "failed" if of in row.failures else "" for of in OURS]
    target = ", ".join(f"{of} {number(1e3 * limit)}" for of, limit in row.limits.items())
    met = ", ".join("yes" if held else "no" for held in row.met.values())
    others = []
    for name, seconds in row.times.items():
        if name in row.ratios:
            ratio = row.ratios[name]
            digits = 0 if ratio >= 10 else 1 if ratio >= 1 else 2
            others.append(f"{name} {number(1e3 * seconds)} ({ratio:,.{digits}f}x)")
        elif name in _NO_BASELINES:
            others.append(f"{name} {number(1e3 * seconds)}")
    others += [f"{name}: {why}" for name, why in row.failures.items()]
    return [*times, target, met, "; ".join(others)]


def _notes(row: Row) -> str:
    iterations = "" if row.iterations is None else str(row.iterations)
    return iterations + (", then the loop" if row.finished_by_loop else "")


def _claim_value(claim: Claim) -> str:
    return "none" if claim.value is None else f"{claim.value:,.2f}".removesuffix(".00")


def text(found: Sequence[Row]) -> str:
    """For a terminal: one or two lines a problem."""
    lines = []
    for row in found:
        call, captured, target, met, others = _cells(row)
        notes = _notes(row)
        line = f"{row.name:52} call {call or '-':>8}  captured {captured or '-':>8}"
        line += f"  target {target}: {met}" if target else ""
        line += f"  iterations {notes}" if notes else ""
        lines.append(line)
        if others:
            lines.append(f"    {others}")
    return "\n".join(lines)


def text_of_claims(found: Sequence[Row]) -> str:
    lines = []
    for claim in claims(found):
        verdict = "" if claim.limit == float("inf") else f", target {claim.limit:g}: {'yes' if claim.met else 'no'}"
        lines.append(f"{claim.name}: {_claim_value(claim)}{verdict}")
    return "\n".join(lines)


def _of_nothing(record: Mapping[str, Any]) -> str:
    seconds = record.get("seconds_of_nothing")  # which older files do not have
    return "" if seconds is None else f" Of every call {1e3 * seconds:.4f} are the clock's, timed with nothing to do."


#: On a page: columns of baselines, each by the first of these methods that was timed.
_COLUMNS = {
    "loop in one kernel": ("fused loop, captured", "fused loop"),
    "loop in a CUDA graph": ("loop in a CUDA graph",),
    "eager loop": ("eager loop",),
    "other": ("jax.lax.associative_scan", "copy, captured", "copy", "Algorithm 1, captured", "Algorithm 1"),
}
_OTHERS = {"jax.lax.associative_scan": "JAX's scan", "Algorithm 1, captured": "Algorithm 1", "copy, captured": "copy"}
#: Problems that a page leaves out: those of one kind, which have a line of their own, and widths between others.
_NOT_SHOWN = {"suite": ("break-even",), "w": (4, 8, 32, 128)}


def measured_by(record: Mapping[str, Any], file_name: str) -> str:
    """On what, when and with what, for a page; the file names the rest."""
    versions = record["versions"]
    software = [f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions]
    where = [record["machine"]["hardware"], record["date"][:10], f"commit {record['commit']}", *software]
    return f"{', '.join(where)}; `results/{file_name}`."


def goals(met: Sequence[bool]) -> str:
    """How many of a run's targets were reached.

    >>> goals([True, False])
    '1 of 2 goals, set before the run, were reached'
    """
    return f"{sum(met)} of {len(met)} goals, set before the run, were reached"


def markdown(record: Mapping[str, Any], file_name: str) -> str:
    """For a page: a row for problems with baselines; all of them stand in the text for a terminal."""
    found = rows(record["cases"])
    lines = [
        f"{measured_by(record, file_name)} Milliseconds, minimum over the repeats; loops are captured where they can be.{_of_nothing(record)}",
        "",
        f"| problem | call | captured | {' | '.join(_COLUMNS)} |",
        "|---" * (3 + len(_COLUMNS)) + "|",
    ]
    for row in found:
        hidden = row.suite in _NOT_SHOWN["suite"] or row.parameters.get("w") in _NOT_SHOWN["w"]
        if row.ratios and not hidden:
            call, captured, *_ = _cells(row)
            name = row.name.replace(" = ", "\u00a0=\u00a0")  # lines do not end inside "w = 4"
            lines.append(f"| {name} | {call} | {captured} | {' | '.join(_baselines(row))} |")
    lines += ["", f"{goals([held for row in found for held in row.met.values()])}; the text for a terminal lists them."]
    for claim in claims(found):
        if claim.limit == float("inf") or "captured" in claim.name:
            continue  # of these the text for a terminal tells
        limit = f" (goal: at most {claim.limit:g}{'' if claim.met else ', missed'})"
        lines += [""] if not lines[-1].startswith("- ") else []
        lines.append(f"- {claim.name}: {_claim_value(claim)}{limit}")
    return "\n".join(lines)


def _baselines(row: Row) -> list[str]:
    cells = []
    for column, methods in _COLUMNS.items():
        method = next((each for each in methods if each in row.times), None)
        cell = "" if method is None else number(1e3 * row.times[method])
        cells.append(f"{cell}, {_OTHERS.get(method or '', method)}" if cell and column == "other" else cell)
    return cells


def _shown(record: Mapping[str, Any]) -> str:
    found = rows(record["cases"])
    return f"{text(found)}\n{text_of_claims(found)}"


def main(arguments: Sequence[str] | None = None) -> int:
    return report(arguments, __doc__, "kernels", markdown, (BEGIN, END), shown=_shown)


if __name__ == "__main__":
    sys.exit(main())
