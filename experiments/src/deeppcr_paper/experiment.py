"""What an experiment is: settings, a list of cells, and a function that measures one cell. Running it cell by cell."""

from __future__ import annotations

import gc
import io
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .lock import only_run
from .settings import override, show
from .store import PaperError, Store, as_json, checkpoint_path, finished, read_checkpoint, write_bytes
from .timing import single_thread

#: What is measured at a time: names with values, such as {"L": 256, "w": 4}.
Cell = dict[str, Any]
#: Settings that come from other arguments than ``--set``.
_NOT_SET = frozenset({"seed", "files", "threads", "changed"})


#: Exit codes: bad input or a full disk; out of time (try again, as in sysexits.h); Ctrl-C.
BAD, AGAIN, STOPPED = 2, 75, 130


class OutOfTime(Exception):
    """The time limit has come; what is finished is on disk."""


class Watcher:
    """Is told how far the work has come, and counts; `Bars` show it, too."""

    cells = finished = 0

    def begin(self, cells: int, finished: int) -> None:
        """So many cells, some of which are there already."""
        self.cells, self.finished = cells, finished

    def cell(self, name: str) -> None:
        """This one is next."""

    def part(self, fraction: float) -> None:
        """So much of it is done."""

    def end(self) -> None:
        """It is finished."""
        self.finished += 1


