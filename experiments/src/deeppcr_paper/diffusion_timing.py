"""What the timing of a diffusion model consists of: every way to sample on the same noise, and what it cost and found.

Columns: ``loop`` (eager), ``graph`` (the loop in a CUDA graph), ``printed`` (the paper's method), ``newton`` (the same from
the path of Gaussian data, which no network is asked for), ``auto`` (this library's).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import torch

from deeppcr.diffusion.start import GaussianStart
from deeppcr.runtime import full_precision

from .denoisers import Model, TrainingSettings
from .experiment import Cell, Context
from .room import OUT_OF_MEMORY, within_memory
from .sampling import WARM_UP, Draw, Sampling, check_and_time, pack, timed
from .table import shown, table, times
from .timing import calm

COLUMNS = ("loop", "graph", "printed", "newton", "auto")
#: What names a cell: the data, the size of a state, whether classes are given, the steps.
IDENTITY = ("data", "w", "side", "conditional", "L")


@dataclass(frozen=True)
class TimingSettings(TrainingSettings):
    """What is timed of every model.

    Attributes:
        steps: L, the denoising steps
        loop_runs: samples that the eager loop is timed on
        runs: and the others, if there are so many in the budget
        budget: seconds for each of the others; at least one run, of the loop in a CUDA graph at least ``loop_runs``
        batch: samples at a time where throughput is timed
        images: shown side by side
        tolerance: of the final sample in parallel, absolute
    """

    steps: tuple[int, ...] = (256, 512, 1024)
    loop_runs: int = 4
    runs: int = 100
    budget: float = 1.0
    batch: int = 64
    images: int = 8
    tolerance: float = 1e-3


def training_record(model: Model) -> dict[str, Any]:
    """Of the cell that is the training of a model."""
    return {"training": model.training, "images": {"train": len(model.train), "test": len(model.test)}}


def untimed(cell: Cell, settings: TimingSettings) -> bool:
    """The training of a model."""
    return "part" in cell


def sampling_record(sampling: Sampling, settings: TimingSettings, context: Context) -> dict[str, Any]:
    """Of the other cells: all columns, and some images."""
    context.watcher.part(0.2)
    with full_precision(sampling.device):
        record = time_columns(sampling, settings)
        context.watcher.part(0.7)
        return {**record, "pictures": show_images(sampling, settings)}


def time_columns(sampling: Sampling, settings: TimingSettings) -> dict[str, Any]:
    """Seconds of every run of every column, and of those in parallel what they took and how far off they are."""
    device, budget = sampling.device, settings.budget
    draws = sampling.draw(settings.runs + WARM_UP, settings.seed)
    reference, single = sampling.loop(draws)[WARM_UP:], draws.split(1)
    before, counted = single[:WARM_UP], single[WARM_UP:]
    eager, _ = timed(sampling.loop, [before[-1], *counted[: settings.loop_runs]], device)
    record: dict[str, Any] = {
        "loop": {"status": "ok", "seconds": eager[1:]},
        "network_seconds": sampling.network_seconds(),
    }
    if device.type == "cuda":
        run = sampling.captured_loop(before[0])
        run(before[0])
        seconds, _ = timed(run, counted, device, budget, fewest=settings.loop_runs)
        record["graph"] = {"status": "ok", "seconds": seconds}
    first, _ = timed(sampling.parallel, before, device)
    auto = check_and_time(sampling.parallel, counted, reference, budget)
    record["auto"] = {"status": "ok", "first_seconds": first, **auto}
    record["printed"] = time_printed(sampling, counted, reference, budget)
    if len(record["printed"].get("seconds", ())) > 1:  # where a run takes long, a second would too
        record["newton"] = time_newton(sampling, counted[: settings.loop_runs], reference, budget / 2)
    record["batch"] = time_batch(sampling, settings)
    return record


def time_printed(sampling: Sampling, draws: list[Draw], reference: torch.Tensor, budget: float) -> dict[str, Any]:
    """The paper's method; where its blocks do not fit, that is what is recorded."""
    found = within_memory(lambda: sampling.time_printed(draws, reference, budget), sampling.device)
    return OUT_OF_MEMORY if found is None else {"status": "ok", **found}


def time_newton(sampling: Sampling, draws: list[Draw], reference: torch.Tensor, budget: float) -> dict[str, Any]:
    """The paper's method again, from another start."""
    call = partial(sampling.printed, start=GaussianStart())
    return {"status": "ok", **check_and_time(call, draws, reference, budget)}


