"""Kernels that are launched again as they were compiled: right wherever the tensors lie, whatever they hold."""

from __future__ import annotations

import pytest
import torch

from deeppcr import linear
from kernel_support import Compiled, Launcher, Launches, error, misaligned, strided, thorough

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

import triton
import triton.language as tl

from deeppcr import launch
from deeppcr.linear.kernels import dense


@triton.jit(do_not_specialize=["free"])
def _add(values, more, count, free, factor, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    total = tl.load(values + at, mask=at < count) + factor * tl.load(more + at, mask=at < count) + free
    tl.store(values + at, total, mask=at < count)


def add(values, more, count=4, free=0, factor=1.0, size=16, *, programs=1, warps=1, **options):
    arguments = (values, more, count, free, factor)
    launch.launch(_add, programs, arguments, (size,), warps=warps, **options)


class TestLaunch:
    @pytest.fixture
    def two(self, device):
        return torch.ones(32, device=device), torch.full((32,), 2.0, device=device)

    def test_the_second_launch_is_direct(self, two, compiled):
        for times in (1, 2, 3):
            add(*two)
            assert two[0][:4].tolist() == [1.0 + 2 * times] * 4
            if two[0].is_cpu:
                assert compiled() == times - 1

    def test_numbers_that_a_kernel_is_not_specialised_on_may_change(self, two, compiled):
        add(*two)
        add(*two, free=1, factor=3.0)
        assert two[0][:4].tolist() == [10.0] * 4
        assert compiled() == 1 or two[0].is_cuda

    @pytest.mark.parametrize("change", [{"size": 32}, {"warps": 2}, {"registers": 64}])
    def test_other_constants_and_options_are_compiled_anew(self, change, two, compiled):
        add(*two)
        add(*two, **change)
        assert compiled() == 0
        assert two[0][:4].tolist() == [5.0] * 4
        assert len(launch._compiled) == 2 or two[0].is_cuda

    @pytest.mark.parametrize("count", [1, 16, 2])
    def test_other_integers_are_compiled_anew(self, count, two, compiled):
        """1 becomes a constant, multiples of 16 are known as such: the stand-in sees it where the key does not."""
        for each in (4, count, 4, count):
            add(*two, count=each, integers=(each,))
        assert two[0][0] == 9.0
        assert compiled() == 2 or two[0].is_cuda

    def test_other_beginnings_and_dtypes_are_compiled_anew(self, two, compiled):
        values, more = two
        for each in (more, misaligned(more), more.double(), more, misaligned(more)):
            arguments = (values, each, 4, 0)
            add(values, each, integers=launch.kinds(arguments))
        assert values[0] == 11.0
        assert compiled() == 2 or values.is_cuda

    def test_the_stand_in_sees_a_launch_of_the_wrong_kernel(self, two, compiled, device):
        if device.type != "cpu":
            pytest.skip("the stand-in is for a CPU")
        add(*two)
        for wrong in ({"count": 16}, {"more": misaligned(two[1])}, {"factor": 1}):
            with pytest.raises(AssertionError, match="_add"):
                add(two[0], **{"more": two[1]} | wrong)

    def test_kernels_of_another_device_are_compiled_anew(self, two, compiled, monkeypatch):
        add(*two)
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 7)
        monkeypatch.setattr(launch, "current_stream", lambda device: 0)
        add(*two)
        assert compiled() == 0
        assert {key[1] for key in launch._compiled} >= {7}

    def test_no_programs_are_not_launched(self, two, compiled):
        add(*two, programs=0)
        assert two[0][0] == 1.0

    def test_what_is_remembered_is_bounded(self, two, compiled, monkeypatch):
        monkeypatch.setattr(launch, "_MOST", 2)
        monkeypatch.setattr(launch, "_compiled", {})
        for size in (16, 32, 64, 128, 16):
            add(*two, size=size)
            assert len(launch._compiled) <= 2
        assert two[0][0] == 11.0

    def test_a_profiler_is_told_of_every_launch(self, two, compiled, monkeypatch):
        monkeypatch.setattr(launch, "is_watched", lambda: True)
        before = Compiled.launches
        for _ in range(3):
            add(*two)
        assert compiled() == 0
        assert Compiled.launches == before + 3 or two[0].is_cuda

    def test_who_watches(self, monkeypatch):
        assert not launch.is_watched()
        hook = lambda metadata: None  # noqa: E731
        launch.knobs.runtime.launch_enter_hook.add(hook)
        assert launch.is_watched()
        launch.knobs.runtime.launch_enter_hook.remove(hook)
        assert not launch.is_watched()


class _Flat(Launcher):
    """Of older versions of Triton."""

    def __call__(self, *arguments):
        self.launch(*arguments[:5], False, *arguments[5:])


class _Nested(Launcher):
    """One whose arguments nobody could tell apart any more."""

    def __call__(self, *arguments):
        self.launch((arguments[0], 1), arguments[1:])


