"""The loops that problems are drawn from: their steps, in natural units, and the numbers that go into them.

A step is ``step(z, x, p)``: the state, the inputs of this step (None where there are none) and the parameters, as tensors of any
dtype. It works for a state with and without rows. All numbers are drawn in float64.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FULL, ANY = (torch.float32, torch.float64), (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Draw:
    """All that is random about one problem: it depends on the seed and the number alone.

    Args:
        longest: the largest number of steps
    """

    def __init__(self, seed: int, number: int, longest: int):
        self.choice = random.Random(f"{seed} {number}")
        self.source = torch.Generator().manual_seed(self.choice.getrandbits(60))
        self.longest = longest
        self.length = round(math.exp(self.choice.uniform(0, math.log(longest))))
        self.rows = self.choice.choice((None, 1, 2, 3, 8))  # None: the state has no dimension for them
        self.width = round(math.exp(self.choice.uniform(0, math.log(40))))

    def pick(self, values: Sequence[Any]) -> Any:
        return self.choice.choice(values)

    def often(self, chance: float) -> bool:
        return self.choice.random() < chance

    def between(self, low: float, high: float) -> float:
        return self.choice.uniform(low, high)

    def decades(self, low: float, high: float) -> float:
        return math.exp(self.choice.uniform(math.log(low), math.log(high)))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.source, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.source, dtype=torch.float64)

    @property
    def batch(self) -> tuple[int, ...]:
        return () if self.rows is None else (self.rows,)

    def state(self, *shape: int) -> Tensor:
        return self.normal(*self.batch, *shape)

    def inputs(self, *shape: int) -> Tensor:
        """For all rows alike, or for each its own."""
        return self.normal(self.length, *(self.batch if self.often(0.5) else ()), *shape)

    def weight(self, width: int, gain: float) -> Tensor:
        return gain * self.normal(width, width) / math.sqrt(width)


@dataclass(frozen=True)
class Model:
    """A loop as a family draws it.

    Attributes:
        dtypes: those in which it makes sense
        elementwise: whether every number of the state goes its own way
        read_out: only the last state is used, divided by its size
    """

    step: Callable[[Any, Any, tuple[Tensor, ...]], Any]
    z0: Any
    xs: Any
    parameters: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...] = FULL
    elementwise: bool = False
    read_out: bool = False


# Networks.


def dense(draw: Draw) -> Model:
    act = draw.pick((torch.tanh, torch.relu, torch.sin))
    w = draw.weight(draw.width, draw.pick((0.3, 0.7, 0.9, 1.2, 2.0)))
    step = lambda z, x, p: act(z @ p[0] + x + p[1])  # noqa: E731
    return Model(step, draw.state(draw.width), draw.inputs(draw.width), (w, 0.1 * draw.normal(draw.width)), ANY)


def residual(draw: Draw) -> Model:
    h, decay = draw.decades(1e-3, 0.5), draw.pick((0.0, 0.5, 1.0))
    w = draw.weight(draw.width, 1.0)

    def step(z, x, p):
        return z + h * (torch.tanh(z @ p[0] + x) - decay * z)

    return Model(step, draw.state(draw.width), draw.inputs(draw.width), (w,), FULL)


def gru(draw: Draw) -> Model:
    width, gain = draw.width, draw.pick((0.5, 1.0, 2.0))
    ws = tuple(draw.weight(width, gain) for _ in range(3))

    def step(h, x, p):
        update, reset = torch.sigmoid(h @ p[0] + x), torch.sigmoid(h @ p[1] - x)
        return update * h + (1 - update) * torch.tanh((reset * h) @ p[2] + x)

    return Model(step, draw.state(width), draw.inputs(width), ws, ANY)


def lstm(draw: Draw) -> Model:
    width, gain = max(1, draw.width // 2), draw.pick((0.5, 1.0, 2.0))
    ws = tuple(draw.weight(width, gain) for _ in range(4))

    def step(z, x, p):
        h, c = z
        i, f, o = (torch.sigmoid(h @ w + x) for w in p[:3])
        c = f * c + i * torch.tanh(h @ p[3] + x)
        return o * torch.tanh(c), c

    return Model(step, (draw.state(width), draw.state(width)), draw.inputs(width), ws)


def normalised(draw: Draw) -> Model:
    width, kind = max(2, draw.width if draw.often(0.7) else 2), draw.pick(("layer norm", "softmax", "rms"))
    w = draw.weight(width, draw.pick((0.5, 1.0, 2.0)))
    mix = draw.pick((0.1, 0.5, 1.0))

    def step(z, x, p):
        y = z @ p[0] + x
        if kind == "layer norm":
            y = F.layer_norm(y, (width,))
        elif kind == "softmax":
            y = torch.softmax(y, -1)
        else:
            y = y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        return (1 - mix) * z + mix * y

    return Model(step, draw.state(width), draw.inputs(width), (w,))


def attention(draw: Draw) -> Model:
    width, slots, mix = draw.width, 6, draw.pick((0.1, 0.5, 0.9))
    keys, values = 2 * draw.normal(width, slots), draw.normal(slots, width)

    def step(z, x, p):
        return (1 - mix) * z + mix * torch.softmax(z @ p[0] / math.sqrt(width), -1) @ p[1] + 0.1 * x

    return Model(step, draw.state(width), draw.inputs(width), (keys, values))


def resets(draw: Draw) -> Model:
    """Episodes one after the other: where the mask is set, a row begins anew."""
    width = draw.width
    mask = (draw.uniform(draw.length, *draw.batch, 1) < draw.decades(1e-3, 0.3)).double()
    w = draw.weight(width, draw.pick((0.7, 1.0, 1.5)))

    def step(z, x, p):
        return torch.where(x[0] > 0.5, p[1], torch.tanh(z @ p[0] + x[1]))

    return Model(step, draw.state(width), (mask, draw.inputs(width)), (w, draw.normal(width)))


def fading(draw: Draw) -> Model:
    """No bias, a gain below 1: the signal dies out, and is normalised at the end."""
    width, gain = max(2, draw.width), draw.between(0.5, 0.95)
    # Deep enough that little is left, and not so deep that float32 holds nothing of it.
    draw.length = min(draw.longest, int(draw.between(10, 60) / -math.log(gain)))
    act = draw.pick((torch.tanh, torch.relu))
    w = draw.normal(draw.length, width, width) * gain / math.sqrt(width if act is torch.tanh else width / 2)
    return Model(lambda z, x, p: act(p[0] * z @ x), draw.state(width), w, (1 + 0 * draw.normal(1),), read_out=True)


# Of single numbers.


def elementwise(draw: Draw) -> Model:
    kind, a = draw.pick(("tanh", "gate", "cos")), draw.between(0.2, 1.5)

    def step(z, x, p):
        if kind == "tanh":
            return torch.tanh(p[0] * z + x)
        if kind == "gate":
            return torch.sigmoid(x) * z + (1 - torch.sigmoid(x)) * torch.sin(p[0] * z)
        return 0.7 * torch.cos(p[0] * z) + 0.1 * x

    return Model(step, draw.state(draw.width), draw.inputs(draw.width), (a * draw.normal(draw.width),), ANY, True)


def maps(draw: Draw) -> Model:
    width, p = min(draw.width, 4), 0.3 * draw.uniform(1)
    if draw.often(0.5):
        r = draw.pick((2.5, 3.2, 3.5, 3.7, 3.99)) - 0.01 * p
        return Model(lambda z, x, p: p[0] * z * (1 - z), draw.state(width).sigmoid(), None, (r,), FULL, True)
    k = draw.pick((0.3, 0.8, 1.5))

    def step(z, x, p):
        return z + p[0] - k / (2 * math.pi) * torch.sin(2 * math.pi * z) + 0.01 * x

    return Model(step, draw.state(width), draw.inputs(width), (p,), FULL, True)


def square_root(draw: Draw) -> Model:
    """Newton's iteration for the root of something that drifts, or of one number."""
    width = min(draw.width, 8)
    if draw.often(0.5):
        xs = draw.inputs(width).mul(0.1).exp()
        return Model(
            lambda z, x, p: 0.5 * (z + p[0] * x / z), draw.state(width).exp(), xs, (draw.uniform(width) + 0.5,)
        )
    a = draw.normal(width).mul(2).exp()
    return Model(lambda z, x, p: 0.5 * (z + p[0] / z), draw.state(width).exp(), None, (a,), FULL, True)


