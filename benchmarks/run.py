"""The core against the loop and against its peers: each case is checked, then timed, then written to a file.

    python benchmarks/run.py [--quick] [--device cpu|cuda] [--out results]

Needs deeppcr and torch; JAX takes part where it is installed. Float32 with TF32 off. A case whose result differs from
the reference in float64 is reported and never timed; the exit code is then 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import deeppcr
from deeppcr import linear
from deeppcr_paper.mlp import Network, slope
from deeppcr_paper.timing import Timing, capture, measure, relative_error
from records import Results, parse, parser_of

TOLERANCE = 1e-4
HAS_JAX = find_spec("jax") is not None

#: (structure, L, w) of the linear systems, (L, w) of the networks
LINEAR = (
    (linear.Dense, 1_024, 4),
    (linear.Dense, 1_024, 32),
    (linear.Dense, 16_384, 4),
    (linear.Dense, 16_384, 16),
    (linear.Diagonal, 1_024, 64),
    (linear.Diagonal, 16_384, 16),
    (linear.Diagonal, 16_384, 256),
)
LINEAR_GPU = ((linear.Dense, 16_384, 64), (linear.Dense, 65_536, 16), (linear.Diagonal, 65_536, 256))
LINEAR_QUICK = ((linear.Dense, 100, 3), (linear.Diagonal, 100, 5))
NETWORKS = ((1_024, 4), (1_024, 64), (16_384, 4), (16_384, 16))
NETWORKS_GPU = ((16_384, 64),)
NETWORKS_QUICK = ((100, 4),)

SOLVERS = {
    f"Newton(chunk={chunk!r}, jacobian={name})": deeppcr.Newton(chunk=chunk, jacobian=jacobian)
    for name, jacobian in (
        ("DenseJacobian()", deeppcr.DenseJacobian()),
        ("GivenJacobian(slope)", deeppcr.GivenJacobian(slope, exact=True)),
    )
    for chunk in (1, 16, "auto")
}


@dataclass(frozen=True)
class Found:
    """What a method returned: how to get the tensors to compare, and the solution where there is one."""

    tensors: Callable[[], Sequence[Tensor]]
    solution: deeppcr.Solution | None = None


#: Prepares (captures, compiles) and returns what is run.
Method = Callable[[], Callable[[], Found]]


@dataclass(frozen=True)
class Problem:
    """One thing to compute, and the methods that compute it."""

    suite: str
    parameters: dict[str, Any]
    reference: Sequence[Tensor]
    methods: dict[str, Method]
    gradients: bool = False

    @property
    def name(self) -> str:
        return ", ".join([self.suite, *(f"{key} = {value}" for key, value in self.parameters.items())])


@dataclass
class Case:
    """One method on one problem, as it is written to the file. ``seconds`` has every repeat; none if the check failed."""

    suite: str
    parameters: dict[str, Any]
    method: str
    tolerance: float = TOLERANCE
    passed: bool = False
    failure: str = ""
    error: float | None = None
    iterations: int | None = None
    chunk: int | None = None
    linear: str | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return not self.passed

    def check(self, found: Found, reference: Sequence[Tensor]) -> None:
        self.error = relative_error(found.tensors(), reference)
        if found.solution is not None:
            plan, result = found.solution.plan, found.solution.result
            self.iterations, self.chunk, self.linear = int(found.solution.iterations.max()), plan.chunk, plan.linear
            if result is not deeppcr.Result.CONVERGED:
                self.failure = f"{result.name}: {found.solution.message}"
        if not self.error <= self.tolerance:
            self.failure = self.failure or f"differs from the reference by {self.error:.1e}"
        self.passed = not self.failure


def linear_problem(structure: type[linear.Blocks], length: int, width: int, device: torch.device) -> Problem:
    """Orthogonal blocks (reflections, signs) times 0.999: products neither vanish nor grow, so rounding has its say."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(length, width, generator=generator)
    if structure is linear.Dense:
        unit = normal / normal.norm(dim=-1, keepdim=True)
        data = 0.999 * (torch.eye(width) - 2 * unit.unsqueeze(-1) * unit.unsqueeze(-2))
    else:
        data = 0.999 * normal.sign()
    data, rhs = data.to(device), torch.randn(length, width, generator=generator).to(device)
    exact = linear.solve(structure(data.double()), rhs.double(), solver=linear.ForwardSubstitution())

    def method(solver: linear.LinearSolver) -> Callable[[], Found]:
        def run() -> Found:
            states = linear.solve(structure(data), rhs, solver=solver)
            return Found(lambda: [states])

        return run

    solvers = (linear.ForwardSubstitution(), linear.PCR(), linear.Hierarchical(), linear.Auto())
    methods: dict[str, Method] = {str(solver): (lambda solver=solver: method(solver)) for solver in solvers}
    if HAS_JAX:
        methods["jax.lax.associative_scan"] = lambda: associative_scan(structure, data, rhs)
    return Problem("linear", {"blocks": structure.__name__, "L": length, "w": width}, [exact], methods)


