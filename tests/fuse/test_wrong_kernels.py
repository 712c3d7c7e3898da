"""Kernels are never run for a step that has changed: the pairs of ``benchmarks/wrong_replays.py``, which differ in one thing."""

import math

import pytest

import deeppcr
from deeppcr import Newton, runtime
from deeppcr.ways import fused
from kernel_support import thorough
from scripts import script

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


program = script("benchmarks", "wrong_replays")


@pytest.fixture
def hunt(program, device, monkeypatch):
    """What becomes of pairs of solves, one round; and how many solves were by kernels."""
    solve, by_kernels, differ = deeppcr.solve, [], program.replay_pairs.Pair.differ

    def whatever_the_iterations(pair, one, other):
        pair.slack = math.inf  # kernels take others
        return differ(pair, one, other)

    def in_short_chunks(*loop, solver):
        found = solve(*loop, solver=Newton(chunk=8) if solver == Newton() else solver)
        by_kernels.append(found.plan.evaluation.startswith("fused kernels"))
        return found

    def run(tasks):
        monkeypatch.setattr(deeppcr, "solve", in_short_chunks)
        monkeypatch.setattr(runtime, "KERNEL_DEVICES", set())
        expected = [(pair.attempt(False), pair.attempt(True)) for pair in (task.make() for task in tasks)]
        assert not any(by_kernels)
        monkeypatch.setattr(runtime, "KERNEL_DEVICES", {device.type})
        monkeypatch.setattr(program.replay_pairs.Pair, "differ", whatever_the_iterations)
        fused.forget_kernels()
        every = program.hunt(tasks, expected.__getitem__, 1)
        return [(seen.task.what, seen.where, seen.wrong) for seen in every if seen.wrong], sum(by_kernels)

    yield run
    fused.forget_kernels()


@pytest.mark.parametrize(("seed", "pairs"), [(5, 1), *thorough(*((seed, 4) for seed in range(20)))])
def test_no_pair_is_mixed_up(seed, pairs, program, hunt, device):
    wrong, by_kernels = hunt(program.draw_tasks(pairs, seed, device.type, samples=False))
    assert wrong == []
    assert by_kernels > 0