def quantised(draw: Draw) -> Model:
    """The derivative of a step by its state is zero, whatever the step does."""
    width, kind, size = min(draw.width, 8), draw.pick(("detached", "rounded")), draw.decades(1e-7, 0.1)

    def step(z, x, p):
        if kind == "detached":
            return z.detach() + size * p[0] * x
        return torch.round(256 * (0.9 * z + p[0] * x)) / 256

    return Model(step, draw.state(width), draw.inputs(width).abs(), (1 + 0 * draw.normal(1),), FULL, True)


# Of physics and engineering.


def _pendulum(z, x, p):
    angle, speed = z
    return speed, -torch.sin(angle) - p[0] * speed + x


def _duffing(z, x, p):
    place, speed = z
    return speed, place - place**3 - p[0] * speed + x


def _van_der_pol(z, x, p):
    place, speed = z
    return speed, 4 * p[0] * (1 - place**2) * speed - place + x


def _lorenz(z, x, p):
    a, b, c = z
    return 10 * (b - a), a * (50 * p[0] - c) - b, a * b - 8 / 3 * c


def _predators(z, x, p):
    prey, hunters = z
    return prey * (1 - 0.1 * prey - p[0] * hunters), hunters * (p[0] * prey - 0.5)


def ode(draw: Draw) -> Model:
    """Runge and Kutta's steps of an equation of motion, driven by xs where it has a drive."""
    name, rhs = draw.pick(
        (
            ("pendulum", _pendulum),
            ("duffing", _duffing),
            ("pol", _van_der_pol),
            ("lorenz", _lorenz),
            ("prey", _predators),
        )
    )
    h, damping = draw.decades(2e-3, 0.1), draw.decades(0.05, 1.0)
    if name == "lorenz":
        h, damping = min(h, 0.03), draw.pick((0.2, 0.56))  # a fixed point, or chaos
    time = h * torch.arange(draw.length, dtype=torch.float64)
    force = draw.pick((0.0, 0.3)) * torch.cos(draw.between(0.5, 1.5) * time).unsqueeze(-1)

    def step(z, x, p):
        z = z.unbind(-1)
        at = lambda k, part: rhs([a + part * h * b for a, b in zip(z, k, strict=True)], x[0], p)  # noqa: E731
        one = rhs(z, x[0], p)
        two = at(one, 0.5)
        three = at(two, 0.5)
        four = at(three, 1.0)
        slopes = zip(z, one, two, three, four, strict=True)
        return torch.stack([a + h / 6 * (k + 2 * l + 2 * m + n) for a, k, l, m, n in slopes], -1)

    z0 = draw.state(3 if name == "lorenz" else 2)
    return Model(step, z0.abs() + 0.5 if name == "prey" else z0, force, (torch.tensor(damping).double(),))


