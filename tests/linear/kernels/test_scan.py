"""The scans for diagonal, scalar and block-diagonal couplings against forward substitution in float64.

On a CPU the kernels are interpreted, and so the systems are small; ``--device=cuda`` runs the real thing.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from deeppcr import linear
from kernel_support import offset, pairwise, strided, thorough
from scan_problems import LENGTHS, assert_right, either_way, expected, system

# Where products overflow, NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr.linear.kernels import block_diagonal, diagonal
from deeppcr.linear.kernels.recurrence import as_channels

#: small tiles and chunks, so that short systems have many of them
SMALL = diagonal.Tiling(steps=4, groups=4, channels=16, tiles=2, warps=1)
#: many lanes, so that the interpreter has few programs: more than fit the shared memory of a GPU for blocks beyond 4 x 4
SMALL_BLOCKS = block_diagonal.Tiling(chunk=8, lanes=512, warps=4)
STRUCTURES = (linear.Diagonal, linear.Scalar, linear.BlockDiagonal)

every_structure = pytest.mark.parametrize("structure", STRUCTURES)


def kernel_of(structure):
    return block_diagonal if structure is linear.BlockDiagonal else diagonal


@pytest.fixture(params=[diagonal.MOST_JOINED, 0], ids=["joined", "solved first"])
def between_chunks(request, monkeypatch):
    """How a chunk's start is found: by every program for itself, or by a kernel for all of them."""
    monkeypatch.setattr(diagonal, "MOST_JOINED", request.param)
    return request.param


def in_small_chunks(couplings, rhs, reverse):
    kernel = kernel_of(type(couplings))
    return kernel.run(couplings, rhs, reverse, SMALL_BLOCKS if kernel is block_diagonal else SMALL)


@dataclass(frozen=True)
class Kernel(linear.LinearSolver):
    """A solver for ``linear.solve`` made of the kernels, in small chunks or as planned."""

    small: bool = False

    def solve_coupled(self, couplings, rhs, *, reverse=False):
        if self.small:
            return in_small_chunks(couplings, rhs, reverse)
        return kernel_of(type(couplings)).solve_coupled(couplings, rhs, reverse=reverse)


@every_structure
@either_way
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length(structure, length, reverse, device):
    couplings, rhs = system(structure, length, (2,), device=device, reverse=reverse)
    assert_right(in_small_chunks(couplings, rhs, reverse), couplings, rhs, reverse)


@either_way
@pytest.mark.parametrize(
    ("structure", "length"),
    [
        (linear.Diagonal, 1),
        (linear.Diagonal, 65),
        *thorough((linear.Diagonal, 1000)),
        (linear.Scalar, 65),
        (linear.BlockDiagonal, 40),
    ],
)
def test_as_planned(structure, length, reverse, device):
    couplings, rhs = system(structure, length, (2,), device=device, reverse=reverse)
    assert_right(Kernel().solve_coupled(couplings, rhs, reverse=reverse), couplings, rhs, reverse)


@every_structure
@either_way
@pytest.mark.gpu
def test_a_long_system(structure, reverse, device):
    if device.type != "cuda":
        pytest.skip("too long to interpret")
    for batch in ((), (40,), (300,)):
        couplings, rhs = system(structure, 16_384, batch, device=device, reverse=reverse)
        assert_right(Kernel().solve_coupled(couplings, rhs, reverse=reverse), couplings, rhs, reverse)


@either_way
@pytest.mark.parametrize("channels", [1, 5, 17, *thorough(2, 3, 16, 64)])
def test_every_number_of_channels(channels, reverse, device):
    couplings, rhs = system(linear.Diagonal, 35, (), channels, device=device, reverse=reverse)
    assert_right(diagonal.solve_coupled(couplings, rhs, reverse=reverse), couplings, rhs, reverse)
    assert_right(diagonal.run(couplings, rhs, reverse, SMALL), couplings, rhs, reverse)


