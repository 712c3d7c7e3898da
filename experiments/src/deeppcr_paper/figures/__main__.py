"""``python -m deeppcr_paper.figures RESULT.json FOLDER``: every figure of a result file as an SVG file of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from ..store import PaperError, read
from . import draw


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m deeppcr_paper.figures RESULT.json FOLDER", file=sys.stderr)
        return 2
    source, folder = map(Path, arguments)
    try:
        result = read(source)
        if not result["complete"]:
            raise PaperError(f"{source}: not finished; run its command again first")
    except PaperError as error:
        print(error, file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    for figure in draw(result):
        path = folder / f"{figure.name}.svg"
        path.write_text(figure.file(), encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
