"""A run on kept buffers is like the first; and what is counted is what the network saw."""

import warnings
from dataclasses import fields, replace

import pytest
import torch

import deeppcr
from deeppcr import Result
from deeppcr.diffusion import DDIM, CoarseStart, GaussianPrior, GaussianStart, Noise, Schedule, Steps, Window, sample
from deeppcr.diffusion.problem import Problem
from deeppcr.diffusion.start import as_start
from deeppcr.diffusion.window import prepared as preparing
from deeppcr.diffusion.window import window
from deeppcr.solution import Plan
from diffusion.recorded import Recorded
from diffusion.test_growth import SCHEDULE, by_loop, finished, two_narrow, undecided


@pytest.fixture
def many_go_back(monkeypatch):
    monkeypatch.setattr(preparing, "Replayed", Recorded)
    monkeypatch.setattr(window, "_GROWTH", 30.0)


def run(prepared, initial, start, solver):
    problem = Problem(two_narrow, DDIM().steps(SCHEDULE), initial)
    with torch.no_grad():
        prepared = prepared or preparing.Prepared(solver, problem, GaussianPrior())
        prepared.runs = max(prepared.runs, 1)  # calls are filled up, as in all runs but the first
        return prepared, prepared.run(solver, problem, as_start(start), Plan())


@pytest.mark.parametrize("size", [7, 50])
@pytest.mark.parametrize("start", ["Gaussian", "coarse", "given"])
def test_a_run_knows_nothing_of_those_before(start, size, many_go_back):
    """Of samples that went back, with stricter thresholds; and of one that was stopped on its way. Bit by bit."""
    hard = undecided("cpu")
    easy = -1 - torch.rand(hard.shape, generator=torch.Generator().manual_seed(0))
    start = {"Gaussian": GaussianStart(), "coarse": CoarseStart(), "given": easy.expand(50, -1, -1)}[start]
    solver, stopped = (Window(size=size, freeze=0.1, max_iterations=most) for most in (None, 3))
    kept, _ = run(None, hard, start, solver)
    assert kept.returned > 10
    run(kept, hard, start, stopped)
    _, found = run(kept, easy, start, solver)
    fresh, expected = run(None, easy, start, solver)
    assert kept.returned == fresh.returned < 10
    for field in fields(found):
        one, other = (getattr(each, field.name) for each in (found, expected))
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, field.name
    assert torch.equal(kept.iteration.growth, fresh.iteration.growth)


@pytest.mark.parametrize("known", [False, True])
def test_an_iteration_begins_with_clean_buffers(known, many_go_back):
    """All that it reads before it has written it."""
    solver = Window(size=50, freeze=0.1)
    kept, outcome = run(None, undecided("cpu"), GaussianStart(), solver)
    problem = Problem(two_narrow, DDIM().steps(SCHEDULE), undecided("cpu"))
    new = preparing.Prepared(solver, problem, GaussianPrior()).iteration
    for iteration in (kept.iteration, new):
        iteration.load(outcome.states, known)
    for name in ("used", "moved", "growth", "excess", "thresholds", "allowance", "last_sizes", "counters", "measured"):
        assert torch.equal(getattr(kept.iteration, name), getattr(new, name)), name


class Counted:
    """Of two Gaussians in every coordinate, at 1 and -1, for all classes; it counts its rows."""

    def __init__(self, schedule):
        self.schedule, self.rows = schedule, 0

    def __call__(self, z, t, classes=None):
        self.rows += len(z)
        share = self.schedule.alphas_bar.to(z)[t].unsqueeze(-1)
        variance = 0.25 * share + 1 - share
        return (1 - share).sqrt() * (z - share.sqrt() * torch.tanh(share.sqrt() * z / variance)) / variance


@pytest.mark.parametrize("guidance", [None, 1.5])
@pytest.mark.parametrize("start", [GaussianStart(), CoarseStart(stride=4, sweeps=3)])
@pytest.mark.parametrize("most", [2, None])
def test_all_rows_that_the_network_saw_are_counted(guidance, start, most):
    """Those of a coarse sampler, of both halves of guidance, and of the loop after a failure; checks are not."""
    schedule = Schedule.linear(40)
    denoiser, noise = Counted(schedule), Noise.draw((3, 2), steps=40, generator=torch.Generator().manual_seed(0))
    given = {"classes": torch.tensor([1, 2, 3]), "guidance": guidance, "unconditional": 0} if guidance else {}

    for _ in range(2):
        denoiser.rows = 0
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
            solver = Window(size=10, max_iterations=most)
            found = sample(denoiser, schedule, noise, start=start, solver=solver, **given)
    assert found.result is (Result.FINISHED_BY_LOOP if most else Result.CONVERGED)
    check = 9 * (2 if guidance else 1)  # three rows, each beside others; the rest was checked in the first run
    assert int(found.evaluations.sum()) == denoiser.rows - check


