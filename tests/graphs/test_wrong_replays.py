"""A recording is never replayed for a step that has changed: pairs that differ in one thing, one after the other.

``benchmarks/wrong_replays.py`` holds hundreds of them against processes of their own, on a GPU; here are a few, against solves that are
not recorded.
"""

import pytest
import torch

import deeppcr
from deeppcr.graphs import record, replay
from deeppcr.graphs.cache import captured_solves
from deeppcr.sequence import trace
from deeppcr.sequence.fingerprint import fingerprint
from deeppcr.ways import given as ways
from kernel_support import thorough
from scripts import script
from tape import Tape

program = script("benchmarks", "wrong_replays")
BY_KERNELS = ways._by_kernels


@pytest.fixture
def hunt(program, device, monkeypatch):
    """What becomes of pairs of solves, one round."""

    def run(tasks):
        with monkeypatch.context() as patch:
            patch.delitem(record.RECORDERS, device.type, raising=False)
            expected = [(pair.attempt(False), pair.attempt(True)) for pair in (task.make() for task in tasks)]
        if device.type == "cpu":
            monkeypatch.setitem(record.RECORDERS, "cpu", Tape)
        return program.hunt(tasks, expected.__getitem__, 1)

    if device.type != "cpu":  # where steps have kernels, which come first, nothing would be recorded
        monkeypatch.setattr(ways, "_by_kernels", lambda *_: None)
    deeppcr.clear_caches()
    yield run
    deeppcr.clear_caches()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 8))])
def test_no_pair_is_mixed_up(seed, program, hunt, device):
    every = hunt(program.draw_tasks(4, seed, device.type, samples=False))
    assert [(seen.task.what, seen.where, seen.wrong) for seen in every if seen.wrong] == []
    assert sum(seen.replays for seen in every) > sum(seen.solves for seen in every) / 2


@pytest.mark.parametrize("seed", range(4))
def test_no_pair_is_mixed_up_by_kernels(seed, program, hunt, device, monkeypatch):
    if device.type == "cpu":
        pytest.skip("kernels of all these steps take minutes to interpret")
    tried = [0]

    def by_kernels(*arguments, way=BY_KERNELS):
        found = way(*arguments)
        tried[0] += isinstance(found, deeppcr.Solution)
        return found

    monkeypatch.setattr(ways, "_by_kernels", by_kernels)
    every = hunt(program.draw_tasks(4, seed, device.type, samples=False))
    assert [(seen.task.what, seen.where, seen.wrong) for seen in every if seen.wrong] == []
    assert tried[0] > 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 8))])
def test_no_pair_is_mixed_up_by_the_loop_in_a_graph(seed, program, hunt, device, monkeypatch):
    solve = deeppcr.solve

    def looped(*loop, solver=None):
        by = "graph" if device.type in record.RECORDERS else "python"
        return solve(*loop, solver=solver or deeppcr.Loop(by=by))

    monkeypatch.setattr(deeppcr, "solve", looped)
    every = hunt(program.draw_tasks(4, seed, device.type, samples=False))
    assert [(seen.task.what, seen.where, seen.wrong) for seen in every if seen.wrong] == []
    assert len(captured_solves) > 0


@pytest.mark.parametrize(
    ("what", "number", "looks"),
    [("number", 1, False), ("tensor", 3, True), *thorough(("number", 1, True), ("tensor", 3, False))],
)  # none with gradients, which would tell too
def test_a_stale_replay_is_caught_by_its_first_state_and_would_be_seen(
    what, number, looks, program, hunt, device, monkeypatch
):
    """With a trace that is blind to it: the comparison of the first state still tells. Without that it is wrong, and the hunt sees it."""
    encode = trace.Trace._encode

    def blind(self, value):
        found = encode(self, value)
        if what == "number" and isinstance(value, float):
            return None
        outside = isinstance(value, torch.Tensor) and isinstance(found, tuple) and isinstance(found[0], int)
        return found[1:] if what == "tensor" and outside else found

    monkeypatch.setattr(trace.Trace, "_encode", blind)
    if not looks:
        monkeypatch.setattr(replay.Recording, "_begins_alike", lambda self, states: states[0, :, 0] == states[0, :, 0])
    (seen,) = hunt([program.Task(number, what, False, device.type)])
    assert any("replayed: states differ" in problem for problem in seen.wrong) is not looks
    assert not looks or not seen.wrong


def test_a_pair_that_proves_nothing_is_seen(program, hunt, device):
    class Equal(program.Task):
        def make(self):
            pair = super().make()
            first = pair.attempt
            pair.attempt = lambda second: first(False)
            return pair

    (seen,) = hunt([Equal(0, "number", False, device.type)])
    assert [problem for problem in seen.wrong if "proves nothing" in problem]


def test_every_difference_can_be_made(program, device):
    """And is one: the two functions of each pair differ in what they do to the same states."""
    changes = program.replay_pairs.CHANGES
    for name, change in changes.items():
        draw = program.replay_pairs.Draw(0, device.type)
        make, use = change(draw)
        z = draw.normal(3, program.replay_pairs.WIDTH)
        one, other, again = (use(make(second), z).clone() for second in (False, True, False))
        assert torch.equal(one, again), name
        assert (one - other).abs().max() > 0.05, name


def test_a_fingerprint_tells_every_pair_apart(program):
    """By which samplers know a denoiser; tensors that are written to in place are read when a graph is replayed."""
    pairs, same = program.replay_pairs, []
    for what, draw in pairs.CHANGES.items():
        for where, holder in pairs.HOLDERS.items():
            change, use = draw(pairs.Draw(1, "cpu"))
            hold = holder(lambda held, z, t, use=use: use(held, z) + t)
            first = fingerprint(hold(change(False)))
            if fingerprint(hold(change(True))) == first:
                same.append((what, where))
    assert [pair for pair in same if "in place" not in pair[0]] == []
