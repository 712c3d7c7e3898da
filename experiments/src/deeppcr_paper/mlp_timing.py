"""``mlp-timing``: a deep network forward and backward, by the loop and in parallel, over depths and widths.

Shapes: L layers of width w, one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

import deeppcr
from deeppcr.nn.base import ACTIVATIONS, Mode
from deeppcr.nn.kernel_way import WIDEST

from .experiment import Cell, Context, Experiment, is_out_of_memory
from .mlp import Network
from .mlp_gradients import Adjoints, backward_loop
from .mlp_summary import lines, summarise
from .patience import note, too_long, without_set_up
from .room import OUT_OF_MEMORY, release, within_memory
from .settings import setting
from .timing import capture, clocked, measure, relative_error

DIRECTIONS = ("forward", "backward")
#: How ``deeppcr.nn.MLP`` runs in the columns that are made of it.
MODES: dict[str, Mode] = {"fused": "sequential", "auto": "parallel"}
#: The columns that do not go layer by layer.
PARALLEL = ("printed", "auto")
#: Weights from which on what is left over is cleared away at once: that takes longer than timing a small network.
_LARGE = 2**24


@dataclass(frozen=True)
class Settings:
    """Sizes, and how long a cell is timed.

    Attributes:
        other_widths: of all activations but the first, which take about as long
        budget: seconds of timing for each direction of a cell; every column is timed as often as the others
        fewest, most: repeats, whatever the budget
        patience: a parallel pass that takes more seconds than this, without what is set up once, is not repeated, and not
            tried at larger depths
        forward_tolerance: largest difference to the states in float64, in units of their largest
        backward_tolerance: of each gradient, the norm of the difference over the norm. A unit whose value is nearly zero
            may have the other slope of a ReLU in float32, so single elements can differ by as much as they like
    """

    depths: tuple[int, ...] = tuple(2**k for k in range(1, 15))
    widths: tuple[int, ...] = tuple(2**k for k in range(1, 11))
    other_widths: tuple[int, ...] = (4, 16, 64, 256)
    activations: tuple[str, ...] = setting(("relu", "tanh", "sigmoid"), choices=ACTIVATIONS)
    budget: float = 0.4
    fewest: int = 5
    most: int = 100
    patience: float = 2.0
    forward_tolerance: float = 1e-3
    backward_tolerance: float = 1e-2
    seed: int = 0


FULL = Settings()
QUICK = Settings(depths=(4, 32, 256, 1024), widths=(2, 8, 32), other_widths=(2, 8, 32), budget=0.1, fewest=2, most=10)


def solver(network: Network, column: str, *, capture: bool = True) -> deeppcr.Newton:
    """``printed``: the paper's method with its test; ``auto``: this library's defaults."""
    common: dict[str, Any] = {"jacobian": network.jacobian, "capture": capture}
    if column == "auto":
        return deeppcr.Newton(**common)
    stop = deeppcr.PaperTest(1e-4, 1e-4)
    return deeppcr.Newton(chunk=1, stop=stop, max_iterations=15, linear=deeppcr.PCR(), **common)


def columns(device: torch.device, width: int) -> tuple[str, ...]:
    """``fused``: layer by layer in one kernel; ``printed``: the paper's method; ``auto``: ``deeppcr.nn.MLP`` in parallel."""
    if device.type == "cpu":
        return ("loop", "printed", "auto")
    return ("loop", "graph", *(("fused",) if width <= WIDEST else ()), "printed", "auto")


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    """By depth, from small to large, at every width: what was too slow is known before it would be slower still."""
    for number, activation in enumerate(settings.activations):
        for width in settings.other_widths if number else settings.widths:
            for depth in settings.depths:
                yield {"activation": activation, "L": depth, "w": width}


def network_and_states(cell: Cell, settings: Settings, context: Context) -> tuple[Network, Tensor] | None:
    """None where there is no room for them."""

    def make() -> tuple[Network, Tensor]:
        network = Network.make(cell["L"], cell["w"], context.device, settings.seed, cell["activation"])
        return network, network.exact_states()

    return within_memory(make, context.device)