def test_residuals_are_relative_to_states_larger_than_1_alone():
    """Of a linear denoiser, which scales with its noise."""
    schedule, noise = Schedule.linear(30), torch.randn(1, 4, generator=torch.Generator().manual_seed(0)).double()

    def residual(size):
        solver = Window(size=30, max_iterations=2)
        given = (lambda z, t: 0.5 * z, schedule, size * noise / noise.abs().max())
        return float(sample(*given, step=DDIM(), solver=solver, on_failure="return").residual)

    with pytest.warns(deeppcr.ConvergenceWarning):
        small, larger, large, huge = (residual(size) for size in (1e-3, 1e-2, 1e3, 1e4))
    assert larger == pytest.approx(10 * small, rel=1e-6)
    assert small > 1e-8
    assert huge == pytest.approx(large, rel=1e-6)


def test_what_a_network_rounds_depends_on_its_inputs_not_on_the_scale_of_states():
    """The same sampler with states 16 times as large, which the network sees as before."""
    plain = DDIM().steps(SCHEDULE)
    scaled = replace(
        plain, gain=16 * plain.gain, signal=16 * plain.signal, spread=16 * plain.spread, scale=plain.scale / 16
    )
    initial, found = torch.ones(2, 3), []
    for steps, factor in ((plain, 1), (scaled, 16)):
        problem = Problem(lambda z, t: (0.9 * z).bfloat16(), steps, factor * initial)
        with torch.no_grad():
            prepared = preparing.Prepared(Window(max_iterations=1), problem, GaussianPrior())
            prepared.run(Window(max_iterations=1), problem, GaussianStart(), Plan())
        found.append(prepared.rounding.least(factor * torch.ones(50, 2), torch.ones(50, 2))[0])
    assert found[0].min() > 1e-3  # for it is far more than float32's
    assert torch.allclose(found[1], 16 * found[0], rtol=1e-5)


def test_of_samples_that_went_back_only_those_are_certified_that_rounding_leaves_alone():
    """Ever nearer to a boundary, from both sides, against float64."""
    boundary = SCHEDULE.alphas_bar[-1].sqrt()
    offset = torch.logspace(-2, -5, 400, dtype=torch.float64).unsqueeze(1)
    initial = (boundary + torch.cat([offset, -offset])).float()
    iteration, outcome = finished(initial, size=50)
    certified = torch.tensor([result is Result.CONVERGED for result in outcome.results])
    assert (certified & iteration.went_back).sum() > 100
    assert (~certified).sum() > 100
    error = (outcome.states[-1, :, :, 0] - by_loop(initial.double())).abs().flatten()
    assert error[certified].max() <= 1e-3


def test_hundreds_of_ratios_that_were_seen_multiply_to_little_where_errors_do_not_grow():
    """From a start near the solution, where states move by little more than their rounding."""
    schedule = Schedule.linear(400)
    spread = (1 - schedule.alphas_bar).sqrt().float()

    def denoiser(z, t):
        return spread[t].unsqueeze(-1) * (z + 0.1 * torch.sin(z))

    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(20, 1, generator=generator)
    loop = sample(denoiser, schedule, initial, step=DDIM(), solver=deeppcr.Loop(), keep_states=True).states
    problem, solver = Problem(denoiser, DDIM().steps(schedule), initial), Window(size=400)
    with torch.no_grad():
        prepared = preparing.Prepared(solver, problem, GaussianPrior())
        prepared.run(solver, problem, as_start(loop + 1e-5 * torch.randn(loop.shape, generator=generator)), Plan())
    assert (prepared.iteration.growth != 1).float().mean() > 0.1  # it was seen
    assert prepared.iteration.grown().max() < 1.3


def test_what_counts_as_rounding_of_large_states_seldom_sends_samples_back():
    """States of 30, which nothing damps: a step that left with far more than rounding would have to be done again."""
    one = torch.ones(50, dtype=torch.float64)
    steps = Steps(torch.arange(49, -1, -1), one, one / 50, 0.7 * one, 0.7 * one)
    initial = torch.linspace(15, 30, 40).unsqueeze(1)
    problem = Problem(lambda z, t: torch.sin(3 * z) + torch.cos(t / 20).unsqueeze(-1), steps, initial)
    with torch.no_grad():
        prepared = preparing.Prepared(Window(size=10), problem, GaussianPrior())
        outcome = prepared.run(Window(size=10), problem, GaussianStart(), Plan())
    assert set(outcome.results) <= {Result.CONVERGED, Result.PRECISION_FLOOR}
    assert prepared.returned < 10
