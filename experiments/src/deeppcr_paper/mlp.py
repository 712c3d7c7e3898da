"""The paper's first example: a deep network with PyTorch's default initialisation, one row at a time.

Shapes: L layers of width w.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import deeppcr
from deeppcr.nn.base import ACTIVATIONS
from deeppcr.nn.networks import MLP

from .experiment import free_memory

#: Networks with more weights than this are drawn on the device itself: on a CPU that takes up to a minute.
_MANY = 2**20
#: Weights that are converted to float64 at a time.
_CONVERTED = 2**24


def layer(z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
    """One layer of the network: the body of the loop."""
    weight, bias = x
    return torch.nn.functional.linear(torch.relu(z), weight, bias)


def slope(z: Tensor, x: tuple[Tensor, Tensor]) -> deeppcr.linear.Dense:
    """The Jacobian of a layer, [1, w, w]: what ``DenseJacobian()`` finds by itself, in about twice the time."""
    weight, _ = x
    return deeppcr.linear.Dense(weight * (z > 0).unsqueeze(-2))


def _with(activation: str) -> tuple[Callable, Callable]:
    """The layer with another activation, and its Jacobian."""
    function, derivative = ACTIVATIONS[activation]

    def step(z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        return torch.nn.functional.linear(function(z), *x)

    def jacobian(z: Tensor, x: tuple[Tensor, Tensor]) -> deeppcr.linear.Dense:
        return deeppcr.linear.Dense(x[0] * derivative(z).unsqueeze(-2))

    return step, jacobian


#: A layer and its Jacobian, by activation.
LAYERS: dict[str, tuple[Callable, Callable]] = {
    "relu": (layer, slope),
    **{name: _with(name) for name in ACTIVATIONS if name != "relu"},
}


@dataclass(frozen=True)
class Network:
    """Parameters and input.

    Attributes:
        z0: [1, w]
        weights: [L, w, w]
        biases: [L, w]
        activation: "relu", "tanh" or "sigmoid"
    """

    z0: Tensor
    weights: Tensor
    biases: Tensor
    activation: str = "relu"

    @staticmethod
    def make(length: int, width: int, device: torch.device | str, seed: int = 0, activation: str = "relu") -> Network:
        """PyTorch's default; MemoryError where a CPU cannot hold it with its blocks: the system would end the process."""
        there = torch.device(device)
        if there.type == "cpu" and 8 * 4 * length * width**2 > free_memory(there):
            raise MemoryError("out of memory")
        # On the CPU, so that every device sees the same network.
        where = torch.device("cpu") if length * width**2 <= _MANY else there
        generator = torch.Generator(where).manual_seed(seed)
        bound = width**-0.5
        weights = torch.empty(length, width, width, device=where).uniform_(-bound, bound, generator=generator)
        biases = torch.empty(length, width, device=where).uniform_(-bound, bound, generator=generator)
        z0 = torch.randn(1, width, generator=generator, device=where)
        return Network(z0.to(device), weights.to(device), biases.to(device), activation)

    @property
    def jacobian(self) -> deeppcr.GivenJacobian:
        """The analytic one."""
        return deeppcr.GivenJacobian(LAYERS[self.activation][1], exact=True)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.z0, self.weights, self.biases

    def double(self) -> Network:
        return Network(*(each.detach().double() for each in self.tensors), activation=self.activation)

    def trainable(self) -> Network:
        return Network(*(each.detach().requires_grad_() for each in self.tensors), activation=self.activation)

    def loop(self) -> list[Tensor]:
        """All states, one after the other. The parameters are unbound once: indexing them costs more."""
        step, z, states = LAYERS[self.activation][0], self.z0, []
        for x in zip(self.weights.unbind(), self.biases.unbind(), strict=True):
            z = step(z, x)
            states.append(z)
        return states

    def parallel(self, solver: deeppcr.Newton, guess: Any = deeppcr.RepeatInitial()) -> deeppcr.Solution:
        """All states at once."""
        step = LAYERS[self.activation][0]
        return deeppcr.solve(step, self.z0, (self.weights, self.biases), solver=solver, guess=guess)

    def module(self) -> MLP:
        """The same layers as a module, between an input and an output layer that nobody uses."""
        depth, width = self.biases.shape
        module = MLP(1, width, 1, 1, self.activation, device=self.z0.device)
        module.weight, module.bias = torch.nn.Parameter(self.weights), torch.nn.Parameter(self.biases)
        module.activations = module.activations.new_zeros(depth, width)
        return module

    @torch.no_grad()
    def exact_states(self) -> Tensor:
        """By the loop in float64, [L, 1, w]."""
        z, states = self.z0, []
        for part in self.parts():
            states += Network(z, self.weights[part], self.biases[part], self.activation).double().loop()
            z = states[-1]
        return torch.stack(states)

    def parts(self) -> Iterator[slice]:
        """Layers whose weights can be converted at once: all of them would not fit, each by itself takes long."""
        depth, width = self.biases.shape
        at_once = max(1, _CONVERTED // width**2)
        for start in range(0, depth, at_once):
            yield slice(start, min(start + at_once, depth))
