"""Schedules and steps against plain formulas, and against diffusers where it is installed."""

import math

import pytest
import torch

import deeppcr
from deeppcr.diffusion import DDIM, DDPM, Clip, Noise, Schedule, Steps, sample

F64 = torch.float64


def test_betas_of_the_schedules():
    betas = [1e-4 + (0.02 - 1e-4) * t / 999 for t in range(1000)]
    bar, expected = 1.0, []
    for beta in betas:
        bar *= 1 - beta
        expected.append(bar)
    assert torch.allclose(Schedule.linear(1000).alphas_bar, torch.tensor(expected, dtype=F64), rtol=1e-12)
    first = 1 - Schedule.linear(250).alphas_bar[0]  # rescaled: as much noise in fewer steps
    assert math.isclose(float(first), 4e-4, rel_tol=1e-9)
    assert 0.5 < float(Schedule.linear(250).alphas_bar[-1] / expected[-1]) < 1.5

    scaled = [(0.00085**0.5 + (0.012**0.5 - 0.00085**0.5) * t / 999) ** 2 for t in range(1000)]
    kept = torch.cumprod(1 - torch.tensor(scaled, dtype=F64), 0)
    assert torch.allclose(Schedule.scaled_linear(1000).alphas_bar, kept, rtol=1e-12)

    def signal(t):
        return math.cos((t / 100 + 0.008) / 1.008 * math.pi / 2) ** 2

    bars = Schedule.cosine(100).alphas_bar
    assert math.isclose(float(bars[49]), signal(50) / signal(0), rel_tol=1e-9)
    assert math.isclose(float(bars[99] / bars[98]), 0.001, rel_tol=1e-9)  # its last step is held back


def test_which_times_are_visited():
    schedule = Schedule.linear(1000)
    assert schedule.take(4).timesteps.tolist() == [750, 500, 250, 0]
    assert schedule.take(4, "trailing").timesteps.tolist() == [999, 749, 499, 249]
    assert schedule.take(4, "linspace").timesteps.tolist() == [999, 666, 333, 0]
    taken = schedule.take(4)
    assert taken.before.tolist() == schedule.alphas_bar[[750, 500, 250, 0]].tolist()
    assert taken.after.tolist() == [*schedule.alphas_bar[[500, 250, 0]].tolist(), 1.0]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda: Schedule(torch.tensor([0.5, 0.9])), "decrease"),
        (lambda: Schedule(torch.tensor([[0.5]])), r"expected \[T\]"),
        (lambda: Schedule(torch.tensor([0.9, 0.5]), torch.tensor([0, 1])), "decrease, from noisy"),
        (lambda: Schedule(torch.tensor([0.9, 0.5]), torch.tensor([7])), r"0 \.\. 1"),
        (lambda: Schedule.linear(10).take(11), "1 to 10"),
        (lambda: Schedule.linear(10).take(5, "evenly"), "leading"),
        (lambda: Schedule.linear(0), "whole number"),
        (lambda: DDPM(variance="huge"), "variance"),
        (lambda: DDPM(clip=-1.0), "clip"),
        (lambda: DDIM(eta=2.0), "eta"),
        (lambda: DDIM().steps(Schedule.linear(5), "score"), "prediction"),
    ],
)
def test_bad_settings_are_named(wrong, match):
    with pytest.raises(ValueError, match=match):
        wrong()


def plain_step(kind, prediction, bar, bar_next, z, out, noise, clip, last):
    """One step of the papers' formulas, on numbers."""
    if prediction == "epsilon":
        eps = out
        x0 = (z - math.sqrt(1 - bar) * eps) / math.sqrt(bar)
    elif prediction == "v":
        x0 = math.sqrt(bar) * z - math.sqrt(1 - bar) * out
        eps = math.sqrt(bar) * out + math.sqrt(1 - bar) * z
    else:
        x0 = out
        eps = (z - math.sqrt(bar) * x0) / math.sqrt(1 - bar)
    if clip:
        x0 = max(-clip, min(clip, x0))
    beta = 1 - bar / bar_next
    if kind.startswith("ddpm"):
        mean = math.sqrt(bar_next) * beta / (1 - bar) * x0 + math.sqrt(1 - beta) * (1 - bar_next) / (1 - bar) * z
        spread = beta if kind == "ddpm large" else beta * (1 - bar_next) / (1 - bar)
        return mean + (0 if last else math.sqrt(spread) * noise)
    sigma = float(kind.split()[1]) * math.sqrt((1 - bar_next) / (1 - bar) * beta)
    return math.sqrt(bar_next) * x0 + math.sqrt(max(0, 1 - bar_next - sigma**2)) * eps + sigma * noise


