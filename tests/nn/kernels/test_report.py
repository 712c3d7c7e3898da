"""What the kernels say of their passes is so, and they stop where the report says that all is settled."""

from __future__ import annotations

import pytest
import torch

from deeppcr import Result
from kernel_support import error

# Where something overflows, NumPy says so.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("several_groups")]
triton = pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

import triton.language as tl

from deeppcr.nn import forward, kernels
from deeppcr.nn.layers import Layers
from deeppcr.nn.report import Report
from nn.kernels.plain import MLP, after_blocks, doubles, loop, misfit, network


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
