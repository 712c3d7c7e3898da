"""``mlp-gain``: when few Newton iterations suffice, and when not: weights scaled up until the layers amplify errors.

The weights are those of PyTorch's default initialisation times a gain. A record has the lists of its ``samples``
networks, which share activation, gain, depth L and width w:

- ``exponents``: the largest Lyapunov exponent of the layers, the mean logarithm by which a tangent vector grows in a
  layer; None where the layers forget their input altogether
- ``paper``: the paper's method (chunks of 1, PCR, its test), never stopped early: ``iterations`` and ``results``
- ``default``: the defaults of this library: ``iterations``, ``results`` and ``chunk``. They give up where the loop is no
  slower, and FINISHED_BY_LOOP says that they did; NON_FINITE that the states themselves overflow

``MARKS`` are the gains that have a name.

Shapes: L layers of width w, one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from deeppcr.nn.networks import ACTIVATIONS

from .experiment import Cell, Context, Experiment
from .mlp import Network
from .mlp_timing import solver
from .settings import setting

#: Weights of PyTorch's default have variance 1 / (3 w). Where the signal keeps its size: by theory, for wide networks.
MARKS: dict[str, dict[str, float]] = {
    "relu": {"default": 1.0, "He": math.sqrt(6)},
    "tanh": {"default": 1.0, "variance 1 / w": math.sqrt(3)},
    "sigmoid": {"default": 1.0},
}


@dataclass(frozen=True)
class Settings:
    """Sizes; every cell is measured on ``samples`` networks, with seeds seed, seed + 1, ..."""

    activations: tuple[str, ...] = setting(("relu", "tanh", "sigmoid"), choices=ACTIVATIONS)
    gains: tuple[float, ...] = (0.5, 0.7, 1.0, 1.4, 1.7, 2.0, 2.2, 2.4, 2.6, 2.8, 3.2, 4.0)
    depths: tuple[int, ...] = (16, 64, 256, 1024)
    width: int = 16
    samples: int = 3
    seed: int = 0


FULL = Settings()
QUICK = Settings(gains=(0.5, 1.0, 1.4, 2.0, 2.4, 2.8, 4.0), depths=(16, 64, 256), samples=1)


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    for activation in settings.activations:
        for depth in settings.depths:
            for gain in settings.gains:
                yield {"activation": activation, "gain": gain, "L": depth, "w": settings.width}


@torch.no_grad()
def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    found: dict[str, Any] = {"exponents": []}
    for name in ("paper", "default"):
        found[name] = {"iterations": [], "results": []}
    for sample in range(settings.seed, settings.seed + settings.samples):
        network = Network.make(cell["L"], cell["w"], context.device, sample, cell["activation"])
        network = replace(network, weights=cell["gain"] * network.weights)
        found["exponents"].append(exponent(network, sample))
        # After L iterations the last step is exact: so many always suffice.
        patient = replace(solver(network, "printed"), max_iterations=max(cell["L"], 15))
        for name, newton in (("paper", patient), ("default", solver(network, "auto"))):
            solution = network.parallel(newton)
            found[name]["iterations"].append(int(solution.iterations.max()))
            found[name]["results"].append(solution.result.name)
            if name == "default":
                found[name]["chunk"] = solution.plan.chunk
    return found


@torch.no_grad()
def exponent(network: Network, seed: int = 0) -> float | None:
    """The largest Lyapunov exponent: how a random tangent vector grows along the states, in float64.

    It takes on the direction that grows fastest within a few layers. Where the states overflow, the layers before count.
    """
    function, slope = ACTIVATIONS[network.activation]
    z = network.z0.double()
    tangent = torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=z.dtype).to(z.device)
    tangent, growth, states = tangent / tangent.norm(), [], []
    for weight, bias in zip(network.weights.double().unbind(), network.biases.double().unbind(), strict=True):
        tangent = (tangent * slope(z)) @ weight.mT
        z = torch.nn.functional.linear(function(z), weight, bias)
        size = tangent.norm()
        tangent = tangent / size
        growth.append(size)
        states.append(z)
    finite = torch.isfinite(torch.stack(states)).all(-1).long().cumprod(0).sum()
    found = torch.stack(growth)[:finite].log().mean().item()
    return found if math.isfinite(found) else None


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every activation: the iterations at PyTorch's default, and where and how they begin to grow with the depth."""
    found = []
    for activation in dict.fromkeys(record["activation"] for record in records):
        mine = [record for record in records if record["activation"] == activation]
        exponents = {gain: _exponent([r for r in mine if r["gain"] == gain]) for gain in {r["gain"] for r in mine}}
        chaotic = [gain for gain in sorted(exponents) if (exponents[gain] or -1.0) > 0]
        unstable = [record for record in mine if record["gain"] in chaotic]
        left = [name for record in unstable for name in record["default"]["results"]]
        found.append(
            {
                "activation": activation,
                "marks": MARKS[activation],
                "exponent_by_gain": {gain: exponents[gain] for gain in sorted(exponents)},
                "most_iterations_at_default": _most([record for record in mine if record["gain"] == 1.0]),
                "positive_from_gain": chaotic[0] if chaotic else None,
                "iterations_where_positive": {
                    depth: fmean(counts)
                    for depth in sorted({record["L"] for record in unstable})
                    if (counts := [count for r in unstable if r["L"] == depth for count in _converged(r)])
                },
                "left_to_the_loop_where_positive": sum(name != "CONVERGED" for name in left),
                "solved_where_positive": len(left),
            }
        )
    return found


def _exponent(records: list[dict[str, Any]]) -> float | None:
    """Of the deepest networks: there it is measured best."""
    deepest = max(record["L"] for record in records)
    values = [value for record in records if record["L"] == deepest for value in record["exponents"]]
    return fmean(values) if values and None not in values else None


def _converged(record: dict[str, Any]) -> list[int]:
    """The iterations of the paper's method, where there is anything to converge to: states that overflow are none."""
    runs = zip(record["paper"]["iterations"], record["paper"]["results"], strict=True)
    return [count for count, result in runs if result == "CONVERGED"]


def _most(records: list[dict[str, Any]]) -> int | None:
    return max((count for record in records for count in record["paper"]["iterations"]), default=None)


def lines(summary: list[dict[str, Any]]) -> list[str]:
    shown = []
    for entry in summary:
        name, most = entry["activation"], entry["most_iterations_at_default"]
        if most is not None:
            shown.append(f"{name:8}PyTorch's default: at most {most} iterations at every depth")
        if entry["positive_from_gain"] is None:
            shown.append(f"{name:8}the largest Lyapunov exponent is negative at every gain")
            continue
        counts = entry["iterations_where_positive"]
        grown = ", ".join(f"{count:.0f} at L = {depth}" for depth, count in counts.items())
        shown.append(
            f"{name:8}the largest Lyapunov exponent is positive from gain {entry['positive_from_gain']:g} on; iterations there: "
            f"{grown}; the defaults left {entry['left_to_the_loop_where_positive']} of {entry['solved_where_positive']} to the loop"
        )
    return shown


EXPERIMENT = Experiment(
    name="mlp-gain",
    paper="section 4.1: when iterations stay few",
    what="Newton iterations against the gain of the weights and the largest Lyapunov exponent of the layers",
    full=FULL,
    quick=QUICK,
    cells=cells,
    measure=measure,
    summarise=summarise,
    lines=lines,
)
