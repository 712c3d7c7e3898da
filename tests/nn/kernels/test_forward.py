"""Networks by kernels against a plain loop in float64, gradients against autograd through it.

On a CPU the kernels are interpreted, and so the networks are small; ``--device=cuda`` runs the real thing.
"""

from __future__ import annotations

import pytest
import torch

from deeppcr import Result
from kernel_support import error, misaligned, strided, thorough

# Where something overflows, NumPy says so.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("several_groups")]
triton = pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

import triton.language as tl

from deeppcr.nn import cost, forward, kernels
from deeppcr.nn.layers import ACTIVATIONS, Layers
from nn.kernels.plain import (
    GAINS,
    MLP,
    TOLERANCE,
    after_blocks,
    assert_states_and_gradients,
    doubles,
    loop,
    misfit,
    network,
)

SMALL = [
    (1, 3, 1, 1, False, "relu", None),
    (1, 3, 2, 3, True, "tanh", None),
    (2, 3, 3, 1, False, "tanh", None),
    (3, 1, 1, 1, False, "sigmoid", None),
    (5, 5, 2, 1, False, "relu", None),
    (5, 3, 1, 3, True, "tanh", None),
    (3, 8, 2, 4, True, "relu", 4),
    (6, 3, 2, 1, True, "sigmoid", None),
    (5, 16, 1, 1, False, "relu", None),
    (3, 17, 1, 1, True, "tanh", None),
    (3, 33, 1, 1, False, "sigmoid", None),
    (4, 66, 1, 1, False, "tanh", 2),
    (1, 66, 1, 1, False, "sigmoid", None),
    (11, 3, 1, 1, False, "tanh", 2),
    *thorough((33, 3, 1, 1, False, "tanh", None), (65, 2, 1, 1, False, "relu", 16)),
    *thorough(*((11, 3, 1, 1, False, "tanh", chunk) for chunk in (5, 11))),
]


@pytest.mark.parametrize(("blocks", "width", "rows", "skip", "residual", "activation", "chunk"), SMALL)
def test_states_and_gradients(blocks, width, rows, skip, residual, activation, chunk, device):
    layers = Layers(skip, residual, activation, chunk=chunk)
    problem = network(blocks, width, rows, skip=skip, residual=residual, activation=activation, device=device)
    report = assert_states_and_gradients(problem, layers)
    if chunk is None and blocks > 1:
        assert report.solution().result is Result.CONVERGED
    assert (report is None) == (blocks == 1 or (chunk is not None and chunk >= blocks))


# Every width with every kind of block, and activations in turn: each case compiles ten kernels.
WIDTHS, KINDS = (1, 3, 5, 8, 16, 17, 32, 64), ((1, False), (1, True), (3, True), (4, True))
LARGE = [
    (width, *kind, list(ACTIVATIONS)[(i + k) % 3]) for i, width in enumerate(WIDTHS) for k, kind in enumerate(KINDS)
] + [(width, 1, False, list(ACTIVATIONS)[i % 3]) for i, width in enumerate((65, 100, 128, 256))]


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "skip", "residual", "activation"), LARGE)
def test_every_size(width, skip, residual, activation, gpu):
    cases = [
        (blocks, rows, chunk)
        for blocks in (1, 2, 3, 5, 33, 65, 200)
        for rows in (1, 3)
        for chunk in (None, 2 * skip, 5 * skip, blocks * skip)
    ]
    for blocks, rows, chunk in [*cases, (1000, 3, None)]:
        problem = network(blocks, width, rows, skip=skip, residual=residual, activation=activation, device=gpu)
        # The derivative of a ReLU jumps: a state that is within rounding of 0 may lie on either side.
        jump = 1e-2 if activation == "relu" else None
        layers = Layers(skip, residual, activation, chunk=chunk)
        assert_states_and_gradients(problem, layers, gradient_tolerance=jump)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
@pytest.mark.parametrize("width", [4, 16, 64])
def test_a_deep_network(width, activation, gpu):
    problem = network(16_384, width, 2, activation=activation, gain=0.9 * GAINS[activation], device=gpu)
    report = assert_states_and_gradients(problem, Layers(**MLP, activation=activation))
    assert report.solution().result is Result.CONVERGED


