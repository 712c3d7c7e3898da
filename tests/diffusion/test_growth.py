"""Errors that grow on their way to the final sample: they are seen, and samples that left too early go back."""

import copy
import math

import pytest
import torch

import deeppcr
from deeppcr import Result
from deeppcr.diffusion import DDIM, GaussianPrior, Schedule, Window, sample
from deeppcr.diffusion.problem import Problem
from deeppcr.diffusion.start import GaussianStart
from deeppcr.diffusion.window import prepared as window
from deeppcr.diffusion.window.iteration import Iteration
from diffusion import digits
from diffusion.rough import Rough
from diffusion.test_sample import noise_for
from kernel_support import thorough

SCHEDULE = Schedule.linear(50)


def two_narrow(z, t):
    """The ideal denoiser of two Gaussians in one dimension, at 3 and -1: samples near the boundary decide late between them."""
    share = SCHEDULE.alphas_bar.to(z)[t].unsqueeze(-1)
    variance = share * 0.01 + 1 - share
    mean = share.sqrt() * (1 + 2 * torch.tanh(2 * share.sqrt() * (z - share.sqrt()) / variance))
    return (1 - share).sqrt() * (z - mean) / variance


def undecided(device, dtype=torch.float32, nearest=-4.5):
    """[B, 1], ever nearer to the boundary."""
    boundary = SCHEDULE.alphas_bar[-1].sqrt()
    return (boundary + torch.logspace(0, nearest, 60, dtype=torch.float64)).to(device, dtype).unsqueeze(1)


def by_loop(initial, denoiser=two_narrow):
    return sample(denoiser, SCHEDULE, initial, step=DDIM(), solver=deeppcr.Loop()).final


def finished(initial, denoiser=two_narrow, **settings):
    """The iteration after a run, and the run's outcome."""
    problem = Problem(denoiser, DDIM().steps(SCHEDULE), initial)
    solver, prior = Window(**settings), GaussianPrior()
    with torch.no_grad():
        prepared = window.Prepared(solver, problem, prior)
        outcome = prepared.run(solver, problem, GaussianStart(), deeppcr.solution.Plan())
    return prepared.iteration, outcome


@pytest.mark.parametrize("size", [7, 50])
def test_samples_whose_errors_grow_go_back(size, device, monkeypatch):
    initial = undecided(device, nearest=-5)
    loop = by_loop(initial)

    def run():
        # A GPU's rough phase would bring them closer before any may leave: it has a test of its own.
        solver = Window(size=size, tf32=None)
        found = sample(two_narrow, SCHEDULE, initial, step=DDIM(), solver=solver)
        fine = torch.tensor([result is Result.CONVERGED for result in found.results], device=device)
        return found, fine, (found.final - loop).abs().flatten()

    found, fine, error = run()
    assert set(found.results) <= {Result.CONVERGED, Result.PRECISION_FLOOR}
    assert fine.sum() >= 38  # the others' rounding may grow too much
    assert error[fine].max() <= 1e-4
    assert "errors grew more than was expected in " in str(found.plan)
    load = Iteration.load

    def never_back(self, *arguments, **settings):
        self.bound = math.inf
        load(self, *arguments, **settings)

    monkeypatch.setattr(Iteration, "load", never_back)
    before, _, error = run()
    assert error.max() > 5e-4
    assert (found.iterations >= before.iterations).all()
    assert (found.iterations == before.iterations).any()  # of those that need not
    assert (found.iterations > before.iterations).any()


def test_the_growth_that_is_seen_is_that_of_errors(device):
    """Against the derivative of the final sample with respect to the first state: errors grow up to 1,000 times."""
    initial = undecided(device, torch.float64)
    iteration, _ = finished(initial)
    after = by_loop(initial + 1e-7), by_loop(initial - 1e-7)
    true = ((after[0] - after[1]) / 2e-7).abs().flatten()
    seen = iteration.grown()[0]
    assert true.max() > 100
    off = (seen / true).log().abs()
    assert off.median() < math.log(1.2)
    assert (seen > true / 3).all()
    assert torch.allclose(iteration.grown()[-1], torch.ones_like(true))


