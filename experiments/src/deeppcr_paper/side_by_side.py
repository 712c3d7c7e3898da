"""``--jobs``: cells in which nothing is timed, side by side on one device, in processes of their own.

Only this process writes results. The others measure, and keep the state of a long cell where one alone would.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import deeppcr

from .catalogue import BEYOND, EXPERIMENTS
from .experiment import Cell, Context, Experiment, OutOfTime, Watcher, name_of
from .store import PaperError, Store, checkpoint_path

#: Not forked: CUDA does not outlive that.
_SPAWN = multiprocessing.get_context("spawn")


class AllTimed(PaperError):
    """There is nothing that could run beside others."""


def measure_side_by_side(
    experiment: Experiment, cells: Sequence[Cell], settings: Any, context: Context, store: Store, *, jobs: int
) -> None:
    """Measure the cells in which nothing is timed, ``jobs`` at a time; the others are left out. As ``measure_in_turn``."""
    untimed = [cell for cell in cells if experiment.untimed(cell, settings)]
    if not untimed:
        raise AllTimed(f"{experiment.name}: all of these cells are timed, one at a time; run it without --jobs")
    done = store.done
    waiting = [cell for cell in untimed if name_of(cell) not in done]
    store.save()  # before hours of work: the folder takes what is written
    context.watcher.begin(len(untimed), len(untimed) - len(waiting))
    if waiting:
        _measure_all(experiment, waiting, settings, context, store, min(jobs, len(waiting)))


def _measure_all(
    experiment: Experiment, cells: list[Cell], settings: Any, context: Context, store: Store, jobs: int
) -> None:
    stop, shares = _SPAWN.Event(), _SPAWN.Array("d", len(cells))
    begin = (stop, shares, max(1, torch.get_num_threads() // jobs))
    told = (context.device, context.data_dir, context.deadline, context.models)
    measured: dict[Future, Cell] = {}

    def keep(future: Future) -> None:
        cell = measured.pop(future)
        if future.done() and not future.cancelled() and future.exception() is None:
            store.add(name_of(cell), {**cell, **future.result()})
            checkpoint_path(store.path, name_of(cell)).unlink(missing_ok=True)
            context.watcher.end()

    wrong: dict[str, BaseException] = {}
    try:
        with ProcessPoolExecutor(jobs, mp_context=_SPAWN, initializer=_begin, initargs=begin) as pool:
            for number, cell in enumerate(cells):
                path = checkpoint_path(store.path, name_of(cell))
                measured[pool.submit(_measure, experiment.name, cell, settings, told, path, number)] = cell
            try:
                context.watcher.cell(f"{jobs} side by side")
                while measured:
                    for future in wait(measured, timeout=1, return_when=FIRST_COMPLETED).done:
                        if (error := future.exception()) is not None:
                            wrong[name_of(measured[future])] = error
                        keep(future)
                    if at_work := [share for share in shares if 0 < share < 1]:
                        context.watcher.part(fmean(at_work))
            finally:  # Ctrl-C, say: what is under way is kept and ends, all else ends as it begins
                stop.set()
    finally:
        for future in list(measured):
            keep(future)
        store.save()
    _tell(wrong)


def _tell(wrong: dict[str, BaseException]) -> None:
    """Raise what somebody has to look at; where there is none, that time was short."""
    for name, error in wrong.items():
        if isinstance(error, BrokenProcessPool):
            what = "a process was ended from outside, perhaps for lack of memory"
            raise PaperError(f"{what}; the same command goes on, perhaps with fewer --jobs") from error
        if not isinstance(error, (PaperError, OutOfTime)):
            error.add_note(f"in the cell {name}")
            raise error
    if told := [f"{name}: {error}" for name, error in wrong.items() if isinstance(error, PaperError)]:
        raise PaperError("; ".join(told))
    if wrong:
        raise OutOfTime


# In the processes

#: When to stop, whatever the clock says; how far each cell has come; and what the cells of a process share.
_stop: Any = None
_shares: Any = None
_cache: dict[str, Any] = {}


def _begin(stop: Any, shares: Any, threads: int) -> None:
    global _stop, _shares
    _stop, _shares = stop, shares
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the first process tells the others
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: from now on, where that one is killed
    first = multiprocessing.parent_process()
    if first is None or not first.is_alive():
        os._exit(1)
    # Times that a library measures beside others are not to be kept: it would choose by them from then on.
    os.environ["DEEPPCR_CALIBRATE"] = "read"
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)


class _Share(Watcher):
    """Tells the first process how far a cell has come."""

    def __init__(self, number: int):
        self._number = number

    def part(self, fraction: float) -> None:
        _shares[self._number] = fraction


def _measure(
    experiment: str, cell: Cell, settings: Any, told: tuple[Any, ...], checkpoint: Path, number: int
) -> dict[str, Any]:
    device, data_dir, deadline, models = told
    here = Context(device, data_dir, deadline=deadline, models=models, checkpoint=checkpoint, cache=_cache)
    here.watcher, here.stopped = _Share(number), _stop.is_set
    here.check_time()
    (known,) = (each for each in (*EXPERIMENTS, *BEYOND) if each.name == experiment)
    try:
        return known.measure(cell, settings, here)
    finally:
        here.watcher.part(1.0)