@dataclass
class Context:
    """Where a run takes place.

    Attributes:
        device: where tensors are
        data_dir: the folder with the images, where one was given
        files: result files to compare, for the experiment that does that
        deadline: on the clock of ``time.monotonic``; None for no limit
        watcher: is told about progress
        checkpoint: where a long cell may keep its state
        models: the folder where trained networks are kept; None to keep none
        finished: the records that are there already
        cache: what cells share, such as the images; gone with the run
        stopped: whether to end as if it were late
    """

    device: torch.device
    data_dir: Path | None = None
    files: Sequence[Path] = ()
    deadline: float | None = None
    watcher: Watcher = field(default_factory=Watcher)
    checkpoint: Path | None = None
    models: Path | None = None
    finished: Sequence[dict[str, Any]] = ()
    cache: dict[str, Any] = field(default_factory=dict)
    stopped: Callable[[], bool] = bool

    @property
    def is_late(self) -> bool:
        return self.stopped() or (self.deadline is not None and time.monotonic() >= self.deadline)

    def check_time(self) -> None:
        if self.is_late:
            raise OutOfTime

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Keep the state of a long cell, in one step like the results."""
        if self.checkpoint is not None:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            write_bytes(self.checkpoint, buffer.getvalue())

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The state that ``save_checkpoint`` kept; None where there is none that can be read."""
        return None if self.checkpoint is None else read_checkpoint(self.checkpoint)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One figure or table of the paper.

    Attributes:
        name: on the command line
        paper: what it reproduces
        what: in one line
        full, quick: frozen settings with a ``seed``; quick ones take about 20 s on two CPU cores
        cells: settings and context to cells, in the order in which they are measured
        measure: a cell, settings and context to a record
        summarise: records to what is read off them
        lines: summary to what is shown at the end
        adapt: settings and context to the settings that are used, such as another data set
        untimed: cell and settings to whether nothing is timed in it, nor given up by the clock: such cells may share a device
        from_quick: whether what it is made from are results of quick runs: then it is one, too
    """

    name: str
    paper: str
    what: str
    full: Any
    quick: Any
    cells: Callable[[Any, Context], Iterable[Cell]]
    measure: Callable[[Cell, Any, Context], dict[str, Any]]
    summarise: Callable[[list[dict[str, Any]]], Any] = lambda records: None
    lines: Callable[[Any], list[str]] = lambda summary: []
    adapt: Callable[[Any, Context], Any] = lambda settings, context: settings
    untimed: Callable[[Cell, Any], bool] = lambda cell, settings: False
    from_quick: Callable[[Context], bool] = lambda context: False

    def settings(self, context: Context, *, quick: bool, seed: int, changes: Sequence[str] = ()) -> Any:
        chosen = override(self.quick if quick else self.full, changes, self.name)
        return self.adapt(replace(chosen, seed=seed), context)

    def changes(self, settings: dict[str, Any], *, quick: bool) -> dict[str, str]:
        """Settings of a result file that are other than usual, as they are given on the command line."""
        usual = as_json(asdict(self.quick if quick else self.full))
        return {
            name: show(settings[name])
            for name in usual
            if name not in _NOT_SET and name in settings and settings[name] != usual[name]
        }

    def run(
        self,
        context: Context,
        folder: Path,
        *,
        quick: bool = False,
        seed: int = 0,
        changes: Sequence[str] = (),
        only: Sequence[str] = (),
        measure_all: MeasureAll | None = None,
    ) -> tuple[Path, Any]:
        """Measure the cells that are not yet on disk.

        Whatever ends it early, what is finished stays in the partial file.

        Args:
            changes: settings that are other than usual, each ``NAME=VALUE``
            only: measure no other cells than those with these values, each ``NAME=VALUE,VALUE``
            measure_all: experiment, cells, settings, context and store to records in that store. Default: ``measure_in_turn``

        Returns:
            the path of the result file, and the summary; of the partial file, and None, where cells were left out
        """
        settings = self.settings(context, quick=quick, seed=seed, changes=changes)
        if context.models is None:
            context.models = folder / "models"
        cells = list(self.cells(settings, context))  # before the file: bad input leaves none behind
        wanted = choose_cells(cells, only)
        quick = quick or self.from_quick(context)
        with only_run(folder, self.name, asdict(settings), context.device.type):
            store = Store.open(folder, self.name, asdict(settings), context.device, quick=quick)
            context.finished = store.records
            # Quick ones are small; and sums by one thread are the same in every run.
            with _frozen_garbage(), single_thread() if quick else nullcontext():
                (measure_all or measure_in_turn)(self, wanted, settings, context, store)
            names = [name_of(cell) for cell in cells]
            if not store.done.issuperset(names):
                return store.path, None
            if others := store.done.difference(names):
                left_out = f"cells that this version does not measure are left out: {', '.join(sorted(others))}"
                warnings.warn(f"{store.path.name}: {left_out}", stacklevel=2)
            by_name = {record["key"]: record for record in store.records}
            store.content["records"] = [by_name[name] for name in names]  # whoever measured them, and when
            try:
                summary = self.summarise(store.records)
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                why = f"damaged: its records cannot be summed up ({type(error).__name__}: {error})"
                raise PaperError(f"{store.path}: {why}; move it away") from error
            return store.finish(summary), summary

    def finished(self, context: Context, folder: Path, *, quick: bool = False, seed: int = 0) -> Path | None:
        """The whole result that ``run`` would make, where the folder has it already."""
        settings = asdict(self.settings(context, quick=quick, seed=seed))
        return finished(folder, self.name, settings, context.device)


#: How the cells of an experiment are measured, such as `measure_in_turn`.
MeasureAll = Callable[[Experiment, Sequence[Cell], Any, Context, Store], None]


def measure_in_turn(
    experiment: Experiment, cells: Sequence[Cell], settings: Any, context: Context, store: Store
) -> None:
    """Measure the cells that the store has not, one after the other."""
    done = store.done
    store.save()  # before hours of work: the folder takes what is written
    context.watcher.begin(len(cells), sum(name_of(cell) in done for cell in cells))
    try:
        for cell in cells:
            name = name_of(cell)
            if name in done:
                continue
            context.check_time()
            context.watcher.cell(name)
            context.checkpoint = checkpoint_path(store.path, name)
            store.add(name, {**cell, **experiment.measure(cell, settings, context)})
            context.checkpoint.unlink(missing_ok=True)
            context.watcher.end()
    finally:
        store.save()  # whatever ends it


def choose_cells(cells: list[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells that have one of the values of every name.

    >>> choose_cells([{"w": 4, "L": 8}, {"w": 8, "L": 8}, {"w": 8, "L": 16}], ["w=8,16", "L=8"])
    [{'w': 8, 'L': 8}]
    """
    allowed: dict[str, set[str]] = {}
    for each in only:
        name, equals, values = each.partition("=")
        if not equals:
            raise PaperError(f"--only {each}: expected NAME=VALUE")
        allowed.setdefault(name, set()).update(value.strip() for value in values.split(","))
    found = [cell for cell in cells if all(str(cell.get(name)) in values for name, values in allowed.items())]
    if only and not found:
        known = {name: list(dict.fromkeys(str(cell[name]) for cell in cells if name in cell)) for name in allowed}
        there = "; ".join(f"{name}={','.join(values)}" if values else f"no {name}" for name, values in known.items())
        raise PaperError(f"--only {' '.join(only)}: no cell is like that; there are {there}")
    return found


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """What is there before is left out of every search for garbage: through torch alone one takes 0.2 s, before each graph."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def name_of(cell: Cell) -> str:
    """``L=256 w=4``: names the cell in files and on the screen."""
    return " ".join(f"{name}={value}" for name, value in cell.items())


def is_out_of_memory(error: BaseException) -> bool:
    """Memory ran out, on a GPU or a CPU."""
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken; on a CPU more than that would end the whole process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    return free[0] if free else 4 * 2**30
