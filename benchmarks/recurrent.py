"""Recurrent modules of ``deeppcr.nn`` against those of ``torch.nn``, and the elementwise GRU against pararnn-torch's: checked, then timed.

    python benchmarks/recurrent.py [--part targets diagonal torch] [--kind GRU LSTM RNN] [--budget SECONDS] [--device cpu|cuda] [--quick] [--json FILE]

- targets: the sizes by which the parallel mode is judged, against PyTorch's own kernel, with gradients; called, and on a GPU captured in a
  CUDA graph of the caller
- diagonal: ``DiagonalGRU`` and pararnn-torch's ``ParaGRU`` with the same weights, where that is installed
- torch: a grid of layers by PyTorch's own kernel, by ``mode="auto"``, and in parallel where the cell has kernels; forward, or with gradients
  of the input and of all parameters, in turn over the grid. Values of all axes come evenly: a budget that ends early leaves a thinner grid.
  Besides, one layer of more steps than cuDNN takes: PyTorch's error is recorded there, and is no failure

Outputs and gradients are compared with float64 first, PyTorch's own errors times three being what is allowed: what is wrong is reported
and never timed, and the exit code is then 1. Methods are timed in turn, round after round, so that a device that slows down slows all of
them; medians are compared, and where ``auto`` seems slower it is timed for longer, with all others. Float32 with TF32 off.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple
from importlib.util import find_spec
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch

import deeppcr
import deeppcr.nn
from kernel_methods import Method
from kernels import Case, first_line, line, seconds_of
from records import Results, parse, parser_of, set_up
from recurrent_methods import (
    AUTO,
    BOTH,
    CAPTURED,
    FORWARD,
    PARALLEL,
    PIECE,
    TORCH,
    Layer,
    Size,
    diagonal_methods,
    make_kernels,
    may_have_kernels,
    methods_of,
    run_of,
)

PARTS, KINDS = ("targets", "diagonal", "torch"), ("GRU", "LSTM", "RNN")
#: The grid: T, B and H. From LARGEST numbers on, a layer is left out.
STEPS, ROWS, HIDDEN, LARGEST = (64, 1_024, 8_192, PIECE), (1, 8, 64), (8, 32, 128, 512), 2**26
#: Where narrow kernels end and the choice is open, the grid is closer.
BETWEEN = tuple(itertools.product(STEPS[-2:], ROWS[:2], (64,)))
#: A layer that PyTorch's own kernel cannot run on a GPU.
TOO_LONG = Size("GRU", 2 * PIECE, 1, 32, BOTH)
#: What ``auto`` may cost over PyTorch's own kernel.
FACTOR, OVERHEAD = 1.05, 30e-6
#: Rounds of a size, and seconds after which they end: of targets, and of the grid. Fewer than LEAST say nothing: one kernel took 223 and 248 ms.
ROUNDS, GRID_ROUNDS, LEAST = (50, 1.0), (15, 0.3), 3
#: Where ``auto`` seems slower, rounds go on as long: the same kernel of PyTorch on both sides differs by a quarter from round to round.
DOUBTED = (60, 5.0)


#: Of a kind, T, B and H: how many times as fast as PyTorch's own kernel a call in parallel is to be, with gradients, and captured.
TARGETS: dict[tuple[str, int, int, int], dict[str, float]] = {
    **{("GRU", 32_768, 1, H): {PARALLEL: 12.0} for H in (16, 32)},
    **{("GRU", 32_768, 8, H): {PARALLEL: 5.0} for H in (16, 32)},
    **{("GRU", 8_192, 1, H): {PARALLEL: 6.0, PARALLEL + CAPTURED: 8.0} for H in (16, 32)},
    ("LSTM", 32_768, 1, 16): {PARALLEL: 10.0},
    ("LSTM", 32_768, 8, 16): {PARALLEL: 4.0},
    ("LSTM", 32_768, 1, 32): {PARALLEL: 7.0},
    ("LSTM", 32_768, 8, 32): {PARALLEL: 2.5},
}
#: Of T, B and H: how many times as fast as pararnn-torch's an elementwise GRU is to be, with gradients.
DIAGONAL = {(2_048, 8, 256): 3.3, (16_384, 8, 256): 2.3}


def sizes(kinds: Sequence[str], quick: bool) -> list[Size]:
    """The grid, in the order in which it is measured."""
    steps, rows, hidden = ((5, 33), (1, 3), (2,)) if quick else (STEPS, ROWS, HIDDEN)
    places = [*itertools.product(steps, rows, hidden), *(() if quick else BETWEEN)]
    every = []
    for kind, (T, B, H) in itertools.product(KINDS, places):
        # Neighbours along every axis differ in it.
        turn = KINDS.index(kind) + steps.index(T) + rows.index(B) + sorted({*hidden, H}).index(H)
        if kind in kinds and T * B * H <= LARGEST:
            every.append(Size(kind, T, B, H, (FORWARD, BOTH)[turn % 2]))
    return evenly(every)


def evenly(every: Sequence[Size]) -> list[Size]:
    """Each next one has the values, and pairs of values, that came least before it: so any first part of them covers all."""
    left, seen, found = list(every), Counter(), []
    while left:
        chosen = min(left, key=lambda size: sum(seen[each] for each in _pairs(size)))
        seen.update(_pairs(chosen))
        left.remove(chosen)
        found.append(chosen)
    return found


def _pairs(size: Size) -> list[Any]:
    return list(itertools.combinations(enumerate(astuple(size)), 2))


class Run:
    """What both parts need to know, and what they found."""

    def __init__(self, device: torch.device, quick: bool, kinds: Sequence[str], budget: float, results: Results):
        self.device, self.quick, self.kinds, self.until = device, quick, kinds, time.perf_counter() + budget
        self.results = results
        self.left_out = 0

    def examine(
        self,
        suite: str,
        size: Size,
        methods: Iterator[tuple[str, Method]],
        rounds: tuple[int, float] = ROUNDS,
        doubted: Callable[[list[Case]], bool] = lambda cases: False,
    ) -> list[Case]:
        """Check, then time those that passed in turn, for so many rounds or seconds; for more of them as long as what comes out is doubted."""
        cases, runs = [], {}
        for name, method in methods:
            case = Case(suite, size.parameters, name, 1.0, optional=method.optional)
            cases.append(case)
            try:
                runs[name] = method.prepare(method.run) if method.prepare else method.run
                for _ in range(method.warm_up):
                    runs[name]()
                case.check(method, runs[name])
            except Exception as error:
                case.failure = first_line(error)
        passed = [case for case in cases if case.passed]
        begun, done = time.perf_counter(), 0
        for most, seconds in ((3, 0.0),) if self.quick else (rounds, DOUBTED):
            while done < most and (done < LEAST or time.perf_counter() - begun < seconds):
                for case in passed:
                    case.seconds.append(seconds_of(runs[case.method], 1, self.device))
                done += 1
            if not doubted(passed):
                break
        self.results.cases += cases
        print("\n".join(map(line, cases)), flush=True)
        return cases

    def compare(self, cases: list[Case], other: str, ratios: dict[str, float]) -> None:
        """Claim that methods take this part of the time of another: of one that is captured, if it is so itself."""
        times = {case.method: median(case.seconds) for case in cases if case.passed}
        for method, ratio in ratios.items():
            against = other + CAPTURED if method.endswith(CAPTURED) else other
            name = f"{' '.join(map(str, cases[0].parameters.values()))}: {method} over {against}"
            share = times[method] / times[against] if method in times and against in times else None
            self.results.claim(name, share, 1 / ratio)


def targets(run: Run) -> None:
    for (kind, T, B, H), ratios in TARGETS.items():
        if kind not in run.kinds or time.perf_counter() > run.until:
            run.left_out += 1
            continue
        size = Size(kind, min(T, 33), B, min(H, 2), BOTH) if run.quick else Size(kind, T, B, H, BOTH)
        found = run.examine("targets", size, methods_of(Layer(size, run.device), in_graphs=True))
        run.compare(found, TORCH, ratios)
        gc.collect()


def too_long(run: Run) -> None:
    if TOO_LONG.kind not in run.kinds or time.perf_counter() > run.until:
        run.left_out += 1
        return
    size = Size(TOO_LONG.kind, 33, 1, 2, BOTH) if run.quick else TOO_LONG
    run.examine("too long", size, methods_of(Layer(size, run.device), in_graphs=False), GRID_ROUNDS)


def is_slower(cases: list[Case]) -> bool:
    """Whether ``auto`` takes longer than PyTorch's own kernel by more than it may."""
    times = {case.method: median(case.seconds) for case in cases if case.passed}
    return AUTO in times and TORCH in times and times[AUTO] > FACTOR * times[TORCH] + OVERHEAD


