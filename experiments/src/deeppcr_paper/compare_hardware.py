"""``hardware``: the timings of two machines side by side, from two result files of ``mlp-timing``.

A quick run without files measures a small grid itself, with one CPU thread and with two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from . import mlp_timing
from .experiment import Cell, Context, Experiment, name_of
from .mlp_summary import foot, seconds
from .store import PARTIAL, PaperError, read
from .table import table


@dataclass(frozen=True)
class Settings:
    """What is compared: the names of two files, or two numbers of threads; and what was changed for the files."""

    files: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()
    changed: tuple[str, ...] = ()
    seed: int = 0


FULL = Settings()
QUICK = Settings(threads=(1, 2))
#: What a quick run measures.
GRID = replace(mlp_timing.QUICK, depths=(32, 256), widths=(4,), activations=("relu",), budget=0.05)


def adapt(settings: Settings, context: Context) -> Settings:
    """Files that were given are compared, also by a quick run."""
    if context.files:
        changed = {
            name
            for content in load(context)
            for name in mlp_timing.EXPERIMENT.changes(content["settings"], quick=content["quick"])
        }
        names = tuple(path.name for path in context.files)
        return replace(settings, files=names, threads=(), changed=tuple(sorted(changed)))
    return settings


def from_quick(context: Context) -> bool:
    """Two files are compared at the sizes that they have: of a quick run comes a quick comparison."""
    return any(content["quick"] for content in load(context)) if context.files else False


def load(context: Context) -> list[dict[str, Any]]:
    """Both files, whole, of the right experiment and of two machines."""
    if len(context.files) != 2:
        raise PaperError(
            f"hardware compares two result files of mlp-timing, got {len(context.files)}: "
            "deeppcr-paper reproduce hardware FILE1 FILE2"
        )
    if "compared" not in context.cache:
        one, other = (_load(path) for path in context.files)
        if context.files[0].resolve() == context.files[1].resolve():
            raise PaperError(f"{context.files[0]}: given twice; hardware compares the results of two machines")
        if shared := _machines(one) & _machines(other):
            raise PaperError(
                f"{' and '.join(map(str, context.files))}: both measured on {min(shared)}; "
                "hardware compares the results of two machines"
            )
        context.cache["compared"] = [one, other]
    return context.cache["compared"]


def _load(path: Path) -> dict[str, Any]:
    content = read(path)
    if content["experiment"] != "mlp-timing":
        raise PaperError(f"{path}: results of {content['experiment']}, expected those of mlp-timing")
    if not content["complete"] or path.name.endswith(PARTIAL):
        raise PaperError(f"{path}: not finished; run its command again first")
    return {"quick": False, **content}


def _machines(content: dict[str, Any]) -> set[str]:
    return {record["hardware"] for record in content["records"]}


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    if settings.threads:
        yield from mlp_timing.cells(GRID, context)
        return
    one, other = (
        {name_of({k: record[k] for k in ("activation", "L", "w")}): record for record in content["records"]}
        for content in load(context)
    )
    shared = [record for name, record in one.items() if name in other]
    if not shared:
        raise PaperError(f"{' and '.join(map(str, context.files))}: have no activation, depth and width in common")
    for record in shared:
        yield {name: record[name] for name in ("activation", "L", "w")}


def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    """For every direction and column: both times and their ratio, second machine over first."""
    if settings.threads:
        records, names = (
            _by_threads(cell, settings, context),
            [f"{count} thread{'s' * (count > 1)}" for count in settings.threads],
        )
    else:
        both = load(context)
        records = [next(r for r in each["records"] if all(r[k] == v for k, v in cell.items())) for each in both]
        names = [record["hardware"] for record in records]
    found: dict[str, Any] = {"machines": names}
    for way in mlp_timing.DIRECTIONS:
        found[way] = {}
        for column in records[0][way]:
            times = [seconds(record, way, column) for record in records]
            first, second = times
            found[way][column] = {"seconds": times, "ratio": second / first if first and second else None}
    return found


def _by_threads(cell: Cell, settings: Settings, context: Context) -> list[dict[str, Any]]:
    records, before = [], torch.get_num_threads()
    try:
        for count in settings.threads:
            torch.set_num_threads(count)
            records.append(mlp_timing.measure_cell(cell, replace(GRID, seed=settings.seed), context))
    finally:
        torch.set_num_threads(before)
    return records


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The ratios of every direction and column: smallest, median, largest."""
    ratios: dict[str, list[float]] = {}
    for record in records:
        for way in mlp_timing.DIRECTIONS:
            for column, entry in record[way].items():
                if entry["ratio"] is not None:
                    ratios.setdefault(f"{way} {column}", []).append(entry["ratio"])
    return {
        "machines": records[0]["machines"],
        "ratios": {
            name: {"smallest": min(each), "median": median(each), "largest": max(each)} for name, each in ratios.items()
        },
    }


def lines(summary: dict[str, Any]) -> list[str]:
    first, second = summary["machines"]
    rows = [
        {"pass": name, **{which: f"{each[which]:.2f}" for which in ("smallest", "median", "largest")}}
        for name, each in summary["ratios"].items()
    ]
    below = foot(name.split()[-1] for name in summary["ratios"])
    return [f"time on {second} over time on {first}:", *table(rows), *below]


EXPERIMENT = Experiment(
    name="hardware",
    paper="fig. 12",
    what="two result files of mlp-timing from different machines side by side: hardware FILE1 FILE2",
    full=FULL,
    quick=QUICK,
    cells=cells,
    measure=measure,
    summarise=summarise,
    lines=lines,
    adapt=adapt,
    from_quick=from_quick,
)
