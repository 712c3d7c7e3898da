"""The way that is fastest: what is chosen from what rows cost, and that every way gives the loop's sample. Graphs are stood in for."""

from contextlib import nullcontext

import pytest
import torch

import deeppcr
from deeppcr import Result
from deeppcr.diffusion import DDIM, DDPM, Noise, Window, sample
from deeppcr.diffusion.problem import Problem
from deeppcr.diffusion.window import looped, planned, prepared
from deeppcr.diffusion.window.forecast import SIZES, Forecast
from deeppcr.graphs.cache import prepared_samplers
from diffusion import digits
from diffusion.test_sample import noise_for

AUTO = Window(size="auto")


class Clock:
    """Time as the test has it: every call of the network takes what its rows cost."""

    def __init__(self, monkeypatch, cost):
        self.cost = cost
        self.hand = torch.zeros(2, dtype=torch.float64)  # what a tensor holds makes no other kind of run
        monkeypatch.setattr(looped.time, "perf_counter", lambda: self.now)

    @property
    def now(self):
        return float(self.hand[0])

    def pass_by(self, rows):
        self.hand += self.cost(rows)

    def network(self, net):
        def timed(z, t, *more):
            self.pass_by(len(z))
            return net(z, t, *more)

        return timed


class Kept:
    """Stands for CUDA graphs: what was called before is known, and called again."""

    def __init__(self, device):
        self.known, self.refusal = set(), None

    def turn(self):
        return nullcontext()

    def knows(self, function, *key):
        return (function.__name__, *key) in self.known

    def __call__(self, function, *key):
        self.known.add((function.__name__, *key))
        function(*key)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    deeppcr.clear_caches()
    for module in (looped, planned, prepared):
        monkeypatch.setattr(module, "Replayed", Kept)
    monkeypatch.setattr(Window, "no_graphs", lambda self, problem: None)
    yield
    deeppcr.clear_caches()


@pytest.fixture(scope="module")
def net():
    return digits.trained()


COSTS = {
    "rows are dear": lambda rows: 2e-3 * rows,
    "as of a UNet of real size": lambda rows: 2.5e-3 + 1.2e-4 * rows,
    "rows cost nothing": lambda rows: 1e-4,
}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(
    ("step", "samples", "length"), [(DDPM(), 1, 120), (DDIM(), 2, 50), (DDPM(clip=1.0), 1, 30), (DDIM(), 1, 6)], ids=str
)
def test_every_way_gives_the_sample_of_the_loop_and_never_takes_longer(net, cost, step, samples, length, monkeypatch):
    clock = Clock(monkeypatch, COSTS[cost])
    denoiser = clock.network(net)
    schedule, took = digits.TRAINING.take(length), []
    with torch.no_grad():
        for seed in range(4):
            noise = noise_for(samples, length, seed=seed)
            loop = sample(net, schedule, noise, step=step, solver=deeppcr.Loop())
            begun = clock.now
            found = sample(denoiser, schedule, noise, step=step, solver=AUTO)
            took.append(clock.now - begun)
            assert found.result in (Result.CONVERGED, Result.LOOP)
            assert (found.final - loop.final).abs().max() <= 1e-3
    said, plain = str(found.plan), length * COSTS[cost](samples)
    assert took[0] <= 2.5 * plain + 40 * COSTS[cost](1)  # the checks of rows
    assert took[-1] <= 1.01 * plain
    assert "expected: the loop in a CUDA graph" in said
    if cost == "rows are dear" or length == 6:
        assert found.result is Result.LOOP
        assert "one step after the other, in a CUDA graph" in said
    elif cost == "as of a UNet of real size" and length > 40:
        assert "which is expected to be fastest" in said
        assert took[-1] <= plain / (2 if samples == 1 else 1.3)
    elif length > 40:
        assert "all steps at once" in said