@pytest.mark.parametrize("clip", [None, 0.8])
@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
@pytest.mark.parametrize("kind", ["ddpm large", "ddpm small", "ddim 0", "ddim 0.6"])
def test_steps_follow_the_formulas(kind, prediction, clip):
    schedule = Schedule.cosine(100).take(7)
    step = DDIM(eta=float(kind.split()[1]), clip=clip) if kind[:4] == "ddim" else DDPM(variance=kind[5:], clip=clip)
    noise = Noise.draw((1, 1), 7, dtype=F64, generator=torch.Generator().manual_seed(1))
    found = sample(lambda z, t: torch.sin(z + t[:, None]), schedule, noise, step=step, prediction=prediction,
                   solver=deeppcr.Loop(), keep_states=True)  # fmt: skip
    z = float(noise.initial)
    for l in range(7):
        t = int(schedule.timesteps[l])
        z = plain_step(kind, prediction, float(schedule.before[l]), float(schedule.after[l]), z, math.sin(z + t),
                       float(noise.steps[l]), clip, l == 6)  # fmt: skip
        assert math.isclose(float(found.states[l]), z, rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("name", ["ddpm", "ddim"])
def test_steps_equal_those_of_diffusers(name, spacing, prediction, clip):
    diffusers = pytest.importorskip("diffusers")
    settings = {"clip_sample": clip, "prediction_type": prediction, "timestep_spacing": spacing}
    schedule = Schedule.linear(1000).take(20, spacing)
    if name == "ddpm":
        scheduler, step = (
            diffusers.DDPMScheduler(variance_type="fixed_large", **settings),
            DDPM(clip=1.0 if clip else None),
        )
    else:
        scheduler, step = diffusers.DDIMScheduler(**settings), DDIM(clip=1.0 if clip else None)
    scheduler.set_timesteps(20)
    assert scheduler.timesteps.tolist() == schedule.timesteps.tolist()
    ours = {"epsilon": "epsilon", "v_prediction": "v", "sample": "x0"}[prediction]
    draws = torch.Generator().manual_seed(3)
    z = torch.randn(2, 1, 4, 4, generator=draws)
    steps = step.steps(schedule, ours).to(z.device, z.dtype)
    deviation = step.steps(schedule, ours).deviation
    for l, t in enumerate(scheduler.timesteps):
        if name == "ddim" and spacing == "linspace" and int(t) - 50 != int(schedule.timesteps[min(l + 1, 19)]):
            continue  # diffusers' DDIM always goes T // L times down, wherever the next step starts
        if name == "ddpm" and spacing == "trailing" and l == 19:
            continue  # diffusers' DDPM adds noise at its last step too where that is not time 0
        out = torch.tanh(z)
        generator = torch.Generator().manual_seed(l)
        expected = scheduler.step(out, t, z, generator=generator, return_dict=False)[0]
        shift = None
        if name == "ddpm":
            drawn = torch.randn(z.shape, generator=torch.Generator().manual_seed(l))
            shift = float(deviation[l]) * drawn.flatten(1)[None]
        index = slice(l, l + 1)
        found = steps.advance(index, z.flatten(1)[None, ..., None], out.flatten(1)[None], shift)
        assert torch.allclose(found.view_as(z), expected, rtol=1e-4, atol=1e-5)
        z = expected


def test_steps_say_what_does_not_fit():
    one, times = torch.ones(3), torch.arange(3)
    with pytest.raises(ValueError, match="keep, gain"):
        Steps(times, torch.ones(3, 2, 2), one, one, one)
    with pytest.raises(ValueError, match="signal"):
        Steps(times, one, one, torch.ones(2), one)
    with pytest.raises(ValueError, match="several slots cannot clip"):
        Steps(times, torch.ones(3, 2, 2), torch.ones(3, 2), one, one, clip=Clip(1.0, one, one, one))
