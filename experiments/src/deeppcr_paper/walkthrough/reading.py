"""What a result says to the paper's claims: one check a claim, and the verdict of several.

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
    """

    what: str
    paper: str
    ours: str
    holds: str = ""
    why: str = ""


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


def table(checks: Sequence[Check]) -> list[str]:
    """The checks as a table in Markdown, and below it the causes of what differs."""
    lines = ["| | paper | ours | holds |", "|---|---|---|---|"]
    lines += [f"| {check.what} | {check.paper or '–'} | {check.ours} | {check.holds or '–'} |" for check in checks]
    causes = dict.fromkeys(check.why for check in checks if check.why and check.holds != YES)
    return [*lines, *(line for why in causes for line in ("", why))]


def listed(words: Sequence[str]) -> str:
    """
    >>> listed(["one", "two", "three"])
    'one, two and three'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def span(values: Iterable[float]) -> str:
    """From the least to the most, to two digits: depths between measured ones are not known better.

    >>> span([1234.0, 88.0]), span([16.0])
    ('88 to 1,200', '16')
    """
    found = sorted(float(f"{value:.2g}") for value in values)
    low, high = f"{found[0]:,.0f}", f"{found[-1]:,.0f}"
    return low if low == high else f"{low} to {high}"
