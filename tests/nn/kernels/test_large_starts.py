"""A large initial state does not hide what the layers after it make of their biases: by kernels, against a plain loop in float64."""

from __future__ import annotations

import pytest
import torch

from deeppcr import Result

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr.nn import forward
from deeppcr.nn.layers import Layers

DEPTH, WIDTH = 32, 3


def contracting(start, device):
    """A network whose states come down to the size of its biases within the first chunks: after the first pass chunks hold what the guess
    left there, which is no signal, and falls."""
    make = torch.Generator().manual_seed(7)
    torch.manual_seed(7)
    weight = torch.randn(DEPTH, 1, WIDTH, WIDTH)
    weight = 0.3 * weight / torch.linalg.matrix_norm(weight, 2)[..., None, None]
    bias, z0 = torch.randn(DEPTH, 1, WIDTH), start * torch.randn(2, WIDTH)
    cotangents = torch.randn(DEPTH, 2, WIDTH, generator=make)
    return [each.to(device) for each in (weight, bias, z0, cotangents)]


def by_loop(weight, bias, z):
    states = []
    for w, b in zip(weight.squeeze(1), bias.squeeze(1), strict=True):
        z = torch.relu(z) @ w.mT + b
        states.append(z)
    return torch.stack(states)


def relative(actual, expected):
    """The largest error of a layer, in units of its largest number; nothing where both are zero."""
    axes = tuple(range(1, expected.ndim))
    off = (actual.cpu().double() - expected).abs().amax(axes)
    return float((off / expected.abs().amax(axes).clamp(min=1e-30)).max())


@pytest.mark.parametrize("start", [1e9, 1e12])
def test_states_and_gradients(start, device):
    weight, bias, z0, cotangents = contracting(start, device)
    layers, left = Layers(skip=1, residual=False, activation="relu", chunk=4), []
    ours = [each.clone().requires_grad_() for each in (weight, bias, z0)]
    states = forward.apply(*ours, None, layers, left)
    twins = [each.cpu().double().requires_grad_() for each in (weight, bias, z0)]
    expected = by_loop(*twins)
    for row in range(2):
        assert relative(states[:, row].detach(), expected[:, row].detach()) <= 1e-5
    assert left[0].solution().result is Result.CONVERGED
    gradients = torch.autograd.grad(states, ours, cotangents)
    for actual, loops in zip(gradients, torch.autograd.grad(expected, twins, cotangents.cpu().double()), strict=True):
        assert relative(actual, loops) <= 1e-4


def test_a_network_that_dies_ends_when_nothing_is_left(device):
    """Without biases what is left is noise, which falls from pass to pass: it is asked for as a signal would be, and not for ever."""
    weight, bias, z0, _ = contracting(1.0, device)
    x, report = forward.run(
        weight, torch.zeros_like(bias), z0, None, Layers(skip=1, residual=False, activation="relu", chunk=4)
    )
    solution = report.solution()
    assert solution.result is Result.CONVERGED
    assert solution.iterations.max() <= 3
    loop = by_loop(weight.cpu().double(), 0 * bias.cpu().double(), z0.cpu().double())
    assert (x[1:].cpu() - loop).abs().max() <= 1e-5 * z0.abs().max().cpu()
