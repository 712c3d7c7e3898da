"""Where nobody says which way a solve goes: what is given to it is looked at as in any other, and left as it is."""

import math

import pytest
import torch

import deeppcr
from deeppcr import Newton, Result


@pytest.mark.parametrize("length", [10, 30])
def test_a_length_that_is_not_that_of_xs_is_named(length):
    with pytest.raises(ValueError, match="lengths differ"):
        deeppcr.solve(lambda z, x: 0.5 * z + x, torch.ones(3), torch.zeros(20, 3), length=length)


def test_the_tensors_of_the_caller_stay_as_they_are():
    z0, xs = torch.ones(2), torch.ones(20, 2)
    with pytest.raises(deeppcr.StepError, match="its state in place"):
        deeppcr.solve(lambda z, x: z.mul_(0.5).add_(x), z0, xs)
    assert torch.equal(z0, torch.ones(2))
    with pytest.raises(deeppcr.StepError, match="xs in place"):
        deeppcr.solve(lambda z, x: 0.5 * z + x.mul_(2), z0, xs)
    assert torch.equal(xs[1:], torch.ones(19, 2))


def test_a_step_that_raises_is_not_run_again():
    taken = []

    def step(z, x):
        taken.append(x)
        if len(taken) == 5:
            raise KeyError("the fifth")
        return torch.tanh(z) + x

    with pytest.raises(KeyError, match="the fifth"):
        deeppcr.solve(step, torch.zeros(2, 3), torch.randn(9, 2, 3))
    assert len(taken) == 5


@pytest.mark.parametrize("solver", [None, deeppcr.Loop()])
def test_what_xs_bring_along_is_not_blamed_on_the_step(solver):
    xs = torch.randn(9, 2, 3)
    xs[4, 1, 0] = torch.nan
    with pytest.warns(deeppcr.ConvergenceWarning, match=r"^step 5 .*xs holds NaN there, .*\(row 1; 1 of 2 rows\)"):
        deeppcr.solve(lambda z, x: torch.tanh(z) + x, torch.zeros(2, 3), xs, solver=solver)
    with pytest.warns(deeppcr.ConvergenceWarning, match=r"^step 1 .* although its input is: .*\(row 0; 1 of 2 rows\)"):
        deeppcr.solve(lambda z: 1 / z, torch.tensor([[0.0], [1.0]]), length=4, solver=solver)


@pytest.mark.parametrize("solver", [None, deeppcr.Loop(), Newton()])
@pytest.mark.parametrize(("value", "held"), [(math.nan, "NaN"), (math.inf, "an infinity")])
def test_the_input_that_is_not_finite_is_named(solver, value, held):
    xs = {"a": torch.randn(9, 2, 3), "b": (torch.zeros(9), torch.randn(9, 2, 3))}
    xs["b"][1][4, 1, 0] = value
    step = lambda z, x: torch.tanh(z) + x["a"] + x["b"][0] + x["b"][1]  # noqa: E731
    message = rf"^step 5 .* not finite; xs\['b'\]\[1\] holds {held} there, .*\(row 1; 1 of 2 rows\)"
    with pytest.warns(deeppcr.ConvergenceWarning, match=message):
        deeppcr.solve(step, torch.zeros(2, 3), xs, solver=solver)
    xs["a"][4, 1, 2] = math.nan  # which an infinity does not hide
    xs["b"][1][4, 1, 0] = math.inf
    with pytest.warns(deeppcr.ConvergenceWarning, match=r"xs\['a'\] holds NaN"):
        deeppcr.solve(step, torch.zeros(2, 3), xs, solver=solver)


def test_nests_of_inputs_are_put_together_as_they_were():
    a, b = torch.randn(5, 2, 1), torch.randn(5, 2, 1)
    for xs, step in (
        ({"b": b, "a": a}, lambda z, x: z / 2 + x["b"] - 2 * x["a"]),
        ((b, a), lambda z, x: z / 2 + x[0] - 2 * x[1]),
        (((b, a), ()), lambda z, x: z / 2 + x[0][0] - 2 * x[0][1]),
        ({"c": (b, a), "d": ()}, lambda z, x: z / 2 + x["c"][0] - 2 * x["c"][1]),
    ):
        z, expected = torch.zeros(2, 1), []
        for l in range(5):
            z = z / 2 + b[l] - 2 * a[l]
            expected.append(z)
        assert torch.equal(deeppcr.solve(step, torch.zeros(2, 1), xs).states, torch.stack(expected))


@pytest.mark.parametrize("length", [2, 8, 500])
@pytest.mark.parametrize("solver", [None, Newton()])
def test_random_steps_are_refused_however_short_the_loop_is(length, solver):
    dropout = torch.nn.Dropout(0.5)
    with pytest.raises(ValueError, match=r"draws random numbers; call \.eval\(\)"):
        deeppcr.solve(lambda z: torch.sin(dropout(z)), torch.ones(2, 3), length=length, solver=solver)
    dropout.eval()
    deeppcr.solve(lambda z: torch.sin(dropout(z)), torch.ones(2, 3), length=length, solver=solver)


def test_the_first_call_may_make_parameters():
    layer = torch.nn.LazyLinear(3)
    assert deeppcr.solve(lambda z: torch.sin(layer(z)), torch.ones(2, 3), length=5).result is Result.LOOP
