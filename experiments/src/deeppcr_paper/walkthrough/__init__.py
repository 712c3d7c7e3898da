"""Everything in the documentation that is made from results: the walk-through, its figures, the README's table, the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import figures
from ..claims.results import Finished, best, collect, finished
from ..figures import Figure
from ..report.page import make_page as make_report
from ..store import write_text
from . import headline
from .page import make_page

__all__ = ["build", "write"]

#: Figures of pages that were written by hand, by the experiment that makes them.
_BY_HAND = {"mlp-gain": "docs/figures"}


def build(root: Path, draw: Callable[[dict[str, Any]], Sequence[Figure]] = figures.draw) -> dict[str, str]:
    """Every generated file of a checkout: its path there, and its content. The same results give the same bytes."""
    results = finished(root / "results")
    drawn: dict[Path, Sequence[Figure]] = {}

    def once(result: Finished) -> Sequence[Figure]:
        if result.path not in drawn:
            with result.blamed():
                drawn[result.path] = draw(result.content)
        return drawn[result.path]

    page, shown = make_page(results, once)
    files = {"docs/paper.md": page}
    files |= {f"docs/paper/{figure.name}.svg": figure.file() for figure in shown}
    for experiment, place in _BY_HAND.items():
        result = best(results, experiment)
        files |= {f"{place}/{figure.name}.svg": figure.file() for figure in (once(result) if result else ())}
    files["docs/report.html"] = make_report(collect([root / "results"]), once)
    files["README.md"] = headline.put(
        (root / "README.md").read_text(encoding="utf-8"), results, headline.newest(root / "results")
    )
    return files


def write(root: Path) -> list[str]:
    """Write what differs, and take away figures that no page shows any more; returns the paths of both."""
    files, changed = build(root), []
    for name, content in files.items():
        path = root / name
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            write_text(path, content)
            changed.append(name)
    for path in (root / "docs" / "paper").glob("*.svg"):
        if f"docs/paper/{path.name}" not in files:
            path.unlink()
            changed.append(f"docs/paper/{path.name}")
    return sorted(changed)
