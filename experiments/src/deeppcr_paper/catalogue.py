"""Every experiment that ``deeppcr-paper reproduce`` knows, in the order of the paper."""

from __future__ import annotations

from . import (
    compare_hardware,
    ddpm_cifar10,
    diffusion_guess,
    diffusion_iterations,
    latent_diffusion,
    mlp_gain,
    mlp_memory,
    mlp_newton,
    mlp_printed,
    mlp_timing,
    pixel_diffusion,
    resnet_training,
)
from .experiment import Experiment
from .resnet_ablations import GUESS_EXPERIMENT, ITERATIONS_EXPERIMENT

EXPERIMENTS: tuple[Experiment, ...] = (
    mlp_timing.EXPERIMENT,
    mlp_printed.EXPERIMENT,
    mlp_memory.EXPERIMENT,
    mlp_newton.EXPERIMENT,
    mlp_gain.EXPERIMENT,
    compare_hardware.EXPERIMENT,
    resnet_training.EXPERIMENT,
    ITERATIONS_EXPERIMENT,
    GUESS_EXPERIMENT,
    latent_diffusion.EXPERIMENT,
    pixel_diffusion.EXPERIMENT,
    diffusion_iterations.EXPERIMENT,
    diffusion_guess.EXPERIMENT,
)
#: What the paper does not have: known by name, and no part of "all" nor of its report.
BEYOND: tuple[Experiment, ...] = (ddpm_cifar10.EXPERIMENT,)
