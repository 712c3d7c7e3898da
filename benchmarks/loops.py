"""A user's own loops by ``deeppcr.solve`` against loops, peers and their targets: checked, then timed, then written to a file.

    python benchmarks/loops.py [--part table choice cold host captured] [--only NAMES] [--device cpu|cuda] [--quick] [--json FILE]

- table: every loop of the table by the public call with default settings, forward, and with gradients of all that it
  depends on; beside it every way that ``solve`` may choose, the bare loop, the same in a CUDA graph, and pararnn-torch
  where it is installed. Of bare loops the first 256 steps are run, and their time is scaled to all of them
- choice: over some 70 loops, the public call against the best of its ways, and against the bare loop
- cold: first calls on the random problems of ``benchmarks/fuzz`` against bare loops
- host: what a warm call takes beyond the time in which the device is at work
- captured: ``Newton(stop=FixedIterations(n))`` inside a CUDA graph of the caller, n as many as the solve takes by itself, and of kernels' one less: the last confirms

Results are compared with a bare loop in float64 first (of chaotic loops and of the choice's own, by the residual of every
step by the user's own step): what is wrong is reported and never timed, and the exit code is then 1. A target that is
missed is no failure. Times are minima over the repeats, after four calls, the device waited for; medians stand beside them.
Float32 with TF32 off, unless a loop says float64.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import deeppcr
import loop_problems
from deeppcr_paper.timing import clocked
from fuzz.problems import problem as random_problem
from fuzz.reference import Precision
from kernel_methods import Method, can_capture, captured, iterations_inside
from kernel_problems import Problem
from kernel_report import number
from kernels import Case, examine, first_line, line, seconds_of
from loop_claims import claims, ways_of
from loop_methods import BARE, CAPTURED, HAS_PARARNN, SOLVE, WARM_UP, bare, by_cudnn, solved, ways, with_projection
from loop_problems import CHOICE, FORWARD, TABLE, Loop, Prepared, make_ready
from records import Results, parse, parser_of, set_up

PARTS = ("table", "choice", "cold", "host", "captured")
#: Problems of the fuzz.
COLD_PROBLEMS = 200
#: Seconds for what is made ready beside each other.
PREPARING = 120.0

Build = Callable[[Prepared, str], dict[str, Method]]


class Run:
    """What all parts need to know, and what they found."""

    def __init__(self, device: torch.device, quick: bool, only: Sequence[str] | None, budget: float, results: Results):
        self.device, self.quick, self.only, self.budget = device, quick, only, budget
        self.alone = False  # the public call without the others
        self.comparing = 200.0  # seconds after which the table goes on without what it compares with
        self.choosing = math.inf  # seconds after which the choice is judged by the loops that were timed
        self.cold_problems = COLD_PROBLEMS
        self.late: set[str] = set()  # loops that were not ready in time, and might never be
        self.results = results

    def loops(self, listed: Sequence[Loop]) -> list[Loop]:
        chosen = [each for each in listed if not self.only or each.name in self.only]
        return [each.small() for each in chosen] if self.quick else chosen

    def examine(self, suite: str, prepared: Prepared, direction: str, build: Build) -> list[Case]:
        """Check the methods, time those that passed, print a line each. Errors are in units of what is allowed."""
        parameters = prepared.loop.parameters | {"direction": direction}
        gradients = direction != FORWARD
        with torch.set_grad_enabled(gradients):
            problem = Problem(suite, parameters, lambda _: build(prepared, direction), 1.0, gradients)
            found = examine(problem, self.device, self.budget)
        self.add(found)
        return found

    def add(self, cases: Sequence[Case]) -> None:
        self.results.cases += cases
        print("\n".join(map(line, cases)), flush=True)


def prepared_loops(run: Run, suite: str, listed: Sequence[Loop]) -> Iterator[Prepared]:
    """One after the other, each gone from memory before the next; one that cannot be made is a failed case."""
    for loop in run.loops(listed):
        try:
            if loop.name in run.late:
                raise TimeoutError(f"its kernels were not made in {PREPARING:.0f} s")
            yield Prepared(loop, run.device)
        except Exception as error:
            run.add([Case(suite, loop.parameters, SOLVE, 1.0, failure=first_line(error))])
        run.results.save()
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()


def make_all_ready(run: Run, listed: Sequence[Loop], workers: int, folder: Path) -> None:
    """References and kernels, in so many processes: nothing is timed meanwhile. What takes longer than all others together is a failure."""
    begun = time.perf_counter()
    loops = sorted(run.loops(listed), key=lambda loop: (loop.limits is None, -loop.L))
    with get_context("spawn").Pool(
        workers, maxtasksperchild=1
    ) as pool:  # on leaving it, those that still work are ended
        made = [pool.apply_async(make_ready, (loop, run.device, folder)) for loop in loops]
        for loop, each in zip(loops, made, strict=True):
            each.wait(max(0.0, PREPARING - (time.perf_counter() - begun)))
            if not each.ready():
                print(f"{loop.name}: not ready after {PREPARING:.0f} s")
                run.late.add(loop.name)
    loop_problems.REFERENCES = folder
    print(f"ready after {time.perf_counter() - begun:.0f} s\n", flush=True)


# The parts.


def table(run: Run) -> None:
    begun = time.perf_counter()

    def build(prepared: Prepared, direction: str) -> dict[str, Method]:
        found = {SOLVE: solved(prepared, direction, prepared.error)}
        if run.alone:
            return found
        if time.perf_counter() - begun > run.comparing:
            print(f"{prepared.loop.name}: time is up, nothing is compared with it")
            return found
        found |= with_projection(prepared, direction) | by_cudnn(prepared, direction)
        return found | ways(prepared, direction, prepared.error) | bare(prepared, direction)

    if not HAS_PARARNN:
        print("pararnn-torch is not installed: the elementwise GRU is compared without it")
    for prepared in prepared_loops(run, "table", TABLE):
        for direction in prepared.loop.directions:
            run.examine("table", prepared, direction, build)


def choice(run: Run) -> None:
    """Loops whose ways were timed before, as for the table, are not timed again."""

    def build(prepared: Prepared, direction: str) -> dict[str, Method]:
        # Where there is a reference, it is asked: what rounds up in a chunk is no error of a step, and may be larger than one.
        check = prepared.residual if prepared.loop.limits is None else prepared.error
        found = {SOLVE: solved(prepared, direction, check)}
        return found | ways(prepared, direction, check) | {BARE: bare(prepared, direction)[BARE]}

    begun = time.perf_counter()
    listed = CHOICE[:: 9 if run.quick and not run.only else 1]
    wanted, timed = {loop.name for loop in run.loops(listed)}, ways_of(run.results.cases)
    for prepared in prepared_loops(run, "choice", [loop for loop in listed if loop.name not in timed]):
        run.examine("choice", prepared, FORWARD, build)
        if time.perf_counter() - begun > run.choosing:
            print(
                f"time is up: the choice is judged by {len(ways_of(run.results.cases))} of {len(wanted | timed.keys())} loops"
            )
            break


@torch.no_grad()
def cold(run: Run) -> None:
    """The bare loop is run first, twice: the libraries' own first calls are not ours to answer for."""
    for count in range(6 if run.quick else run.cold_problems):
        drawn = random_problem(count, longest=40 if run.quick else 5000)
        if not drawn.plain:
            continue
        # How a failure is met, and gradients, are not what is timed.
        drawn = replace(drawn, asked={name: drawn.asked[name] for name in drawn.asked if name == "batch_dims"})
        case = Case("cold", {"problem": count, "loop": drawn.family, "L": drawn.length}, SOLVE, 1.0)
        try:
            given = Precision(drawn, drawn.dtype, run.device)
            loop = min(clocked(given.loop, run.device)[1] for _ in range(2))
            solve = lambda: drawn.solve("default", given.step, given.z0, given.xs, None)  # noqa: B023, E731
            solution, seconds = clocked(solve, run.device)
        except Exception as error:
            case.failure = first_line(error)
            run.add([case])
            continue
        case.passed, case.seconds, case.error = True, [seconds], 0.0
        case.iterations, case.result = int(solution.iterations.max()), solution.result.name
        plain = replace(case, method=BARE, seconds=[loop], iterations=None, result=None)
        run.add([case, plain])


