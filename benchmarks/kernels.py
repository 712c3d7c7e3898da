"""The kernels against loops, peers and their targets: each result is checked, then timed, then written to a file.

    python benchmarks/kernels.py [--quick] [--out results] [--commit COMMIT]

Needs a CUDA device; with --quick alone, one without it makes a dry run of tiny problems. Float32 with TF32 off.
"call" is the public call as a user makes it, "captured" the same call inside a CUDA graph of the caller. A result that
differs from a loop in float64 is reported and never timed; the exit code is then 1. A target that is missed is no
failure. Kernels are compiled first, by several processes that share Triton's cache.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from deeppcr_paper.timing import synchronise
from kernel_methods import Method
from kernel_problems import HAS_JAX, Problem, problems
from kernel_report import is_captured, number, rows, text, text_of_claims
from records import Results, parser_of, set_up

#: Seconds that the processes that compile may take, and how many there are at most.
WARM_SECONDS, WARM_PROCESSES = 120, 12
#: Fewest and most repeats of a method; the calls that make one repeat of a captured call that is shorter than this.
REPEATS, CALLS, SHORT = (3, 500), 10, 2e-3
#: A call that takes so many seconds is not repeated.
LONG = 2.0


@dataclass
class Case:
    """One method on one problem, as it is written to the file. ``seconds`` has every repeat; none if the check failed.

    A repeat is the mean of ``calls`` calls in a row. ``peak_bytes`` is what a call allocates at most at a time. ``scale``
    is what seconds were multiplied by, where a part of a loop was run. ``first_seconds`` are the host's in the first call,
    which may compile; ``notes`` are what the plan of the solve says.
    """

    suite: str
    parameters: dict[str, Any]
    method: str
    tolerance: float
    passed: bool = False
    failure: str = ""
    optional: bool = False
    error: float | None = None
    iterations: int | None = None
    result: str | None = None
    notes: list[str] = field(default_factory=list)
    calls: int = 1
    scale: float = 1.0
    first_seconds: float | None = None
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def failed(self) -> bool:
        """What may be impossible here is no failure where it did not run; a wrong result always is."""
        return not self.passed and (self.error is not None or not self.optional)

    def check(self, method: Method, run: Callable[[], Any]) -> None:
        method.before()
        begun = time.perf_counter()
        found = run()
        self.first_seconds = time.perf_counter() - begun
        self.error = method.error(found)
        solution = method.solution()
        if solution is not None and solution.iterations is not None:
            self.iterations, self.result = int(solution.iterations.max()), solution.result.name
            self.notes = list(solution.plan.notes)
        if not self.error <= self.tolerance:
            self.failure = f"differs from the loop in float64 by {self.error:.1e}"
        self.passed = not self.failure


def line(case: Case) -> str:
    """For benchmarks whose errors are in units of what is allowed."""
    name = " ".join([case.suite, *map(str, case.parameters.values())])
    text = f"{name:64} {case.method:32}"
    if not case.passed:
        return f"{text} {'FAILED' if case.failed else 'not here'}: {case.failure}"
    text += f"{number(1e3 * min(case.seconds)):>10} ms  median {number(1e3 * median(case.seconds)):>9}"
    if case.scale != 1:
        text += "  scaled"
    if case.result is not None:
        text += f"  {case.result}, {case.iterations} iterations"
    return f"{text}  error {case.error:.2g} of what is allowed"


def seconds_of(run: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Of one of so many calls in a row. Events see the host too: nothing is queued when the first is recorded."""
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - begun) / calls
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    last.record()  # an event is made when it is first recorded: not while the clock runs
    synchronise(device)
    first.record()
    for _ in range(calls):
        run()
    last.record()
    last.synchronize()
    return 1e-3 * first.elapsed_time(last) / calls


