"""Sampling from diffusion models in parallel over the denoising steps."""

from .diagonal import DiagonalPart
from .noise import Noise
from .prior import GaussianPrior
from .sample import sample
from .samples import Samples
from .schedule import Schedule
from .start import CoarseStart, GaussianStart, MeanStart
from .step import DDIM, DDPM, Clip, Steps
from .window import Window

__all__ = [
    "DDIM",
    "DDPM",
    "Clip",
    "CoarseStart",
    "DiagonalPart",
    "GaussianPrior",
    "GaussianStart",
    "MeanStart",
    "Noise",
    "Samples",
    "Schedule",
    "Steps",
    "Window",
    "sample",
]
