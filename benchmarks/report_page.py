"""How tables come from result files into a page: what every ``*_report.py`` does, whatever it reports."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results"


def stored(name: str, folder: Path = RESULTS) -> list[Path]:
    """Result files of whole runs."""
    return sorted(path for path in folder.glob(f"{name}-*.json") if "quick" not in path.name.split("-"))


def newest(paths: Sequence[Path]) -> tuple[Path, dict[str, Any]]:
    """The file of the last run, and what is in it."""
    records = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return max(records, key=lambda each: each[1]["date"])


def put(page: str, table: str, first: str, last: str) -> str:
    """The page with the table between its marks."""
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"the page has no place for the table: {first} and {last}")
    return f"{before}{first}\n\n{table}\n\n{last}{after}"


def report(
    arguments: Sequence[str] | None,
    description: str | None,
    program: str,
    markdown: Callable[[Any, str], str],
    marks: tuple[str, str],
    *,
    nothing_yet: str | None = None,
    shown: Callable[[Any], str] | None = None,
    beside: Callable[[Any, Path], None] = lambda record, folder: None,
) -> int:
    """Write what the newest of some files says into a page, or show it.

    Args:
        arguments: of the command line
        description: the report's docstring
        program: whose files they are
        markdown: a record and its file's name to tables
        marks: between which they stand in the page
        nothing_yet: what stands there where no files are given and none are stored; None where files have to be given
        shown: a record to what is shown where there is no page, if not the tables
        beside: what else is written into the page's folder
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    optional = nothing_yet is not None
    usual = " (default: those of results/)" if optional else ""
    parser.add_argument("results", type=Path, nargs="*" if optional else "+", help=f"files of {program}.py{usual}")
    parser.add_argument("--page", type=Path, help="the page to write the tables into")
    options = parser.parse_args(arguments)
    files = options.results or stored(program)
    path, record = newest(files) if files else (None, None)
    text = str(nothing_yet) if path is None else markdown(record, path.name)
    if options.page is None:
        print(text if shown is None else shown(record))
        return 0
    options.page.write_text(put(options.page.read_text(encoding="utf-8"), text, *marks), encoding="utf-8")
    if record is not None:
        beside(record, options.page.parent)
    return 0
