"""The kernels for dense couplings against forward substitution in float64.

On a CPU they are interpreted, and so the systems are small; ``--device=cuda`` runs the real thing on large ones, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from deeppcr import linear
from kernel_support import error, misaligned, offset, pairwise, strided, thorough

# Where products overflow, NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr.linear.kernels import dense, narrow, repair

TOLERANCE = 1e-5
NARROW = (1, 2, 3, 5, 8, 16, 17, 32, 64)
WIDE = (65, 100, 128, 256)

either_way = pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "reverse"])


@dataclass(frozen=True)
class Kernel(linear.LinearSolver):
    """A solver for ``linear.solve`` made of the kernels."""

    chunk: int | None = None

    def solve_coupled(self, couplings, rhs, *, reverse=False):
        return dense.solve_coupled(couplings, rhs, reverse=reverse, chunk=self.chunk)


@pytest.fixture
def short_levels(monkeypatch):
    """Chunks that are few are reduced again: short systems have three levels."""
    monkeypatch.setattr(dense, "_TOP", 4)


def system(length, width=3, batch=(), *, device, coupling_batch=None, transposed=False):
    coupling_batch = batch if coupling_batch is None else coupling_batch
    data = (0.9 / width**0.5) * torch.randn(length - 1, *coupling_batch, width, width, device=device)
    rhs = torch.randn(length, *batch, width, device=device)
    return linear.Dense(data.mT if transposed else data), rhs


def expected(couplings, rhs, reverse=False):
    full = linear.Dense(couplings.data.double())
    return linear.ForwardSubstitution().solve_coupled(full, rhs.double(), reverse=reverse)


def assert_right(actual, couplings, rhs, reverse=False):
    assert (actual.dtype, actual.shape) == (rhs.dtype, rhs.shape)
    assert error(actual, expected(couplings, rhs, reverse)) <= TOLERANCE


@either_way
@pytest.mark.parametrize("length", [1, 2, 65, *thorough(3, 63, 64, 300)])
def test_every_length(length, reverse, device):
    couplings, rhs = system(length, device=device)
    assert_right(dense.solve_coupled(couplings, rhs, reverse=reverse), couplings, rhs, reverse)


@either_way
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("width", [1, 3, 16, 17, 64, *thorough(2, 5, 8, 32)])
def test_every_narrow_width(width, transposed, reverse, device):
    couplings, rhs = system(10, width, device=device, transposed=transposed)
    assert_right(dense.solve_coupled(couplings, rhs, reverse=reverse, chunk=4), couplings, rhs, reverse)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("width", [65, 128, *thorough(100, 256)])
def test_every_wide_width(width, transposed, device):
    reverse = transposed  # as in the backward pass
    couplings, rhs = system(5, width, device=device, transposed=transposed)
    assert_right(dense.solve_coupled(couplings, rhs, reverse=reverse, chunk=2), couplings, rhs, reverse)


@pytest.mark.gpu
@either_way
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("width", NARROW + WIDE)
def test_every_size(width, transposed, reverse, gpu):
    for length in (1, 2, 3, 63, 64, 65, 1000, 16_384):
        for batch in ((), (3,), (40,)):
            if length * width**2 * max([*batch, 1]) > 2**28 or (length > 1000 and batch == ()):
                continue  # too large, or too long for one more loop
            couplings, rhs = system(length, width, batch, device=gpu, transposed=transposed)
            actual = linear.Fused().solve_coupled(couplings, rhs, reverse=reverse)
            assert error(actual, expected(couplings, rhs, reverse)) <= TOLERANCE, (length, batch)


@either_way
@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
def test_several_levels(chunk, reverse, device, short_levels):
    couplings, rhs = system(40, device=device)
    assert_right(dense.solve_coupled(couplings, rhs, reverse=reverse, chunk=chunk), couplings, rhs, reverse)


@either_way
@pytest.mark.parametrize(
    ("batch", "coupling_batch"),
    [
        ((), None),
        ((1,), None),
        ((3,), None),
        ((3,), (1,)),
        ((2, 3), None),
        ((2, 3), (1, 1)),
        ((2, 3), (2, 1)),
        ((2, 3), (1, 3)),
    ],
    ids=str,
)
def test_batches(batch, coupling_batch, reverse, device):
    couplings, rhs = system(8, 3, batch, device=device, coupling_batch=coupling_batch)
    assert_right(dense.solve_coupled(couplings, rhs, reverse=reverse, chunk=3), couplings, rhs, reverse)


@pytest.mark.parametrize("batch", [(5,), (2, 3)])
def test_blocks_that_rows_share_are_not_copied(batch, monkeypatch):
    data, seen = torch.zeros(4, *(1,) * len(batch), 3, 3), []
    monkeypatch.setattr(dense, "launch", lambda kernel, programs, arguments, *_, **__: seen.append(arguments[0]))
    dense.solve_coupled(linear.Dense(data), torch.zeros(5, *batch, 3))
    assert {blocks.data_ptr() for blocks in seen} == {data.data_ptr()}


@pairwise(
    place={place.__name__: place for place in (strided, offset, misaligned)},
    width=[3, 66],
    reverse={"forwards": False, "reverse": True},
)
def test_inputs_may_lie_anywhere(place, width, reverse, device):
    couplings, rhs = system(7, width, (2,) if width == 3 else (), device=device)
    moved, moved_rhs = linear.Dense(place(couplings.data)), place(rhs)
    assert not moved_rhs.is_contiguous() or moved_rhs.data_ptr() % 16
    assert_right(dense.solve_coupled(moved, moved_rhs, reverse=reverse, chunk=3), couplings, rhs, reverse)
    halves, half_rhs = linear.Dense(moved.data[2:]), moved_rhs[2:]
    actual = dense.solve_coupled(halves, half_rhs, reverse=reverse)
    assert_right(actual, linear.Dense(couplings.data[2:]), rhs[2:], reverse)


def test_inputs_are_left_as_they_are(device, short_levels):
    couplings, rhs = system(20, 3, (2,), device=device)
    before = couplings.data.clone(), rhs.clone()
    dense.solve_coupled(couplings, rhs, chunk=2)
    assert torch.equal(couplings.data, before[0])
    assert torch.equal(rhs, before[1])


@pytest.mark.parametrize(
    ("width", "reverse"), [(3, False), (17, True), (66, False), *thorough((3, True), (17, False), (66, True))]
)
def test_no_memory_is_read_before_it_is_written(width, reverse, device, poisoned_memory, short_levels):
    couplings, rhs = system(12 if width == 66 else 20, width, device=device)
    assert_right(dense.solve_coupled(couplings, rhs, reverse=reverse, chunk=2), couplings, rhs, reverse)


@pytest.mark.parametrize("width", [3, 17, 66])
def test_the_same_system_has_the_same_solution(width, device, short_levels):
    couplings, rhs = system(9 if width == 66 else 20, width, device=device)
    first, second = (dense.solve_coupled(couplings, rhs, chunk=2) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [3, 16, 32, 64, 128])
def test_a_long_system_has_the_same_solution_every_time(width, gpu):
    # The upper levels are solved in place: a program that overtakes another would show here.
    couplings, rhs = system(16_384, width, (2,), device=gpu)
    first = linear.Fused().solve_coupled(couplings, rhs)
    for _ in range(20):
        assert torch.equal(first, linear.Fused().solve_coupled(couplings, rhs))


class TestOverflow:
    @either_way
    @pytest.mark.parametrize(
        ("width", "chunk", "long"),
        [(3, 7, 12), (3, 3, 12), (66, 5, 6)],
        ids=["within a chunk", "between chunks", "wide"],
    )
    def test_products_may_overflow(self, width, chunk, long, reverse, device, short_levels):
        # From a coupling of 0 and no terms the state is 0, and stays 0 while the product of 1e10s overflows.
        hole = 4
        couplings, rhs = system(hole + long + 3, width, (2,), device=device)
        huge = 1e10 * torch.eye(width, device=device)
        couplings.data[hole, 0] = 0
        couplings.data[hole + 1 : hole + long, 0] = huge
        rhs[hole + 1 : hole + long + 1, 0] = 0
        if reverse:
            couplings, rhs = linear.Dense(couplings.data.flip(0)), rhs.flip(0)
        assert torch.isfinite(expected(couplings, rhs, reverse)).all()
        actual = dense.solve_coupled(couplings, rhs, reverse=reverse, chunk=chunk)
        assert_right(actual[:, 0], linear.Dense(couplings.data[:, 0]), rhs[:, 0], reverse)
        assert_right(actual[:, 1], linear.Dense(couplings.data[:, 1]), rhs[:, 1], reverse)

    def test_blocks_may_underflow(self, device):
        couplings, rhs = system(20, device=device)
        couplings.data[3:9] = 1e-30
        assert_right(dense.solve_coupled(couplings, rhs, chunk=7), couplings, rhs)

    @either_way
    @pytest.mark.parametrize("width", [3, 66])
    def test_an_infinite_term_is_legal(self, width, reverse, device, short_levels):
        couplings, rhs = system(12 if width == 3 else 7, width, (2,), device=device)
        rhs[4, 0, 1] = float("inf")
        actual = dense.solve_coupled(couplings, rhs, reverse=reverse, chunk=3)
        reference = expected(couplings, rhs, reverse)
        finite = torch.isfinite(reference)
        assert not finite.all()
        assert torch.equal(torch.isfinite(actual), finite)
        assert error(actual[finite], reference[finite]) <= TOLERANCE

    def test_a_solution_that_overflows_stays_infinite_from_there_on(self, device):
        couplings, rhs = system(24, 3, (2,), device=device)
        couplings.data[8:14, 0] = 1e10 * torch.eye(3, device=device)
        actual = dense.solve_coupled(couplings, rhs, chunk=5)
        reference = linear.ForwardSubstitution().solve_coupled(couplings, rhs)
        assert not torch.isfinite(reference[:, 0]).all()
        assert torch.equal(torch.isfinite(actual), torch.isfinite(reference))
        torch.testing.assert_close(actual[:10], reference[:10], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(actual[:, 1], reference[:, 1], rtol=1e-4, atol=1e-5)


class TestGradients:
    def leaves(self, length, width, reverse, device):
        couplings, rhs = system(length + 1, width, (2,), device=device, coupling_batch=(1,))
        return couplings.data, rhs[1:], rhs[0]

    def outcomes(self, leaves, reverse, solver):
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        states = linear.solve(linear.Dense(leaves[0]), *leaves[1:], reverse=reverse, solver=solver)
        weights = torch.linspace(-1, 2, states.numel(), dtype=states.dtype, device=states.device).view_as(states)
        first = torch.autograd.grad((weights * states.square()).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(one.square().sum() for one in first), leaves)
        return states, *first, *second

    def assert_right(self, leaves, reverse, solver):
        full = [leaf.double() for leaf in leaves]
        reference = self.outcomes(full, reverse, linear.ForwardSubstitution())
        for found, right in zip(self.outcomes(leaves, reverse, solver), reference, strict=True):
            assert error(found, right) <= TOLERANCE

    @either_way
    @pytest.mark.parametrize("width", [3, 66])
    def test_of_first_and_second_order(self, width, reverse, device):
        leaves = self.leaves(9 if width == 3 else 3, width, reverse, device)
        self.assert_right(leaves, reverse, Kernel(chunk=4 if width == 3 else 1))

    @pytest.mark.gpu
    @either_way
    @pytest.mark.parametrize("width", [3, 16, 32, 64, 100])
    def test_of_long_systems(self, width, reverse, gpu):
        for solver in (linear.Fused(), linear.Auto()):
            self.assert_right(self.leaves(1000, width, reverse, gpu), reverse, solver)


class TestChoice:
    """Where the kernels take what they are given, ``Auto`` takes the kernels."""

    def test_auto_takes_them_where_they_do_not_refuse(self, monkeypatch):
        monkeypatch.setattr(linear.Fused, "refusal", lambda self, couplings: None)
        couplings, _ = system(5, device="cpu")
        assert linear.Auto().choose(couplings) == (linear.Fused(), "there are kernels for these blocks")

    @pytest.mark.gpu
    def test_auto_takes_them_on_a_gpu(self, gpu, monkeypatch):
        couplings, rhs = system(100, device=gpu)
        assert linear.Auto().choose(couplings)[0] == linear.Fused()
        for refused in (linear.Dense(couplings.data.double()), linear.Dense(torch.zeros(20, 257, 257, device=gpu))):
            assert linear.Auto().choose(refused)[0] != linear.Fused()
        calls = []
        kernel = dense.solve_coupled
        monkeypatch.setattr(dense, "solve_coupled", lambda *a, **k: calls.append(0) or kernel(*a, **k))
        blocks = linear.Dense(torch.cat([couplings.data[:1], couplings.data]))
        assert_right(linear.solve(blocks, rhs), couplings, rhs)
        assert len(calls) == 1

    @pytest.mark.gpu
    def test_under_vmap(self, gpu):
        couplings, rhs = system(100, 3, (4,), device=gpu)
        blocks = torch.cat([couplings.data[:1], couplings.data])
        solved = torch.vmap(lambda a, b: linear.solve(linear.Dense(a), b), 1, 1)(blocks, rhs)
        assert_right(solved, couplings, rhs)
        grads = torch.func.grad(lambda b: linear.solve(linear.Dense(blocks), b).square().sum())(rhs)
        full = rhs.double().requires_grad_()
        linear.solve(linear.Dense(blocks.double()), full, solver=linear.ForwardSubstitution()).square().sum().backward()
        assert error(grads, full.grad) <= TOLERANCE

    @pytest.mark.gpu
    def test_under_compile(self, gpu):
        couplings, rhs = system(100, 3, (4,), device=gpu)
        blocks = torch.cat([couplings.data[:1], couplings.data])
        solved = torch.compile(lambda a, b: 2 * linear.solve(linear.Dense(a), b))(blocks, rhs)
        assert_right(solved / 2, couplings, rhs)


@pytest.mark.gpu
class TestOnTheDevice:
    @pytest.mark.parametrize("width", [16, 100])
    def test_two_streams_at_once(self, width, gpu):
        systems = [system(4096, width, (4,), device=gpu) for _ in range(2)]
        alone = [linear.Fused().solve_coupled(*each) for each in systems]
        streams = [torch.cuda.Stream(gpu) for _ in systems]
        torch.cuda.synchronize(gpu)
        found = [[], []]
        for _ in range(10):
            for which, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    found[which].append(linear.Fused().solve_coupled(*systems[which]))
        torch.cuda.synchronize(gpu)
        for which in range(2):
            assert all(torch.equal(each, alone[which]) for each in found[which])

    @pytest.mark.parametrize("width", [16, 100])
    def test_a_graph_is_replayed_on_new_values(self, width, gpu):
        couplings, rhs = system(1000, width, (2,), device=gpu)
        linear.Fused().solve_coupled(couplings, rhs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            states = linear.Fused().solve_coupled(couplings, rhs)
        for huge in (False, True):
            others, other_rhs = system(1000, width, (2,), device=gpu)
            if huge:  # the repair is part of the graph
                others.data[100] = 0
                others.data[101:120] = 1e10 * torch.eye(width, device=gpu)
                other_rhs[101:121] = 0
            couplings.data.copy_(others.data)
            rhs.copy_(other_rhs)
            graph.replay()
            assert_right(states, others, other_rhs)

    @either_way
    def test_more_elements_than_32_bits_count(self, reverse, gpu):
        if torch.cuda.get_device_properties(gpu).total_memory < 40 * 2**30:
            pytest.skip("takes 20 GB")
        length, rows, width = 66, 2**17, 16
        data = torch.empty(length - 1, rows, width, width, device=gpu).normal_(0, 0.9 / width**0.5)
        assert data.numel() > 2**31
        rhs = torch.randn(length, rows, width, device=gpu)
        actual = linear.Fused().solve_coupled(linear.Dense(data), rhs, reverse=reverse)
        for row in (0, 1, rows // 2, rows - 1):
            assert_right(actual[:, row], linear.Dense(data[:, row]), rhs[:, row], reverse)

    def test_steps_further_apart_than_32_bits_count(self, gpu):
        couplings, rhs = system(4, 2, device=gpu)
        far = 2**30 + 8
        far_rhs = torch.empty(3 * far + 64, device=gpu).as_strided((4, 2), (far, 1)).copy_(rhs)
        far_data = torch.empty(2 * far + 64, device=gpu).as_strided((3, 2, 2), (far, 2, 1)).copy_(couplings.data)
        for reverse in (False, True):
            actual = linear.Fused().solve_coupled(linear.Dense(far_data), far_rhs, reverse=reverse)
            assert_right(actual, couplings, rhs, reverse)


@pytest.mark.parametrize("width", [33, 64, 65])
def test_products_that_are_slightly_off_do_not_spoil_the_states(width, device, monkeypatch):
    """As the matrix units make them: they cut off the last bits of a sum."""
    found = dense._reduce_chunks
    monkeypatch.setattr(dense, "_reduce_chunks", lambda *arguments: found(*arguments).mul_(1 - 1e-4))
    couplings, rhs = system(13, width, (2,), device=device)
    couplings = linear.Dense(couplings.data / 0.9)  # so that errors are carried along
    states = torch.empty_like(rhs)
    chains = (
        dense.Chain(each, known, False, core)
        for each, known, core in ((couplings.data, 0, 2), (rhs, 1, 1), (states, 1, 1))
    )
    dense.solve_chain(*chains, 4)  # without steps instead of wrong products
    assert_right(states, couplings, rhs)


@pytest.mark.parametrize(("width", "few", "many"), [(8, (1, 1), (1, 1)), (16, (2, 2), (2, 1)), (32, (4, 4), (2, 1))])
def test_programs_that_do_not_fill_the_device_get_more_warps(width, few, many, device, monkeypatch):
    """Of programs that reduce chunks, and of those that substitute back."""
    launch, seen = dense.launch, {}

    def launched(kernel, programs, *arguments, warps, **settings):
        seen.setdefault((kernel, programs > narrow._FEW), set()).add(warps)
        launch(kernel, programs, *arguments, warps=warps, **settings)

    monkeypatch.setattr(dense, "launch", launched)
    monkeypatch.setattr(dense, "cut_for", dense.cut_for.__wrapped__)
    monkeypatch.setattr(narrow, "_FEW", 3)
    blocks = linear.Dense(torch.zeros(5 * 2, width, width, device=device))
    linear.solve(blocks, torch.ones(5 * 2, width, device=device), solver=Kernel(chunk=2))
    kinds = [
        (dense.reduce_narrow, True),
        (dense.substitute_narrow, True),
        (dense.reduce_narrow, False),
        (dense.substitute_narrow, False),
    ]
    assert [seen.get(kind) for kind in kinds[:2]] == [{warps} for warps in many]
    assert seen[dense.substitute_narrow, False] == {few[1]}
    seen.clear()
    linear.solve(blocks[:6], torch.ones(6, width, device=device), solver=Kernel(chunk=2))
    alone = repair.lanes_for(1, width)[1]
    expected = {
        dense.reduce_narrow: few[0],
        dense.substitute_narrow: few[1],
        repair.repair: max(few[1], alone),
    }
    assert seen == {(kernel, False): {warps} for kernel, warps in expected.items()}