def time_case(case: Case, run: Callable[[], Any], device: torch.device, budget: float) -> None:
    """Fill in the repeats, after a warm-up."""
    once = seconds_of(run, 1, device)
    if once > LONG:
        case.seconds = [case.scale * once]
        return
    once = min(once, seconds_of(run, 1, device))
    case.calls = CALLS if is_captured(case.method) and once < SHORT else 1
    fewest, most = REPEATS
    begun = time.perf_counter()
    while len(case.seconds) < fewest or (len(case.seconds) < most and time.perf_counter() - begun < budget):
        case.seconds.append(case.scale * seconds_of(run, case.calls, device))


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    synchronise(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    synchronise(device)
    return torch.cuda.max_memory_allocated(device) - before


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def examine(problem: Problem, device: torch.device, budget: float) -> list[Case]:
    """Check every method, then time those that passed, in turn."""

    def case(method: str) -> Case:
        return Case(problem.suite, problem.parameters, method, problem.tolerance)

    try:
        methods = problem.build(device)
    except Exception as error:  # one problem that does not fit, or whose kernel does not compile, is not the end
        broken = case("call")
        broken.failure = first_line(error)
        return [broken]
    cases: list[Case] = []
    runs: dict[str, Callable[[], Any]] = {}
    for name, method in methods.items():
        cases.append(case(name))
        cases[-1].optional, cases[-1].scale = method.optional, method.scale
        try:
            runs[name] = method.prepare(method.run) if method.prepare else method.run
            for at in range(method.warm_up):  # what is checked is what is timed: first calls may go another way
                begun = time.perf_counter()
                runs[name]()
                if at and time.perf_counter() - begun > LONG:  # nothing is left to be compiled: this is what it takes
                    break
            cases[-1].check(method, runs[name])
        except Exception as error:
            cases[-1].failure = first_line(error)
    for each in cases:
        if each.passed:
            time_case(each, runs[each.method], device, budget)
            if problem.memory and device.type == "cuda" and not is_captured(each.method):
                each.peak_bytes = peak_bytes(runs[each.method], device)
    if not methods:
        cases.append(case("jax.lax.associative_scan"))
        cases[-1].optional, cases[-1].failure = True, "jax is not installed"
    return cases


def wanted(problem: Problem, device: torch.device) -> bool:
    """Whether there are kernels for the problem; a device that cannot even be asked is shown by the problem itself."""
    try:
        return problem.needs(device)
    except Exception:
        return True


def warm(rank: int, world: int, device: torch.device, quick: bool) -> None:
    """Run the calls of one share of the problems once, which leaves their kernels in Triton's cache."""
    shared = ("break-even", "gradients", "forward and backward")  # with the other suites
    different = [each for each in problems(quick) if each.suite not in shared and "He" not in each.name]
    for problem in different[rank::world]:
        if not wanted(problem, device):
            continue
        try:
            with torch.set_grad_enabled(problem.gradients):
                for method in problem.build(device).values():
                    if method.kernels and method.prepare is None:
                        method.run()
            synchronise(device)
        except Exception as error:  # the run itself will say so where it matters
            print(f"{problem.name}: {first_line(error)}", file=sys.stderr)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def compile_kernels(program: str, *arguments: str, most: int = WARM_PROCESSES) -> None:
    """Let processes share the work of ``warm``. Where they fail, kernels are compiled as they come: later, not wrongly.

    Args:
        program: its file, which takes ``--warm RANK WORLD``
        most: processes
    """
    begun, world = time.perf_counter(), max(1, min(most, (os.cpu_count() or 2) - 1))
    # Times that processes measure while they compete for the device would be wrong.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DEEPPCR_CALIBRATE": "0"}
    started: list[subprocess.Popen] = []
    try:
        for rank in range(world):
            command = [sys.executable, program, *arguments, "--warm", str(rank), str(world)]
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        for process in started:
            process.wait(max(1.0, WARM_SECONDS - (time.perf_counter() - begun)))
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"compiling in advance: {error}; going on without")
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    failed = sum(process.returncode != 0 for process in started)
    print(
        f"kernels compiled by {world} processes in {time.perf_counter() - begun:.0f} s"
        + (f", {failed} of which failed" if failed else ""),
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0 where every check held, 2 where it cannot run."""
    parser = parser_of(__doc__, quick="tiny problems, in seconds; on a CPU a dry run")
    parser.add_argument("--budget", type=float, help="seconds of timing for each method (default: 0.3)")
    parser.add_argument("--suites", nargs="+", help="only these: forward, 'dense solve', ...")
    parser.add_argument("--warm", nargs=2, type=int, metavar=("RANK", "WORLD"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    if (on_gpu and not torch.cuda.is_available()) or not (on_gpu or options.quick):
        print("kernels.py: needs a CUDA device (--quick --device cpu: a dry run without one)", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    set_up(device)
    if options.warm:
        rank, world = options.warm
        warm(rank, world, device, options.quick)
        return 0

    budget = options.budget if options.budget is not None else 0.01 if options.quick else 0.3
    results = Results("kernels", options, dtype="float32", budget_seconds=budget)
    if on_gpu:
        compile_kernels(__file__, "--device", device.type, *(["--quick"] if options.quick else []))
    else:
        print("no CUDA device: a dry run, whose numbers say nothing of the kernels")
    if not HAS_JAX:
        print("jax is not installed: the dense systems are compared without it")
    results.more["seconds_of_nothing"] = min(seconds_of(lambda: None, 1, device) for _ in range(REPEATS[1]))
    for problem in problems(options.quick):
        if (options.suites and problem.suite not in options.suites) or not wanted(problem, device):
            continue
        with torch.set_grad_enabled(problem.gradients):
            results.cases += examine(problem, device, budget)
        kind = (problem.suite, problem.parameters)
        same = [asdict(case) for case in results.cases if (case.suite, case.parameters) == kind]
        print(text(rows(same)), flush=True)
        results.save()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()

    print(text_of_claims(rows([asdict(case) for case in results.cases])))
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
