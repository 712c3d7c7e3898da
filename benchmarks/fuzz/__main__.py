"""``python -m benchmarks.fuzz``: by itself, because processes that are started anew cannot find what a ``__main__`` defines."""

import sys

from .runner import main

if __name__ == "__main__":
    sys.exit(main())