def out_of_memory(names: Sequence[str]) -> dict[str, Any]:
    """The record of a cell that was not measured."""
    return {way: dict.fromkeys(names, OUT_OF_MEMORY) for way in DIRECTIONS}


def measure_cell(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    """For both directions and every column: whether its results hold, and the seconds of every repeat."""
    depth, width, device, names = cell["L"], cell["w"], context.device, columns(context.device, cell["w"])
    made = network_and_states(cell, settings, context)
    if made is None:
        return out_of_memory(names)
    found, place = {}, ("mlp-timing", cell["activation"], width)
    tolerances = {"forward": settings.forward_tolerance, "backward": settings.backward_tolerance}
    for way, tolerance in tolerances.items():
        entries: dict[str, Any] = {}
        for column, before in product(PARALLEL, ("forward", way)):  # a backward pass has a forward one before it
            if why := too_long(context, (*place, before, column), depth, settings.patience):
                entries[column] = {"status": f"not timed: the {before} pass took {why}"}
        prepare = partial(forward, *made) if way == "forward" else Backward(*made)
        tried = [name for name in names if name not in entries]
        entries |= time_columns(prepare, tried, tolerance, settings, device)
        found[way] = {name: entries[name] for name in names}
        for column in PARALLEL:
            if seconds := entries[column].get("seconds"):
                note(context, (*place, way, column), depth, min(seconds))
        if depth * width**2 >= _LARGE:
            release(device)
    return found


class Repeats(Protocol):
    """What is asked of settings here: seconds for a cell, repeats, and how long a pass may take."""

    @property
    def budget(self) -> float: ...
    @property
    def fewest(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def patience(self) -> float: ...


@dataclass
class Column:
    """One way to compute a pass.

    Attributes:
        run: what is called to time it
        took: seconds of its first call
        error: of what that has found
        solution: how it was found, in parallel
        keep: what has to live as long as ``run``
        iterations: where it counts them itself
    """

    run: Callable[[], Any]
    took: float
    error: float
    solution: deeppcr.Solution | None = None
    keep: Any = None
    iterations: int | None = None

    def entry(self, tolerance: float) -> dict[str, Any]:
        """Of a record, without the seconds; the status says why there will be none."""
        entry: dict[str, Any] = {"status": "ok", "error": self.error}
        if self.iterations is not None:
            entry["iterations"] = self.iterations
        if self.solution is not None:
            entry |= {
                "iterations": int(self.solution.iterations.max()),
                "chunk": self.solution.plan.chunk,
                "linear": self.solution.plan.linear,
                "result": self.solution.result.name,
            }
            if self.solution.result is not deeppcr.Result.CONVERGED:
                entry["status"] = f"not converged: {self.solution.message}"
        if not self.error <= tolerance:
            entry["status"] = f"differs from the loop in float64 by {self.error:.1e}, more than {tolerance:.0e}"
        return entry


def time_columns(
    prepare: Callable[[str], Column], names: Sequence[str], tolerance: float, settings: Repeats, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Check every column, then time those that hold, in turn and equally often.

    Where they do not fit together, each is timed by itself, and all of them the fewest times.
    """
    try:
        return _time_together(prepare, names, tolerance, settings, device, settings.budget if len(names) > 1 else 0.0)
    except (RuntimeError, MemoryError) as error:
        failure = "out of memory" if is_out_of_memory(error) else f"failed: {type(error).__name__}: {error}"
    release(device)
    if len(names) == 1:
        return {names[0]: {"status": failure}}
    return {name: time_columns(prepare, [name], tolerance, settings, device)[name] for name in names}


def _time_together(
    prepare: Callable[[str], Column],
    names: Sequence[str],
    tolerance: float,
    settings: Repeats,
    device: torch.device,
    budget: float,
) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    good: dict[str, Column] = {}
    for name in names:
        column = prepare(name)
        entries[name] = column.entry(tolerance)
        if entries[name]["status"] != "ok":
            continue
        if name in PARALLEL:
            took = without_set_up(column.run, column.took, settings.patience, device)
            if took > settings.patience:
                entries[name] |= {"seconds": [took], "repeats": "none: the second call took too long, too"}
                continue
        good[name] = column
    runs, repeats = {name: column.run for name, column in good.items()}, (settings.fewest, settings.most)
    for name, timing in measure(runs, device, budget=budget, repeats=repeats).items():
        entries[name] |= {"seconds": list(timing.seconds), "turn": settings.fewest}
    return entries


class Way:
    """How a column runs a network forward: ``run``, and the ``tensors`` that it can be differentiated in."""

    def __init__(self, network: Network, column: str):
        self.column, self.tensors, self.run = column, network.tensors, network.loop
        if column == "printed":
            newton = solver(network, column)
            self.run = lambda: network.parallel(newton)
        elif column in MODES:
            self.module = network.module()
            self.tensors = (network.z0, self.module.weight, self.module.bias)
            self.run = lambda: self.module.hidden_states(network.z0, MODES[column])

    def read(self, found: Any) -> tuple[Tensor, deeppcr.Solution | None]:
        """From what ``run`` returned: all states, and of a parallel pass how they were found."""
        if isinstance(found, deeppcr.Solution):
            return found.states, found
        if isinstance(found, list):
            return torch.stack(found), None
        return found, self.module.solution if self.column in PARALLEL else None


@torch.no_grad()
def forward(network: Network, exact: Tensor, name: str) -> Column:
    """All states, without gradients."""
    way, kept = Way(network, name), None
    run: Callable[[], Any] = way.run
    if name == "graph":
        run, kept = capture(way.run)
    found, took = clocked(run, exact.device)
    states, solution = way.read(found if kept is None else kept)
    return Column(torch.no_grad()(run), took, relative_error([states], [exact]), solution, kept)


class Backward:
    """The gradients of the last state's sum in weights, biases and input, without the forward pass before it."""

    def __init__(self, network: Network, exact: Tensor):
        self.network, self.exact = network.trainable(), exact
        self.reference = Adjoints(network, exact)

    def __call__(self, name: str) -> Column:
        if name == "graph":
            return self.graph()
        way = Way(self.network, name)
        found: Any = way.run()
        states, solution = way.read(found)
        # Not of the stacked states where there are others: the loop's gradient does not go through them.
        last, every = (found if name == "loop" else states)[-1].sum(), states.sum()
        del found, states

        def gradients(loss: Tensor = last) -> tuple[Tensor, ...]:
            return torch.autograd.grad(loss, way.tensors, retain_graph=True)

        found, took = clocked(gradients, self.exact.device)
        error = self.reference.error(found, 0)
        del found  # as large as the network
        if name != "loop":
            # The gradient of the last state fades within a hundred layers: the sum of all states tests the others too. Of the
            # loop, which is autograd itself, there is nothing more to find out.
            error = max(error, self.reference.error(gradients(every), 1))
        return Column(gradients, took, error, solution)

    @torch.no_grad()
    def graph(self) -> Column:
        """The loop's backward pass as a CUDA graph, without autograd, which a capture does not go well with."""
        network = self.network
        states = torch.cat([network.z0.unsqueeze(0), self.exact[:-1].to(network.z0.dtype)])
        inputs = ACTIVATIONS[network.activation][0](states)
        every = self.reference.error(backward_loop(network, inputs, every=True), 1)
        replay, found = capture(lambda: backward_loop(network, inputs))
        _, took = clocked(replay, network.z0.device)
        return Column(replay, took, max(self.reference.error(found, 0), every), keep=(inputs, found))


EXPERIMENT = Experiment(
    name="mlp-timing",
    paper="figs. 3, 9, 10, 11 and 13",
    what="time of one forward and one backward pass over depths and widths: loops against DeepPCR",
    full=FULL,
    quick=QUICK,
    cells=cells,
    measure=measure_cell,
    summarise=summarise,
    lines=lines,
)
