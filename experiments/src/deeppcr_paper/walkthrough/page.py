"""``docs/paper.md``: the paper's figures and tables in order, each with ours beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..claims.answers import Answer, best_answer, verdict_of
from ..claims.check import Verdict, causes
from ..claims.findings import FINDINGS, answered
from ..claims.items import ITEMS, Item, Part
from ..claims.results import Finished, command, folder_of_images
from ..figures import Figure

Draw = Callable[[Finished], Sequence[Figure]]


@dataclass(frozen=True)
class Shown:
    """An item as the page shows it.

    Attributes:
        parts: each with its answer, or none, and its figures
        remark: what is to be said of the verdict in the overview
    """

    item: Item
    parts: Sequence[tuple[Part, Answer | None, Sequence[Figure]]]
    verdict: Verdict
    remark: str

    @property
    def heading(self) -> str:
        return f"{self.item.label}: {self.item.title}"


def make_page(results: Sequence[Finished], draw: Draw) -> tuple[str, list[Figure]]:
    """The page, and the figures that it shows."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters["slug"] = slug
    shown = [show(item, results, draw) for item in ITEMS]
    page = environment.get_template("paper.md.jinja").render(
        items=shown,
        findings=[answered(finding, results) for finding in FINDINGS],
        causes=causes,
        command=command,
        folder_of_images=folder_of_images,
    )
    figures = {figure.name: figure for each in shown for _, _, drawn in each.parts for figure in drawn}
    return page.rstrip() + "\n", list(figures.values())


def show(item: Item, results: Sequence[Finished], draw: Draw) -> Shown:
    parts, remarks = [], []
    for part in item.parts:
        answer = best_answer(part, results)
        parts.append((part, answer, _figures(part, answer.result, draw) if answer else []))
        remarks += ["smaller run"] if answer and answer.result.smaller else []
        remarks += ["in part not run yet"] if not answer and len(item.parts) > 1 else []
    found = verdict_of(item, [answer for _, answer, _ in parts if answer])
    return Shown(item, parts, found, "" if found is Verdict.NOT_RUN else "; ".join(dict.fromkeys(remarks)))


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
