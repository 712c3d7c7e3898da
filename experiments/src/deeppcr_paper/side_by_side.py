"""``--jobs``: cells in which nothing is timed, measured in processes of their own, side by side on one device."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .experiment import AGAIN, Cell, Context, Experiment, OutOfTime, choose_cells, name_of
from .lock import only_run
from .store import PaperError, Store, files_of, make_folder

#: Where the processes leave their files, in the folder of the results. One that is cut off goes on there.
FOLDER = "side-by-side"


class AllTimed(PaperError):
    """There is nothing that could run beside others."""


def processes(experiment: Experiment, cells: Sequence[Cell], settings: Any) -> dict[str, list[Cell]]:
    """The cells of every process, by its name; without those that are timed."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        if (process := experiment.untimed(cell, settings)) is not None:
            found.setdefault(process, []).append(cell)
    return found


def chosen_by(cells: Sequence[Cell]) -> list[str]:
    """What ``--only`` has to say for these cells.

    >>> chosen_by([{"w": 4, "L": 8}, {"w": 4, "L": 16}])
    ['w=4', 'L=8,16']
    """
    values = {name: ",".join(dict.fromkeys(str(cell[name]) for cell in cells)) for name in cells[0]}
    return [f"{name}={value}" for name, value in values.items()]


def measure_side_by_side(
    experiment: Experiment,
    context: Context,
    folder: Path,
    *,
    jobs: int,
    quick: bool = False,
    seed: int = 0,
    changes: Sequence[str] = (),
    only: Sequence[str] = (),
) -> tuple[Path, Any]:
    """Measure the cells in which nothing is timed, ``jobs`` processes at a time; arguments and what is returned as in ``Experiment.run``."""
    settings = experiment.settings(context, quick=quick, seed=seed, changes=changes)
    cells = choose_cells(list(experiment.cells(settings, context)), only)
    groups = processes(experiment, cells, settings)
    if not groups:
        raise AllTimed(f"{experiment.name}: every cell of it is timed, alone; run it without --jobs")
    told = ["--device", str(context.device), "--seed", str(seed), *(["--quick"] if quick else [])]
    told += ["--models", str(context.models or folder / "models")]
    told += ["--data-dir", str(context.data_dir)] if context.data_dir is not None else []
    told += [part for change in changes for part in ("--set", change)]
    with only_run(folder, experiment.name, asdict(settings), context.device.type):
        store = Store.open(folder, experiment.name, asdict(settings), context.device, quick=quick)
        store.save()  # before hours of work: the folder takes what is written
        waiting = [
            _Process(experiment, name, group, folder, told, jobs)
            for name, group in groups.items()
            if not store.done.issuperset(map(name_of, group))
        ]
        numbers = [sum(name_of(cell) in store.done for cell in group) for group in groups.values()]
        context.watcher.begin(sum(map(len, groups.values())), sum(numbers))
        _run_all(waiting, store, context, jobs)
        path, left = store.path, {name_of(cell) for cell in cells} - store.done
    if left:
        return path, None
    return experiment.run(context, folder, quick=quick, seed=seed, changes=changes, only=only)


class _Process:
    """The command with ``--only``, in a folder of its own."""

    def __init__(self, experiment: Experiment, name: str, cells: list[Cell], folder: Path, told: list[str], jobs: int):
        self.name, self.cells = name, cells
        slug = re.sub(r"[^a-zA-Z0-9]+", "-", f"{experiment.name} {name}")
        self.folder = folder / FOLDER / slug
        self.command = [sys.executable, "-m", "deeppcr_paper", "reproduce", experiment.name, *told]
        self.command += ["--out", str(self.folder)]
        self.command += [part for each in chosen_by(cells) for part in ("--only", each)]
        # What a library's own clock finds beside others is not to be kept: it would choose by it from then on.
        self.environment = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)),
            **os.environ,
            "DEEPPCR_CALIBRATE": "0",
        }

    def start(self, deadline: float | None) -> None:
        make_folder(self.folder)
        limit = [] if deadline is None else ["--time-limit", str(max(1e-3, (deadline - time.monotonic()) / 60))]
        with open(self.folder / "log.txt", "w") as log:
            self.running = subprocess.Popen(
                self.command + limit,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches each once: by us
            )

    def hand_in(self, store: Store, experiment: str, context: Context) -> str:
        """Its records go into the file of all. What went wrong, in words; empty where nothing did."""
        done = store.done
        for partial in (True, False):  # whole where there are no other cells
            for path, content in files_of(
                self.folder, experiment, store.content["settings"], context.device, partial=partial
            ):
                store.take_in(Store(path, content))
        for _ in store.done - done:
            context.watcher.end()
        if store.done.issuperset(map(name_of, self.cells)):
            (self.folder / "log.txt").unlink()
            with suppress(OSError):  # something is left in it, or the others are at work beside it
                self.folder.rmdir()
                self.folder.parent.rmdir()
            return ""
        lines = (self.folder / "log.txt").read_text(errors="replace").strip().splitlines()
        return f"{self.name}: {lines[-1].removeprefix('deeppcr-paper: ') if lines else 'it ended without a word'}"


def _run_all(waiting: list[_Process], store: Store, context: Context, jobs: int) -> None:
    running: list[_Process] = []
    wrong: list[str] = []
    experiment = store.content["experiment"]
    try:
        while waiting or running:
            context.check_time()
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0))
                running[-1].start(context.deadline)
                context.watcher.cell(f"{len(running)} side by side")
            time.sleep(0.1)
            for process in [each for each in running if each.running.poll() is not None]:
                running.remove(process)
                why = process.hand_in(store, experiment, context)
                if process.running.returncode == AGAIN:
                    raise OutOfTime
                wrong += [why] if why else []
    finally:
        for process in running:
            process.running.send_signal(signal.SIGINT)  # they keep what is finished
        for process in running:
            process.running.wait()
            process.hand_in(store, experiment, context)
    if wrong:
        raise PaperError("; ".join(wrong))
