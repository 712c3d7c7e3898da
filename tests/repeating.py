"""What tests of recurrent modules share whose calls repeat.

On a CPU, where there are neither kernels nor graphs, a loop stands for the kernels of a cell, and what was recorded is done again. On a GPU it is all as it is.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import deeppcr
from again import Counts, record_here
from deeppcr import Result
from deeppcr import nn as ours
from deeppcr.nn import diagonal, repeated, report, torch_like
from deeppcr.solution import Solution
from recurrent_problems import error, leaves_of

STEPS, ROWS, FEATURES, HIDDEN = 9, 2, 3, 2
#: So many calls, and the next one is replayed.
BEFORE = 6


class Looped:
    """Stands for a solve by kernels: its states are those of the loop, and it is settled as long as these are finite."""

    fused = promised = None
    due = False

    def __init__(self, states):
        notes = torch.stack([~leaf.detach().isfinite().all() for leaf in leaves_of(states)]).any().int().reshape(1)
        self.passes = SimpleNamespace(notes=SimpleNamespace(memory=notes.double(), unsettled=notes), done=3)

    def is_due(self):
        return Looped.due

    def judged(self, counts, memory):
        return None if any(counts) else SimpleNamespace(passes=3)


def looped(module, mode, weights, x, start, reset, passes):
    assert passes == 3
    cell, xs = module._cell(weights), module._cell_type.project(x, weights)
    states, z = [], module._nested(start)
    for at in range(len(xs)):
        if reset is not None:
            anew = reset[at].unsqueeze(-1)
            z = module._nested(tuple(torch.where(anew, torch.zeros_like(leaf), leaf) for leaf in leaves_of(z)))
        z = cell(z, xs[at])
        states.append(z)
    found = module._nested(tuple(torch.stack(leaves) for leaves in zip(*map(leaves_of, states), strict=True)))
    return found, Looped(found)


def with_one_to_spare(monkeypatch):
    """One more pass is recorded than sufficed: other numbers may need it."""
    passes_of = repeated._passes_of
    monkeypatch.setattr(
        repeated, "_passes_of", lambda passed: passes_of(passed) and tuple(n + 1 for n in passes_of(passed))
    )


def told_of(result, *notes):
    return replace(report.looped(STEPS, ROWS, torch.device("cpu"), *notes), result=result)


def ordinary(run):
    """A call as it goes on a GPU, by the loop: all but the first of a module are by kernels."""

    def ordinary_run(self, input, hx, reset, mode):
        before = self._passed
        found = run(self, input, hx, reset, "sequential")
        if mode != "sequential":
            result = Result.CONVERGED if leaves_of(found)[0].isfinite().all() else Result.NON_FINITE
            passed = (told_of(result, ""),) * len(self._all_weights)
            self.__dict__["_passed"] = passed if before else (STEPS, ROWS, input.device, "the first of its kind")
        return found

    return ordinary_run


@pytest.fixture
def graphs(device, monkeypatch):
    record_here(device, monkeypatch)
    deeppcr.clear_caches()
    if device.type == "cpu":
        for kind in (torch_like.TorchLike, diagonal.Diagonal):
            monkeypatch.setattr(kind, "_run", ordinary(kind._run))
        monkeypatch.setattr(repeated, "_launched", looped)
        monkeypatch.setattr(repeated, "_passes_of", lambda passed: (3,) * len(passed) if _went_well(passed) else None)
        monkeypatch.setattr(
            repeated, "_told", lambda about, found: (told_of(Result.CONVERGED, "replayed"),) * len(found)
        )
        monkeypatch.setattr(repeated, "FusedSolution", Solution)
        monkeypatch.setattr(Looped, "due", False)
    else:
        with_one_to_spare(monkeypatch)
        monkeypatch.setattr(repeated, "is_due", lambda solves: False)
        monkeypatch.setattr(torch_like, "is_faster_in_parallel", lambda *sizes, **options: (True, ""))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
    deeppcr.clear_caches()


def _went_well(passed):
    """Another thread's last call may have been replayed."""
    return isinstance(passed, tuple) and all(
        isinstance(each, Solution) and each.result is Result.CONVERGED for each in passed
    )


def made(kind="GRU", device="cpu", hidden=HIDDEN, **options):
    """A module, and itself one step after the other, which says what is right."""
    module = getattr(ours, kind)(FEATURES, hidden, device=device, dtype=torch.float64, mode="parallel", **options)
    return module, lambda *given, **how: module(*given, mode="sequential", **how)


def new_input(device, *shape, grad=False):
    return torch.randn(shape or (STEPS, ROWS, FEATURES), dtype=torch.float64, device=device, requires_grad=grad)


def called(module, *given, **how):
    """What a call returns, and whether it was replayed."""
    before = Counts.replayed
    found = module(*given, **how)
    return found, Counts.replayed > before


def warmed(module, *given, **how):
    """So often called that the next call is replayed."""
    for _ in range(BEFORE):
        module(*given, **how)
    return module


def assert_right(found, right, module, x, *others):
    found, right = leaves_of(found), leaves_of(right)
    assert all(error(one, other) < 1e-9 for one, other in zip(found, right, strict=True))
    seeds = [torch.randn_like(each) for each in right]
    wanted = [each for each in (x, *others, *module.parameters()) if each.requires_grad]
    of_found, of_right = (torch.autograd.grad(each, wanted, seeds) for each in (found, right))
    assert all(error(one, other) < 1e-9 for one, other in zip(of_found, of_right, strict=True))