@pytest.mark.parametrize("place", [misaligned, strided])
def test_inputs_may_lie_anywhere(place, device):
    layers = Layers(**MLP, activation="tanh")
    problem = network(3, 3, 2, device=device)
    expected = loop(*doubles(*problem), layers)
    for tracked in (False, True):
        moved = [place(tensor).requires_grad_(tracked) for tensor in problem]
        assert error(forward.apply(*moved, None, layers, []), expected) <= TOLERANCE


@pytest.mark.parametrize(("blocks", "chunk"), [(1, None), (11, 2)])
def test_no_memory_is_read_before_it_is_written(blocks, chunk, device, poisoned_memory):
    layers = Layers(2, True, "tanh", chunk=2 * chunk if chunk else None)
    assert_states_and_gradients(network(blocks, 3, skip=2, residual=True, device=device), layers)


def test_the_same_network_gives_the_same_numbers(device):
    layers = Layers(**MLP, activation="tanh", chunk=2)
    weight, bias, initial = network(5, device=device)
    gradients = torch.randn(5, 1, 3, device=device)
    first, second = (forward.run(weight, bias, initial, None, layers)[0] for _ in range(2))
    assert torch.equal(first, second)
    there, again = (forward.adjoint(weight, first, gradients, layers) for _ in range(2))
    assert torch.equal(there[0], again[0])
    assert torch.equal(there[1], again[1])


class TestGuess:
    layers = Layers(**MLP, activation="tanh", chunk=2)

    def test_from_the_solution_there_is_nothing_to_correct(self, device):
        problem = network(9, device=device)
        there = loop(*doubles(*problem), self.layers).float()
        x, report = forward.run(*problem, there[:, 0], self.layers)
        assert report.passes_taken() == [2]
        assert float(report.found[:2, 0].max()) < 0.1
        assert error(after_blocks(x, self.layers), there) <= 1e-6

    def test_near_the_solution_there_is_little_to_correct(self, device):
        problem = network(11, gain=2.0, device=device)
        cold = forward.run(*problem, None, self.layers)[1]
        near = loop(*doubles(*problem), self.layers).float() + 1e-3
        x, warm = forward.run(*problem, near, self.layers)
        assert warm.found[0, 0] < cold.found[0, 0] / 10
        assert warm.passes_taken() < cold.passes_taken()
        assert error(after_blocks(x, self.layers), loop(*doubles(*problem), self.layers)) <= TOLERANCE

    def test_rows_have_guesses_of_their_own(self, device):
        problem = network(7, 3, 2, gain=1.5, device=device)
        expected = loop(*doubles(*problem), self.layers)
        guess = expected.float()
        guess[:, 1] = 1.0
        x, report = forward.run(*problem, guess, self.layers)
        taken = report.passes_taken()
        assert taken[0] == 2 < taken[1]
        assert error(after_blocks(x, self.layers), expected) <= TOLERANCE

    @pytest.mark.parametrize(
        ("where", "activation", "garbage"),
        [
            ("one", "relu", float("nan")),
            ("one", "tanh", 1e30),
            *(("all", "tanh", garbage) for garbage in (float("nan"), float("inf"), 1e30, -1e7)),
        ],
    )
    def test_from_garbage_the_result_is_right(self, activation, where, garbage, device, few_rounds):
        layers = Layers(**MLP, activation=activation, chunk=2)
        problem = network(11, activation=activation, device=device)
        guess = loop(*doubles(*problem), layers).float()[:, 0]
        if where == "one":
            guess[3, 1] = garbage  # where the third chunk starts
        else:
            guess[:] = garbage
        x, _ = forward.run(*problem, guess, layers)
        expected = loop(*doubles(*problem), layers)
        assert error(after_blocks(x, layers), expected) <= TOLERANCE
        assert misfit(after_blocks(x, layers), *problem, layers).max() <= 1e-4

    def test_what_overflows_on_the_way_is_forgotten(self, device):
        # The state that the fifth block sees is 0, but from the guess it overflows within a chunk.
        layers = Layers(**MLP, activation="relu", chunk=2)
        weight, bias, initial = network(10, activation="relu", device=device)
        initial = initial.abs()
        bias[3] = -100.0
        weight[4:6] = 1e25 * torch.eye(3, device=device)
        bias[4:6] = 0
        x, _ = forward.run(weight, bias, initial, None, layers)
        expected = loop(*doubles(weight, bias, initial), layers)
        assert torch.isfinite(expected.float()).all()
        assert error(after_blocks(x, layers), expected) <= TOLERANCE


