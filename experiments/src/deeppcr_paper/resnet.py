"""What the experiments on training residual networks share: settings, images, and what is read off a curve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch

import deeppcr
from deeppcr.nn.base import ACTIVATIONS

from .data import Images, digits, mnist
from .experiment import Cell, Context
from .settings import setting
from .store import PaperError

DTYPES = {"float32": torch.float32, "float64": torch.float64}
GUESSES = ("batch-mean", "random", "zeros", "first-layer")


@dataclass(frozen=True)
class Settings:
    """What the experiments on training share.

    Attributes:
        depths: layers between the input and the output layer
        epochs: of the training
        steps: the training ends after so many, if there are more in the epochs
        rate: of plain stochastic gradient descent
        window: steps that make one point of a curve
        seeds: runs with seed, seed + 1, ...
        timed_seeds: of so many of them passes are timed; the others, replayed as a whole, can share a device
        data: "mnist" or "digits"
        train, test: how many images; None for all
        eager_steps: forward passes of the eager loop that are timed
        iterations: fixed numbers of Newton iterations; 0 stops by the paper's test
        guesses: where Newton starts
        dtype: "float32" or "float64", in which two trainings that should be the same do not drift apart by rounding
        solver: "paper" (chunks of 1, its test; where all of it is as printed, in plain PyTorch) or "default" (this library's: its
            test is stricter)
    """

    depths: tuple[int, ...] = (256, 512, 1024)
    width: int = 16
    skip: int = 4
    activation: str = setting("relu", choices=ACTIVATIONS)
    batch: int = 8
    epochs: int = 8
    steps: int | None = None
    rate: float = 1e-3
    window: int = 100
    seeds: int = 5
    timed_seeds: int = setting(1, least=0)
    data: str = setting("mnist", choices=("mnist", "digits"))
    train: int | None = None
    test: int | None = None
    eager_steps: int = 200
    iterations: tuple[int, ...] = setting((0,), least=0)
    guesses: tuple[str, ...] = setting(("batch-mean",), choices=GUESSES)
    dtype: str = setting("float32", choices=DTYPES)
    solver: str = setting("paper", choices=("paper", "default"))
    seed: int = 0


def adapt(settings: Settings, context: Context) -> Settings:
    """Quick runs take MNIST, too, where its folder was given."""
    uneven = [depth for depth in settings.depths if depth % settings.skip]
    if uneven:
        raise PaperError(f"depths: expected multiples of skip = {settings.skip}, got {uneven[0]}")
    return replace(settings, data="mnist") if context.data_dir is not None else settings


def untimed(cell: Cell, settings: Settings) -> bool:
    """A training whose passes are not timed."""
    return "timing" not in cell and cell["seed"] >= settings.seed + settings.timed_seeds


def images(settings: Settings, context: Context) -> Images:
    """On the device; read once a run."""
    if "images" not in context.cache:
        found = digits() if settings.data == "digits" else mnist(context.data_dir)
        context.cache["images"] = found.first(settings.train, settings.test).to(context.device, DTYPES[settings.dtype])
        if len(context.cache["images"].train_labels) < settings.batch:
            raise PaperError(f"batch: {settings.batch} images, but there are fewer to train with")
    return context.cache["images"]


def newton(settings: Settings, iterations: int = 0) -> deeppcr.Newton:
    """The paper's method, with its test or with a fixed number of iterations; or the library's defaults."""
    fixed: dict[str, Any] = {"stop": deeppcr.FixedIterations(iterations)} if iterations else {}
    if settings.solver == "default":
        return deeppcr.Newton(**fixed)
    return deeppcr.Newton(**{"stop": deeppcr.PaperTest(1e-4, 1e-4), **fixed}, chunk=1, max_iterations=15)


def last(curve: list[float]) -> float | None:
    """The mean of the last tenth of a curve, of ten points at most; None where there are none.

    >>> last([5.0] * 95 + [2.0] * 5), last([9.0, 8.0, 7.0]), last([])
    (3.5, 7.0, None)
    """
    points = max(1, min(10, len(curve) // 10))
    values = [value for value in curve[-points:] if isinstance(value, (int, float))]
    return fmean(values) if values else None


def middle(values: list[float] | None) -> float | None:
    """The median, which one slow step does not change; None where nothing was timed."""
    return median(values) if values else None
