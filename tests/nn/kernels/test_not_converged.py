"""What the kernels' rounds do not finish is finished by the loop, and said to be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deeppcr import Result
from kernel_support import error, thorough

# Where something overflows, NumPy says so.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("several_groups")]
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr.nn import forward
from deeppcr.nn.layers import Layers
from nn.kernels.plain import MLP, after_blocks, doubles, loop, misfit, network


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
