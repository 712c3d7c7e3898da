"""The entry point of the command ``deeppcr``.

It stands outside the package, whose import takes a second, most of it for torch: Ctrl-C in that second must not end in a
traceback.
"""

import sys


def main() -> None:
    try:
        from deeppcr.cli import app

        app()
    except KeyboardInterrupt:
        print("deeppcr: interrupted", file=sys.stderr)
        raise SystemExit(130) from None  # as a shell says it
