"""``docs/paper.md``: the paper's figures and tables in order, each with ours beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import median

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..claims.answers import Answer, best_answers, merged, verdict_of
from ..claims.check import Check, Verdict, causes
from ..claims.items import ITEMS, OPENING, Item, Part
from ..claims.results import Finished
from ..claims.rules import RULES
from ..figures import Figure
from ..figures.style import span
from ..mlp_summary import repeats_of
from ..timing import spread

Draw = Callable[[Finished], Sequence[Figure]]


@dataclass(frozen=True)
class Shown:
    """An item as the page shows it.

    Attributes:
        parts: each with its answer, or none, and its figures
        checks: of all parts
        remark: what is to be said of the verdict in the overview
    """

    item: Item
    parts: Sequence[tuple[Part, Answer | None, Sequence[Figure]]]
    checks: Sequence[Check]
    verdict: Verdict
    remark: str

    @property
    def heading(self) -> str:
        return f"{self.item.label}: {self.item.title}"


@dataclass(frozen=True)
class Source:
    """A line of the table of what the page was made from."""

    name: str
    more: str
    result: str
    noise: dict[str, str]


_NOT_RUN = "not run yet"
#: The columns of a table of checks, where there is anything to show in them.
COLUMNS = {
    "paper": "paper",
    "printed": "as printed",
    "defaults": "defaults",
    "loop": "fastest loop",
    "holds": "holds (rule)",
}


def make_page(results: Sequence[Finished], draw: Draw) -> tuple[str, list[Figure]]:
    """The page, and the figures that it shows."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    shown = [show(item, results, draw) for item in ITEMS]
    page = environment.get_template("paper.md.jinja").render(
        items=shown,
        opening=list(opening(shown)),
        rules=RULES,
        sources=sources(shown),
        causes=causes,
        columns_of=columns_of,
        tight=tight,
    )
    figures = {figure.name: figure for each in shown for _, _, drawn in each.parts for figure in drawn}
    return re.sub(r"\n{3,}", "\n\n", page).rstrip() + "\n", list(figures.values())


def tight(cell: str) -> str:
    """Sizes without spaces, for columns are narrow.

    >>> tight("63× (L = 16,384, w = 4: 8.18 ms)")
    '63× (L=16,384, w=4: 8.18 ms)'
    """
    return re.sub(r"\b([wL]) ([=≈≥]) (?=\d)", r"\1\2", cell)


def columns_of(checks: Sequence[Check]) -> dict[str, str]:
    return {name: head for name, head in COLUMNS.items() if any(getattr(check, name) for check in checks)}


def opening(shown: Sequence[Shown]) -> Iterator[tuple[dict[str, str], Check]]:
    """The ten claims, each with the check that decides it; those that were not run are left out."""
    by_label = {each.item.label: each for each in shown}
    for claim in OPENING:
        item = by_label[claim.label]
        if found := claim.check(item.checks):
            yield {"claim": claim.claim, "slug": slug(item.heading)}, found


def sources(shown: Sequence[Shown]) -> list[Source]:
    """Every experiment once, with its result or that it was not run yet."""
    found: dict[tuple[str, str], Source] = {}
    for each in shown:
        for part, answer, _ in each.parts:
            key = part.experiment, part.more or ("second" if part.second else "")
            result = answer.result if answer else None
            if key not in found or (result and found[key].result == _NOT_RUN):
                said = (
                    f"{result.short}{f'; smaller: `{result.smaller}`' if result.smaller else ''}"
                    if result
                    else _NOT_RUN
                )
                found[key] = Source(
                    part.experiment,
                    part.more or ("on another machine" if part.second else ""),
                    said,
                    repeats(result) if result else {"loop": "", "printed": ""},
                )
    return list(found.values())


def repeats(result: Finished) -> dict[str, str]:
    """How often a cell was timed, and how far its times are apart: of the two columns that verdicts are made of."""
    said = {}
    for column in ("loop", "printed"):
        places = [
            place
            for r in result.records
            for place in (r, r.get("forward"), r.get("backward"))
            if isinstance(place, dict)
        ]
        entries = [place[column] for place in places if isinstance(place.get(column), dict)]
        every = [repeats_of(entry) for entry in entries if entry.get("seconds")]
        said[column] = f"{span(map(len, every), '.0f')}; {100 * median(map(spread, every)):.0f}%" if every else ""
    return said


def show(item: Item, results: Sequence[Finished], draw: Draw) -> Shown:
    answers = best_answers(item, results)
    parts, remarks = [], []
    for part, answer in zip(item.parts, answers, strict=True):
        parts.append((part, answer, _figures(part, answer.result, draw) if answer else []))
        remarks += ["smaller run"] if answer and answer.result.smaller else []
        remarks += ["in part not run yet"] if not answer and any(answers) else []
    known = [answer for answer in answers if answer]
    return Shown(item, parts, merged(known), verdict_of(item, known), "; ".join(dict.fromkeys(remarks)))


def _figures(part: Part, result: Finished, draw: Draw) -> list[Figure]:
    """Those that the part asks for; the same figure of a second machine gets a name of its own."""
    ending = f"-{slug(result.hardware)}" if part.second else ""
    drawn = draw(result)
    chosen = [figure for pattern in part.figures for figure in drawn if fnmatch(figure.name, pattern)]
    return [replace(figure, name=figure.name + ending) for figure in chosen]


def slug(heading: str) -> str:
    """
    >>> slug("Figure 11: the same over widths: where, when")
    'figure-11-the-same-over-widths-where-when'
    """
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
