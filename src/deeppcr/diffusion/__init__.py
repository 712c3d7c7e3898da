"""Sampling from diffusion models in parallel over the denoising steps."""

from ..jacobian.diagonal import DiagonalPart
from .diffusers.loop import ParallelLoop, parallelize
from .diffusers.pipeline import PipelineSample, parallel_sample
from .diffusers.scheduler import UnsupportedScheduler, read_scheduler
from .noise import Noise
from .prior import GaussianPrior
from .result import Samples
from .sample import sample
from .samplers import DDIM, DDPM, Clip, Steps
from .schedule import Schedule
from .start import CoarseStart, GaussianStart, MeanStart
from .window.window import Window

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
