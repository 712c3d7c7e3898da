"""The figures of the experiments, drawn from finished result files, in the layout of the paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import (
    ablations,
    diffusion,
    diffusion_ablations,
    hardware,
    mlp_gain,
    mlp_memory,
    mlp_newton,
    mlp_timing,
    style,
    training,
)
from .drawing import Drawing, Figure

__all__ = ["Drawing", "Figure", "draw", "drawings"]

#: The content of a result file to its drawings, by experiment.
ARTISTS: dict[str, Callable[[dict[str, Any]], list[Drawing]]] = {
    "mlp-timing": mlp_timing.draw,
    "mlp-printed": mlp_timing.draw,
    "mlp-memory": mlp_memory.draw,
    "mlp-newton": mlp_newton.draw,
    "mlp-gain": mlp_gain.draw,
    "hardware": hardware.draw,
    "resnet-training": training.draw,
    "resnet-iterations": ablations.iterations,
    "resnet-guess": ablations.guess,
    "latent-diffusion": diffusion.latent,
    "pixel-diffusion": diffusion.pixel,
    "diffusion-iterations": diffusion_ablations.iterations,
    "diffusion-guess": diffusion_ablations.guess,
}


def drawings(result: dict[str, Any]) -> list[Drawing]:
    """The figures as matplotlib has them; an experiment without figures has none."""
    artist = ARTISTS.get(result["experiment"])
    if artist is None:
        return []
    with style.context():
        return artist(result)


def draw(result: dict[str, Any]) -> list[Figure]:
    """Every figure of a finished result file, given its content; the same content gives the same bytes.

    Lines and letters have the colour of the text around them (``currentColor``), so a page sets background and colour
    together, and the figures suit light and dark ones.
    """
    return [drawing.figure() for drawing in drawings(result)]
