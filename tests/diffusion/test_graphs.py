"""What is kept between runs, and when it is let go; what is replayed stands in for CUDA graphs."""

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr.diffusion import DDIM, GaussianPrior, Noise, Schedule, Window, sample
from deeppcr.diffusion.window import graphs
from deeppcr.diffusion.window import prepared as window
from deeppcr.graphs.cache import prepared_samplers
from deeppcr.sequence.fingerprint import Same
from diffusion.recorded import Recorded

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
        kept = weakref.ref(*prepared_samplers.values())
        weight = weakref.ref(net.inner.weight)
        del net
        assert weight() is None
        assert kept() is None
        assert len(prepared_samplers) == 0
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
    assert len(prepared_samplers) == 0


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
    assert len(prepared_samplers) == 4


def test_clear_caches_lets_go_of_everything():
    solver, net = Window(), Net()
    run(net, solver)
    assert len(prepared_samplers) == 1
    deeppcr.clear_caches()
    assert len(prepared_samplers) == 0
    assert "CUDA graphs" not in run(net, solver)


def test_a_capture_that_failed_is_tried_again_for_other_shapes_and_parameters():
    solver, net = Window(), Net()
    run(net, solver)
    run(net, solver)
    prepared_samplers.values()[0].replayed.refusal = "a host waits"
    assert "no CUDA graphs: a host waits" in run(net, solver)
    run(net, solver, samples=3)
    notes = run(net, solver, samples=3)
    assert "CUDA graphs" in notes
    net.inner.weight = nn.Parameter(net.inner.weight.detach().clone())
    run(net, solver)
    notes = run(net, solver)
    assert "CUDA graphs" in notes


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


def test_equal_windows_share_what_is_kept_and_others_do_not():
    """Settings hold no cache: what is kept is known by their values."""
    net, solver = Net(), Window(size=3)
    run(net, solver)
    for same in (Window(size=3), copy.deepcopy(solver), pickle.loads(pickle.dumps(solver))):
        assert same == solver
        assert "CUDA graphs" in run(net, same)
    changes = {"tolerance": 1e-4, "size": 4, "freeze": 0.5, "accelerate": False, "max_iterations": 7, "tf32": None}
    for name, value in changes.items():
        assert "CUDA graphs" not in run(net, replace(solver, **{name: value})), name
    assert "CUDA graphs" in run(net, solver)


def test_so_many_kinds_of_runs_are_kept(monkeypatch):
    monkeypatch.setattr(prepared_samplers, "most", 2)
    net, solver = Net(), Window()
    for samples in (1, 2, 3):
        run(net, solver, samples=samples)
    assert len(prepared_samplers) == 2
    assert "CUDA graphs" not in run(net, solver, samples=1)
    assert "CUDA graphs" in run(net, solver, samples=3)


def test_two_runs_at_once_share_nothing(monkeypatch):
    """While a run is on its way, another one of its kind has buffers of its own."""
    solver, net, seen, loop = Window(), Net(), [], window.Prepared.loop

    def look_and_loop(*arguments):
        seen.append(len(prepared_samplers))
        loop(*arguments)

    monkeypatch.setattr(window.Prepared, "loop", look_and_loop)
    for _ in range(2):
        run(net, solver)
        assert len(prepared_samplers) == 1
    assert seen == [0, 0]


def test_a_run_that_fails_leaves_nothing_to_be_replayed(monkeypatch):
    solver, net = Window(), Net()
    assert "CUDA graphs" not in run(net, solver)
    monkeypatch.setattr(window.Prepared, "iterate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(net, solver)
    assert len(prepared_samplers) == 0


class TestReplayed:
    """What is called is called once, on its stream, and captured after that; then the graph is all that runs."""

    @pytest.fixture
    def made(self, monkeypatch):
        self.scratch = SimpleNamespace(
            call=lambda call: call(), record=lambda call: lambda: self.done.append("replayed"), turn=nullcontext
        )
        monkeypatch.setattr(graphs, "scratch_of", lambda device: self.scratch)
        self.done = []
        return graphs.Replayed(torch.device("cuda"))

    def work(self, *key):
        self.done.append(key)

    def test_each_call_by_its_name_and_arguments(self, made):
        for key in (1, 2, 1, 1):
            made(self.work, key)
        assert self.done == [(1,), (2,), "replayed", "replayed"]

    def test_what_cannot_be_captured_is_called(self, made, monkeypatch):
        def refuse(call):
            raise RuntimeError("a host waits\nand more")

        made(self.work, 1)
        self.scratch.record = refuse
        for _ in range(2):
            made(self.work, 2)
        assert made.refusal == "a host waits"
        made(self.work, 1)
        assert self.done == [(1,), (2,), (2,), "replayed"]

    def test_room_is_made_where_memory_runs_out(self, made, monkeypatch):
        """Once; where that does not help, the caller is told."""
        freed, full = [], [True, False, True, True]

        def record(call):
            if full.pop(0):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return lambda: self.done.append("replayed")

        self.scratch.record = record
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(len(prepared_samplers)))
        prepared_samplers.put("something", SimpleNamespace(bytes=1))
        made(self.work, 1)
        made(self.work, 1)
        assert self.done == [(1,), "replayed"]
        assert freed == [0]
        with pytest.raises(torch.OutOfMemoryError):
            made(self.work, 2)
        assert made.refusal is None

    def test_an_error_of_the_network_is_its_own(self, made):
        def fail():
            raise RuntimeError("of the network")

        with pytest.raises(RuntimeError, match="of the network"):
            made(fail)
        assert made.refusal is None
