"""The cost model: arithmetic on given times."""

import math
from dataclasses import asdict, replace

import pytest
import torch

from deeppcr.nn import calibrate
from deeppcr.nn.calibrate import Kind
from deeppcr.nn.cost import Times, candidates, choose, expected_rounds, interpolate
from deeppcr.nn.kernel_way import choose as choose_by_shape

#: A device that holds 64 chunks at a time.
TIMES = Times(
    host_loop=50e-6,
    host_parallel=100e-6,
    rows=(1.0, 64.0),
    block=(0.2e-6, 0.2e-6),
    programs=(1.0, 64.0, 128.0),
    step=(0.5e-6, 0.5e-6, 1e-6),
    chunks=(1.0, 100.0, 10000.0),
    solve=(10e-6, 20e-6, 200e-6),
)
NETWORK = {"skip": 1, "activation": "relu", "residual": False, "most_chunks": 2**20}


def decide(blocks, rows=1, times=TIMES, **settings):
    return choose(times, "made up", blocks=blocks, rows=rows, **{**NETWORK, **settings})


def test_times_add_up():
    assert TIMES.loop(1000, 1) == pytest.approx(50e-6 + 1000 * 0.2e-6)
    assert TIMES.loop(1000, 128) == pytest.approx(50e-6 + 1000 * 0.4e-6)  # two programs where there is room for one
    device = 10 * interpolate(TIMES.programs, TIMES.step, 100) + 20e-6
    assert TIMES.parallel(1000, 10, 1, 1) == 100e-6  # the host hides it
    assert TIMES.parallel(1000, 10, 1, 3) == pytest.approx(60e-6 + 3 * device)


def test_more_work_never_takes_less_time():
    for rows in (1, 2, 50, 3000):
        lengths = [TIMES.parallel(blocks, 16, rows, 2) for blocks in range(32, 5000, 16)]
        assert lengths == sorted(lengths)
        loops = [TIMES.loop(blocks, rows) for blocks in range(1, 5000, 7)]
        assert loops == sorted(loops)
    by_rows = [TIMES.parallel(4096, 32, rows, 1) for rows in range(1, 4096, 5)]
    assert by_rows == sorted(by_rows)
    assert by_rows[-1] > 100 * by_rows[0]


def test_interpolation():
    assert interpolate((1, 4, 16), (1, 2, 2), 2) == pytest.approx(math.sqrt(2))
    assert interpolate((1, 4, 16), (1, 2, 2), 8) == pytest.approx(2)
    assert interpolate((1, 4, 16), (1, 2, 2), 64) == pytest.approx(8)
    assert interpolate((2, 4), (0, 8), 3) == pytest.approx(8 * math.log2(1.5))


@pytest.mark.parametrize(
    ("blocks", "chunk", "skip", "activation", "residual", "expected"),
    [
        (256, 32, 1, "relu", False, 1),
        (256, 16, 1, "relu", False, 2),
        (256, 8, 1, "relu", False, 2),
        (64, 2, 1, "relu", False, 3),
        (64, 16, 1, "tanh", False, 2),
        (64, 8, 1, "sigmoid", False, 1),
        (16, 8, 1, "tanh", False, 1),  # two chunks: the second start is exact after one pass
        (16, 4, 1, "tanh", False, 2),
        (256, 16, 4, "relu", True, 4),
        (1, 1, 1, "relu", False, 1),
    ],
)
def test_expected_rounds(blocks, chunk, skip, activation, residual, expected):
    assert expected_rounds(blocks, chunk, skip, activation, residual) == expected


def test_candidates():
    assert list(candidates(1, 100)) == [1]
    assert list(candidates(2, 100)) == [1]
    assert list(candidates(7, 100)) == [1, 2, 4]
    assert list(candidates(64, 10)) == [8, 16, 32]
    assert list(candidates(64, 0)) == [32]  # one is left whatever the room: somebody asked for parallel passes


def test_the_loop_for_shallow_networks_and_chunks_for_deep_ones():
    modes = [decide(2**k).mode for k in range(15)]
    assert modes == sorted(modes, reverse=True)  # "sequential" first
    assert {modes[0], modes[4], modes[14]} == {"sequential", "parallel"}
    assert decide(2**14).mode == "parallel"


def test_the_choice_is_the_best_of_all():
    for blocks in (100, 1000, 16384):
        choice = decide(blocks)

        def seconds(chunk, blocks=blocks):
            return TIMES.parallel(blocks, chunk, 1, expected_rounds(blocks, chunk, 1, "relu", False))

        best = min(seconds(2**k) for k in range(15) if 2**k < blocks)
        assert best <= seconds(choice.chunk) <= 1.05 * best
        assert choice.mode == ("parallel" if seconds(choice.chunk) < TIMES.loop(blocks, 1) else "sequential")


def test_a_full_device_prefers_the_loop():
    assert decide(4096, rows=1).mode == "parallel"
    assert decide(4096, rows=4096).mode == "sequential"


def test_a_slow_host_prefers_one_launch():
    slow = replace(TIMES, host_parallel=10e-3)
    assert decide(16384).mode == "parallel"
    assert decide(16384, times=slow).mode == "sequential"


@pytest.mark.parametrize("options", [{}, {"skip": 4, "residual": True}], ids=["layers", "residual blocks"])
def test_a_host_that_hides_the_device_leaves_it_the_faster_chunks(options):
    """Every call takes the host as long: the chunks count all the same, in a CUDA graph, say."""
    for blocks in (1000, 4096, 16384):
        hidden = decide(blocks, times=replace(TIMES, host_parallel=1.0), **options).chunk
        no_host = decide(blocks, times=replace(TIMES, host_parallel=0.0), **options).chunk
        assert hidden == no_host < blocks / 2


