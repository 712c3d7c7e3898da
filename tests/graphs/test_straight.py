"""A fixed number of iterations inside a CUDA graph of the caller: nothing asks the host, and nothing goes wrong in silence.

Without a GPU a tape stands for the graph: an operation that would ask the host raises.
"""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import deeppcr
from deeppcr import FixedIterations, Newton, Random, linear
from deeppcr.runtime import CAPTURING
from kernel_support import pairwise
from problems import Generator, Problem, mlp, relative_error, resnet
from tape import capture


@pytest.fixture(autouse=True)
def on_the_tape(device):
    if device.type != "cpu":
        pytest.skip("there are real graphs")


def fixed(count, **settings):
    return Newton(stop=FixedIterations(count), **{"chunk": 1, **settings})


class Captured:
    """A solve and its backward pass, captured; ``run`` replays them on other inputs."""

    def __init__(self, problem, weigh, **settings):
        self.problem, self.weigh, self.settings = problem, weigh, settings
        self.leaves = [problem.z0, *problem.xs]
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.again = capture(self._once)

    def _once(self):
        self.solution = self.problem.solve(**self.settings)
        self.gradients = torch.autograd.grad(self.weigh(self.solution.states), self.leaves)

    def eagerly(self):
        solution = self.problem.solve(**self.settings)
        return solution, torch.autograd.grad(self.weigh(solution.states), self.leaves)

    def replay(self, *values):
        with torch.no_grad():
            for leaf, value in zip(self.leaves, values, strict=False):
                leaf.copy_(value)
        self.again()
        return self.solution, self.gradients


PROBLEMS = {
    "relu": mlp,
    "tanh": lambda make, length, rows: mlp(make, length, rows, activation=torch.tanh),
    "resnet": resnet,
}


@pairwise(name=PROBLEMS.keys(), rows=[1, 8], count=[1, 3, 9])
def test_like_the_general_iteration(name, rows, count):
    make = Generator(0)
    problem = PROBLEMS[name](make, 6, rows)  # so short that nine iterations are more than it takes
    settings = {"solver": fixed(count), "guess": make.normal(6, rows, problem.z0.shape[-1])}
    captured = Captured(problem, lambda states: states.sin().sum(), **settings)
    for _ in range(2):
        solution, gradients = captured.replay(make.normal(*problem.z0.shape))
        expected, true = captured.eagerly()
        assert solution.results == expected.results
        assert solution.iterations.tolist() == expected.iterations.tolist()
        assert solution.exact_steps.tolist() == expected.exact_steps.tolist()
        assert relative_error(solution.states, expected.states) < 1e-12
        assert torch.allclose(solution.residual, expected.residual, rtol=1e-12, atol=1e-14)
        assert relative_error(solution.updates[: len(expected.updates)], expected.updates) < 1e-6
        assert all(relative_error(mine, its) < 1e-12 for mine, its in zip(gradients, true, strict=True))


@pytest.mark.parametrize("solver", [linear.PCR(), linear.Hierarchical(), linear.ForwardSubstitution()])
@pytest.mark.parametrize("chunk", [1, 3])
def test_chunks_and_linear_solvers(chunk, solver):
    problem = mlp(Generator(0), 20, 2, activation=torch.tanh)
    captured = Captured(problem, lambda states: states[-1].sum(), solver=fixed(2, chunk=chunk, linear=solver))
    (solution, gradients), (expected, true) = captured.replay(), captured.eagerly()
    assert relative_error(solution.states, expected.states) < 1e-12
    assert all(relative_error(mine, its) < 1e-12 for mine, its in zip(gradients, true, strict=True))


def calm(z, x):
    return torch.tanh(z) * x[0]


def growing(z, x):
    """Row 0 grows beyond all bounds, and takes some steps to; the others do not."""
    return torch.cat([z[:1] * 1e60, calm(z[1:], (x[0][1:],))])


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
def test_a_row_that_overflows_ends_in_nan_and_leaves_the_others_alone():
    make = Generator(0)
    z0, xs, guess = make.normal(3, 2).abs() + 0.1, make.normal(12, 3, 2), make.normal(12, 3, 2)
    solver = fixed(8, linear=linear.ForwardSubstitution())
    problem = Problem(growing, z0, (xs,))
    captured = Captured(problem, lambda states: states[-1, 1:].sum(), solver=solver, guess=guess)
    solution, gradients = captured.replay()
    expected = problem.solve(**captured.settings)
    assert expected.results[0] is deeppcr.Result.NON_FINITE
    assert solution.exact_steps.tolist() == expected.exact_steps.tolist() == [5, 12, 12]
    assert torch.allclose(solution.states[:, 1:], expected.states[:, 1:], rtol=1e-12)
    assert torch.allclose(solution.states[:5, 0], expected.states[:5, 0], rtol=1e-12)
    assert solution.states[5:, 0].isnan().all()
    assert solution.residual.isnan().tolist() == [True, False, False]

    alone = Problem(calm, z0[1:].detach().requires_grad_(), (xs[:, 1:].detach(),))
    states = alone.solve(solver=solver, guess=guess[:, 1:]).states
    (true,) = torch.autograd.grad(states[-1].sum(), alone.z0)
    assert relative_error(gradients[0][1:], true) < 1e-12


