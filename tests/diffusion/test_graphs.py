"""What is kept between runs, and when it is let go; what is replayed stands in for CUDA graphs."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr.diffusion import DDIM, GaussianPrior, Noise, Schedule, Window, sample
from deeppcr.diffusion.window import graphs, window
from deeppcr.sequence.fingerprint import Same
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
    run(Net(), Window())  # what is imported at first use leaves circles that hold their callers
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


def labelled(z, t, labels):
    return 0.1 * z + 0.01 * labels.to(z).unsqueeze(-1)


PRIOR = GaussianPrior()
OTHERS = {
    "schedule": {"schedule": Schedule.cosine(12)},
    "step": {"step": DDIM()},
    "jacobian": {"jacobian": GaussianPrior(0.5)},
    "guidance": {"guidance": 3.0},
    "classes of another dtype": {"classes": torch.tensor([0.5, 2.5])},
    "noise of another dtype": {"dtype": torch.float64},
    "a network in another dtype": {"dtype": torch.bfloat16},
    "more samples": {"classes": torch.tensor([1, 2, 3])},
    "samples of another shape": {"shape": (5,)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_of_run_replays_nothing_of_this_one(name):
    usual = {
        "schedule": SCHEDULE,
        "step": DDIM(eta=1.0),
        "jacobian": PRIOR,
        "guidance": 2.0,
        "classes": torch.tensor([1, 2]),
    }

    def found(solver, shape=(3,), dtype=torch.float32, **changes):
        given = {**usual, **changes}
        schedule, jacobian = given.pop("schedule"), given.pop("jacobian")
        noise = Noise.draw((len(given["classes"]), *shape), 12, generator=torch.Generator().manual_seed(0), dtype=dtype)
        given |= {"jacobian": jacobian} if isinstance(solver, Window) else {}
        with torch.no_grad():
            return sample(labelled, schedule, noise, unconditional=0, solver=solver, **given)

    solver = Window()
    for seen in (False, True):
        assert ("CUDA graphs" in found(solver).plan.notes) == seen
    other, loop = found(solver, **OTHERS[name]), found(deeppcr.Loop(), **OTHERS[name])
    assert "CUDA graphs" not in other.plan.notes
    assert torch.allclose(other.final, loop.final, rtol=0.02, atol=1e-3)
    assert "CUDA graphs" in found(solver).plan.notes


def test_what_is_gone_is_equal_to_nothing(monkeypatch):
    """Not even to what lay there before and is gone, too."""
    monkeypatch.setattr(Same, "__hash__", lambda self: 1)
    net, other = Net(), Net()
    same, different = Same(net), Same(other)
    assert same == Same(net)
    assert same != different
    assert same != net
    del net, other
    assert same != different


def test_the_cache_is_bounded_and_lends_each_entry_once():
    cache = graphs.Cache(most=2)
    for key in "abc":
        cache.put(((key,),), key.upper())
    assert cache.take((("a",),)) is None
    assert cache.take((("b",),)) == "B"
    assert cache.take((("b",),)) is None

    class Owner:
        pass

    owner = Owner()
    keys = [((id(owner),), number) for number in range(2)]
    for key in keys:
        cache.put(key, 1)
        cache.forget_with(owner)
    assert weakref.getweakrefcount(owner) == 1  # not one for every key
    del owner
    assert not cache._watched  # who lies there next is watched anew
    assert all(cache.take(key) is None for key in keys)
    solver = Window(size=3)
    for copied in (copy.deepcopy(solver), pickle.loads(pickle.dumps(solver))):
        assert copied == solver
        assert len(copied._prepared) == 0
