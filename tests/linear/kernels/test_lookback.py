"""The scan that reads everything once against forward substitution in float64.

On a CPU the kernel is interpreted, one program after the other, so nobody ever waits; ``--device=cuda`` runs the real
thing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deeppcr import linear
from kernel_support import misaligned, offset, strided, thorough
from scan_problems import LENGTHS, assert_right, either_way, expected, system

# Where products overflow, NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr.linear.kernels import diagonal, lookback

#: tiles of 16 steps, 3 to a run: short systems have many of them
SMALL = lookback.Tiling(steps=4, groups=4, channels=16, run=3, warps=1)
#: few programs for a long system of few channels: to be interpreted
TALL = lookback.Tiling(steps=32, groups=32, channels=4, run=4, warps=4)
PLANS = {
    "many channels": lookback.choose(16_384, 2048),
    "few": lookback.choose(16_384, 64),
    "very few": lookback.choose(16_384, 16),
    "very few, long": lookback.choose(2**18, 32),
    "small tiles": SMALL,
}

both = pytest.mark.parametrize("structure", [linear.Diagonal, linear.Scalar])
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
unrepaired = pytest.mark.usefixtures("nothing_to_repair")


@pytest.fixture
def nothing_to_repair(monkeypatch):
    """What is not finite by mistake would be put right by the repair, and nobody would know."""

    def no_mark(system, marks, chunk):
        assert not marks.any()

    monkeypatch.setattr(lookback, "repair", no_mark)


@unrepaired
@both
@either_way
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length(structure, length, reverse, device):
    couplings, rhs = system(structure, length, (2,), device=device, reverse=reverse)
    # A program is interpreted in a tenth of a second.
    plan = SMALL if length < 100 else replace(SMALL, steps=16)
    assert_right(lookback.run(couplings, rhs, reverse, plan), couplings, rhs, reverse)


@unrepaired
@either_way
@pytest.mark.parametrize("length", [1, 129, *thorough(128, 1100)])
def test_as_planned(length, reverse, device):
    couplings, rhs = system(linear.Diagonal, length, (5,), 7, device=device, reverse=reverse)
    assert_right(lookback.run(couplings, rhs, reverse, lookback.Tiling()), couplings, rhs, reverse)


@unrepaired
@either_way
@pytest.mark.parametrize("length", [5000, *thorough(16_384)])
def test_a_long_system(length, reverse, device):
    couplings, rhs = system(linear.Diagonal, length, (), 3, device=device, reverse=reverse)
    assert_right(lookback.run(couplings, rhs, reverse, TALL), couplings, rhs, reverse)


@unrepaired
@either_way
@pytest.mark.parametrize("channels", [1, 5, 17, *thorough(2, 3, 16, 64)])
def test_every_number_of_channels(channels, reverse, device):
    couplings, rhs = system(linear.Diagonal, 75, (), channels, device=device, reverse=reverse)
    assert_right(lookback.run(couplings, rhs, reverse, SMALL), couplings, rhs, reverse)


@unrepaired
@pytest.mark.parametrize(
    "plan",
    [
        lookback.Tiling(steps=2, groups=1, channels=32, run=1, warps=1),
        lookback.Tiling(steps=3, groups=2, channels=64, run=2, warps=2),
        lookback.Tiling(steps=5, groups=8, channels=32, run=5, warps=4, stream=False, registers=None),
    ],
    ids=str,
)
def test_every_plan(plan, device):
    couplings, rhs = system(linear.Diagonal, 60, (), 70, device=device)
    assert_right(lookback.run(couplings, rhs, False, plan), couplings, rhs, False)


@unrepaired
@both
@either_way
@pytest.mark.parametrize("coupling_batch", [(1, 1), (2, 1), (1, 3)], ids=str)
def test_couplings_broadcast(structure, coupling_batch, reverse, device):
    couplings, rhs = system(structure, 60, (2, 3), device=device, reverse=reverse, coupling_batch=coupling_batch)
    assert_right(lookback.run(couplings, rhs, reverse, SMALL), couplings, rhs, reverse)


@unrepaired
@either_way
@pytest.mark.parametrize("place", [strided, offset, misaligned])
def test_inputs_may_lie_anywhere(place, reverse, device):
    couplings, rhs = system(linear.Diagonal, 60, (3,), device=device, reverse=reverse)
    moved, moved_rhs = linear.Diagonal(place(couplings.data)), place(rhs)
    assert_right(lookback.run(moved, moved_rhs, reverse, SMALL), couplings, rhs, reverse)


@unrepaired
@either_way
@every_plan
def test_no_memory_is_read_before_it_is_written(plan, reverse, device, poisoned_memory):
    couplings, rhs = system(linear.Diagonal, 200, (2,), device=device, reverse=reverse)
    assert_right(lookback.run(couplings, rhs, reverse, plan), couplings, rhs, reverse)


@every_plan
@pytest.mark.parametrize(("hole", "reverse"), [(1, False), (140, True), *thorough((1, True), (140, False))])
def test_products_may_overflow(hole, reverse, plan, device):
    # From a coupling of 0 and no terms the state is 0, and stays 0 while the product of 1e10s overflows.
    couplings, rhs = system(linear.Diagonal, 300, (3,), device=device)
    couplings.data[hole] = 0
    couplings.data[hole + 1 : hole + 21] = 1e10
    couplings.data[hole + 1 : hole + 21, 1] = 0.1  # one row of the batch has nothing to repair
    rhs[hole + 1 : hole + 22] = 0
    rhs[hole + 3 : hole + 6, 1] = 1.0
    if reverse:
        couplings, rhs = linear.Diagonal(couplings.data.flip(0)), rhs.flip(0)
    assert torch.isfinite(expected(couplings, rhs, reverse)).all()
    assert_right(lookback.run(couplings, rhs, reverse, plan), couplings, rhs, reverse)


def test_many_tiles(device):
    """More than the repair looks at in one go, and more words than one program clears."""
    couplings, rhs = system(linear.Diagonal, 140, (), 17, device=device)
    couplings.data[131] = 0
    couplings.data[132:137] = 1e30
    rhs[132:138] = 0
    plan = lookback.Tiling(steps=2, groups=1, channels=32, run=4, warps=1)
    assert_right(lookback.run(couplings, rhs, False, plan), couplings, rhs, False)


@every_plan
def test_a_solution_that_overflows_stays_infinite_from_there_on(plan, device):
    couplings, rhs = system(linear.Diagonal, 200, (2,), device=device)
    couplings.data[20:40, 0] = 1e10
    reference = linear.ForwardSubstitution().solve_coupled(couplings, rhs)
    actual = lookback.run(couplings, rhs, False, plan)
    assert not torch.isfinite(actual[30:, 0]).any()
    torch.testing.assert_close(actual[:21], reference[:21])
    torch.testing.assert_close(actual[:, 1], reference[:, 1])


def test_a_nan_that_looks_like_a_word_nobody_wrote_is_passed_on(device):
    # A NaN with all bits set in couplings and terms: the words made of it must not keep a later tile waiting.
    couplings, rhs = system(linear.Diagonal, 200, (), 6, device=device)
    ones = torch.tensor([-1], dtype=torch.int32, device=device).view(torch.float32)
    couplings.data[30:, 0], rhs[30:, 0] = ones, ones
    actual = lookback.run(couplings, rhs, False, SMALL)
    assert actual[31:, 0].isnan().all()
    clean = linear.Diagonal(couplings.data[:, 1:])
    assert_right(actual[:, 1:], clean, rhs[:, 1:], False)


def test_nothing_to_solve(device):
    couplings, rhs = linear.Diagonal(torch.zeros(2, 0, 3, device=device)), torch.zeros(3, 0, 3, device=device)
    assert lookback.run(couplings, rhs, False, SMALL).shape == (3, 0, 3)


def test_threads_must_not_share_what_they_wait_for():
    with pytest.raises(ValueError, match="4 warps for 4 groups of 16 channels: too many"):
        lookback.Tiling(groups=4, channels=16, warps=4)


@pytest.mark.parametrize(("dtype", "pays"), [(torch.float32, True), (torch.float32, False), (torch.float64, True)])
def test_chosen_where_it_pays_and_in_float32_only(dtype, pays, device, monkeypatch):
    couplings, rhs = system(linear.Diagonal, 40, (), 5, device=device, dtype=dtype)
    used, asked = [], []
    monkeypatch.setattr(lookback, "pays", lambda *sizes: asked.append(sizes) or pays)
    monkeypatch.setattr(lookback, "run", lambda *arguments: used.append(1) or lookback_run(*arguments))
    assert_right(diagonal.solve_coupled(couplings, rhs), couplings, rhs, False)
    assert bool(used) == (pays and dtype == torch.float32)
    assert asked == ([(40, 5)] if dtype == torch.float32 else [])


lookback_run = lookback.run


def test_pays_for_many_long_sequences_only():
    assert lookback.pays(16_384, 2048)
    assert lookback.pays(16_384, 16)
    assert not lookback.pays(2**20, 15)
    assert not lookback.pays(4, 2**17)
    assert lookback.pays(2000, 300)
    assert not lookback.pays(4, 2048)


def many(device, length=5000, channels=2100):
    generator = torch.Generator(device).manual_seed(0)
    data = 1.9 * torch.rand(length - 1, channels, device=device, generator=generator) - 0.95
    return linear.Diagonal(data), torch.randn(length, channels, device=device, generator=generator)


def reference(couplings, rhs, reverse=False):
    return linear.PCR().solve_coupled(linear.Diagonal(couplings.data.double()), rhs.double(), reverse=reverse)


def assert_close(actual, wanted):
    assert float((actual - wanted).norm() / wanted.norm()) < 1e-6


@pytest.mark.gpu
@either_way
@every_plan
def test_many_programs_at_once(plan, reverse, gpu):
    couplings, rhs = many(gpu)
    first = lookback.run(couplings, rhs, reverse, plan)
    assert_close(first, reference(couplings, rhs, reverse))
    # Whoever waits for whom, and for how long: the same bits.
    for _ in range(20):
        assert torch.equal(first, lookback.run(couplings, rhs, reverse, plan))


@pytest.mark.gpu
def test_two_streams_at_once(gpu):
    problems = [many(gpu, 5000, 700), many(gpu, 9000, 330)]
    wanted = [reference(*problem) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    found: list[list[torch.Tensor]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, problem, results in zip(streams, problems, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(lookback.run(*problem, False, SMALL))
    torch.cuda.synchronize()
    for results, want in zip(found, wanted, strict=True):
        for result in results:
            assert_close(result, want)


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_numbers(gpu):
    couplings, rhs = many(gpu)
    lookback.run(couplings, rhs, False, lookback.Tiling())  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        states = lookback.run(couplings, rhs, False, lookback.Tiling())
    for _ in range(3):
        couplings.data.mul_(-0.9)
        rhs.normal_()
        graph.replay()
        assert_close(states, reference(couplings, rhs))


@pytest.mark.gpu
@either_way
def test_offsets_beyond_32_bits(reverse, gpu):
    far = 2**30 + 8
    couplings, rhs = system(linear.Diagonal, 4, (), 2, device=gpu)
    far_rhs = torch.empty(3 * far + 64, device=gpu).as_strided(rhs.shape, (far, 1)).copy_(rhs)
    far_data = torch.empty(2 * far + 64, device=gpu).as_strided(couplings.data.shape, (far, 1)).copy_(couplings.data)
    for plan in PLANS.values():
        assert_right(lookback.run(linear.Diagonal(far_data), far_rhs, reverse, plan), couplings, rhs, reverse)
