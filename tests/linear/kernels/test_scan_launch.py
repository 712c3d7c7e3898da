"""Kernels of the scans that are launched again as they were compiled: right whatever the tensors hold, wherever they begin."""

from __future__ import annotations

import math
import random

import pytest
import torch

from deeppcr import linear
from kernel_support import Launches, misaligned, strided
from scan_problems import assert_right, either_way, system

# Where products overflow, NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr import launch
from deeppcr.linear.kernels import block_diagonal, diagonal, lookback

WAYS = {  # structure, module, plan, launches
    "one sweep": (linear.Diagonal, diagonal, diagonal.Tiling(steps=4, groups=4, channels=8, tiles=2, warps=1), 1),
    "chunks": (linear.Diagonal, diagonal, diagonal.Tiling(steps=4, groups=4, channels=8, tiles=1, warps=1), 2),
    "scalars": (linear.Scalar, diagonal, diagonal.Tiling(steps=4, groups=4, channels=8, tiles=1, warps=1), 2),
    "look-back": (
        linear.Diagonal,
        lookback,
        lookback.Tiling(steps=4, groups=4, channels=16, run=2, warps=1),
        3,
    ),
    "small blocks": (linear.BlockDiagonal, block_diagonal, block_diagonal.Tiling(chunk=8, lanes=32, warps=1), 4),
}
every_way = pytest.mark.parametrize(("structure", "kernels", "plan", "launches"), WAYS.values(), ids=WAYS)
LENGTH = 24


def assert_solved(kernels, plan, couplings, rhs, reverse=False):
    found = kernels.run(couplings, rhs, reverse, plan)
    assert_right(found, couplings, rhs, reverse)
    return found


@either_way
@every_way
def test_other_values_in_the_same_places(structure, kernels, plan, launches, reverse, compiled, device):
    for seed in range(3):
        torch.manual_seed(seed)
        couplings, rhs = system(structure, LENGTH, (3,), device=device, reverse=reverse)
        assert_solved(kernels, plan, couplings, rhs, reverse)
    assert compiled() == 2 * launches or device.type == "cuda"


@every_way
def test_other_strides_and_beginnings_are_compiled_anew(structure, kernels, plan, launches, compiled, device):
    couplings, rhs = system(structure, LENGTH, (3,), device=device)
    for _ in range(2):
        for place in (lambda tensor: tensor, misaligned, strided):
            assert_solved(kernels, plan, structure(place(couplings.data)), rhs)
            assert_solved(kernels, plan, couplings, place(rhs))
    assert len(launch._compiled) > launches


@every_way
def test_products_that_overflow_in_a_later_call(structure, kernels, plan, launches, compiled, device):
    calm, rhs = system(structure, LENGTH, (3,), device=device)
    assert_solved(kernels, plan, calm, rhs)
    data = calm.data.clone()
    data[5:17] *= 1e4  # whose product no float32 holds
    data[4], rhs[5:18] = 0, 0  # nor any state: it is 0 from here on
    wild = structure(data)
    found = assert_solved(kernels, plan, wild, rhs)
    assert torch.isfinite(found).all()
    assert compiled() == launches or device.type == "cuda"


@every_way
def test_two_results_do_not_share_memory(structure, kernels, plan, launches, compiled, device, poisoned_memory):
    problems = [system(structure, LENGTH, (3,), device=device) for _ in range(2)]
    found = [kernels.run(*problem, False, plan) for problem in (*problems, problems[0])]
    assert torch.equal(found[0], found[2])
    for result, problem in zip(found, problems, strict=False):
        assert_right(result, *problem, False)


def test_doubles_are_another_kernel(compiled, device):
    plan = WAYS["chunks"][2]
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
        couplings, rhs = system(linear.Diagonal, LENGTH, (3,), device=device)
        couplings, rhs = linear.Diagonal(couplings.data.to(dtype)), rhs.to(dtype)
        assert assert_solved(diagonal, plan, couplings, rhs).dtype == dtype
    assert compiled() == 4 or device.type == "cuda"