def of_torch(run: Run) -> None:
    too_long(run)
    slow, compared = [], 0
    for size in sizes(run.kinds, run.quick):
        if time.perf_counter() > run.until:
            run.left_out += 1
            continue
        try:
            layer = Layer(size, run.device)
        except Exception as error:
            run.results.cases.append(Case("torch", size.parameters, TORCH, 1.0, failure=first_line(error)))
            continue
        found = run.examine("torch", size, methods_of(layer, in_graphs=False), GRID_ROUNDS, is_slower)
        compared += {TORCH, AUTO} <= {case.method for case in found if case.passed}
        if is_slower(found):
            slow.append(f"{size.kind} T {size.T} B {size.B} H {size.H} {size.direction}")
        del layer
        gc.collect()
    named = f" ({'; '.join(slow)})" if slow else ""
    name = f"of {compared} sizes, those where auto takes over {FACTOR} of PyTorch's time and {1e6 * OVERHEAD:.0f} us{named}"
    run.results.claim(name, len(slow) if compared else None, 0)


def diagonal(run: Run) -> None:
    if find_spec("pararnn") is None:
        print("pararnn-torch is not installed: the elementwise GRU is timed by itself")
    for (T, B, H), ratio in ({(5, 2, 3): 1.0} if run.quick else DIAGONAL).items():
        for direction in (FORWARD, BOTH):
            if time.perf_counter() > run.until:
                run.left_out += 1
                continue
            size = Size("DiagonalGRU", T, B, H, direction)
            found = run.examine("diagonal", size, diagonal_methods(size, run.device))
            if direction == BOTH:
                run.compare(found, "pararnn-torch", {"DiagonalGRU": ratio})


