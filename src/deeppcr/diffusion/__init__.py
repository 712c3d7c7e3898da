"""Sampling from diffusion models in parallel over the denoising steps."""

from .noise import Noise
from .prior import GaussianPrior
from .sample import sample
from .samples import Samples
from .schedule import Schedule
from .step import DDIM, DDPM, Clip, Steps
from .window import Window

__all__ = [
    "DDIM",
    "DDPM",
    "Clip",
    "GaussianPrior",
    "Noise",
    "Samples",
    "Schedule",
    "Steps",
    "Window",
    "sample",
]
