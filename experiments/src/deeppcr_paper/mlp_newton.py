"""``mlp-newton``: how many Newton iterations a forward pass takes under the paper's test, and how far off the output is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

import deeppcr

from .experiment import Cell, Context, Experiment
from .mlp import LAYERS, Network
from .mlp_timing import solver
from .patience import note, too_long, without_set_up
from .room import OUT_OF_MEMORY, within_memory
from .settings import setting
from .table import shown, table
from .timing import clocked

GUESSES = ("repeat-initial", "random")


@dataclass(frozen=True)
class Settings:
    """Sizes.

    Attributes:
        samples: networks of a cell, with seeds seed, seed + 1, ...
        patience: a cell whose solves take more seconds than this takes no further network; where one solve does, without
            what is set up once, deeper ones are not tried
    """

    depths: tuple[int, ...] = tuple(2**k for k in range(1, 15))
    widths: tuple[int, ...] = tuple(2**k for k in range(1, 11))
    activations: tuple[str, ...] = setting(("relu", "sigmoid"), choices=LAYERS)
    guesses: tuple[str, ...] = setting(GUESSES, choices=GUESSES)
    samples: int = 3
    patience: float = 12.0
    seed: int = 0


FULL = Settings()
QUICK = Settings(depths=(4, 32, 256, 2048), widths=(2, 8, 32))


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    """Guesses change fastest: they share the networks."""
    for activation, width, depth, guess in product(
        settings.activations, settings.widths, settings.depths, settings.guesses
    ):
        yield {"activation": activation, "guess": guess, "L": depth, "w": width}


@torch.no_grad()
def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    """Iterations, results and the norm of the difference of z_L to the loop's, for every network."""
    place = ("mlp-newton", cell["activation"], cell["w"], cell["guess"])
    if why := too_long(context, place, cell["L"], settings.patience):
        return {"status": f"not measured: it took {why}"}
    solved: list[dict[str, Any]] = []
    for seed in range(settings.seed, settings.seed + settings.samples):
        one = within_memory(lambda seed=seed: _solve(cell, seed, settings, context), context.device)
        if one is None:
            return OUT_OF_MEMORY
        solved.append(one)
        if sum(each["seconds"] for each in solved) > settings.patience:
            break
    note(context, place, cell["L"], min(each.pop("seconds") for each in solved))
    return {"status": "ok", **{name: [each[name] for each in solved] for name in solved[0]}}


def _solve(cell: Cell, seed: int, settings: Settings, context: Context) -> dict[str, Any]:
    network = Network.make(cell["L"], cell["w"], context.device, seed, cell["activation"])
    guess = deeppcr.Random(seed=seed) if cell["guess"] == "random" else deeppcr.RepeatInitial()
    solve = partial(network.parallel, solver(network, "printed", capture=False), guess)  # few: not worth a CUDA graph
    solution, took = clocked(solve, context.device)
    output, result = solution.states[-1].double(), solution.result.name
    iterations = int(solution.iterations.max())
    del solution
    loop, exact = last_states(network, cell, seed, context)
    return {
        "iterations": iterations,
        "error": (output - loop).norm().item(),
        "error_float64": (output - exact).norm().item(),
        "results": result,
        "seconds": without_set_up(solve, took, settings.patience, context.device),
    }


def last_states(network: Network, cell: Cell, seed: int, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the loop, in float32 and in float64; the next cell, with another guess, has the same networks."""
    key = (cell["activation"], cell["L"], cell["w"])
    kept = context.cache.get("last states")
    if kept is None or kept[0] != key:
        kept = context.cache["last states"] = key, {}
    if seed not in kept[1]:
        kept[1][seed] = network.loop()[-1].double(), network.exact_states()[-1]
    return kept[1][seed]


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every activation and guess: the most iterations, the largest error, how many did not converge, of how many cells.

    What was read off no cell is None.
    """
    found = []
    for activation, guess in sorted({(record["activation"], record["guess"]) for record in records}):
        every = [record for record in records if (record["activation"], record["guess"]) == (activation, guess)]
        mine = [record for record in every if record["status"] == "ok"]
        # Files name the errors that are not finite, and those are larger than any number.
        errors = [float(error) for record in mine for error in record["error"]]
        found.append(
            {
                "activation": activation,
                "guess": guess,
                "most_iterations": max((max(record["iterations"]) for record in mine), default=None),
                "largest_error": max((each if math.isfinite(each) else math.inf for each in errors), default=None),
                "not_converged": sum(name != "CONVERGED" for record in mine for name in record["results"]),
                "cells": len(mine),
                "cells_in_all": len(every),
            }
        )
    return found


def lines(summary: list[dict[str, Any]]) -> list[str]:
    return table(
        [
            {
                "activation": entry["activation"],
                "guess": entry["guess"],
                "iterations at most": entry["most_iterations"],
                "output error at most": shown(entry["largest_error"], lambda error: f"{float(error):.1e}"),
                "not converged": entry["not_converged"],
                "cells": f"{entry['cells']} of {entry['cells_in_all']}",
            }
            for entry in summary
        ]
    )


EXPERIMENT = Experiment(
    name="mlp-newton",
    paper="fig. 8 left",
    what="Newton iterations and output error of a forward pass over depths and widths, from two guesses",
    full=FULL,
    quick=QUICK,
    cells=cells,
    measure=measure,
    summarise=summarise,
    lines=lines,
)
