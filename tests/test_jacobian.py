"""Jacobians: each strategy against the dense truth, collapsed chunks, memory slices."""

import pytest
import torch

import deeppcr
from deeppcr import DenseJacobian, DiagonalJacobian, GivenJacobian, HutchinsonJacobian, Newton, ScalarJacobian
from deeppcr.linear import BlockDiagonal, Dense, Diagonal, Scalar
from deeppcr.sequence import Sequence
from problems import Generator, gru, mlp, plain_loop, relative_error


def true_jacobian(problem, states):
    """[L, B, D, D] by plain reverse mode, one step and row at a time."""
    sequence = Sequence(*problem, length=problem.length)
    blocks = []
    for index, state in enumerate(states):
        full = torch.autograd.functional.jacobian(lambda z, i=index: sequence.step(i, z), state)
        blocks.append(torch.stack([full[b, :, b] for b in range(state.shape[0])]))
    return torch.stack(blocks)


@pytest.mark.parametrize("build", [mlp, gru])
@pytest.mark.parametrize("budget", [None, 1, 5000])
def test_dense_blocks_are_the_jacobians(build, budget, device):
    make = Generator(0, torch.float64, device)
    problem = build(make, 9, 3)
    sequence = Sequence(*problem)
    states = make.normal(9, 3, sequence.layout.width)
    values, blocks = DenseJacobian(memory_budget=budget).evaluate(sequence, states, range(9))
    assert torch.allclose(values, torch.stack([sequence.step(i, z) for i, z in enumerate(states)]), atol=1e-12)
    assert torch.allclose(blocks.to_dense(), true_jacobian(problem, states), atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 10, 11])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "jacobian", [DenseJacobian(), DenseJacobian(memory_budget=1), DenseJacobian(memory_budget=20_000)]
)
def test_chunks_collapse_to_products(jacobian, first, chunk, device):
    make = Generator(0, torch.float64, device)
    problem = mlp(make, 10, 2, width=5, activation=torch.tanh)
    sequence = Sequence(*problem)
    starts = make.normal(-(-10 // chunk), 2, 5)[first:]
    if len(starts) == 0:
        return
    ends, blocks = jacobian.linearise(sequence, starts, chunk, first)
    assert len(blocks) == len(starts)
    for number, (z, end, block) in enumerate(zip(starts, ends, blocks.to_dense(), strict=True), start=first):
        product = torch.eye(5, dtype=torch.float64, device=device).expand(2, 5, 5)
        for index in range(number * chunk, min((number + 1) * chunk, 10)):
            weight, bias = problem.xs[0][index], problem.xs[1][index]
            product = (weight * (1 - torch.tanh(z) ** 2).unsqueeze(-2)) @ product
            z = torch.tanh(z) @ weight.mT + bias
        assert torch.allclose(end, z, atol=1e-12)
        assert torch.allclose(block, product, atol=1e-12)


def elementwise(device):
    make = Generator(0, torch.float64, device)
    return (lambda z, x: torch.sin(z) * x + 0.1 * z**2), make.normal(3, 4), make.normal(100, 4) * 0.5


@pytest.mark.parametrize("chunk", [1, 7])
def test_the_exact_diagonal_converges_like_the_dense_jacobian(chunk, device):
    step, z0, xs = elementwise(device)
    dense = deeppcr.solve(step, z0, xs, solver=Newton(chunk=chunk))
    diagonal = deeppcr.solve(step, z0, xs, solver=Newton(chunk=chunk, jacobian=DiagonalJacobian()))
    assert diagonal.iterations.tolist() == dense.iterations.tolist()
    assert relative_error(diagonal.states, plain_loop(step, z0, xs)) < 1e-9


def test_a_row_sum_does_not_pass_for_a_diagonal(device):
    step = lambda z: torch.tanh(z + 0.1 * z.roll(1, -1))  # noqa: E731
    z0 = torch.ones(2, 4, dtype=torch.float64, device=device)
    with pytest.raises(deeppcr.StepError, match="the step is not elementwise: element"):
        deeppcr.solve(step, z0, length=10, solver=Newton(jacobian=DiagonalJacobian()))


def test_hutchinson_is_unbiased_and_exact_for_elementwise_steps(device):
    make = Generator(0, torch.float64, device)
    weight = make.normal(4, 4) / 4
    sequence = Sequence(lambda z: torch.tanh(z @ weight), make.normal(2, 4), length=5)
    states = make.normal(5, 2, 4)
    true = DenseJacobian().evaluate(sequence, states, range(5))[1].to_dense().diagonal(dim1=-2, dim2=-1)
    few = HutchinsonJacobian(samples=1).evaluate(sequence, states, range(5))[1].data
    many = HutchinsonJacobian(samples=4000, seed=1).evaluate(sequence, states, range(5))[1].data
    assert (few - true).abs().max() > 0.1
    assert (many - true).abs().max() < 0.03
    step, z0, xs = elementwise(device)
    sequence = Sequence(step, z0, xs)
    states = make.normal(100, 3, 4)
    one = HutchinsonJacobian(samples=1).evaluate(sequence, states, range(100))[1].data
    exact = DiagonalJacobian().evaluate(sequence, states, range(100))[1].data
    assert torch.allclose(one, exact, atol=1e-12)


@pytest.mark.parametrize(
    "jacobian",
    [
        HutchinsonJacobian(samples=8),
        ScalarJacobian(0.4),
        GivenJacobian(Scalar(torch.full((80,), 0.4, dtype=torch.float64))),
        GivenJacobian(Diagonal(torch.full((80, 1, 6), 0.4, dtype=torch.float64))),
        GivenJacobian(lambda z, x: Diagonal(0.4 / torch.cosh(z) ** 2)),
        GivenJacobian(
            lambda z, x: BlockDiagonal(0.4 * torch.eye(2, dtype=z.dtype, device=z.device).expand(3, 3, 2, 2))
        ),
    ],
    ids=["hutchinson", "scalar", "scalar blocks", "diagonal blocks", "diagonal function", "block-diagonal function"],
)
@pytest.mark.parametrize("chunk", [1, 3])
def test_approximate_jacobians_converge_to_the_same_states(jacobian, chunk, device):
    if isinstance(jacobian, GivenJacobian) and not callable(jacobian.blocks):
        jacobian = GivenJacobian(type(jacobian.blocks)(jacobian.blocks.data.to(device)))
    make = Generator(0, torch.float64, device)
    weight = make.normal(6, 6) * 0.05
    step = lambda z, x: torch.tanh(0.4 * z + z @ weight + x)  # noqa: E731
    z0, xs = make.normal(3, 6), make.normal(80, 6)
    solution = deeppcr.solve(step, z0, xs, solver=Newton(jacobian=jacobian, chunk=chunk), on_failure="raise")
    assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-9
    assert solution.plan.derivative == ("forward" if isinstance(jacobian, HutchinsonJacobian) else "given")


def test_a_scalar_jacobian_for_each_step_and_row(device):
    make = Generator(0, torch.float64, device)
    z0, xs = make.normal(3, 4), 0.8 * make.uniform(50, 3, 1)
    step = lambda z, x: x * z + 0.01 * torch.sin(z)  # noqa: E731
    loop = plain_loop(step, z0, xs)
    for value in (xs[..., 0], xs[:, :1, 0], 0.4, torch.full((50,), 0.4, device=device)):
        solution = deeppcr.solve(step, z0, xs, solver=Newton(jacobian=ScalarJacobian(value)), on_failure="raise")
        assert relative_error(solution.states, loop) < 1e-9
    good = deeppcr.solve(step, z0, xs, solver=Newton(jacobian=ScalarJacobian(xs[..., 0])))
    assert good.iterations.max() < solution.iterations.max()


def test_an_analytic_jacobian_takes_as_many_iterations_as_autodiff(device):
    problem = mlp(Generator(0, torch.float64, device), 200, 3)
    analytic = GivenJacobian(lambda z, x: Dense(x[0] * (z > 0).unsqueeze(-2)), exact=True)
    for chunk in (1, 16):
        ours = problem.solve(solver=Newton(jacobian=analytic, chunk=chunk), on_failure="raise")
        theirs = problem.solve(solver=Newton(chunk=chunk))
        assert ours.iterations.tolist() == theirs.iterations.tolist()
        assert relative_error(ours.states, problem.loop()) < 1e-9
    shared = GivenJacobian(lambda z, x: Dense(x[0]))  # no batch dimension: the same for every row
    assert problem.solve(solver=Newton(jacobian=shared, chunk=1)).result is not None


def test_chunk_is_enlarged_until_the_blocks_fit(device):
    problem = mlp(Generator(0, torch.float64, device), 256, 2)
    small = Newton(jacobian=DenseJacobian(memory_budget=4 * 2 * 16 * 16 * 8 * 10))
    solution = problem.solve(solver=small)
    assert solution.plan.chunk == 32  # 8 chunks of blocks fit, 16 do not
    assert any("memory budget" in note for note in solution.plan.notes)
    assert relative_error(solution.states, problem.loop()) < 1e-9


@pytest.mark.parametrize("with_xs", [False, True])
@pytest.mark.parametrize("kind", ["alone", "stacked", "both"])
def test_a_given_function_sees_the_callers_inputs_of_a_list_of_steps(kind, with_xs):
    class Scaled(torch.nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(scale))

        def forward(self, z, x=0.0):
            return self.scale * torch.sin(z) + x

    alone = [lambda z, x=0.0: 0.5 * torch.sin(z) + x, lambda z, x=0.0: x + 0.5 * z.sin()]
    stacked = [Scaled(0.5), Scaled(0.5)]
    steps = {"alone": alone, "stacked": stacked, "both": [*alone, *stacked]}[kind]
    xs = torch.arange(1.0, len(steps) + 1).reshape(-1, 1, 1) if with_xs else None
    seen = []

    def derivative(z, *x):
        seen.append(x)
        return Diagonal(0.5 * torch.cos(z) + (0 * x[0] if with_xs else 0))

    z0 = torch.ones(2, 3)
    solution = deeppcr.solve(steps, z0, xs, solver=Newton(jacobian=GivenJacobian(derivative, exact=True), chunk=1))
    loop = deeppcr.solve(steps, z0, xs, solver=deeppcr.Loop())
    assert relative_error(solution.states, loop.states) < 1e-6
    assert seen
    assert all(len(x) == with_xs for x in seen)
