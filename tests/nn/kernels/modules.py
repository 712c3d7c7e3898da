"""Modules that run by the kernels, and what their tests hold them against: the same network step by step in float64."""

from __future__ import annotations

import copy

import pytest
import torch

from deeppcr.nn import MLP, ResNet
from deeppcr.nn.base import Network
from kernel_support import error

TOLERANCE = 5e-5


def build(kind, depth, device, width=3, **settings):
    torch.manual_seed(0)
    if kind == "mlp":
        return MLP(4, width, depth, 2, **settings).to(device)
    return ResNet(4, width, depth, 2, **{"skip": 2, **settings}).to(device)


def in_float64(net):
    """The same network, step by step on a CPU."""
    twin = copy.deepcopy(net).cpu().double()
    twin.mode = "sequential"
    return twin


def outputs_and_gradients(net, x):
    net.zero_grad()
    out = net(x)
    out.square().sum().backward()
    return out.detach(), [parameter.grad.clone() for parameter in net.parameters()]


def assert_like_float64(net, x, tolerance=TOLERANCE):
    twin = in_float64(net)
    out, gradients = outputs_and_gradients(net, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Network, "_may_use_kernels", lambda *_: False)
        expected, expected_gradients = outputs_and_gradients(twin, x.cpu().double())
    assert error(out.cpu(), expected) <= tolerance
    largest = max(float(g.norm()) for g in expected_gradients)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert (ours.cpu().double() - theirs).norm() <= 5 * tolerance * max(float(theirs.norm()), 1e-2 * largest)