def with_kernels(parts: Sequence[str], kinds: Sequence[str]) -> list[Size]:
    """What will be measured, and may have kernels."""
    of_parts = {
        "targets": [Size(*where, BOTH) for where in TARGETS],
        "diagonal": [Size("DiagonalGRU", *where, direction) for where in DIAGONAL for direction in (FORWARD, BOTH)],
        "torch": [TOO_LONG, *(size for size in sizes(kinds, quick=False) if may_have_kernels(size))],
    }
    every = [size for part in parts for size in of_parts[part]]
    return [size for size in every if size.kind in (*kinds, "DiagonalGRU")]


def compile_for(sizes: Sequence[Size], device: torch.device) -> None:
    """Kernels are kept on disk, where another process finds them."""
    for size in sizes:
        diagonal = size.kind == "DiagonalGRU"
        mode = {} if diagonal else {"mode": PARALLEL}
        module = getattr(deeppcr.nn, size.kind)(size.H, size.H, device=device, **mode)
        x, outer = (torch.randn(size.T, size.B, size.H, device=device) for _ in range(2))
        if not diagonal:
            make_kernels(module, x, size.direction)
        run = run_of(module, x, outer, size.direction)
        for _ in range(3):
            run()


def compile_kernels(every: Sequence[Size], device: torch.device, workers: int, most: float) -> None:
    """By processes side by side, one for each cell; those that take longer than so many seconds are stopped, and made on the way."""
    cells: dict[tuple[str, int], list[Size]] = {}
    for size in every:
        cells.setdefault((size.kind, size.H), []).append(size)
    begun = time.perf_counter()
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=1)
    made = {pool.submit(compile_for, sizes, device): cell for cell, sizes in cells.items()}
    try:
        for each in as_completed(made, timeout=most):
            failed = f": {first_line(error)}" if (error := each.exception()) else ""
            print(f"kernels of {made[each]} after {time.perf_counter() - begun:.0f} s{failed}", flush=True)
    except TimeoutError:
        late = [cell for each, cell in made.items() if not each.done()]
        print(f"not made within {most:.0f} s: {late}", flush=True)
        for process in list(pool._processes.values()):  # there is no public way to stop them before Python 3.14
            process.terminate()
    pool.shutdown(cancel_futures=True)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, quick="tiny layers, in seconds: a dry run")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS, help="(default: all)")
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=KINDS, help="of torch.nn (default: all)")
    parser.add_argument(
        "--budget", type=float, default=540.0, help="seconds after which sizes are left out (default: 540)"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="processes that make kernels first (default: 1, on the way)"
    )
    return parse(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0 where every check held."""
    options = options_of(arguments)
    device = torch.device(options.device)
    set_up(device)
    results = Results("recurrent", options, budget_seconds=options.budget)
    run = Run(device, options.quick, options.kind, options.budget, results)
    if options.workers > 1:
        compile_kernels(with_kernels(options.part, options.kind), device, options.workers, options.budget / 2)
        print(f"kernels after {time.perf_counter() - results.begun:.0f} s", flush=True)
    for part in PARTS:  # the grid last: it takes what is left of the budget
        if part in options.part:
            {"targets": targets, "torch": of_torch, "diagonal": diagonal}[part](run)
    results.settings["left_out"] = run.left_out
    print(f"{run.left_out} sizes left out")
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