def test_launches_go_past_the_launcher_of_triton():
    given, calls = tuple(range(12)), []
    for launcher, outer, inner in ((Launcher, 10, 3), (_Flat, 13, None)):
        past = launch._Past.of(launcher(lambda *handed: calls.append(handed)), len(given))
        assert past is not None
        assert not calls, "it was asked, not launched"
        assert (len(past.outer), past.inner and len(past.inner)) == (outer, inner)
        handed = [given[each.number] if type(each) is launch._Mark else each for each in past.outer]
        tail = [] if past.inner is None else [tuple(given[each.number] for each in past.inner)]
        past.function(*handed, *tail)
        launcher(lambda *handed: calls.append(handed))(*given)
        assert calls[0] == calls[1]
        calls.clear()


def test_launchers_that_do_more_are_left_alone():
    needy = Launcher(print)
    needy.global_scratch_size = 8  # which it allocates at every launch
    for launcher in (needy, _Nested(print), print):
        assert launch._Past.of(launcher, 12) is None


def test_powers_of_two_and_quotients_are_those_of_triton():
    for n in (1, 2, 3, 4, 5, 31, 32, 33, 1000):
        assert launch.next_power_of_2(n) == triton.next_power_of_2(n)
        assert [launch.cdiv(n, k) for k in (1, 2, 32)] == [triton.cdiv(n, k) for k in (1, 2, 32)]


def system(length, width, batch, device):
    data = (0.9 / width**0.5) * torch.randn(length - 1, *batch, width, width, device=device)
    return data, torch.randn(length, *batch, width, device=device)


def assert_right(data, rhs, reverse=False, chunk=None):
    found = dense.solve_coupled(linear.Dense(data), rhs, reverse=reverse, chunk=chunk)
    full = linear.Dense(data.double())
    right = linear.ForwardSubstitution().solve_coupled(full, rhs.double(), reverse=reverse)
    assert error(found, right) <= 1e-5


CASES = [  # length, width, batch, chunk
    (9, 4, (), None),
    (20, 3, (2,), 4),
    (70, 2, (), 2),
    (9, 33, (), 4),  # whose starts are corrected
    (7, 66, (), 3),  # which is wide
]


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "reverse"])
@pytest.mark.parametrize(("length", "width", "batch", "chunk"), CASES)
def test_other_values_and_places(length, width, batch, chunk, reverse, compiled, device):
    for change in (lambda tensor: tensor, misaligned):
        data, rhs = system(length, width, batch, device)
        assert_right(change(data), change(rhs), reverse, chunk)
    assert compiled() or device.type == "cuda"


def test_other_strides(compiled, device):
    data, rhs = system(12, 4, (), device)
    for there in (data, data.mT, strided(data), data.mT):
        assert_right(there, rhs, chunk=4)
    assert_right(data, strided(rhs), chunk=4)
    assert_right(data, data.flatten()[:48].view(12, 4), chunk=4)  # memory that is shared


def test_scratch_memory_is_not_shared_with_results(compiled, device, poisoned_memory):
    first, second = (system(20, 3, (2,), device) for _ in range(2))
    kept = [dense.solve_coupled(linear.Dense(data), rhs, chunk=4) for data, rhs in (first, second, first)]
    assert torch.equal(kept[0], kept[2])
    assert error(kept[1], dense.solve_coupled(linear.Dense(second[0]), second[1], chunk=4)) == 0


@pytest.fixture
def public(compiled, device, monkeypatch):
    """``linear.solve`` by kernels that can be launched again, compared with a solution in float64."""
    if device.type == "cpu":
        monkeypatch.setattr(linear.Fused, "refusal", lambda self, couplings: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)

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


def test_public_calls_that_are_not_alike(public, device):
    """Each after the one before it: other strides, places, sizes, starts and solvers."""
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


@pytest.mark.parametrize("rows", [(2, 3), (2, 1), (1, 3), (1, 1)])
def test_rows_in_two_dimensions(rows, public, device):
    """Some of them have blocks of their own, others the same."""
    data, rhs = full_system(7, 2, rows, device)
    public(data, rhs[:, :1, :1].expand(-1, 2, 3, -1))
    public(data, torch.randn(7, 2, 3, 2, device=device), reverse=True)


def test_rows_that_only_the_blocks_have(public, device):
    data, rhs = full_system(34, 2, (2,), device)
    for _ in range(2):
        assert public(data, rhs[:, :1]).shape == (34, 2, 2)


def test_halves_are_not_read_as_floats(public, device):
    data, rhs = full_system(5, 4, (), device)
    right = public(data.half().float(), rhs.half().float())
    for _ in range(2):
        half = linear.solve(linear.Dense(data.half()), rhs.half())
        assert half.dtype == torch.float16
        assert error(half, right) <= 1e-3


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