def associative_scan(structure: type[linear.Blocks], data: Tensor, rhs: Tensor) -> Callable[[], Found]:
    """The same system by JAX, compiled, on the same device, in full precision."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the GPU's memory
    import jax
    import numpy as np

    jax.config.update("jax_default_matmul_precision", "highest")

    def combine(left, right):
        if structure is linear.Diagonal:
            return right[0] * left[0], right[0] * left[1] + right[1]
        return right[0] @ left[0], (right[0] @ left[1][..., None])[..., 0] + right[1]

    place = jax.devices("gpu" if data.is_cuda else "cpu")[0]
    arrays = [jax.device_put(tensor.cpu().numpy(), place) for tensor in (data, rhs)]
    compiled = jax.jit(lambda blocks, terms: jax.lax.associative_scan(combine, (blocks, terms))[1])

    def run() -> Found:
        states = compiled(*arrays).block_until_ready()
        return Found(lambda: [torch.from_numpy(np.array(states)).to(rhs.device)])

    return run


def network_problem(length: int, width: int, device: torch.device, *, gradients: bool) -> Problem:
    """A deep ReLU network: its states without gradients, or forward and backward together from the last state."""
    network = Network.make(length, width, device)
    network = network.trainable() if gradients else network

    def loop(net: Network = network) -> Found:
        states = net.loop()
        if not gradients:
            return Found(lambda: [torch.stack(states)])
        found = torch.autograd.grad(states[-1].sum(), net.tensors)
        return Found(lambda: found)

    def graph() -> Callable[[], Found]:
        replay, found = capture(loop)
        return lambda: (replay(), found)[1]

    def parallel(solver: deeppcr.Newton) -> Found:
        solution = network.parallel(solver)
        if not gradients:
            return Found(lambda: [solution.states], solution)
        found = torch.autograd.grad(solution.states[-1].sum(), network.tensors)
        return Found(lambda: found, solution)

    methods: dict[str, Method] = {"loop": lambda: loop}
    if device.type == "cuda":
        methods["loop in a CUDA graph"] = graph
    for name, solver in SOLVERS.items():
        methods[name] = lambda solver=solver: lambda: parallel(solver)
    double = network.double().trainable() if gradients else network.double()
    suite = "forward and backward" if gradients else "forward"
    return Problem(suite, {"L": length, "w": width}, loop(double).tensors(), methods, gradients)


def problems(device: torch.device, quick: bool) -> Iterator[Problem]:
    gpu = device.type == "cuda" and not quick
    systems = LINEAR_QUICK if quick else LINEAR + LINEAR_GPU * gpu
    networks = NETWORKS_QUICK if quick else NETWORKS + NETWORKS_GPU * gpu
    for structure, length, width in systems:
        yield linear_problem(structure, length, width, device)
    for gradients in (False, True):
        for length, width in networks:
            yield network_problem(length, width, device, gradients=gradients)


def examine(problem: Problem, device: torch.device, budget: float) -> list[Case]:
    """Check every method, then time those that passed, in turn."""
    cases, runs = [], {}
    with torch.set_grad_enabled(problem.gradients):
        for name, prepare in problem.methods.items():
            case = Case(problem.suite, problem.parameters, name)
            try:
                runs[name] = prepare()
                case.check(runs[name](), problem.reference)
            except RuntimeError as error:  # of a solve, of the device, of a peer
                case.failure = f"{type(error).__name__}: {error}"
            cases.append(case)
        timings = measure({case.method: runs[case.method] for case in cases if case.passed}, device, budget=budget)
    for case in cases:
        case.seconds = list(timings[case.method].seconds) if case.passed else []
    return cases


def show(problem: Problem, cases: Sequence[Case]) -> None:
    print(f"\n{problem.name}\n{'':55}{'min ms':>10}{'median ms':>11}{'iterations':>12}{'error':>9}")
    for case in cases:
        line = f"  {case.method:53}"
        if case.passed:
            timing = Timing(tuple(case.seconds))
            iterations = "" if case.iterations is None else case.iterations
            line += f"{1e3 * timing.minimum:10.3f}{1e3 * timing.median:11.3f}{iterations:>12}{case.error:9.0e}"
        else:
            line += f"FAILED: {case.failure}"
        print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; the exit code is 0 where every check held."""
    parser = parser_of(__doc__, quick="tiny problems, in seconds")
    parser.add_argument("--budget", type=float, help="seconds of timing for each problem (default: 2)")
    parser.add_argument("--threads", type=int, help="CPU threads of torch (default: as torch has it)")
    options = parse(parser, arguments)
    budget = options.budget if options.budget is not None else 0.02 if options.quick else 2.0
    device, results = torch.device(options.device), Results("core", options, dtype="float32", budget_seconds=budget)
    torch.set_float32_matmul_precision("highest")
    if options.threads:
        torch.set_num_threads(options.threads)

    if not HAS_JAX:
        print("jax is not installed: the linear systems are compared without it")
    for problem in problems(device, options.quick):
        found = examine(problem, device, budget)
        show(problem, found)
        results.cases += found
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
