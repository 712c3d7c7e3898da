"""Solves that are recorded and replayed: the same results, whatever changes between them.

Without a GPU a tape stands for CUDA graphs: it, too, repeats operations and nothing of Python.
"""

from functools import partial

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr import (
    DiagonalJacobian,
    FixedIterations,
    GivenJacobian,
    Newton,
    PaperTest,
    Result,
    UpdateTest,
    linear,
)
from deeppcr.graphs.cache import captured_solves
from deeppcr.newton.iteration import Iteration
from deeppcr.sequence import Sequence
from graphs.replayed import assert_same, is_replayed, twice, why_not
from kernel_support import pairwise, thorough
from problems import Generator, Problem, mlp, plain_loop, relative_error, resnet

pytestmark = pytest.mark.usefixtures("recording")


def tuples(make, length, rows):
    """States and inputs that are nests."""
    weight = make.normal(4, 4) / 4

    def step(z, x):
        a, b = z
        return torch.tanh(a @ weight + x["a"]), 0.5 * b + a.sum(-1, keepdim=True) * x["b"]

    xs = {"a": make.normal(length, 4), "b": make.normal(length, rows, 1)}
    return Problem(step, (make.normal(rows, 4), make.normal(rows, 1)), xs)


def linear_steps(make, length, rows):
    blocks = make.normal(length, 3, 3) / 3
    return Problem(lambda z, x: z @ x.mT + 1, make.normal(rows, 3), blocks)


PROBLEMS = {
    "relu": mlp,
    "tanh": lambda make, length, rows: mlp(make, length, rows, activation=torch.tanh),
    "resnet": partial(resnet, skip=2),
    "tuples": tuples,
    "linear": linear_steps,
}


@pytest.mark.parametrize("length", [20, *thorough(50)])
@pairwise(
    name=PROBLEMS.keys(),
    dtype=[torch.float32, torch.float64],
    stop={"update": UpdateTest(), "paper": PaperTest()},
    chunk=[1, 6],
)
def test_like_the_general_iteration(name, dtype, stop, length, chunk, device):
    problem = PROBLEMS[name](Generator(0, dtype, device), length, 3)
    solver = Newton(chunk=chunk, stop=stop)
    expected = problem.solve(solver=Newton(chunk=chunk, stop=stop, capture=False))
    first = problem.solve(solver=solver)
    assert why_not(first) == "not captured: the first of its kind"
    assert_same(problem.solve(solver=solver), expected)

    other = PROBLEMS[name](Generator(1, dtype, device), length, 3)
    if name != "tuples":  # which closes over a weight of its own
        problem.z0, problem.xs = other.z0, other.xs
        expected = problem.solve(solver=Newton(chunk=chunk, stop=stop, capture=False))
        assert_same(problem.solve(solver=solver), expected)


@pytest.mark.parametrize("count", [1, 3, 13])
def test_a_fixed_number_of_iterations(count, device):
    problem = mlp(Generator(0, torch.float64, device), 11, 3, activation=torch.tanh)  # exact before the thirteenth
    settings = {"chunk": 1, "stop": FixedIterations(count)}
    solution = twice(lambda: problem.solve(solver=Newton(**settings)))
    assert_same(solution, problem.solve(solver=Newton(**settings, capture=False)))
    assert solution.result is Result.ITERATIONS_DONE

    problem.xs[1][0] = torch.inf
    with pytest.warns(deeppcr.ConvergenceWarning, match="not finite"):
        overflowed = problem.solve(solver=Newton(**settings))
    assert why_not(overflowed) == "not captured: handed over to the general iteration"


def test_ragged_chunks_no_batch_no_inputs_one_step(device):
    for length, chunk in ((7, 3), (64, 8), (1, 1), (5, 1)):
        z0 = torch.linspace(-1, 1, 4, device=device)
        solution = twice(lambda: deeppcr.solve(torch.cos, z0, length=length, solver=Newton(chunk=chunk)))  # noqa: B023
        assert relative_error(solution.states, plain_loop(torch.cos, z0, length=length)) < 1e-5


def test_results_are_not_overwritten(device):
    problem = mlp(Generator(0, torch.float32, device), 40, 2)
    kept = twice(problem.solve)
    copies = [t.clone() for t in (kept.states, kept.residual, kept.iterations, kept.updates)]
    problem.z0 = problem.z0 + 1
    assert relative_error(problem.solve().states, problem.loop()) < 1e-5
    for mine, copy in zip((kept.states, kept.residual, kept.iterations, kept.updates), copies, strict=True):
        assert torch.equal(mine, copy)