# Each launch is some microseconds of the host, and a call on a GPU takes as long as they do.
@pytest.mark.parametrize(
    ("length", "width", "launches"), [(1_024, 16, 4), (16_384, 4, 6), (16_384, 16, 6), (16_384, 32, 6), (65_536, 4, 8)]
)
def test_launches_of_a_solve(length, width, launches, uncomputed):
    blocks, rhs = linear.Dense(torch.zeros(length, width, width)), torch.zeros(length, width)
    with Launches() as made:
        linear.solve(blocks, rhs)
    assert made.count == launches


def test_launches_of_a_solve_with_gradients(uncomputed):
    blocks, rhs = linear.Dense(torch.zeros(64, 4, 4)), torch.zeros(64, 4, requires_grad=True)
    with Launches() as made:
        solution = linear.solve(blocks, rhs)
    assert made.count == 4
    with Launches() as made:
        torch.autograd.grad(solution, rhs, torch.zeros(64, 4))
    assert made.count == 4


class TestRepeat:
    """All launches of a call, made again for other tensors that lie in memory alike."""

    @pytest.fixture
    def solve(self, compiled, device, monkeypatch):
        """``Fused``, on a CPU as if it were a GPU; whether a call was repeated."""
        if device.type == "cpu":
            monkeypatch.setattr(linear.Fused, "refusal", lambda self, couplings: None)
            monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
        monkeypatch.setattr(launch, "_noted", {})
        repeated, again = [], launch.Noted.again
        monkeypatch.setattr(launch.Noted, "again", lambda *arguments: repeated.append(1) or again(*arguments))

        def solve(data, rhs, reverse=False, structure=linear.Dense):
            repeated.clear()
            couplings = structure(data)
            found = linear.Fused().solve_coupled(couplings, rhs, reverse=reverse)
            full = structure(data.double())
            right = linear.ForwardSubstitution().solve_coupled(full, rhs.double(), reverse=reverse)
            assert error(found, right) <= 1e-5
            return bool(repeated)

        return solve

    @pytest.mark.parametrize("reverse", [False, True])
    @pytest.mark.parametrize(("length", "width", "batch"), [(9, 4, ()), (70, 3, (2,)), *thorough((150, 16, (1,)))])
    def test_other_values_in_other_places(self, length, width, batch, reverse, solve, device, poisoned_memory):
        for call in range(3):
            assert solve(*system(length, width, batch, device), reverse) is (call > 0)

    def test_blocks_that_begin_inside_of_a_tensor(self, solve, device):
        for call in range(3):
            data, rhs = full_system(70, 4, (2,), device)
            assert solve(data[1:], rhs) is (call > 0)

    @pytest.mark.parametrize("structure", [linear.Diagonal, linear.Scalar])
    def test_scans(self, structure, solve, device):
        for call in range(3):
            data = torch.rand(299, *((5,) if structure is linear.Diagonal else ()), device=device)
            assert solve(data, torch.rand(300, 5, device=device), False, structure) is (call > 0)

    def test_other_layouts_are_other_calls(self, solve, device):
        data, rhs = system(70, 4, (2,), device)
        assert not solve(data, rhs)
        assert not solve(strided(data), rhs)
        assert not solve(data, misaligned(rhs))
        assert not solve(data, rhs, True)
        assert solve(data, rhs)

    def test_what_pytorch_computes_is_not_left_out(self, solve, device):
        """A tensor that begins anywhere is copied first, at every call."""
        for _ in range(3):
            data, rhs = system(70, 4, (2,), device)
            assert not solve(data, misaligned(rhs))

    def test_tensors_that_share_memory_are_not_taken_for_others(self, solve, device):
        """Each is known by itself: where it lies beside the other may change from call to call."""
        for call, (first, second) in enumerate([(0, 70 * 8), (70 * 32, 0), (0, 0)]):
            memory = torch.randn(70 * 2 * 4 * 5, device=device) / 4
            rhs, data = memory[first:][: 70 * 8].view(70, 2, 4), memory[second:][: 69 * 32].view(69, 2, 4, 4)
            assert solve(data, rhs) is (call > 0)

    def test_what_is_noted_is_bounded(self, solve, device, monkeypatch):
        monkeypatch.setattr(launch, "_MOST", 2)
        for length in (5, 6, 7, 8):
            solve(*system(length, 3, (), device))
            assert len(launch._noted) <= 2

    @pytest.mark.parametrize("inference", [False, True], ids=["no grad", "inference"])
    @pytest.mark.parametrize("structure", [linear.Dense, linear.Diagonal])
    def test_what_is_copied_first_is_copied_at_every_call(self, structure, inference, solve, device):
        """Blocks with a gap between their rows: in inference mode ``contiguous`` and ``reshape`` seem to be looks."""
        core = (3, 3) if structure is linear.Dense else (3,)
        for _ in range(3):
            data, rhs = torch.rand(11, 1, 2, *core, device=device) / 4, torch.rand(12, 2, 2, 3, device=device)
            with torch.inference_mode() if inference else torch.no_grad():
                solve(data, rhs, False, structure)
