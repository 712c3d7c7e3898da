"""Kernels are made of a step's derivatives: where it hides some of them, what adds up unseen is found, and the loop in one kernel taken."""

import warnings

import pytest
import torch

import deeppcr
from deeppcr import Newton, Result
from deeppcr.ways.fused import Call
from problems import plain_loop

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

GRID = 2.0**-17


def rounded_clock(z, x):
    return torch.tanh(0.9 * z[0] + x), torch.round((z[1] + GRID) / GRID) * GRID


def detached(z, x):
    return torch.tanh(0.9 * z[0] + x), z[1].detach() + GRID


def straight_through(z, x):
    """Rounded all the same, with the derivative that it has on the average: nothing is hidden."""
    clock = z[1] + GRID
    return torch.tanh(0.9 * z[0] + x), clock + (torch.round(clock / GRID) * GRID - clock).detach()


def constant(z, x):
    """Detached, and nothing is added to it."""
    return torch.tanh(0.9 * z[0] + x), z[1].detach()


def problem(device, length=640, gradients=False):
    xs = torch.randn(length, 1, 1, generator=torch.Generator().manual_seed(0)).to(device)
    z0 = torch.zeros(1, 1, device=device), torch.full((1, 1), 100.0, device=device)
    return z0, xs.requires_grad_(gradients)


def solved(*loop, times=3, solver):
    for _ in range(times):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = deeppcr.solve(*loop, solver=solver)
    assert found.plan.evaluation.startswith("fused kernels")
    return found, [each for each in told if issubclass(each.category, deeppcr.ConvergenceWarning)]


@pytest.mark.parametrize("gradients", [False, True], ids=["states", "gradients"])
@pytest.mark.parametrize("step", [rounded_clock, detached])
def test_a_step_that_hides_a_derivative_is_looped_by_a_kernel_and_told(step, gradients, device):
    z0, xs = problem(device, gradients=gradients)
    expected = plain_loop(step, z0, xs)
    for times in (2, 1):  # the one that finds it, and one that knows it
        found, told = solved(step, z0, xs, times=times, solver=Newton(chunk=4))
        assert found.result is Result.FINISHED_BY_LOOP
        assert (found.states[1] - expected[1]).abs().max() <= 1e-3
        assert told
        assert any("derivative" in note for note in found.plan.notes)
    if gradients:
        (gradient,) = torch.autograd.grad(found.states[0].sum() + found.states[1].sum(), xs)
        (wanted,) = torch.autograd.grad(expected[0].sum() + expected[1].sum(), xs)
        assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-5)


def test_it_is_found_in_the_first_solve_that_is_long_enough(device):
    """In a short one nothing has added up yet."""
    short, long = problem(device, 64), problem(device, 640)
    found, _ = solved(rounded_clock, *short, solver=Newton(chunk=4))
    assert found.result is Result.CONVERGED
    found, told = solved(rounded_clock, *long, times=1, solver=Newton(chunk=4))
    assert found.result is Result.FINISHED_BY_LOOP
    assert told
    assert (found.states[1] - plain_loop(rounded_clock, *long)[1]).abs().max() <= 1e-3


def test_it_is_found_in_the_first_solve_whose_numbers_show_it(device):
    """Those of the first one, by which kernels are trusted, add up to nothing."""

    def counter(z, x):
        return torch.tanh(0.9 * z[0] + x), z[1].detach() + x

    z0, xs = problem(device)
    xs = torch.full_like(xs, GRID)
    found, _ = solved(counter, z0, torch.zeros_like(xs), solver=Newton(chunk=4))
    assert found.result is Result.CONVERGED
    found, told = solved(counter, z0, xs, times=1, solver=Newton(chunk=4))
    assert found.result is Result.FINISHED_BY_LOOP
    assert told
    assert (found.states[1] - plain_loop(counter, z0, xs)[1]).abs().max() <= 1e-3


@pytest.mark.parametrize("step", [straight_through, constant])
def test_a_step_that_hides_nothing_that_matters_has_chunks(step, device):
    z0, xs = problem(device)
    found, told = solved(step, z0, xs, solver=Newton(chunk=4))
    assert found.result is Result.CONVERGED
    assert not told
    assert (found.states[1] - plain_loop(step, z0, xs)[1]).abs().max() <= 1e-3


KINKED = {
    "relu": lambda z, x: torch.relu(0.5 * z + x) - 0.2,
    "abs": lambda z, x: 0.5 * z.abs() + x,
    "clamp": lambda z, x: (0.7 * z + x).clamp(-1, 1),
    "a ring": lambda z, x: torch.remainder(0.5 * z + x, 2.0),
    "maximum": lambda z, x: torch.maximum(0.5 * z, x),
    "what is full": lambda z, x: (z + x.abs() * (x > 0.3)).clamp(-1, 1),  # and idle there, as batteries are
}


@pytest.mark.parametrize("name", KINKED)
def test_kinks_are_not_taken_for_hidden_derivatives(name, device):
    """Each solve by such kernels would be held against the step in all of its states."""
    step, (_, xs) = KINKED[name], problem(device, 300)
    z0 = torch.ones(1, 1, device=device)
    found, told = solved(step, z0, xs, solver=Newton(chunk=4))
    assert found.result is Result.CONVERGED
    assert not told
    assert not Call(step, z0, xs, None, None).known[0].hides