def test_where_errors_do_not_grow_nothing_changes(device):
    spread = (1 - SCHEDULE.alphas_bar).sqrt().float().to(device)

    def gaussian(z, t):
        return spread[t].unsqueeze(-1) * z

    initial = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).to(device)
    iteration, outcome = finished(initial, gaussian)
    assert outcome.results == [Result.CONVERGED] * 20
    assert (iteration.grown() <= 1.1).all()
    assert torch.equal(iteration.thresholds, iteration.freeze.expand(-1, 20))


def test_what_rounding_leaves_grows_too(device):
    """A sample so near to the boundary that float32 cannot tell where it ends; float64 can."""
    initial = undecided(device, nearest=-5)[[0, -1]]
    found = sample(two_narrow, SCHEDULE, initial, step=DDIM())
    assert found.results == (Result.CONVERGED, Result.PRECISION_FLOOR)
    found = sample(two_narrow, SCHEDULE, initial.double(), step=DDIM(), solver=Window(tolerance=1e-3))
    assert found.result is Result.CONVERGED
    assert (found.final - by_loop(initial.double())).abs().max() <= 1e-3


def test_rounding_that_was_seen_to_grow_is_said_whether_or_not_a_sample_went_back(device):
    """Steps that leave one by one leave exactly, and no sample goes back for them; what they round grows all the same."""
    problem, prior = Problem(two_narrow, DDIM().steps(SCHEDULE), undecided(device)[:3]), GaussianPrior()
    with torch.no_grad():
        prepared = window.Prepared(Window(), problem, prior)
        assert (
            prepared.run(Window(), problem, GaussianStart(), deeppcr.solution.Plan()).results == [Result.CONVERGED] * 3
        )
        iteration = prepared.iteration
        assert not iteration.went_back.any()
        iteration.growth.fill_(1)
        iteration.growth[30] = torch.tensor([1.0, 1e4, 1e30], device=device)
        prepared.finish()
    assert iteration.uncertain.tolist() == [0, 1, 1]
    assert prepared.least[1] >= 4e4 * torch.finfo(torch.float32).eps
    assert prepared.least[2] < math.inf  # which would mean that nothing is known


@pytest.mark.parametrize("seed", [0, *thorough(1, 2)])
def test_a_step_does_not_leave_while_the_one_before_it_jumps(seed, device):
    """With a Jacobian of 0 a step's update knows nothing of what becomes of the step before it."""
    schedule = Schedule.linear(200)
    share = schedule.alphas_bar.float().to(device)

    def denoiser(z, t):
        a = share[t].unsqueeze(-1)
        return (1 - a).sqrt() * z / (4 * a + 1 - a) + 0.1 * torch.sin(3 * z)

    initial = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).to(device)
    loop = sample(denoiser, schedule, initial, step=DDIM(), solver=deeppcr.Loop())
    solver, jacobian = Window(size=200, max_iterations=300), deeppcr.ScalarJacobian(0.0)
    found = sample(denoiser, schedule, initial, step=DDIM(), solver=solver, jacobian=jacobian)
    assert found.result is Result.CONVERGED
    assert (found.final - loop.final).abs().max() <= 1e-3


def started(initial):
    problem, prior = Problem(two_narrow, DDIM().steps(SCHEDULE), initial), GaussianPrior()
    iteration = window.Prepared(Window(size=50), problem, prior).iteration
    states, _ = GaussianStart().states(problem, iteration.coupling, problem.network)
    iteration.hold(problem.initial, problem.shift)
    iteration.load(states)
    return problem, iteration


