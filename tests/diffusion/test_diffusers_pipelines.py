"""Pipelines of diffusers: in parallel they give what they give by themselves, and what they cannot do is refused with the reason."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import Tensor

from deeppcr.diffusion import UnsupportedScheduler, Window, parallel_sample
from kernel_support import thorough

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers")
diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install deeppcr[diffusers]")

from diffusion.schedulers import FREE, GOOD, LATENT, error, made, seeded, tight


class Prompted(diffusers.DiffusionPipeline):
    """The loop of Stable Diffusion's pipeline, and what other pipelines add to it."""

    def __init__(self, unet, scheduler, vae):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae)
        self.set_progress_bar_config(disable=True)

    @torch.no_grad()
    def __call__(
        self, prompt_embeds, negative_prompt_embeds=None, guidance_scale=1.0, num_inference_steps=10, eta=0.0,
        generator=None, decode=True, odd="", callback_on_step_end=None,
    ):  # fmt: skip
        self.scheduler.set_timesteps(num_inference_steps)
        guided, B = guidance_scale > 1, len(prompt_embeds)
        embeds = torch.cat([negative_prompt_embeds, prompt_embeds]) if guided else prompt_embeds
        latents = torch.randn(B, 2, 8, 8, generator=generator) * self.scheduler.init_noise_sigma
        accepted = inspect.signature(self.scheduler.step).parameters
        named = {k: v for k, v in {"eta": eta, "generator": generator}.items() if k in accepted}
        timesteps = self.scheduler.timesteps[: -2 if odd == "short" else None]
        for i, t in enumerate(self.progress_bar(timesteps)):
            seen = torch.cat([latents] * 2) if guided else latents
            seen = self.scheduler.scale_model_input(seen, t)
            if odd == "channels":
                seen = torch.cat([seen, seen], 1)
            if odd == "shifted":
                seen = seen + 0.1
            told = t if odd != "times" else torch.stack([t, t + 1] * (len(seen) // 2))
            control = embeds * (1 + i) if odd == "control" else embeds
            out = self.unet(seen, told, encoder_hidden_states=control, return_dict=False)[0]
            if odd == "twice":
                out = self.unet(seen, told, encoder_hidden_states=embeds, return_dict=False)[0]
            if guided:
                without, with_prompt = out.chunk(2)
                scale = guidance_scale if odd != "interval" or i < 3 else 1.0
                out = without + scale * (with_prompt - without)
                if odd == "rescale":
                    out = out * with_prompt.std() / out.std()
            if odd == "part":
                out = out[:, :1]
            latents = self.scheduler.step(out, t, latents, **named, return_dict=False)[0]
            if odd == "inpaint":
                latents = latents * (torch.arange(8) < 4)
        return self.vae.decode(latents).sample if decode else latents


def prompted(conditional, vae, name="DDIMScheduler") -> Prompted:
    return Prompted(conditional, made((name, LATENT | (FREE if name.startswith("DD") else {}), {}), 10), vae)


def embeds(rows=2) -> dict[str, Tensor]:
    return {"prompt_embeds": torch.randn(rows, 3, 6), "negative_prompt_embeds": torch.randn(rows, 3, 6)}


OPTIONS = {"solver": tight()}


@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.thorough), 3.0])
@pytest.mark.parametrize(
    "name",
    [
        "DDPMScheduler",
        "HeunDiscreteScheduler",
        *thorough("DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"),
    ],
)
def test_a_pipeline_with_prompts(conditional, vae, name, scale):
    pipeline, given = prompted(conditional, vae, name), embeds()
    ours, theirs = seeded(), seeded()
    expected = pipeline(**given, guidance_scale=scale, generator=theirs)
    output, samples = parallel_sample(pipeline, **given, guidance_scale=scale, generator=ours, options=OPTIONS)
    assert samples.result in GOOD, samples
    assert error(output, expected) <= 1e-5
    assert torch.equal(ours.get_state(), theirs.get_state())  # what is drawn next is the same as well
    assert torch.equal(expected, pipeline(**given, guidance_scale=scale, generator=seeded()))  # it is as it was