def test_a_product_of_blocks_that_overflows_is_not_taken_for_an_update():
    """By forward substitution it would not: where nobody can look, there is no other try."""
    make = Generator(0)
    z0, xs, guess = make.normal(2, 2), make.normal(24, 2, 2), make.normal(24, 2, 2)
    z0[0], xs[:10, 0], xs[10:, 0], guess[:, 0] = 1e-300, 1e50, 1e-50, 0.0
    problem = Problem(lambda z, x: z * x[0], z0, (xs,))
    settings = {"solver": fixed(2, linear=linear.PCR()), "guess": guess}
    captured = Captured(problem, lambda states: states[-1].sum(), **settings)
    solution, _ = captured.replay()
    expected = problem.solve(**settings)
    assert torch.isfinite(expected.states).all()
    assert torch.allclose(solution.states[:, 1], expected.states[:, 1])
    assert solution.states[0, 0].isnan().all()
    assert solution.exact_steps.tolist() == [0, 24]


def test_a_guess_that_is_not_finite_spoils_its_row():
    """Eagerly it is refused, which takes a look."""
    make = Generator(0)
    guess = make.normal(12, 2, 3)
    problem = Problem(lambda z, x: torch.tanh(z) * x[0], make.normal(2, 3), (make.normal(12, 2, 3),))
    solver = fixed(3, linear=linear.ForwardSubstitution())
    captured = Captured(problem, lambda states: states[:, 1].sum(), solver=solver, guess=guess)
    before = captured.replay()[0].states.clone()
    guess[5, 0, 1] = math.nan
    solution, _ = captured.replay()
    assert solution.exact_steps.tolist() == [0, 12]
    assert solution.states[:, 0].isnan().all()
    assert torch.equal(solution.states[:, 1], before[:, 1])


def test_no_more_iterations_than_can_change_anything():
    make = Generator(0)
    problem = Problem(lambda z, x: torch.tanh(z) * x[0], make.normal(2, 3), (make.normal(12, 2, 3),))
    captured = Captured(problem, lambda states: states.sum(), solver=fixed(200, chunk=2))
    solution, _ = captured.replay()
    assert len(solution.updates) == 6
    assert relative_error(solution.states, problem.solve(solver=fixed(200, chunk=2)).states) < 1e-12


def test_an_iterate_that_strays_is_cut_off_as_ever():
    """A guess from which some steps overflow, though from the true states they do not."""
    make = Generator(0)
    guess = make.normal(12, 2, 3)
    guess[4] = 800.0
    problem = Problem(
        lambda z, x: torch.exp(torch.exp(z) / 100) * x[0] / 9, make.normal(2, 3), (make.normal(12, 2, 3),)
    )
    captured = Captured(problem, lambda states: states.sum(), solver=fixed(7), guess=guess)
    (solution, gradients), (expected, true) = captured.replay(), captured.eagerly()
    assert solution.results == expected.results
    assert relative_error(solution.states, expected.states) < 1e-12
    assert all(relative_error(mine, its) < 1e-12 for mine, its in zip(gradients, true, strict=True))


def test_an_adjoint_that_does_not_hold_is_nan():
    """Eagerly the check raises: a Jacobian that is not the step's."""
    wrong = deeppcr.GivenJacobian(lambda z, x: linear.Diagonal(1 - torch.tanh(z) ** 2), exact=True)
    make = Generator(0)
    problem = Problem(lambda z, x: torch.tanh(z) * x[0], make.normal(2, 3), (torch.ones(9, 2, 3).double(),))
    captured = Captured(problem, lambda states: states[-1].sum(), solver=fixed(3, jacobian=wrong))
    xs = torch.ones(9, 2, 3).double()
    assert torch.isfinite(captured.replay(problem.z0, xs)[1][0]).all()
    xs[4, 1] = 1.5
    solution, (gradient, _) = captured.replay(problem.z0, xs)
    assert torch.isfinite(solution.states).all()
    assert gradient.isnan().all(1).tolist() == [False, True]
    with pytest.raises(RuntimeError, match="given Jacobian is wrong"):
        captured.eagerly()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gradients_that_are_not_finite_come_through_as_nan(bad):
    weight = torch.ones(2, dtype=torch.float64)
    problem = mlp(Generator(0), 9, 2, activation=torch.tanh)
    captured = Captured(problem, lambda states: (states[-1] * weight.unsqueeze(-1)).sum(), solver=fixed(3))
    weight[1] = bad
    _, (gradient, *_) = captured.replay()
    assert gradient.isnan().all(1).tolist() == [False, True]


