"""Loops to solve, and the plain loop to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import deeppcr


@dataclass
class Problem:
    step: Callable
    z0: Any
    xs: Any = None
    length: int | None = None

    def __iter__(self):
        return iter((self.step, self.z0, self.xs))

    def solve(self, *, solver: deeppcr.Newton | deeppcr.Loop = deeppcr.Newton(), **settings) -> deeppcr.Solution:
        return deeppcr.solve(self.step, self.z0, self.xs, length=self.length, solver=solver, **settings)

    def loop(self) -> Any:
        """The states of the plain loop, as ``Solution.states`` has them."""
        return plain_loop(self.step, self.z0, self.xs, self.length)


def plain_loop(step: Callable, z0: Any, xs: Any = None, length: int | None = None) -> Any:
    length = length or len(pytree.tree_leaves(xs)[0])
    states, z = [], z0
    for index in range(length):
        z = step(z) if xs is None else step(z, pytree.tree_map(lambda leaf, i=index: leaf[i], xs))
        states.append(z)
    return pytree.tree_map(lambda *each: torch.stack(each), *states)


def relative_error(found: Any, expected: Any) -> float:
    """The largest error of any leaf, relative to the leaf's largest value."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    pairs = [(a.detach(), b.detach()) for a, b in pairs]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


class Generator:
    """Random numbers of one dtype on one device; the same numbers for every dtype and device."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64, device: Any = "cpu"):
        self.source = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.source, dtype=torch.float64).to(self.device, self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.source, dtype=torch.float64).to(self.device, self.dtype)

    def linear_layers(self, length: int, width: int, gain: float = 1.0) -> tuple[Tensor, Tensor]:
        """Weights and biases as nn.Linear initialises them."""
        bound = 1 / math.sqrt(width)
        weights = (2 * self.uniform(length, width, width) - 1) * bound * gain
        return weights, (2 * self.uniform(length, width) - 1) * bound

    def module(self, module: nn.Module) -> nn.Module:
        for parameter in module.parameters():
            bound = 1 / math.sqrt(parameter.shape[-1])
            parameter.data = (2 * self.uniform(*parameter.shape) - 1) * bound
        return module


def mlp(make: Generator, length: int, rows: int, width: int = 16, activation=torch.relu, gain: float = 1.0) -> Problem:
    def step(z, x):
        weight, bias = x
        return activation(z) @ weight.mT + bias

    return Problem(step, make.normal(rows, width), make.linear_layers(length, width, gain))


def resnet(make: Generator, length: int, rows: int, width: int = 16, skip: int = 4) -> Problem:
    def layer(z, x):
        weight, bias = x
        return torch.relu(z) @ weight.mT + bias

    step, xs = deeppcr.collapse(layer, make.linear_layers(skip * length, width), skip)
    return Problem(step, make.normal(rows, width), xs)


def gru(make: Generator, length: int, rows: int) -> Problem:
    cell = make.module(nn.GRUCell(3, 8))
    step = deeppcr.rowwise(lambda z, x: cell(x, z))
    return Problem(step, make.normal(rows, 8), make.normal(length, rows, 3))


def lstm(make: Generator, length: int, rows: int) -> Problem:
    cell = make.module(nn.LSTMCell(3, 6))
    step = deeppcr.rowwise(lambda z, x: cell(x, z))
    return Problem(step, (make.normal(rows, 6), make.normal(rows, 6)), make.normal(length, rows, 3))


CONTRACTING = {
    "mlp relu": mlp,
    "mlp tanh": lambda make, length, rows: mlp(make, length, rows, activation=torch.tanh),
    "mlp sigmoid": lambda make, length, rows: mlp(make, length, rows, activation=torch.sigmoid),
    "resnet": resnet,
    "gru": gru,
    "lstm": lstm,
}


def attention(make: Generator, length: int, rows: int) -> Problem:
    """A step with layer normalisation and softmax attention among the elements of the state."""

    def step(z, x):
        normal = nn.functional.layer_norm(z, z.shape[-1:])
        weights = torch.softmax(normal.unsqueeze(-1) * normal.unsqueeze(-2), -1)
        return 0.9 * z + 0.5 * (weights @ normal.unsqueeze(-1)).squeeze(-1) + x

    return Problem(step, make.normal(rows, 8), make.normal(length, 8))


def slow_recurrence(make: Generator, length: int, rows: int) -> Problem:
    weight = make.normal(16, 16) / 4
    return Problem(
        lambda z, x: 0.95 * z + 0.3 * torch.tanh(z @ weight + x), make.normal(rows, 16), make.normal(length, 16)
    )


def langevin(make: Generator, length: int, rows: int) -> Problem:
    """A double well with noise drawn beforehand."""
    step = lambda z, noise: z - 0.05 * (z**3 - z) + 0.1 * noise  # noqa: E731
    return Problem(step, make.normal(rows, 4), make.normal(length, rows, 4))


def runge_kutta(slope: Callable, time_step: float) -> Callable:
    def step(z):
        k1 = slope(z)
        k2 = slope(z + time_step / 2 * k1)
        k3 = slope(z + time_step / 2 * k2)
        k4 = slope(z + time_step * k3)
        return z + time_step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    return step


def pendulum(time_step: float) -> Callable:
    def slope(z):
        angle, speed = z.unbind(-1)
        return torch.stack([speed, -torch.sin(angle) - 0.1 * speed], -1)

    def build(make: Generator, length: int, rows: int) -> Problem:
        return Problem(runge_kutta(slope, time_step), 1.5 * make.normal(rows, 2), length=length)

    return build


def he_network(make: Generator, length: int, rows: int) -> Problem:
    problem = mlp(make, length, rows, width=32)
    problem.xs = (make.normal(length, 32, 32) * math.sqrt(2 / 32), torch.zeros_like(problem.xs[1]))
    return problem


MARGINAL = {
    "attention": attention,
    "slow recurrence": slow_recurrence,
    "langevin": langevin,
    "pendulum 3e-4": pendulum(3e-4),
    "pendulum 1e-3": pendulum(1e-3),
    "pendulum 1e-2": pendulum(1e-2),
    "he network": he_network,
}


def logistic(make: Generator, length: int, rows: int) -> Problem:
    return Problem(lambda z: 4 * z * (1 - z), 0.1 + 0.8 * make.uniform(rows, 1), length=length)


def lorenz(make: Generator, length: int, rows: int) -> Problem:
    def slope(state):
        x, y, z = state.unbind(-1)
        return torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], -1)

    return Problem(runge_kutta(slope, 0.01), 5 * make.normal(rows, 3), length=length)


CHAOTIC = {"logistic": logistic, "lorenz": lorenz}
