"""Launches that are made again with new pointers, and what a call costs the host besides them."""

from __future__ import annotations

import pytest
import torch

from deeppcr import linear
from kernel_support import Calls, error, misaligned, strided

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr.linear.kernels import dense, launch  # noqa: E402  (imports Triton)
from deeppcr.linear.kernels.launch import Launches  # noqa: E402


def system(length, width, batch, device):
    data = (0.9 / width**0.5) * torch.randn(length - 1, *batch, width, width, device=device)
    return data, torch.randn(length, *batch, width, device=device)


def assert_right(data, rhs, reverse=False, chunk=None):
    found = dense.solve_coupled(linear.Dense(data), rhs, reverse=reverse, chunk=chunk)
    full = linear.Dense(data.double())
    right = linear.ForwardSubstitution().solve_coupled(full, rhs.double(), reverse=reverse)
    assert error(found, right) <= 1e-5


CASES = [  # length, width, batch, chunk, launches
    (9, 4, (), None, 1),
    (20, 3, (2,), 4, 3),
    (70, 2, (), 2, 5),
    (9, 33, (), 4, 6),  # whose starts are corrected
    (7, 66, (), 3, 7),  # which is wide
]


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "reverse"])
@pytest.mark.parametrize(("length", "width", "batch", "chunk", "launches"), CASES)
def test_other_values_in_the_same_places(length, width, batch, chunk, launches, reverse, compiled, device):
    for change in (lambda tensor: tensor, lambda tensor: -tensor, misaligned):
        data, rhs = system(length, width, batch, device)
        assert_right(change(data), change(rhs), reverse, chunk)
    assert compiled == [launches, launches]


def test_other_strides_are_not_the_same_places(compiled, device):
    data, rhs = system(12, 4, (), device)
    for there in (data, data.mT, strided(data), data.mT):
        assert_right(there, rhs, chunk=4)
    assert compiled == [3]


def test_tensors_that_share_memory_do_not_later(compiled, device):
    """Which of two a pointer belongs to is not told by where it lies."""
    data, rhs = system(12, 4, (), device)
    assert_right(data, data.flatten()[:48].view(12, 4), chunk=4)
    assert_right(data, rhs, chunk=4)
    assert compiled == [3]


def test_scratch_memory_is_not_shared_with_results(compiled, device, poisoned_memory):
    first, second = (system(20, 3, (2,), device) for _ in range(2))
    kept = [dense.solve_coupled(linear.Dense(data), rhs, chunk=4) for data, rhs in (first, second, first)]
    assert compiled
    assert torch.equal(kept[0], kept[2])
    assert error(kept[1], dense.solve_coupled(linear.Dense(second[0]), second[1], chunk=4)) == 0


def test_what_cannot_be_repeated_is_not(compiled, device):
    """The state before the first step is copied to where a single chunk starts from."""
    data, rhs = system(5, 4, (3,), device)
    spread = strided(rhs)
    for _ in range(2):
        assert_right(data, spread)
    assert compiled == []


def test_the_caches_are_bounded(compiled, device, monkeypatch):
    monkeypatch.setattr(launch, "_MOST", 2)
    for length in (3, 4, 5, 6, 3):
        assert_right(*system(length, 2, (), device))
        assert len(dense._solved) <= 2


def test_a_profiler_is_told_of_every_launch(compiled, device, monkeypatch):
    monkeypatch.setattr(launch, "is_watched", lambda: True)
    for _ in range(2):
        assert_right(*system(20, 3, (2,), device), chunk=4)
    assert compiled == [3]


def test_a_tensor_that_nobody_knows_ends_the_notes(compiled, device):
    known, other = torch.ones(4, device=device), torch.ones(4, device=device)
    launches = Launches(known)
    launches.launch(dense._add, 1, (known, other, 4), (16,), warps=1)
    assert not launches.finished()
    assert known.tolist() == [2.0] * 4


# What a call needs of PyTorch, besides launches. Each is some microseconds of the host, and so is each launch: a call on a
# GPU takes as long as they do.
@pytest.mark.parametrize(
    ("length", "width", "launches"), [(1_024, 16, 3), (16_384, 4, 5), (16_384, 16, 5), (16_384, 32, 5), (65_536, 4, 7)]
)
def test_calls_of_a_solve(length, width, launches, uncomputed):
    blocks, rhs = linear.Dense(torch.zeros(length, width, width)), torch.zeros(length, width)

    def solve():
        return linear.solve(blocks, rhs, solver=linear.Fused())

    solve()
    with Calls() as calls:
        solve()
    # The blocks between unknowns, the result, and scratch memory.
    assert calls.operations == ["slice.Tensor", "empty.memory_format", "empty.memory_format"]
    assert calls.launches == launches


def test_calls_of_a_solve_with_gradients(uncomputed):
    blocks, rhs = linear.Dense(torch.zeros(64, 4, 4)), torch.zeros(64, 4, requires_grad=True)
    for _ in range(2):
        with Calls() as calls:
            solution = linear.solve(blocks, rhs, solver=linear.Fused())
    assert (len(calls.operations), calls.launches) == (4, 3)
    gradient = torch.zeros(64, 4)
    for _ in range(2):
        with Calls() as calls:
            torch.autograd.grad(solution, rhs, gradient, retain_graph=True)
    assert (len(calls.operations), calls.launches) == (4, 3)
