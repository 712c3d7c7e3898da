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
from itertools import product
from statistics import fmean
from typing import Any

import torch

from deeppcr.nn.base import ACTIVATIONS

from .experiment import Cell, Context, Experiment
from .mlp import Network
from .mlp_timing import solver
from .settings import setting
from .table import shown, table

#: Weights of PyTorch's default have variance 1 / (3 w). Where the signal keeps its size: by theory, for wide networks.
MARKS: dict[str, dict[str, float]] = {
    "relu": {"default": 1.0, "He": math.sqrt(6)},
    "tanh": {"default": 1.0, "var. 1/w": math.sqrt(3)},
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
    for activation, depth, gain in product(settings.activations, settings.depths, settings.gains):
        yield {"activation": activation, "gain": gain, "L": depth, "w": settings.width}


@torch.no_grad()
def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    found: dict[str, Any] = {"exponents": []}
    for seed in range(settings.seed, settings.seed + settings.samples):
        network = Network.make(cell["L"], cell["w"], context.device, seed, cell["activation"])
        network = replace(network, weights=cell["gain"] * network.weights)
        found["exponents"].append(exponent(network, seed))
        # After L iterations the last step is exact: so many always suffice.
        patient = replace(solver(network, "printed", capture=False), max_iterations=max(cell["L"], 15))
        for name, newton in (("paper", patient), ("default", solver(network, "auto", capture=False))):
            solution, runs = network.parallel(newton), found.setdefault(name, {"iterations": [], "results": []})
            runs["iterations"].append(int(solution.iterations.max()))
            runs["results"].append(solution.result.name)
            if name == "default":
                runs["chunk"] = solution.plan.chunk
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
    """For every activation: the iterations at PyTorch's default, and at the gain that takes the most.

    ``exponent_by_gain`` is that of the deepest networks, where it is measured best: the mean of those that have one. A gain
    at which all of them forget their input has none, and is left out. ``worst`` is the gain with the most iterations in
    the mean of the deepest networks; means are over the networks that converged.
    """
    found = []
    for activation in dict.fromkeys(record["activation"] for record in records):
        mine = sorted(
            (record for record in records if record["activation"] == activation),
            key=lambda record: (record["L"], record["gain"]),
        )
        deepest = mine[-1]["L"]
        deep = {record["gain"]: record for record in mine if record["L"] == deepest}
        exponents = {gain: value for gain, record in deep.items() if (value := mean_exponent(record)) is not None}
        overflowed = (gain for gain, record in deep.items() if "NON_FINITE" in record["paper"]["results"])
        usual = [count for record in mine if record["gain"] == 1 for count in record["paper"]["iterations"]]
        means = {gain: value for gain, each in deep.items() if (value := mean_iterations(each, "paper")) is not None}
        worst = max(means, key=lambda gain: means[gain]) if means else None
        found.append(
            {
                "activation": activation,
                "marks": MARKS.get(activation, {}),
                "exponent_by_gain": exponents,
                "most_iterations_at_default": max(usual, default=None),
                "positive_from_gain": next((gain for gain, value in exponents.items() if value > 0), None),
                "worst": None if worst is None else _at_gain(worst, mine, exponents.get(worst)),
                "deepest": deepest,
                "overflow_from_gain": next(overflowed, None),
            }
        )
    return found


def _at_gain(gain: float, records: list[dict[str, Any]], exponent: float | None) -> dict[str, Any]:
    there = {record["L"]: record for record in records if record["gain"] == gain}
    means = {depth: mean_iterations(record, "paper") for depth, record in there.items()}
    results = [name for record in there.values() for name in record["default"]["results"]]
    return {
        "gain": gain,
        "exponent": exponent,
        "mean_iterations_by_depth": {depth: count for depth, count in means.items() if count is not None},
        "most_iterations": max(count for record in there.values() for count in converged(record, "paper")),
        "not_converged_by_default": sum(name != "CONVERGED" for name in results),
        "solved": len(results),
    }


def mean_exponent(record: dict[str, Any]) -> float | None:
    """The mean over the networks of a cell that have one; None where all of them forget their input."""
    known = [value for value in record["exponents"] if isinstance(value, (int, float))]
    return fmean(known) if known else None


def converged(record: dict[str, Any], solver: str) -> list[int]:
    """The iterations where there is anything to converge to: states that overflow are none."""
    runs = zip(record[solver]["iterations"], record[solver]["results"], strict=True)
    return [count for count, result in runs if result == "CONVERGED"]


def mean_iterations(record: dict[str, Any], solver: str) -> float | None:
    """The mean over the networks that converged; None where none did."""
    counts = converged(record, solver)
    return fmean(counts) if counts else None


def lines(summary: list[dict[str, Any]]) -> list[str]:
    rows = []
    for entry in summary:
        worst = entry["worst"] or {}
        counts = [f"{count:.0f} at L = {depth}" for depth, count in worst.get("mean_iterations_by_depth", {}).items()]
        left = f"{worst['not_converged_by_default']} of {worst['solved']}" if worst else None
        rows.append(
            {
                "activation": entry["activation"],
                "most at gain 1": entry["most_iterations_at_default"],
                "gain that takes most": worst.get("gain"),
                "exponent": shown(worst.get("exponent"), "+.2f"),
                "mean iterations there": ", ".join(counts) or None,
                "left to the loop by the defaults": left,
                "exponent positive from gain": entry["positive_from_gain"],
                "overflow from gain": entry["overflow_from_gain"],
            }
        )
    return table(rows)


EXPERIMENT = Experiment(
    name="mlp-gain",
    paper="not in it; extends section 4.4",
    what="Newton iterations against the gain of the weights and the largest Lyapunov exponent of the layers",
    full=FULL,
    quick=QUICK,
    cells=cells,
    measure=measure,
    summarise=summarise,
    lines=lines,
)
