"""Steps that mix nine numbers or more, as people write them: of each the tensors that it is made from, in any dtype.

Shapes: L steps, B rows.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn


class Draw:
    """Random tensors, the same in every dtype; all of them are noted, for their gradients."""

    def __init__(self, dtype, device, length=9, rows=2):
        self.dtype, self.device, self.length, self.rows = dtype, device, length, rows
        self._generator = torch.Generator().manual_seed(0)
        self.given = []

    def normal(self, *shape, scale=1.0):
        numbers = scale * torch.randn(*shape, generator=self._generator, dtype=torch.float64)
        self.given.append(numbers.float().to(self.device, self.dtype).requires_grad_())
        return self.given[-1]

    def weight(self, *shape):
        return self.normal(*shape, scale=0.6 * shape[0] ** -0.5)

    def z0(self, *shape):
        return self.normal(self.rows, *shape)

    def xs(self, *shape):
        return self.normal(self.length, self.rows, *shape, scale=0.5)

    def module(self, module):
        for parameter in module.parameters():
            numbers = 0.3 * torch.randn(*parameter.shape, generator=self._generator, dtype=torch.float64)
            parameter.data = numbers.float().to(self.device, self.dtype)
            self.given.append(parameter)
        return module


def gru(width):
    def make(draw):
        weight, bias = draw.weight(width, 3 * width), draw.normal(3 * width)

        def step(h, gates):
            to_reset, to_update, to_new = gates.chunk(3, -1)
            by_reset, by_update, by_new = (h @ weight + bias).chunk(3, -1)
            update = torch.sigmoid(to_update + by_update)
            new = torch.tanh(to_new + torch.sigmoid(to_reset + by_reset) * by_new)
            return (1 - update) * new + update * h

        return step, draw.z0(width), draw.xs(3 * width)

    return make


def lstm(width):
    def make(draw):
        weight = draw.weight(width, 4 * width)

        def step(state, gates):
            h, c = state["h"], state["c"]
            forget, write, read, new = (gates + h @ weight).chunk(4, -1)
            c = torch.sigmoid(forget) * c + torch.sigmoid(write) * torch.tanh(new)
            return {"h": torch.sigmoid(read) * torch.tanh(c), "c": c}

        return step, {"h": draw.z0(width), "c": draw.z0(width)}, draw.xs(4 * width)

    return make


def cell(kind, width, pair=False):
    def make(draw):
        module = draw.module(kind(5, width))
        state = (draw.z0(width), draw.z0(width)) if pair else draw.z0(width)
        return lambda h, x: module(x, h), state, draw.xs(5)

    return make


def mlp(width):
    """Weights and biases of its own at every step, which all rows share."""

    def make(draw):
        xs = draw.normal(draw.length, width, width, scale=0.6 * width**-0.5), draw.normal(draw.length, width)
        return lambda z, x: torch.tanh(z @ x[0].mT + x[1]), draw.z0(width), xs

    return make


def kalman(draw):
    """Mean and covariance of a filter with one observation a step."""
    transition = torch.eye(4, dtype=draw.dtype, device=draw.device) * 0.9 + draw.normal(4, 4, scale=0.05).detach()
    noise = torch.eye(4, dtype=draw.dtype, device=draw.device) * 0.1
    seen = torch.eye(4, dtype=draw.dtype, device=draw.device)[:1].clone()
    draw.given[-1] = transition.requires_grad_()
    draw.given.append(noise.requires_grad_())

    def step(state, y):
        mean, covariance = state
        mean, covariance = mean @ transition.mT, transition @ covariance @ transition.mT + noise
        gain = (covariance @ seen.mT) / (seen @ covariance @ seen.mT + 0.3)
        mean = mean + ((y - mean @ seen.mT).unsqueeze(-2) @ gain.mT).squeeze(-2)
        return mean, covariance - gain @ seen @ covariance

    whole = torch.eye(4, dtype=draw.dtype, device=draw.device).expand(draw.rows, 4, 4).clone()
    return step, (draw.z0(4), whole), draw.xs(1)


def with_weight(width, function):
    """A function of (state, input, weight)."""

    def make(draw):
        weight = draw.weight(width, width)
        return lambda h, x: function(h, x, weight), draw.z0(width), draw.xs(width)

    return make


def layer_norm(draw):
    weight, scale = draw.weight(12, 12), draw.normal(12)
    return (
        lambda h, x: F.layer_norm(h + torch.tanh(h @ weight + x), (12,), scale, scale),
        draw.z0(12),
        draw.xs(12),
    )


def attention(draw):
    """Of three tokens."""
    query, key, value = (draw.weight(5, 5) for _ in range(3))

    def step(h, x):
        scores = (h @ query) @ (h @ key).mT / 5**0.5
        return 0.5 * h + torch.softmax(scores, -1) @ (h @ value) + x

    return step, draw.z0(3, 5), draw.xs(3, 5)


def cat_of_input(draw):
    weight, bias = draw.weight(17, 12), draw.normal(12)
    return lambda h, x: torch.tanh(torch.cat([h, x], -1) @ weight + bias), draw.z0(12), draw.xs(5)


def leapfrog(draw):
    weight = draw.weight(6, 6)

    def step(z, x):
        q, p = z.chunk(2, -1)
        p = p - 0.1 * (q @ weight + q**3) + 0.1 * x
        return torch.cat([q + 0.1 * p, p], -1)

    return step, draw.z0(12), draw.xs(6)


def ring(draw):
    """Neighbours on a ring, in both directions."""
    return (
        lambda z, x: 0.4 * z.roll(1, -1) + 0.3 * torch.sin(z.roll(-2, -1)) + 0.1 * z.flip(-1) + x,
        draw.z0(10),
        draw.xs(10),
    )


def triangle(draw):
    def step(z):
        parts = z.unbind(-1)
        return torch.stack([0.9 * parts[0], *(0.5 * b + 0.3 * torch.sin(a) for a, b in itertools.pairwise(parts))], -1)

    return step, draw.z0(9), None


def every_other(draw):
    def step(z, x):
        even, odd = z[..., ::2], z[..., 1::2]
        return torch.cat([torch.tanh(even + 0.5 * odd), 0.5 * odd * even.mean(-1, keepdim=True)], -1) + x

    return step, draw.z0(10), draw.xs(10)


def residual(draw):
    net = draw.module(nn.Sequential(nn.Linear(10, 18), nn.GELU(), nn.Linear(18, 10)))
    return lambda z, x: 0.7 * z + 0.3 * net(z) + x, draw.z0(10), draw.xs(10)


def no_rows(draw):
    weight = draw.weight(12, 12)
    return lambda h, x: torch.tanh(weight @ h + x), draw.normal(12), draw.normal(draw.length, 12)


def expanded(draw):
    """What is read is smaller than what is seen of it; or it is seen twice."""
    weight, bias, more = draw.weight(5, 7), draw.normal(5), draw.normal(1)

    def step(h, x):
        both = h @ weight[:, :5] + h @ weight[:, 2:]
        return torch.tanh(both + bias.expand(3, 5) + more.expand(5)) + x.unsqueeze(-2).expand(*h.shape)

    return step, draw.z0(3, 5), draw.xs(5)


def reset(draw):
    """Where a flag says so; and a number of every row and one of all."""
    weight, of_row = draw.weight(10, 10), draw.normal(draw.rows, 10)
    flags = torch.rand(draw.length, draw.rows, 1, generator=torch.Generator().manual_seed(1)) < 0.3
    counts = torch.randint(-2, 3, (draw.length, 10), generator=torch.Generator().manual_seed(1))

    def step(h, x):
        flag, count, shared = x
        picked = h[..., [9, 7, 5, 3, 1]].sum(-1, keepdim=True) * torch.tensor(
            [0.1, 0.0, -0.1, 0.2, 0.0] * 2, device=h.device
        )
        return (
            torch.where(flag, torch.zeros_like(h), torch.tanh(h @ weight + of_row + 0.1 * count))
            + shared
            + 0.1 * picked
        )

    return step, draw.z0(10), (flags.to(draw.device), counts.to(draw.device), draw.normal(draw.length, 10))


def made_zeros(draw):
    """Numbers that are made in the step beside others."""
    weight = draw.weight(10, 10)

    def step(h, x):
        shifted = torch.cat([torch.zeros_like(h[..., :1]), h[..., :-1]], -1)
        ones = torch.ones(10, 10, dtype=h.dtype, device=h.device)
        return torch.tanh(h @ weight + 0.5 * shifted + 0.01 * (h @ ones)) + x

    return step, draw.z0(10), draw.xs(10)


STEPS = {
    "GRU 16": gru(16),
    "GRU 12": gru(12),
    "GRU 20": gru(20),
    "GRU 33": gru(33),
    "LSTM 9": lstm(9),
    "nn.GRUCell": cell(nn.GRUCell, 12),
    "nn.LSTMCell": cell(nn.LSTMCell, 10, pair=True),
    "nn.RNNCell": cell(nn.RNNCell, 12),
    "MLP 10": mlp(10),
    "MLP 33": mlp(33),
    "Kalman": kalman,
    "layer_norm": layer_norm,
    "softmax": with_weight(12, lambda h, x, weight: 3 * torch.softmax(h @ weight + x, -1)),
    "norm": with_weight(12, lambda h, x, weight: (h @ weight + x) / (1 + (h @ weight).norm(dim=-1, keepdim=True))),
    "max": with_weight(12, lambda h, x, weight: torch.tanh(h @ weight + x) - 0.1 * h.amax(-1, keepdim=True)),
    "cosine": with_weight(12, lambda h, x, weight: torch.cos(h @ weight + x) + 0.01 * h.sum(-1, keepdim=True)),
    "einsum": with_weight(12, lambda h, x, weight: torch.tanh(torch.einsum("bi,ij->bj", h, weight) + x)),
    "attention": attention,
    "cat of the input": cat_of_input,
    "leapfrog": leapfrog,
    "ring": ring,
    "triangle": triangle,
    "every other": every_other,
    "residual": residual,
    "no rows": no_rows,
    "expanded": expanded,
    "reset": reset,
    "made zeros": made_zeros,
}
