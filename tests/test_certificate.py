"""CONVERGED needs a proof at any width, and PRECISION_FLOOR a step whose derivative is its own."""

import math
import warnings

import pytest
import torch

import deeppcr
from deeppcr import ConvergenceError, ConvergenceWarning, Jacobi, Newton, Picard, Result, ScalarJacobian
from deeppcr.graphs import record
from deeppcr.linear import Auto, Diagonal, ForwardSubstitution, Scalar, solve, solve_coupled
from deeppcr.newton.certificate import error_by_products, is_foreseen, small_change
from deeppcr.sequence import Sequence
from kernel_support import thorough
from problems import Generator, plain_loop, relative_error
from tape import Tape

APPROXIMATE = {
    "jacobi": Jacobi(),
    "scalar": Newton(jacobian=ScalarJacobian(0.1)),
    "hutchinson": Newton(jacobian=deeppcr.HutchinsonJacobian(), shrink=0.1),
    "shrunk": Newton(shrink=0.1),
}


def shrinking_then_growing(width, rows, dtype, device):
    """Errors of the guess are wiped out by the first half as far as the tolerance sees, and come back in the second."""
    half = 20 if dtype is torch.float32 else 40
    factors = torch.tensor([0.5] * half + [2.0] * half, dtype=dtype, device=device)
    xs = factors.reshape(-1, 1, 1).expand(2 * half, rows, width)
    step = lambda z, x: x * z  # noqa: E731
    ones = torch.ones(rows, width, dtype=dtype, device=device)
    return step, 1.1 * ones, xs, plain_loop(step, ones, xs)


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
@pytest.mark.parametrize("solver", APPROXIMATE.values(), ids=APPROXIMATE.keys())
@pytest.mark.parametrize("width", [33, *thorough(5, 64, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_errors_that_shrink_first_and_grow_later_are_found_at_any_width(solver, width, dtype, device):
    step, z0, xs, guess = shrinking_then_growing(width, 2, dtype, device)
    solution = deeppcr.solve(step, z0, xs, solver=solver, guess=guess)
    assert solution.result.trusted
    assert relative_error(solution.states, plain_loop(step, z0, xs)) < 10 * torch.finfo(dtype).eps


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
def test_each_row_and_leaf_is_certified_by_itself(device):
    step, z0, xs, _ = shrinking_then_growing(40, 3, torch.float32, device)
    z0[1] = 1.0  # for which the guess is right

    def of_tuples(z, x):
        return 0.3 * torch.cos(z[0]), step(z[1], x)

    zeros = torch.zeros(3, 2, device=device)
    near = deeppcr.solve(of_tuples, (zeros, z0 / z0), xs, solver=deeppcr.Loop())
    solution = deeppcr.solve(of_tuples, (zeros, z0), xs, solver=Jacobi(), guess=near)
    assert solution.results == (Result.FINISHED_BY_LOOP, Result.CONVERGED, Result.FINISHED_BY_LOOP)
    assert relative_error(solution.states, plain_loop(of_tuples, (zeros, z0), xs)) < 1e-6


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
@pytest.mark.parametrize("width", [1, 40])
@pytest.mark.parametrize("drift", [4e-7, 1e-6])  # three and eight roundings a step
def test_updates_of_a_few_roundings_that_add_up_are_not_taken_for_rounding(width, drift, device):
    step, z0 = lambda z: z + drift, torch.ones(1, width, device=device)
    solution = deeppcr.solve(step, z0, length=300, solver=Jacobi())
    assert (solution.states - plain_loop(step, z0, length=300)).abs().max() < 1e-5


CONTRACTING = lambda z, x, weight: 0.2 * torch.tanh(z @ weight + x)  # noqa: E731
MOVING = lambda z, x, weight: z + (torch.tanh(z @ weight) + x) / 40  # noqa: E731


@pytest.mark.parametrize(
    ("solver", "step"), [(Jacobi(), CONTRACTING), (Picard(), MOVING), (APPROXIMATE["scalar"], CONTRACTING)]
)
def test_wide_states_that_are_right_are_certified_and_nothing_is_said(solver, step, device):
    make = Generator(0, torch.float32, device)
    weight, xs, z0 = make.normal(64, 64) / 8, make.normal(40, 3, 64), make.normal(3, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        solution = deeppcr.solve(lambda z, x: step(z, x, weight), z0, xs, solver=solver)
    assert solution.result is Result.CONVERGED
    assert solution.iterations.max() < 40  # which would be a proof by itself
    assert relative_error(solution.states, plain_loop(lambda z, x: step(z, x, weight), z0, xs)) < 1e-5


class Opaque(torch.autograd.Function):
    """A function that torch.func cannot differentiate."""

    @staticmethod
    def forward(ctx, z):
        return 0.3 * torch.cos(z)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError


UNCERTIFIED = {
    "no derivative": (lambda z: Opaque.apply(z), Jacobi(), "cannot be differentiated"),
    "a derivative that is not the step's": (lambda z: z.detach() + 0.01, Picard(), "do not change as its derivative"),
    "too few rounds": (
        lambda z: 0.8 * torch.cos(z),
        Jacobi(max_iterations=8, atol=1e-2, rtol=1e-2),
        "did not converge",
    ),
}


@pytest.mark.parametrize("width", [1, 40])
@pytest.mark.parametrize("name", UNCERTIFIED)
def test_what_cannot_be_certified_is_told(name, width, device):
    step, solver, why = UNCERTIFIED[name]
    z0 = torch.ones(2, width, device=device)
    with pytest.warns(ConvergenceWarning, match=why):
        solution = deeppcr.solve(step, z0, length=60, solver=solver)
    assert solution.result is Result.UNCERTIFIED
    assert not solution.result.trusted
    assert not solution.result.failed
    assert solution.exact_steps.tolist() == solution.iterations.tolist()
    assert why in solution.message
    assert relative_error(solution.states, plain_loop(step, z0, length=60)) < (solver.rtol or 1e-5)
    with pytest.raises(ConvergenceError, match=why):
        deeppcr.solve(step, z0, length=60, solver=solver, on_failure="raise")
    with pytest.warns(ConvergenceWarning, match=why):
        assert deeppcr.solve(step, z0, length=60, solver=solver, on_failure="return").result is Result.UNCERTIFIED


def test_states_that_are_not_certified_have_gradients(device):
    scale = torch.full((), 0.01, dtype=torch.float64, device=device, requires_grad=True)
    z0 = torch.ones(1, 3, dtype=torch.float64, device=device)
    with pytest.warns(ConvergenceWarning, match="derivative"):
        solution = deeppcr.solve(lambda z: z.detach() + scale, z0, length=50, solver=Picard())
    (gradient,) = torch.autograd.grad(solution.states.sum(), scale)
    assert gradient.item() == 150  # as in the loop: of each step its own part alone


def test_a_result_between_rounding_and_the_loop():
    order = [Result.CONVERGED, Result.PRECISION_FLOOR, Result.UNCERTIFIED, Result.FINISHED_BY_LOOP]
    assert [each.severity for each in order] == sorted(each.severity for each in order)


def error_of(push, rounding, residual, blocks, rounds):
    """In one process: before the first chunk there is no error, and nobody else measures anything."""

    def by_blocks(missing):
        return solve_coupled(blocks[1:], missing, reverse=False, solver=Auto())

    alone = lambda errors, **measures: (torch.zeros_like(errors[0]), measures)  # noqa: E731
    return error_by_products(push, rounding, residual, by_blocks, rounds, alone)


@pytest.mark.parametrize(("length", "chunk"), [(1, 1), (30, 1), (31, 4), (32, 4), (3, 8)])
def test_the_error_by_products_is_that_of_the_true_jacobians(length, chunk, device):
    make = Generator(0, torch.float64, device)
    weight, xs = make.normal(5, 5) / 3, make.normal(length, 2, 5)
    step = lambda z, x: torch.tanh(z @ weight) + x  # noqa: E731
    sequence = Sequence(step, make.normal(2, 5), xs)
    chunks = -(-length // chunk)
    ends, residual = make.normal(chunks, 2, 5), make.normal(chunks, 2, 5)
    starts = torch.cat([sequence.initial.unsqueeze(0), ends[:-1]])
    _, true = deeppcr.DenseJacobian().linearise(sequence, starts, chunk)
    expected = solve(true, residual, solver=ForwardSubstitution())
    push = lambda vectors: sequence.push_out(starts, vectors.unsqueeze(1), chunk)[1].squeeze(1)  # noqa: E731
    approximate = Scalar(torch.full((chunks, 2), 0.1, dtype=torch.float64, device=device))
    for blocks in (approximate, true):
        error, known = error_of(push, ends, residual, blocks, 60)
        assert known.all()
        assert relative_error(error, expected) < 1e-12
    _, known = error_of(push, ends, residual, approximate, 2)
    assert known.all() == (chunks == 1)


def test_what_products_round_need_not_fall(device):
    """Of many numbers that are as small as it gets some grow, whenever one looks, while others still fall."""
    make = Generator(0, torch.float32, device)
    residual, factors = make.normal(20, 3, 300), torch.tensor([0.3, 0.5], device=device).repeat(150)
    push = lambda vectors: factors * vectors + 1e-7 * make.normal(*vectors.shape)  # noqa: E731
    blocks = Scalar(torch.full((20, 3), 0.3, device=device))
    error, known = error_of(push, torch.full_like(residual, 1e-4), residual, blocks, 30)
    assert known.all()
    true = Diagonal(factors.expand(20, 3, 300).contiguous())
    assert relative_error(error, solve(true, residual, solver=ForwardSubstitution())) < 1e-4


# A derivative that is not that of the values.


def fixed_point(z):
    unit = 2.0 ** (20 if z.dtype is torch.float32 else 33)
    return torch.round(z * unit) / unit


DRIFTING = {
    "detached": lambda z, x: z.detach() + x,
    "fixed point": lambda z, x: fixed_point(z + x),
    "straight through": lambda z, x: (z + x).detach() + 0.5 * (z - z.detach()),
}


@pytest.mark.parametrize("name", DRIFTING)
@pytest.mark.parametrize(("dtype", "chunk"), [(torch.float32, 1), (torch.float64, 4), *thorough((torch.float64, 1))])
def test_a_drift_below_the_tolerance_is_no_precision_floor(name, chunk, dtype, device):
    """The update is the drift of a chunk, again and again: it neither shrinks nor says what all of them add up to."""
    step, tolerance = DRIFTING[name], 1e-5 if dtype is torch.float32 else 1e-9
    drift = 0.95 * tolerance / chunk
    z0, xs = torch.ones(1, 2, dtype=dtype, device=device), torch.full((300, 1, 2), drift, dtype=dtype, device=device)
    with pytest.warns(ConvergenceWarning):
        solution = deeppcr.solve(step, z0, xs, solver=Newton(chunk=chunk, atol=tolerance, rtol=tolerance))
    assert solution.result is Result.FINISHED_BY_LOOP
    assert relative_error(solution.states, plain_loop(step, z0, xs)) < tolerance


@pytest.mark.parametrize("name", DRIFTING)
def test_nor_is_it_one_for_an_approximate_jacobian(name, device):
    z0, xs = torch.ones(1, 2, device=device), torch.full((300, 1, 2), 9.5e-6, device=device)
    with pytest.warns(ConvergenceWarning):
        solution = deeppcr.solve(DRIFTING[name], z0, xs, solver=Jacobi())
    assert solution.result is Result.FINISHED_BY_LOOP
    assert relative_error(solution.states, plain_loop(DRIFTING[name], z0, xs)) < 1e-6


def rotation(rows, length, dtype, device):
    """A step that rounds more than its state does; these errors live on, and more is left than is asked for."""
    make = Generator(0, dtype, device)
    cos, sin = math.cos(0.3), math.sin(0.3)
    turn = torch.tensor([[cos, -sin], [sin, cos]], dtype=dtype, device=device)
    z0, xs = make.normal(rows, 2), make.normal(length, rows, 2)
    return (lambda z, x: (z @ turn.mT + 0.1 * torch.sin(z) * x + 64) - 64), z0, xs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_rounding_that_is_left_is_a_precision_floor(dtype, device):
    step, z0, xs = rotation(4, 100, dtype, device)
    eps = torch.finfo(dtype).eps
    solution = deeppcr.solve(step, z0, xs, solver=Newton(atol=0, rtol=100 * eps, chunk=4), on_failure="raise")
    assert solution.result is Result.PRECISION_FLOOR
    assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e5 * eps


def test_only_the_rows_that_drift_lose_the_floor(device):
    turning, z0, xs = rotation(4, 100, torch.float32, device)
    drifts = torch.tensor([False, True, False, False], device=device).unsqueeze(1)
    step = lambda z, x: torch.where(drifts, z.detach() * (1 + 2e-7), turning(z, x))  # noqa: E731
    with pytest.warns(ConvergenceWarning, match="derivative"):
        solution = deeppcr.solve(step, z0, xs, solver=Newton(atol=0, rtol=1e-6, chunk=4))
    assert [each is Result.FINISHED_BY_LOOP for each in solution.results] == [False, True, False, False]


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
def test_a_recording_hands_over_what_may_be_rounding_or_not(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setitem(record.RECORDERS, "cpu", Tape)
    deeppcr.clear_caches()
    turning, *tight = rotation(4, 100, torch.float32, device)
    drift = torch.ones(1, 2, device=device), torch.full((60, 1, 2), 9.5e-6, device=device)
    problems = (
        (turning, *tight, Newton(atol=0, rtol=1e-5, chunk=4), Result.PRECISION_FLOOR),
        (DRIFTING["detached"], *drift, Newton(chunk=1, atol=1e-5, rtol=1e-5), Result.FINISHED_BY_LOOP),
    )
    for step, z0, xs, solver, result in problems:
        for _ in range(3):
            assert deeppcr.solve(step, z0, xs, solver=solver).result is result
    deeppcr.clear_caches()


def test_a_derivative_is_told_from_another_but_not_from_rounding_or_kinks(device):
    make = Generator(0, torch.float32, device)
    states = make.normal(500, 2, 3) * torch.tensor([1e-20, 1.0, 1e20], device=device)

    def holds(function, derivative, rtol=0.0):
        change, values = small_change(states, rtol), function(states)
        largest, alone = values.abs().amax(0), lambda sums: sums
        return is_foreseen(values, function(states + change), derivative * change, rtol, largest, alone).tolist()

    assert holds(lambda z: 2 * z, 2.0) == [True, True]
    assert holds(lambda z: 2 * z, 1.0) == [False, False]
    assert holds(lambda z: z, 0.0) == [False, False]
    assert holds(lambda z: z.relu(), (states > 0).float()) == [True, True]
    one_element = torch.tensor([1.0, 0.0, 1.0], device=device)
    assert holds(lambda z: z, one_element) == [False, False]
    one_row = torch.tensor([[1.0], [0.0]], device=device)
    assert holds(lambda z: z, one_row) == [True, False]
    assert holds(lambda z: z.bfloat16().float(), 1.0, rtol=1e-2) == [True, True]
    assert holds(lambda z: z.bfloat16().float(), 0.0, rtol=1e-2) == [False, False]
