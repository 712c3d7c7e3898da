"""Models and schedulers of diffusers: in parallel they give what their own, unmodified loop gives."""

from __future__ import annotations

import copy

import pytest
import torch

import deeppcr
from deeppcr.diffusion import Window, parallelize, read_scheduler

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers")
pytest.importorskip("diffusers", reason="diffusers is not installed: pip install deeppcr[diffusers]")

from diffusion.schedulers import (
    CASES,
    FREE,
    GOOD,
    IN_FLOAT32,
    LATENT,
    error,
    label,
    loop,
    made,
    seeded,
    soft,
    start_of,
    tight,
)


def some(cases, every=3):
    """Each scheduler is read in every run; that what was read leads to the loop's samples is shown for some, the others thorough."""
    return [
        case if at % every == 0 else pytest.param(case, marks=pytest.mark.thorough) for at, case in enumerate(cases)
    ]


# The numbers read from a scheduler, one step at a time: no solver, so nothing but the numbers can be wrong.
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