def _transition(draw: Draw, n: int) -> Tensor:
    a = torch.eye(n, dtype=torch.float64) + 0.1 * draw.normal(n, n)
    return a * draw.between(0.8, 1.0) / torch.linalg.eigvals(a).abs().max()


def kalman(draw: Draw) -> Model:
    n, k, noise = min(max(draw.width, 1), 5), 1, draw.decades(1e-3, 1.0)
    c, q = draw.normal(k, n), 0.01 * torch.eye(n, dtype=torch.float64)

    def step(z, y, p):
        m, cov = z
        a, c, q = p
        m, cov = m @ a.mT, a @ cov @ a.mT + q
        s = c @ cov @ c.mT + noise * torch.eye(k, dtype=c.dtype, device=c.device)
        gain = torch.linalg.solve(s, c @ cov).mT
        m = m + (gain @ (y - m @ c.mT).unsqueeze(-1)).squeeze(-1)
        return m, cov - gain @ c @ cov

    cov = torch.eye(n, dtype=torch.float64).expand(*draw.batch, n, n)
    return Model(step, (draw.state(n), cov), draw.inputs(k), (_transition(draw, n), c, q))


def covariance(draw: Draw) -> Model:
    """Riccati's recursion in Joseph's form."""
    n = min(max(draw.width, 2), 5)
    eye, root = torch.eye(n, dtype=torch.float64), 0.3 * draw.state(n, n)

    def step(cov, x, p):
        a, c, q = p
        cov = a @ cov @ a.mT + q
        gain = cov @ c.mT / (c @ cov @ c.mT + 0.1)
        rest = torch.eye(n, dtype=c.dtype, device=c.device) - gain @ c
        return rest @ cov @ rest.mT + 0.1 * gain @ gain.mT

    return Model(step, eye + root @ root.mT, None, (_transition(draw, n), draw.normal(1, n), 0.02 * eye))