@either_way
@pytest.mark.parametrize(
    ("size", "count"), [(1, 3), (2, 1), (3, 17), (8, 3), *thorough(*((size, 3) for size in range(2, 8)))]
)
def test_every_size_of_block(size, count, reverse, device):
    couplings, rhs = system(linear.BlockDiagonal, 12, (), size * count, size, device=device, reverse=reverse)
    plan = block_diagonal.Tiling(chunk=8)  # short chunks; lanes, warps and stages as in every plan of the library
    assert_right(block_diagonal.run(couplings, rhs, reverse, plan), couplings, rhs, reverse)


def test_larger_blocks_are_refused():
    with pytest.raises(ValueError, match="up to 8 x 8, got 9 x 9"):
        block_diagonal.solve_coupled(linear.BlockDiagonal(torch.zeros(1, 1, 9, 9)), torch.zeros(2, 9))


@every_structure
def test_float64(structure, device):
    couplings, rhs = system(structure, 65, (2,), device=device, dtype=torch.float64)
    assert_right(Kernel(small=True).solve_coupled(couplings, rhs), couplings, rhs, False, rtol=1e-13)


@every_structure
@either_way
@pytest.mark.parametrize("coupling_batch", [(1, 1), (2, 1), (1, 3)], ids=str)
def test_couplings_broadcast(structure, coupling_batch, reverse, device):
    couplings, rhs = system(structure, 33, (2, 3), device=device, reverse=reverse, coupling_batch=coupling_batch)
    assert couplings.batch_shape == coupling_batch
    assert_right(Kernel(small=True).solve_coupled(couplings, rhs, reverse=reverse), couplings, rhs, reverse)


@every_structure
@either_way
@pytest.mark.parametrize("place", [strided, offset])
def test_inputs_may_lie_anywhere(structure, place, reverse, device):
    couplings, rhs = system(structure, 33, (3,), device=device, reverse=reverse)
    moved, moved_rhs = structure(place(couplings.data)), place(rhs)
    assert not moved_rhs.is_contiguous()
    assert_right(Kernel(small=True).solve_coupled(moved, moved_rhs, reverse=reverse), couplings, rhs, reverse)


@either_way
def test_transposed_blocks(reverse, device):
    couplings, rhs = system(linear.BlockDiagonal, 33, (2,), 6, 3, device=device, reverse=not reverse)
    assert_right(
        block_diagonal.run(couplings.transpose(), rhs, reverse, SMALL_BLOCKS), couplings.transpose(), rhs, reverse
    )


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device):
    if device.type != "cuda":
        pytest.skip("takes 22 GB")
    far = 2**30 + 8
    for structure in (linear.Diagonal, linear.BlockDiagonal):
        couplings, rhs = system(structure, 4, (), 2, device=device)
        far_rhs = torch.empty(3 * far + 64, device=device).as_strided(rhs.shape, (far, 1)).copy_(rhs)
        far_data = torch.empty(2 * far + 64, device=device)
        far_data = far_data.as_strided(couplings.data.shape, (far, *couplings.data.stride()[1:])).copy_(couplings.data)
        for reverse in (False, True):
            actual = Kernel().solve_coupled(structure(far_data), far_rhs, reverse=reverse)
            assert_right(actual, couplings, rhs, reverse)


@every_structure
@either_way
def test_no_memory_is_read_before_it_is_written(structure, reverse, device, poisoned_memory):
    couplings, rhs = system(structure, 65, (2,), device=device, reverse=reverse)
    for small in (False, True):
        assert_right(Kernel(small).solve_coupled(couplings, rhs, reverse=reverse), couplings, rhs, reverse)


@every_structure
def test_the_same_system_has_the_same_solution(structure, device):
    couplings, rhs = system(structure, 65, (5,), device=device)
    first, second = (Kernel(small=True).solve_coupled(couplings, rhs) for _ in range(2))
    assert torch.equal(first, second)


