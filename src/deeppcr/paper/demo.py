"""``python -m deeppcr.paper.demo``: a deep network forward and backward, by the loop and in parallel, in one table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import deeppcr

from .timing import capture, hardware, measure, relative_error

try:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError:
    sys.exit("the demo needs rich: pip install 'deeppcr[paper]', or run `make demo`")

#: (L, w): layers and width. The last one is there because the loop wins it.
NETWORKS = ((16_384, 2), (16_384, 4), (16_384, 8), (16_384, 16), (1_024, 64))
QUICK = ((256, 4), (64, 16))

#: Relative; ten times the tolerance of the solve in float32. What is further off is not timed.
TOLERANCE = 1e-4


def layer(z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
    """One layer of the network: the body of the loop."""
    weight, bias = x
    return torch.nn.functional.linear(torch.relu(z), weight, bias)


def slope(z: Tensor, x: tuple[Tensor, Tensor]) -> deeppcr.linear.Dense:
    """The Jacobian of a layer, [1, w, w]. ``DenseJacobian()`` finds it by itself, in one and a half times the time."""
    weight, _ = x
    return deeppcr.linear.Dense(weight * (z > 0).unsqueeze(-2))


SOLVER = deeppcr.Newton(chunk=16, jacobian=deeppcr.GivenJacobian(slope, exact=True))
SETTING = "In parallel: solver=Newton(chunk=16, jacobian=GivenJacobian(slope, exact=True))"


@dataclass(frozen=True)
class Network:
    """L layers of width w with PyTorch's default initialisation, and an input with one row."""

    z0: Tensor
    weights: Tensor  # [L, w, w]
    biases: Tensor  # [L, w]

    @staticmethod
    def make(length: int, width: int, device: torch.device) -> Network:
        generator, bound = torch.Generator().manual_seed(0), width**-0.5
        weights, biases = torch.empty(length, width, width), torch.empty(length, width)
        for parameter in (weights, biases):
            parameter.uniform_(-bound, bound, generator=generator)
        z0 = torch.randn(1, width, generator=generator)
        return Network(*(each.to(device) for each in (z0, weights, biases)))

    def to(self, dtype: torch.dtype) -> Network:
        return Network(self.z0.to(dtype), self.weights.to(dtype), self.biases.to(dtype))

    def trainable(self) -> Network:
        return Network(*(each.clone().requires_grad_() for each in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.z0, self.weights, self.biases

    def loop(self) -> list[Tensor]:
        """All states, one after the other. (Unbound once: indexing would be slower, and far slower backwards.)"""
        z, states = self.z0, []
        for x in zip(self.weights.unbind(), self.biases.unbind(), strict=True):
            z = layer(z, x)
            states.append(z)
        return states

    def parallel(self) -> deeppcr.Solution:
        return deeppcr.solve(layer, self.z0, (self.weights, self.biases), solver=SOLVER)


@dataclass
class Row:
    """One line of the table; without times where the check failed."""

    length: int
    width: int
    device: str
    direction: str
    iterations: int | None = None
    error: float = float("nan")
    failure: str = ""
    milliseconds: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.length:,} × {self.width} {self.direction} on {self.device}"

    def speedup(self, over: str = "") -> float:
        """How many times faster than the named loop, or than the fastest one."""
        loops = [time for name, time in self.milliseconds.items() if name != "parallel" and over in ("", name)]
        return min(loops) / self.milliseconds["parallel"]

    def check(self, solution: deeppcr.Solution, error: float) -> None:
        self.iterations, self.error = int(solution.iterations.max()), error
        if solution.result is not deeppcr.Result.CONVERGED:
            self.failure = f"{solution.result.name}: {solution.message}"
        elif not error <= TOLERANCE:
            self.failure = f"differs from the loop by {error:.1e}, more than {TOLERANCE:.0e}"


def forward(row: Row, network: Network, budget: float) -> None:
    """Check the states against the loop in float64, then time both."""
    with torch.no_grad():
        solution = network.parallel()
        reference = torch.stack(network.to(torch.float64).loop())
        row.check(solution, relative_error([solution.states], [reference]))
        if row.failure:
            return
        functions: dict[str, Callable] = {"loop": network.loop, "parallel": network.parallel}
        if network.z0.is_cuda:
            functions["graph"], recorded = capture(network.loop)
            functions["graph"]()
            error = relative_error([torch.stack(recorded)], [reference])
            if not error <= TOLERANCE:
                row.failure = f"the CUDA graph of the loop differs from the loop by {error:.1e}"
                return
        time(row, functions, network, budget)


def backward(row: Row, network: Network, budget: float) -> None:
    """Check the gradients against those of the loop, then time the backward passes alone."""
    network = network.trainable()
    states, solution = network.loop(), network.parallel()

    def gradients(loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, network.tensors, retain_graph=True)

    # The gradient of the last state fades within a hundred layers: the sum of all states tests the others too.
    errors = [
        relative_error(gradients(solution.states[-1].sum()), gradients(states[-1].sum())),
        relative_error(gradients(solution.states.sum()), gradients(torch.stack(states).sum())),
    ]
    row.check(solution, max(errors))
    if not row.failure:
        losses = {"loop": states[-1].sum(), "parallel": solution.states[-1].sum()}
        time(row, {name: lambda loss=loss: gradients(loss) for name, loss in losses.items()}, network, budget)


def time(row: Row, functions: dict[str, Callable], network: Network, budget: float) -> None:
    timings = measure(functions, network.z0.device, budget=budget)
    row.milliseconds = {name: 1e3 * timing.minimum for name, timing in timings.items()}


def run(networks: Sequence[tuple[int, int]], devices: Sequence[torch.device], budget: float) -> Iterator[Row]:
    for device in devices:
        for length, width in networks:
            network = Network.make(length, width, device)
            for direction, examine in (("forward", forward), ("backward", backward)):
                row = Row(length, width, device.type, direction)
                try:
                    examine(row, network, budget)
                except RuntimeError as error:  # of the solve, a backward pass or the device
                    row.failure, row.milliseconds = f"{type(error).__name__}: {error}", {}
                yield row


def ratio(value: float) -> str:
    return f"{value:,.0f}x" if value >= 10 else f"{value:.2g}x"


def as_table(rows: Sequence[Row]) -> Table:
    graph = any("graph" in row.milliseconds for row in rows)
    table = Table(box=box.SIMPLE_HEAD, caption=SETTING, caption_justify="left", caption_style="")
    for name in ("network\nL × w", "device", "pass"):
        table.add_column(name, no_wrap=True)
    times = {"loop": "loop\nms", "graph": "CUDA graph\nof it, ms", "parallel": "in parallel\nms"}
    over = {"loop": "speed-up", "graph": "over the\ngraph"}
    if not graph:
        del times["graph"], over["graph"]
    for name in (*times.values(), *over.values(), "Newton\niterations", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{row.length:,} × {row.width}", row.device, row.direction]
        if row.failure:
            cells += ["[bold red]FAILED[/]", *[""] * (len(times) + len(over) - 1)]
        else:
            known = row.milliseconds
            cells += [f"{known[name]:,.1f}" if name in known else "" for name in times]
            cells += [ratio(row.speedup(name)) if name in known else "" for name in over]
        table.add_row(*cells, "" if row.iterations is None else str(row.iterations), f"{row.error:.0e}")
    return table


def verdict(rows: Sequence[Row]) -> str:
    """Where the loop wins, by what was measured."""
    timed = [row for row in rows if not row.failure]
    lost = [f"{row.name} ({ratio(row.speedup())})" for row in timed if row.speedup() < 1]
    if not timed:
        return "Nothing was timed."
    if not lost:
        return f"The loop won none of these {len(timed)} cases."
    return f"The loop wins {len(lost)} of these {len(timed)} cases: {', '.join(lost)}."


def conditions(devices: Sequence[torch.device]) -> str:
    names = ", ".join(f"{hardware(device)} ({device.type})" for device in devices)
    return (
        "Measured: ReLU layers with PyTorch's default initialisation, batch 1, float32; the shortest of repeated calls "
        "taken in turn. Forward: without gradients. Backward: from the last state to the weights, biases and input, "
        "after a forward pass that is not counted. Error: largest difference over largest value; forward against the "
        f"loop in float64, backward against the loop's gradients. {names}; torch {torch.__version__}, "
        f"CPU threads: {torch.get_num_threads()}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code is 0 where every check held."""
    parser = argparse.ArgumentParser(prog="python -m deeppcr.paper.demo", description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "all"), default="all", help="all: the GPU where there is one"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny networks, in seconds: shows that it works, not how fast"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU (default: 1)")
    options = parser.parse_args(arguments)
    names = {"all": ["cpu", *["cuda"] * torch.cuda.is_available()]}.get(options.device, [options.device])
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} finds no CUDA device")
    devices = [torch.device(name) for name in names]
    networks, budget = (QUICK, 0.05) if options.quick else (NETWORKS, 2.0)
    torch.set_float32_matmul_precision("highest")
    # At these sizes more threads gain little, and where cores are shared, threads that wait for each other lose much.
    torch.set_num_threads(options.threads)

    console = Console(width=None if sys.stdout.isatty() else 100)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    rows: list[Row] = []
    # Drawn between cases only: a thread that redraws it would take its share of the times.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task("check, then time", total=2 * len(networks) * len(devices))
        progress.refresh()
        for row in run(networks, devices, budget):
            rows.append(row)
            progress.update(task, advance=1, description=f"done: {row.name}", refresh=True)

    console.print(as_table(rows))
    console.print(verdict(rows), conditions(devices), sep="\n", highlight=False)
    failed = [row for row in rows if row.failure]
    for row in failed:
        console.print(f"[bold red]FAILED[/] {row.name}: {escape(row.failure)}", highlight=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