@either_way
@pytest.mark.parametrize("structure", [linear.Diagonal, linear.Scalar, linear.BlockDiagonal])
def test_public_calls_wherever_the_tensors_begin(structure, reverse, compiled, device, monkeypatch):
    """The couplings of a lone sequence begin 4 bytes after its blocks: at no multiple of 16 if those begin at one."""
    if device.type == "cpu":
        monkeypatch.setattr(linear.Fused, "refusal", lambda self, couplings: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    width = 2 if structure is linear.BlockDiagonal else 1
    for place in (lambda tensor: tensor, misaligned, lambda tensor: tensor, misaligned):
        couplings, rhs = system(structure, 7, (), width, device=device, reverse=reverse)
        outermost = couplings.data[-1:] if reverse else couplings.data[:1]
        data = torch.cat([couplings.data, outermost] if reverse else [outermost, couplings.data])
        found = linear.solve(structure(place(data)), place(rhs), reverse=reverse)
        assert_right(found, couplings, rhs, reverse)
    assert compiled() or device.type == "cuda"


@pytest.mark.parametrize("length", [33, 64, 2000])
def test_two_chunks_have_no_coupling_between_them(length, uncomputed):
    """The couplings between the chunks are then an empty tensor, which lies nowhere."""
    for _ in range(2):
        linear.solve(linear.BlockDiagonal(torch.zeros(length, 2, 4, 4)), torch.zeros(length, 8))


def test_what_is_launched_is_what_was_compiled(uncomputed):
    """Systems of all kinds, places and orders of dimensions; the stand-in for Triton looks at the arguments."""
    choose = random.Random(0)

    def somewhere(shape):
        order = choose.sample(range(len(shape)), len(shape)) if choose.random() < 0.3 else list(range(len(shape)))
        shift = choose.choice([0, 0, 1, 2, 3, 4])
        room = torch.zeros(math.prod(shape) + shift)[shift:].view([shape[at] for at in order])
        return room.permute([order.index(at) for at in range(len(shape))])

    for _ in range(400):
        structure = choose.choice([linear.Diagonal, linear.Scalar, linear.BlockDiagonal, linear.Dense])
        length, count, size = (choose.choice(each) for each in ([1, 2, 3, 16, 17, 40, 64], [1, 2, 4], [1, 2, 4]))
        width = count * size if structure is linear.BlockDiagonal else choose.choice([1, 2, 3, 4, 16])
        core = {linear.Scalar: (), linear.Diagonal: (width,), linear.Dense: (width, width)}
        batch = [choose.choice([1, 2, 4, 16]) for _ in range(choose.choice([0, 1, 2, 3]))]
        shared = [each if choose.random() < 0.7 else 1 for each in batch]
        data = somewhere([length, *shared, *core.get(structure, (count, size, size))])
        rhs, reverse = somewhere([length, *batch, width]), choose.random() < 0.5
        for _ in range(choose.choice([1, 2])):
            linear.solve(structure(data), rhs, reverse=reverse)


@pytest.mark.parametrize("structure", [linear.Diagonal, linear.Dense])
def test_numbers_that_are_stored_negated(structure, compiled, device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(linear.Fused, "refusal", lambda self, couplings: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    shape = (5, 4) if structure is linear.Diagonal else (5, 4, 4)
    data, rhs = (0.4 * torch.randn(each, dtype=torch.complex64, device=device) for each in (shape, (5, 4)))
    plain = linear.solve(structure(data.imag.contiguous()), rhs.imag.contiguous())
    for blocks, right in ((data.conj().imag, -rhs.imag), (-data.imag, rhs.conj().imag)):
        assert blocks.is_neg() or right.is_neg()
        for _ in range(2):
            found = linear.solve(structure(blocks), right)
            assert_right(found, structure(blocks[1:].resolve_neg()), right.resolve_neg(), False, rtol=1e-4)
    assert torch.isfinite(plain).all()


# What a call takes of the host: see test_launch.py.
@pytest.mark.parametrize(
    ("channels", "length", "launches"),
    [(1, 2**20, 2), (16, 16_383, 2), (16, 16_384, 3), (8, 2**20, 3), (64, 16_384, 3), (3, 8, 1)],
)
def test_launches_of_a_solve(channels, length, launches, uncomputed):
    with Launches() as made:
        linear.solve(linear.Diagonal(torch.zeros(length, channels)), torch.zeros(length, channels))
    assert made.count == launches