@pytest.mark.parametrize("eta", [0.0, 0.6])
def test_the_pipeline_of_ddim(unet, eta):
    pipeline = diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler(**LATENT, **FREE))
    pipeline.set_progress_bar_config(disable=True)
    given = {"batch_size": 2, "num_inference_steps": 12, "eta": eta, "output_type": "np"}
    expected = pipeline(**given, generator=seeded()).images
    output, samples = parallel_sample(pipeline, **given, generator=seeded(), options=OPTIONS)
    assert samples.final.shape == (2, 1, 8, 8)
    assert abs(output.images - expected).max() <= 1e-5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_inference_steps": 0}, "num_inference_steps: at least 1, got 0"),
        ({"num_inference_steps": -3}, "num_inference_steps: at least 1, got -3"),
        ({"batch_size": 0}, "batch_size: at least 1, got 0"),
    ],
)
def test_no_steps_or_no_samples(unet, given, message):
    pipeline = diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler(**LATENT, **FREE))
    with pytest.raises(ValueError, match=f"^{message}$"):
        parallel_sample(pipeline, **given)
    with pytest.raises(ValueError, match=r"^batch_size: at least 1, got 0$"):
        parallel_sample(pipeline, 0)


def test_no_prompts(conditional, vae):
    with pytest.raises(ValueError, match=r"^Prompted starts from an empty sample, \(0, 2, 8, 8\)$"):
        parallel_sample(prompted(conditional, vae), **embeds(0))


def test_the_pipeline_of_ddpm_with_global_random_numbers(unet):
    """A pipeline that is given no generator draws from PyTorch's own, and so does its run in parallel."""
    pipeline = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(**FREE))
    pipeline.set_progress_bar_config(disable=True)
    torch.manual_seed(11)
    expected = pipeline(num_inference_steps=12, output_type="np").images
    torch.manual_seed(11)
    output, _ = parallel_sample(pipeline, num_inference_steps=12, output_type="np", options=OPTIONS)
    assert abs(output.images - expected).max() <= 1e-5


def test_a_scheduler_is_read_anew_where_anything_has_changed(conditional, vae):
    pipeline, given = prompted(conditional, vae), embeds()
    run = lambda **named: parallel_sample(pipeline, **given, **named, generator=seeded(), options=OPTIONS).output  # noqa: E731
    noisy = {"num_inference_steps": 7, "eta": 0.5}
    for named in ({"num_inference_steps": 6}, {"num_inference_steps": 6}, {"num_inference_steps": 7}, noisy):
        assert error(run(**named), pipeline(**given, **named, generator=seeded())) <= 1e-5
    pipeline.scheduler.alphas_cumprod = pipeline.scheduler.alphas_cumprod**0.9
    assert error(run(**noisy), pipeline(**given, **noisy, generator=seeded())) <= 1e-5


def test_options_of_a_pipeline_are_checked_before_it_runs():
    def pipeline(image):
        raise AssertionError("it ran")

    for options, reason in (
        ({"solvr": Window()}, "options: .*'solvr'; did you mean solver"),
        ({"guidance": 2.0}, "options: .*'guidance'; there are solver, jacobian"),
        (Window(), "options: expected a dictionary of solver, .* got Window"),
    ):
        with pytest.raises(TypeError, match=reason):
            parallel_sample(pipeline, options=options)
    with pytest.raises(TypeError, match=r'solver: goes into a dictionary, options={"solver": \.\.\.}'):
        parallel_sample(pipeline, solver=Window())


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ("channels", "more than the sample itself"),
        ("shifted", "something else than the scaled sample"),
        ("times", "another timestep for each row"),
        ("control", "other arguments from step to step"),
        ("twice", "calls its network 2 times"),
        ("interval", "more than guidance"),
        ("rescale", "guidance_rescale"),
        ("part", "only a part"),
        ("inpaint", "inpainting"),
        ("short", "ended its loop after 8 of 10 steps"),
    ],
)
def test_pipelines_that_do_more_are_refused_and_left_as_they_were(conditional, vae, odd, reason):
    pipeline, given = prompted(conditional, vae), embeds() | {"guidance_scale": 3.0}
    before = pipeline(**given, generator=seeded())
    with pytest.raises(UnsupportedScheduler, match=reason) as raised:
        parallel_sample(pipeline, **given, odd=odd)
    assert "\n" not in str(raised.value)
    assert "forward" not in vars(pipeline.unet)
    assert "step" not in vars(pipeline.scheduler)
    assert torch.equal(before, pipeline(**given, generator=seeded()))


def test_callbacks_and_other_objects_are_refused(conditional, vae):
    with pytest.raises(UnsupportedScheduler, match="callback_on_step_end"):
        parallel_sample(prompted(conditional, vae), **embeds(), callback_on_step_end=print)
    with pytest.raises(TypeError, match="expected a pipeline of diffusers"):
        parallel_sample(object())


def test_a_network_in_train_mode_with_dropout_is_named(conditional, vae):
    model = copy.deepcopy(conditional).train()
    model.mid_block.resnets[0].dropout.p = 0.1
    with pytest.raises(ValueError, match=r"train mode.*mid_block\.resnets\.0\.dropout"):
        parallel_sample(prompted(model, vae), **embeds())