def test_a_window_that_does_not_pay_gives_way_to_the_loop(net, monkeypatch):
    """Of a network that is known to need few rows, and then needs many."""
    clock = Clock(monkeypatch, COSTS["as of a UNet of real size"])
    wild = torch.zeros(2)

    def denoiser(z, t):
        clock.pass_by(len(z))
        return 5 * torch.sin(40 * z) if wild[0] else net(z, t)

    schedule, noise = digits.TRAINING.take(100), noise_for(1, 100)
    with torch.no_grad():
        assert sample(denoiser, schedule, noise, solver=AUTO).result is Result.CONVERGED
        kept = prepared_samplers.values()[0]
        wild[0] = 1
        monkeypatch.setattr(prepared, "Hashed", lambda *_: "the same")
        prepared_samplers.put("the same", kept)
        begun = clock.now
        found = sample(denoiser, schedule, noise, solver=AUTO)
        loop = sample(denoiser, schedule, noise, solver=deeppcr.Loop())
    assert "took all steps again" in str(found.plan)
    assert found.result is Result.LOOP
    assert torch.equal(found.final, loop.final)
    assert clock.now - begun < 2.5 * 100 * clock.cost(1)
    assert kept.forecast.best() is None  # the next run does not try


def test_memory_that_runs_out_halves_the_window(net, monkeypatch):
    clock = Clock(monkeypatch, COSTS["as of a UNet of real size"])
    most = torch.full((2,), 1000)

    def denoiser(z, t):
        if len(z) > most[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        clock.pass_by(len(z))
        return net(z, t)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    schedule, noise = digits.TRAINING.take(200), noise_for(2, 200)
    with torch.no_grad():
        loop = sample(net, schedule, noise, solver=deeppcr.Loop())
        most[0] = 20
        for solver in (AUTO, Window(size=32)):
            found = sample(denoiser, schedule, noise, solver=solver)
            assert "memory ran out, and the window was halved" in str(found.plan)
            assert found.result is Result.CONVERGED
            assert (found.final - loop.final).abs().max() <= 1e-3
        most[0] = 1
        with pytest.raises(torch.OutOfMemoryError):
            sample(denoiser, schedule, noise, solver=Window(size=32))


def test_classes_and_guidance_are_planned_alike(net, monkeypatch):
    clock = Clock(monkeypatch, COSTS["as of a UNet of real size"])
    denoiser, schedule = clock.network(net), digits.TRAINING.take(100)
    with torch.no_grad():
        for seed in range(3):
            classes = torch.tensor([seed, 9 - seed])
            more = {"classes": classes, "guidance": 1.5, "unconditional": digits.NOTHING}
            noise = noise_for(2, 100, seed=seed)
            loop = sample(net, schedule, noise, solver=deeppcr.Loop(), **more)
            found = sample(denoiser, schedule, noise, solver=AUTO, **more)
            assert found.result is Result.CONVERGED
            assert (found.final - loop.final).abs().max() <= 1e-3
    assert int(found.evaluations.min()) % 2 == 0
    assert int(found.evaluations.max()) < 2 * 4 * 100


def test_a_denoiser_that_cannot_be_recorded_takes_all_steps_at_once(net, monkeypatch):
    monkeypatch.setattr(Kept, "refusal", "a host waits", raising=False)
    monkeypatch.setattr(Kept, "__init__", lambda self, device: setattr(self, "known", set()))
    schedule, noise = digits.TRAINING.take(40), noise_for(1, 40)
    with torch.no_grad():
        found = sample(net, schedule, noise, solver=AUTO)
    assert "which keep a cpu busy" in str(found.plan)
    assert found.result is Result.CONVERGED


def test_the_loop_in_graphs_is_the_loop(net, monkeypatch):
    """Without a GPU: the same buffers and blocks of steps, none of them replayed."""
    Clock(monkeypatch, lambda rows: 0)
    for length, step in ((50, DDPM()), (33, DDIM()), (20, DDPM(clip=1.0))):
        schedule, noise = digits.TRAINING.take(length), noise_for(3, length)
        problem = Problem(net, step.steps(schedule), noise)
        loop = looped.GraphLoop(problem, Window().settings)
        monkeypatch.setattr(looped, "timed", lambda call, device: call() or 1e-4)
        with torch.no_grad():
            expected = sample(net, schedule, noise, step=step, solver=deeppcr.Loop(), keep_states=True)
            for _ in range(2):
                outcome = loop.outcome(problem)
        assert 1 < loop.at_once <= 16
        assert torch.equal(problem.unflatten(outcome.states[..., 0]), expected.states)
        assert outcome.evaluations.tolist() == [length] * 3
        half = problem.unflatten(loop.run(problem, 7, outcome.states[6])[..., 0])
        assert torch.equal(half[7:], expected.states[7:])


def test_a_loop_in_graphs_has_no_gradients_inside_and_those_of_the_loop_outside(net, monkeypatch):
    """A capture with gradients on would keep what every step computed, and the next replay change it."""
    for module in (looped, planned):
        monkeypatch.setattr(module, "timed", lambda call, device: call() or 1e-3)
    inside, grads = set(), []

    def denoiser(z, t):
        if len(z) == 2:
            inside.add(torch.is_grad_enabled())
        return net(z, t)

    noise, schedule = noise_for(2, 20), digits.TRAINING.take(20)
    with torch.no_grad():
        sample(denoiser, schedule, noise, solver=deeppcr.Loop(by="graph"))
    assert inside == {False}
    for solver in (deeppcr.Loop(), deeppcr.Loop(by="graph"), AUTO):
        leaf = noise.initial.clone().requires_grad_()
        sample(denoiser, schedule, Noise(leaf, noise.steps), solver=solver).final.square().sum().backward()
        grads.append(leaf.grad)
    assert torch.allclose(grads[1], grads[0], rtol=1e-3, atol=1e-4)
    assert torch.allclose(grads[2], grads[0], rtol=1e-3, atol=1e-3)


def test_a_loop_in_graphs_needs_a_gpu(net, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ValueError, match="needs a CUDA device, and the noise is on the cpu"):
        sample(net, digits.TRAINING.take(20), noise_for(1, 20), solver=deeppcr.Loop(by="graph"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loop_in_graphs_on_a_gpu(monkeypatch):
    monkeypatch.undo()
    net, noise = digits.trained().cuda(), noise_for(2, 50, device="cuda")
    with torch.no_grad():
        loop = sample(net, digits.TRAINING.take(50), noise, solver=deeppcr.Loop())
        for _ in range(2):
            found = sample(net, digits.TRAINING.take(50), noise, solver=deeppcr.Loop(by="graph"))
            assert found.result is Result.LOOP
            assert (found.final - loop.final).abs().max() <= 1e-4
    grads = []
    for solver in (deeppcr.Loop(), deeppcr.Loop(by="graph")):
        leaf = noise.initial.clone().requires_grad_()
        sample(net, digits.TRAINING.take(50), Noise(leaf, noise.steps), solver=solver).final.square().sum().backward()
        grads.append(leaf.grad)
    assert torch.allclose(*grads, rtol=1e-3, atol=1e-4)


def test_what_is_forecast():
    forecast = Forecast(1000, 1, step=2.5e-3)
    assert forecast.loop == pytest.approx(2.5)
    assert forecast.probe == 32
    assert Forecast(1000, 16).probe == 8
    assert Forecast(1000, 64).probe == min(SIZES)
    assert Forecast(6, 1).probe is None
    forecast.iterations[32] = 6e-3
    assert forecast.iteration(64) == pytest.approx(6e-3 + 32 * 3.5e-3 / 31)
    assert forecast.best() in (32, 64)
    assert not forecast.is_best_all_at_once(1000)
    forecast.evaluations[32] = 40.0
    assert forecast.best() is None
    forecast.all_at_once = 1.0
    assert forecast.is_best_all_at_once(1000)
    assert "all steps at once 1.00 s" in forecast.in_words()
    for length, tried in ((1000, True), (50, False)):  # a small network: 20 iterations would take 20 ms
        small = Forecast(length, 1, step=2e-4, iterations={16: 1e-3})
        assert small.is_best_all_at_once(length) is tried