def test_a_guess_is_no_part_of_the_recording(device):
    problem = mlp(Generator(0, torch.float64, device), 40, 2, activation=torch.tanh)
    cold = twice(problem.solve)
    warm = problem.solve(guess=cold)
    assert is_replayed(warm)
    assert warm.iterations.tolist() == [1, 1]
    assert is_replayed(problem.solve(guess=deeppcr.Random(seed=1)))
    with pytest.raises(ValueError, match="not finite"):
        problem.solve(guess=torch.full((40, 2, 16), torch.nan, dtype=torch.float64, device=device))
    assert len(captured_solves) == 1


def test_states_that_are_called_back_are_replayed(device, monkeypatch):
    """A narrow ReLU network throws a state far away in its first update; the replay calls it back as the general one."""
    make = Generator(0, torch.float64, device)
    weights, biases, z0 = make.normal(512, 2, 2) / 1.3, make.normal(512, 2) / 2, make.normal(1, 2)
    step = lambda z, x: torch.relu(z) @ x[0].mT + x[1]  # noqa: E731
    called, changes_states = [], Iteration.changes_states
    monkeypatch.setattr(
        Iteration, "changes_states", lambda self, flags: called.append(changes_states(self, flags)) or called[-1]
    )
    plain = Newton(chunk=1, capture=False)
    expected = deeppcr.solve(step, z0, (weights, biases), solver=plain)
    assert any(called)
    solution = twice(lambda: deeppcr.solve(step, z0, (weights, biases), solver=Newton(chunk=1)))
    assert is_replayed(solution)
    assert_same(solution, expected)


def test_rows_finish_by_themselves(device):
    rates = torch.tensor([[0.1], [2.9]], dtype=torch.float64, device=device)
    step = lambda z: rates * z * (1 - z)  # noqa: E731
    z0 = torch.full((2, 1), 0.3, dtype=torch.float64, device=device)
    solver = Newton(chunk=4)
    expected = deeppcr.solve(step, z0, length=40, solver=Newton(chunk=4, capture=False))
    assert expected.iterations[0] < expected.iterations[1]
    assert_same(twice(lambda: deeppcr.solve(step, z0, length=40, solver=solver)), expected)


def test_gradients(device):
    make = Generator(0, torch.float64, device)
    weight = (make.normal(8, 8) / 4).requires_grad_()
    z0, xs = make.normal(3, 8).requires_grad_(), make.normal(40, 8).requires_grad_()
    step = lambda z, x: torch.tanh(z @ weight + x)  # noqa: E731

    def gradients(states):
        return torch.autograd.grad(states.square().sum(), (weight, z0, xs))

    expected = gradients(plain_loop(step, z0, xs))
    for _ in range(3):
        solution = deeppcr.solve(step, z0, xs, solver=Newton())
        for found, true in zip(gradients(solution.states), expected, strict=True):
            assert relative_error(found, true) < 1e-8
    assert is_replayed(solution)
    with torch.no_grad():
        weight.mul_(0.5)
    solution = deeppcr.solve(step, z0, xs, solver=Newton())
    assert is_replayed(solution)
    for found, true in zip(gradients(solution.states), gradients(plain_loop(step, z0, xs)), strict=True):
        assert relative_error(found, true) < 1e-8
    solution = deeppcr.solve(step, z0.detach(), xs.detach(), solver=Newton())
    assert not solution.states.is_leaf  # the weight still requires a gradient


