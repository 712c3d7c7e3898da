"""Rows of different lengths by kernels: their step is one like any other."""

import pytest
import torch

import deeppcr
from deeppcr import Loop, Newton
from deeppcr.ways import fused
from kernel_support import error, thorough
from test_lengths import by_rows, padded

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def normal(*shape, device):
    return torch.randn(*shape, dtype=torch.float64, device=device)


def elementwise(weight):
    return lambda z, x: torch.tanh(0.6 * z + x * weight)


def narrow(weight):
    return lambda z, x: torch.tanh(0.6 * z.roll(1, -1) + x * weight)


@pytest.mark.parametrize(
    ("make", "solver"),
    [
        (elementwise, Newton(chunk=4)),
        (narrow, Loop(by="kernel")),
        *thorough((elementwise, Loop(by="kernel")), (narrow, Newton(chunk=4))),
    ],
)
def test_lengths_by_kernels(make, solver, device):
    weight = normal(3, device=device).requires_grad_()
    step, lengths = make(weight), torch.tensor([5, 0, 7])
    z0, xs = normal(3, 3, device=device).requires_grad_(), normal(7, 3, 3, device=device).requires_grad_()
    filled = padded(xs, lengths.to(device))
    found = None
    for _ in range(2):  # kernels come with the second solve of a kind
        found = deeppcr.solve(step, z0, filled, lengths=lengths, solver=solver)
    assert found.plan.evaluation.startswith("fused kernels"), found.plan
    expected = by_rows(step, z0, xs, lengths)
    assert error(found.states, expected) < 1e-9
    seed = torch.randn_like(expected)
    of_found = torch.autograd.grad(found.states, (z0, filled, weight), seed)
    for one, other in zip(of_found, torch.autograd.grad(expected, (z0, xs, weight), seed), strict=True):
        assert error(one, other) < 1e-9
    # Other lengths are other numbers: nothing is traced anew.
    made = len(fused._steps)
    other = lengths.flip(0)
    found = deeppcr.solve(step, z0, padded(xs, other.to(device)), lengths=other, solver=solver)
    assert found.plan.evaluation.startswith("fused kernels")
    assert len(fused._steps) == made
    assert error(found.states, by_rows(step, z0, xs, other)) < 1e-9
