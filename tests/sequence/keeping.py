"""Modules that keep something from one call to the next."""

from functools import partial
from itertools import count

import torch
from torch import nn

import deeppcr
from deeppcr import Newton

solve = partial(deeppcr.solve, solver=Newton())  # what Newton meets; the loop where a test says so
Z0 = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Caching(nn.Module):
    """Takes the mean of what it first sees for that of all it will see."""

    def __init__(self):
        super().__init__()
        self.linear, self.mean = nn.Linear(4, 4), None

    def forward(self, z):
        if self.mean is None:
            self.mean = z.detach().mean(0)
        return torch.tanh(self.linear(z)) + self.mean


class Seeing(nn.Module):
    """Keeps what it last saw, or all of it in what it is given; nothing depends on it."""

    def __init__(self, recent=None):
        super().__init__()
        self.linear, self.seen, self.recent = nn.Linear(4, 4), None, recent

    def forward(self, z):
        if isinstance(self.recent, set):
            self.recent.add(z.detach())
        elif self.recent is not None:
            self.recent.append(z.detach())
        else:
            self.seen = z.detach()
        return torch.tanh(self.linear(z))


class Later:
    """A step that from its third call on lets a module keep what it sees; and may fail then. (How far an iterator is, nobody sees.)"""

    def __init__(self, error=None):
        self.module, self.calls, self.error = Seeing(), count(1), error

    def __call__(self, z):
        call = next(self.calls)
        after = self.module(z) if call > 2 else torch.tanh(self.module.linear(z))
        if self.error is not None and call > 3:
            raise self.error
        return after


class SetByFirst(nn.Module):
    """Sets a parameter by the first state that it sees."""

    def __init__(self):
        super().__init__()
        self.linear, self.shift, self.done = nn.Linear(4, 4), nn.Parameter(torch.zeros(4)), False

    def forward(self, z):
        if not self.done:
            with torch.no_grad():
                self.shift.copy_(-z.mean(0))
            self.done = True
        return torch.tanh(self.linear(z + self.shift))


class KeepsItsWeight(nn.Module):
    """Finds what it multiplies with at its first call."""

    def __init__(self):
        super().__init__()
        self.raw, self.weight = nn.Parameter(0.3 * torch.randn(4, 4)), None

    def forward(self, z):
        if self.weight is None:
            self.weight = self.raw - self.raw.mT
        return torch.tanh(z @ self.weight) + 0.5 * z
