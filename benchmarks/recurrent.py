"""Recurrent modules of ``deeppcr.nn`` against those of ``torch.nn``, and the elementwise GRU against pararnn-torch's: checked, then timed.

    python benchmarks/recurrent.py [--part targets diagonal torch] [--kind GRU LSTM RNN] [--budget SECONDS] [--device cpu|cuda] [--quick] [--json FILE]

- targets: the sizes by which the parallel mode is judged, against PyTorch's own kernel, with gradients
- torch: one layer, by PyTorch's own kernel, in parallel where its cell has kernels, and by ``mode="auto"``; forward, and with gradients of
  the input and of all parameters; called, and on a GPU captured in a CUDA graph of the caller. Sizes are drawn from the whole grid in an
  order that does not depend on the budget, so that any budget sees all of it
- diagonal: ``DiagonalGRU`` and pararnn-torch's ``ParaGRU`` with the same weights, where that is installed

Outputs and gradients are compared with float64 first, PyTorch's own errors times three being what is allowed: what is wrong is reported
and never timed, and the exit code is then 1. Methods are timed in turn, round after round, so that a device that slows down slows all of
them; medians are compared. Float32 with TF32 off.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import deeppcr
import deeppcr.nn
from kernel_methods import Method, can_capture, captured
from kernels import Case, first_line, line, seconds_of
from records import Results, parse, parser_of, set_up

PARTS, KINDS = ("targets", "diagonal", "torch"), ("GRU", "LSTM", "RNN")
HIDDEN, ROWS, STEPS = (8, 16, 32, 64, 128, 256, 512), (1, 4, 16, 64), (64, 256, 1024, 4096, 16384, 65536)
#: Larger inputs do not fit beside what gradients need.
LARGEST = 2**28
#: Wider states have no kernels: there is nothing to be tried.
WIDEST = 128
FORWARD, BOTH = "forward", "forward and backward"
TORCH, PARALLEL, AUTO, CAPTURED = "torch.nn", "parallel", "auto", ", captured"
#: What ``auto`` may cost over PyTorch's own kernel.
FACTOR, OVERHEAD = 1.05, 30e-6
#: Errors may be so many times PyTorch's own; those below this are luck.
ALLOWED, LEAST = 3.0, 2 * torch.finfo(torch.float32).eps
#: Calls before a method is checked and timed: what comes again is compiled first.
WARM_UP = 4
MOST_ROUNDS = 50


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


@dataclass(frozen=True)
class Size:
    """One layer: T steps, B rows, H the hidden size, and the features of its input."""

    kind: str
    T: int
    B: int
    H: int
    direction: str

    @property
    def parameters(self) -> dict[str, Any]:
        return {"kind": self.kind, "T": self.T, "B": self.B, "H": self.H, "direction": self.direction}


def sizes(kinds: Sequence[str], quick: bool) -> list[Size]:
    grid = (KINDS, (5, 33), (1, 3), (2,)) if quick else (KINDS, STEPS, ROWS, HIDDEN)
    every = [
        Size(kind, T, B, H, direction)
        for kind, T, B, H in itertools.product(*grid)
        if kind in kinds and T * B * H <= LARGEST
        for direction in (FORWARD, BOTH)
    ]
    random.Random(0).shuffle(every)
    return every


class Layer:
    """Modules with one set of weights, and what float64 makes of them."""

    def __init__(self, size: Size, device: torch.device):
        torch.manual_seed(0)
        self.size, self.device = size, device
        self.x = torch.randn(size.T, size.B, size.H, device=device)
        self.outer = torch.randn(size.T, size.B, size.H, device=device)
        self.plain = getattr(nn, size.kind)(size.H, size.H, device=device)
        exact = getattr(nn, size.kind)(size.H, size.H, device=device, dtype=torch.float64)
        exact.load_state_dict(self.plain.state_dict())
        self.right = self.run(exact, torch.float64)()
        self.allowed = [ALLOWED * max(each, LEAST) for each in self.distances(self.run(self.plain)())]

    def module(self, mode: str, **options: Any) -> Any:
        made = getattr(deeppcr.nn, self.size.kind)(self.size.H, self.size.H, mode=mode, device=self.device, **options)
        made.load_state_dict(self.plain.state_dict())
        return made

    def run(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> Callable[[], list[Tensor]]:
        return run_of(module, self.x.to(dtype), self.outer.to(dtype), self.size.direction)

    def distances(self, found: list[Tensor]) -> list[float]:
        """Of the outputs, of the gradient of the input, and of those of all parameters together."""
        return distances(found, self.right)

    def error(self, found: list[Tensor]) -> float:
        """In units of what is allowed."""
        return max(each / most for each, most in zip(self.distances(found), self.allowed, strict=True))


def run_of(module: Callable, x: Tensor, outer: Tensor, direction: str) -> Callable[[], list[Tensor]]:
    """Outputs, and with gradients those of the input and of all parameters."""
    x = x.detach().requires_grad_(direction == BOTH)
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []

    def run() -> list[Tensor]:
        with torch.set_grad_enabled(direction == BOTH):
            output = module(x)[0]
            return [output, *(torch.autograd.grad(output, [x, *parameters], outer) if direction == BOTH else ())]

    return run


@torch.no_grad()
def distances(found: list[Tensor], right: list[Tensor]) -> list[float]:
    parts = [found[:1], found[1:2], found[2:]], [right[:1], right[1:2], right[2:]]
    flat = [[torch.cat([each.double().flatten() for each in part]) for part in every if part] for every in parts]
    return [float((one - other).norm() / other.norm()) for one, other in zip(*flat, strict=True)]


def methods_of(layer: Layer) -> Iterator[tuple[str, Method]]:
    """Those that run kernels of ours are checked for having some."""
    size, device = layer.size, layer.device
    plain = layer.run(layer.plain)
    yield TORCH, Method(plain, layer.error, kernels=False)
    auto = layer.module("auto")
    yield AUTO, Method(layer.run(auto), layer.error, solution=lambda: auto.solutions[0], warm_up=WARM_UP)
    if can_capture(device):
        yield TORCH + CAPTURED, Method(plain, layer.error, prepare=captured, kernels=False, optional=True)
    if (2 if size.kind == "LSTM" else 1) * size.H > WIDEST:
        return
    parallel = layer.module("parallel")
    run = layer.run(parallel)

    def by_kernels() -> list[Tensor]:
        found = run()
        if device.type == "cuda" and not parallel.solutions[0].plan.evaluation.startswith("fused"):
            raise RuntimeError(f"not by kernels: {parallel.solutions[0].plan}")
        return found

    def warm() -> Callable[[], list[Tensor]]:
        for _ in range(WARM_UP):
            run()
        return by_kernels

    yield (
        PARALLEL,
        Method(run, layer.error, prepare=lambda _: warm(), solution=lambda: parallel.solutions[0], optional=True),
    )
    if can_capture(device):

        def inside(_: Any) -> Callable[[], Any]:
            passes = max(2, int(parallel.solutions[0].iterations.max()))
            parallel.newton = deeppcr.Newton(stop=deeppcr.FixedIterations(passes))
            try:
                return captured(run)
            finally:
                parallel.newton = deeppcr.Newton()

        yield PARALLEL + CAPTURED, Method(run, layer.error, prepare=inside, optional=True)


class Run:
    """What both parts need to know, and what they found."""

    def __init__(self, device: torch.device, quick: bool, kinds: Sequence[str], budget: float, results: Results):
        self.device, self.quick, self.kinds, self.until = device, quick, kinds, time.perf_counter() + budget
        self.rounds = 3 if quick else MOST_ROUNDS
        self.results = results
        self.left_out = 0

    def examine(self, suite: str, parameters: dict[str, Any], methods: Iterator[tuple[str, Method]]) -> list[Case]:
        """Check, then time those that passed in turn."""
        cases, runs = [], {}
        for name, method in methods:
            case = Case(suite, parameters, name, 1.0, optional=method.optional)
            cases.append(case)
            try:
                runs[name] = method.prepare(method.run) if method.prepare else method.run
                for _ in range(method.warm_up):
                    runs[name]()
                case.check(method, runs[name])
            except Exception as error:
                case.failure = first_line(error)
        passed = [case for case in cases if case.passed]
        begun = time.perf_counter()
        for _ in range(self.rounds):
            for case in passed:
                case.seconds.append(seconds_of(runs[case.method], 1, self.device))
            if time.perf_counter() - begun > 1.0:
                break
        self.results.cases += cases
        print("\n".join(map(line, cases)), flush=True)
        return cases

    def compare(self, cases: list[Case], other: str, ratios: dict[str, float]) -> None:
        """Claim that methods take this part of the time of another."""
        times = {case.method: median(case.seconds) for case in cases if case.passed}
        for method, ratio in ratios.items():
            name = f"{' '.join(map(str, cases[0].parameters.values()))}: {method} over {other}"
            share = times[method] / times[other] if method in times and other in times else None
            self.results.claim(name, share, 1 / ratio)


def targets(run: Run) -> None:
    for (kind, T, B, H), ratios in TARGETS.items():
        if kind not in run.kinds or time.perf_counter() > run.until:
            run.left_out += 1
            continue
        size = Size(kind, min(T, 33), B, min(H, 2), BOTH) if run.quick else Size(kind, T, B, H, BOTH)
        found = run.examine("targets", size.parameters, methods_of(Layer(size, run.device)))
        run.compare(found, TORCH, ratios)
        gc.collect()


def of_torch(run: Run) -> None:
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
        found = run.examine("torch", size.parameters, methods_of(layer))
        times = {case.method: median(case.seconds) for case in found if case.passed}
        if TORCH in times and AUTO in times:
            compared += 1
            if times[AUTO] > FACTOR * times[TORCH] + OVERHEAD:
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
            found = run.examine("diagonal", size.parameters, diagonal_methods(size, run.device))
            if direction == BOTH:
                run.compare(found, "pararnn-torch", {"DiagonalGRU": ratio})


def diagonal_methods(size: Size, device: torch.device) -> Iterator[tuple[str, Method]]:
    torch.manual_seed(0)
    H = size.H
    module = deeppcr.nn.DiagonalGRU(H, H, device=device)
    x, outer = (torch.randn(size.T, size.B, H, device=device) for _ in range(2))
    exact = deeppcr.nn.DiagonalGRU(H, H, mode="sequential", device=device, dtype=torch.float64)
    exact.load_state_dict(module.state_dict())
    right = run_of(exact, x.double(), outer.double(), size.direction)()
    # There is no plain implementation whose rounding could be the measure: some ten roundings are allowed.
    allowed = 1e-5 if size.direction == BOTH else 3e-6

    def error(found: list[Tensor]) -> float:
        return max(distances(found, right)) / allowed

    run = run_of(module, x, outer, size.direction)
    yield "DiagonalGRU", Method(run, error, solution=lambda: module.solutions[0], warm_up=WARM_UP)
    if find_spec("pararnn") is not None:
        theirs = run_of(
            pararnn(module), x.transpose(0, 1).contiguous(), outer.transpose(0, 1).contiguous(), size.direction
        )
        yield "pararnn-torch", Method(theirs, lambda found: error(as_ours(found, H)), optional=True, warm_up=WARM_UP)


def pararnn(module: Any) -> nn.Module:
    """Their layer with our weights; parameters in the order of ours."""
    from pararnn import ParaGRU, newton_apply  # pyright: ignore[reportMissingImports]

    class Layer(nn.Module):
        def __init__(self, cell: nn.Module):
            super().__init__()
            self.cell = cell

        def parameters(self, recurse: bool = True) -> Any:
            cell: Any = self.cell
            return iter([cell.W_x.weight, cell.a_z, cell.a_r, cell.a_n, cell.W_x.bias])

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (newton_apply(self.cell, x),)

    H, device = module.hidden_size, module.weight_hh_l0.device
    cell = ParaGRU(H, H, max_recurrent_norm=None, device=device, dtype=module.weight_hh_l0.dtype)
    order = gates_of(H, device)
    for name, at in (("a_r", 0), ("a_z", 1), ("a_n", 2)):
        setattr(cell, name, nn.Parameter(module.weight_hh_l0[at].detach().clone()))
    cell.W_x.weight = nn.Parameter(module.weight_ih_l0.detach()[order])
    cell.W_x.bias = nn.Parameter(module.bias_ih_l0.detach()[order])
    return Layer(cell)


def gates_of(H: int, device: torch.device) -> Tensor:
    """Their gates are update, reset, new; ours reset, update, new. Both ways it is the same exchange."""
    return torch.cat([torch.arange(H, device=device) + H * at for at in (1, 0, 2)])


def as_ours(found: list[Tensor], H: int) -> list[Tensor]:
    """Their outputs and gradients, rows first, in the order of ours."""
    first = [each.transpose(0, 1) for each in found[:2]]
    if len(found) == 1:
        return first
    weight, update, reset, new, bias = found[2:]
    order = gates_of(H, weight.device)
    return [*first, weight[order], torch.stack([reset, update, new]), bias[order]]


def make_kernels(given: tuple[str, int], device: torch.device) -> None:
    """Of a kind and H: they are kept on disk, where another process finds them."""
    kind, H = given
    module = getattr(deeppcr.nn, kind)(H, H, device=device, **({} if kind == "DiagonalGRU" else {"mode": "parallel"}))
    run = run_of(module, *(torch.randn(256, 2, H, device=device) for _ in range(2)), BOTH)
    for _ in range(3):
        run()


def compile_kernels(kinds: list[tuple[str, int]], device: torch.device, workers: int, most: float) -> None:
    """By processes side by side; those that take longer than this many seconds are stopped, and made on the way."""
    begun = time.perf_counter()
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=1)
    made = {pool.submit(make_kernels, given, device): given for given in kinds}
    try:
        for each in as_completed(made, timeout=most):
            failed = f": {first_line(error)}" if (error := each.exception()) else ""
            print(f"kernels of {made[each]} after {time.perf_counter() - begun:.0f} s{failed}", flush=True)
    except TimeoutError:
        late = [given for each, given in made.items() if not each.done()]
        print(f"not made within {most:.0f} s: {late}", flush=True)
        for process in list(pool._processes.values()):  # there is no public way to stop them before Python 3.14
            process.terminate()
    pool.shutdown(cancel_futures=True)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, quick="tiny layers, in seconds: a dry run")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS, help="(default: both)")
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
    torch.backends.cudnn.allow_tf32 = False
    results = Results("recurrent", options, budget_seconds=options.budget)
    run = Run(device, options.quick, options.kind, options.budget, results)
    if options.workers > 1:
        kinds = [("DiagonalGRU", 256), *((kind, H) for kind in options.kind for H in HIDDEN if H <= WIDEST // 2)]
        compile_kernels(kinds, device, options.workers, options.budget / 2)
        print(f"kernels after {time.perf_counter() - results.begun:.0f} s", flush=True)
    for part in PARTS:  # the grid last: it takes what is left of the budget
        if part in options.part:
            {"targets": targets, "torch": of_torch, "diagonal": diagonal}[part](run)
    results.settings["left_out"] = run.left_out
    print(f"{run.left_out} sizes left out")
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
