"""What the tests of figures share: results that are made up, and what is found in a drawing."""

import math
import warnings
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")

import made_up
import made_up_diffusion
from deeppcr_paper import (
    diffusion_guess,
    diffusion_iterations,
    figures,
    latent_diffusion,
    mlp_gain,
    mlp_memory,
    mlp_newton,
    mlp_timing,
    pixel_diffusion,
    resnet_ablations,
    resnet_training,
)

DEPTHS, WIDTHS = (2, 64, 2**14), (2, 16, 2**10)  # with the cells that do not fit
TIMING = replace(mlp_timing.FULL, depths=DEPTHS, widths=WIDTHS, activations=("relu",))
MEMORY = replace(mlp_memory.FULL, depths=DEPTHS, widths=WIDTHS)
NEWTON = replace(mlp_newton.FULL, guesses=("random",), depths=DEPTHS, widths=WIDTHS)
GAIN = replace(mlp_gain.FULL, activations=("relu",), gains=(0.5, 1.0, 2.0, 4.0), depths=(64, 1024))
TRAINING = replace(resnet_training.FULL, depths=(64, 128), seeds=2, epochs=3)
COUNTS = replace(resnet_ablations.ITERATIONS, depths=(64, 128), iterations=(0, 1, 3))
GUESSES = replace(resnet_ablations.GUESS, depths=(64,), iterations=(0, 1, 3))
LATENT = replace(latent_diffusion.FULL, data=("mnist",), widths=(16, 128), steps=(256, 1024), runs=20)
PIXEL = replace(pixel_diffusion.FULL, sides=(4, 16), steps=(256, 1024), runs=20)
ERRORS = replace(diffusion_iterations.FULL, widths=(16, 128), steps=(256, 1024))
STARTS = replace(diffusion_guess.FULL, sides=(4, 16), steps=(256, 1024))


def small() -> list[dict]:
    return [
        made_up.mlp_timing_result(TIMING),
        {**made_up.mlp_timing_result(TIMING, ("loop", "printed")), "experiment": "mlp-printed"},
        made_up.mlp_memory_result(MEMORY),
        made_up.mlp_newton_result(NEWTON),
        made_up.mlp_gain_result(GAIN),
        made_up.hardware_result(TIMING, ("loop", "printed")),
        made_up.resnet_training_result(TRAINING, points=30),
        made_up.ablation_result("resnet-iterations", COUNTS, points=30),
        made_up.ablation_result("resnet-guess", GUESSES, points=30),
        made_up_diffusion.latent_result(LATENT),
        made_up_diffusion.pixel_result(PIXEL),
        made_up_diffusion.iterations_result(ERRORS),
        made_up_diffusion.guess_result(STARTS),
    ]


def panel(drawing: figures.Drawing, title: str):
    found = [axes for axes in drawing.canvas.axes if axes.get_title(loc="left") == title]
    assert len(found) == 1, [axes.get_title(loc="left") for axes in drawing.canvas.axes]
    return found[0]


def line(axes, tag: str) -> tuple[list[float], list[float]]:
    """The vertices of a line; NaN, where it is broken, as None."""
    found = [each for each in axes.lines if each.get_gid() == tag]
    assert len(found) == 1, [each.get_gid() for each in axes.lines]
    x, y = found[0].get_data()
    return list(x), [None if math.isnan(value) else value for value in y]


def by_name(drawings: list[figures.Drawing], name: str) -> figures.Drawing:
    return next(drawing for drawing in drawings if drawing.name == name)


def silent(result: dict) -> list[figures.Figure]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return figures.draw(result)


def forward(settings: mlp_timing.Settings, columns: tuple[str, ...]) -> dict:
    """Timings of forward passes only: the figures of both directions are the same."""
    result = made_up.mlp_timing_result(settings, columns)
    for record in result["records"]:
        record["backward"] = {}
    return result
