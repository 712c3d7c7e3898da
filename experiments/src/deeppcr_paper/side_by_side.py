"""``--jobs``: cells in which nothing is timed, side by side on one device, in processes of their own.

Only this process writes results. The others measure, and keep the state of a long cell where one alone would.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
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
    experiment: Experiment, waiting: list[Cell], settings: Any, context: Context, store: Store, jobs: int
) -> None:
    running: dict[connection.Connection, tuple[str, BaseProcess, Cell]] = {}
    shares: dict[str, float] = {}  # of what is under way, how far it has come
    wrong: dict[str, tuple[str, Any]] = {}
    threads, late = max(1, torch.get_num_threads() // jobs), False

    def hear(timeout: float | None) -> None:
        for pipe in connection.wait(list(running), timeout):
            assert isinstance(pipe, connection.Connection)
            name, process, cell = running[pipe]
            kind: str
            value: Any
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):  # it is no more
                process.join()
                kind, value = "ended", process.exitcode
            if kind == "part":
                shares[name] = value
                continue
            if kind == "record":
                store.add(name, {**cell, **value})
                checkpoint_path(store.path, name).unlink(missing_ok=True)
                context.watcher.end()
            else:
                wrong[name] = kind, value
            del running[pipe]
            shares.pop(name, None)
            process.join()

    try:
        context.watcher.cell(f"{jobs} side by side")
        while running or (waiting and not late):
            while waiting and len(running) < jobs and not (late := context.is_late):
                cell = waiting.pop(0)
                name = name_of(cell)
                told = (context.device, context.data_dir, context.deadline, context.models)
                path = checkpoint_path(store.path, name)
                pipe, process = _start(threads, (experiment.name, cell, settings, told, path))
                running[pipe] = name, process, cell
            hear(1.0)
            if shares:
                context.watcher.part(fmean(shares.values()))
    finally:
        try:  # Ctrl-C, say: what is under way keeps its state and ends
            for pipe in running:
                with suppress(OSError):
                    pipe.send("stop")
            while running:
                hear(None)
        finally:  # Ctrl-C again
            for _, process, _ in running.values():
                process.kill()
                process.join()
            store.save()
    _tell(wrong)
    if late:
        raise OutOfTime


def _start(threads: int, arguments: tuple[Any, ...]) -> tuple[connection.Connection, BaseProcess]:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_be_one_of_many, args=(threads, theirs, *arguments))
    with _sigint_blocked():
        process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    return ours, process


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """What is started inside never hears of Ctrl-C, which reaches all processes of a terminal; this one does, afterwards."""
    resource_tracker.ensure_running()  # which unblocks it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tell(wrong: dict[str, tuple[str, Any]]) -> None:
    """Raise what somebody has to look at; where there is none, that time was short."""
    said = []
    for name, (kind, value) in wrong.items():
        if kind == "bug":
            raise RuntimeError(f"in the cell {name}: {value}")
        if kind == "ended":
            what = f"its process ended (exit code {value}), perhaps for lack of memory"
            said.append(f"{name}: {what}; the same command goes on, perhaps with fewer --jobs")
        if kind == "paper":
            said.append(f"{name}: {value}")
    if said:
        raise PaperError("; ".join(said))
    if wrong:
        raise OutOfTime


# In the processes


class _Share(Watcher):
    """Tells the first process how far a cell has come."""

    def __init__(self, pipe: connection.Connection):
        self._pipe = pipe

    def part(self, fraction: float) -> None:
        with suppress(OSError):
            self._pipe.send(("part", fraction))


def _be_one_of_many(threads: int, *arguments: Any) -> None:
    # Times that a library measures beside others are not to be kept: it would choose by them from then on.
    os.environ.setdefault("DEEPPCR_CALIBRATE", "read")
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
    _measure(*arguments)


def _measure(
    pipe: connection.Connection, experiment: str, cell: Cell, settings: Any, told: tuple[Any, ...], checkpoint: Path
) -> None:
    device, data_dir, deadline, models = told
    # Whatever comes asks to stop, and so does the end of the first process.
    here = Context(device, data_dir, (), deadline, _Share(pipe), checkpoint, models, stopped=pipe.poll)
    (known,) = (each for each in (*EXPERIMENTS, *BEYOND) if each.name == experiment)
    try:
        here.check_time()
        found = "record", known.measure(cell, settings, here)
    except OutOfTime:
        found = "late", None
    except PaperError as error:
        found = "paper", str(error)
    except Exception as error:
        found = "bug", f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
    with suppress(OSError):
        pipe.send(found)
