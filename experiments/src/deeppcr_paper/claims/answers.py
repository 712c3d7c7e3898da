"""What results say to the items: which result answers which part, its checks, and the verdict of all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .check import NO, OPEN, Check, Table, Verdict, verdict
from .items import Item, Part
from .results import Finished, best, second
from .rules import RULES
from .words import SHORT


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
    if check.holds == NO and not RULES[check.rule].at_any_size:
        return replace(check, holds=OPEN, why="What is open asks for larger sizes than those of a quick run.")
    return check


def best_answers(item: Item, results: Sequence[Finished]) -> list[Answer | None]:
    """Of every part, by the one result to take, at full size or nearly; None where there is only a quick one."""
    taken = [(second if part.second else best)(results, part.experiment, part.needs) for part in item.parts]
    found = [answer(part, result) if result else None for part, result in zip(item.parts, taken, strict=True)]
    decided = iter(_decided_once([each for each in found if each]))
    return [each and next(decided) for each in found]


def every_answer(item: Item, results: Sequence[Finished]) -> list[Answer]:
    """By every result, quick ones too, part by part."""
    found = []
    for part in item.parts:
        if part.second:
            result = second(results, part.experiment, part.needs)
            found += [answer(part, result)] if result else []
        else:
            found += [answer(part, each) for each in results if each.name == part.experiment and part.needs(each)]
    return _decided_once(found)


def _decided_once(answers: Sequence[Answer]) -> list[Answer]:
    """Of several parts that tell of the same claim the first decides; the others show their numbers."""
    deciding: dict[str, Part] = {}
    found = []
    for each in answers:
        checks = []
        for check in each.checks:
            first = deciding.setdefault(check.what, each.part) if check.holds else each.part
            checks.append(check if first is each.part else replace(check, holds="", rule="", why=""))
        found.append(replace(each, checks=checks))
    return found


def merged(answers: Sequence[Answer]) -> list[Check]:
    """The checks of several parts as one table.

    A part that tells of claims that an earlier one decides gives what the defaults and the fastest loop take: "as printed" is what decides.
    """
    found: dict[str, Check] = {}
    for each in answers:
        beside = any(check.what in found for check in each.checks)
        for check in each.checks:
            if beside:
                check = replace(check, printed="", loop=re.sub(r"printed [^;]*; ?", "", check.loop))
            first = found.get(check.what, check)
            more = SHORT["auto"] in check.loop and SHORT["auto"] not in first.loop
            loop = "; ".join(filter(None, (first.loop, check.loop))) if more else first.loop or check.loop
            found[check.what] = replace(first, defaults=first.defaults or check.defaults, loop=loop)
    return [check for check in found.values() if check.printed or check.defaults or check.loop]


def verdict_of(item: Item, answers: Iterable[Answer]) -> Verdict:
    """By the results at full size; quick ones decide where there are no others, and agree only if nothing is open."""
    answers = list(answers)
    if not item.parts:
        return Verdict.NOTHING_MEASURED
    if not answers:
        return Verdict.NOT_RUN
    full = [each for each in answers if not each.result.quick]
    found = verdict(check for each in full or answers for check in each.checks)
    return Verdict.OPEN if not full and found is Verdict.SO_FAR else found
