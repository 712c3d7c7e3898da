"""The command ``deeppcr-paper``, also as ``python -m deeppcr_paper``."""

import sys


def main() -> None:
    # Imported here: torch takes a second, and Ctrl-C in that second must not end in a traceback.
    try:
        from deeppcr_paper.cli import app

        app()
    except KeyboardInterrupt:
        print("deeppcr-paper: interrupted", file=sys.stderr)
        raise SystemExit(130) from None  # as a shell says it


if __name__ == "__main__":
    main()
