"""One claim of the paper beside ours, and the verdict of several.

The rules that decide are the same everywhere: a speed-up holds from nine tenths of the paper's on, a depth up to twice the
paper's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

YES, NO, OPEN = "yes", "no", "open"
SPEED_UP, DEPTH = 0.9, 2.0


class Verdict(Enum):
    """Of a figure or table of the paper, as a reader sees it."""

    AGREES = "agrees"
    PARTLY = "agrees in part"
    DIFFERS = "differs"
    OPEN = "open"
    NOT_RUN = "not run yet"
    NOTHING_MEASURED = "nothing to measure"


@dataclass(frozen=True)
class Check:
    """One claim of the paper beside ours.

    Attributes:
        what: is claimed
        paper, ours: the figures, in words
        holds: ``YES``, ``NO``, ``OPEN`` where our result cannot tell; empty for what the paper does not claim
        why: the cause, where ours differs or cannot tell
        at_any_size: whether it must hold for small networks and short trainings, too: then a quick run can refute it
    """

    what: str
    paper: str
    ours: str
    holds: str = ""
    why: str = ""
    at_any_size: bool = False


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


def holds(condition: bool) -> str:
    return YES if condition else NO


def verdict(checks: Iterable[Check]) -> Verdict:
    """Of all claims together; what is open does not count where something is known.

    >>> verdict([Check("", "", "", YES), Check("", "", "", OPEN)]).value
    'agrees'
    """
    known = {check.holds for check in checks} & {YES, NO}
    if not known:
        return Verdict.OPEN
    return Verdict.PARTLY if len(known) == 2 else Verdict.AGREES if known == {YES} else Verdict.DIFFERS


def causes(checks: Iterable[Check]) -> list[str]:
    """Why something differs or is open, each once."""
    return list(dict.fromkeys(check.why for check in checks if check.why and check.holds != YES))