class TestJacobians:
    def test_given_by_a_function(self, device):
        make = Generator(0, torch.float64, device)
        z0, weights = make.normal(2, 5), make.normal(40, 5, 5) / 5
        scale = 1.0

        def jacobian(z, w):
            return linear.Dense(scale * w * (1 - torch.tanh(z) ** 2).unsqueeze(-2))

        step = lambda z, w: torch.tanh(z) @ w.mT  # noqa: E731
        settings = {"jacobian": GivenJacobian(jacobian, exact=True), "chunk": 1}
        expected = deeppcr.solve(step, z0, weights, solver=Newton(**settings, capture=False))
        assert_same(twice(lambda: deeppcr.solve(step, z0, weights, solver=Newton(**settings))), expected)
        scale = 0.9
        assert not is_replayed(deeppcr.solve(step, z0, weights, solver=Newton(**settings)))

    def test_given_ones_are_not_derived(self, monkeypatch, device):
        """A fixed number of iterations asks for a trace of the derivative, which takes longer than a replay: not of one that is given."""
        derived = []
        trace_derivative = Sequence.trace_derivative
        monkeypatch.setattr(Sequence, "trace_derivative", lambda seq: (derived.append(1), trace_derivative(seq))[1])
        given = GivenJacobian(lambda z: linear.Diagonal(-0.5 * torch.sin(z)), exact=True)
        z0, settings = torch.ones(2, 3, device=device), {"chunk": 1, "stop": FixedIterations(2)}
        for jacobian, count in ((given, 0), (DiagonalJacobian(), 3)):
            newton = Newton(jacobian=jacobian, **settings)
            solve = partial(deeppcr.solve, lambda z: 0.5 * torch.cos(z), z0, length=20, solver=newton)
            assert is_replayed([solve() for _ in range(3)][-1])
            assert len(derived) == count

    def test_wherever_the_memory_of_a_trace_lies(self, device):
        """What is made on the way is freed, and the trace of the Jacobian finds other tensors there."""
        newton = Newton(chunk=1, stop=PaperTest())
        network = deeppcr.nn.ResNet(5, 4, 16, 3, mode="parallel", newton=newton, device=device)
        kept = []
        for number in range(5):
            network(torch.ones(2, 5, device=device))
            assert is_replayed(network.solution) == (number > 0), network.solution.plan
            kept += [torch.empty(2, 4, device=device) for _ in range(number)]

    def test_given_blocks(self, device):
        make = Generator(0, torch.float64, device)
        z0, weights = make.normal(2, 5), make.normal(40, 5, 5) / 5
        step = lambda z, w: z @ w.mT  # noqa: E731
        newton = Newton(jacobian=GivenJacobian(linear.Dense(weights), exact=True))
        twice(lambda: deeppcr.solve(step, z0, weights, solver=newton))
        newton = Newton(jacobian=GivenJacobian(linear.Dense(weights.clone()), exact=True))
        assert not is_replayed(deeppcr.solve(step, z0, weights, solver=newton))

    @pytest.mark.parametrize("chunk", [1, 4])
    def test_diagonal_and_its_check(self, chunk, device):
        make = Generator(0, torch.float64, device)
        z0, xs = make.normal(2, 3), torch.eye(3, dtype=torch.float64, device=device).repeat(30, 1, 1) / 2
        step = lambda z, x: torch.tanh(z) @ x  # noqa: E731
        newton = Newton(jacobian=DiagonalJacobian(), chunk=chunk)
        expected = deeppcr.solve(step, z0, xs, solver=Newton(jacobian=DiagonalJacobian(), chunk=chunk, capture=False))
        assert_same(twice(lambda: deeppcr.solve(step, z0, xs, solver=newton)), expected)
        with pytest.raises(deeppcr.StepError, match="not elementwise"):
            deeppcr.solve(step, z0, xs + 1e-4, solver=newton)  # so little that it converges all the same

    def test_approximate_ones_are_not_captured(self, device):
        for solver in (
            deeppcr.Picard(),
            deeppcr.Jacobi(),
            Newton(shrink=0.9),
            Newton(jacobian=GivenJacobian(lambda z: linear.Scalar(z[..., 0] * 0))),
        ):
            for _ in range(3):
                assert not is_replayed(
                    deeppcr.solve(
                        lambda z: 0.5 * torch.cos(z), torch.ones(2, 3, device=device), length=9, solver=solver
                    )
                )
        assert len(captured_solves) == 0