def time_batch(sampling: Sampling, settings: TimingSettings, runs: int = 3) -> dict[str, Any]:
    """Throughput: so many samples at a time."""
    draws = [sampling.draw(settings.batch, settings.seed + 1 + number) for number in range(WARM_UP + runs)]
    # The eager loop is as slow as with one sample, and its first call sets up all there is; so does a graph's.
    columns: dict[str, Any] = {"loop": (sampling.loop, 1, 1)}
    if sampling.device.type == "cuda":
        columns["graph"] = sampling.captured_loop(draws[0]), 1, runs
    columns["auto"] = sampling.parallel, WARM_UP, runs
    seconds = {}
    for name, (call, before, counted) in columns.items():
        timed(call, draws[:before], sampling.device)
        seconds[name], _ = timed(call, draws[WARM_UP:][:counted], sampling.device)
    return {"samples": settings.batch, "seconds": seconds}


def show_images(sampling: Sampling, settings: TimingSettings) -> dict[str, Any]:
    """A few samples by the loop and in parallel, from the same noise."""
    draw = sampling.draw(settings.images, settings.seed + 12345)
    both = {"sequential": sampling.loop(draw), "parallel": sampling.parallel(draw).final}
    return {name: pack(sampling.model.decode(states)) for name, states in both.items()}


def cost(entry: dict[str, Any], length: int, loop_seconds: float) -> dict[str, Any]:
    """Of the runs of one method, one sample each: what they took, over what the loop takes, and how far off they are."""
    return {
        "over_loop": loop_seconds / median(entry["seconds"]),
        "iterations": fmean(entry["iterations"]),
        "evaluations": fmean(entry["evaluations"]) / length,
        "error": max(map(float, entry["error"])),
        "not_converged": sum(name != "CONVERGED" for name in entry["results"]),
        "samples": len(entry["results"]),
    }


def proxy(phases: dict[str, float], length: int) -> float:
    """The paper's seconds of a run: the Jacobians of all steps as if they took what one does, all else on the clock.

    >>> proxy({"jacobian": 1.0, "linear": 0.25, "total": 1.5}, 4)
    0.75
    """
    return phases["total"] - phases["jacobian"] + phases["jacobian"] / length


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every cell that was timed: medians, speed-ups, iterations, errors."""
    found = []
    for record in records:
        if "loop" not in record:
            continue
        timed_columns = [name for name in COLUMNS if record.get(name, {}).get("seconds")]
        middle = {name: median(record[name]["seconds"]) for name in timed_columns}
        entry: dict[str, Any] = {name: record[name] for name in IDENTITY if name in record}
        entry["seconds"] = middle
        entry["restless"] = [name for name in timed_columns if not calm(record[name]["seconds"])]
        for method in ("printed", "newton", "auto"):
            if method in middle:
                entry[method] = {
                    **cost(record[method], record["L"], middle["loop"]),
                    "over_graph": middle["graph"] / middle[method] if "graph" in middle else None,
                    "mean_error": fmean(map(float, record[method]["error"])),
                }
        if phases := record.get("printed", {}).get("phases"):
            entry["printed"]["proxy_over_loop"] = middle["loop"] / proxy(phases, record["L"])
        batch = {name: median(each) for name, each in record["batch"]["seconds"].items()}
        auto = batch.pop("auto")
        entry["batch"] = {"samples": record["batch"]["samples"], "over_fastest_loop": min(batch.values()) / auto}
        entry["frechet"] = record.get("frechet")
        found.append(entry)
    return found


def lines(summary: list[dict[str, Any]]) -> list[str]:
    return table([_row(entry) for entry in summary])


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {name: entry[name] for name in IDENTITY if name in entry}
    auto, printed, distance = entry["auto"], entry.get("printed", {}), entry["frechet"]
    row["over eager loop"] = times(auto["over_loop"])
    if auto["over_graph"] is not None:
        row["over CUDA graph"] = times(auto["over_graph"])
    row["iterations"] = f"{auto['iterations']:.1f}"
    row["error"] = f"{auto['error']:.1e}"
    row["Newton's iterations"] = shown(printed.get("iterations"), ".1f")
    row["Newton over eager loop"] = shown(printed.get("over_loop"), times)
    row[f"a batch of {entry['batch']['samples']}"] = times(entry["batch"]["over_fastest_loop"])
    if distance is not None:
        low, high = distance["difference_interval"]
        row["distance, loop"] = f"{distance['sequential']:.3f}"
        row["in parallel"] = f"{distance['parallel']:.3f}"
        row["difference, 95 %"] = f"{low:+.1e} to {high:+.1e}"
    return row
