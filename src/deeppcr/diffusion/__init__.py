"""Sampling from diffusion models in parallel over the denoising steps."""

from .diagonal import DiagonalPart
from .diffusers import ParallelLoop, parallelize
from .noise import Noise
from .pipeline import PipelineSample, parallel_sample
from .prior import GaussianPrior
from .read_scheduler import UnsupportedScheduler, read_scheduler
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
    "ParallelLoop",
    "PipelineSample",
    "Samples",
    "Schedule",
    "Steps",
    "UnsupportedScheduler",
    "Window",
    "parallel_sample",
    "parallelize",
    "read_scheduler",
    "sample",
]
