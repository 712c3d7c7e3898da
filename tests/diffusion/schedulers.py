"""Schedulers of diffusers with their settings, and their own, unmodified loop, which is what samples are held against."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import Tensor

import deeppcr
from deeppcr.diffusion import Window

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install deeppcr[diffusers]")

#: these compute a step in float32 whatever the sample's dtype is, so more than float32's digits cannot be asked for
IN_FLOAT32 = (
    "DPMSolverMultistepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler",
)

LATENT = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}  # Stable Diffusion's
FREE = {"clip_sample": False}

#: name of the class, its settings, arguments of its step
CASES: list[tuple[str, dict, dict]] = [
    ("DDPMScheduler", FREE, {}),
    ("DDPMScheduler", {}, {}),  # clips by default
    ("DDPMScheduler", {"clip_sample_range": 2.5, "variance_type": "fixed_large"}, {}),
    ("DDIMScheduler", LATENT | FREE, {}),
    ("DDIMScheduler", LATENT, {}),
    ("DDIMScheduler", LATENT | FREE, {"eta": 0.7}),
    ("DDIMScheduler", LATENT, {"eta": 0.7, "use_clipped_model_output": True}),
    ("DDIMScheduler", LATENT | FREE | {"set_alpha_to_one": False, "steps_offset": 1}, {}),
    ("DDIMScheduler", LATENT | FREE | {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}, {}),
    ("EulerDiscreteScheduler", LATENT, {}),
    ("EulerDiscreteScheduler", LATENT | {"use_karras_sigmas": True}, {}),
    ("EulerDiscreteScheduler", LATENT, {"s_churn": 2.0}),
    ("EulerAncestralDiscreteScheduler", LATENT, {}),
    ("FlowMatchEulerDiscreteScheduler", {}, {}),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}, {}),
    ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, {}),
    ("DPMSolverMultistepScheduler", LATENT | {"solver_order": 1}, {}),
    ("DPMSolverMultistepScheduler", LATENT, {}),
    ("DPMSolverMultistepScheduler", LATENT | {"solver_order": 3}, {}),
    ("DPMSolverMultistepScheduler", LATENT | {"algorithm_type": "sde-dpmsolver++"}, {}),
    ("DPMSolverMultistepScheduler", LATENT | {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}, {}),
    ("UniPCMultistepScheduler", LATENT | {"solver_order": 1}, {}),
    ("UniPCMultistepScheduler", LATENT, {}),
    ("UniPCMultistepScheduler", LATENT | {"solver_order": 3}, {}),
    ("HeunDiscreteScheduler", LATENT, {}),
    ("DEISMultistepScheduler", LATENT, {}),
    ("PNDMScheduler", LATENT | {"skip_prk_steps": True}, {}),
]
SPACED = ("DDPMScheduler", "DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler",
          "UniPCMultistepScheduler", "HeunDiscreteScheduler")  # fmt: skip
for name in SPACED:
    free = FREE if name.startswith("DD") else {}
    CASES += [
        (name, LATENT | free | {"timestep_spacing": spacing}, {}) for spacing in ("leading", "trailing", "linspace")
    ]
    CASES += [(name, LATENT | free | {"prediction_type": kind}, {}) for kind in ("v_prediction", "sample")]


def label(case: tuple[str, dict, dict]) -> str:
    name, settings, arguments = case
    told = {k: v for k, v in (settings | arguments).items() if LATENT.get(k) != v}
    return "-".join([name.removesuffix("Scheduler"), *(f"{k}={v}" for k, v in told.items())])


def made(case: tuple[str, dict, dict], steps: int):
    scheduler = getattr(diffusers, case[0])(**case[1])
    scheduler.set_timesteps(steps)
    return scheduler


def start_of(scheduler, shape: tuple[int, ...], dtype=torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype) * float(getattr(scheduler, "init_noise_sigma", 1.0))


@torch.no_grad()
def loop(scheduler, model, sample: Tensor, *, generator=None, step_arguments=None, **model_arguments) -> Tensor:
    """The loop of the documentation of diffusers, with the scheduler as it is."""
    scheduler, named = copy.deepcopy(scheduler), dict(step_arguments or {})
    if "generator" in inspect.signature(scheduler.step).parameters:
        named["generator"] = generator
    for t in scheduler.timesteps:
        seen = scheduler.scale_model_input(sample, t) if hasattr(scheduler, "scale_model_input") else sample
        output = model(seen, t, **model_arguments)
        output = output if isinstance(output, Tensor) else output.sample
        sample = scheduler.step(output, t, sample, **named).prev_sample
    return sample


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


#: a tolerance of 1e-6 is less than rounding leaves in float32
GOOD = (deeppcr.Result.CONVERGED, deeppcr.Result.PRECISION_FLOOR)


def tight(dtype=torch.float32) -> Window:
    return Window(tolerance=1e-6 if dtype == torch.float32 else 1e-12)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def soft(sample: Tensor, t) -> Tensor:
    """Close to a denoiser, and cheap: the noise as far as a Gaussian tells, and something that bends."""
    return (
        0.7 * sample
        + 0.3 * torch.tanh(sample.roll(1, -1))
        + 0.0002 * torch.as_tensor(t).to(sample).reshape(-1, 1, 1, 1)
    )