def host(run: Run) -> None:
    for prepared in prepared_loops(run, "host", TABLE):
        case = Case("host", prepared.loop.parameters | {"direction": FORWARD}, SOLVE, 1.0)
        try:
            with torch.no_grad():
                seconds, busy = host_time(prepared.call, run.device, 3 * run.budget)
            # The same calls were timed before: a minute in which the host is busy with something else is to spoil none of them.
            seconds += [
                taken
                for name, ways in ways_of(run.results.cases).items()
                if name == prepared.loop.name
                for way, taken in ways.items()
                if way == SOLVE
            ]
            case.passed, case.error, case.seconds = True, 0.0, [max(0.0, each - busy) for each in seconds]
            case.notes = [f"the device is at work for {number(1e3 * busy)} ms of a call"]
        except Exception as error:
            case.failure = first_line(error)
        run.add([case])


def host_time(call: Callable[[], Any], device: torch.device, budget: float) -> tuple[list[float], float]:
    """Seconds of warm calls, and those in which the device is at work in one of them.

    A solve waits for the device to see whether it is done: how soon it returns says nothing of the host by itself.
    """
    for _ in range(2):
        call()
    seconds, begun = [], time.perf_counter()
    while not seconds or (len(seconds) < 500 and time.perf_counter() - begun < budget):
        seconds.append(seconds_of(call, 1, device))
    if device.type != "cuda":
        return seconds, 0.0
    # Least of a few: now and then a call is held against the step itself, which keeps the device busy, too.
    return seconds, min(_busy_seconds(call, device) for _ in range(3))


