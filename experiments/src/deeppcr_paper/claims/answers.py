"""What results say to the items: which result answers which part, its checks, and the verdict of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .check import NO, OPEN, Check, Table, Verdict, verdict
from .items import Item, Part
from .results import Finished, best, second


@dataclass(frozen=True)
class Answer:
    """What one result says to a part of an item."""

    part: Part
    result: Finished
    checks: Sequence[Check]
    table: Table | None


def answer(part: Part, result: Finished) -> Answer:
    with result.blamed():
        checks, table = part.read(result), part.also(result) if part.also else None
    return Answer(part, result, [_of_quick_run(check) for check in checks] if result.quick else checks, table)


def _of_quick_run(check: Check) -> Check:
    """Small sizes refute no claim about large ones."""
    if check.holds == NO and not check.at_any_size:
        return replace(check, holds=OPEN, why="What is open asks for larger sizes than those of a quick run.")
    return check


def best_answer(part: Part, results: Sequence[Finished]) -> Answer | None:
    """By the one result to take, at full size or nearly; none where there is only a quick one."""
    result = (second if part.second else best)(results, part.experiment, part.needs)
    return answer(part, result) if result else None


def every_answer(item: Item, results: Sequence[Finished]) -> list[Answer]:
    """By every result, quick ones too, part by part."""
    found = []
    for part in item.parts:
        if part.second:
            found += [each] if (each := best_answer(part, results)) else []
        else:
            found += [answer(part, each) for each in results if each.name == part.experiment and part.needs(each)]
    return found


def verdict_of(item: Item, answers: Iterable[Answer]) -> Verdict:
    """By the results at full size; quick ones decide where there are no others, and agree only if nothing is open."""
    answers = list(answers)
    if not item.parts:
        return Verdict.NOTHING_MEASURED
    if not answers:
        return Verdict.NOT_RUN
    full = [each for each in answers if not each.result.quick]
    checks = [check for each in full or answers for check in each.checks]
    found = verdict(checks)
    if not full and found is Verdict.AGREES and any(check.holds == OPEN for check in checks):
        return Verdict.OPEN
    return found
