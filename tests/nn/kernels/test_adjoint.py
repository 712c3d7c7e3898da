"""Backward passes by kernels against a plain recurrence in float64."""

from __future__ import annotations

import pytest
import torch

from kernel_support import error

# Where something overflows, NumPy says so.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("several_groups")]
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr.nn import forward
from deeppcr.nn.layers import Layers
from nn.kernels.plain import MLP, TOLERANCE, doubles, network


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