@either_way
@pytest.mark.parametrize("length", [33, 97, *thorough(64, 65, 500)])
@pytest.mark.parametrize("channels", [1, 3, *thorough(17)])
def test_chunks_of_a_diagonal_system(length, channels, between_chunks, reverse, device, poisoned_memory):
    couplings, rhs = system(linear.Diagonal, length, (channels,), device=device, reverse=reverse)
    assert_right(in_small_chunks(couplings, rhs, reverse), couplings, rhs, reverse)


@pytest.mark.parametrize("rows", [4, *thorough(17)])
@pytest.mark.parametrize("hole", [1, 70, *thorough(40, 100)])
def test_chunks_whose_products_overflow(hole, rows, between_chunks, device, poisoned_memory):
    """The last program to arrive does them again, from the first chunk that is marked; channels have their own."""
    couplings, rhs = system(linear.Diagonal, 150, (rows,), device=device)
    couplings.data[hole, 3:] = 0
    couplings.data[hole + 1 : hole + 21, 3:] = 1e10
    rhs[hole + 1 : hole + 22, 3:] = 0
    assert torch.isfinite(expected(couplings, rhs, False)).all()
    assert_right(in_small_chunks(couplings, rhs, False), couplings, rhs, False)


@pytest.mark.gpu
class TestManyChunksAtOnce:
    """Of the programs of many chunks one is the last, whichever; only on a GPU does that vary."""

    @staticmethod
    def problem(gpu, channels, length=300_000):
        generator = torch.Generator(gpu).manual_seed(channels)
        data = 1.9 * torch.rand(length - 1, channels, device=gpu, generator=generator) - 0.95
        return data, torch.randn(length, channels, device=gpu, generator=generator)

    @staticmethod
    def overflow(data, rhs, at):
        """The states are 0 while the product of couplings overflows; in the first channel alone."""
        data[at, 0] = 0
        data[at + 1 : at + 21, 0] = 1e10
        rhs[at + 1 : at + 22, 0] = 0

    @staticmethod
    def assert_solved(found, data, rhs):
        wanted = linear.PCR().solve_coupled(linear.Diagonal(data.double()), rhs.double())  # which holds the products
        assert float((found - wanted).norm() / wanted.norm()) < 1e-6

    @pytest.mark.parametrize("channels", [1, 2, 5])
    @pytest.mark.parametrize("overflows", [False, True])
    def test_the_same_bits_every_time(self, channels, overflows, gpu):
        data, rhs = self.problem(gpu, channels)
        if overflows:
            self.overflow(data, rhs, 120_000)
        first = diagonal.solve_coupled(linear.Diagonal(data), rhs)
        self.assert_solved(first, data, rhs)
        for _ in range(20):
            assert torch.equal(first, diagonal.solve_coupled(linear.Diagonal(data), rhs))

    def test_a_graph_is_replayed_with_other_numbers(self, gpu):
        data, rhs = self.problem(gpu, 1)
        calm, terms = data.clone(), rhs.clone()
        diagonal.solve_coupled(linear.Diagonal(data), rhs)  # compiled before it is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            states = diagonal.solve_coupled(linear.Diagonal(data), rhs)
        for turn in range(4):
            data.copy_(calm)
            rhs.copy_(terms)
            if turn % 2:
                self.overflow(data, rhs, 1000 * turn)
            graph.replay()
            self.assert_solved(states, data, rhs)

    def test_two_streams_at_once(self, gpu):
        problems = [self.problem(gpu, 1), self.problem(gpu, 3, 200_000)]
        for problem in problems:
            self.overflow(*problem, 70_000)
        streams, found = [torch.cuda.Stream() for _ in problems], []
        torch.cuda.synchronize()
        for _ in range(10):
            for stream, (data, rhs) in zip(streams, problems, strict=True):
                with torch.cuda.stream(stream):
                    found.append(diagonal.solve_coupled(linear.Diagonal(data), rhs))
        torch.cuda.synchronize()
        for at, states in enumerate(found):
            assert torch.equal(states, found[at % 2])
        for states, problem in zip(found, problems, strict=False):
            self.assert_solved(states, *problem)


