"""How exact a window has to be: early steps less than late ones, rough networks for as long as they pay, and nothing that leaves was last seen by them."""

import pytest
import torch

import deeppcr
from deeppcr import Result
from deeppcr.diffusion import DDPM, CoarseStart, GaussianStart, MeanStart, Window, sample
from deeppcr.diffusion.problem import Problem
from deeppcr.diffusion.window import prepared as window
from deeppcr.diffusion.window.iteration import Iteration
from diffusion import digits
from diffusion.rough import Rough
from diffusion.test_sample import noise_for


def test_early_steps_are_held_to_less_than_late_ones(net, device):
    noise = noise_for(1, 60, device=device)
    problem = Problem(net, DDPM().steps(digits.TRAINING.take(60)), noise)
    thresholds = Window(tolerance=1e-2, freeze=0.5).thresholds_for(problem).to(device)
    assert thresholds[-1].item() == pytest.approx(5e-3)
    assert (thresholds[1:] > thresholds[:-1]).all()
    assert 90 < (thresholds[-1] / thresholds[0]).item() < 100
    with torch.no_grad():
        iteration = window.Prepared(Window(tolerance=1e-2, freeze=0.5), problem, digits.prior()).iteration
        states, _ = GaussianStart().states(problem, iteration.coupling, problem.network)
        iteration.hold(problem.initial, problem.shift)
        iteration.load(states)
        while iteration.prefix < 60:
            before, finished = iteration.states.clone(), int(iteration.prefix)
            iteration.run(problem.network, 60, True)
            moved = (iteration.states - before)[1:, 0].abs().amax((-2, -1))
            left = moved[finished + 1 : int(iteration.prefix)]  # the first of them leaves in any case
            assert (left <= thresholds[finished + 1 : int(iteration.prefix)] + 1e-4).all()


@pytest.mark.parametrize("samples", [1, 3])
def test_what_leaves_was_last_seen_in_full_precision(net, samples, device, monkeypatch):
    """Rough calls come first, on all rows, and end long before all steps are nearly right; then the steps leave."""
    schedule, noise = digits.TRAINING.take(100), noise_for(samples, 100, device=device)
    two, calls = Rough(net, monkeypatch), {}
    with torch.no_grad():
        loop = sample(net, schedule, noise, solver=deeppcr.Loop())
        for tf32 in (None, 0.1, 1e-9):
            two.calls = []
            solver = Window(size=100, tf32=tf32, max_iterations=40)
            found = sample(two.network, schedule, noise, jacobian=digits.prior(), solver=solver)
            assert found.result is Result.CONVERGED
            assert (found.final - loop.final).abs().max() <= 1e-3
            checks = 1 if calls else 19  # whether rows influence each other
            assert [rows for _, rows in two.calls[1 : 1 + checks]] == ([9] + [8] * 2 + [1] * 16)[:checks]
            del two.calls[1 : 1 + checks]
            rough = sum(rough for rough, _ in two.calls)
            assert two.calls[:rough] == [(True, 100 * samples)] * rough
            assert two.calls[rough] == (False, 100 * samples)
            calls[tf32] = rough, len(two.calls)
    assert calls[None][0] == 0
    assert 0 < calls[0.1][0] < 5
    assert calls[0.1][1] <= calls[None][1] + 2
    assert calls[1e-9][0] == 3  # nothing settles: after that it is not waited for


def test_a_start_that_may_be_good_is_never_rounded(net, device, monkeypatch):
    """In TF32 it would move away from the solution, and no step might leave meanwhile."""
    schedule, noise = digits.TRAINING.take(60), noise_for(3, 60, device=device)
    two = Rough(net, monkeypatch)

    def run(start, size=60):
        two.calls = []
        solver = Window(size=size, graphs=False)  # replayed, the network would not be called
        found = sample(
            two.network, schedule, noise, jacobian=digits.prior(), start=start, solver=solver, keep_states=True
        )
        return found, [rough for rough, _ in two.calls]

    with torch.no_grad():
        first, rough = run(None)
        assert rough[0]
        for start in (first, first.states):
            found, rough = run(start)
            assert not any(rough)
            assert found.iterations.tolist() == [1, 1, 1]
        mixed = first.states.clone()
        mixed[:, [0, 2]] = 0
        found, _ = run(mixed)
        assert found.iterations[1] == 1
        assert (found.final - first.final).abs().max() <= 1e-3
        assert run(CoarseStart(stride=8))[1][0]
        assert not any(run(CoarseStart(stride=8), size=30)[1])
        assert run(MeanStart(torch.zeros(1, 8, 8)))[1][0]
        found, rough = run(None, size=1)  # the plain loop, in effect
        assert not any(rough)
        assert found.iterations.tolist() == [60] * 3


