"""Warnings: what is told to the user and where, and what PyTorch tells meanwhile. Each thread has its own."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

#: Where files of this library and of PyTorch lie.
_NOT_THE_USER = tuple(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__))


class ConvergenceWarning(UserWarning):
    """The parallel solve did not get there by itself; the message says what was done instead."""


class _Muted(threading.local):
    """How many in this thread want to hear nothing."""

    count = 0


_muted = _Muted()


@contextmanager
def muted() -> Iterator[None]:
    """Inside, nothing is told in this thread. (Filters of warnings are those of the process, which other threads change, too.)"""
    _muted.count += 1
    try:
        yield
    finally:
        _muted.count -= 1


def warn(message: str) -> None:
    """As a ConvergenceWarning at the line of the user that called the library, directly or by a module of PyTorch."""
    if _muted.count:
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, ConvergenceWarning, stacklevel=level)


class _Catching(threading.local):
    """What this thread hears of warnings, where it wants to."""

    heard: list[warnings.WarningMessage] | None = None


_catching, _catching_lock = _Catching(), threading.Lock()
#: How many threads catch warnings now, and what puts back all that was set before the first of them.
_threads_catching, _as_before = 0, warnings.catch_warnings()


@contextmanager
def catching_warnings(*, record: bool = False) -> Iterator[list[warnings.WarningMessage]]:
    """``warnings.catch_warnings``, also by several threads at once, which hear what is theirs.

    Filters are those of the process: by Python's own means, who comes first and leaves last would put back what another one has set. So the
    last to leave puts back what the first one found. Nobody waits for anybody: inside are steps, which may take any lock.
    """
    global _threads_catching, _as_before  # of the process, as the filters are
    with _catching_lock:
        if not _threads_catching:
            _as_before = warnings.catch_warnings()
            _as_before.__enter__()
            warnings.showwarning = _show_or_keep(warnings.showwarning)
        _threads_catching += 1
    outer, heard = _catching.heard, []
    _catching.heard = heard if record else outer
    try:
        yield heard
    finally:
        _catching.heard = outer
        with _catching_lock:
            _threads_catching -= 1
            if not _threads_catching:
                _as_before.__exit__(None, None, None)


def _show_or_keep(show: Callable[..., None]) -> Callable[..., None]:
    def show_or_keep(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        heard = _catching.heard
        if heard is None:
            show(message, category, filename, lineno, file, line)
        else:
            heard.append(warnings.WarningMessage(message, category, filename, lineno, file, line))

    return show_or_keep
