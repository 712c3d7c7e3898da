"""How long chunks are, when they are tried again, what is believed of their corrections, and where the loop takes over."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deeppcr import Newton
from deeppcr.fuse import kinds
from deeppcr.fuse.kinds import Kind, first_chunk
from deeppcr.fuse.run import solve
from fuse.compared import normal
from fuse.loops import Fused, by_loop
from kernel_support import error, thorough

# Of the interpreter, where iterates stray, or nothing is divided by nothing.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.thorough
def test_chunks_grow_where_they_do_not_join(device):
    """A loop that amplifies errors: after rolls, larger chunks; and the next solve of the kind begins with those."""
    step = lambda z: 3.9 * z * (1 - z)  # noqa: E731
    fused = Fused(step, torch.tensor([[0.3, 0.31]], dtype=torch.float64, device=device), length=70)
    found = fused.solve(2)
    assert not found.left
    assert found.chunk == fused.kind.chunk == 8
    assert torch.allclose(found.states[1:], step(found.states[:-1]), rtol=1e-12, atol=0)


def test_larger_chunks_go_on_from_the_states_of_smaller_ones(device, monkeypatch):
    """Where those leave few lanes; and the next solve of the kind takes no more passes of either than it needs."""
    monkeypatch.setattr(kinds, "_ROLLS", (0,))
    rate = torch.tensor([[1.5, 1.6, 1.7, 1.8, 2.95]], dtype=torch.float64, device=device)
    z0 = torch.full_like(rate, 0.3)
    step = lambda z: rate * z * (1 - z)  # noqa: E731
    fused = Fused(step, z0, length=70)
    found = fused.solve(2)
    assert not found.left
    assert fused.kind.chunk == 8
    (stage,) = fused.kind.before
    assert stage.chunk == 2
    passes = found.passes
    again = solve(fused.run(), fused.kind, Newton().tolerance(torch.float64))
    assert not again.left
    assert again.passes <= passes
    from_guess = fused.run().in_parallel(Kind(70, 8), Newton().tolerance(torch.float64))
    assert from_guess.left == 1
    for states in (found.states, again.states):
        assert torch.allclose(states[1:], step(states[:-1]), rtol=1e-11, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_counts_for_what_it_moves(dtype, device):
    """A spring at rest far from zero: what its place rounds to moves its speed, of which no digits are left."""

    def step(z):
        place, speed = z.unbind(-1)
        speed = speed - 0.1 * ((place - 100.0) + speed)
        return torch.stack([place + 0.1 * speed, speed], -1)

    z0 = torch.tensor([[100.5, 0.0], [99.9, 0.2]], dtype=dtype, device=device)
    fused, length = Fused(step, z0, length=320), 320
    tolerance = replace(Newton().tolerance(dtype), local=True)
    found = fused.run().in_parallel(Kind(length, 16, 2), tolerance)
    assert found.floored >= 1  # one by one, corrections go up and down, or not
    assert found.left + found.floored == 2
    found = solve(fused.run(), Kind(length, 16, 2), tolerance)
    right = by_loop(step, z0, length=length)
    assert (found.states - right).abs().max() <= 300 * 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("size", "local"), [(1e3, False), (1e6, True), *thorough((1.0, False), (1.0, True), (1e3, True), (1e6, False))]
)
def test_a_large_number_that_is_exact_hides_no_signal(size, local, device):
    """A constant beside it rounds to nothing, whatever its size: what the other misses is not its rounding."""

    def step(z, x):
        constant, signal = z.unbind(-1)
        return torch.stack([constant, 0.8 * torch.sin(1.6 * signal) + torch.cos(constant) * x], -1)

    z0, xs = (
        torch.tensor([[size, 0.3]], device=device).repeat(16, 1),
        2 * normal(48, 16, dtype=torch.float32, device=device),
    )
    tolerance = replace(Newton().tolerance(torch.float32), local=local)
    found = solve(Fused(step, z0, xs).run(), Kind(48, 4), tolerance)
    errors = (found.states - by_loop(step, z0, xs, length=48)).abs()[..., 1].amax(0)
    assert errors.max() <= 1e-4


def test_what_is_tried_before_the_loop():
    kind = Kind(length=4096, chunk=64)
    tried = []
    while kind.try_harder(width=1):
        tried.append((kind.chunk, kind.rolls))
    assert tried == [(64, 2), (64, 4), (64, 8), (256, 0), (256, 2), (256, 4), (256, 8)]
    assert kind.chunk == 4096


def test_chunks_are_tried_again_after_8_solves_then_16_and_32():
    """Each time once, with the chunk that was tried first; what works is as new."""
    kind = Kind(length=4096, chunk=64)
    while kind.try_harder(width=1):
        pass
    tried = []
    for number in range(70):
        kind.begin()
        if not kind.gave_up:
            tried.append((number, kind.chunk, kind.rolls))
            assert not kind.try_harder(width=1)
        else:
            kind.sufficed(0)
        assert kind.chunk == 4096
    assert tried == [(8, 64, 0), (25, 64, 0), (58, 64, 0)]
    while kind.gave_up:
        kind.begin()
    kind.sufficed(3)
    assert kind.try_harder(width=1)


def test_a_loop_that_was_chaotic_is_solved_in_parallel_once_it_is_not(device, monkeypatch):
    monkeypatch.setattr(kinds, "_PATIENCE", 2)
    rate = torch.tensor([[3.9]], dtype=torch.float64, device=device)
    z0 = torch.tensor([[0.3]], dtype=torch.float64, device=device)
    step = lambda z: rate * z * (1 - z)  # noqa: E731
    problem = Fused(step, z0, length=60)
    kind, passes = Kind(60, 4, patience=2), []
    for value in (3.9, 3.9, 3.9, 0.5, 0.5, 3.9):
        rate.fill_(value)
        found = solve(problem.run(), kind, Newton().tolerance(torch.float64))
        passes.append(found.passes)
        assert torch.allclose(found.states, torch.cat([step(z0)[None], step(found.states[:-1])]), rtol=1e-9, atol=1e-10)
    assert [number > 0 for number in passes] == [True, False, False, True, True, True]
    assert kind.gave_up


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("length", [1, 2, 63, 1000, 10**6])
@pytest.mark.parametrize("rows", [1, 1000])
def test_a_chunk_is_no_longer_than_the_loop(length, rows, elementwise):
    program = SimpleNamespace(elementwise=elementwise, parts=SimpleNamespace(tiled=False))
    assert 1 <= first_chunk(length, rows, program) <= length


def test_chunks_of_a_step_that_reads_much_are_longer(device):
    """Gradient descent with 200 rows of data: as many chunks as a GPU has processors; what reads a matrix of its width has shorter ones."""
    data, z0 = torch.zeros(200, 20, device=device), torch.zeros(1, 20, device=device)
    much = Fused(lambda z: z - torch.sigmoid(z @ data.mT) @ data, z0, length=5000)
    little = Fused(lambda z: torch.sigmoid(z @ data[:20]), z0, length=5000)
    assert first_chunk(5000, 1, much.program, local=False) == 48
    assert first_chunk(5000, 1, much.program, local=True) == 16  # whose digits are found by short ones
    assert first_chunk(5000, 1, little.program, local=False) == 16
    assert first_chunk(7, 1, much.program, local=False) == 7


def test_the_loop_takes_over_for_lanes_that_are_not_settled_only(device):
    """A chaotic row beside one that contracts: of that nothing is computed again."""
    rate = torch.tensor([[3.9], [1.5]], dtype=torch.float64, device=device)
    z0 = torch.tensor([[0.3], [0.4]], dtype=torch.float64, device=device)
    step = lambda z: rate * z * (1 - z)  # noqa: E731
    fused = Fused(step, z0, length=60)
    found = fused.solve(2)
    assert found.left == 1
    assert torch.allclose(found.states, torch.cat([step(z0)[None], step(found.states[:-1])]), rtol=1e-11, atol=0)
    assert error(found.states[:, 1], by_loop(step, z0, length=60)[:, 1]) < 1e-9
    assert fused.kind.gave_up  # the next time it is the loop at once
    assert fused.run().in_parallel(fused.kind, Newton().tolerance(torch.float64)).passes == 0


def test_the_loop_takes_over_right_behind_what_is_exact(device):
    """Of a step that jumps: corrections lead nowhere, and not even the next state is near."""
    step = lambda z: torch.frac(3 * z + 0.1)  # noqa: E731
    z0 = torch.rand(5, 1, dtype=torch.float64, device=device)
    problem = Fused(step, z0, length=60).run()
    found = problem.in_parallel(
        Kind(60, 2), Newton().tolerance(torch.float64)
    )  # without roll-outs, by which more is exact
    assert found.left == 5
    problem.loop(found.states, found)
    assert torch.allclose(found.states, torch.cat([step(z0)[None], step(found.states[:-1])]), rtol=0, atol=1e-12)


def test_corrections_far_beyond_the_states_are_not_believed(device):
    """Of a step whose states stay below 80, and whose linearisation over a chunk leads to millions."""
    step = lambda z: 40 * torch.sin(z) + 0.5 * z  # noqa: E731
    problem = Fused(step, 1 + torch.rand(5, 1, dtype=torch.float64, device=device), length=24).run()
    found = problem.in_parallel(Kind(24, 3), Newton().tolerance(torch.float64), most=2)
    assert 1 < found.states.abs().max() <= 0.5 * 10 * 80 + 40  # a step after the start of a chunk


def test_local_digits_are_those_of_every_chunk(device):
    """Of states that die out: what is rounding beside the largest so far is none beside those of a chunk."""
    step = lambda z: 0.2 * torch.sin(z)  # noqa: E731
    problem = Fused(step, torch.ones(1, 1, dtype=torch.float64, device=device), length=40)
    expected, tolerance = by_loop(step, problem.z0, length=40), Newton(rtol=1e-9).tolerance(torch.float64)

    def digits_lost(found):
        return float(((found.states - expected) / expected).abs().max())

    found = problem.run().in_parallel(Kind(40, 4), tolerance)
    assert (found.left, found.floored) == (0, 0)
    assert digits_lost(found) > 1
    found = problem.run().in_parallel(Kind(40, 4), replace(tolerance, local=True))
    assert (found.left, found.floored) == (1, 0)
    assert digits_lost(solve(problem.run(), Kind(40, 4), replace(tolerance, local=True))) < 1e-8


@pytest.mark.parametrize(
    ("seed", "length", "rtol", "floored"),
    [
        (2, 24, 1e-5, False),  # the last correction is a tenth of what is allowed
        (3, 128, 1e-6, False),  # one is twice what is allowed, when chunks join to the last digits for the first time
        (2, 24, 1e-6, True),  # so it is here, and there is no pass left
    ],
)
def test_a_correction_that_still_shrinks_is_no_floor_of_rounding(seed, length, rtol, floored, device):
    generator = torch.Generator().manual_seed(seed)
    z0, xs = (torch.randn(*shape, 2, 1, generator=generator).to(device) for shape in ((), (length,)))
    problem = Fused(lambda z, x: 0.9 * torch.sin(z) + x, z0, xs)
    found = problem.solve(4, newton=Newton(rtol=rtol))
    assert found.left == 0
    # Where it settles at its last pass hangs by the last digits of a sine, which a GPU rounds otherwise.
    if device.type == "cpu" or not floored:
        assert bool((found.notes.taken < 0).any()) is bool(found.floored) is floored
    assert error(found.states.squeeze(-1), by_loop(problem.step, z0, xs).squeeze(-1)) < 1e-6
