"""Does ``mode="auto"`` choose well? Every cell of ``mlp-timing`` by every choice there is, and by "auto".

    python benchmarks/auto_choice.py [--quick] [--out results] [--commit COMMIT]

For networks with ReLU, L = 2 to 16,384 layers of width 2 to 256 and one row: the loop in one kernel, the parallel kernels
with every chunk that is a power of two, and "auto" are called in turn, in one process; times are of the public call, the
least over the repeats. Where a call by "auto" takes over 0.2 ms it may take at most 1.25 times as long as the best; the
exit code is 1 where it takes longer, or where a result differs from that of the loop. The times that the cost model
reckons with are measured first, in a cache folder of their own, and written to the file: in the form of
``src/deeppcr/nn/h200.json``. Needs a CUDA device; --quick --device cpu makes a dry run.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import deeppcr
from deeppcr.nn import MLP, calibrate, cost
from deeppcr.nn.base import Mode
from deeppcr_paper.timing import relative_error, synchronise
from kernels import WARM_PROCESSES, compile_kernels
from records import Results, parser_of, write

#: Seconds from which on a choice counts, and what it may cost over the best one.
COUNTS, ALLOWED = 0.2e-3, 1.25
#: A choice that takes so many times as long as the best is called once and not again.
HOPELESS = 3.0
TOLERANCE = 1e-3
#: Fewest and most calls of a choice that are timed.
REPEATS = (5, 40)
WIDTHS, LENGTHS = tuple(2**k for k in range(1, 9)), tuple(2**k for k in range(1, 15))
QUICK_WIDTHS, QUICK_LENGTHS = (4, 16, 64, 128), (64, 512, 1024, 4096, 16384)
DRY_WIDTHS, DRY_LENGTHS = (3,), (8, 40)
#: Seconds that the processes that compile may take, and how many there are at most.


class Networks:
    """Networks of one width: the deepest, and what stands at the beginning of it."""

    def __init__(self, width: int, most: int, device: torch.device):
        generator = torch.Generator(device).manual_seed(0)
        bound = width**-0.5

        def uniform(*shape: int) -> Tensor:
            return torch.empty(*shape, device=device).uniform_(-bound, bound, generator=generator)

        self.weights, self.biases = uniform(most, width, width), uniform(most, width)
        self.z0, self.width = torch.randn(1, width, device=device, generator=generator), width

    def module(self, length: int, chunk: int | None = None) -> MLP:
        newton = None if chunk is None else deeppcr.Newton(chunk=chunk)
        module = MLP(1, self.width, 1, 1, newton=newton, device=self.z0.device)
        module.weight, module.bias = (torch.nn.Parameter(each[:length]) for each in (self.weights, self.biases))
        return module

    def call(self, length: int, mode: Mode, chunk: int | None = None) -> tuple[MLP, Callable[[], Tensor]]:
        module = self.module(length, chunk)
        return module, torch.no_grad()(lambda: module.hidden_states(self.z0, mode))

    def choices(self, length: int) -> dict[str, Callable[[], Tensor]]:
        """The kernels leave a chunk of 1 to the general solver: it is none of these."""
        found = {"sequential": self.call(length, "sequential")[1]}
        chunk = 2
        while chunk < length:
            found[f"chunk {chunk}"] = self.call(length, "parallel", chunk)[1]
            chunk *= 2
        return found


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    synchronise(device)
    begun = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - begun


def in_turn(runs: dict[str, Callable[[], Any]], device: torch.device, budget: float) -> dict[str, list[float]]:
    """Seconds of every repeat, one call of each after the other: what else the machine does hits all of them alike."""
    once = sum(seconds_of(run, device) for run in runs.values())
    fewest, most = REPEATS
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(max(fewest, min(most, int(budget / once)))):
        for name, run in runs.items():
            seconds[name].append(seconds_of(run, device))
    return seconds


def examine(networks: Networks, length: int, device: torch.device, budget: float) -> dict[str, Any]:
    """One cell: what each choice takes, what "auto" takes, and what it said."""
    choices = networks.choices(length)
    reference = choices["sequential"]()
    wrong = {}
    for name, run in choices.items():
        error = relative_error([run()], [reference])
        if not error <= TOLERANCE:
            wrong[name] = error
    once = {name: min(seconds_of(run, device) for _ in range(2)) for name, run in choices.items()}
    quickest = min(once.values())
    timed = {name: run for name, run in choices.items() if once[name] <= HOPELESS * quickest}
    module, auto = networks.call(length, "auto")
    error = relative_error([auto()], [reference])
    if not error <= TOLERANCE:
        wrong["auto"] = error
    solution = module.solution
    assert solution is not None
    found = in_turn({**timed, "auto": auto}, device, budget)
    seconds = {name: min(each) for name, each in found.items()}
    medians = {name: median(each) for name, each in found.items()}
    loop = solution.result is deeppcr.Result.LOOP
    return {
        "L": length,
        "w": networks.width,
        "seconds": {**once, **seconds},
        "medians": medians,
        "chosen": "sequential" if loop else f"chunk {solution.plan.chunk}",
        "why": solution.plan.notes,
        "iterations": int(solution.iterations.max()),
        "wrong": wrong,
    }


def judge(cell: dict[str, Any]) -> dict[str, Any]:
    """The best choice, how "auto" compares with it, and whether that is too much."""
    seconds = dict(cell["seconds"])
    auto = seconds.pop("auto")
    best = min(seconds, key=seconds.__getitem__)
    ratio = auto / seconds[best]
    return {"best": best, "ratio": ratio, "counts": auto > COUNTS, "too slow": auto > COUNTS and ratio > ALLOWED}


def line(cell: dict[str, Any]) -> str:
    verdict = judge(cell)
    best, auto = 1e3 * cell["seconds"][verdict["best"]], 1e3 * cell["seconds"]["auto"]
    return (
        f"w = {cell['w']:3}, L = {cell['L']:6,}: best {best:8.4f} ms ({verdict['best']}), "
        f"auto {auto:8.4f} ms ({cell['chosen']}), {verdict['ratio']:.2f}x"
        + ("" if verdict["counts"] else ", too short to count")
        + ("  TOO SLOW" if verdict["too slow"] else "")
        + (f"  WRONG: {cell['wrong']}" if cell["wrong"] else "")
    )


def summary(cells: Sequence[dict[str, Any]]) -> list[str]:
    counted = [cell for cell in cells if judge(cell)["counts"]]
    if not counted:
        return [f"{len(cells)} cells, none over {1e3 * COUNTS:g} ms"]
    worst = max(counted, key=lambda cell: judge(cell)["ratio"])
    slow = [cell for cell in cells if judge(cell)["too slow"]]
    over = f"{len(cells)} cells, {len(counted)} over {1e3 * COUNTS:g} ms, {len(slow)} of them over {ALLOWED}x"
    return [over, f"worst: {line(worst)}", *map(line, slow)]


def failed(cells: Iterable[dict[str, Any]]) -> bool:
    return any(judge(cell)["too slow"] or cell["wrong"] for cell in cells)


def by_built_in(cell: dict[str, Any], device: torch.device) -> str:
    """What would be chosen without a measurement."""
    kind = calibrate.Kind.of(cell["w"], "relu", 1, False)
    times, source = calibrate.built_in(device, kind)
    found = cost.choose(
        times, source, blocks=cell["L"], rows=1, skip=1, activation="relu", residual=False, most_chunks=2**20
    )
    return "sequential" if found.mode == "sequential" else f"chunk {found.chunk}"


def warm(rank: int, world: int, widths: Sequence[int], device: torch.device) -> None:
    """Compile the kernels of one share of the widths, which leaves them in Triton's cache."""
    for width in widths[rank::world]:
        networks = Networks(width, 2048, device)
        for length, chunks in ((64, (2, 8)), (2048, (2, 16, 64))):
            networks.call(length, "sequential")[1]()
            for chunk in chunks:
                networks.call(length, "parallel", chunk)[1]()
        synchronise(device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit code is 0 where "auto" is good enough everywhere, 2 where it cannot run."""
    parser = parser_of(__doc__, quick="a few sizes; on a CPU a dry run")
    parser.add_argument("--widths", nargs="+", type=int)
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of timing for each cell (default: 0.3)")
    parser.add_argument("--warm", nargs=2, type=int, metavar=("RANK", "WORLD"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    if (on_gpu and not torch.cuda.is_available()) or not (on_gpu or options.quick):
        print("auto_choice.py: needs a CUDA device (--quick --device cpu: a dry run without one)", file=sys.stderr)
        return 2
    device, begun = torch.device(options.device), time.perf_counter()
    sizes = (QUICK_WIDTHS, QUICK_LENGTHS) if options.quick else (WIDTHS, LENGTHS)
    widths, lengths = sizes if on_gpu else (DRY_WIDTHS, DRY_LENGTHS)
    widths, lengths = sorted(options.widths or widths, reverse=True), sorted(options.lengths or lengths)
    torch.set_float32_matmul_precision("highest")
    warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
    if options.warm:
        warm(*options.warm, widths, device)
        return 0

    if on_gpu:
        compile_kernels(__file__, "--widths", *map(str, widths), most=min(WARM_PROCESSES, len(widths)))
    results, cells, times = Results("auto-choice", options, dtype="float32", budget_seconds=options.budget), [], {}
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("deeppcr").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for width in reversed(widths):
            networks = Networks(width, lengths[-1], device)
            for length in lengths:
                cell = examine(networks, length, device, options.budget if on_gpu else 0.01)
                cell |= judge(cell) | {"built-in": by_built_in(cell, device)}
                print(line(cell), flush=True)
                cells.append(cell)
            del networks
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
        for path in Path(folder).glob("deeppcr/times-*.json"):
            times = json.loads(path.read_text())
    results.more = {"cells": cells, "times": times}
    write(results.record(), results.path)
    print("", *summary(cells), f"{time.perf_counter() - begun:.0f} s; written to {results.path}", sep="\n")
    return 1 if failed(cells) else 0


if __name__ == "__main__":
    sys.exit(main())
