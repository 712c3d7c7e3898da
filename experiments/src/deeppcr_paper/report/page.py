"""The page: one HTML file that needs nothing else, made from results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

import deeppcr

from ..claims.answers import Answer, every_answer, merged, verdict_of
from ..claims.check import Check, Verdict, causes
from ..claims.items import ITEMS, OPENING, Item, Opening, Part
from ..claims.results import Finished
from ..claims.rules import RULES
from ..figures import Figure, draw
from ..figures.style import LABELS
from ..mlp_summary import MEANINGS
from .speedup_map import map_data


@dataclass(frozen=True)
class Row:
    """An item of the paper with what all results say to it, and the parts of which there is none."""

    item: Item
    answers: Sequence[Answer]
    missing: Sequence[Part]
    verdict: Verdict


def rows(results: Sequence[Finished]) -> list[Row]:
    found = []
    for item in ITEMS:
        answers = every_answer(item, results)
        missing = [part for part in item.parts if not any(each.part is part for each in answers)]
        found.append(Row(item, answers, missing, verdict_of(item, answers)))
    return found


def opening(rows: Sequence[Row]) -> list[tuple[Opening, Check]]:
    """The claims with which the page opens, each with the check that decides it; by results of full size only."""
    answers = {row.item.label: [each for each in row.answers if not each.result.quick] for row in rows}
    return [(claim, found) for claim in OPENING if (found := claim.check(merged(list(answers[claim.label]))))]


def full_title(what: str, quick: bool) -> str:
    """What is said of quick runs only is left out elsewhere.

    >>> full_title("training on MNIST (quick: digits)", False)
    'training on MNIST'
    """
    return what if quick else re.sub(r" \(quick: [^)]*\)", "", what)


def heading(result: Finished, beside: Sequence[Finished]) -> str:
    """The machine; and by which method networks were trained, where another result beside it is of the same machine."""
    if sum(each.hardware == result.hardware for each in beside) < 2:
        return result.hardware
    return f"{result.hardware}: {LABELS['printed' if result.variant == 'paper' else 'auto']}"


def drawn(result: Finished) -> Sequence[Figure]:
    with result.blamed():
        return draw(result.content)


def make_page(results: Sequence[Finished], figures_of: Callable[[Finished], Sequence[Figure]] = drawn) -> str:
    """The whole page, of results in the order in which they are shown; the same results give the same bytes."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"slug": slug, "prose": prose, "full_title": full_title}
    table = rows(results)
    used = {answer.result.path for row in table for answer in row.answers}
    results = [result for result in results if not result.committed or result.path in used]
    own = [result for result in results if not result.committed]
    experiments = [
        (name, [(result, figures_of(result)) for result in group])
        for name, group in groupby(own, key=lambda result: result.name)
    ]
    maps = map_data(results)
    return environment.get_template("page.html.jinja").render(
        results=results,
        own=own,
        rows=table,
        experiments=experiments,
        maps=maps,
        map_json=embedded(maps),
        meanings={LABELS[column]: meaning for column, meaning in MEANINGS.items()},
        causes=causes,
        opening=opening(table),
        rules=RULES,
        own_names=own_names,
        heading=heading,
        verdict_of=verdict_of,
        version=deeppcr.__version__,
    )


def embedded(data: Any) -> Markup:
    """JSON for a script element: nothing in it ends the element or begins a comment.

    >>> embedded("</script>")
    Markup('"\\\\u003c/script>"')
    """
    return Markup(json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def own_names(svg: str, prefix: str) -> Markup:
    """The figure with its names made its own: the same figure of another machine stands in the same page."""
    return Markup(re.sub(r'((?:\bid="|url\(#|\bhref="#))', rf"\g<1>{prefix}-", svg))


def prose(text: str) -> Markup:
    """Text with code in backticks, and links to pages that this one cannot reach without their targets.

    >>> prose("[the page](page.md) of `a < b` in 5 ms")
    Markup('the page of <code>a &lt; b</code> in 5\\xa0ms')
    """
    html = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", str(escape(text)))
    html = re.sub(r"`([^`]+)`", r"<code>\1</code>", html)
    # Lines do not end inside "L = 256", "fig. 3" or "5 ms".
    within = r"\b(?:L|w|C|w²L) [=≈] (?=\d)|\b(?:[Ff]igs?\.|Figure|Table|table|app\.|chunk) (?=\w)|(?<=\d) (?:[µm]?s|min|h|×)\b"
    return Markup(re.sub(within, lambda found: found[0].replace(" ", "\u00a0"), html))


def slug(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "-", text).strip("-")