@pairwise(
    structure={each.__name__: each for each in STRUCTURES},
    reverse={"forwards": False, "reverse": True},
    small={"planned": False, "small chunks": True},
    hole=[1, 40],
)
def test_products_may_overflow(structure, hole, small, reverse, device):
    # From a coupling of 0 and no terms the state is 0, and stays 0 while the product of 1e10s overflows.
    couplings, rhs = system(structure, 65, (3,), device=device)
    couplings.data[hole] = 0
    couplings.data[hole + 1 : hole + 21] = 1e10
    couplings.data[hole + 1 : hole + 21, 1] = 0.1  # one row of the batch has nothing to repair
    rhs[hole + 1 : hole + 22] = 0
    rhs[hole + 3 : hole + 6, 1] = 1.0
    if reverse:
        couplings, rhs = structure(couplings.data.flip(0)), rhs.flip(0)
    assert torch.isfinite(expected(couplings, rhs, reverse)).all()
    actual = Kernel(small).solve_coupled(couplings, rhs, reverse=reverse)
    assert_right(actual, couplings, rhs, reverse)


@either_way
def test_many_chunks_of_blocks(reverse, device):
    """More than the repair looks at in one go; and their starts are a system that is cut into chunks, too."""
    couplings, rhs = system(linear.BlockDiagonal, 200, (), 4, device=device)
    couplings.data[150] = 0
    couplings.data[151:171] = 1e30
    rhs[151:172] = 0
    if reverse:
        couplings, rhs = linear.BlockDiagonal(couplings.data.flip(0)), rhs.flip(0)
    found = block_diagonal.run(couplings, rhs, reverse, block_diagonal.Tiling(chunk=2))
    assert_right(found, couplings, rhs, reverse)


def test_a_product_may_overflow_within_a_tile_and_not_up_to_its_end(device):
    # Four groups with these products: joined in pairs, all four are finite, but the second with the third is not.
    data, rhs = torch.ones(63, 1, device=device), torch.zeros(64, 1, device=device)
    rhs[0] = 1
    for group, factor in enumerate((1e-30, 1e30, 1e30, 1e-30)):
        data[4 * group + 1] = factor
    plan = diagonal.Tiling(steps=4, groups=8, channels=1, tiles=2, warps=1)
    actual = diagonal.run(linear.Diagonal(data), rhs, False, plan)
    assert_right(actual, linear.Diagonal(data), rhs, False)


@every_structure
def test_a_solution_that_overflows_stays_infinite_from_there_on(structure, device):
    couplings, rhs = system(structure, 60, (2,), device=device)
    couplings.data[20:40, 0] = 1e10
    reference = linear.ForwardSubstitution().solve_coupled(couplings, rhs)
    actual = Kernel(small=True).solve_coupled(couplings, rhs)
    assert not torch.isfinite(actual[30:, 0]).any()
    torch.testing.assert_close(actual[:21], reference[:21])
    torch.testing.assert_close(actual[:, 1], reference[:, 1])


@every_structure
@either_way
def test_gradients(structure, reverse, device):
    couplings, rhs = system(
        structure, 20, (2,), device=device, reverse=reverse, dtype=torch.float64, coupling_batch=(1,)
    )
    initial = torch.rand(2, 6, dtype=torch.float64, device=device)
    blocks = torch.cat([couplings.data[:1], couplings.data])

    def gradients(solver):
        leaves = [tensor.clone().requires_grad_() for tensor in (blocks, rhs, initial)]
        states = linear.solve(structure(leaves[0]), *leaves[1:], reverse=reverse, solver=solver)
        return states, *torch.autograd.grad(states.square().sum(), leaves)

    torch.testing.assert_close(gradients(Kernel(small=True)), gradients(linear.ForwardSubstitution()))


