"""The loops of ``loops.py``, each step written as a user would write it: plain PyTorch, closing over what does not change.

Shapes: L steps, B rows, D the numbers of a row's state (or of a leaf of it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Inputs:
    """What ``solve`` is given.

    Attributes:
        parameters: the tensors that ``step`` closes over, by which gradients are taken, too
        projection: what xs are made from, where a layer would make them: inputs [L, B, D], weight and bias
    """

    step: Callable
    z0: Any
    xs: Any = None
    parameters: tuple[Tensor, ...] = ()
    projection: tuple[Tensor, ...] = ()


class Draw:
    """Random numbers, those of float32 wherever they are wanted and in which precision, so that loops in several have the same."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0):
        self._source, self._place = torch.Generator().manual_seed(seed), (device, dtype)

    def normal(self, *shape: int, size: float = 1.0) -> Tensor:
        return self.placed(size * torch.randn(shape, generator=self._source))

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return self.placed(low + (high - low) * torch.rand(shape, generator=self._source))

    def values(self, numbers: Any) -> Tensor:
        return self.placed(torch.tensor(numbers))

    def placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(*self._place)

    def exact(self, tensor: Tensor) -> Tensor:
        """As it was drawn: what is computed from it is the same everywhere."""
        return tensor.to("cpu", torch.float32)


#: Of a Draw and of L, B, D: the loop.
Make = Callable[[Draw, int, int, int], Inputs]


def elementwise_gru(draw: Draw, L: int, B: int, D: int) -> Inputs:
    """Every channel by itself; the inputs are projected already, [L, B, 3 D]."""
    update_weight, reset_weight, new_weight = weights = tuple(draw.uniform(-0.5, 0.5, D) for _ in range(3))

    def step(h, gates):
        to_update, to_reset, to_new = gates.chunk(3, -1)
        update = torch.sigmoid(to_update + update_weight * h)
        reset = torch.sigmoid(to_reset + reset_weight * h)
        new = torch.tanh(to_new + new_weight * (reset * h))
        return (1 - update) * h + update * new

    projection = draw.normal(L, B, D), draw.normal(3 * D, D, size=D**-0.5), draw.normal(3 * D, size=0.1)
    gates = draw.placed(linear(*map(draw.exact, projection)))
    return Inputs(step, draw.values([[0.0] * D] * B), gates, weights, projection)


def projecting_gru(draw: Draw, L: int, B: int, D: int) -> Inputs:
    """The same with the projection inside of the step."""
    inner = elementwise_gru(draw, L, B, D)
    inputs, weight, bias = inner.projection

    def step(h, x):
        return inner.step(h, linear(x, weight, bias))

    return Inputs(step, inner.z0, inputs, (*inner.parameters, weight, bias))


def elementwise_lstm(draw: Draw, L: int, B: int, D: int) -> Inputs:
    """Two numbers a channel; the inputs are projected already, [L, B, 4 D]."""
    weights = tuple(draw.uniform(-0.5, 0.5, D) for _ in range(4))

    def step(state, gates):
        h, c = state
        forget, write, read, new = (x + weight * h for x, weight in zip(gates.chunk(4, -1), weights, strict=True))
        c = torch.sigmoid(forget) * c + torch.sigmoid(write) * torch.tanh(new)
        return torch.sigmoid(read) * torch.tanh(c), c

    zeros = draw.values([[0.0] * D] * B)
    return Inputs(step, (zeros, zeros.clone()), draw.normal(L, B, 4 * D), weights)


def rk4(slope: Callable[[Tensor], Tensor], dt: float) -> Callable[[Tensor], Tensor]:
    """A step of the classical method of Runge and Kutta."""

    def step(z):
        k1 = slope(z)
        k2 = slope(z + dt / 2 * k1)
        k3 = slope(z + dt / 2 * k2)
        k4 = slope(z + dt * k3)
        return z + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    return step


def pendulum(draw: Draw, L: int, B: int, D: int) -> Inputs:
    damping = draw.values(0.3)

    def slope(z):
        angle, speed = z.unbind(-1)
        return torch.stack([speed, -torch.sin(angle) - damping * speed], -1)

    return Inputs(rk4(slope, 0.01), draw.normal(B, 2), None, (damping,))


