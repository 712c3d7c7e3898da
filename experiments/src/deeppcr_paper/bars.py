"""How far an experiment has come: bars on a screen, and a line now and then where there is none."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .experiment import Watcher

#: Seconds between two lines of what is no screen: a file, a pipe.
INTERVAL = 30.0


class Bars(Watcher):
    """A bar over all cells, and one for the cell at hand where it takes long."""

    def __init__(self, console: Console):
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
        # Redrawn between measurements only: a thread that does it all the time would take its share of what is measured.
        # The pace is that of all cells so far, for one alone may take an hour.
        self.progress = Progress(
            TextColumn("{task.description}"),
            *columns,
            console=console,
            auto_refresh=False,
            transient=True,
            speed_estimate_period=math.inf,
        )
        self._begun = self._said = time.monotonic()
        self._name, self._share = "", 0.0

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def begin(self, cells: int, finished: int) -> None:
        super().begin(cells, finished)
        for task in self.progress.task_ids:
            self.progress.remove_task(task)
        self._all = self.progress.add_task("cells", total=cells, completed=finished)
        self._part = self.progress.add_task("  this cell, %", total=100, visible=False)
        if 0 < finished < cells:
            self.progress.console.print(f"going on: {finished} of {cells} cells are there already")
        self.progress.refresh()

    def cell(self, name: str) -> None:
        self._name, self._share = name, 0.0
        self.progress.update(self._all, description=escape(name))
        self.progress.reset(self._part, visible=False)
        self._show()

    def part(self, fraction: float) -> None:
        self._share = fraction
        self.progress.update(self._part, completed=int(100 * fraction), visible=True)
        self._show()

    def end(self) -> None:
        super().end()
        self.progress.update(self._all, completed=self.finished, refresh=True)

    def _show(self) -> None:
        self.progress.refresh()
        now = time.monotonic()
        if self.progress.console.is_terminal or now - self._said < INTERVAL:
            return
        self._said = now
        this = f"{self._name} {self._share:.0%}" if self._share else self._name
        done = f"{now - self._begun:.0f} s: {self.finished} of {self.cells} cells"
        self.progress.console.print(f"{done}, now {escape(this)}")
