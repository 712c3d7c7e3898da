"""The window: what it evaluates, when steps leave it, what happens where it does not get there, and what it says of that."""

import warnings

import pytest
import torch

import deeppcr
from deeppcr import Result
from deeppcr.diffusion import (
    DDIM,
    DDPM,
    CoarseStart,
    GaussianPrior,
    GaussianStart,
    MeanStart,
    Noise,
    Schedule,
    Window,
    sample,
)
from deeppcr.diffusion.problem import Problem
from deeppcr.diffusion.window import prepared as window
from deeppcr.diffusion.window.iteration import Iteration, _least_squares
from diffusion import digits
from diffusion.test_sample import noise_for


@pytest.mark.parametrize("size", [1, 7, 33, 100])
def test_no_more_than_its_size_is_evaluated_and_every_row_once(net, size, device):
    seen = []

    def watched(z, t):
        seen.append(t)
        return net(z, t)

    noise = noise_for(3, 100, device=device)
    with torch.no_grad():
        loop = sample(net, digits.TRAINING.take(100), noise, solver=deeppcr.Loop())
        found = sample(
            watched,
            digits.TRAINING.take(100),
            noise,
            jacobian=digits.prior(),
            solver=Window(size=size, max_iterations=300, tf32=None),
        )
    checks = [seen.pop(0), *seen[1:19]]  # what the network computes in, and whether rows influence each other
    del seen[1:19]
    assert [len(t) for t in checks] == [8, 9, 8] + [1] * 16
    assert max(len(t) for t in seen) == 3 * size
    assert len(seen) == int(found.iterations.max())
    assert sum(len(t) for t in seen) == int(found.evaluations.sum())
    for t in seen:
        assert int(t.unique(return_counts=True)[1].max()) <= 3
    assert found.result is Result.CONVERGED
    assert (found.final - loop.final).abs().max() <= 1e-3
    if size == 1:  # the plain loop, in effect
        assert found.iterations.tolist() == [100] * 3


def test_finished_samples_are_no_longer_evaluated(net, device):
    """One sample starts from its solution: it takes fewer iterations and rows than the others."""
    noise = noise_for(3, 100, device=device)
    with torch.no_grad():
        loop = sample(net, digits.TRAINING.take(100), noise, solver=deeppcr.Loop(), keep_states=True)
        start = loop.states.clone()
        start[:, [0, 2]] = 0
        found = sample(
            net, digits.TRAINING.take(100), noise, jacobian=digits.prior(), start=start, solver=Window(size=100)
        )
    iterations, evaluations = found.iterations.tolist(), found.evaluations.tolist()
    assert iterations[1] == 1
    assert evaluations[1] == 100
    assert min(iterations[0], iterations[2]) > 3
    assert (found.final - loop.final).abs().max() <= 1e-3


def amplifying(z, t):
    """No denoiser: what it says of nearby samples differs wildly."""
    return 5 * torch.sin(40 * z)


