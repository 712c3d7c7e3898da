"""The window that slides: the loop's sample, in fewer rows; slopes that it sees; what it does where values are not finite."""

import math

import pytest
import torch

import deeppcr
from deeppcr import Result
from deeppcr.diffusion import DDIM, DDPM, GaussianPrior, GaussianStart, Noise, Schedule, Steps, Window, sample
from deeppcr.diffusion.problem import Problem
from deeppcr.diffusion.start import as_start
from deeppcr.diffusion.window.prepared import Prepared
from deeppcr.diffusion.window.sliding import SlidingIteration
from deeppcr.solution import Plan
from diffusion import digits
from diffusion.test_sample import noise_for


class Slid(Prepared):
    kind = SlidingIteration


def run(kind, denoiser, steps, noise, window, prior=None, start=None):
    problem = Problem(denoiser, steps, noise)
    with torch.no_grad():
        kept = kind(window, problem, prior or GaussianPrior())
        outcome = kept.run(window, problem, start or GaussianStart(), Plan())
    return problem.unflatten(outcome.states[..., 0]), outcome, kept


@pytest.mark.parametrize("size", [1, 3, 16, 40])
@pytest.mark.parametrize("step", [DDPM(), DDIM(), DDPM(clip=1.0)], ids=str)
@pytest.mark.parametrize("prior", [None, "data"])
def test_it_finds_what_the_loop_finds(net, size, step, prior, device):
    steps = step.steps(digits.TRAINING.take(40))
    noise = noise_for(3, 40, device=device)
    with torch.no_grad():
        loop = sample(net, digits.TRAINING.take(40), noise, step=step, solver=deeppcr.Loop(), keep_states=True)
    states, outcome, _ = run(Slid, net, steps, noise, Window(size=size), digits.prior() if prior else None)
    assert outcome.results == [Result.CONVERGED] * 3
    assert (states - loop.states).abs().max() <= 1e-3
    assert outcome.exact_steps.tolist() == [40] * 3
    if size == 1:
        assert outcome.evaluations.tolist() == [40] * 3


@pytest.mark.parametrize("length", [1, 2, 3])
def test_few_steps(net, length, device):
    noise = noise_for(2, length, device=device)
    with torch.no_grad():
        loop = sample(net, digits.TRAINING.take(length), noise, solver=deeppcr.Loop())
    states, *_ = run(Slid, net, DDPM().steps(digits.TRAINING.take(length)), noise, Window(size=8))
    assert (states[-1] - loop.final).abs().max() <= 1e-3


def test_a_sampler_with_two_slots(net, device):
    """Half of the last output is kept beside the sample."""
    plain = DDIM().steps(digits.TRAINING.take(30))
    keep, gain = torch.zeros(30, 2, 2), torch.zeros(30, 2)
    keep[:, 0, 0], keep[:, 0, 1] = plain.keep[:, 0, 0], -0.3 * plain.gain[:, 0]
    gain[:, 0], gain[:, 1] = 1.3 * plain.gain[:, 0], 1
    steps = Steps(plain.timesteps, keep, gain, plain.signal, plain.spread)
    noise = Noise(noise_for(2, 30, device=device).initial)
    with torch.no_grad():
        loop = sample(net, steps, noise, solver=deeppcr.Loop(), keep_states=True)
    states, outcome, _ = run(Slid, net, steps, noise, Window(size=8))
    assert outcome.results == [Result.CONVERGED] * 2
    assert (states - loop.states).abs().max() <= 1e-3


def test_in_double_precision(net, device):
    noise = noise_for(2, 50, torch.float64, device=device)
    try:
        net.double()
        with torch.no_grad():
            loop = sample(net, digits.TRAINING.take(50), noise, solver=deeppcr.Loop())
        states, outcome, _ = run(Slid, net, DDPM().steps(digits.TRAINING.take(50)), noise, Window(size=12))
    finally:
        net.float()
    assert outcome.results == [Result.CONVERGED] * 2
    assert (states[-1] - loop.final).abs().max() <= 1e-8


@pytest.mark.parametrize("step", [DDPM(), DDIM()], ids=str)
def test_it_takes_fewer_rows(net, step, device):
    """Than the window that it slides like."""
    steps, noise = step.steps(digits.TRAINING.take(100)), noise_for(1, 100, device=device)
    rows = [int(run(kind, net, steps, noise, Window(size=12, tf32=None))[1].evaluations) for kind in (Slid, Prepared)]
    assert rows[0] <= 0.75 * rows[1]


@pytest.mark.parametrize("prediction", ["epsilon", "x0", "v"])
def test_slopes_are_seen(prediction, device):
    """Of a linear network they are right after two looks, whatever the prior says."""
    schedule = Schedule.linear(60)
    steps = DDIM().steps(schedule, prediction)
    true = GaussianPrior(0.3).slopes(steps).to(device)

    def denoiser(z, t):
        return true.to(z)[59 - t.long()].unsqueeze(-1) * z + 0.1

    noise = Noise(torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device))
    _, outcome, kept = run(Slid, denoiser, steps, noise, Window(size=10))
    iteration = kept.iteration
    mean = iteration.lowest[..., 0] + iteration.share * iteration.range[..., 0]
    twice = (iteration.used > 1).all(1)
    assert int(twice.sum()) > 40
    right = torch.isclose(mean[twice], true[twice].unsqueeze(1), rtol=0.03, atol=1e-3)
    assert right.double().mean() > 0.8  # some came into the window right but for rounding, and told nothing
    assert float(outcome.evaluations.double().mean()) < 3 * 60


def test_a_good_start_is_left_as_it_is(net, device):
    noise = noise_for(2, 60, device=device)
    schedule = digits.TRAINING.take(60)
    with torch.no_grad():
        loop = sample(net, schedule, noise, solver=deeppcr.Loop(), keep_states=True)
    states, outcome, _ = run(Slid, net, DDPM().steps(schedule), noise, Window(size=20), start=as_start(loop))
    assert outcome.evaluations.tolist() == [60] * 2
    assert (states - loop.states).abs().max() <= 1e-3


def test_a_sample_that_is_not_finite_leaves_the_others_alone(net, device):
    schedule, noise = digits.TRAINING.take(40), noise_for(2, 40, device=device)
    initial = noise.initial.clone()
    initial[1] += 100

    def poisoned(z, t):
        far = (z.flatten(1).abs().amax(1) > 40) & (t < digits.TRAINING.take(40).timesteps[10].to(t.device))
        return torch.where(far.view(-1, 1, 1, 1), math.nan, 0 * z)

    states, outcome, _ = run(
        Slid, poisoned, DDPM().steps(schedule), Noise(initial, noise.steps), Window(size=8), GaussianPrior(1e4)
    )
    assert outcome.results[1] is Result.NON_FINITE
    assert 10 <= int(outcome.exact_steps[1]) < 40
    assert torch.isfinite(states[:, 0]).all()
