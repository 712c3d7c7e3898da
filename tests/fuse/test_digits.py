"""After how many steps states have digits, as the kernels note it, is what the states themselves say."""

import pytest
import torch

import deeppcr.nn
from deeppcr import Newton
from deeppcr.fuse import digits
from deeppcr.tolerance import Tolerance
from kernel_support import thorough

pytestmark = pytest.mark.usefixtures("kernels")


class Shape:
    def __init__(self, tiled):
        self.tiled = tiled


class Program:
    def __init__(self, channels):
        self.channels = channels


class Run:
    """As much of one as is read."""

    def __init__(self, initial, tiled, channels, leaves):
        self.initial, self.shape, self.program, self.leaves = initial, Shape(tiled), Program(channels), leaves


def noted(states, initial, tolerance, *, chunk, channels, tiled, leaves):
    """By the kernel; sizes as lanes note them: [N, K, B, C], or those of tiles [N, B, D]."""
    length, rows, width = states.shape
    padded = torch.cat([states, states.new_zeros(-length % chunk, rows, width)])
    sizes = padded.abs().view(-1, chunk, rows, width).amax(1)
    chunks = len(sizes)
    if not tiled:
        sizes = sizes.view(chunks, rows, width // channels, channels).transpose(1, 2)
    known = torch.full((rows,), -7, dtype=torch.int32, device=states.device)
    run = Run(initial, tiled, channels, leaves)
    digits.note_known_steps(run, states, sizes.contiguous().view(-1), known, chunks, tolerance)
    return known.tolist()


def reference(states, initial, tolerance, leaves):
    """Step by step, as ``Tolerance.known_steps`` says."""
    fewest = torch.full((states.shape[1],), len(states))
    numbers = torch.arange(1, len(states) + 1, device=states.device)
    for part, first in zip(states.split(leaves, -1), initial.split(leaves, -1), strict=True):
        scale = torch.maximum(part.abs().amax(0), first.abs())
        fewest = torch.minimum(fewest, tolerance.known_steps(part, scale, numbers).cpu())
    return fewest.tolist()


PLACES = {
    "elementwise": (6, 6, False, (6,)),
    "narrow": (3, 1, False, (3,)),
    "several tensors": (6, 3, False, (3, 3)),
    "tiles": (12, 12, True, (12,)),
    "tiles of two tensors": (10, 10, True, (4, 6)),
    "wide": (150, 150, False, (150,)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_kernel_notes(place, dtype, device):
    width, channels, tiled, leaves = PLACES[place]
    tolerance = Tolerance(0.0, 1e-6)
    generator = torch.Generator().manual_seed(0)
    for length, chunk in ((1, 1), (37, 5), (170, 32)):
        states = torch.randn(length, 7, width, generator=generator, dtype=dtype).to(device)
        initial = torch.randn(7, width, generator=generator, dtype=dtype).to(device)
        t = torch.arange(length, device=device, dtype=dtype).view(-1, 1)
        states[:, 1] *= torch.exp(-40 * t / length)  # dies out
        states[length // 2 :, 2] = 0  # ends in zeros, which need no digits
        states[:, 3] *= torch.exp(-40 * t / length)
        states[-1:, 3] = 0
        initial[4] = 1e12  # hides all that comes after it
        states[:, 5, :2] *= torch.exp(
            -90 * t / length
        )  # a part of it dies out: in a tensor of more numbers nothing is lost
        states[:, 6] = 0
        initial[6] = 0
        expected = reference(states, initial, tolerance, leaves)
        assert noted(states, initial, tolerance, chunk=chunk, channels=channels, tiled=tiled, leaves=leaves) == expected
        if length == 170:
            assert expected[0] == expected[2] == expected[6] == length
            assert 0 < expected[1] < length
            assert expected[3] == expected[1] or expected[3] < length
            assert expected[4] == 0


def test_a_tolerance_with_an_absolute_part(device):
    tolerance = Tolerance(1e-3, 1e-6)
    states = torch.logspace(0, -8, 90, dtype=torch.float64).view(-1, 1, 1).to(device)
    initial = torch.ones(1, 1, dtype=torch.float64, device=device)
    expected = reference(states, initial, tolerance, (1,))
    assert noted(states, initial, tolerance, chunk=8, channels=1, tiled=False, leaves=(1,)) == expected
    assert 0 < expected[0] < 90


@pytest.mark.parametrize("kind", ["DiagonalGRU", "DiagonalLSTM", *thorough("GRU", "LSTM")])
def test_modules_tell_what_their_states_say(kind, device, monkeypatch):
    """Without a kernel for it they are asked operation by operation."""
    module = getattr(deeppcr.nn, kind)(2, 3, mode="parallel", newton=Newton(chunk=4)).to(device)
    with torch.no_grad():
        for each in module.parameters():
            each.mul_(0.2)
        module.bias_ih_l0.zero_()
        getattr(module, "bias_hh_l0", module.bias_ih_l0).zero_()
        x = torch.randn(40, 2, 2, generator=torch.Generator().manual_seed(1)).to(device)
        x[4:, 1] = 0  # the second row dies out
        for _ in range(3):
            module(x)
        (short,) = module.solutions
        monkeypatch.setattr(deeppcr.fuse.run.Run, "leaves", property(lambda self: (), lambda self, value: None))
        module(x)
        (long,) = module.solutions
    assert short.plan.evaluation.startswith("fused kernels")
    assert short.known_steps.tolist() == long.known_steps.tolist()
    assert short.known_steps[0] == 40 > short.known_steps[1]
    assert short.message == long.message
