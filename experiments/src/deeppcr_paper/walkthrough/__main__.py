"""``python -m deeppcr_paper.walkthrough [CHECKOUT]``: make the documentation's generated files anew from ``results/``."""

from __future__ import annotations

import sys
from pathlib import Path

from ..store import PaperError
from . import write


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path()
    if len(arguments) > 1 or not (root / "mkdocs.yml").exists():
        print(
            f"usage: python -m deeppcr_paper.walkthrough [CHECKOUT]; {root.resolve()} is no checkout of deeppcr",
            file=sys.stderr,
        )
        return 2
    try:
        changed = write(root)
    except (PaperError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for name in changed:
        print(name)
    print(f"{len(changed)} files changed" if changed else "everything is as it was")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
