"""``diffusion-iterations``: how far a sample is from the loop's after every iteration, in latent and in pixel space.

Newton's method goes on from where it was, one iteration at a time: the same as limiting it to 1, 2, 3, ... iterations.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

import deeppcr
from deeppcr.runtime import full_precision

from .denoisers import TrainingSettings, latent_model, pixel_model
from .experiment import Cell, Context, Experiment
from .pixel_diffusion import check_sides
from .sampling import Draw, Sampling, errors, paper_newton
from .settings import setting
from .table import table

SPACES = ("latent", "pixel")
#: The paper reads off when the error has fallen below this.
SMALL = 0.1
#: States that an iteration changes by less than this stay where they are.
SETTLED = 1e-5


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """Sizes, and how many iterations.

    Attributes:
        spaces: "latent", "pixel"
        data: "mnist" or "digits"
        widths: of latents
        sides: of images, in pixels
        steps: L
        iterations: so many at most
        samples: each by itself; the largest error of them counts
        patience: a cell that takes more seconds than this takes no further sample
    """

    spaces: tuple[str, ...] = setting(SPACES, choices=SPACES)
    data: str = setting("mnist", choices=("mnist", "digits"))
    widths: tuple[int, ...] = (16, 32, 64, 128)
    sides: tuple[int, ...] = setting((4, 8, 16), least=4)
    steps: tuple[int, ...] = (256, 512, 1024)
    iterations: int = 30
    samples: int = 3
    patience: float = 5.0


FULL = Settings()
QUICK = Settings(data="digits", widths=(4, 8), sides=(4,), steps=(32, 128), iterations=12, samples=1, training="quick")


def cells(settings: Settings, context: Context) -> Iterator[Cell]:
    check_sides(settings, settings.data, settings.sides, context)
    sizes = {"latent": ("w", settings.widths), "pixel": ("side", settings.sides)}
    for space in settings.spaces:
        name, values = sizes[space]
        for value, length in product(values, settings.steps):
            yield {"space": space, name: value, "L": length}


@torch.no_grad()
def measure(cell: Cell, settings: Settings, context: Context) -> dict[str, Any]:
    """For both methods and every sample, the error after 0, 1, 2, ... iterations."""
    if cell["space"] == "latent":
        model = latent_model(settings, settings.data, cell["w"], context)
    else:
        model = pixel_model(settings, settings.data, cell["side"], False, context)
    sampling = Sampling(model, cell["L"])
    found: dict[str, list[list[float]]] = {"printed": [], "auto": []}
    begun = time.monotonic()
    with full_precision(sampling.device):
        for number, draw in enumerate(sampling.draw(settings.samples, settings.seed).split(1)):
            reference = sampling.loop(draw)
            found["printed"].append(newton_errors(sampling, draw, reference, settings.iterations))
            found["auto"].append(window_errors(sampling, draw, reference, settings.iterations))
            context.watcher.part((number + 1) / settings.samples)
            if time.monotonic() - begun > settings.patience:
                break
    return {"errors": found}


def newton_errors(sampling: Sampling, draw: Draw, reference: torch.Tensor, iterations: int) -> list[float]:
    """The paper's method, from the training set's mean."""
    one = paper_newton(stop=deeppcr.FixedIterations(1))
    states = sampling.model.mean.expand(sampling.length, 1, *sampling.model.shape)
    found = errors(states[-1], reference)
    for _ in range(iterations):
        samples = sampling.printed(draw, one, states, keep_states=True)
        assert samples.states is not None
        change, states = (samples.states - states).abs().max().item(), samples.states
        found += errors(samples.final, reference)
        if change < SETTLED:  # quadratic convergence: the next change is below what float32 tells apart
            return found + found[-1:] * (iterations + 1 - len(found))
    return found


def window_errors(sampling: Sampling, draw: Draw, reference: torch.Tensor, iterations: int) -> list[float]:
    """This library's, ended early; after it has converged it stays where it is."""
    found = [errors(sampling.model.mean.unsqueeze(0), reference)[0]]
    for count in range(1, iterations + 1):
        window = replace(sampling.window, max_iterations=count, graphs=False)  # few of each: not worth recording
        samples = sampling.parallel(draw, solver=window, start=sampling.mean, on_failure="return")
        found += errors(samples.final, reference)
        if int(samples.iterations.max()) < count:
            return found + found[-1:] * (iterations + 1 - len(found))
    return found


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every cell and method: how many iterations bring every sample below 0.1, and the error at the end."""
    found = []
    for record in records:
        entry: dict[str, Any] = {name: record[name] for name in ("space", "w", "side", "L") if name in record}
        for method, curves in record["errors"].items():
            worst = [max(map(float, values)) for values in zip(*curves, strict=True)]
            entry[method] = {
                "iterations": next((count for count, error in enumerate(worst) if error < SMALL), None),
                "last": worst[-1],
                "samples": len(curves),
            }
        found.append(entry)
    return found


def lines(summary: list[dict[str, Any]]) -> list[str]:
    rows = []
    for entry in summary:
        size = f"w = {entry['w']}" if "w" in entry else f"{entry['side']} x {entry['side']}"
        row: dict[str, Any] = {"space": entry["space"], "size": size, "L": entry["L"]}
        for method, name in (("printed", "Newton"), ("auto", "prior")):
            row[f"{name}: iterations to {SMALL}"] = entry[method]["iterations"]
            row[f"error at the end ({name})"] = f"{entry[method]['last']:.1e}"
        rows.append(row)
    return table(rows)


EXPERIMENT = Experiment(
    name="diffusion-iterations",
    paper="figs. 20 and 21",
    what="error of a sample after every iteration, latent and pixel space: Newton's method and the prior's Jacobian",
    full=FULL,
    quick=QUICK,
    cells=cells,
    measure=measure,
    summarise=summarise,
    lines=lines,
)