def test_a_network_in_training():
    """A whole step, warm start and all, as the steps that are taken one by one."""

    def train(steps, take):
        torch.manual_seed(0)
        network = deeppcr.nn.ResNet(5, 4, 24, 3, newton=fixed(2), mode="parallel", warm_start=True).double()
        optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
        x, labels = torch.zeros(8, 5, dtype=torch.float64), torch.arange(8) % 3
        losses = torch.zeros(1, dtype=torch.float64)

        def step():
            optimiser.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(network(x), labels)
            loss.backward()
            optimiser.step()
            losses.copy_(loss.detach())

        make, found = Generator(1), []
        for number in range(steps):
            x.copy_(make.normal(8, 5))
            step = take(step) if number == 2 else step  # two steps to get warm
            step()
            found.append(losses.item())
        return network, found

    def from_now_on(step):
        kept = None

        def again():
            nonlocal kept
            if kept is None:
                kept = capture(step)  # which on the tape takes the step, too
            else:
                kept()

        return again

    (one, eager), (other, replayed) = train(6, lambda step: step), train(6, from_now_on)
    assert replayed == pytest.approx(eager, rel=1e-12)
    assert relative_error(other.activations, one.activations) < 1e-12
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(other.parameters(), one.parameters(), strict=True))


class Elsewhere(TorchDispatchMode):
    """Collects the operations that touch memory of another device than ``meta``, where there is nothing to read."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, found)) if isinstance(leaf, torch.Tensor)]
        if any(not tensor.is_meta and not tensor._is_zerotensor() for tensor in tensors):
            self.found.add(func)
        return found


@pytest.mark.parametrize("chunk", [1, 3])
def test_nothing_comes_from_the_host(chunk, monkeypatch):
    """Forward and backward on a device without values, from which nothing can be read at all."""
    monkeypatch.setitem(CAPTURING, "meta", lambda: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda *_: torch.bfloat16)  # meta has none
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    network = deeppcr.nn.ResNet(
        5, 4, 24, 3, newton=fixed(2, chunk=chunk), mode="parallel", warm_start=True, device="meta"
    )
    z0, xs = torch.empty(2, 4, device="meta", requires_grad=True), torch.empty(9, 4, 4, device="meta")
    with Elsewhere() as elsewhere:
        network(torch.empty(2, 5, device="meta")).sum().backward()
        step = lambda z, x: torch.tanh(z) @ x  # noqa: E731
        deeppcr.solve(step, z0, xs, solver=fixed(2, chunk=chunk)).states.sum().backward()
    assert z0.grad is not None
    assert not elsewhere.found


def test_a_warm_start_is_not_spoilt_by_a_pass_that_overflows():
    network = deeppcr.nn.MLP(5, 4, 12, 3, newton=fixed(3), mode="parallel", warm_start=True)
    x = torch.ones(2, 5)
    network(x)
    again = capture(lambda: network(x))
    kept = network.activations.clone()
    x.fill_(math.nan)
    again()
    assert torch.equal(network.activations, kept)


@pytest.mark.parametrize(
    "settings",
    [
        {"solver": Newton()},
        {"solver": deeppcr.Loop()},
        {"solver": deeppcr.Picard(stop=FixedIterations(3))},
        {"solver": fixed(2), "gradient": deeppcr.Unrolled()},
        {"solver": fixed(2), "on_failure": "raise"},
        {"solver": fixed(2, jacobian=deeppcr.DiagonalJacobian())},
    ],
)
def test_what_needs_a_look_says_so(settings):
    problem = mlp(Generator(0), 9, 2)
    with pytest.raises(RuntimeError, match="captured"):
        capture(lambda: problem.solve(**settings))


def test_random_numbers_of_the_host_cannot_be_repeated():
    problem = mlp(Generator(0), 9, 2)
    with pytest.raises(RuntimeError, match="fill it before each replay"):
        capture(lambda: problem.solve(solver=fixed(2), guess=Random()))


def test_without_gradients():
    problem = mlp(Generator(0), 9, 2)
    found = []
    with torch.no_grad():
        again = capture(lambda: found.append(problem.solve(solver=fixed(9))))
    problem.z0.add_(1)
    again()
    assert relative_error(found[0].states, problem.loop()) < 1e-12
    assert not found[0].states.requires_grad
