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

from deeppcr.diffusion import Samples
from deeppcr.diffusion.start import GaussianStart
from deeppcr.runtime import full_precision

from .denoisers import PRESETS, Source
from .experiment import Context, is_out_of_memory
from .mlp_timing import release
from .sampling import WARM_UP, Draw, Sampling, errors, pack, timed
from .settings import setting
from .table import times


@dataclass(frozen=True)
class Settings:
    """What the experiments on diffusion share.

    Attributes:
        steps: L, the denoising steps
        training: "paper" trains as long as the paper does, more than an hour in all; "short" under a minute a network, on a GPU;
            "quick" seconds on a CPU
        train, test: how many images; None for all
        loop_runs: samples that the eager loop is timed on
        runs: and the others, if there are so many in the budget
        budget: seconds for each of the others; at least one run, of the loop in a CUDA graph at least ``loop_runs``
        batch: samples at a time where throughput is timed
        images: shown side by side
        tolerance: of the final sample in parallel, absolute
    """

    steps: tuple[int, ...] = (256, 512, 1024)
    training: str = setting("short", choices=PRESETS)
    train: int | None = None
    test: int | None = None
    loop_runs: int = 10
    runs: int = 100
    budget: float = 4.0
    batch: int = 64
    images: int = 8
    tolerance: float = 1e-3
    seed: int = 0

    @property
    def source(self) -> Source:
        return Source(self.training, self.seed, self.train, self.test)


def time_columns(sampling: Sampling, settings: Settings, context: Context) -> dict[str, Any]:
    """Seconds of every run of every column, and of those in parallel what they took and how far off they are."""
    with full_precision(sampling.device):
        draws = sampling.draw(settings.runs + WARM_UP, settings.seed)
        reference = sampling.loop(draws)[WARM_UP:]
        single = draws.split(1)
        record: dict[str, Any] = {
            "loop": _loop(sampling, single[: settings.loop_runs + WARM_UP], context),
            "network_seconds": sampling.network_seconds(),
        }
        if context.device.type == "cuda":
            record["graph"] = _graph(sampling, single, settings)
        record["auto"] = _auto(sampling, single, reference, settings)
        record["printed"] = _printed(sampling, single[WARM_UP:], reference, settings)
        if len(record["printed"].get("seconds", ())) > 1:  # where a run takes long, a second would too
            record["newton"] = _newton(sampling, single[WARM_UP:], reference, settings)
        record["batch"] = _batch(sampling, settings, context)
        return record


def _loop(sampling: Sampling, draws: list[Draw], context: Context) -> dict[str, Any]:
    seconds, _ = timed(sampling.loop, draws[WARM_UP - 1 :], context.device)
    return {"status": "ok", "seconds": seconds[1:]}


def _graph(sampling: Sampling, draws: list[Draw], settings: Settings) -> dict[str, Any]:
    run = sampling.captured_loop(draws[0])
    run(draws[0])
    seconds, _ = timed(run, draws[WARM_UP:], sampling.device, budget=settings.budget, fewest=settings.loop_runs)
    return {"status": "ok", "seconds": seconds}


def _auto(sampling: Sampling, draws: list[Draw], reference: torch.Tensor, settings: Settings) -> dict[str, Any]:
    first, _ = timed(sampling.parallel, draws[:WARM_UP], sampling.device)
    seconds, found = timed(sampling.parallel, draws[WARM_UP:], sampling.device, budget=settings.budget)
    return {"status": "ok", "seconds": seconds, "first_seconds": first, **certificate(found, reference)}


def _printed(sampling: Sampling, draws: list[Draw], reference: torch.Tensor, settings: Settings) -> dict[str, Any]:
    """Where the blocks do not fit, that is what is recorded."""
    try:
        runs = sampling.time_printed(draws, settings.budget)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        release(sampling.device)
        return {"status": "out of memory"}
    found = {"status": "ok", "seconds": runs.seconds, "phases": runs.phases, **runs.remark}
    return {**found, **certificate(runs.found, reference)}


def _newton(sampling: Sampling, draws: list[Draw], reference: torch.Tensor, settings: Settings) -> dict[str, Any]:
    """Some of the runs of the paper's method again, from another start."""
    draws = draws[: settings.loop_runs]
    call, budget = partial(sampling.printed, start=GaussianStart()), settings.budget / 2
    seconds, found = timed(call, draws, sampling.device, budget=budget)
    return {"status": "ok", "seconds": seconds, **certificate(found, reference)}


