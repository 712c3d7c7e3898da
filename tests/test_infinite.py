"""Loops in log space, or over min and plus, begin with an infinity: the loop takes them, Newton's method cannot, and it is said."""

import warnings

import pytest
import torch

import deeppcr
from deeppcr import ConvergenceWarning, Loop, Newton, Result
from deeppcr.sequence.layout import not_finite_in
from deeppcr.ways import plan
from problems import plain_loop

SOLVERS = [None, Loop()]


def transitions(states=4):
    """Left to right: a state is left for the next one only."""
    weights = torch.full((states, states), -torch.inf, dtype=torch.float64)
    for at in range(states):
        weights[at, at] = -0.3
        weights[at, min(at + 1, states - 1)] = -1.35
    return weights


def forward(z, x):
    return torch.logsumexp(z.unsqueeze(-1) + transitions(), -2) + x


def viterbi(z, x):
    return (z.unsqueeze(-1) + transitions()).amax(-2) + x


def shortest(z, x):
    return (z.unsqueeze(-1) - transitions()).amin(-2) + x.abs()


CASES = {"forward": (forward, -torch.inf), "viterbi": (viterbi, -torch.inf), "shortest": (shortest, torch.inf)}


def problem(case, length=9):
    step, infinity = CASES[case]
    z0 = torch.full((2, 4), infinity, dtype=torch.float64)
    z0[0, 0] = z0[1, 1] = 0.0
    xs = torch.linspace(-2, 0, length * 8, dtype=torch.float64).reshape(length, 2, 4)
    return step, z0, xs


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("length", [1, 2, 65])
@pytest.mark.parametrize("case", CASES)
def test_they_are_the_plain_loop(case, length, solver):
    step, z0, xs = problem(case, length)
    z0.requires_grad_()
    xs.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = deeppcr.solve(step, z0, xs, solver=solver)
    right = plain_loop(step, z0, xs)
    assert found.result is Result.LOOP
    assert found.exact_steps.tolist() == [length, length]
    assert torch.equal(found.states, right)
    assert found.states[0].isinf().any()
    pairs = [torch.autograd.grad(each[-1, :, -1].sum(), (z0, xs), allow_unused=True) for each in (found.states, right)]
    torch.testing.assert_close(*pairs, equal_nan=True)


def test_the_plan_says_why():
    found = deeppcr.solve(*problem("viterbi"))
    assert found.plan.notes == ["one step after the other: z0 holds an infinity"]


@pytest.mark.parametrize("options", [{"lengths": [3, 9]}, {"keep": 4}, {"keep": "last"}])
@pytest.mark.parametrize("solver", SOLVERS)
def test_with_other_options(solver, options):
    step, z0, xs = problem("forward")
    right = plain_loop(step, z0, xs)
    found = deeppcr.solve(step, z0, xs, solver=solver, **options)
    assert found.result is Result.LOOP
    if "lengths" in options:
        right[3:, 0] = right[2, 0]
        assert torch.equal(found.states, right)
    assert torch.equal(found.final, right[-1])


@pytest.mark.parametrize("solver", [Newton(), deeppcr.Picard(), Loop(by="graph")])
def test_others_say_that_they_cannot(solver):
    with pytest.raises(ValueError, match=r"z0: holds an infinity, .* solver=Loop\(\), or none"):
        deeppcr.solve(*problem("forward"), solver=solver)


@pytest.mark.parametrize("case", CASES)
def test_those_who_tell_before_say_what_is_done(case):
    predicted = deeppcr.predict(*problem(case))
    assert predicted.way == "loop"
    assert predicted.why in deeppcr.solve(*problem(case)).plan.notes
    (finding,) = deeppcr.check(*problem(case))
    assert (finding.kind, finding.message[:21]) == ("not finite", "z0: holds an infinity")


@pytest.mark.parametrize("function", [deeppcr.check, deeppcr.predict, deeppcr.solve])
def test_nan_is_a_mistake(function):
    step, z0, xs = problem("forward")
    with pytest.raises(ValueError, match="z0: holds NaN"):
        function(step, z0 * torch.nan, xs)


@pytest.mark.parametrize("solver", SOLVERS)
def test_nan_is_told_where_infinities_are_values(solver):
    step, z0, xs = problem("forward")
    xs[4, 1, 2] = torch.inf  # beside minus infinity
    z0[1] = -torch.inf
    with pytest.warns(ConvergenceWarning, match="step 5 produced a value that is not finite; xs holds an infinity"):
        found = deeppcr.solve(step, z0, xs, solver=solver)
    assert found.results == (Result.LOOP, Result.NON_FINITE)
    assert found.exact_steps.tolist() == [9, 4]


def test_an_infinity_that_comes_from_nowhere_is_told_as_ever():
    with pytest.warns(ConvergenceWarning, match="step 6 produced a value that is not finite although its input is"):
        found = deeppcr.solve(lambda z: z * z, torch.full((1, 1), 10.0), length=9, solver=Loop())
    assert found.result is Result.NON_FINITE
    assert found.exact_steps.item() == 5


def test_nan_at_the_start_is_refused_by_default_and_told_by_the_loop():
    step, z0, xs = lambda z, x: torch.where(z.isnan(), x, z + x), torch.zeros(2, 3), torch.ones(5, 2, 3)
    z0[1, 1] = torch.nan
    with pytest.raises(ValueError, match=r"z0: holds NaN, .* solver=Loop\(\)$"):
        deeppcr.solve(step, z0, xs)
    found = deeppcr.solve(step, z0, xs, solver=Loop())  # where the step knows what to make of it
    assert found.result is Result.LOOP
    assert torch.equal(found.final, torch.full((2, 3), 5.0))
    with pytest.warns(ConvergenceWarning, match="step 1 produced a value that is not finite; z0 holds NaN there"):
        assert deeppcr.solve(torch.add, z0, xs, solver=Loop()).results == (Result.LOOP, Result.NON_FINITE)


def test_other_solves_of_the_kind_are_not_left_to_the_loop(monkeypatch):
    """What z0 holds says nothing of the step."""
    monkeypatch.setitem(plan._WORTH_NEWTON, "cpu", 0.0)
    monkeypatch.setitem(plan._OPERATION, "cpu", (1.0, 0.0, 0.0))
    step, z0, xs = lambda z, x: torch.tanh(0.5 * z + x), torch.zeros(2, 3), torch.ones(40, 2, 3)
    for start, result in ((z0 - torch.inf, Result.LOOP), (z0, Result.CONVERGED), (z0 - torch.inf, Result.LOOP)):
        assert deeppcr.solve(step, start, xs).result is result


def test_numbers_whose_sum_overflows_are_finite(device):
    z0 = torch.full((2, 4), 3e38, device=device)
    assert not_finite_in(z0) is None
    assert not_finite_in((z0, z0.half())) == "an infinity"
    for solver in (None, deeppcr.Newton(), deeppcr.Loop()):
        found = deeppcr.solve(lambda z: 0.5 * z, z0, length=5, solver=solver)
        assert torch.allclose(found.states[-1], z0 / 32)
        assert "z0 holds" not in str(found.plan)