def van_der_pol(draw: Draw, L: int, B: int, D: int) -> Inputs:
    strength = draw.values(1.0)

    def slope(z):
        x, y = z.unbind(-1)
        return torch.stack([y, strength * (1 - x * x) * y - x], -1)

    return Inputs(rk4(slope, 0.01), draw.normal(B, 2), None, (strength,))


def lorenz(draw: Draw, L: int, B: int, D: int) -> Inputs:
    """Chaotic: from two starts that differ by a rounding it goes two ways."""

    def slope(z):
        x, y, z = z.unbind(-1)
        return torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], -1)

    return Inputs(rk4(slope, 0.01), draw.normal(B, 3) + draw.values([0.0, 0.0, 25.0]))


def lorenz_96(draw: Draw, L: int, B: int, D: int, forcing: float = 8.0) -> Inputs:
    def slope(z):
        return (z.roll(-1, -1) - z.roll(2, -1)) * z.roll(1, -1) - z + forcing

    return Inputs(rk4(slope, 0.01), forcing + draw.normal(B, D))


def calm_lorenz_96(draw: Draw, L: int, B: int, D: int) -> Inputs:
    """With so little forcing that it settles."""
    return lorenz_96(draw, L, B, D, 2.0)


def predator_prey(draw: Draw, L: int, B: int, D: int) -> Inputs:
    """Lotka and Volterra with a limit to the prey, whose growth the weather [L, B] changes; Heun's method."""
    growth, hunger, dt = draw.values(1.0), draw.values(0.8), 0.02

    def slope(z, weather):
        prey, predators = z.unbind(-1)
        more = prey * (growth + weather - 0.3 * prey - predators)
        return torch.stack([more, predators * (0.5 * prey - hunger)], -1)

    def step(z, weather):
        k1 = slope(z, weather)
        k2 = slope(z + dt * k1, weather)
        return z + dt / 2 * (k1 + k2)

    return Inputs(step, draw.uniform(0.5, 1.5, B, 2), draw.normal(L, B, size=0.3), (growth, hunger))


def langevin(draw: Draw, L: int, B: int, D: int) -> Inputs:
    """A walk in a potential that couples all D numbers; the noise stands in xs."""
    mixing = draw.normal(D, D, size=0.3)
    stiffness = (mixing @ mixing.mT + torch.eye(D, dtype=mixing.dtype, device=mixing.device)).contiguous()

    def step(z, noise):
        return z - 0.05 * (z @ stiffness + 0.1 * z**3) + noise

    return Inputs(step, draw.normal(B, D), draw.normal(L, B, D, size=0.3), (stiffness,))


def kalman(draw: Draw, L: int, B: int, D: int) -> Inputs:
    """Position and speed, of which the position is seen: mean [B, 2] and covariance [B, 2, 2]."""
    motion = draw.values([[0.99, 0.1], [-0.1, 0.95]])
    disturbance, noise = draw.values([[0.01, 0.0], [0.0, 0.02]]), draw.values(0.3)
    seen = draw.values([1.0, 0.0])

    def step(state, observation):
        mean, covariance = state
        mean = mean @ motion.mT
        covariance = motion @ covariance @ motion.mT + disturbance
        column = covariance @ seen
        gain = column / ((column * seen).sum(-1, keepdim=True) + noise)
        mean = mean + gain * (observation - (mean * seen).sum(-1, keepdim=True))
        return mean, covariance - gain.unsqueeze(-1) * column.unsqueeze(-2)

    start = draw.normal(B, 2), draw.values([[[1.0, 0.0], [0.0, 1.0]]] * B)
    return Inputs(step, start, draw.normal(L, B, 1), (motion, disturbance, noise))


