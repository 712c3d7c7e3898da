"""``python -m deeppcr_paper.demo``: a deep network forward and backward, by the loop and in parallel, in one table.

Then the quick version of some of the paper's experiments, and a page of their results.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import deeppcr

from .bars import Bars
from .catalogue import EXPERIMENTS
from .experiment import Context
from .mlp import Network, slope
from .store import PaperError
from .timing import capture, hardware, measure, relative_error

#: Weights scaled by so much make layers that pass on an error larger than it was: Newton gives up.
EXPANDING = 2.6
#: Layers, width and the gain of the weights. The last ones are there because the loop wins them on a CPU.
NETWORKS = ((16_384, 2, 1), (16_384, 4, 1), (16_384, 16, 1), (1_024, 64, 1), (4_096, 16, EXPANDING))
QUICK = ((256, 4, 1), (64, 16, 1), (2_048, 16, EXPANDING))

SOLVER = deeppcr.Newton(chunk=16, jacobian=deeppcr.GivenJacobian(slope, exact=True))
SETTING = "Parallel: solver=Newton(chunk=16, jacobian=GivenJacobian(slope, exact=True))"

#: What the report shows: quick runs, smaller still, that take about a minute together on two CPU cores.
REPORTED = {
    "mlp-timing": {"depths": (4, 64, 1024), "widths": (2, 8, 32), "activations": ("relu",)},
    "mlp-memory": {"depths": (16, 256, 1024), "widths": (2, 8)},
    "mlp-newton": {"depths": (4, 64, 1024), "samples": 2},
    "resnet-training": {"depths": (32,), "seeds": 1},
}
#: With --quick there is nothing to be seen but that it works.
TINY = {
    "mlp-timing": {"depths": (4, 64), "widths": (2, 8), "activations": ("relu",), "budget": 0.02},
    "mlp-newton": {"depths": (4, 64), "widths": (2, 8), "samples": 1},
}

#: Relative; ten times the tolerance of the solve in float32. What is further off is not timed.
TOLERANCE = 1e-4


@dataclass
class Row:
    """One line of the table; it has times only where the check held."""

    length: int
    width: int
    gain: float
    device: torch.device
    direction: str
    result: deeppcr.Result | None = None
    iterations: int | None = None
    error: float | None = None
    failure: str = ""
    milliseconds: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        scaled = "" if self.gain == 1 else f" with weights × {self.gain}"
        return f"{self.length:,} × {self.width}{scaled} {self.direction} on {self.device.type}"

    @property
    def label(self) -> str:
        """In the table: what is there for another reason than its size says for which."""
        why = "" if self.gain == 1 else f"\nweights × {self.gain}:\nno contraction"
        return f"{self.length:,} × {self.width}{why}"

    def speedup(self, over: str | None = None) -> float:
        """How many times faster than the loop it is compared with, or than the fastest of them."""
        loops = [self.milliseconds[name] for name in self.milliseconds if name != "parallel" and over in (None, name)]
        return min(loops) / self.milliseconds["parallel"]

    def examine(self, budget: float) -> None:
        """Check, then time."""
        try:
            network = Network.make(self.length, self.width, self.device)
            network = replace(network, weights=self.gain * network.weights)
            contenders = self.forward(network) if self.direction == "forward" else self.backward(network)
            if not self.failure:
                timings = measure(contenders, self.device, budget=budget, repeats=(3, 100))
                self.milliseconds = {name: 1e3 * timing.minimum for name, timing in timings.items()}
        except RuntimeError as error:  # of the solve, of a backward pass, of the device
            self.failure = f"{type(error).__name__}: {error}"

    def forward(self, network: Network) -> dict[str, Callable]:
        """The states against those of the loop in float64."""
        with torch.no_grad():
            solution, reference = network.parallel(SOLVER), torch.stack(network.double().loop())
            self.iterations = int(solution.iterations.max())
            self.check(solution, relative_error([solution.states], [reference]))
            contenders = {"loop": network.loop, "parallel": lambda: network.parallel(SOLVER)}
            if self.device.type == "cuda":
                replay, states = capture(network.loop)
                replay()
                if not relative_error([torch.stack(states)], [reference]) <= TOLERANCE:
                    self.failure = "the CUDA graph of the loop differs from the loop"
                contenders["graph"] = replay
        return {name: torch.no_grad()(contender) for name, contender in contenders.items()}

    def backward(self, network: Network) -> dict[str, Callable]:
        """The gradients against those of the loop."""
        network = network.trainable()
        states, solution = network.loop(), network.parallel(SOLVER)

        def gradients(loss: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(loss, network.tensors, retain_graph=True)

        # The gradient of the last state fades within a hundred layers: the sum of all states tests the others too.
        every = relative_error(gradients(solution.states.sum()), gradients(torch.stack(states).sum()))
        losses = {"loop": states[-1].sum(), "parallel": solution.states[-1].sum()}
        last = relative_error(gradients(losses["parallel"]), gradients(losses["loop"]))
        self.check(solution, max(every, last))
        return {name: lambda loss=loss: gradients(loss) for name, loss in losses.items()}

    def check(self, solution: deeppcr.Solution, error: float) -> None:
        self.result, self.error = solution.result, error
        if self.gain == 1 and solution.result is not deeppcr.Result.CONVERGED:
            self.failure = f"{solution.result.name}: {solution.message}"
        elif not error <= TOLERANCE:
            self.failure = f"differs from the loop by {error:.1e}, more than {TOLERANCE:.0e}"


def as_table(rows: Sequence[Row]) -> Table:
    # Narrow enough for 80 columns, and for 100 with the columns of a GPU.
    on_gpu = any("graph" in row.milliseconds for row in rows)
    times = {"loop": "loop\nms", "graph": "graph\nms", "parallel": "parallel\nms"}
    over = {"loop": "\nspeed-up", "graph": "over\ngraph"}
    if not on_gpu:
        del times["graph"], over["graph"]
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in ("network\nL × w", *(["\non"] if on_gpu else []), "\npass"):
        table.add_column(name, no_wrap=True)
    for name in (*times.values(), *over.values(), "Newton\niterations", "\nerror"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        known = row.milliseconds
        cells = [f"{known[name]:,.1f}" if name in known else "" for name in times]
        cells += [ratio(row.speedup(name)) if name in known else "" for name in over]
        if row.failure:
            cells[0] = "[bold red]FAILED[/]"
        ended = "" if row.result in (None, deeppcr.Result.CONVERGED) else f"\n{row.result.name}"
        cells.append("–" if row.iterations is None else f"{row.iterations}{ended}")
        cells.append("–" if row.error is None else f"{row.error:.0e}")
        table.add_row(row.label, *([row.device.type] if on_gpu else []), row.direction, *cells)
    return table


def ratio(value: float) -> str:
    return f"{value:,.0f}x" if value >= 10 else f"{value:.2g}x"


def verdict(rows: Sequence[Row]) -> str:
    """Where the loop wins, by what was measured."""
    timed = [row for row in rows if row.milliseconds]
    lost = [f"{row.name} ({ratio(row.speedup())})" for row in timed if row.speedup() < 1]
    if not lost:
        return f"The loop wins none of the {len(timed)} cases that were timed."
    return f"The loop wins {len(lost)} of the {len(timed)} cases that were timed: {', '.join(lost)}."


def conditions(devices: Sequence[torch.device]) -> str:
    names = ", ".join(f"{hardware(device)} ({device.type})" for device in devices)
    return (
        "Measured: ReLU layers with PyTorch's default initialisation, batch 1, float32; the shortest of repeated calls, "
        "taken in turn. Forward: without gradients. Backward (one linear solve): from the last state to weights, biases "
        "and input, without the forward pass before it. Error: largest difference over largest value, forward against the "
        f"loop in float64, backward against the loop's gradients. Weights × {EXPANDING}: layers that enlarge an error "
        "instead of damping it. Newton takes many iterations there, or gives up and the loop computes the rest "
        f"(FINISHED_BY_LOOP): the same answer, later than by the loop alone. {names}; torch {torch.__version__}; CPU threads: {torch.get_num_threads()}."
    )


def report(folder: Path, device: torch.device, console: Console, *, tiny: bool) -> Path:
    """Run the experiments and make the page; what was finished since the last page is not run again."""
    from .report import build  # draws: what that needs takes long to import

    page = folder / "report.html"
    since = page.stat().st_mtime if page.exists() else 0.0
    sizes = TINY if tiny else REPORTED
    experiments = [
        replace(each, quick=replace(each.quick, **sizes[each.name])) for each in EXPERIMENTS if each.name in sizes
    ]
    for number, experiment in enumerate(experiments, 1):
        console.print(f"experiment {number} of {len(experiments)}: {experiment.name}, small: {experiment.what}")
        with Bars(console) as bars:
            context = Context(device, watcher=bars)
            there = experiment.finished(context, folder, quick=True)
            if there is None or there.stat().st_mtime <= since:
                experiment.run(context, folder, quick=True)
    console.print("drawing the figures of the page")
    return build([folder], page, fallback=committed())


def committed() -> tuple[Path, ...]:
    """The results of the repository, where this is a clone of it: the page shows them for what was not run here."""
    root = Path(__file__).resolve().parents[3]
    return (root / "results",) if (root / "experiments" / "pyproject.toml").is_file() else ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code is 0 where every check held and the page was made."""
    parser = argparse.ArgumentParser(prog="python -m deeppcr_paper.demo", description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "all"), default="all", help="all: a GPU too if there is one"
    )
    parser.add_argument("--quick", action="store_true", help="tiny networks, in seconds: it works, not how fast it is")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-results"), help="folder of the report and its results (demo-results)"
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} finds no CUDA device")
    if options.threads < 1:
        parser.error(f"--threads: at least 1, got {options.threads}")
    names = ["cpu", "cuda"] if options.device == "all" and torch.cuda.is_available() else [options.device]
    devices = [torch.device("cpu" if name == "all" else name) for name in names]
    torch.set_float32_matmul_precision("highest")
    # At these sizes more threads gain little, and where cores are shared, threads that wait for each other lose much.
    torch.set_num_threads(options.threads)
    begun = time.monotonic()
    messages = Console(stderr=True, soft_wrap=True, highlight=False)
    with warnings.catch_warnings():
        # How a solve ended is in the table and in the records.
        warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
        try:
            rows = measured(devices, messages, tiny=options.quick)
        except KeyboardInterrupt:
            messages.print("interrupted; the table is measured in one go, and nothing of it is kept")
            return 130
        console = Console(width=None if sys.stdout.isatty() else 100)
        console.print(as_table(rows))
        console.print(SETTING, verdict(rows), conditions(devices), sep="\n", highlight=False)
        failed = [row for row in rows if row.failure]
        for row in failed:
            console.print(f"[bold red]FAILED[/] {row.name}: {escape(row.failure)}", highlight=False)
        if failed:  # what is wrong there would be wrong in the experiments, too
            return 1
        try:
            path = report(options.out, devices[-1], messages, tiny=options.quick)
        except PaperError as error:
            messages.print(f"[bold red]no report:[/] {escape(str(error))}")
            return 1
        except KeyboardInterrupt:
            kept = f"what is finished is in {escape(str(options.out))}, the same command goes on from there"
            messages.print(f"interrupted; {kept}")
            return 130
    messages.print(f"done after {time.monotonic() - begun:.0f} s")
    print(f"The page of these results, for a browser:\n{path.resolve()}")
    return 0


def measured(devices: Sequence[torch.device], console: Console, *, tiny: bool) -> list[Row]:
    """Every case of the table, checked and timed."""
    networks, budget = (QUICK, 0.05) if tiny else (NETWORKS, 1.0)
    rows = [
        Row(length, width, gain, device, way)
        for device in devices
        for length, width, gain in networks
        for way in ("forward", "backward")[: 2 if gain == 1 else 1]  # Newton runs forward only
    ]
    console.print(f"a table of {len(rows)} cases, each by the loop and in parallel: checked, then timed")
    with Bars(console) as bars:
        bars.begin(len(rows), 0)
        for row in rows:
            bars.cell(row.name)
            row.examine(budget)
            bars.end()
    return rows


if __name__ == "__main__":
    sys.exit(main())