def test_of_an_imprecise_network_only_large_changes_are_watched(device):
    """And what it said is not compared with what the precise one says."""
    problem, iteration = started(undecided(device)[:5])
    run = iteration.run
    run(problem.network, 250, False)
    assert (iteration.growth == 1).all()
    run(problem.network, 250, False)
    rough = iteration.growth.clone()
    assert 0.1 < (rough != 1).float().mean() < 0.9
    iteration.forget()
    run(problem.network, 250, True)
    assert torch.equal(iteration.growth, rough)
    run(problem.network, 250, True)
    assert (iteration.growth != rough).any()
    iteration.load(iteration.states[1:].clone())
    assert (iteration.growth == 1).all()


def test_with_a_rough_phase_growth_is_seen_all_the_same(device, monkeypatch):
    """TF32 brings samples so close that most steps would hardly move in full precision."""
    initial = undecided(device)
    rough = Rough(two_narrow, monkeypatch, 10)
    iteration, outcome = finished(initial, rough.network, size=50)
    assert any(is_rough for is_rough, _ in rough.calls)
    assert (iteration.growth == 1).float().mean() < 0.15
    fine = torch.tensor([result is Result.CONVERGED for result in outcome.results], device=device)
    assert fine.float().mean() > 0.8
    assert (outcome.states[-1, :, :, 0] - by_loop(initial)).abs().flatten()[fine].max() <= 1e-3


def test_a_sample_goes_back_to_the_first_step_that_left_too_early(device):
    _, iteration = started(undecided(device)[:4])
    iteration.excess[7], iteration.excess[30] = 1e-5, 1e-5
    iteration.growth[20] = torch.tensor([1.0, 10.0, 100.0, 100.0], device=device)
    iteration.prefix.fill_(50)
    iteration._go_back(torch.tensor([True, True, True, False], device=device))  # the last one had finished before
    assert iteration.prefix.tolist() == [50, 50, 7, 50]
    lowered = iteration.thresholds < iteration.freeze
    assert lowered.any(0).tolist() == [False, False, True, False]
    assert iteration.thresholds[7, 2].item() == pytest.approx(0.05 * 1e-3 / 10 / 100)
    assert iteration.went_back.tolist() == [False, False, True, False]
    iteration.excess.fill_(1)
    iteration._go_back(iteration.prefix == 50)
    assert iteration.prefix.tolist() == [0, 0, 7, 0]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_where_values_are_clipped_and_no_step_is_found_before_its_turn_nothing_is_certified(clip, device):
    """The loop amplifies every rounding; large moves that are clipped do not show it."""
    weight = 3 * torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).to(device)

    def chaotic(z, t):
        return torch.sin(z @ weight)

    initial = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(device)
    step, schedule = DDIM(clip=clip), Schedule.linear(1000).take(40)
    loop = sample(chaotic, schedule, initial, step=step, solver=deeppcr.Loop())
    nearly = sample(chaotic, schedule, initial * (1 + 1e-6), step=step, solver=deeppcr.Loop())
    found = sample(chaotic, schedule, initial, step=step, solver=Window(), on_failure="return")
    if clip is not None:
        assert ((nearly.final - loop.final).abs().amax(1) > 1e-3).all()
        assert (found.iterations >= 30).all()
    for row, result in enumerate(found.results):
        if result is Result.CONVERGED:
            assert (found.final - loop.final)[row].abs().max() <= 1e-3
    assert (clip is None) or Result.CONVERGED not in found.results


def test_clipping_alone_is_no_reason_to_fall_back(device):
    """However small the tolerance is: what moves by less than a share of the clip is no jump."""
    net, noise = copy.deepcopy(digits.trained()).double().to(device), noise_for(6, 50, torch.float64, device=device)
    given, step = (net, digits.TRAINING.take(50), noise), DDIM(clip=0.6)
    with torch.no_grad():
        loop = sample(*given, step=step, solver=deeppcr.Loop())
        found = sample(*given, step=step, jacobian=digits.prior(), solver=Window(size=50))
    assert found.result is Result.CONVERGED
    assert (found.final - loop.final).abs().max() <= 1e-8
