"""``mlp-printed``: the paper's method in plain PyTorch against the eager loop, without this library's own overhead.

Columns: ``loop`` (eager), ``printed`` (eager, as the paper's) and on a GPU ``printed graph`` (an iteration in a CUDA graph).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deeppcr.nn.base import ACTIVATIONS

from . import lean
from .experiment import Cell, Context, Experiment
from .mlp import Network
from .mlp_gradients import Adjoints
from .mlp_summary import lines, summarise
from .mlp_timing import Column, time_columns
from .room import OUT_OF_MEMORY, within_memory
from .settings import setting
from .timing import clocked, relative_error


@dataclass(frozen=True)
class Settings:
    """Sizes, and how long a cell is timed; see ``mlp-timing``.

    Attributes:
        other_widths: of all activations but the first
        budget: seconds of timing for each direction of a cell; every column is timed as often as the others
        fewest, most: repeats, whatever the budget
        patience: a pass that takes more seconds than this is not repeated
    """

    depths: tuple[int, ...] = (2, 16, 64, 128, 256, 1024, 4096, 16384)
    widths: tuple[int, ...] = (2, 4, 16, 64, 256)
    other_widths: tuple[int, ...] = (4, 16, 64)
    activations: tuple[str, ...] = setting(("relu", "tanh", "sigmoid"), choices=ACTIVATIONS)
    budget: float = 0.1
    fewest: int = 5
    most: int = 50
    patience: float = 2.0
    forward_tolerance: float = 1e-3
    backward_tolerance: float = 1e-2
    seed: int = 0


FULL = Settings()
QUICK = Settings(depths=(4, 32, 256), widths=(2, 8), other_widths=(8,), fewest=3, most=10, budget=0.05)


def columns(device: torch.device) -> tuple[str, ...]:
    return ("loop", "printed") if device.type == "cpu" else ("loop", "printed", "printed graph")


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    for number, activation in enumerate(settings.activations):
        for width in settings.other_widths if number else settings.widths:
            for depth in settings.depths:
                yield {"activation": activation, "L": depth, "w": width}


def measure_cell(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    names = columns(context.device)

    def network_and_states() -> tuple[Network, Tensor]:
        network = Network.make(cell["L"], cell["w"], context.device, settings.seed, cell["activation"])
        return network, network.exact_states()

    made = within_memory(network_and_states, context.device)
    if made is None:
        return {way: dict.fromkeys(names, OUT_OF_MEMORY) for way in ("forward", "backward")}
    prepare = {"forward": partial(forward, *made), "backward": Backward(*made)}
    tolerances = {"forward": settings.forward_tolerance, "backward": settings.backward_tolerance}
    return {
        way: time_columns(prepare[way], names, tolerance, settings, context.device)
        for way, tolerance in tolerances.items()
    }


@torch.no_grad()
def forward(network: Network, exact: Tensor, name: str) -> Column:
    """All states, without gradients."""
    newton = None if name == "loop" else lean.Newton(network, graph=name == "printed graph")
    run = torch.no_grad()(newton or network.loop)
    found, took = clocked(run, exact.device)
    states = found if isinstance(found, Tensor) else torch.stack(found)
    return Column(run, took, relative_error([states], [exact]), iterations=newton.iterations if newton else None)


class Backward:
    """The gradients of the last state's sum, without the forward pass before it; as printed at the states that it has found."""

    def __init__(self, network: Network, exact: Tensor):
        self.network, self.exact = network, exact
        self.reference = Adjoints(network, exact)

    def __call__(self, name: str) -> Column:
        if name == "loop":
            network = self.network.trainable()
            last = network.loop()[-1].sum()
            run: Any = partial(torch.autograd.grad, last, network.tensors, retain_graph=True)
            found, took = clocked(run, self.exact.device)
            return Column(run, took, self.reference.error(found, 0))
        states = lean.Newton(self.network)().clone()
        run = lean.Backward(self.network, states, graph=name == "printed graph")
        found, took = clocked(run, self.exact.device)
        # The gradient of the last state fades within a hundred layers: the sum of all states tests the others too.
        every = lean.Backward(self.network, states, every=True)()
        return Column(run, took, max(self.reference.error(found, 0), self.reference.error(every, 1)))


EXPERIMENT = Experiment(
    name="mlp-printed",
    paper="figs. 3, 9 and 10",
    what="the paper's method in plain PyTorch, eager and in a CUDA graph, against the eager loop: forward and backward",
    full=FULL,
    quick=QUICK,
    cells=cells,
    measure=measure_cell,
    summarise=summarise,
    lines=lines,
)
