"""``mlp-timing``: a deep network forward and backward, by the loop and in parallel, over depths and widths.

Shapes: L layers of width w, one row.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import deeppcr
from deeppcr.nn.base import ACTIVATIONS, WIDEST, Mode

from .experiment import Cell, Context, Experiment, free_memory, is_out_of_memory
from .mlp import Network
from .mlp_summary import lines, summarise
from .patience import note, too_long, without_set_up
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
        budget: seconds of timing for each direction of a cell, an equal share for every column
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
    fewest: int = 3
    most: int = 100
    patience: float = 2.0
    forward_tolerance: float = 1e-3
    backward_tolerance: float = 1e-2
    seed: int = 0


FULL = Settings()
QUICK = Settings(depths=(4, 32, 256, 1024), widths=(2, 8, 32), other_widths=(2, 8, 32), budget=0.1, fewest=2, most=10)


def solver(network: Network, column: str, *, capture: bool = True) -> deeppcr.Newton:
    """``printed``: the paper's method with its test; ``auto``: this library's defaults."""
    if column == "printed":
        settings: dict[str, Any] = {
            "chunk": 1,
            "stop": deeppcr.PaperTest(1e-4, 1e-4),
            "max_iterations": 15,
            "linear": deeppcr.PCR(),
        }
    else:
        settings = {"chunk": "auto"}
    return deeppcr.Newton(jacobian=network.jacobian, capture=capture, **settings)


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


def measure_cell(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    """For both directions and every column: whether its results hold, and the seconds of every repeat."""
    device = context.device
    try:
        check_room(cell["L"], cell["w"], device)
        network = Network.make(cell["L"], cell["w"], device, settings.seed, cell["activation"])
        exact = network.exact_states()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        missing = {column: {"status": "out of memory"} for column in columns(device, cell["w"])}
        return {way: dict(missing) for way in DIRECTIONS}
    found: dict[str, Any] = {}
    for way, prepare in (("forward", Forward(network, exact)), ("backward", Backward(network, exact))):
        names, hopeless = columns(device, cell["w"]), too_slow(cell, way, context, settings)
        timed = time_columns(prepare, [name for name in names if name not in hopeless], settings, device)
        found[way] = {name: hopeless[name] if name in hopeless else timed[name] for name in names}
        note_slow(cell, way, found[way], context)
        if network.weights.numel() >= _LARGE:
            release(device)
    return found


def too_slow(cell: Cell, way: str, context: Context, settings: Settings) -> dict[str, dict[str, Any]]:
    """The parallel columns that took too long at a smaller depth; before a backward pass there is a forward one."""
    found = {}
    for column in PARALLEL:
        for direction in ("forward", way):
            why = too_long(context, _place(cell, direction, column), cell["L"], settings.patience)
            if why:
                found[column] = {"status": f"not timed: the {direction} pass took {why}"}
    return found


def note_slow(cell: Cell, way: str, found: dict[str, Any], context: Context) -> None:
    for column in PARALLEL:
        if seconds := found[column].get("seconds"):
            note(context, _place(cell, way, column), cell["L"], min(seconds))


def _place(cell: Cell, way: str, column: str) -> tuple:
    return "mlp-timing", cell["activation"], cell["w"], way, column


def check_room(depth: int, width: int, device: torch.device) -> None:
    """Raise MemoryError where a CPU cannot hold the network and its blocks: the system would end the whole process."""
    if device.type == "cpu" and 8 * 4 * depth * width**2 > free_memory(device):
        raise MemoryError("out of memory")


@dataclass
class Column:
    """One way to compute a pass: what is called to time it, how long its first call took, and how its results compare."""

    run: Callable[[], Any]
    took: float
    error: float
    tolerance_of: str
    solution: deeppcr.Solution | None = None
    keep: Any = None

    def record(self, settings: Settings) -> dict[str, Any]:
        allowed = getattr(settings, self.tolerance_of)
        record: dict[str, Any] = {"status": "ok", "error": self.error}
        if self.solution is not None:
            plan = self.solution.plan
            record |= {
                "iterations": int(self.solution.iterations.max()),
                "chunk": plan.chunk,
                "linear": plan.linear,
                "result": self.solution.result.name,
            }
            if self.solution.result is not deeppcr.Result.CONVERGED:
                record["status"] = f"not converged: {self.solution.message}"
        if not self.error <= allowed:
            record["status"] = f"differs from the loop in float64 by {self.error:.1e}, more than {allowed:.0e}"
        return record


def time_columns(
    prepare: Callable[[str], Column], names: Sequence[str], settings: Settings, device: torch.device
) -> dict[str, Any]:
    """Check every column, then time those that hold, in turn. Where they do not fit together, each by itself."""
    records: dict[str, Any] = {}
    runs: dict[str, Callable[[], Any]] = {}
    taken: dict[str, list[float]] = {}
    held: list[Column] = []
    try:
        for name in names:
            column = prepare(name)
            records[name] = column.record(settings)
            if records[name]["status"] != "ok":
                continue
            if name in PARALLEL:
                took = without_set_up(column.run, column.took, settings.patience, device)
                if took > settings.patience:
                    records[name] |= {"seconds": [took], "repeats": "none: the second call took too long, too"}
                    continue
            runs[name] = column.run
            held.append(column)
            if name == "loop":  # eager code has nothing to set up that would count in so many calls
                taken[name] = [column.took]
        repeats = settings.fewest, settings.most
        timings = measure(runs, device, budget=settings.budget, repeats=repeats, taken=taken)
    except (RuntimeError, MemoryError) as error:
        failure = "out of memory" if is_out_of_memory(error) else f"failed: {type(error).__name__}: {error}"
    else:
        for name, timing in timings.items():
            records[name]["seconds"] = list(timing.seconds)
        return records
    del runs, held
    release(device)
    if len(names) == 1:
        return {names[0]: {"status": failure}}
    return {name: time_columns(prepare, [name], settings, device)[name] for name in names}


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Forward:
    """All states, without gradients."""

    def __init__(self, network: Network, exact: Tensor):
        self.network, self.exact = network, exact

    @torch.no_grad()
    def __call__(self, name: str) -> Column:
        network, device = self.network, self.network.z0.device
        if name == "loop":
            found, took = clocked(network.loop, device)
            return self.column(network.loop, took, torch.stack(found))
        if name == "graph":
            replay, found = capture(network.loop)
            _, took = clocked(replay, device)
            return self.column(replay, took, torch.stack(found), keep=found)
        if name == "printed":
            newton = solver(network, name)
            solution, took = clocked(lambda: network.parallel(newton), device)
            return self.column(lambda: network.parallel(newton), took, solution.states, solution)
        module = network.module()
        states, took = clocked(lambda: module.hidden_states(network.z0, MODES[name]), device)
        solution = module.solution if name in PARALLEL else None
        return self.column(lambda: module.hidden_states(network.z0, MODES[name]), took, states, solution)

    def column(
        self,
        run: Callable[[], Any],
        took: float,
        states: Tensor,
        solution: deeppcr.Solution | None = None,
        keep: Any = None,
    ) -> Column:
        error = relative_error([states], [self.exact])
        return Column(torch.no_grad()(run), took, error, "forward_tolerance", solution, keep)


class Backward:
    """The gradients of the last state's sum in weights, biases and input, without the forward pass before it."""

    def __init__(self, network: Network, exact: Tensor):
        self.network, self.exact = network.trainable(), exact
        self.reference = Adjoints(network, exact)

    def __call__(self, name: str) -> Column:
        network, solution, tensors = self.network, None, self.network.tensors
        if name == "graph":
            return self.graph()
        if name == "loop":
            loop = network.loop()
            states, last = torch.stack(loop), loop[-1].sum()
        elif name == "printed":
            solution = network.parallel(solver(network, name))
            states, last = solution.states, solution.states[-1].sum()
        else:
            module = network.module()
            states = module.hidden_states(network.z0, MODES[name])
            solution = module.solution if name in PARALLEL else None
            last, tensors = states[-1].sum(), (network.z0, module.weight, module.bias)
        every = states.sum()

        def gradients(loss: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(loss, tensors, retain_graph=True)

        found, took = clocked(lambda: gradients(last), network.z0.device)
        error = self.reference.error(found, 0)
        del found  # as large as the network
        if name != "loop":
            # The gradient of the last state fades within a hundred layers: the sum of all states tests the others too. Of the
            # loop, which is autograd itself, there is nothing more to find out.
            error = max(error, self.reference.error(gradients(every), 1))
        del every, states
        return Column(lambda: gradients(last), took, error, "backward_tolerance", solution)

    @torch.no_grad()
    def graph(self) -> Column:
        """The loop's backward pass as a CUDA graph, without autograd, which a capture does not go well with."""
        network = self.network
        states = torch.cat([network.z0.unsqueeze(0), self.exact[:-1].to(network.z0.dtype)])
        inputs = ACTIVATIONS[network.activation][0](states)
        every = self.reference.error(backward_loop(network, inputs, every=True), 1)
        replay, found = capture(lambda: backward_loop(network, inputs))
        _, took = clocked(replay, network.z0.device)
        error = max(self.reference.error(found, 0), every)
        return Column(replay, took, error, "backward_tolerance", keep=(inputs, found))


#: From the gradient of an activation's value, and the value, to the gradient of its argument: the kernels of autograd.
_PULL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda gradient, value: torch.ops.aten.threshold_backward(gradient, value, 0),
    "tanh": torch.ops.aten.tanh_backward,
    "sigmoid": torch.ops.aten.sigmoid_backward,
}