def amplified_noise(device):
    drawn = Noise.draw((2, 4), 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return Noise(drawn.initial.to(device), drawn.steps.to(device))


def test_where_it_does_not_converge_the_loop_finishes_and_it_says_so(device):
    noise = amplified_noise(device)
    given = (amplifying, Schedule.linear(50), noise)
    solver = Window(max_iterations=5)
    with torch.no_grad():
        loop = sample(*given, solver=deeppcr.Loop())
        with pytest.warns(
            deeppcr.ConvergenceWarning, match=r"stopped with \d+ of 50 steps finished; the rest was"
        ) as caught:
            found = sample(*given, solver=solver)
        assert caught[0].filename == __file__
        assert found.result is Result.FINISHED_BY_LOOP
        assert set(found.results) == {Result.FINISHED_BY_LOOP}
        assert (found.final - loop.final).abs().max() <= 1e-8 * loop.final.abs().max()
        assert int(found.exact_steps.min()) >= 5
        assert int(found.evaluations.min()) > 5 * 5 + 40
        with pytest.raises(deeppcr.ConvergenceError, match="steps finished"):
            sample(*given, solver=solver, on_failure="raise")
    leaf = noise.initial.clone().requires_grad_()
    with pytest.warns(deeppcr.ConvergenceWarning, match="not to be trusted"):
        found = sample(amplifying, Schedule.linear(50), Noise(leaf, noise.steps), solver=solver, on_failure="return")
    with pytest.raises(RuntimeError, match="did not converge"):
        found.final.sum().backward()


def test_it_reaches_the_loops_result_however_slowly(device):
    """Every iteration finishes a step at least."""
    noise = amplified_noise(device)
    with torch.no_grad():
        loop = sample(amplifying, Schedule.linear(50), noise, solver=deeppcr.Loop())
        found = sample(amplifying, Schedule.linear(50), noise, solver=Window())
    assert found.result is Result.PRECISION_FLOOR  # of what rounding leaves, 1e-8 cannot be certified
    assert int(found.iterations.max()) <= 50
    assert (found.final - loop.final).abs().max() <= 1e-8 * loop.final.abs().max()


def test_only_the_samples_that_failed_are_finished_by_the_loop(device):
    rows = []

    def mixed(z, t, classes):
        rows.append(len(z))
        return torch.where(classes[:, None] == 1, amplifying(z, t), 0.9 * z)

    noise = Noise.draw((3, 4), 40, dtype=torch.float64, device=device)
    classes = torch.tensor([0, 1, 0], device=device)
    with torch.no_grad(), pytest.warns(deeppcr.ConvergenceWarning, match="sample 1; 1 of 3 samples"):
        found = sample(mixed, Schedule.linear(40), noise, classes=classes, solver=Window(max_iterations=20))
    assert [result is Result.FINISHED_BY_LOOP for result in found.results] == [False, True, False]
    assert rows[-1] == 1
    with torch.no_grad():
        loop = sample(mixed, Schedule.linear(40), noise, classes=classes, solver=deeppcr.Loop())
    assert (found.final - loop.final).abs().max() <= 1e-8 * loop.final.abs().max()


def test_a_value_that_is_not_finite_is_named(net, device):
    def broken(z, t):
        return torch.where((t == 80)[:, None, None, None], float("nan"), net(z, t))

    noise = noise_for(2, 100, device=device)
    with torch.no_grad():
        with pytest.warns(deeppcr.ConvergenceWarning, match=r"not finite at step 60 \(t = 80\)"):
            found = sample(broken, digits.TRAINING.take(100), noise, jacobian=digits.prior())
        assert found.result is Result.NON_FINITE
        with pytest.warns(deeppcr.ConvergenceWarning, match="not finite"):
            assert sample(broken, digits.TRAINING.take(100), noise, solver=deeppcr.Loop()).result is Result.NON_FINITE


def test_a_stray_value_that_is_not_finite_spoils_nothing(net, device):
    """Far from the solution the network overflows; on it, it does not."""
    noise = noise_for(2, 60, device=device)
    start = torch.full((60, 2, 1, 8, 8), 50.0, device=device)

    def fragile(z, t):
        far = (z.abs() > 20).flatten(1).any(1)[:, None, None, None]
        return torch.where(far, float("inf"), net(z, t))

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        loop = sample(net, digits.TRAINING.take(60), noise, solver=deeppcr.Loop())
        found = sample(
            fragile, digits.TRAINING.take(60), noise, jacobian=digits.prior(), start=start, solver=Window(size=60)
        )
    assert int(found.iterations.max()) < 30
    assert (found.final - loop.final).abs().max() <= 1e-3


def test_what_has_left_stays_as_it_is_and_padding_is_nobodys_row(net, device):
    noise = noise_for(2, 60, device=device)
    problem = Problem(net, DDPM().steps(digits.TRAINING.take(60)), noise)
    seen = []

    def watched(rows, times, who):
        seen.append((times, who))
        return problem.network(rows, times, who)

    with torch.no_grad():
        prepared = window.Prepared(Window(size=20), problem, digits.prior())
        iteration = prepared.iteration
        states, _ = GaussianStart().states(problem, prepared.coupling, problem.network)
        iteration.hold(problem.initial, problem.shift)
        iteration.load(states)
        while min(iteration.prefix.tolist()) < 60:
            before, finished = iteration.states.clone(), iteration.prefix.tolist()
            iteration.run(watched, 40, True)
            for row, count in enumerate(finished):
                assert torch.equal(iteration.states[: count + 1, row], before[: count + 1, row])
            active = sum(min(60 - count, 20) for count in finished)
            times, who = seen[-1]
            pairs = set(zip(times[:active].tolist(), who[:active].tolist(), strict=True))
            assert len(pairs) == active
            assert set(times[active:].tolist()) <= {0}  # the last time of all
            assert set(who[active:].tolist()) <= {0}
    assert len(seen) < 40  # more than a step an iteration


def test_small_windows_have_as_many_iterations_as_they_need():
    """About four times as many as there are windows, where a sampler decides late; a number that was given is kept."""
    schedule = Schedule.linear(220)

    def denoiser(z, t):  # of two narrow Gaussians in every coordinate, at 3 and -1
        share = schedule.alphas_bar.to(z)[t].unsqueeze(-1)
        variance = 0.01 * share + 1 - share
        mean = share.sqrt() * (1 + 2 * torch.tanh(2 * share.sqrt() * (z - share.sqrt()) / variance))
        return (1 - share).sqrt() * (z - mean) / variance

    noise = Noise.draw((2, 2), steps=220, generator=torch.Generator().manual_seed(0))
    found = sample(denoiser, schedule, noise, solver=Window(size=4))
    assert found.result is Result.CONVERGED
    assert found.iterations.min() > 200
    with pytest.warns(deeppcr.ConvergenceWarning, match="the iteration stopped with"):
        found = sample(denoiser, schedule, noise, solver=Window(size=4, max_iterations=200))
    assert found.result is Result.FINISHED_BY_LOOP
    assert Window(size=600).most_iterations(600, 600) == 200


@pytest.mark.parametrize("size", [600, 599])
def test_a_window_of_many_steps_starts_from_a_coarse_sampler(size, device):
    """Which saves evaluations there; the result is the loop's all the same."""
    schedule = Schedule.linear(600)

    def denoiser(z, t):  # of two Gaussians in every coordinate, at 1 and -1
        share = schedule.alphas_bar.to(z)[t].unsqueeze(-1)
        variance = 0.25 * share + 1 - share
        return (1 - share).sqrt() * (z - share.sqrt() * torch.tanh(share.sqrt() * z / variance)) / variance

    noise = Noise.draw((2, 3), steps=600, generator=torch.Generator(device).manual_seed(0))
    loop = sample(denoiser, schedule, noise, solver=deeppcr.Loop())
    found, other = (
        sample(denoiser, schedule, noise, solver=Window(size=size), start=start) for start in (None, GaussianStart())
    )
    assert found.result is other.result is Result.CONVERGED
    assert (found.final - loop.final).abs().max() <= 1e-3
    coarse = [note for note in found.plan.notes if "every 8th step" in note]
    assert len(coarse) == (size == 600)
    assert bool(found.evaluations.sum() < other.evaluations.sum()) == (size == 600)


def test_extrapolation_solves_least_squares():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(3, 50, 7, dtype=torch.float64, generator=generator)
    vectors[1, 10] = 2 * vectors[0, 10]  # parallel
    vectors[1, 11] = 0
    vectors[:2, 12] = 0
    one, two, third = vectors
    pairs = [(one, one), (one, two), (two, two), (one, third), (two, third)]
    weights = torch.stack(_least_squares(*((a * b).sum(-1) for a, b in pairs)))
    best = torch.linalg.lstsq(vectors[:2].permute(1, 2, 0), third.unsqueeze(-1), driver="gelsd").solution.squeeze(-1).T
    nearest, expected = ((each.unsqueeze(-1) * vectors[:2]).sum(0) for each in (weights, best))
    assert torch.allclose(nearest, expected, rtol=1e-3, atol=1e-3)
    assert weights[1, 11] == 0
    assert (weights[:, 12] == 0).all()


def test_the_host_looks_only_where_a_window_may_not_be_full(net, device, monkeypatch):
    """An iteration finishes one window of steps at most; the result is that of looking every time."""
    looks, look = [], Iteration.look
    monkeypatch.setattr(Iteration, "look", lambda self: looks.append(self.iterations.tolist()) or look(self))
    noise = noise_for(2, 100, device=device)
    with torch.no_grad():
        solver = Window(size=10, tf32=None)  # in TF32 it looks at the updates, too
        found = sample(net, digits.TRAINING.take(100), noise, jacobian=digits.prior(), solver=solver)
    assert found.result is Result.CONVERGED
    assert looks[0] == [10, 10]
    iterations = int(found.iterations.max())
    assert 2 < len(looks) < iterations - 10
    assert looks[-1] == found.iterations.tolist()
    at = [max(seen) for seen in looks[:-1]]  # the last look is the outcome's
    assert at == sorted(set(at))
    assert at[-1] == iterations  # and none too many


def test_the_plan_says_what_was_chosen_and_why(net, device):
    noise, schedule = noise_for(2, 40, device=device), digits.TRAINING.take(40)

    def plan(**settings):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
            return str(sample(net, schedule, noise, **settings).plan)

    said = plan(jacobian=digits.prior(), solver=Window(graphs=False))
    assert "jacobian: GaussianPrior of 64 variances along the directions of a basis" in said
    assert "start: the path that the prior alone would take" in said
    assert "of 40 steps at a time" in said
    assert "busy" in said
    assert (
        "tolerance: 0.001 of the final sample; the first step leaves at an update of 5.6e-07, the last at 5e-05" in said
    )
    assert (
        "no CUDA graphs: graphs=False" if device.type == "cuda" else "no CUDA graphs: the noise is on the cpu"
    ) in said
    assert "linear: none" not in said
    said = plan(solver=Window(size=5, max_iterations=2), start=MeanStart(torch.zeros(1, 8, 8)))
    assert "variance 1 in all directions" in said
    assert "MeanStart" in said
    assert "5 of 40 steps at a time, up to 10 rows a call, as asked" in said
    assert "the rest was computed one step at a time" in said
    assert "estimated as" in plan(solver=Window(tolerance=1e-9))
    first = sample(net, schedule, noise, solver=deeppcr.Loop(), keep_states=True)
    assert "start: earlier Samples" in plan(start=first)
    assert "start: states that were given" in plan(start=first.states)
    assert "as asked" in str(first.plan)
    said = plan(solver=deeppcr.Newton(), jacobian=GaussianPrior(0.5), start=CoarseStart(stride=8))
    assert "variance 0.5" in said
    assert "every 8th step" in said


def test_settings_are_checked():
    for settings, match in (
        ({"tolerance": -1.0}, "tolerance"),
        ({"size": 0}, "size"),
        ({"freeze": 2.0}, "freeze"),
        ({"max_iterations": 0}, "max_iterations"),
        ({"tf32": 0.0}, "tf32"),
        ({"precision": "tf32"}, "precision"),
    ):
        with pytest.raises(ValueError, match=match):
            Window(**settings)
    given = (amplifying, Schedule.linear(5), torch.randn(1, 3))
    with pytest.raises(TypeError, match="Window takes GaussianPrior"):
        sample(*given, step=DDIM(), jacobian=deeppcr.DenseJacobian())
    with pytest.raises(ValueError, match="prior is of 4 numbers"):
        sample(*given, step=DDIM(), jacobian=GaussianPrior(torch.ones(4)))
