"""Recurrent modules whose calls repeat, by the kernels of their cells: what is recorded of a solve, and what is told of it."""

import pytest
import torch

from again import Counts, record_here
from deeppcr import FixedIterations, Newton, Result
from deeppcr import nn as ours
from deeppcr.nn import repeated, torch_like
from kernel_support import error, thorough
from repeating import with_one_to_spare

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def recording(device, monkeypatch):
    record_here(device, monkeypatch)
    monkeypatch.setattr(repeated, "_OFTEN", 1)
    monkeypatch.setattr(repeated, "is_due", lambda solves: False)


def replays(module, inputs, **options):
    """Whether calls are replayed, one after the other."""
    found = []
    for x in inputs:
        before = Counts.replayed
        last = module(x, **options)
        found.append(Counts.replayed > before)
    return last, found


@pytest.mark.parametrize(
    ("kind", "hidden", "gradients"),
    [
        ("RNN", 1, True),
        *thorough(("DiagonalGRU", 2, True), ("DiagonalGRU", 2, False), ("GRU", 9, True), ("LSTM", 2, False)),
    ],
)
def test_a_replayed_solve_is_told_as_any_other(kind, hidden, gradients, device, monkeypatch):
    with_one_to_spare(monkeypatch)
    dtype = torch.float32 if hidden > 8 else torch.float64  # tiles are not for the latter
    steps = 400 if kind == "DiagonalGRU" else 17
    module, other = (
        getattr(ours, kind)(2, hidden, device=device, dtype=dtype, mode="parallel", newton=Newton(capture=each))
        for each in (True, False)
    )
    other.load_state_dict(module.state_dict())
    inputs = [torch.randn(steps, 1, 2, dtype=dtype, device=device, requires_grad=gradients) for _ in range(4)]
    with torch.set_grad_enabled(gradients):
        found, replayed = replays(module, inputs)
        assert replayed == [False, False, False, True]
        right, replayed = replays(other, inputs[-1:])
        assert not any(replayed)
    close = 1e-9 if dtype is torch.float64 else 1e-5
    assert error(found[0], right[0]) < close
    if gradients:
        leaves = [(inputs[-1], *net.parameters()) for net in (module, other)]
        of_found, of_right = (
            torch.autograd.grad(each[0].square().sum(), leaf) for each, leaf in zip((found, right), leaves, strict=True)
        )
        assert all(error(*each) < close for each in zip(of_found, of_right, strict=True))
    (one,), (two,) = module.solutions, other.solutions
    assert one.plan.notes == ["replayed as a CUDA graph"]
    assert one.plan.chunk == two.plan.chunk
    assert (one.result, one.results, one.message) == (Result.CONVERGED, two.results, two.message)
    for name in ("iterations", "exact_steps", "known_steps"):
        assert getattr(one, name).tolist() == getattr(two, name).tolist()
    assert one.residual.shape == two.residual.shape
    assert one.updates.shape[1:] == two.updates.shape[1:]
    assert one.states is None


def test_a_solve_that_needs_more_passes_is_made_again(device, monkeypatch):
    """As by the ordinary way, which knows how many."""
    passes_of = repeated._passes_of
    monkeypatch.setattr(repeated, "_passes_of", lambda passed: passes_of(passed) and (2,))
    module = ours.RNN(2, 1, device=device, dtype=torch.float64, mode="parallel")
    x = torch.randn(17, 1, 2, dtype=torch.float64, device=device)
    with torch.no_grad():
        found, replayed = replays(module, [x] * 4)
        assert replayed == [False, False, False, True]  # in vain
        assert Counts.recorded == 2  # what was recorded is let go of
        assert not module.solutions[0].plan.notes
        assert int(module.solutions[0].iterations) > 2
        assert error(found[0], module(x, mode="sequential")[0]) < 1e-9


def test_what_is_fixed_for_a_capture_is_not_fixed_in_a_replay(device, monkeypatch):
    """In auto mode: a replay tells how far states are known, as the calls before it do."""
    monkeypatch.setattr(torch_like, "is_faster_in_parallel", lambda *sizes, **options: (True, ""))
    module = ours.RNN(2, 1, device=device, dtype=torch.float64, newton=Newton(stop=FixedIterations(6)))
    x = torch.randn(17, 1, 2, dtype=torch.float64, device=device)
    with torch.no_grad():
        assert replays(module, [x] * 3)[1] == [False] * 3
        (ordinary,) = module.solutions
        assert replays(module, [x])[1] == [True]
    (replay,) = module.solutions
    assert replay.result is ordinary.result is Result.CONVERGED
    assert replay.tolerance == ordinary.tolerance is not None
    assert replay.known_steps.tolist() == ordinary.known_steps.tolist()
