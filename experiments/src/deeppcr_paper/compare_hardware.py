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
from .experiment import Cell, Context, Experiment
from .mlp_summary import foot, say_turns, seconds
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
_NAMES = ("activation", "L", "w")


def adapt(settings: Settings, context: Context) -> Settings:
    """Files that were given are compared, also by a quick run."""
    if not context.files:
        return settings
    usual = mlp_timing.EXPERIMENT
    changed = {name for each in load(context) for name in usual.changes(each["settings"], quick=each["quick"])}
    names = tuple(path.name for path in context.files)
    return replace(settings, files=names, threads=(), changed=tuple(sorted(changed)))


def from_quick(context: Context) -> bool:
    """Two files are compared at the sizes that they have: of a quick run comes a quick comparison."""
    return bool(context.files) and any(content["quick"] for content in load(context))


def load(context: Context) -> list[dict[str, Any]]:
    """Both files, whole, of the right experiment and of two machines."""
    if len(context.files) != 2:
        raise PaperError(
            f"hardware compares two result files of mlp-timing, got {len(context.files)}: "
            "deeppcr-paper reproduce hardware FILE1 FILE2"
        )
    if "compared" not in context.cache:
        both = [_load(path) for path in context.files]
        if context.files[0].resolve() == context.files[1].resolve():
            raise PaperError(f"{context.files[0]}: given twice; hardware compares the results of two machines")
        one, other = ({record["hardware"] for record in content["records"]} for content in both)
        if shared := one & other:
            raise PaperError(
                f"{' and '.join(map(str, context.files))}: both measured on {min(shared)}; "
                "hardware compares the results of two machines"
            )
        context.cache["compared"] = both
    return context.cache["compared"]


def _load(path: Path) -> dict[str, Any]:
    content = read(path)
    if content["experiment"] != "mlp-timing":
        raise PaperError(f"{path}: results of {content['experiment']}, expected those of mlp-timing")
    if not content["complete"] or path.name.endswith(PARTIAL):
        raise PaperError(f"{path}: not finished; run its command again first")
    say_turns(content)
    return {"quick": False, **content}


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    if settings.threads:
        yield from mlp_timing.cells(GRID, context)
        return
    one, other = ([{name: each[name] for name in _NAMES} for each in content["records"]] for content in load(context))
    shared = [cell for cell in one if cell in other]
    if not shared:
        raise PaperError(f"{' and '.join(map(str, context.files))}: have no activation, depth and width in common")
    yield from shared


def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    """For every direction and column: both times and their ratio, second machine over first."""
    if settings.threads:
        records = [_with_threads(count, cell, settings, context) for count in settings.threads]
        names = [f"{count} thread{'s' * (count > 1)}" for count in settings.threads]
    else:
        both = [content["records"] for content in load(context)]
        records = [next(each for each in records if cell.items() <= each.items()) for records in both]
        names = [record["hardware"] for record in records]
    found: dict[str, Any] = {"machines": names}
    for way in mlp_timing.DIRECTIONS:
        found[way] = {}
        for column in records[0][way]:
            first, second = both_seconds = [seconds(record, way, column) for record in records]
            found[way][column] = {"seconds": both_seconds, "ratio": second / first if first and second else None}
    return found


def _with_threads(count: int, cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return mlp_timing.measure_cell(cell, replace(GRID, seed=settings.seed), context)
    finally:
        torch.set_num_threads(before)


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