def test_the_largest_of_chunks_that_take_as_long():
    flat = replace(TIMES, step=(1e-12,) * 3, solve=(10e-6,) * 3)
    assert decide(4096, times=flat).chunk == 2048
    rising = replace(flat, step=(1e-8,) * 3)  # of the chunks with one round, 1 us in 10 for each 100 blocks
    assert decide(4096, times=rising).chunk == 64


def test_a_chunk_that_is_given_is_kept():
    choice = decide(4096, chunk=3)
    assert choice.chunk == 3
    assert choice.backward_chunk == 3
    assert "chunks of 3," in choice.why


def test_a_backward_pass_of_a_residual_network_is_one_round():
    for blocks, rows, most_chunks in (
        (64, 1, 2**20),
        (128, 1, 2**20),
        (256, 40, 2**20),
        (4096, 1, 2**20),
        (4096, 1, 16),
    ):
        choice = decide(blocks, rows, skip=4, residual=True, most_chunks=most_chunks)
        every = {chunk: TIMES.round(blocks, chunk, rows) for chunk in candidates(blocks, most_chunks)}
        assert min(every.values()) <= every[choice.backward_chunk] <= 1.05 * min(every.values())
        back = 0.25 * TIMES.host_parallel + every[choice.backward_chunk]
        assert choice.backward == ("parallel" if back < TIMES.walk(blocks, rows) else "sequential")
    choice = decide(256, skip=4, residual=True)
    assert (choice.mode, choice.backward) == ("sequential", "parallel")
    assert choice.backward_chunk < choice.chunk
    assert decide(64, skip=4, residual=True).backward == decide(1, skip=4, residual=True).backward == "sequential"
    assert decide(256, skip=4, residual=True, chunk=64).backward_chunk == 64


def test_other_networks_go_back_as_they_went_forward():
    for blocks in (1, 64, 1000, 16384):
        choice = decide(blocks)
        assert (choice.backward, choice.backward_chunk) == (choice.mode, choice.chunk)


@pytest.mark.parametrize(
    ("width", "blocks", "rows", "expected", "chunk"),
    [
        (64, 128, 1, "sequential", None),
        (65, 127, 1, "sequential", None),
        (65, 128, 1, "parallel", 8),
        (128, 511, 1, "parallel", 8),
        (128, 512, 1, "parallel", 16),
        (129, 63, 1, "sequential", None),
        (129, 64, 1, "parallel", 8),
        (256, 64, 2, "sequential", None),
    ],
)
def test_wide_layers_go_back_in_chunks_earlier(width, blocks, rows, expected, chunk):
    choice = choose_by_shape(torch.Size((blocks, width, width)), rows, "relu", "auto", 2**30, torch.device("cpu"))
    assert (choice.mode, choice.backward) == ("sequential", expected)
    assert choice.backward_chunk == (choice.chunk if chunk is None else chunk)
    given = choose_by_shape(torch.Size((blocks, width, width)), rows, "relu", 2, 2**30, torch.device("cpu"))
    assert (given.backward, given.backward_chunk) == (given.mode, 2), "with a chunk of the user's nothing was measured"


def test_the_reason_in_words():
    choice = decide(16384)
    assert choice.why.startswith("expected: 0.")
    assert f"in chunks of {choice.chunk}, 3.3 ms one layer after the other (made up)" in choice.why
    assert "one block after the other" in decide(64, skip=4, residual=True).why


def test_scaling():
    twice = TIMES.scaled(processors=2, clock=0.5)
    assert twice.loop(1000, 1) - twice.host_loop == pytest.approx(2 * (TIMES.loop(1000, 1) - TIMES.host_loop))
    assert twice.step_of(128) == pytest.approx(2 * TIMES.step_of(64))
    assert TIMES.of_blocks(4).loop(250, 1) == pytest.approx(TIMES.loop(1000, 1))


@pytest.mark.parametrize(
    "change",
    [
        {"block": (1e-6,)},
        {"rows": (), "block": ()},
        {"rows": (64.0, 1.0)},
        {"host_loop": float("nan")},
        {"step": (-1e-6, 0.0, 0.0)},
        {"solve": "fast"},
        {"rows": 3.0},
    ],
)
def test_times_that_make_no_sense(change):
    with pytest.raises(ValueError, match=r"times|could not convert"):
        Times.from_json(asdict(TIMES) | change)
    with pytest.raises(ValueError, match="times"):
        Times.from_json({})


class TestBuiltIn:
    """What is taken without a measurement."""

    @pytest.mark.parametrize("width", [1, 4, 16, 33, 64, 128, 256])
    def test_it_is_sensible(self, width):
        device = torch.device("cpu")
        kind = Kind.of(width, "tanh", 1, False)
        times, source = calibrate.built_in(device, kind)
        assert "H200" in source
        assert decide(16, times=times).mode == "sequential"
        assert decide(16384, times=times).mode == "parallel"
        assert 16 <= decide(16384, times=times).chunk <= 1024

    def test_it_goes_by_shape(self):
        shape, device = torch.Size((1024, 4, 16, 16)), torch.device("cpu")
        first = choose_by_shape(shape, 8, "relu", "auto", 2**30, device)
        assert choose_by_shape(shape, 8, "relu", 5, 2**30, device).chunk == 5
        assert choose_by_shape(torch.Size((3, 16, 16)), 8, "relu", 5, 2**30, device).chunk == 3
        assert choose_by_shape(shape, 4096, "relu", "auto", 2**30, device) != first
