"""What was large once does not hide what comes after it from the kernels either."""

import warnings

import pytest
import torch

import deeppcr
from deeppcr import ConvergenceWarning, Newton, Result
from problems import plain_loop

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def elementwise(z, x):
    return 0.05 * z + torch.sin(1.3 * torch.tanh(z)) * 0.7 + x


def mixing(z, x):
    """Every number of the state depends on others: three in a lane, twelve on a tile."""
    return 0.05 * z + torch.tanh(z.roll(1, -1)) * 0.7 + x


def solve(step, z0, xs, **options):
    solver = Newton(chunk=4)
    deeppcr.solve(step, torch.zeros_like(z0), xs, solver=solver)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        found = deeppcr.solve(step, z0, xs, solver=solver, **options)
    assert found.plan.evaluation.startswith("fused kernels")
    return found


@pytest.mark.parametrize(
    ("step", "width"), [(elementwise, 2), (mixing, 3), (mixing, 12)], ids=["lanes", "narrow", "tiles"]
)
@pytest.mark.parametrize("size", [1e7, 1e10])
def test_a_large_start(step, width, size, device):
    xs = torch.randn(48, 1, width, generator=torch.Generator().manual_seed(0)).to(device)
    z0 = torch.zeros(1, width, device=device)
    z0[0, 0] = size
    found = solve(step, z0, xs)
    assert found.result is Result.CONVERGED
    assert (found.states - plain_loop(step, z0, xs)).abs()[12:].max() <= 1e-3
    assert "digits of every state were asked for" in str(found.plan)
    assert "died out" not in found.message


def test_of_states_that_are_not_written(device):
    xs = torch.randn(48, 1, 2, generator=torch.Generator().manual_seed(0)).to(device)
    z0 = torch.full((1, 2), 1e7, device=device)
    deeppcr.solve(elementwise, z0, xs, solver=Newton(chunk=4))
    for _ in range(4):
        found = solve(elementwise, z0, xs, keep="last")
        assert (found.final - plain_loop(elementwise, z0, xs)[-1]).abs().max() <= 1e-3


@pytest.mark.parametrize("width", [3, 12])
def test_a_signal_that_dies_out_takes_no_more_passes(width, device):
    weight = 0.5 * torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(1)))[0].to(device)
    step = lambda z, x: torch.tanh(z @ weight) + x  # noqa: E731
    xs = torch.zeros(64, 1, width, device=device)
    found = solve(step, torch.ones(1, width, device=device), xs)
    assert found.result is Result.CONVERGED
    assert "digits of every state" not in str(found.plan)
    assert "died out" in found.message
