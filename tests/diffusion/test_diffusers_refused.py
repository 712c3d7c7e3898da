"""Schedulers that cannot run in parallel, or are not set, and arguments that belong elsewhere, are refused with the reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deeppcr.diffusion import UnsupportedScheduler, Window, parallelize

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers")
diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install deeppcr[diffusers]")

from diffusion.schedulers import label, made, soft


class Odd:
    """A scheduler of one's own."""

    timesteps = torch.arange(5.0)

    def __init__(self, step):
        self.step = step


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (("DDPMScheduler", {"thresholding": True}, {}), "thresholding=True"),
        (("DDIMScheduler", {"thresholding": True}, {}), "quantile"),
        (("DPMSolverMultistepScheduler", {"thresholding": True}, {}), "thresholding=True"),
        (("UniPCMultistepScheduler", {"thresholding": True}, {}), "thresholding=True"),
        (("HeunDiscreteScheduler", {"clip_sample": True}, {}), "clipping is exact for one-step schedulers only"),
        (("DDPMScheduler", {"variance_type": "learned_range"}, {}), "takes its variance from the model"),
        (("UniPCMultistepScheduler", {"solver_p": diffusers.DDIMScheduler()}, {}), "another scheduler inside"),
        (("IPNDMScheduler", {}, {}), "stores more than"),
        (("DDIMScheduler", {}, {"eta": 1.0, "variance_noise": torch.zeros(1, 1, 1, 1)}), "the tensor `variance_noise`"),
    ],
    ids=lambda value: label(value) if isinstance(value, tuple) else None,
)
def test_unsupported_settings_are_refused(case, reason):
    with pytest.raises(UnsupportedScheduler, match=reason) as raised:
        parallelize(made(case, 15), soft, **case[2])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda output, t, sample, return_dict: (sample * output,), "its step 0 .timestep 0. is not a linear map"),
        (lambda output, t, sample, return_dict: ((sample - output).clamp(-50, 50),), "not a linear map"),
        (lambda output, t, sample, return_dict: (sample - output.mean(),), "not a linear map"),
        (lambda output, t, sample, return_dict: (sample / 0 - output,), "not finite"),
        (lambda output, t, sample, return_dict: (sample + torch.randn_like(sample),), "takes no generator"),
        (lambda output, t, sample, return_dict: 1 / 0, "failed on plain numbers"),
    ],
)
def test_steps_that_are_not_linear_are_refused(step, reason):
    with pytest.raises(UnsupportedScheduler, match=reason):
        parallelize(Odd(step), soft)


def test_what_a_scheduler_hides_is_found():
    """History that is kept where it is not looked for shows as a step that is not linear in what is seen."""

    class Hiding(Odd):
        def __init__(self):
            self.last = SimpleNamespace(output=0)

        def step(self, output, t, sample, return_dict):
            after = sample - output + 0.5 * self.last.output
            self.last.output = output
            return (after,)

    with pytest.raises(UnsupportedScheduler, match="remembers earlier steps"):
        parallelize(Hiding(), soft)


def test_a_scheduler_without_timesteps_is_told_so():
    with pytest.raises(TypeError, match="expected a scheduler of diffusers"):
        parallelize(object(), soft)
    scheduler = made(("DDIMScheduler", {}, {}), 10)
    scheduler.timesteps = scheduler.timesteps[:0]
    with pytest.raises(ValueError, match="set_timesteps"):
        parallelize(scheduler, soft)


@pytest.mark.parametrize("name", ["DDIM", "DPMSolverMultistep", "UniPCMultistep", "PNDM", "FlowMatchEulerDiscrete"])
def test_a_scheduler_whose_timesteps_are_not_set_is_told_so(name):
    with pytest.raises(ValueError, match=f"scheduler: .*{name}Scheduler .*call its set_timesteps") as raised:
        parallelize(getattr(diffusers, f"{name}Scheduler")(), soft)
    assert not isinstance(raised.value, UnsupportedScheduler)


def test_arguments_that_belong_elsewhere_are_sent_there():
    scheduler, latents = made(("DDIMScheduler", {}, {}), 10), torch.zeros(1, 1, 2, 2)
    for name in ("guidance", "solver", "generator"):
        with pytest.raises(TypeError, match=rf"{name}: is for the loop that parallelize returns.*\(latents, {name}="):
            parallelize(scheduler, soft, **{name: 3.0})
    with pytest.raises(TypeError, match=r"etta: DDIMScheduler\.step takes no argument of this name"):
        parallelize(scheduler, soft, etta=1.0)
    with pytest.raises(TypeError, match="model: expected a callable, got int"):
        parallelize(scheduler, 3)
    with pytest.raises(TypeError, match=r"options: .*'solvr'; did you mean solver\?"):
        parallelize(scheduler, soft)(latents, solvr=Window())
    with pytest.raises(TypeError, match="latents: expected a tensor"):
        parallelize(scheduler, soft)("latents")
