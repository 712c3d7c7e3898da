"""How far an experiment has come, on the screen."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


class TimeLeft(ProgressColumn):
    """Time left, by the pace of this session: what an earlier one finished cost nothing now."""

    def render(self, task: Task) -> Text:
        since, begun = task.fields.get("since"), task.fields.get("begun", 0.0)
        if task.finished or since is None or task.total is None or task.completed <= begun:
            return Text("–:–– left")
        seconds = (time.monotonic() - since) * (task.total - task.completed) / (task.completed - begun)
        return Text(f"{seconds // 3600:.0f}:{seconds // 60 % 60:02.0f}:{seconds % 60:02.0f} left")


class Bars:
    """A bar over all cells, and one for the cell at hand where it takes long."""

    def __init__(self, console: Console):
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeLeft(),
        )
        # Redrawn between measurements only: a thread that does it all the time would take its share of what is measured.
        self.progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
        self.cells = self.finished = 0
        self._all = self._part = None

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def clear(self) -> None:
        """As before ``begin``: another experiment comes."""
        for task in (self._all, self._part):
            if task is not None:
                self.progress.remove_task(task)
        self.cells = self.finished = 0
        self._all = self._part = None

    def begin(self, cells: int, finished: int) -> None:
        self.clear()
        self.cells, self.finished = cells, finished
        fields = {"since": time.monotonic(), "begun": finished}
        self._all = self.progress.add_task("cells", total=cells, completed=finished, **fields)
        if finished:
            self.progress.console.print(f"going on: {finished} of {cells} cells are there already")
        self.progress.refresh()

    def cell(self, name: str) -> None:
        assert self._all is not None
        self.progress.update(self._all, description=escape(name), refresh=True)

    def part(self, fraction: float) -> None:
        """How much of the cell at hand is done; bars of less than a cell appear once there is something to show."""
        if self._part is None:
            fields: Any = {"since": time.monotonic(), "begun": 100 * fraction}
            self._part = self.progress.add_task("  this cell, %", total=100, completed=int(100 * fraction), **fields)
        self.progress.update(self._part, completed=int(100 * fraction), refresh=True)

    def end(self, name: str) -> None:
        assert self._all is not None
        if self._part is not None:
            self.progress.remove_task(self._part)
            self._part = None
        self.finished += 1
        self.progress.update(self._all, advance=1, refresh=True)
