"""What is kept between runs, and when it is let go; what is replayed stands in for CUDA graphs."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr.diffusion import DDIM, Schedule, Window, graphs, sample, window
from diffusion.test_window import Recorded

SCHEDULE = Schedule.linear(12)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, z, t):
        return 0.1 * self.inner(z)


@pytest.fixture(autouse=True)
def replayed(monkeypatch):
    monkeypatch.setattr(window, "Replayed", Recorded)
    monkeypatch.setattr(Window, "no_graphs", lambda self, problem: None)


def run(net, solver, samples=2):
    with torch.no_grad():
        return sample(net, SCHEDULE, torch.ones(samples, 3), step=DDIM(), solver=solver).plan.notes


def test_what_is_kept_goes_with_the_network():
    """At once, with no help of a collector of garbage: it may be gigabytes."""
    solver = Window()
    gc.collect()
    gc.disable()
    try:
        net = Net()
        assert "CUDA graphs" not in run(net, solver)
        assert "CUDA graphs" in run(net, solver)
        kept = weakref.ref(next(iter(solver._prepared._kept.values())))
        weight = weakref.ref(net.inner.weight)
        del net
        assert weight() is None
        assert kept() is None
        assert len(solver._prepared) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["hook", "method", "attribute"])
def test_a_network_that_is_held_by_what_it_holds_goes_too(how):
    solver, net = Window(), Net()
    if how == "hook":
        net.inner.register_forward_hook(lambda module, args, found, net=net: found)
    elif how == "method":
        net.register_forward_pre_hook(Watcher(net).look)
    else:
        net.watcher = Watcher(net)
    for seen in (False, True):
        assert ("CUDA graphs" in run(net, solver)) == seen
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    assert len(solver._prepared) == 0


class Watcher:
    def __init__(self, net):
        self.net = net

    def look(self, module, args):
        return args


class Slotted:
    """Cannot be watched."""

    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, z, t):
        return self.scale * z


def test_what_cannot_be_watched_leaves_its_identity_to_nobody():
    solver = Window()
    owners = set()
    for number in range(4):
        net = Slotted(0.1 * number)
        owners.add(id(net))
        assert "CUDA graphs" not in run(net, solver)
        assert "CUDA graphs" in run(net, solver)
    assert len(owners) == 4
    assert len(solver._prepared) == 4


def test_clear_graphs_lets_go_of_everything():
    solver, net = Window(), Net()
    run(net, solver)
    assert len(solver._prepared) == 1
    deeppcr.clear_graphs()
    assert len(solver._prepared) == 0
    assert "CUDA graphs" not in run(net, solver)


def test_a_capture_that_failed_is_tried_again_for_other_shapes_and_parameters():
    solver, net = Window(), Net()
    run(net, solver)
    run(net, solver)
    next(iter(solver._prepared._kept.values())).replayed.refusal = "a host waits"
    assert "no CUDA graphs: a host waits" in run(net, solver)
    run(net, solver, samples=3)
    notes = run(net, solver, samples=3)
    assert "CUDA graphs" in notes
    net.inner.weight = nn.Parameter(net.inner.weight.detach().clone())
    run(net, solver)
    notes = run(net, solver)
    assert "CUDA graphs" in notes


def test_an_owner_that_ends_while_the_cache_is_busy_does_not_stop_it():
    """The last to hold it may be what the cache throws away."""

    class Owner:
        pass

    cache, owner = graphs.Cache(most=1), Owner()
    cache.forget_with(owner)
    cache.put(((id(owner),),), owner)
    del owner

    def push_out():
        cache.put(((0,),), None)

    thread = threading.Thread(target=push_out, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert len(cache) == 1


def test_what_is_gone_is_equal_to_nothing(monkeypatch):
    """Not even to what lay there before and is gone, too."""
    monkeypatch.setattr(graphs, "id", lambda value: 1, raising=False)
    net, other = Net(), Net()
    same, different = graphs.Same(net), graphs.Same(other)
    assert same == graphs.Same(net)
    assert same != different
    assert same != net
    del net, other
    assert same != different
