"""What cases of ``loops.py`` come to, held against targets: from the cases alone, so that what is timed later, or again, counts with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

import loop_methods
from kernel_report import Claim
from kernels import Case
from loop_methods import BARE, CAPTURED, SOLVE
from loop_problems import FORWARD, TABLE, Loop

#: What the choice may cost over the best way, in how many of the loops it may cost more; and over the bare loop.
OVER_BEST, EXCEPTIONS, OVER_BARE, OVERHEAD = 1.25, 0.1, 1.1, 0.3e-3
#: Seconds of the host in a warm call, and what a cold call may take of a bare loop in the median.
HOST, COLD = 0.15e-3, 2.0
#: Where the public call is timed as a user makes it: a minute in which the host is busy with something else is to spoil none of them.
_CALLS = ("table", "choice")


def claims(parts: Sequence[str], cases: Sequence[Case], loops: Sequence[Loop]) -> Iterator[Claim]:
    """Of every part that was run.

    Args:
        loops: those that were asked for
    """
    wanted = {loop.name for loop in loops} | {case.parameters["loop"] for case in cases if case.suite != "cold"}
    listed = [loop for loop in TABLE if loop.name in wanted]
    for part in parts:
        if part == "choice":
            yield from _of_choice(cases)
        elif part == "cold":
            yield _of_cold(cases)
        elif part == "host":
            for loop in listed:
                yield Claim(f"{loop.name}, host, ms", _milliseconds(cases, ("host",), loop, FORWARD), 1e3 * HOST)
        elif part == "table":
            for loop in listed:
                for direction in loop.directions:
                    if (limit := loop.limit(direction)) is not None:
                        taken = _milliseconds(cases, _CALLS, loop, direction)
                        yield Claim(f"{loop.name}, {direction}, ms", taken, 1e3 * limit)
        elif part == "captured":
            for loop in listed:
                for direction in loop.directions:
                    taken = _milliseconds(cases, ("captured",), loop, direction, CAPTURED)
                    limit = loop.captured_limit(direction)
                    if limit is not None and taken is not None:  # of what only a loop solves nothing is captured
                        yield Claim(f"{loop.name}, {direction}, captured, ms", taken, 1e3 * limit)


def ways_of(cases: Sequence[Case]) -> dict[str, dict[str, float]]:
    """Of every loop of the choice: seconds forward by the public call, by each way it may choose, and of the bare loop."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for case in cases:
        forward = case.suite in _CALLS and case.parameters["direction"] == FORWARD
        if forward and case.passed and case.method in (SOLVE, BARE, *loop_methods.WAYS):
            of_loop = found[case.parameters["loop"]]
            of_loop[case.method] = min([*case.seconds, of_loop.get(case.method, float("inf"))])
    return {name: ways for name, ways in found.items() if {SOLVE, BARE} <= ways.keys()}


def _of_choice(cases: Sequence[Case]) -> Iterator[Claim]:
    found, over, slow = ways_of(cases), 0, []
    for name, ways in found.items():
        ratio = ways[SOLVE] / min(ways.values())
        if ways[SOLVE] > OVER_BARE * ways[BARE] + OVERHEAD:
            slow.append(name)
        if ratio > OVER_BEST:
            over += 1
            print(f"{name}: {ratio:.2f} of the best way")
    if found:
        yield Claim(f"share of {len(found)} loops over {OVER_BEST} of the best way", over / len(found), EXCEPTIONS)
        name = f"loops over {OVER_BARE} of the bare loop and {1e3 * OVERHEAD} ms"
        yield Claim(f"{name} ({', '.join(slow)})" if slow else name, len(slow), 0)


def _of_cold(cases: Sequence[Case]) -> Claim:
    seconds: dict[str, dict[int, float]] = {SOLVE: {}, BARE: {}}
    for case in cases:
        if case.suite == "cold" and case.passed:
            seconds[case.method][case.parameters["problem"]] = case.seconds[0]
    ratios = [taken / seconds[BARE][problem] for problem, taken in seconds[SOLVE].items()]
    return Claim(f"cold calls over bare loops, median of {len(ratios)}", median(ratios) if ratios else None, COLD)


def _milliseconds(
    cases: Sequence[Case], suites: Sequence[str], loop: Loop, direction: str, method: str = SOLVE
) -> float | None:
    return min(
        (
            1e3 * min(case.seconds)
            for case in cases
            if case.suite in suites and case.method == method and case.passed and case.seconds
            if case.parameters["loop"] == loop.name and case.parameters["direction"] == direction
        ),
        default=None,
    )
