"""Derivatives at a kink: states below the tolerance have no certain sign, and a ReLU's derivative is all about signs."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import deeppcr
from deeppcr import ConvergenceWarning, Implicit, Newton, Result, Unrolled
from deeppcr.graphs import record
from deeppcr.sequence import Sequence
from kernel_support import pairwise
from problems import Generator, Problem, mlp, plain_loop
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


@pairwise(
    settings={
        "default": {},
        "zeros": {"guess": deeppcr.Zeros()},
        "chunk of one": {"solver": Newton(chunk=1)},
        "jacobi": {"solver": deeppcr.Jacobi()},
    },
    dtype=[torch.float32, torch.float64],
    gradient=[Implicit(), Unrolled()],
)
def test_gradients_where_states_vanish(settings, dtype, gradient, device):
    problem = vanishing(dtype, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = problem.solve(gradient=gradient, **settings)
    assert_those_of_the_loop(found.states, problem, dtype)


@pytest.mark.usefixtures("without_kernels")
def test_who_is_handed_to_the_loop_is_told_why(device):
    problem = vanishing(torch.float32, device)
    with pytest.warns(
        ConvergenceWarning, match=r"died out below the tolerance: the derivative .* Newton\(scale=\"local\"\)"
    ):
        found = problem.solve()
    assert found.result is Result.FINISHED_BY_LOOP
    assert 0 < int(found.exact_steps.min()) < LENGTH
    with pytest.raises(deeppcr.ConvergenceError, match="died out below the tolerance"):
        problem.solve(on_failure="raise")
    with pytest.warns(ConvergenceWarning, match="died out below the tolerance"):
        returned = problem.solve(on_failure="return")
    assert torch.allclose(returned.states, problem.loop(), atol=2e-5)
    with pytest.raises(RuntimeError, match=r"no gradient.*died out below the tolerance"):
        returned.states.sum().backward()


def test_rows_are_judged_by_themselves(device):
    """One of them is small, too, but is kept up: its digits are right."""
    problem = vanishing(torch.float32, device, rows=2)
    weights, biases = problem.xs
    kept_up = torch.stack([torch.zeros_like(biases), torch.full_like(biases, 0.02)], 1).detach()
    xs = (weights, biases, kept_up)
    step = lambda z, x: torch.relu(z) @ x[0].mT + x[1] + x[2]  # noqa: E731
    with pytest.warns(ConvergenceWarning, match=r"row 0; 1 of 2 rows"):
        found = deeppcr.solve(step, problem.z0, xs, solver=Newton())
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
        found = deeppcr.solve(
            lambda z, x: torch.relu(z) @ x[0].mT + x[1], make.normal(3, 8).to(dtype), xs, solver=Newton()
        )
    assert found.result in (Result.CONVERGED, Result.PRECISION_FLOOR)


def positive(z, x):
    """Newton's iterates may be below zero by rounding, and by no more."""
    if (z < -2e-6).any():
        raise ValueError("a concentration is positive")
    return x * z / (1 + z)


def quotient(z, x):
    return x * z / (1 + z)


def square(z, x):
    return x * z * z + 0.1 * z


def gated(z, x):
    """A large state steers, smoothly, one that dies out."""
    large, small = z
    return 0.9 * torch.tanh(large) + 2 * x, 0.5 * small * torch.sigmoid(large)


def starts_and_inputs(step, make):
    xs = make.normal(256, 4, 3).tanh()
    if step is gated:
        return (make.normal(4, 3), make.normal(4, 3)), xs
    return (make.normal(4, 3) / 4, xs) if step is square else (make.normal(4, 3).abs() + 0.5, 0.4 + 0.1 * xs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("step", [positive, quotient, square, gated])
def test_what_dies_out_smoothly_is_left_alone(step, dtype, device):
    z0, xs = starts_and_inputs(step, Generator(0, dtype, device))
    xs.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        found = deeppcr.solve(deeppcr.rowwise(step) if step is positive else step, z0, xs, solver=Newton())
    assert found.result is Result.CONVERGED
    last = [pytree.tree_leaves(each)[-1][20] for each in (found.states, plain_loop(step, z0, xs))]
    ours, loops = (torch.autograd.grad(each.sum(), xs)[0] for each in last)
    assert (ours - loops).abs().max() <= 1e-3 * loops.abs().max()


def test_a_counter_is_not_moved(device):
    """It may be an index: beyond the table there is nothing."""
    table = torch.ones(257, 3, device=device, requires_grad=True)

    def step(z):
        count, value = z
        return count + 1, 0.4 * torch.sin(value) * table[count[..., 0].long()]

    found = deeppcr.solve(
        step, (torch.zeros(4, 1, device=device), torch.randn(4, 3, device=device)), length=256, solver=Newton()
    )
    assert found.result is Result.CONVERGED
    found.states[1].sum().backward()
    assert torch.isfinite(table.grad).all()


def test_a_kink_that_is_the_same_at_the_opposite(device):
    """Who is larger, of either sign."""

    def step(z, x):
        return torch.where(z.abs() > z.flip(-1).abs(), 1.2 * z, 0.1 * z) @ x[0].mT * 0.5 + x[1]

    given = vanishing(torch.float32, device)
    problem = Problem(step, given.z0, given.xs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = problem.solve()
    assert_those_of_the_loop(found.states, problem, torch.float32)


@pytest.mark.parametrize("gradient", [Implicit(), Unrolled()], ids=lambda each: type(each).__name__)
def test_ordinary_states_cost_nothing_more(gradient, device, monkeypatch):
    problem, calls = mlp(Generator(0, torch.float64, device), 30, 2), []
    problem.xs[0].requires_grad_()
    deeppcr.clear_caches()  # the second of its kind would be recorded, whatever test the first was in
    values = Sequence.values
    monkeypatch.setattr(Sequence, "values", lambda self, *given: calls.append(len(given[0])) or values(self, *given))
    problem.solve(gradient=gradient)
    assert calls.count(30) == 1  # of all steps at once; chunks are rolled out step by step


def test_without_a_gradient_nobody_asks(device):
    problem = vanishing(torch.float32, device)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        assert problem.solve().result is Result.CONVERGED


def test_the_rule_of_the_paper_promises_nothing(device):
    problem = vanishing(torch.float32, device)
    assert problem.solve(solver=Newton(stop=deeppcr.PaperTest())).result is Result.CONVERGED


@pytest.mark.usefixtures("without_kernels")
def test_solves_that_are_replayed(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setitem(record.RECORDERS, "cpu", Tape)
    problem = vanishing(torch.float32, device)
    deeppcr.clear_caches()
    for _ in range(3):
        with pytest.warns(ConvergenceWarning, match="died out below the tolerance"):
            found = problem.solve()
        assert_those_of_the_loop(found.states, problem, torch.float32)
    deeppcr.clear_caches()


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