@triton.jit
def _activate(values, slopes, z, ACTIVATION: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    value, slope = kernels.activate(tl.load(z + i), ACTIVATION)
    tl.store(values + i, value)
    tl.store(slopes + i, slope)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, device):
    special = [0.0, 1e-30, 1e-8, 1e-3, 0.1, 0.6249, 0.625, 0.6251, 1.0, 5.0, 9.0, 20.0, 100.0, float("inf")]
    points = torch.tensor([sign * z for z in special for sign in (1, -1)] + [float("nan")])
    z = torch.cat([points, torch.linspace(-3, 3, 128 - len(points))]).to(device)
    values, slopes = torch.full_like(z, 7.0), torch.full_like(z, 7.0)
    _activate[(1,)](values, slopes, z, activation, 128)
    smallest = torch.finfo(torch.float32).tiny
    full = z.double().requires_grad_()
    expected = getattr(torch, activation)(full)
    torch.testing.assert_close(values.double(), expected.detach(), rtol=1e-6, atol=smallest, equal_nan=True)
    (expected_slopes,) = torch.autograd.grad(expected.sum(), full)
    known = ~z.isnan()
    torch.testing.assert_close(slopes[known].double(), expected_slopes[known], rtol=1e-6, atol=2e-7)
    named = ACTIVATIONS[activation]
    torch.testing.assert_close(named.function(full), expected, equal_nan=True)
    torch.testing.assert_close(named.slope(full)[known], expected_slopes[known])


def test_all_blocks_in_one_chunk_is_the_loop(device):
    layers = Layers(skip=4, residual=True, activation="relu", chunk=16)
    assert layers.chunk_blocks(16) == 16
    problem = network(16, skip=4, residual=True, activation="relu", device=device)
    x, report = forward.run(*problem, None, layers)
    assert report is None
    assert error(after_blocks(x, layers), loop(*doubles(*problem), layers)) <= TOLERANCE


@pytest.mark.parametrize("chunks", [2, 8])
def test_one_group(chunks, device, monkeypatch):
    monkeypatch.setattr(cost, "ONE_GROUP", 8)
    layers = Layers(**MLP, activation="tanh", chunk=2)
    problem = network(2 * chunks - 1, rows=2, device=device)
    x, report = forward.run(*problem, None, layers)
    plan = forward.plan_for(2 * chunks - 1, 2, 3, layers, False, device)
    assert (plan.chunks, plan.groups) == (chunks, 1)
    assert all(report.passes_taken())
    assert error(after_blocks(x, layers), loop(*doubles(*problem), layers)) <= TOLERANCE


@pytest.mark.parametrize("gain", [0.9, 1.0])
def test_wide_corrections_that_lack_some_digits_cost_nothing(gain, gpu):
    """Enough chunks that the starts are solved for by products on the matrix units, which cut sums off."""
    layers = Layers(**MLP, activation="tanh", chunk=4)
    problem = network(256, 66, gain=gain, device=gpu)
    x, report = forward.run(*problem, None, layers)
    assert report.solution().result is Result.CONVERGED
    assert error(after_blocks(x, layers), loop(*doubles(*problem), layers)) <= TOLERANCE
    with pytest.MonkeyPatch.context() as patch:
        plain = forward.dense.solve_in_place
        patch.setattr(forward.dense, "solve_in_place", lambda *given, **_: plain(*given))
        _, refined = forward.run(*problem, None, layers)
    assert max(report.passes_taken()) <= max(refined.passes_taken())
