"""Models, schedulers and pipelines of diffusers: in parallel they give what their own, unmodified loop gives."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import deeppcr
from deeppcr.diffusion import UnsupportedScheduler, Window, parallel_sample, parallelize, read_scheduler

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


@pytest.fixture(scope="module")
def unet() -> nn.Module:
    torch.manual_seed(3)
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def conditional() -> nn.Module:
    torch.manual_seed(4)
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=2, out_channels=2, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=6, attention_head_dim=8,
    ).eval()  # fmt: skip


# The numbers read from a scheduler, one step at a time: no solver, so nothing but the numbers can be wrong.


@pytest.mark.parametrize("steps", [1, 2, 19])
@pytest.mark.parametrize("case", CASES, ids=label)
def test_steps_read_from_a_scheduler_are_its_own(case, steps):
    scheduler = made(case, steps)
    sample = start_of(scheduler, (2, 1, 4, 4), torch.float64)
    expected = loop(scheduler, soft, sample, generator=seeded(), step_arguments=case[2])
    got = parallelize(scheduler, soft, **case[2])(sample, generator=seeded(), solver=deeppcr.Loop())
    assert error(got.final, expected) <= (2e-6 if case[0] in IN_FLOAT32 else 1e-12)


def test_reading_leaves_the_scheduler_and_the_random_numbers_alone():
    scheduler = made(("DDPMScheduler", {}, {}), 10)
    before, state = copy.deepcopy(vars(scheduler)), torch.get_rng_state()
    read_scheduler(scheduler)
    assert str(vars(scheduler)) == str(before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("case", "slots"),
    [
        (("DDIMScheduler", FREE, {}), 1),
        (("DPMSolverMultistepScheduler", {"solver_order": 2}, {}), 2),
        (("DPMSolverMultistepScheduler", {"solver_order": 3}, {}), 3),
        (("UniPCMultistepScheduler", {"solver_order": 2}, {}), 4),  # two outputs and the sample before the corrector
        (("HeunDiscreteScheduler", {}, {}), 3),
    ],
    ids=lambda value: label(value) if isinstance(value, tuple) else str(value),
)
def test_only_what_later_steps_need_is_kept(case, slots):
    assert read_scheduler(made(case, 12)).slots == slots


# In parallel, with networks of diffusers.


@pytest.mark.parametrize("case", CASES, ids=label)
def test_a_cheap_network_in_parallel(case):
    scheduler = made(case, 40)
    sample = start_of(scheduler, (3, 1, 4, 4), torch.float64)
    expected = loop(scheduler, soft, sample, generator=seeded(), step_arguments=case[2])
    got = parallelize(scheduler, soft, **case[2])(sample, generator=seeded(), solver=tight(torch.float64))
    assert got.result is deeppcr.Result.CONVERGED, got
    assert error(got.final, expected) <= (2e-6 if case[0] in IN_FLOAT32 else 1e-10)


# Clipping makes the loop of a network that is no denoiser chaotic: float32 and float64 part by 1e-4 in 20 steps of DDIM.
UNCLIPPED = [case for case in CASES if "clip_sample" in case[1] or not case[0].startswith("DD")]


@pytest.mark.parametrize("case", UNCLIPPED, ids=label)
def test_unet_in_parallel(unet, case):
    scheduler = made(case, 12)
    sample = start_of(scheduler, (2, 1, 8, 8))
    expected = loop(scheduler, unet, sample, generator=seeded(), step_arguments=case[2])
    got = parallelize(scheduler, unet, **case[2])(sample, generator=seeded(), solver=tight())
    assert got.result is deeppcr.Result.CONVERGED, got
    assert error(got.final, expected) <= 1e-5
