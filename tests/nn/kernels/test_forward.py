"""Networks by kernels against a plain loop in float64, gradients against autograd through it.

On a CPU the kernels are interpreted, and so the networks are small; ``--device=cuda`` runs the real thing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deeppcr import Result
from kernel_support import error, misaligned, strided, thorough

# Where something overflows, NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
triton = pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

import triton.language as tl

from deeppcr.nn import cost, forward, kernels
from deeppcr.nn.layers import ACTIVATIONS, Layers
from deeppcr.nn.report import Report

TOLERANCE = 2e-5
MLP = {"skip": 1, "residual": False}
GAINS = {"relu": 1.2, "tanh": 1.0, "sigmoid": 2.0}


@pytest.fixture(autouse=True)
def several_groups(monkeypatch):
    """Networks that an interpreter can do have few chunks, which would be one group: see also ``test_one_group``."""
    monkeypatch.setattr(cost, "ONE_GROUP", 1)
    forward.plan_for.cache_clear()
    yield
    forward.plan_for.cache_clear()


def network(blocks, width=3, rows=1, *, skip=1, residual=False, activation="tanh", gain=None, device="cpu"):
    """Weights, biases and an initial state; unless told otherwise, errors neither grow nor die out quickly."""
    if gain is None:
        gain = (0.5 / blocks**0.5) ** (1 / skip) if residual else GAINS[activation]
    weight = gain / width**0.5 * torch.randn(blocks, skip, width, width)
    bias = 0.3 * torch.randn(blocks, skip, width)
    if width > 64:  # for which there are no skip connections
        weight, bias = weight.squeeze(1), bias.squeeze(1)
    return weight.to(device), bias.to(device), torch.randn(rows, width).to(device)


def in_blocks(weight, bias):
    """[blocks, skip, w, w] and [blocks, skip, w], also where blocks are single layers."""
    return (weight, bias) if weight.ndim == 4 else (weight.unsqueeze(1), bias.unsqueeze(1))


def one_block(z, weight, bias, layers):
    inner = z
    for w, b in zip(weight.unbind(-3), bias.unbind(-2), strict=True):
        inner = getattr(torch, layers.activation)(inner) @ w.mT + b.unsqueeze(-2)
    return inner + z if layers.residual else inner


def loop(weight, bias, z, layers):
    """The states after every block, [blocks, B, w]."""
    states = []
    for w, b in zip(*in_blocks(weight, bias), strict=True):
        z = one_block(z, w, b, layers)
        states.append(z)
    return torch.stack(states)


def doubles(*tensors):
    return [tensor.double() for tensor in tensors]


def misfit(states, weight, bias, initial, layers):
    """[blocks, B]: the largest ``|z_l - step(z_{l-1})|`` in float64."""
    states, weight, bias, initial = doubles(states, weight, bias, initial)
    before = torch.cat([initial.unsqueeze(0), states[:-1]])
    return (states - one_block(before, *in_blocks(weight, bias), layers)).abs().amax(-1)


def after_blocks(x, layers):
    return x[layers.skip :: layers.skip]


def assert_states_and_gradients(problem, layers, guess=None, tolerance=TOLERANCE, gradient_tolerance=None):
    leaves = [tensor.clone().requires_grad_() for tensor in problem]
    box = []
    states = forward.apply(*leaves, guess, layers, box)
    full = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = loop(*full, layers)
    assert states.shape == expected.shape
    assert error(states, expected) <= tolerance
    gradient = torch.randn_like(states)
    found = torch.autograd.grad(states, leaves, gradient)
    right = torch.autograd.grad(expected, full, gradient.double())
    for ours, theirs, leaf in zip(found, right, leaves, strict=True):
        assert ours.shape == leaf.shape
        assert error(ours, theirs) <= (gradient_tolerance or 5 * tolerance)
    return box[0]


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


@pytest.fixture
def few_rounds(monkeypatch):
    """Two rounds, so four passes, before the rest is taken one layer after the other."""
    monkeypatch.setattr(forward, "_ROUNDS", 2)


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


class TestNotConverged:
    layers = Layers(**MLP, activation="tanh", chunk=2)

    @pytest.mark.parametrize("gain", [3.0, 5.0])
    def test_the_loop_finishes_what_newton_does_not(self, gain, device, few_rounds):
        problem = network(16, gain=gain, device=device)
        x, report = forward.run(*problem, None, self.layers)
        solution = report.solution()
        assert report.finished
        assert report.passes_taken() == [0]
        assert solution.results == (Result.FINISHED_BY_LOOP,)
        assert solution.result is Result.FINISHED_BY_LOOP
        assert solution.iterations.tolist() == [2]
        assert solution.residual.tolist() == [0]
        states = after_blocks(x, self.layers)
        (exact,) = solution.exact_steps.tolist()
        assert exact >= 4  # after two rounds at least two chunks of two
        assert f"up to step {exact} exact" in solution.message
        assert error(states[:exact], loop(*doubles(*problem), self.layers)[:exact]) <= 1e-3
        assert misfit(states, *problem, self.layers).max() <= 1e-5 * states.abs().max()
        assert torch.equal(x[0], problem[2])

    def test_only_for_the_rows_that_need_it(self, device, few_rounds):
        weight, bias, initial = problem = network(10, 3, 2, gain=4.0, device=device)
        # Rounding is amplified, too: by this tolerance it is nothing.
        layers = Layers(**MLP, activation="tanh", chunk=2, tolerance=(1e-4, 1e-4, 0.0))
        by_the_loop = forward.run(*problem, None, Layers(**MLP, activation="tanh", chunk=10))[0][1:]
        guess = by_the_loop * (1 + 1e-4 * torch.randn(10, 2, 3).to(device))  # settled by the first round
        guess[:, 0] = 1.0
        x, report = forward.run(*problem, guess, layers)
        assert report.finished
        assert report.solution().results == (Result.FINISHED_BY_LOOP, Result.CONVERGED)
        assert report.solution().result is Result.FINISHED_BY_LOOP
        states = after_blocks(x, layers)
        assert misfit(states, *problem, layers).max() <= 1e-5 * states.abs().max()
        # Bit for bit what it is where nobody needs another round or the loop, which rounds otherwise.
        alone, report = forward.run(weight, bias, initial[[1, 1]], guess[:, [1, 1]], layers)
        assert not report.finished
        assert torch.equal(states[:, 1], alone[1:, 1])
        assert not torch.equal(states[:, 1], by_the_loop[:, 1])

    def test_of_wide_layers(self, device, monkeypatch):
        monkeypatch.setattr(forward, "_ROUNDS", 1)
        problem = network(6, 66, gain=5.0, device=device)
        x, report = forward.run(*problem, None, self.layers)
        assert report.finished
        assert misfit(x[1:], *problem, self.layers).max() <= 1e-5 * x.abs().max()

    def test_with_skips(self, device, few_rounds):
        layers = Layers(2, True, "tanh", chunk=1)
        problem = network(8, 3, skip=2, residual=True, gain=4.0, device=device)
        x, report = forward.run(*problem, None, layers)
        assert report.finished
        states = after_blocks(x, layers)
        assert misfit(states, *problem, layers).max() <= 1e-5 * states.abs().max()

    @pytest.mark.gpu
    @pytest.mark.parametrize("width", [3, 16, 32, 64])
    def test_deep(self, width, gpu):
        problem = network(1000, width, 3, gain=4.0, device=gpu)
        x, report = forward.run(*problem, None, Layers(**MLP, activation="tanh"))
        assert report.finished
        states = after_blocks(x, self.layers)
        assert misfit(states, *problem, self.layers).max() <= 1e-5 * states.abs().max()

    @pytest.mark.parametrize("blocks", [6, 14])
    def test_states_that_overflow(self, blocks, device, few_rounds):
        layers = Layers(**MLP, activation="relu", chunk=2)
        weight, bias, initial = network(blocks, 3, 2, activation="relu", device=device)
        weight[:] = 1e6
        bias[:] = 0.1
        initial = initial.abs()
        initial[1] = 0.0
        bias[:, :, 2] = 0.2
        x, report = forward.run(weight, bias, initial, None, layers)
        expected = loop(weight, bias, initial, layers)
        finite = torch.isfinite(expected)
        assert not finite.all()
        assert finite.any()
        states = after_blocks(x, layers)
        assert torch.equal(torch.isfinite(states), finite)
        torch.testing.assert_close(states[finite], expected[finite])
        if blocks == 14:
            assert report.solution().result is Result.FINISHED_BY_LOOP


class TestReport:
    @pytest.mark.parametrize(("width", "skip", "residual"), [(3, 1, False), (3, 2, True), (66, 1, False)])
    def test_a_linear_network_is_corrected_once(self, width, skip, residual, device):
        # Where every state is positive a ReLU is linear, and Newton's method is exact if its Jacobians are.
        layers = Layers(skip, residual, "relu", chunk=2 * skip)
        weight, bias, initial = network(5, width, skip=skip, residual=residual, gain=1 / width**0.5, device=device)
        problem = weight.abs(), bias.abs() + 0.1, initial.abs()
        x, report = forward.run(*problem, None, layers)
        first, second = report.found[:2, 0, 0].tolist()
        assert second < 1e-4 * first
        assert report.passes_taken() == [2]
        assert error(after_blocks(x, layers), loop(*doubles(*problem), layers)) <= 1e-6

    def test_groups_are_put_together_in_their_order(self, device):
        """From the third group on, corrections pass through the product of a whole group."""
        layers = Layers(**MLP, activation="relu", chunk=1)
        weight, bias, initial = network(13, gain=1 / 3**0.5, rows=2, device=device)
        problem = weight.abs(), bias.abs() + 0.1, initial.abs()
        x, report = forward.run(*problem, None, layers)
        assert report.passes_taken() == [2, 2]
        assert error(after_blocks(x, layers), loop(*doubles(*problem), layers)) <= 1e-6

    @pytest.mark.parametrize("tolerance", [1e-1, 1e-5])
    def test_says_what_is_so(self, tolerance, device):
        layers = Layers(**MLP, activation="tanh", chunk=2, tolerance=(tolerance, tolerance, 0.0))
        problem = network(9, 3, 2, gain=1.5, device=device)
        x, report = forward.run(*problem, None, layers)
        solution, taken = report.solution(), report.passes_taken()
        states = after_blocks(x, layers)
        assert not report.finished
        assert all(2 <= passes <= 2 * report.rounds for passes in taken)
        assert max(taken) > 2 * report.rounds - 2
        assert solution.iterations.tolist() == [-(-passes // 2) for passes in taken]
        assert solution.results == (Result.CONVERGED,) * 2
        assert solution.exact_steps.tolist() == [9, 9]
        assert solution.updates.shape == (report.rounds, 2)
        assert solution.states is None
        assert (solution.plan.evaluation, solution.plan.chunk) == ("fused kernels", 2)
        true = misfit(states, *problem, layers).amax(0)
        if tolerance == 1e-1:
            assert true.max() > 1e-4  # there is something to tell
        torch.testing.assert_close(solution.residual.double(), true, rtol=1e-3, atol=1e-6)
        assert (states - loop(*doubles(*problem), layers)).abs().max() <= 3 * tolerance

    def test_chunks_by_depth(self):
        for blocks, skip, chunk, expected in (
            (1, 1, None, 1),
            (2, 1, None, 1),
            (64, 1, None, 4),
            (1024, 1, None, 16),
            (256, 4, None, 4),
            (4, 4, None, 1),
            (10, 1, 100, 10),
            (10, 4, 3, 3),
            (10, 4, 19, 10),
        ):
            assert Layers(skip, False, "relu", chunk=chunk).chunk_blocks(blocks) == expected


class TestAdjoint:
    def expected(self, weight, x, gradients):
        """For one layer a block with slope 1: a plain recurrence in float64."""
        weight, gradients = doubles(weight[:, 0], gradients)
        adjoints = [gradients[-1]]
        for w, g in zip(weight[1:].flip(0), gradients[:-1].flip(0), strict=True):
            adjoints.append(adjoints[-1] @ w + g)
        return torch.stack(adjoints[::-1]), adjoints[-1] @ weight[0]

    @pytest.mark.parametrize("chunk", [4, 6])
    def test_products_may_overflow(self, chunk, device):
        # No gradient reaches the layers whose product overflows: their adjoints are 0.
        layers = Layers(**MLP, activation="relu", chunk=chunk)
        weight, _, _ = network(20, 3, 2, device=device)
        weight[10:] = 1e12 * torch.eye(3, device=device)
        x = torch.rand(21, 2, 3, device=device) + 0.1
        gradients = torch.randn(20, 2, 3, device=device)
        gradients[9:] = 0
        adjoints, initial = forward.adjoint(weight, x, gradients, layers)
        expected, expected_initial = self.expected(weight, x, gradients)
        assert torch.isfinite(expected).all()
        assert error(adjoints, expected) <= TOLERANCE
        assert error(initial, expected_initial) <= TOLERANCE

    def test_adjoints_that_overflow(self, device):
        layers = Layers(**MLP, activation="relu", chunk=3)
        weight, _, _ = network(12, 3, 2, device=device)
        weight[2:8] = 1e12
        x = torch.rand(13, 2, 3, device=device) + 0.1
        gradients = torch.rand(12, 2, 3, device=device)
        gradients[5:, 1] = 0
        adjoints, _ = forward.adjoint(weight, x, gradients, layers)
        expected, _ = self.expected(weight, x, gradients)
        finite = torch.isfinite(expected.float())
        assert not finite[:, 0].all()
        assert torch.equal(torch.isfinite(adjoints)[2:], finite[2:])
        torch.testing.assert_close(adjoints[8:], expected[8:].float(), rtol=1e-4, atol=1e-5)

    def test_only_what_is_asked_for(self, device):
        layers = Layers(**MLP, activation="tanh")
        weight, bias, initial = network(3, 3, 2, device=device)
        states = forward.apply(weight, bias, initial.requires_grad_(), None, layers, [])
        states.sum().backward()
        assert initial.grad is not None
        assert weight.grad is None

    def test_second_derivatives_are_refused(self, device):
        layers = Layers(**MLP, activation="tanh")
        leaves = [leaf.requires_grad_() for leaf in network(2, device=device)]
        states = forward.apply(*leaves, None, layers, [])
        with pytest.raises(RuntimeError, match="second derivatives: the fused kernels have none"):
            torch.autograd.grad(states.sum(), leaves, create_graph=True)


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


@triton.jit
def _settled(found, done, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    tl.store(done + row, kernels.settled(found, 2, row, ROWS).to(tl.int32))


def test_the_report_and_the_kernels_agree_on_what_is_settled(device):
    corrections = [
        0.0,
        1e-30,
        0.005,
        0.01,
        0.0101,
        0.05,
        0.09,
        0.0999,
        0.1001,
        0.11,
        0.15,
        0.2,
        1.0,
        50.0,
        float("inf"),
    ]
    before, last = torch.cartesian_prod(torch.tensor(corrections), torch.tensor(corrections))[:128].T
    found = torch.zeros(2, 2, 128, device=device)
    found[0, 0], found[1, 0] = before, last
    done = torch.full((128,), 7, dtype=torch.int32, device=device)
    _settled[(1,)](found, done, 128)
    assert 0 < done.sum() < 128
    assert [2 * each for each in done.tolist()] == Report(8, 2, found, 1).passes_taken()


@pytest.mark.parametrize("seed", [6, 10])
def test_the_end_of_the_network_is_part_of_the_test(seed, device):
    """A last chunk that amplifies: the starts of the chunks are right long before the end is."""
    torch.manual_seed(seed)
    layers = Layers(**MLP, activation="tanh", chunk=4)
    weight, bias, initial = 0.7 * torch.randn(20, 1, 2, 2), 0.5 * torch.randn(20, 1, 2), torch.randn(1, 2)
    before = loop(*doubles(weight, bias, initial), layers)[15, 0]
    weight[16:], bias[16:] = 10 * torch.eye(2), 0
    weight[16], bias[16] = 30 * torch.eye(2), -30 * torch.tanh(before).float()
    problem = [each.to(device) for each in (weight, bias, initial)]
    exact = loop(*doubles(*problem), layers)
    x, report = forward.run(*problem, None, layers)
    rounding = (forward.run(*problem, None, Layers(**MLP, activation="tanh", chunk=20))[0][-1] - exact[-1]).abs().max()
    assert report.solution().result is Result.CONVERGED
    assert (x[-1] - exact[-1]).abs().max() <= 3 * rounding + 1e-5


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


@pytest.mark.parametrize("rounds", [2, *thorough(8)])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_product_that_overflows_settles_nothing(grouped, rounds, device, monkeypatch):
    """The states are numbers, and right from the first pass on; what their errors would become is not known."""
    monkeypatch.setattr(forward, "_ROUNDS", rounds)
    layers = Layers(**MLP, activation="relu", chunk=2)
    blocks = 32 if grouped else 16  # eight chunks are one group, whose product nobody needs
    weight = torch.ones(blocks, 1, 1, 1, device=device)
    weight[4 if grouped else 5], weight[6] = 1e25, 1e25
    bias, initial = torch.zeros(blocks, 1, 1, device=device), torch.full((1, 1), 1e-30, device=device)
    weight[8], weight[10] = 1e-25, 1e-25
    if not grouped:
        weight[4], weight[6] = 1e25, 1.0
    exact = loop(weight, bias, initial, layers)
    x, report = forward.run(weight, bias, initial, exact[:, 0], layers)
    assert torch.isfinite(exact).all()
    assert report.solution().result is Result.FINISHED_BY_LOOP
    torch.testing.assert_close(after_blocks(x, layers), exact)


@pytest.mark.parametrize("blocks", [8, *thorough(32)])
@pytest.mark.parametrize(("residual", "rounds"), [(True, 4), (False, 3)])
def test_rounds_where_nobody_can_ask(residual, rounds, blocks, device, monkeypatch):
    """In a CUDA graph there are so many, whatever they find, and then the loop."""
    layers = Layers(2, residual, "tanh", chunk=2)
    problem = network(blocks, 3, 2, skip=2, residual=residual, activation="tanh", device=device)
    seen = []
    for kind, name in ((forward._Narrow, "one_round"), (forward._Narrow, "whole")):
        made = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *a, name=name, made=made: seen.append(name) or made(*a))
    exact, _ = forward.run(*problem, None, replace(layers, chunk=blocks))
    seen.clear()
    monkeypatch.setattr(forward, "is_capturing", lambda device: True)
    x, report = forward.run(*problem, None, layers)
    assert seen == ["one_round"] * rounds + ["whole"]
    assert not report.finished
    torch.testing.assert_close(x, exact, atol=1e-4, rtol=1e-4)
