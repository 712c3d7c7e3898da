"""One claim of the paper beside ours, and the verdict of several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .rules import NO, OPEN, RULES, YES, judge

__all__ = ["NO", "OPEN", "YES", "Check", "Table", "Verdict", "causes", "held", "verdict"]


class Verdict(Enum):
    """Of a figure or table of the paper, as a reader sees it."""

    AGREES = "agrees"
    SO_FAR = "agrees as far as decided"
    PARTLY = "agrees in part"
    DIFFERS = "differs"
    OPEN = "open"
    NOT_RUN = "not run yet"
    NOTHING_MEASURED = "nothing to measure"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim of the paper beside ours.

    Attributes:
        what: is claimed
        paper: its number, in words
        printed: ours by the paper's method as printed, which alone decides
        defaults: ours with the library's defaults
        loop: both beside the fastest loop there is
        holds: ``YES``, ``NO``, ``OPEN`` where our result cannot tell; empty for what the paper does not claim
        rule: by which that was decided
        why: the cause, where ours differs or cannot tell
    """

    what: str
    paper: str = ""
    printed: str = ""
    defaults: str = ""
    loop: str = ""
    holds: str = ""
    rule: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        if self.holds in (YES, NO) and self.rule not in RULES:
            raise ValueError(f"{self.what}: {self.holds} by no rule of the table")


def held(rule: str, ours: Any, *paper_number: Any, why: str = "", **words: Any) -> Check:
    """A check that is decided by a rule of the table; see `judge`. ``why`` is said where it does not hold."""
    return Check(rule=rule, holds=judge(rule, ours, *paper_number), why=why, **words)


@dataclass(frozen=True)
class Table:
    """Beside the checks: numbers that the paper has not, or all of its own.

    Attributes:
        title: a line above it, or nothing
        heads: of its columns
        rows: cells
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def verdict(checks: Iterable[Check]) -> Verdict:
    """Of all claims together.

    >>> verdict([Check(what="", holds=YES, rule="bounded"), Check(what="", holds=OPEN)]).value
    'agrees as far as decided'
    """
    found = {check.holds for check in checks} & {YES, NO, OPEN}
    if found >= {YES, NO}:
        return Verdict.PARTLY
    if YES in found:
        return Verdict.SO_FAR if OPEN in found else Verdict.AGREES
    return Verdict.DIFFERS if NO in found else Verdict.OPEN


def causes(checks: Iterable[Check]) -> list[str]:
    """Why something differs or is open, each once."""
    return list(dict.fromkeys(check.why for check in checks if check.why and check.holds != YES))
