"""Networks as the kernels take them, and the plain loop that they are held against."""

from __future__ import annotations

import pytest
import torch

from kernel_support import error

pytest.importorskip("triton")

from deeppcr.nn import forward

TOLERANCE = 2e-5
MLP = {"skip": 1, "residual": False}
GAINS = {"relu": 1.2, "tanh": 1.0, "sigmoid": 2.0}


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
