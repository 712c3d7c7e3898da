"""One run at a time: two that write one file would undo each other's work."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .store import PaperError, disk_error, make_folder

try:
    import fcntl
except ImportError:  # Windows: there nothing is locked
    fcntl = None


@contextlib.contextmanager
def only_run(folder: Path, experiment: str, settings: Any, device: str) -> Iterator[None]:
    """Hold the lock of this experiment with these settings in this folder; raise PaperError where another run has it.

    The system gives up the lock with the process that holds it, however it ends: what a crash leaves behind locks nothing.
    """
    make_folder(folder)
    if fcntl is None:
        yield
        return
    told = json.dumps([experiment, settings, device], default=str)
    path = folder / f".{experiment}-{hashlib.sha256(told.encode()).hexdigest()[:12]}.lock"
    try:
        handle = _take(path)
    except OSError as error:
        raise disk_error(folder, error) from error  # of the lock nobody need know
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: nobody else's is removed
        os.close(handle)


def _take(path: Path) -> int:
    assert fcntl is not None
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return handle  # a file system without locks: better to run than not to
            holder = os.read(handle, 20).decode(errors="replace").strip()
            os.close(handle)
            raise PaperError(
                f"{path.parent}: the same command is running there already (process {holder or 'unknown'}); wait for it, or "
                "give another --out"
            ) from None
        # The one before may have removed the file between the opening and the locking: then this is a lock on nothing.
        if path.exists() and os.stat(path).st_ino == os.fstat(handle).st_ino:
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
            return handle
        os.close(handle)