def test_nothing_to_solve(device):
    for couplings in (linear.Diagonal(torch.zeros(2, 0, 3)), linear.BlockDiagonal(torch.zeros(2, 0, 1, 3, 3))):
        on_device = type(couplings)(couplings.data.to(device))
        assert Kernel().solve_coupled(on_device, torch.zeros(3, 0, 3, device=device)).shape == (3, 0, 3)


class TestChannels:
    """What the kernels are told about batches: two strides, and no copy where two are enough."""

    def merge(self, *tensors):
        inner, found = as_channels(list(tensors), tensors[0].ndim - 1)
        copied = [channels.tensor is not tensor for channels, tensor in zip(found, tensors, strict=True)]
        return inner, [(channels.outer_stride, channels.inner_stride) for channels in found], copied

    def test_a_batch_laid_out_in_one_piece_is_one_dimension(self):
        assert self.merge(torch.zeros(5, 2, 3, 4)) == (24, [(0, 1)], [False])

    def test_broadcast_couplings_are_not_copied(self):
        rhs, data = torch.zeros(5, 2, 3, 4), torch.zeros(5, 1, 3, 4).expand(5, 2, 3, 4)
        assert self.merge(data, rhs) == (12, [(0, 1), (12, 1)], [False, False])

    def test_one_number(self):
        assert self.merge(torch.zeros(5, 1, 1)) == (1, [(0, 0)], [False])

    def test_only_what_does_not_fit_is_copied(self):
        rhs, data = torch.zeros(5, 2, 3, 4), torch.zeros(5, 2, 1, 4).expand(5, 2, 3, 4)
        assert self.merge(data, rhs) == (24, [(0, 1), (0, 1)], [True, False])


class TestPlan:
    @pytest.mark.parametrize("length", [1, 7, 1000, 16_384, 2**20])
    @pytest.mark.parametrize("channels", [1, 2, 17, 256, 2048, 10**6])
    def test_tiles_are_whole_and_cover_every_channel(self, length, channels):
        chosen = diagonal.tiling_for(length, channels)
        for size in (chosen.steps, chosen.groups, chosen.channels, chosen.warps):
            assert size & (size - 1) == 0
            assert size > 0
        assert chosen.tiles >= 1
        assert chosen.steps * chosen.groups * chosen.channels >= 32 or length < 32

    def test_many_channels_are_swept_once(self):
        chosen = diagonal.tiling_for(16_384, 2048)
        assert chosen.chunk >= 16_384
        assert chosen.channels == 16

    @pytest.mark.parametrize(("length", "channels"), [(2**20, 1), (16_384, 16), (65_536, 256)])
    def test_few_channels_are_cut_in_time(self, length, channels):
        chosen = diagonal.tiling_for(length, channels)
        programs = -(-length // chosen.chunk) * -(-channels // chosen.channels)
        assert 64 <= programs <= 1024

    def test_what_lies_between_chunks_is_swept_once(self):
        assert diagonal.tiling_for(512, 1, one_sweep=True).chunk >= 512

    def test_blocks_have_longer_chunks_the_more_there_are(self):
        assert block_diagonal.tiling_for(16_384, 1).chunk == block_diagonal.SHORTEST_CHUNK
        assert block_diagonal.tiling_for(16_384, 10**6).chunk == 16_384
        assert block_diagonal.tiling_for(3, 1).chunk == 3

    @pytest.mark.parametrize(("length", "channels"), [(1, 1), (16_384, 1), (2**20, 10**6)])
    def test_the_largest_blocks_fit_any_shared_memory(self, length, channels):
        """Each stage reads a block and a term to a lane ahead; the last of them makes room for changes of layout."""
        chosen = block_diagonal.tiling_for(length, channels)
        repair = block_diagonal.REPAIR_LANES * block_diagonal.REPAIR_STAGES
        numbers = block_diagonal.LARGEST * (block_diagonal.LARGEST + 1)
        assert 4 * numbers * max(chosen.lanes * chosen.stages, repair) <= 64 * 1024  # a Turing's, the smallest
