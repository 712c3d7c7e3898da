"""Sampling in parallel equals the loop: samplers, Jacobians, lengths, batches, with classes and without."""

import sys
import warnings

import pytest
import torch

import deeppcr
from compiling import compiled_and_counted
from deeppcr import Newton, Result
from deeppcr.diffusion import (
    DDIM,
    DDPM,
    CoarseStart,
    DiagonalPart,
    GaussianPrior,
    MeanStart,
    Noise,
    Schedule,
    Steps,
    Window,
    sample,
)
from deeppcr.diffusion.coupling import Coupling
from deeppcr.diffusion.problem import Problem
from deeppcr.diffusion.start import as_start
from diffusion import digits
from kernel_support import pairwise, thorough

JACOBIANS = {
    "prior": {"jacobian": "prior"},
    "scalar prior": {"jacobian": GaussianPrior(0.3)},
    "prior by Newton": {"jacobian": "prior", "solver": Newton()},
    "dense": {"solver": Newton(chunk=1)},
    "diagonal": {"solver": Newton(max_iterations=300), "jacobian": DiagonalPart()},
    "Hutchinson": {"solver": Newton(max_iterations=300), "jacobian": deeppcr.HutchinsonJacobian(samples=8)},
}


def noise_for(samples, length, dtype=torch.float32, seed=0, device="cpu"):
    drawn = Noise.draw((samples, 1, 8, 8), length, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return Noise(drawn.initial.to(device), drawn.steps.to(device))


def both(net, noise, length, step, conditional, device, solver=Window(), **settings):
    """By the loop, and in parallel: what is fastest for networks as small as this one, on a GPU, is another matter."""
    classes = torch.arange(noise.samples, device=device) % 10 if conditional else None
    if settings.get("jacobian") == "prior":
        settings["jacobian"] = digits.prior()
    given = (net, digits.TRAINING.take(length), noise)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", deeppcr.ConvergenceWarning)
        loop = sample(*given, step=step, classes=classes, solver=deeppcr.Loop())
        return loop, sample(*given, step=step, classes=classes, solver=solver, **settings)


@pytest.mark.parametrize("length", [1, 50, *thorough(2, 200)])
@pairwise(name=JACOBIANS.keys(), samples=[1, 5], step=[DDPM(), DDIM()])
def test_parallel_equals_the_loop_without_falling_back(net, name, samples, length, step, device):
    if length == 200 and name in ("dense", "diagonal") and samples == 5:
        samples = 2  # 200 full Jacobians a sample and iteration
    noise = noise_for(samples, length, device=device)
    conditional = (samples == 5) == (length in (2, 50))
    loop, found = both(net, noise, length, step, conditional, device, **JACOBIANS[name])
    assert found.result in (Result.CONVERGED, Result.PRECISION_FLOOR)
    assert (found.final - loop.final).abs().max() <= 1e-3
    assert found.iterations.shape == found.evaluations.shape == found.residual.shape == (samples,)


@pytest.mark.parametrize(("samples", "conditional"), [(1, False), (5, True), *thorough((1, True), (5, False))])
@pytest.mark.parametrize(
    "step", [DDPM(), DDIM(), DDIM(eta=0.5), DDPM(variance="small"), DDPM(clip=1.0), DDIM(clip=0.9)], ids=repr
)
def test_tight_tolerances_are_met_in_double_precision(net, step, samples, conditional, device):
    try:
        noise = noise_for(samples, 50, torch.float64, device=device)
        loop, found = both(net.double(), noise, 50, step, conditional, device, jacobian="prior")
    finally:
        net.float()
    assert found.result is Result.CONVERGED
    assert (found.final - loop.final).abs().max() <= 1e-8


@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
@pytest.mark.parametrize("length", [1, 2, 200])
def test_every_prediction_with_its_own_prior(prediction, length, device):
    """An ideal denoiser of Gaussian data: the prior is its Jacobian, and one update is all it takes."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    covariance, mean = mixing @ mixing.T / 6, torch.randn(6, dtype=torch.float64, generator=generator)
    schedule = Schedule.linear(200)
    bars, eye = schedule.alphas_bar.to(device), torch.eye(6, dtype=torch.float64, device=device)
    covariance, mean = covariance.to(device), mean.to(device)

    def ideal(z, t):
        bar = bars[t][:, None, None]
        inverse = torch.linalg.inv(bar * covariance + (1 - bar) * eye)
        centred = (z - bar.squeeze(-1).sqrt() * mean).unsqueeze(-1)
        x0 = mean + (bar.sqrt() * covariance @ inverse @ centred).squeeze(-1)
        eps = ((1 - bar).sqrt() * inverse @ centred).squeeze(-1)
        bar = bar.squeeze(-1)
        return {"x0": x0, "epsilon": eps, "v": bar.sqrt() * eps - (1 - bar).sqrt() * x0}[prediction]

    noise = Noise.draw((3, 6), length, dtype=torch.float64, generator=generator)
    noise = Noise(noise.initial.to(device), noise.steps.to(device))
    given = (ideal, schedule.take(length), noise)
    prior = GaussianPrior.from_covariance(covariance, mean)
    with torch.no_grad():
        loop = sample(*given, prediction=prediction, solver=deeppcr.Loop())
        found = sample(*given, prediction=prediction, jacobian=prior, solver=Window(size=length))
    assert (found.final - loop.final).abs().max() <= 1e-9
    assert int(found.iterations.max()) <= 2  # it starts from the solution already


def test_the_prior_needs_at_most_seven_tenths_of_picards_iterations(net, device):
    noise = noise_for(3, 200, device=device)
    counts = {}
    for name, jacobian in (("prior", digits.prior()), ("picard", deeppcr.ScalarJacobian(1.0))):
        window = Window(size=200, accelerate=False, max_iterations=400)
        start = MeanStart(digits.data()[0].mean(0))
        _, found = both(net, noise, 200, DDPM(), False, device, jacobian=jacobian, solver=window, start=start)
        counts[name] = found.iterations.double().mean()
    assert counts["prior"] <= 0.7 * counts["picard"], counts


def test_acceleration_and_a_good_start_save_iterations(net, device):
    noise = noise_for(4, 200, device=device)

    def mean_iterations(start=None, **settings):
        window = Window(size=200, **settings)
        _, found = both(net, noise, 200, DDPM(), False, device, jacobian="prior", solver=window, start=start)
        return float(found.iterations.double().mean())

    plain = mean_iterations(accelerate=False)
    assert mean_iterations() < plain
    assert mean_iterations() <= mean_iterations(start=MeanStart(digits.data()[0].mean(0)))


def test_starts(net, device):
    noise = noise_for(5, 100, device=device)
    images, labels = digits.data()
    means = torch.stack([images[labels == k].mean(0) for k in range(10)])
    loop, first = both(net, noise, 100, DDPM(), True, device, jacobian="prior", keep_states=True)
    for start in (MeanStart(images.mean(0)), MeanStart(means), CoarseStart(stride=8, sweeps=3), first, first.states):
        _, found = both(net, noise, 100, DDPM(), True, device, jacobian="prior", start=start)
        assert (found.final - loop.final).abs().max() <= 1e-3
        if start is first:
            assert int(found.iterations.max()) < int(first.iterations.max())
    _, coarse = both(net, noise, 100, DDPM(), True, device, jacobian="prior", start=CoarseStart(stride=8, sweeps=3))
    rows = 3 * 14  # every eighth of 100 steps, and the last
    assert int(coarse.evaluations.min()) > rows


@pytest.mark.parametrize("step", [DDPM(), DDIM()], ids=["ddpm", "ddim"])
def test_earlier_samples_are_a_start_for_the_same_and_for_similar_ones(net, step, device):
    """Of the same problem one iteration bears them out; with other guidance they save some work; the result is the loop's."""
    noise, classes = noise_for(3, 60, device=device), torch.tensor([1, 2, 3], device=device)
    given = {"step": step, "classes": classes, "unconditional": digits.NOTHING, "jacobian": digits.prior()}

    def run(guidance, solver=Window(), **settings):
        with torch.no_grad():
            return sample(net, digits.TRAINING.take(60), noise, guidance=guidance, solver=solver, **(given | settings))

    first = run(2.0, keep_states=True)
    assert run(2.0, start=first, solver=Window(size=60)).iterations.tolist() == [1, 1, 1]
    cold, warm = run(2.05), run(2.05, start=first)
    assert warm.evaluations.sum() < 0.95 * cold.evaluations.sum()
    assert (warm.final - run(2.05, solver=deeppcr.Loop()).final).abs().max() <= 1e-3
    newton = run(2.05, start=first, solver=Newton())
    assert (newton.final - warm.final).abs().max() <= 1e-3


def test_what_was_returned_unfinished_goes_on_from_there(net, device):
    noise, schedule = noise_for(2, 60, device=device), digits.TRAINING.take(60)
    given = {"jacobian": digits.prior(), "keep_states": True}
    with torch.no_grad():
        cold = sample(net, schedule, noise, solver=Window(), **given)
        with pytest.warns(deeppcr.ConvergenceWarning, match="not to be trusted"):
            part = sample(net, schedule, noise, solver=Window(max_iterations=5), on_failure="return", **given)
        rest = sample(net, schedule, noise, start=part, solver=Window(), **given)
    assert rest.result is Result.CONVERGED
    assert int(rest.iterations.max()) < int(cold.iterations.max())
    assert (rest.final - cold.final).abs().max() <= 1e-3


@pytest.mark.parametrize("step", [DDPM(), DDIM()], ids=["ddpm", "ddim"])
def test_small_variances_of_the_data_are_better_not_taken_at_their_word(net, step, device):
    """Digits have blank corners: the network has not learned that nothing is there as exactly as the covariance says it."""
    noise, full = noise_for(3, 100, device=device), digits.prior()
    raised = GaussianPrior(full.variance.clamp(min=0.1), full.basis, full.mean)

    def iterations(prior):
        _, found = both(net, noise, 100, step, False, device, jacobian=prior, solver=Window(size=100))
        return found.iterations.double().mean()

    assert iterations(raised) <= 0.85 * iterations(full)


def test_a_coarse_start_lies_closer_than_that_of_the_prior_alone(net, device):
    noise = noise_for(3, 200, device=device)
    problem = Problem(net, DDPM().steps(digits.TRAINING), noise)
    coupling = Coupling(digits.prior(), problem.steps, problem.width, problem.device, problem.dtype)
    with torch.no_grad():
        loop = sample(net, digits.TRAINING, noise, solver=deeppcr.Loop(), keep_states=True).states.flatten(2)
        off = []
        for start in (None, CoarseStart(stride=8, sweeps=6)):
            start = as_start(start)
            states, _ = start.prepare(problem, digits.prior()).states(problem, coupling, problem.network)
            off.append(float((states[..., 0] - loop).abs().mean()))
    assert off[1] < 0.3 * off[0], off


def test_samples_do_not_depend_on_their_company(net, device):
    noise = noise_for(5, 60, device=device)
    alone = Noise(noise.initial[3:4], noise.steps[:, 3:4])
    _, together = both(net, noise, 60, DDPM(), False, device, jacobian="prior")
    _, single = both(net, alone, 60, DDPM(), False, device, jacobian="prior", solver=Window(size=13))
    assert (together.final[3] - single.final[0]).abs().max() <= 1e-3


def test_guidance_is_one_call_with_doubled_rows(net, device):
    calls = []

    def watched(z, t, classes):
        calls.append(len(z))
        return net(z, t, classes)

    noise, classes = noise_for(2, 40, device=device), torch.tensor([3, 7], device=device)
    guided = {"classes": classes, "guidance": 2.5, "unconditional": digits.NOTHING}
    with torch.no_grad():
        loop = sample(watched, digits.TRAINING.take(40), noise, step=DDIM(), solver=deeppcr.Loop(), **guided)
        assert calls == [4] * 40
        calls.clear()
        guided |= {"jacobian": digits.prior(), "solver": Window(size=32, tf32=None)}
        found = sample(watched, digits.TRAINING.take(40), noise, step=DDIM(), **guided)
        checks = [calls.pop(0), *calls[1:19]]  # what the network computes in, and whether rows influence each other
        del calls[1:19]
        assert calls[0] == 2 * 2 * 32
        assert checks == [2 * 8, 2 * 9, 2 * 8] + [2] * 16
        assert len(calls) == int(found.iterations.max())
        assert sum(calls) == int(found.evaluations.sum())

        def by_hand(z, t):
            none = net(z, t, torch.full_like(t, digits.NOTHING))
            return none + 2.5 * (net(z, t, classes.repeat(len(z) // 2)) - none)

        expected = sample(by_hand, digits.TRAINING.take(40), noise, step=DDIM(), solver=deeppcr.Loop())
    assert torch.allclose(loop.final, expected.final, atol=1e-5)
    assert (found.final - loop.final).abs().max() <= 1e-3


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("length", [1, 3, 20, *thorough(60)])
def test_samplers_that_remember(net, slots, length, device):
    """A made-up multistep sampler: the gap to DDIM's next sample is extrapolated from earlier outputs."""
    schedule = digits.TRAINING.take(length)
    plain = DDIM().steps(schedule)
    weights = {2: [1.5, -0.5], 3: [23 / 12, -16 / 12, 5 / 12]}[slots]
    keep, gain = torch.zeros(length, slots, slots), torch.zeros(length, slots)
    keep[:, 0, 0] = plain.keep[:, 0, 0]
    for back in range(1, slots):
        keep[:, 0, back] = weights[back] * plain.gain[:, 0]
        if back > 1:
            keep[:, back, back - 1] = 1
    gain[:, 0], gain[:, 1] = weights[0] * plain.gain[:, 0], 1
    steps = Steps(plain.timesteps, keep, gain, plain.signal, plain.spread)
    initial = noise_for(3, 1, torch.float64, device=device).initial
    net = net.double()
    try:
        with torch.no_grad():
            z, earlier = initial, [torch.zeros_like(initial)] * (slots - 1)
            for l in range(length):
                outputs = [net(z, plain.timesteps[l].to(device).expand(3)), *earlier]
                mixed = sum(weight * out for weight, out in zip(weights, outputs, strict=True))
                z = float(plain.keep[l]) * z + float(plain.gain[l]) * mixed
                earlier = outputs[: slots - 1]
            loop = sample(net, steps, initial, solver=deeppcr.Loop())
            assert torch.allclose(loop.final, z, atol=1e-5)  # the coefficients above are float32
            for solver in (Window(), Window(size=17), Newton()):
                found = sample(net, steps, initial, jacobian=digits.prior(), solver=solver)
                assert found.result is Result.CONVERGED
                assert (found.final - loop.final).abs().max() <= 1e-8
    finally:
        net.float()


def test_half_precision_stays_with_the_network(net, device):
    noise = noise_for(2, 30, torch.bfloat16, device=device)
    seen = set()

    def half(z, t):
        seen.add(z.dtype)
        return net(z.float(), t).to(z.dtype)

    with torch.no_grad():
        loop = sample(half, digits.TRAINING.take(30), noise, solver=deeppcr.Loop())
        found = sample(half, digits.TRAINING.take(30), noise, jacobian=digits.prior(), solver=Window(tolerance=0.1))
    assert seen == {torch.bfloat16}
    assert found.final.dtype == torch.bfloat16
    assert (found.final - loop.final).abs().max() <= 0.1


def test_states_on_request(net, device):
    noise = noise_for(2, 30, device=device)
    loop, found = both(net, noise, 30, DDPM(), False, device, jacobian="prior", keep_states=True)
    assert found.states.shape == (30, 2, 1, 8, 8)
    assert torch.equal(found.states[-1], found.final)
    assert loop.states is None
    assert "CONVERGED" in repr(found)
    assert Result.FINISHED_BY_LOOP not in found.results


def test_a_schedule_that_was_changed_in_place_is_seen(device):
    schedule, noise = Schedule.linear(10), noise_for(1, 10, device=device)
    with torch.no_grad():
        before = sample(lambda z, t: 0.5 * z, schedule, noise, solver=Window()).final
        assert torch.equal(sample(lambda z, t: 0.5 * z, schedule, noise, solver=Window()).final, before)
        schedule.alphas_bar.mul_(0.5)
        after = sample(lambda z, t: 0.5 * z, schedule, noise, solver=Window()).final
        fresh = sample(lambda z, t: 0.5 * z, Schedule(schedule.alphas_bar.clone()), noise, solver=Window()).final
    assert torch.equal(after, fresh)
    assert not torch.allclose(after, before)


@pytest.mark.parametrize("solver", [Window(), Newton(), deeppcr.Loop()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("trained", [False, True])
def test_final_samples_do_not_keep_the_others_alive(solver, trained):
    """A view of the last state would hold the memory of all steps; where they are asked for it may."""
    weight = torch.tensor(0.9, requires_grad=trained)
    given = (lambda z, t: weight * z, Schedule.linear(20), torch.ones(2, 3))
    final = sample(*given, step=DDIM(), solver=solver).final
    assert final.requires_grad == trained
    assert final.untyped_storage().nbytes() == final.nbytes
    found = sample(*given, step=DDIM(), solver=solver, keep_states=True)
    assert torch.equal(found.states[-1], final)


def test_a_schedule_keeps_the_numbers_of_a_few_samplers(monkeypatch):
    """As many as there are etas, say, would be a leak."""
    module = sys.modules["deeppcr.diffusion.sample"]  # the name is also that of the function
    monkeypatch.setattr(module, "_MOST_KNOWN", 2)
    schedule = Schedule.linear(5)
    for eta in (0.0, 0.1, 0.2, 0.1):
        step, noise = DDIM(eta=eta), Noise.draw((1, 3), steps=5, generator=torch.Generator().manual_seed(0))
        found = sample(lambda z, t: 0.5 * z, schedule, noise, step=step, solver=deeppcr.Loop())
        assert len(module._known[schedule]) <= 2
        fresh = sample(lambda z, t: 0.5 * z, step.steps(schedule), noise, solver=deeppcr.Loop())
        assert torch.equal(found.final, fresh.final)


@pytest.mark.parametrize("solver", [Window(size=16), Newton()], ids=["window", "Newton"])
def test_a_compiled_denoiser_is_compiled_for_rows_of_many_steps(solver, net, device):
    """Its operations are watched in its first call, and PyTorch never compiles what it first met while somebody watched."""
    compiled, graphs = compiled_and_counted(lambda z, t: net(z, t))
    schedule, noise = Schedule.linear(1000).take(40), noise_for(2, 40, device=device).initial
    with torch.no_grad():
        found = sample(compiled, schedule, noise, step=DDIM(), solver=solver)
    assert (found.final - sample(net, schedule, noise, step=DDIM(), solver=deeppcr.Loop()).final).abs().max() < 1e-3
    assert graphs
