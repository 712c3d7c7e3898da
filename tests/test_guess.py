"""Guesses change how long it takes, never the answer."""

import pytest
import torch

import deeppcr
from deeppcr import Newton
from problems import Generator, lstm, mlp, relative_error


@pytest.mark.parametrize("chunk", [1, 7, "auto"])
@pytest.mark.parametrize(
    "guess",
    [
        deeppcr.RepeatInitial(),
        deeppcr.Zeros(),
        deeppcr.Random(std=0.5, seed=3),
        lambda z0, xs: z0.expand(xs[0].shape[0], *z0.shape) * 0.5,
    ],
    ids=["repeat", "zeros", "random", "function"],
)
def test_every_guess_leads_to_the_same_states(guess, chunk, device):
    problem = mlp(Generator(0, torch.float64, device), 100, 3, activation=torch.tanh)
    solution = problem.solve(guess=guess, solver=Newton(chunk=chunk), on_failure="raise")
    assert relative_error(solution.states, problem.loop()) < 1e-9


def test_the_last_solution_is_the_best_guess(device):
    problem = lstm(Generator(0, torch.float64, device), 100, 3)
    first = problem.solve(solver=Newton(chunk=1))
    again = problem.solve(solver=Newton(chunk=1), guess=first)
    assert again.iterations.max() == 1 < first.iterations.min()
    assert relative_error(again.states, first.states) < 1e-9
    as_states = problem.solve(solver=Newton(chunk=1), guess=first.states)
    assert as_states.iterations.max() == 1


def test_the_batch_mean_of_the_last_solution_serves_another_batch(device):
    make = Generator(0, torch.float64, device)
    problem = mlp(make, 300, 6)
    last = problem.solve(solver=Newton(chunk=1))
    other = mlp(make, 300, 4)
    other.xs = problem.xs
    warm = other.solve(solver=Newton(chunk=1), guess=deeppcr.BatchMean(last))
    cold = other.solve(solver=Newton(chunk=1))
    assert relative_error(warm.states, other.loop()) < 1e-9
    assert warm.iterations.sum() < cold.iterations.sum()  # deep in the net all rows have the same activations
    alone = mlp(make, 300, 1)
    alone.xs, alone.z0 = problem.xs, alone.z0[0]
    single = alone.solve(solver=Newton(chunk=1))
    assert relative_error(alone.solve(guess=deeppcr.BatchMean(single)).states, alone.loop()) < 1e-9


def test_random_guesses_are_repeatable(device):
    problem = mlp(Generator(0, torch.float64, device), 20, 2)
    fixed = Newton(stop=deeppcr.FixedIterations(1), chunk=1)
    one, two, other = (problem.solve(solver=fixed, guess=deeppcr.Random(seed=s)).states for s in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
