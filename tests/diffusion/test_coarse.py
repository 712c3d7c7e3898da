"""Networks that round far more than their dtype says, as many layers in TF32 do: rows, errors and certificates. A CPU stands for the GPU."""

import pytest
import torch

import deeppcr
from deeppcr import Result
from deeppcr.diffusion import DDIM, DDPM, Noise, Schedule, Steps, Window, sample
from deeppcr.diffusion.problem import TF32, Problem
from deeppcr.diffusion.window import looped, planned, prepared
from deeppcr.diffusion.window.rounding import Rounding
from deeppcr.diffusion.window.sliding import SlidingIteration
from diffusion import digits
from diffusion.test_planned import AUTO, COSTS, Clock, Kept
from diffusion.test_sample import noise_for
from diffusion.test_sliding import Slid, run
from kernel_support import thorough

TRAINING = Schedule.linear(1000)


def exact(z, t):
    """The ideal denoiser of some digits, each with a little noise; it predicts the noise."""
    images = digits.data()[0][:60].flatten(1)
    bars = TRAINING.alphas_bar.to(z)[t.long()].unsqueeze(-1)
    flat, total = z.flatten(1), 1 - 0.95 * bars
    shares = torch.softmax(-(flat.unsqueeze(1) - bars.sqrt().unsqueeze(1) * images).square().sum(-1) / (2 * total), -1)
    return ((1 - bars).sqrt() * (flat - bars.sqrt() * (shares @ images)) / total).view_as(z)


def coarse(share):
    """The same, off by this share: otherwise for every input, and with every number of rows and place in them."""

    def denoiser(z, t):
        place = torch.arange(len(z)) + len(z)
        return exact(z, t) + share * torch.sin(1e6 * z.roll(1, -1) + place.reshape(-1, *[1] * (z.ndim - 1)))

    return denoiser


@pytest.fixture(autouse=True)
def in_tf32(monkeypatch):
    """Networks are taken for TF32's, and to be as precise."""
    monkeypatch.setattr(Problem, "in_tf32", property(lambda problem: True))
    monkeypatch.setattr(Problem, "eps", property(lambda problem: TF32))


@pytest.mark.parametrize(
    ("step", "length", "share"),
    [
        *((DDIM(), 50, share) for share in (5e-4, 2e-3, 5e-3)),
        *((DDPM(), 100, share) for share in (5e-4, 5e-3)),
        *thorough((DDPM(), 100, 2e-3), *((DDIM(), 100, share) for share in (5e-4, 2e-3, 5e-3))),
    ],
    ids=str,
)
def test_rows_are_about_those_of_an_exact_network(step, length, share):
    """Updates that rounding keeps from falling are not waited for, and what they leave is certified, or said."""
    schedule, window = TRAINING.take(length), Window(size=12)
    rows = []
    for network in (exact, coarse(share)):
        evaluations = 0
        for seed in range(2):
            noise = noise_for(1, length, seed=seed)
            with torch.no_grad():
                loop = sample(network, schedule, noise, step=step, solver=deeppcr.Loop())
            states, outcome, _ = run(Slid, network, step.steps(schedule), noise, window)
            error, limit = float((states[-1] - loop.final).abs().max()), 4e-3
            if outcome.results != [Result.CONVERGED]:
                assert outcome.results == [Result.PRECISION_FLOOR]
                limit = float(outcome.least)
            assert error <= limit
            evaluations += int(outcome.evaluations)
        rows.append(evaluations)
    assert rows[1] <= 1.5 * rows[0]


@pytest.mark.parametrize("share", [2e-4, 2e-3])
def test_what_a_network_rounds_is_seen(share):
    """The largest of all differences between two outputs; no less than its dtype says."""
    seen = Problem(coarse(share), DDIM().steps(TRAINING.take(50)), noise_for(1, 50)).rounding
    assert seen.shape == (50,)
    assert seen.min() >= max(TF32, 0.8 * 2 * share)
    assert seen.max() <= max(TF32, 2 * 2 * share)


def test_exact_networks_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(Problem, "eps", property(lambda problem: torch.finfo(torch.float32).eps))
    calls = []
    problem = Problem(lambda z, t: calls.append(z) or exact(z, t), DDIM().steps(TRAINING.take(50)), noise_for(1, 50))
    assert problem.rounding.tolist() == [0.0] * 50
    assert not calls


def two_steps_back(length):
    """A sampler like DPM-Solver: it keeps its last estimate of the clean sample, which is hundreds in its first steps."""
    plain = DDIM().steps(TRAINING.take(length))
    signal, spread = plain.signal, plain.spread
    after = torch.cat([signal[1:], torch.ones(1)])
    part = -0.2 * after * (1 - (signal / after).square()) * (torch.arange(length) > 0)
    keep, gain = torch.zeros(length, 2, 2, dtype=torch.float64), torch.zeros(length, 2, dtype=torch.float64)
    keep[:, 1, 0], gain[:, 1] = 1 / signal, -spread / signal
    keep[:, 0, 0], keep[:, 0, 1] = plain.keep[:, 0, 0] - part / signal, part
    gain[:, 0] = plain.gain[:, 0] + part * spread / signal
    return Steps(plain.timesteps, keep, gain, signal, spread)


@pytest.mark.parametrize("share", [0, 5e-4, 2e-3])
def test_what_a_sampler_keeps_does_not_hide_its_sample(share):
    steps, network = two_steps_back(50), coarse(share)
    assert float(steps.gain[:, 1].abs().max()) > 100
    for seed in range(3):
        noise = Noise(noise_for(1, 50, seed=seed).initial)
        with torch.no_grad():
            loop = sample(network, steps, noise, solver=deeppcr.Loop())
        states, outcome, _ = run(Slid, network, steps, noise, Window(size=12))
        assert float((states[-1] - loop.final).abs().max()) <= max(4e-3, float(outcome.least))
        assert float(outcome.least) <= 4e-2


