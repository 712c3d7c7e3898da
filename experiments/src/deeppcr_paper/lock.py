"""One run at a time: two that write one file would undo each other's work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .store import PaperError, disk_error, make_folder


@contextmanager
def only_run(folder: Path, experiment: str, settings: Any, device: str) -> Iterator[None]:
    """Hold the lock of this experiment with these settings in this folder; raise PaperError where another run has it."""
    make_folder(folder)
    told = json.dumps([experiment, settings, device], default=str)
    path = folder / f".{experiment}-{hashlib.sha256(told.encode()).hexdigest()[:12]}.lock"
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        what = "the same command is running there already; wait for it, or give another --out"
        raise PaperError(f"{folder}: {what}") from None
    except OSError as error:
        raise disk_error(folder, error) from error  # of the lock nobody need know
    try:
        yield
    finally:
        with suppress(OSError):  # where an open file cannot be removed, it stays
            path.unlink(missing_ok=True)  # while it is held: nobody else's is removed
        lock.release()
