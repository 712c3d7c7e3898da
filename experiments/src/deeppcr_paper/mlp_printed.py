"""``mlp-printed``: the paper's method in plain PyTorch against the eager loop, without this library's own overhead.

Columns: ``loop`` (eager), ``printed`` (eager, as the paper's) and on a GPU ``printed graph`` (an iteration in a CUDA graph).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import lean, mlp_timing
from .experiment import Cell, Context, Experiment
from .mlp import Network
from .mlp_gradients import Adjoints
from .mlp_summary import lines, summarise
from .mlp_timing import Column, time_columns
from .timing import clocked, relative_error


@dataclass(frozen=True)
class Settings(mlp_timing.Settings):
    """Those of ``mlp-timing``, with fewer sizes and repeats."""

    depths: tuple[int, ...] = (2, 16, 64, 128, 256, 1024, 4096, 16384)
    widths: tuple[int, ...] = (2, 4, 16, 64, 256)
    other_widths: tuple[int, ...] = (4, 16, 64)
    budget: float = 0.1
    most: int = 50


FULL = Settings()
QUICK = Settings(depths=(4, 32, 256), widths=(2, 8), other_widths=(8,), fewest=3, most=10, budget=0.05)


def columns(device: torch.device) -> tuple[str, ...]:
    return ("loop", "printed") if device.type == "cpu" else ("loop", "printed", "printed graph")


def measure_cell(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    names, made = columns(context.device), mlp_timing.network_and_states(cell, settings, context)
    if made is None:
        return mlp_timing.out_of_memory(names)
    prepare = {"forward": partial(forward, *made), "backward": Backward(*made)}
    tolerances = {"forward": settings.forward_tolerance, "backward": settings.backward_tolerance}
    return {
        way: time_columns(prepare[way], names, tolerance, settings, context.device)
        for way, tolerance in tolerances.items()
    }


@torch.no_grad()
def forward(network: Network, exact: Tensor, name: str) -> Column:
    """All states, without gradients."""
    newton = None if name == "loop" else lean.Newton(lean.DeepMLP(network), graph=name == "printed graph")
    run = torch.no_grad()(newton or network.loop)
    found, took = clocked(run, exact.device)
    states = found.unsqueeze(1) if isinstance(found, Tensor) else torch.stack(found)
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
        states = lean.Newton(lean.DeepMLP(self.network))().clone()
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
    cells=mlp_timing.cells,
    measure=measure_cell,
    summarise=summarise,
    lines=lines,
)