def filter_of_four(draw: Draw, L: int, B: int, D: int) -> Inputs:
    """A Kalman filter of D numbers, the first of which is seen: mean [B, D] and covariance [B, D, D]."""
    motion = (0.95 * torch.eye(D).to(draw.values(0.0)) + draw.normal(D, D, size=0.02)).contiguous()
    disturbance, noise = 0.01 * torch.eye(D).to(motion), draw.values(0.3)

    def step(state, observation):
        mean, covariance = state
        mean = mean @ motion.mT
        covariance = motion @ covariance @ motion.mT + disturbance
        column = covariance[..., 0]
        gain = column / (column[..., :1] + noise)
        mean = mean + gain * (observation - mean[..., :1])
        return mean, covariance - gain.unsqueeze(-1) * column.unsqueeze(-2)

    start = draw.normal(B, D), torch.eye(D).to(motion).expand(B, D, D).contiguous()
    return Inputs(step, start, draw.normal(L, B, 1), (motion, disturbance, noise))


def mlp(draw: Draw, L: int, B: int, D: int) -> Inputs:
    """A deep network: every step has weights of its own."""

    def step(z, layer):
        weight, bias = layer
        return torch.tanh(z) @ weight.mT + bias

    xs = draw.normal(L, D, D, size=0.7 * D**-0.5), draw.normal(L, D, size=0.3)
    return Inputs(step, draw.normal(B, D), xs)


def dense_gru(draw: Draw, L: int, B: int, D: int) -> Inputs:
    weight, bias = draw.uniform(-(D**-0.5), D**-0.5, 3 * D, D), draw.uniform(-(D**-0.5), D**-0.5, 3 * D)

    def step(h, gates):
        to_reset, to_update, to_new = gates.chunk(3, -1)
        by_reset, by_update, by_new = linear(h, weight, bias).chunk(3, -1)
        update = torch.sigmoid(to_update + by_update)
        new = torch.tanh(to_new + torch.sigmoid(to_reset + by_reset) * by_new)
        return (1 - update) * new + update * h

    return Inputs(step, draw.values([[0.0] * D] * B), draw.normal(L, B, 3 * D), (weight, bias))


def dense_lstm(draw: Draw, L: int, B: int, D: int) -> Inputs:
    weight = draw.uniform(-(D**-0.5), D**-0.5, 4 * D, D)

    def step(state, gates):
        h, c = state
        forget, write, read, new = (gates + linear(h, weight)).chunk(4, -1)
        c = torch.sigmoid(forget) * c + torch.sigmoid(write) * torch.tanh(new)
        return torch.sigmoid(read) * torch.tanh(c), c

    zeros = draw.values([[0.0] * D] * B)
    return Inputs(step, (zeros, zeros.clone()), draw.normal(L, B, 4 * D), (weight,))


def descent(draw: Draw, L: int, B: int, D: int) -> Inputs:
    """Gradient descent for a logistic regression of 200 examples with D features."""
    examples, labels = draw.normal(200, D), (draw.normal(200) > 0).to(draw.values(0.0))

    def step(weight):
        return weight - 0.1 * ((torch.sigmoid(weight @ examples.mT) - labels) @ examples / 200 + 0.01 * weight)

    return Inputs(step, draw.normal(B, D), None, (examples,))


def filter_of_a_signal(draw: Draw, L: int, B: int, D: int) -> Inputs:
    """An exponential average that saturates: as little as a step can do."""
    rate = draw.uniform(0.05, 0.5, D)
    return Inputs(lambda z, x: z + rate * (torch.tanh(x) - z), draw.normal(B, D), draw.normal(L, B, D), (rate,))


def bare_loop(inputs: Inputs, length: int) -> list[Tensor]:
    """The loop as it stands: leaves [L, ...] of the states."""
    leaves, spec = pytree.tree_flatten(inputs.xs)
    # All inputs at once: the gradient of one that is selected by itself is as large as all of them.
    given = [()] * length if inputs.xs is None else zip(*(leaf[:length].unbind(0) for leaf in leaves), strict=True)
    states, z = [], inputs.z0
    for each in given:
        z = inputs.step(z, pytree.tree_unflatten(each, spec)) if each else inputs.step(z)
        states.append(pytree.tree_leaves(z))
    return [torch.stack(each) for each in zip(*states, strict=True)]


def sources(inputs: Inputs) -> list[Tensor]:
    """What gradients are taken of: the initial state, the inputs of the steps, the parameters."""
    return pytree.tree_leaves((inputs.z0, () if inputs.xs is None else inputs.xs, inputs.parameters))