def _busy_seconds(call: Callable[[], Any], device: torch.device) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize(device)
    on_device = torch.autograd.DeviceType.CUDA
    spans = sorted((e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type == on_device)
    busy, until = 0.0, 0.0
    for start, end in spans:  # what runs side by side is counted once
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1e-6 * busy


def in_a_graph(run: Run) -> None:
    if not can_capture(run.device):
        print("captured: needs a CUDA device")
        return

    for prepared in prepared_loops(run, "captured", [each for each in TABLE if not each.chaotic]):
        loop = prepared.loop
        for direction in loop.directions:
            parameters = loop.parameters | {"direction": direction}
            case = Case("captured", parameters, CAPTURED, 1.0)
            try:  # with gradients digits of every state are asked for, which may take more
                with torch.set_grad_enabled(direction != FORWARD):
                    for _ in range(WARM_UP):  # the first ones may be without kernels
                        alone = prepared.solve(FORWARD, solver=deeppcr.Newton()).solution
                assert alone is not None
                case.optional, case.failure = True, f"Newton() ends as {alone.result.name}: only a loop has this result"
            except Exception as error:
                alone, case.failure = None, first_line(error)
            if alone is None or alone.result not in (deeppcr.Result.CONVERGED, deeppcr.Result.PRECISION_FLOOR):
                run.add([case])
                continue
            fixed = deeppcr.FixedIterations(iterations_inside(alone))

            def build(prepared: Prepared, direction: str, stop: deeppcr.FixedIterations = fixed) -> dict[str, Method]:
                inside = solved(prepared, direction, prepared.error, lambda: deeppcr.Newton(stop=stop))
                return {CAPTURED: replace(inside, prepare=captured)}

            run.examine("captured", prepared, direction, build)


RUN_PART: dict[str, Callable[[Run], None]] = {
    "table": table,
    "choice": choice,
    "cold": cold,
    "host": host,
    "captured": in_a_graph,
}


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, quick="tiny loops, in seconds: a dry run")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS, help="(default: all)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these loops: pendulum, gru-wide, ...")
    parser.add_argument(
        "--alone", action="store_true", help="of the table the public call alone, without what it is held against"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="processes that make references and kernels first (default: 1, on the way)",
    )
    parser.add_argument(
        "--comparing",
        type=float,
        default=200.0,
        help="seconds of the table after which the rest is timed alone (default: 200)",
    )
    parser.add_argument(
        "--choosing", type=float, default=math.inf, help="seconds of the choice after which it is judged (default: all)"
    )
    parser.add_argument("--cold-problems", type=int, default=COLD_PROBLEMS, help="of the fuzz (default: 200)")
    parser.add_argument(
        "--onto",
        type=Path,
        metavar="FILE",
        help="go on with what an earlier run of this commit wrote: its cases count, too",
    )
    parser.add_argument("--budget", type=float, help="seconds of timing for each method (default: 0.15)")
    options = parse(parser, arguments)
    unknown = set(options.only or ()) - {loop.name for loop in CHOICE}
    if unknown:
        parser.error(f"--only: no such loop: {', '.join(sorted(unknown))}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0 where every check held."""
    options = options_of(arguments)
    device = torch.device(options.device)
    set_up(device)
    budget = options.budget if options.budget is not None else 0.005 if options.quick else 0.15
    if device.type != "cuda":
        print("no CUDA device: targets in milliseconds are those of a GPU")
    results = Results("loops", options, budget_seconds=budget, parts=list(options.part))
    if options.onto is not None:
        before = results.go_on_with(options.onto)
        results.cases = [Case(**case) for case in before["cases"]]
        results.settings["parts"] = [*before["settings"]["parts"], *options.part]
    run = Run(device, options.quick, options.only, budget, results)
    run.alone, run.comparing, run.choosing = options.alone, options.comparing, options.choosing
    run.cold_problems = options.cold_problems
    if options.workers > 1:
        folder = TemporaryDirectory()
        known = ways_of(results.cases) if list(options.part) == ["choice"] else {}
        listed = [loop for loop in (CHOICE if "choice" in options.part else TABLE) if loop.name not in known]
        make_all_ready(run, listed, options.workers, Path(folder.name))
    for part in options.part:
        begun = time.perf_counter()
        RUN_PART[part](run)
        print(f"{part}: {time.perf_counter() - begun:.0f} s\n", flush=True)
        run.results.save()
    parts = [part for part in PARTS if part in results.settings["parts"]]
    results.claims = list(claims(parts, results.cases, run.loops(CHOICE)))
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
