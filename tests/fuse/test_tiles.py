"""Steps on tiles: what their kernels find, interpreted or compiled, against the bare loop in float64."""

import pytest
import torch
from torch.utils import _pytree as pytree

from deeppcr.fuse.tile_program import TileProgram
from fuse.loops import Fused, by_loop
from fuse.tile_steps import STEPS, Draw
from kernel_support import error

# Of the interpreter, where iterates stray.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def compare(make, device, chunk=4, rtol=2e-5, **sizes):
    """States and gradients in float32 are those of the same loop in float64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        draw = Draw(dtype, device, **sizes)
        step, z0, xs = make(draw)
        if dtype == torch.float32:
            fused = Fused(step, z0, xs, length=draw.length)
            assert isinstance(fused.program, TileProgram)
            states = pytree.tree_leaves(fused.states(chunk))
        else:
            states = pytree.tree_leaves(by_loop(step, z0, xs, draw.length))
        generator = torch.Generator().manual_seed(2)
        weights = [torch.randn(each.shape, generator=generator).to(each) for each in states]
        gradients = torch.autograd.grad(states, draw.given, weights, allow_unused=True)
        found.append([*states, *gradients])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) is (theirs is None)
        assert ours is None or (ours.shape == theirs.shape and error(ours, theirs) < rtol)
    return fused


@pytest.mark.parametrize("name", STEPS)
def test_steps(name, device):
    compare(STEPS[name], device)