def test_units_of_slots_change_no_digit_of_the_loop(monkeypatch):
    steps, noise = two_steps_back(50), Noise(noise_for(2, 50).initial)
    balanced = steps.balanced()
    assert float(balanced.gain[:, 1].abs().max()) < 0.1 * float(steps.gain[:, 1].abs().max())
    with torch.no_grad():
        found = sample(exact, steps, noise, solver=deeppcr.Loop()).final
        monkeypatch.setattr(Steps, "balanced", lambda steps: steps)
        assert torch.equal(sample(exact, steps, noise, solver=deeppcr.Loop()).final, found)
        assert torch.equal(sample(exact, balanced, noise, solver=deeppcr.Loop()).final, found)


@pytest.mark.parametrize("share", [3e-4, 2e-3])
def test_nobody_goes_back_for_what_a_network_rounds(share, monkeypatch):
    """However much it grows: the loop rounds as much. It is said."""
    grown = 60 ** torch.linspace(1, 0, 50).unsqueeze(-1)
    monkeypatch.setattr(SlidingIteration, "grown", lambda iteration: grown)
    steps, noise = DDIM().steps(TRAINING.take(50)), Noise(noise_for(1, 50).initial)
    _, outcome, kept = run(Slid, coarse(share), steps, noise, Window(size=12))
    assert kept.iteration.bound < 1e-3
    assert kept.returned == 0
    assert int(outcome.evaluations) < 4 * 50
    assert outcome.results == [Result.PRECISION_FLOOR]
    assert float(outcome.least) > 20 * share * 0.1


def test_an_exact_network_goes_back(monkeypatch):
    monkeypatch.setattr(Problem, "eps", property(lambda problem: torch.finfo(torch.float32).eps))
    monkeypatch.setattr(SlidingIteration, "grown", lambda iteration: torch.full_like(iteration.growth, 300.0))
    steps, noise = DDIM().steps(TRAINING.take(50)), Noise(noise_for(1, 50).initial)
    assert run(Slid, exact, steps, noise, Window(size=12))[2].returned == 1


@pytest.fixture
def graphs(monkeypatch):
    for module in (looped, planned, prepared):
        monkeypatch.setattr(module, "Replayed", Kept)
    monkeypatch.setattr(Window, "no_graphs", lambda self, problem: None)
    return Clock(monkeypatch, COSTS["as of a UNet of real size"])


@pytest.mark.parametrize("length", [50, 100])
def test_a_coarse_network_is_sampled_by_a_window(graphs, length):
    network = coarse(3e-3)
    denoiser = graphs.network(network)
    plain = length * graphs.cost(1)
    with torch.no_grad():
        for seed in range(3):
            noise = Noise(noise_for(1, length, seed=seed).initial)
            loop = sample(network, TRAINING.take(length), noise, step=DDIM(), solver=deeppcr.Loop())
            begun = graphs.now
            found = sample(denoiser, TRAINING.take(length), noise, step=DDIM(), solver=AUTO)
            took = graphs.now - begun
            assert (found.final - loop.final).abs().max() <= 4e-3
    assert found.result in (Result.CONVERGED, Result.PRECISION_FLOOR)
    assert took < plain / 1.6


def test_rounding_that_the_loop_has_too_is_no_reason_to_take_it(graphs):
    """A tolerance that is far below it is said not to be met."""
    schedule, noise = TRAINING.take(100), Noise(noise_for(1, 100).initial)
    network, tight = graphs.network(coarse(3e-3)), Window(size="auto", tolerance=1e-4)
    with torch.no_grad():
        for _ in range(3):
            found = sample(network, schedule, noise, step=DDIM(), solver=tight)
            assert found.result is Result.PRECISION_FLOOR


def test_where_far_more_is_left_than_by_the_loop_it_is_taken(graphs, monkeypatch):
    """From the first call on; who asks for a window has one."""
    network, schedule, noise = coarse(1e-3), TRAINING.take(100), Noise(noise_for(1, 100).initial)
    denoiser = graphs.network(network)
    with torch.no_grad():
        loop = sample(network, schedule, noise, step=DDIM(), solver=deeppcr.Loop())
        monkeypatch.setattr(Rounding, "least", lambda rounding, size, grown: (1e6 * size[-1], 1e-3 * size[-1]))
        for _ in range(2):
            found = sample(denoiser, schedule, noise, step=DDIM(), solver=AUTO)
            assert found.result is Result.LOOP
            assert torch.equal(found.final, loop.final)
            assert "the loop's own rounding as" in str(found.plan)
        with pytest.warns(deeppcr.ConvergenceWarning):
            asked = sample(network, schedule, noise, step=DDIM(), solver=Window(size=12))
    assert asked.result is Result.PRECISION_FLOOR


def test_rounding_is_looked_at_again_where_weights_have_changed():
    network = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)

    def denoiser(z, t):
        out = network(z.flatten(1))
        return (out + 0.01 * out.abs().amax() * torch.sin(1e6 * z.flatten(1))).view_as(z)

    def seen():
        return Problem(denoiser, DDIM().steps(TRAINING.take(50)), noise_for(1, 50)).rounding

    before = seen()
    assert torch.equal(seen(), before)
    network.weight.mul_(30)
    assert (seen() > 5 * before).all()