def backward_loop(network: Network, inputs: Tensor, *, every: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the last state's sum by hand, layer by layer: what autograd computes, in fewer kernels.

    Only the chain is a loop; the gradients of all weights are one product at its end. So this is the strongest loop.

    Args:
        inputs: [L, 1, w], what the weights of each layer were multiplied with
        every: of the sum of all states

    Returns:
        the gradients of z0, weights and biases
    """
    pull, gradient, adjoints = _PULL[network.activation], torch.ones_like(network.z0), []
    for weight, value in zip(reversed(network.weights.unbind()), reversed(inputs.unbind()), strict=True):
        adjoints.append(gradient)
        gradient = pull(gradient @ weight, value)
        if every and len(adjoints) < len(inputs):  # the states are z_1 ... z_L: z_0 is in no sum
            gradient = gradient + 1
    biases = torch.cat(adjoints[::-1])
    return gradient, biases.unsqueeze(-1) * inputs, biases


class Adjoints:
    """The exact gradients of the last state's sum (0) and of the sum of all states (1), from states in float64.

    The gradient of a weight matrix is the product of two vectors, which are all that is stored.
    """

    @torch.no_grad()
    def __init__(self, network: Network, exact: Tensor):
        function, slope = ACTIVATIONS[network.activation]
        before = torch.cat([network.z0.double().unsqueeze(0), exact[:-1]]).squeeze(1)  # [L, w]
        self.inputs, slopes = function(before), slope(before)
        loss = torch.tensor([[0.0], [1.0]], dtype=exact.dtype, device=exact.device)
        gradient = torch.ones_like(exact[0]).expand(2, -1)
        adjoints = []
        for part in reversed(list(network.parts())):
            weights, derivatives = network.weights[part].double().unbind(), slopes[part].unbind()
            for weight, derivative in zip(reversed(weights), reversed(derivatives), strict=True):
                adjoints.append(gradient)
                gradient = torch.addcmul(loss, gradient @ weight, derivative)
        self.initial = gradient - loss  # the states are z_1 ... z_L: z_0 is in no sum
        self.states = torch.stack(adjoints[::-1], 1)  # [2, L, w]

    @torch.no_grad()
    def error(self, found: Sequence[Tensor], which: int) -> float:
        z0, weights, biases = found
        adjoint = self.states[which]
        errors = [_ratio(z0.flatten().double() - self.initial[which], self.initial[which])]
        errors.append(_ratio(biases.double() - adjoint, adjoint))
        difference, total = torch.zeros_like(adjoint[0, 0]), torch.zeros_like(adjoint[0, 0])
        at_once = max(1, 2**24 // adjoint.shape[1] ** 2)
        for start in range(0, len(adjoint), at_once):
            part = slice(start, start + at_once)
            reference = adjoint[part].unsqueeze(-1) * self.inputs[part].unsqueeze(-2)
            difference += (weights[part].double() - reference).square().sum()
            total += reference.square().sum()
        errors.append(_ratio(difference.sqrt(), total.sqrt()))
        return max(errors)


def _ratio(difference: Tensor, reference: Tensor) -> float:
    """The norm of the difference over the norm; gradients that have vanished in float32 are compared with its smallest."""
    scale = reference.norm().clamp(min=torch.finfo(torch.float32).tiny)
    found = (difference.norm() / scale).item()
    return found if found == found else float("inf")


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
