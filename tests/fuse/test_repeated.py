"""Recurrent modules whose calls repeat: replayed, on the CPU by a stand-in for CUDA graphs that does again what was recorded."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deeppcr
from deeppcr import Newton, Result
from deeppcr import nn as ours
from deeppcr.graphs import function
from deeppcr.graphs.cache import recorded_layers
from deeppcr.graphs.record import Scratch
from deeppcr.nn import repeated, torch_like
from kernel_support import error
from recurrent_problems import leaves_of

pytestmark = [pytest.mark.usefixtures("kernels", "graphs"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


class Again:
    """As ``Scratch``, without a GPU: what was recorded is done again. It is told how often."""

    recorded = replayed = 0
    fails = False

    def __init__(self, device):
        self.device = device

    def call(self, function):
        function()

    def record(self, function):
        Again.recorded += 1
        if Again.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        function()

        def replay():
            Again.replayed += 1
            function()

        return replay


class Counted(Scratch):
    """The same on a GPU."""

    def record(self, function):
        Again.recorded += 1
        if Again.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        replay = super().record(function)

        def counted():
            Again.replayed += 1
            replay()

        return counted


@pytest.fixture
def graphs(device, monkeypatch):
    monkeypatch.setitem(function.SCRATCH, device.type, Again if device.type == "cpu" else Counted)
    for name, value in (("recorded", 0), ("replayed", 0), ("fails", False)):
        monkeypatch.setattr(Again, name, value)
    monkeypatch.setattr(torch_like, "is_faster_in_parallel", lambda *sizes, **options: (True, ""))


#: Calls after which the next one is replayed: the first is without kernels, and the first that is looked at the third.
_BEFORE = 6


def made(kind, hidden, device, dtype=torch.float64, **options):
    """A module of ours, and the loop: its twin of PyTorch, or itself one step after the other."""
    module = getattr(ours, kind)(2, hidden, device=device, dtype=dtype, mode="parallel", **options)
    if not hasattr(nn, kind):
        return module, lambda *given: module(*given, mode="sequential")
    plain = getattr(nn, kind)(2, hidden, device=device, dtype=dtype, **options)
    plain._parameters = module._parameters
    plain._flat_weights = [getattr(plain, name) for name in plain._flat_weights_names]
    return module, plain


def new_input(device, *, steps=33, rows=2, dtype=torch.float64, grad=False):
    return torch.randn(steps, rows, 2, dtype=dtype, device=device, requires_grad=grad)


def warmed(module, x, *given, **options):
    """So often that the next call is replayed."""
    for _ in range(_BEFORE):
        module(x, *given, **options)
    assert len(recorded_layers) == 1
    return module


def is_replayed(call):
    """What a call returns, and whether it was replayed."""
    before = Again.replayed
    found = call()
    return found, Again.replayed > before


def test_quick(device):
    module, plain = made("GRU", 3, device)
    for n in range(12):
        x = new_input(device, grad=True)
        before = Again.replayed
        y, h = module(x)
        print(n, Again.replayed - before, module.solutions[0].plan.notes, module.solutions[0].iterations, module.solutions[0].result)
        y2, h2 = plain(x)
        g = torch.randn_like(y)
        a = torch.autograd.grad(y, [x, *module.parameters()], g)
        b = torch.autograd.grad(y2, [x, *module.parameters()], g)
        print(error(y, y2), error(h, h2), max(error(p, q) for p, q in zip(a, b)))
        del y,h
