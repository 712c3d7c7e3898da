"""Derivatives at a kink: states below the tolerance have no certain sign, and a ReLU's derivative is all about signs."""

import warnings

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr import ConvergenceWarning, Implicit, Newton, Result, Unrolled, recording
from problems import Generator, Problem, plain_loop
from tape import Tape

LENGTH, WIDTH = 64, 16


def vanishing(dtype, device, activation=torch.relu, rows=4):
    """Every layer halves the power of its input or more, and adds nothing to it: a network whose biases start at zero."""
    make = Generator(0, dtype, device)
    weights, biases = make.normal(LENGTH, WIDTH, WIDTH) / WIDTH**0.5, make.normal(LENGTH, WIDTH) * 0
    xs = weights.requires_grad_(), biases.requires_grad_()
    return Problem(lambda z, x: activation(z) @ x[0].mT + x[1], make.normal(rows, WIDTH), xs)


def gradients(states, problem):
    return torch.autograd.grad(states[-1].sum() + states.square().sum(), problem.xs)


def assert_those_of_the_loop(found, problem, dtype):
    for ours, loops in zip(gradients(found, problem), gradients(problem.loop(), problem), strict=True):
        assert (ours - loops).abs().max() <= 100 * torch.finfo(dtype).eps * loops.abs().max()


@pytest.mark.parametrize("gradient", [Implicit(), Unrolled()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"guess": deeppcr.Zeros()}, {"solver": Newton(chunk=1)}, {"solver": deeppcr.Jacobi()}],
    ids=["default", "zeros", "chunk of one", "jacobi"],
)
def test_gradients_where_states_vanish(settings, dtype, gradient, device):
    problem = vanishing(dtype, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = problem.solve(gradient=gradient, **settings)
    assert_those_of_the_loop(found.states, problem, dtype)


def test_who_is_handed_to_the_loop_is_told_why(device):
    problem = vanishing(torch.float32, device)
    with pytest.warns(ConvergenceWarning, match=r"smaller than atol = 1e-05: the derivative .* Newton\(atol=0\)"):
        found = problem.solve()
    assert found.result is Result.FINISHED_BY_LOOP
    assert 0 < int(found.exact_steps.min()) < LENGTH
    with pytest.raises(deeppcr.ConvergenceError, match="smaller than atol"):
        problem.solve(on_failure="raise")
    with pytest.warns(ConvergenceWarning, match="smaller than atol"):
        returned = problem.solve(on_failure="return")
    assert torch.allclose(returned.states, problem.loop(), atol=2e-5)
    with pytest.raises(RuntimeError, match=r"no gradient.*smaller than atol"):
        returned.states.sum().backward()


def test_rows_are_judged_by_themselves(device):
    """One of them is small, too, but is kept up: its digits are right."""
    problem = vanishing(torch.float32, device, rows=2)
    weights, biases = problem.xs
    kept_up = torch.stack([torch.zeros_like(biases), torch.full_like(biases, 0.02)], 1).detach()
    xs = (weights, biases, kept_up)
    step = lambda z, x: torch.relu(z) @ x[0].mT + x[1] + x[2]  # noqa: E731
    with pytest.warns(ConvergenceWarning, match=r"row 0; 1 of 2 rows"):
        found = deeppcr.solve(step, problem.z0, xs)
    assert found.results == (Result.FINISHED_BY_LOOP, Result.CONVERGED)
    ours, loops = (gradients(each, problem) for each in (found.states, plain_loop(step, problem.z0, xs)))
    for one, other in zip(ours, loops, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("activation", [torch.tanh, nn.functional.silu], ids=lambda each: each.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_smooth_steps_have_no_kink(activation, dtype, device):
    """They may vanish as they like: nobody goes step by step for that."""
    problem = vanishing(dtype, device, lambda z: 0.5 * activation(z))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        found = problem.solve()
    assert found.result is Result.CONVERGED
    assert float(found.states.detach()[-1].abs().max()) < 1e-10
    for ours, loops in zip(gradients(found.states, problem), gradients(problem.loop(), problem), strict=True):
        assert (ours - loops).abs().max() <= 1e-4 * loops.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_digits_are_no_kink(dtype, device):
    """In half precision no state is to four digits what its step gives."""
    make = Generator(0, torch.float32, device)
    weights, biases = make.normal(40, 8, 8) / 4, make.normal(40, 8)
    xs = tuple(each.to(dtype).requires_grad_() for each in (weights, 0.05 * biases))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        found = deeppcr.solve(lambda z, x: torch.relu(z) @ x[0].mT + x[1], make.normal(3, 8).to(dtype), xs)
    assert found.result in (Result.CONVERGED, Result.PRECISION_FLOOR)


def test_a_step_that_takes_no_negative_numbers(device):
    """It is not to be asked what it gives for the opposite of its states: the loop goes on, which is always right."""
    rates = torch.full((LENGTH, 3), 0.4, device=device, requires_grad=True)

    def step(z, x):
        if (z < 0).any():
            raise ValueError("a concentration is positive")
        return x * torch.relu(z) / (1 + z)

    positive = deeppcr.rowwise(step)
    xs = rates.unsqueeze(1).expand(LENGTH, 2, 3)
    z0 = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 0.5]], device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = deeppcr.solve(positive, z0, xs, guess=deeppcr.Zeros())
    (ours,) = torch.autograd.grad(found.states[-1].sum(), rates)
    (loops,) = torch.autograd.grad(plain_loop(step, z0, xs)[-1].sum(), rates)
    assert found.result is Result.FINISHED_BY_LOOP
    assert (ours - loops).abs().max() <= 1e-5 * loops.abs().max()


def test_without_a_gradient_nobody_asks(device):
    problem = vanishing(torch.float32, device)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        assert problem.solve().result is Result.CONVERGED


def test_the_rule_of_the_paper_promises_nothing(device):
    problem = vanishing(torch.float32, device)
    assert problem.solve(solver=Newton(stop=deeppcr.PaperTest())).result is Result.CONVERGED


def test_solves_that_are_replayed(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setitem(recording.RECORDERS, "cpu", Tape)
    problem = vanishing(torch.float32, device)
    deeppcr.clear_graphs()
    for _ in range(3):
        with pytest.warns(ConvergenceWarning, match="smaller than atol"):
            found = problem.solve()
        assert_those_of_the_loop(found.states, problem, torch.float32)
    deeppcr.clear_graphs()


@pytest.mark.parametrize("depth", [16, 32, 64])
def test_networks_whose_biases_start_at_zero(depth):
    """On a CPU: the kernels of a GPU do not look for kinks."""
    torch.manual_seed(0)
    net, x = deeppcr.nn.MLP(8, WIDTH, depth, 3), torch.randn(8, 8)
    nn.init.zeros_(net.bias)
    found = []
    for mode in ("sequential", "parallel"):
        net.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            net(x, mode=mode).square().sum().backward()
        found.append([each.grad.clone() for each in net.parameters()])
    for loops, ours in zip(*found, strict=True):
        assert (ours - loops).abs().max() <= 1e-5 * loops.abs().max()
