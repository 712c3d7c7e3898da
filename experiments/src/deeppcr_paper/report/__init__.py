"""One page from the results: the paper's claims and our figures, and where the parallel solve pays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..claims.results import collect
from ..store import PaperError, write_text
from .page import make_page

__all__ = ["build"]


def build(folders: Sequence[Path], out: Path, fallback: Sequence[Path] = ()) -> Path:
    """Write the page of all finished results in the folders; an old page is replaced in one step, or stays.

    Args:
        fallback: folders of full results that stand in, without figures, where the others have none
    """
    if out.is_dir():  # said before the figures are drawn
        raise PaperError(f"{out}: is a folder, expected a file, such as {out / 'report.html'}")
    write_text(out, make_page(collect(folders, fallback)))
    return out