def test_a_rough_iteration_counts_the_steps_that_still_move(net, device):
    noise = noise_for(2, 64, device=device)
    problem = Problem(net, DDPM().steps(digits.TRAINING.take(64)), noise)
    with torch.no_grad():
        iteration = window.Prepared(Window(size=48, accelerate=False, tf32=0.4), problem, digits.prior()).iteration
        states, _ = GaussianStart().states(problem, iteration.coupling, problem.network)
        iteration.hold(problem.initial, problem.shift)
        iteration.load(states)
        before = iteration.states.clone()
        iteration.run(problem.network, 96, False)
        moved = (iteration.states - before)[1:49].abs().amax((-2, -1))
    assert iteration.unsettled.tolist() == (moved >= 0.4).sum(0).tolist()
    assert iteration.unsettled.min() > 0
    assert iteration.unsettled.max() < 48
    assert iteration.prefix.tolist() == [0, 0]


def test_a_rough_phase_that_does_not_pay_ends(net, device, monkeypatch):
    """Where hardly any step more settles; samples that are lost do not count; and there must be iterations left."""
    problem = Problem(net, DDPM().steps(digits.TRAINING.take(64)), noise_for(2, 64, device=device))
    prepared = window.Prepared(Window(size=40), problem, digits.prior())

    def goes_on(unsettled, diverged=(0, 0), before=80, number=5, most=200):
        prepared.iteration.unsettled.copy_(torch.tensor(unsettled))
        prepared.iteration.diverged.copy_(torch.tensor(diverged))
        prepared.iteration.show()
        return prepared.goes_on_roughly(before, number, most)

    assert goes_on([30, 30]) == (True, 60)
    assert goes_on([36, 37]) == (False, 73)
    assert goes_on([40, 40], before=float("inf"), number=0) == (True, 80)
    assert goes_on([40, 40], number=1) == (True, 80)
    assert goes_on([10, 10]) == (False, 20)
    assert goes_on([40, 10], diverged=(1, 0)) == (False, 10)
    assert goes_on([40, 40], diverged=(1, 1)) == (False, 0)
    assert goes_on([30, 30], most=14) == (True, 60)
    assert goes_on([30, 30], most=13) == (False, 60)
    two = Rough(net, monkeypatch)
    given = (two.network, digits.TRAINING.take(60), noise_for(2, 60, device=device))
    for most in (1, 2, 3):
        two.calls = []
        with torch.no_grad():
            found = sample(*given, solver=Window(size=60, max_iterations=most), on_failure="return")
        assert not any(rough for rough, _ in two.calls)
        assert found.exact_steps.min() >= most


def test_what_a_rough_network_taught_is_forgotten(net, device, monkeypatch):
    """Its updates do not belong to those of the precise one: extrapolated together they would spoil its first iterations."""
    schedule, noise = digits.TRAINING.take(100), noise_for(2, 100, device=device)
    two, known = Rough(net, monkeypatch), []
    run = Iteration.run

    def watched(self, network, count, leave):
        known.append((leave, bool((self.last_sizes > 0).any())))
        run(self, network, count, leave)

    monkeypatch.setattr(Iteration, "run", watched)
    with torch.no_grad():
        sample(two.network, schedule, noise, jacobian=digits.prior(), solver=Window(size=100, tf32=0.1))
    rough = sum(not leave for leave, _ in known)
    assert rough > 1
    expected = (
        [(False, False)] + [(False, True)] * (rough - 1) + [(True, False)] + [(True, True)] * (len(known) - rough - 1)
    )
    assert known == expected
