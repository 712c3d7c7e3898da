"""Launches that are made again with new pointers, and what a call costs the host besides them."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

from deeppcr import linear
from kernel_support import Calls, Compiled, error, misaligned, strided

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr import launch
from deeppcr.launch import Launches
from deeppcr.linear.kernels import dense


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
    before = Compiled.directly
    for _ in range(2):
        assert_right(*system(20, 3, (2,), device), chunk=4)
    assert (compiled, Compiled.directly) == ([3], before)


def test_a_profiler_is_told_of_the_launches_of_a_public_call(public, compiled, device, monkeypatch):
    monkeypatch.setattr(launch, "is_watched", lambda: True)
    before = Compiled.directly
    for _ in range(2):
        public(*full_system(100, 4, (2,), device))
    assert (compiled, Compiled.directly) == ([3], before)


def test_one_tensor_in_two_places_is_not_noted(compiled, device):
    """Launches that were noted for two tensors do for one that stands for both; not the reverse."""
    noted, one, two = {}, torch.ones(4, device=device), torch.full((4,), 3.0, device=device)

    def add(values, more):
        def make(launches):
            launches.launch(dense._add, 1, (values, more, 4), (16,), warps=1)

        launch.repeat(noted, "add", (values, more), make)
        return values.tolist()

    assert add(one, one) == [2.0] * 4
    assert not noted
    assert add(one, two) == [5.0] * 4
    assert add(two, two) == [6.0] * 4
    assert compiled == [1]


def test_a_tensor_that_nobody_knows_ends_the_notes(compiled, device):
    known, other = torch.ones(4, device=device), torch.ones(4, device=device)
    launches = Launches(known)
    launches.launch(dense._add, 1, (known, other, 4), (16,), warps=1)
    assert not launches.finished()
    assert known.tolist() == [2.0] * 4


@pytest.fixture
def public(compiled, device, monkeypatch):
    """``linear.solve`` by kernels that can be launched again, compared with a solution in float64."""
    if device.type == "cpu":
        monkeypatch.setattr(linear.Fused, "refusal", lambda self, couplings: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)

    def check(name, first_pointer):
        again = getattr(launch.Launches, name)

        def checked(self, *arguments):
            assert not any(pointer % 16 for pointer in arguments[first_pointer:])
            return again(self, *arguments)

        monkeypatch.setattr(launch.Launches, name, checked)

    check("again", 0)
    check("again_for_new", 1)

    def solve(data, rhs, initial=None, **options):
        found = linear.solve(linear.Dense(data), rhs, initial, **options)
        full = linear.ForwardSubstitution()
        start = None if initial is None else initial.double()
        right = linear.solve(linear.Dense(data.double()), rhs.double(), start, **options | {"solver": full})
        assert found.shape == right.shape
        assert error(found, right) <= 1e-5
        return found

    return solve


def full_system(length, width, batch, device):
    data = (0.9 / width**0.5) * torch.randn(length, *batch, width, width, device=device)
    return data, torch.randn(length, *batch, width, device=device)


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "reverse"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["one row", "rows"])
def test_a_public_call_is_repeated_without_its_checks(batch, reverse, public, compiled, device, monkeypatch):
    public(*full_system(5, 4, batch, device), reverse=reverse)
    monkeypatch.setattr(sys.modules["deeppcr.linear.solve"], "_check", None)  # not to be called in float32
    data, rhs = full_system(5, 4, batch, device)
    found = linear.solve(linear.Dense(data), rhs, reverse=reverse)
    assert compiled == [1]
    full = linear.ForwardSubstitution()
    couplings = linear.Dense(data.double())[:-1] if reverse else linear.Dense(data.double())[1:]
    assert error(found, full.solve_coupled(couplings, rhs.double(), reverse=reverse)) <= 1e-5


def test_public_calls_that_are_not_alike(public, device):
    """Each after the one before it has been noted: other strides, places, sizes, starts and solvers."""
    data, rhs = full_system(5, 4, (), device)
    for _ in range(2):
        public(data, rhs)
        public(data, rhs, reverse=True)
        public(data.mT, rhs)
        public(data, strided(rhs))
        public(data, rhs.repeat_interleave(2, -1)[:, ::2])
        public(misaligned(data), rhs)
        public(data, misaligned(rhs))
        public(data[1:], rhs[1:])
        public(data, rhs, torch.ones(4, device=device))
        public(data, rhs.unsqueeze(1).expand(-1, 2, -1))
    square = full_system(4, 4, (), device)[0]
    public(square, square)  # the blocks are the right-hand sides of 4 rows, too
    public(square, square.clone())
    public(square, square)


def test_rows_that_only_the_blocks_have(public, compiled, device):
    data, rhs = full_system(34, 2, (2,), device)
    for _ in range(2):
        assert public(data, rhs[:, :1]).shape == (34, 2, 2)
    assert compiled == [3]


def test_halves_are_not_read_as_floats(public, device):
    data, rhs = full_system(5, 4, (), device)
    right = public(data.half().float(), rhs.half().float())
    for _ in range(2):
        half = linear.solve(linear.Dense(data.half()), rhs.half())
        assert half.dtype == torch.float16
        assert error(half, right) <= 1e-3


def test_another_solver_launches_nothing(public, compiled, device):
    data, rhs = full_system(5, 4, (), device)
    for solver in (linear.Auto(), linear.PCR(), linear.Fused(), linear.PCR()):
        public(data, rhs, solver=solver)
    assert compiled == [1]  # by Fused(), what Auto() launched


def test_public_calls_that_are_observed(public, device):
    data, rhs = full_system(5, 4, (), device)
    plain = public(data, rhs)
    blocks = linear.Dense(data)
    with torch.no_grad():
        assert not linear.solve(blocks, rhs.clone().requires_grad_()).requires_grad
    for of_blocks, of_rhs in ((True, False), (False, True)):
        asked = data.clone().requires_grad_(of_blocks), rhs.clone().requires_grad_(of_rhs)
        found = linear.solve(linear.Dense(asked[0]), asked[1])
        found.sum().backward()
        assert (asked[0].grad is not None, asked[1].grad is not None) == (of_blocks, of_rhs)
    _, tangent = torch.func.jvp(lambda b: linear.solve(blocks, b, solver=linear.PCR()), (rhs,), (rhs,))
    torch.testing.assert_close(tangent, plain)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(rhs, rhs)
        tangent = torch.autograd.forward_ad.unpack_dual(linear.solve(blocks, dual)).tangent
    torch.testing.assert_close(tangent, plain)
    many = torch.vmap(lambda b: linear.solve(blocks, b))(torch.stack([rhs, 2 * rhs]))
    torch.testing.assert_close(many, torch.stack([plain, 2 * plain]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("data", "rhs"), [([1.0], torch.ones(5, 4)), (torch.ones(5, 4, 4), [1.0])])
def test_bad_input_is_named_after_a_good_call(data, rhs, public, device):
    public(*full_system(5, 4, (), device))
    with pytest.raises(TypeError, match="expected a tensor, got list"):
        linear.solve(linear.Dense(data), rhs)


def test_a_call_on_another_device_is_not_repeated(public, compiled, device, monkeypatch):
    data, rhs = full_system(5, 4, (), device)
    public(data, rhs)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    monkeypatch.setattr(torch.cuda, "device", lambda other: contextlib.nullcontext())
    monkeypatch.setattr(dense, "repeat", None)
    with pytest.raises(TypeError, match="not callable"):
        linear.solve(linear.Dense(data), rhs)
    assert compiled == []


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
    # Scratch memory; and the result, while all kernels run but the last, which writes it.
    assert calls.operations == ["new_empty.default", "new_empty.default"]
    assert (calls.before, calls.launches) == ([0, launches - 1], launches)


def test_blocks_that_begin_anywhere_are_copied_once(uncomputed):
    """Those of an odd width do, but for the first."""
    blocks, rhs = linear.Dense(torch.zeros(1001, 3, 3)), torch.zeros(1001, 3)
    for _ in range(2):
        with Calls() as calls:
            linear.solve(blocks, rhs)
        assert calls.operations.count("clone.default") == 1


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
