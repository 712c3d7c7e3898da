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
from kernel_support import thorough

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers")
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


def some(cases, every=3):
    """Each scheduler is read in every run; that what was read leads to the loop's samples is shown for some, the others thorough."""
    return [
        case if at % every == 0 else pytest.param(case, marks=pytest.mark.thorough) for at, case in enumerate(cases)
    ]


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.thorough), 19])
@pytest.mark.parametrize("case", CASES, ids=label)
@torch.no_grad()
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


@pytest.mark.parametrize("case", some(CASES), ids=label)
@torch.no_grad()
def test_a_cheap_network_in_parallel(case):
    scheduler = made(case, 30)
    sample = start_of(scheduler, (3, 1, 4, 4), torch.float64)
    expected = loop(scheduler, soft, sample, generator=seeded(), step_arguments=case[2])
    got = parallelize(scheduler, soft, **case[2])(sample, generator=seeded(), solver=tight(torch.float64))
    assert got.result in GOOD, got
    assert error(got.final, expected) <= (2e-6 if case[0] in IN_FLOAT32 else 1e-10)


# Clipping makes the loop of a network that is no denoiser chaotic: float32 and float64 part by 1e-4 in 20 steps of DDIM.
UNCLIPPED = [case for case in CASES if "clip_sample" in case[1] or not case[0].startswith("DD")]


@pytest.mark.parametrize("case", some(UNCLIPPED, every=9), ids=label)
@torch.no_grad()
def test_unet_in_parallel(unet, case):
    scheduler = made(case, 9)
    sample = start_of(scheduler, (2, 1, 8, 8))
    expected = loop(scheduler, unet, sample, generator=seeded(), step_arguments=case[2])
    got = parallelize(scheduler, unet, **case[2])(sample, generator=seeded(), solver=tight())
    assert got.result in GOOD, got
    assert error(got.final, expected) <= 1e-5


@pytest.mark.parametrize(
    "name", some(["DDPMScheduler", "DDIMScheduler", "UniPCMultistepScheduler", "HeunDiscreteScheduler"])
)
@torch.no_grad()
def test_unet_in_parallel_in_float64(unet, name):
    model = copy.deepcopy(unet).double()
    scheduler = made((name, LATENT | (FREE if name.startswith("DD") else {}), {}), 12)
    sample = start_of(scheduler, (2, 1, 8, 8), torch.float64)
    expected = loop(scheduler, model, sample, generator=seeded())
    got = parallelize(scheduler, model)(sample, generator=seeded(), solver=tight(torch.float64))
    assert got.result in GOOD, got
    assert error(got.final, expected) <= 1e-10


@pytest.mark.parametrize("name", ["DDPMScheduler", "DDIMScheduler"])
@torch.no_grad()
def test_unet_with_default_clipping(unet, name):
    """In float64, where the loop itself has digits to spare."""
    model = copy.deepcopy(unet).double()
    scheduler = made((name, {}, {}), 12)
    sample = start_of(scheduler, (2, 1, 8, 8), torch.float64)
    expected = loop(scheduler, model, sample, generator=seeded())
    got = parallelize(scheduler, model)(sample, generator=seeded(), solver=tight(torch.float64))
    assert expected.abs().max() <= 1  # it was clipped
    assert error(got.final, expected) <= 1e-9


@pytest.mark.parametrize("guidance", [pytest.param(None, marks=pytest.mark.thorough), 4.0])
@pytest.mark.parametrize(
    "name",
    some(["DDIMScheduler", "EulerDiscreteScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler"]),
)
@torch.no_grad()
def test_conditional_unet_in_parallel(conditional, name, guidance):
    scheduler = made((name, LATENT | (FREE if name.startswith("DD") else {}), {}), 12)
    sample = start_of(scheduler, (2, 2, 8, 8))
    text, no_text = torch.randn(2, 3, 6), torch.randn(2, 3, 6)

    def guided(seen, t):
        out = conditional(seen, t, encoder_hidden_states=text).sample
        if guidance is None:
            return out
        other = conditional(seen, t, encoder_hidden_states=no_text).sample
        return other + guidance * (out - other)

    options = {} if guidance is None else {"guidance": guidance, "unconditional": {"encoder_hidden_states": no_text}}
    got = parallelize(scheduler, conditional)(sample, {"encoder_hidden_states": text}, solver=tight(), **options)
    assert got.result in GOOD, got
    assert error(got.final, loop(scheduler, guided, sample)) <= 1e-5


@pytest.mark.parametrize("name", ["DDIMScheduler", "UniPCMultistepScheduler"])
def test_gradients_are_those_through_the_loop(unet, name):
    model = copy.deepcopy(unet).double()
    scheduler = made((name, LATENT | (FREE if name.startswith("DD") else {}), {}), 6)
    sample = start_of(scheduler, (2, 1, 8, 8), torch.float64).requires_grad_()
    inputs = [sample, model.conv_in.weight, model.time_embedding.linear_1.weight]
    weight = torch.randn(2, 1, 8, 8).double()
    expected = torch.autograd.grad((loop.__wrapped__(scheduler, model, sample) * weight).sum(), inputs)
    final = parallelize(scheduler, model)(sample, solver=tight(torch.float64)).final
    for got, wanted in zip(torch.autograd.grad((final * weight).sum(), inputs), expected, strict=True):
        assert error(got, wanted) <= 1e-8


@torch.no_grad()
def test_a_list_of_generators_is_one_for_each_sample(unet):
    scheduler = made(("DDPMScheduler", FREE, {}), 5)
    sample = torch.randn(2, 1, 8, 8)
    draw = lambda: [torch.Generator().manual_seed(seed) for seed in (1, 2)]  # noqa: E731
    expected = loop(scheduler, unet, sample, generator=draw())
    assert error(parallelize(scheduler, unet)(sample, generator=draw(), solver=tight()).final, expected) <= 1e-5


@torch.no_grad()
def test_half_precision_is_solved_in_float32(unet):
    model = copy.deepcopy(unet).to(torch.bfloat16)
    scheduler = made(("DDIMScheduler", LATENT | FREE, {}), 10)
    sample = torch.randn(1, 1, 8, 8, dtype=torch.bfloat16)
    got = parallelize(scheduler, model)(sample, solver=Window(tolerance=1e-2)).final
    assert got.dtype == torch.bfloat16
    exact = loop(scheduler, unet, sample.float())
    # As close to the loop in float32 as the loop in half precision is, or closer.
    assert error(got.float(), exact) <= 1.5 * error(loop(scheduler, model, sample).float(), exact)


# Pipelines.


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


@pytest.fixture(scope="module")
def vae() -> nn.Module:
    torch.manual_seed(5)
    return diffusers.AutoencoderKL(
        in_channels=1, out_channels=1, latent_channels=2, block_out_channels=(8,), norm_num_groups=4
    ).eval()


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


# What cannot work is refused, with the reason.


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
