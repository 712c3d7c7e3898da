"""``docs/paper.md``: the paper's figures and tables in order, each with ours beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from ..catalogue import EXPERIMENTS
from ..figures import Figure
from ..report.collect import Finished
from . import findings
from .choice import Results, again, command, fewer, smaller, source
from .items import ITEMS, Item, Part
from .reading import Check, Verdict, table, verdict

Draw = Callable[[Finished], Sequence[Figure]]

_INTRO = """# The paper, figure by figure

Every figure and table of *DeepPCR: Parallelizing Sequential Operations in Neural Networks* in its order: what the paper
claims with it, what we measured, whether that agrees, and the command that measures it again. The same results make
[a page with every figure and a map of the speed-up](report.html).

Every number of ours on this page, and every verdict, is computed from the result files in `results/` by `make paper`, in
under two minutes on a CPU; none is typed. Of several results of an experiment the newest from a GPU at the paper's sizes is
taken, else the newest that is smaller, and the page says in what; quick runs never.

- **Agrees**: every row of its table holds, but for those that are **open**, because our run cannot tell. **Agrees in part**: some
  rows do not hold; **differs**: none does. A speed-up holds if it is at least nine tenths of the paper's, a depth if it is at
  most twice; a time that grows less than √L counts as logarithmic.
- **As printed** is the paper's method (`chunk=1`, its stopping test, its reduction) in PyTorch; forward passes of networks are replayed
  as CUDA graphs, as this library does with any solve that repeats, where their Jacobians take less than 256 MiB. **The defaults** are this
  library's, in parallel: networks by `mode="parallel"`, though `mode="auto"`, which is what one gets unasked, takes the fused loop
  where that is expected to be the faster.
- **Eager loop**: layer by layer in eager PyTorch, which the paper compares with, on a V100. **Loop in a CUDA graph** and **fused
  loop** (one kernel that goes from layer to layer by itself) are stronger."""


@dataclass(frozen=True)
class Shown:
    """An item with its lines, what is to be said of it in the overview, and the figures that it shows."""

    item: Item
    lines: Sequence[str]
    verdict: Verdict
    remark: str
    figures: Sequence[Figure]


def make_page(results: Results, draw: Draw) -> tuple[str, list[Figure]]:
    """The page, and the figures that it shows."""
    shown = [show(item, results, draw) for item in ITEMS]
    lines = [
        _INTRO,
        "",
        "| paper | what it shows | ours |",
        "|---|---|---|",
        *(
            f"| [{each.item.label}](#{slug(_heading(each.item))}) | {each.item.title} | {_said(each)} |"
            for each in shown
        ),
        "",
        "## Findings",
        "",
        *findings.lines(results),
        "",
        "## Figures and tables",
        "",
        *(line for each in shown for line in (*each.lines, "")),
    ]
    figures = {figure.name: figure for each in shown for figure in each.figures}
    return "\n".join(lines).rstrip() + "\n", list(figures.values())


def show(item: Item, results: Results, draw: Draw) -> Shown:
    lines = [f"### {_heading(item)}", "", f"**The paper.** {item.claim}"]
    lines += ["", item.note] if item.note else []
    checks: list[Check] = []
    figures: list[Figure] = []
    remarks: list[str] = []
    run = 0
    for part in item.parts:
        result = (results.second if part.second else results.best)(part.experiment, part.needs)
        if result is None:
            lines += ["", *_not_run(part)]
            remarks += ["in part not run yet"] if len(item.parts) > 1 else []
            continue
        run += 1
        with result.blamed():
            mine, also = part.read(result), part.also(result) if part.also else []
            drawn = _chosen(draw(result), part, f"-{slug(result.hardware)}" if part.second else "")
        lines += ["", *_result(result, drawn), "", *table(mine), *(["", *also] if also else [])]
        lines += ["", *_commands(result)]
        checks += mine
        figures += drawn
        remarks += ["smaller run"] if smaller(result) else []
    found = verdict(checks)
    if not item.parts:
        found = Verdict.NOTHING_MEASURED
    elif not run:
        found, remarks = Verdict.NOT_RUN, []
    return Shown(item, lines, found, "; ".join(dict.fromkeys(remarks)), figures)


def _heading(item: Item) -> str:
    return f"{item.label}: {item.title}"


def slug(heading: str) -> str:
    """
    >>> slug("Figure 11: the same over widths: where, when")
    'figure-11-the-same-over-widths-where-when'
    """
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _said(shown: Shown) -> str:
    return f"**{shown.verdict.value}**" + (f" ({shown.remark})" if shown.remark else "")


def _not_run(part: Part) -> list[str]:
    known = any(each.name == part.experiment for each in EXPERIMENTS)
    why = "" if known else " This version of `deeppcr-paper reproduce` does not have the experiment yet."
    where, there = (" on a second machine", "   # on another machine") if part.second else ("", "")
    return [f"**Ours.** Not run yet at full size{where}.{why}", "", "```sh", command(part.experiment) + there, "```"]


def _result(result: Finished, figures: Sequence[Figure]) -> list[str]:
    less = smaller(result)
    size = f" **Not run yet at full size**: this run is smaller, `{less}`." if less else ""
    size += f" At full size; its timings were cut short: `{cut}`." if (cut := fewer(result)) else ""
    lines = [f"**Ours.** From {source(result)}.{size}"]
    for figure in figures:
        lines += ["", f"![{figure.title}](paper/{figure.name}.svg)", "", f"*{_plain(figure.caption)}*"]
    return lines


def _commands(result: Finished) -> list[str]:
    lines = [command(result.name)]
    if smaller(result):
        lines += [f"{again(result)}   # the smaller run above"]
    return ["```sh", *lines, "```"]


def _chosen(figures: Sequence[Figure], part: Part, ending: str) -> list[Figure]:
    """Those that the part asks for; the same figure of a second machine gets a name of its own."""
    chosen = [figure for pattern in part.figures for figure in figures if fnmatch(figure.name, pattern)]
    return [replace(figure, name=figure.name + ending) for figure in chosen]


def _plain(caption: str) -> str:
    """In Markdown a star would end the slanted letters."""
    return caption.replace("*", "\\*")