def momentum(draw: Draw) -> Model:
    """Descent with momentum on a logistic regression."""
    width, keep, rate = min(draw.width, 12), draw.pick((0.5, 0.9, 0.99)), draw.decades(1e-2, 1.0)
    data, labels = draw.normal(12, width), draw.uniform(12).round()

    def step(z, x, p):
        w, v = z
        slope = (torch.sigmoid(w @ p[0].mT) - p[1]) @ p[0] / 12 + 0.02 * w + 0.1 * x
        v = keep * v - rate * slope
        return w + v, v

    return Model(step, (draw.state(width), 0 * draw.state(width)), draw.inputs(width), (data, labels))


def langevin(draw: Draw) -> Model:
    h, heat = draw.decades(1e-3, 0.1), draw.decades(1e-3, 1.0)
    noise = math.sqrt(2 * h * heat)
    wells = lambda z, x, p: z - h * (p[0] * z**3 - z + 0.2 * z.roll(1, -1)) + noise * x  # noqa: E731
    return Model(wells, draw.state(draw.width), draw.inputs(draw.width), (1 + 0.2 * draw.uniform(draw.width),))


def filters(draw: Draw) -> Model:
    """A recursive filter, as a companion matrix: far from normal."""
    poly = torch.ones(1, dtype=torch.float64)
    for _ in range(draw.pick((1, 2, 3, 4))):
        radius, angle = draw.between(0.8, 0.998), draw.decades(0.02, 2.0)
        pair = torch.tensor([1, -2 * radius * math.cos(angle), radius**2]).double()
        poly = F.conv1d(poly.view(1, 1, -1), pair.flip(0).view(1, 1, -1), padding=2).flatten()
    n = len(poly) - 1
    a = torch.cat([-poly[1:].unsqueeze(0), torch.eye(n, dtype=torch.float64)[:-1]])
    b = torch.eye(n, dtype=torch.float64)[0]
    dtypes = FULL if n <= 4 else (torch.float64,)
    return Model(lambda z, x, p: z @ p[0].mT + p[1] * x, draw.state(n), draw.inputs(1), (a, b), dtypes)


def companion(draw: Draw) -> Model:
    """A large number beside small ones in the same tensor: a pressure in Pascal, say, that they feel a little."""
    width, large, keep = max(2, min(draw.width, 16)), draw.decades(1e4, 1e7), draw.pick((0.0, 0.9, 1.0))
    w, norm = draw.weight(width, draw.pick((0.7, 1.0, 1.5))), draw.often(0.5)
    felt = draw.pick((0.0, 1e-7, 1e-2))  # how much of the small ones the large one feels

    def step(z, x, p):
        small, big = z[..., :-1], z[..., -1:]
        small = F.layer_norm(small, (width,)) if norm else small
        small = torch.tanh(small @ p[0] + x + 0.1 * big / large)
        return torch.cat([small, keep * big + (1 - keep) * large * p[1] + felt * large * small[..., :1]], -1)

    z0 = torch.cat([draw.state(width), large * (1 + 0.1 * draw.state(1))], -1)
    return Model(step, z0, draw.inputs(width), (w, 1 + 0 * draw.normal(1)))


def clock(draw: Draw) -> Model:
    """The time of day in the state: seconds since 1970, which drive the rest."""
    width = min(draw.width, 8)
    w = draw.weight(width, draw.pick((0.5, 0.9)))

    def step(z, x, p):
        small, time = z[..., :-1], z[..., -1:]
        return torch.cat([torch.tanh(small @ p[0] + torch.sin(1e-3 * time)), time + 60 + x], -1)

    z0 = torch.cat([draw.state(width), 1.7e9 + 1e6 * draw.state(1)], -1)
    return Model(step, z0, draw.inputs(1), (w,), (torch.float64,))


FAMILIES: tuple[Callable[[Draw], Model], ...] = (
    *(dense, residual, gru, lstm, normalised, attention, resets, fading),
    *(elementwise, maps, square_root, quantised),
    *(ode, ode, ode, kalman, covariance, momentum, langevin, filters, companion, clock),
)