def test_inputs_that_only_seem_large(device):
    """Expanded leaves are kept, and copied, as small as they are; strided ones come out right too."""
    make = Generator(0, torch.float64, device)
    z0, weight, offsets = make.normal(2, 4), make.normal(4, 4) / 4, make.normal(4, 30).mT

    def solve():
        xs = (weight.expand(30, 4, 4), offsets)
        step = lambda z, x: torch.tanh(z @ x[0] + x[1])  # noqa: E731
        return deeppcr.solve(step, z0, xs, solver=Newton()), plain_loop(step, z0, xs)

    for number in range(3):
        solution, loop = solve()
        assert is_replayed(solution) == (number > 0)
        assert relative_error(solution.states, loop) < 1e-9
        weight, offsets = -weight, 0.5 * offsets
        offsets = offsets.mT.contiguous().mT


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.fixture(autouse=True)
    def needs_one(self, device):
        if device.type != "cuda":
            pytest.skip("needs --device=cuda")

    def test_two_streams(self, device):
        make = Generator(0, torch.float32, device)
        xs, weight = make.normal(2000, 16), make.normal(16, 16) / 8
        step = lambda z, x: torch.tanh(z @ weight + x)  # noqa: E731
        starts = [make.normal(3, 16) for _ in range(2)]
        expected = [deeppcr.solve(step, z0, xs, solver=Newton(capture=False)).states for z0 in starts]
        twice(lambda: deeppcr.solve(step, starts[0], xs, solver=Newton()))
        streams = [torch.cuda.Stream() for _ in starts]
        torch.cuda.synchronize()
        found: list[list] = [[], []]
        for _ in range(20):
            for number, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    found[number].append(deeppcr.solve(step, starts[number], xs, solver=Newton()).states)
        torch.cuda.synchronize()
        for number, states in enumerate(found):
            assert all(relative_error(each, expected[number]) < 1e-5 for each in states)

    def test_after_an_optimiser_step(self, device):
        cell = nn.Linear(16, 16).to(device)
        optimiser = torch.optim.SGD(cell.parameters(), lr=0.1)
        z0, xs = torch.randn(4, 16, device=device), torch.randn(1000, 4, 16, device=device)
        step = lambda z, x: torch.tanh(cell(z) + x)  # noqa: E731
        for number in range(4):
            optimiser.zero_grad()
            solution = deeppcr.solve(step, z0, xs, solver=Newton())
            assert is_replayed(solution) == (number > 0), solution.plan
            with torch.no_grad():
                assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-4
            solution.states[-1].square().sum().backward()
            optimiser.step()


def test_what_was_large_does_not_hide_what_comes_after_it(device):
    """A recording cannot look closer: it hands over what lives on, and keeps what dies out."""
    step = lambda z, x: 0.1 * z + torch.sin(1.3 * torch.tanh(z)) * 0.8 + x  # noqa: E731
    xs, z0 = torch.randn(100, 1, generator=torch.Generator().manual_seed(0)).to(device), torch.ones(1, device=device)
    assert is_replayed(twice(lambda: deeppcr.solve(step, z0, xs, solver=Newton(), batch_dims=0)))
    found = deeppcr.solve(step, 1e7 * z0, xs, solver=Newton(), batch_dims=0)
    assert not is_replayed(found)
    assert (found.states - plain_loop(step, 1e7 * z0, xs)).abs()[20:].max() <= 1e-3
    dying = torch.zeros_like(xs)
    assert is_replayed(twice(lambda: deeppcr.solve(lambda z, x: 0.3 * torch.sin(z) + x, z0, dying, solver=Newton())))


def test_what_closer_looks_correct_is_kept(device):
    """A signal that dies out, but for an impulse far below what it was: too short to be seen to live on."""
    step = lambda z, x: 0.1 * z + 0.5 * torch.tanh(z) * z.cos() + x  # noqa: E731
    z0, xs = torch.tensor([[600.0, 100.0]], device=device), torch.zeros(100, 1, 2, device=device)
    xs[60, 0, 0] = 1e-6
    found = twice(lambda: deeppcr.solve(step, z0, xs, solver=Newton()))
    loop = plain_loop(step, z0.double(), xs.double())
    assert ((found.states - loop).abs() <= 1e-5 * loop.abs().amax(-1, keepdim=True)).all()


def test_a_solve_of_many_chunks_is_replayed(device):
    """Whether something large hides what follows is asked of 64 chunks without a look by the host."""
    weights = 0.3 * torch.randn(8, 8, device=device)
    step, z0, xs = (
        lambda z, x: torch.tanh(z @ weights + x),
        torch.zeros(2, 8, device=device),
        torch.randn(256, 2, 8, device=device),
    )
    with torch.no_grad():
        found = [deeppcr.solve(step, z0, xs, solver=Newton(chunk=4)) for _ in range(4)]
    assert is_replayed(found[-1]), found[-1].plan.notes