def certificate(found: list[Samples], reference: torch.Tensor) -> dict[str, Any]:
    """Of runs of one sample each: iterations, evaluations of the network, how they ended, and the error of the sample."""
    finals = torch.cat([each.final for each in found])
    return {
        "iterations": [int(each.iterations.max()) for each in found],
        "evaluations": [int(each.evaluations.max()) for each in found],
        "results": [each.result.name for each in found],
        "error": errors(finals, reference[: len(finals)]),
    }


def _batch(sampling: Sampling, settings: Settings, context: Context, runs: int = 3) -> dict[str, Any]:
    """Throughput: so many samples at a time."""
    draws = [sampling.draw(settings.batch, settings.seed + 1 + number) for number in range(WARM_UP + runs)]
    columns: dict[str, Any] = {"loop": sampling.loop}
    if context.device.type == "cuda":
        columns["graph"] = sampling.captured_loop(draws[0])
    columns["auto"] = sampling.parallel
    seconds = {}
    for name, call in columns.items():
        # The eager loop is as slow as with one sample, and its first call sets up all there is; so does a graph's.
        before, counted = {"loop": (1, 1), "graph": (1, runs)}.get(name, (WARM_UP, runs))
        timed(call, draws[:before], context.device)
        seconds[name], _ = timed(call, draws[WARM_UP:][:counted], context.device)
    return {"samples": settings.batch, "seconds": seconds}


def show_images(sampling: Sampling, settings: Settings) -> dict[str, Any]:
    """A few samples by the loop and in parallel, from the same noise."""
    with full_precision(sampling.device):
        draw = sampling.draw(settings.images, settings.seed + 12345)
        both = {"sequential": sampling.loop(draw), "parallel": sampling.parallel(draw).final}
        return {name: pack(sampling.model.decode(states)) for name, states in both.items()}


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every cell that was timed: medians, speed-ups, iterations, errors."""
    found = []
    for record in records:
        if "loop" not in record:
            continue
        columns = {name: record[name] for name in COLUMNS if name in record}
        middle = {name: median(each["seconds"]) for name, each in columns.items() if each.get("seconds")}
        entry: dict[str, Any] = {name: record[name] for name in IDENTITY if name in record}
        entry["seconds"] = middle
        for method in ("printed", "newton", "auto"):
            if method not in middle:
                continue
            mine = columns[method]
            entry[method] = {
                "over_loop": middle["loop"] / middle[method],
                "over_graph": middle["graph"] / middle[method] if "graph" in middle else None,
                "iterations": fmean(mine["iterations"]),
                "evaluations": fmean(mine["evaluations"]) / record["L"],
                "error": max(float(each) for each in mine["error"]),
                "mean_error": fmean(float(each) for each in mine["error"]),
                "not_converged": sum(name != "CONVERGED" for name in mine["results"]),
                "samples": len(mine["results"]),
            }
        batch = {name: median(each) for name, each in record["batch"]["seconds"].items()}
        fastest = min(seconds for name, seconds in batch.items() if name != "auto")
        entry["batch"] = {"samples": record["batch"]["samples"], "over_fastest_loop": fastest / batch["auto"]}
        entry["frechet"] = record.get("frechet")
        found.append(entry)
    return found


COLUMNS = ("loop", "graph", "printed", "newton", "auto")
#: What names a cell: the data, the size of a state, whether classes are given, the steps.
IDENTITY = ("data", "w", "side", "conditional", "L")


def row(entry: dict[str, Any]) -> dict[str, Any]:
    """A line of the table that is shown at the end."""
    found: dict[str, Any] = {name: entry[name] for name in IDENTITY if name in entry}
    mine = entry["auto"]
    found["over eager loop"] = times(mine["over_loop"])
    if mine["over_graph"] is not None:
        found["over CUDA graph"] = times(mine["over_graph"])
    found["iterations"] = f"{mine['iterations']:.1f}"
    found["error"] = f"{mine['error']:.1e}"
    printed = entry.get("printed")
    found["Newton's iterations"] = f"{printed['iterations']:.1f}" if printed else None
    found["Newton over eager loop"] = times(printed["over_loop"]) if printed else None
    found[f"a batch of {entry['batch']['samples']}"] = times(entry["batch"]["over_fastest_loop"])
    return found
