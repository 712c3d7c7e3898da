"""Products of a filter's blocks lose digits that steps keep: the kernels see it where chunks join, and take the steps."""

import itertools
import math

import pytest
import torch

from deeppcr import linear
from kernel_support import thorough
from linear.test_refine import FILTERS, error, filtering, in_long_double, ordinary

#: Of signals below some hundred steps chunks are so short that what they lose is a few roundings.
LENGTHS = [300, *thorough(1000, 2000)]


def solved(structure, data, rhs, reverse, device):
    """By kernels: [L, 2, D], of filters side by side."""
    from deeppcr.linear.kernels import block_diagonal, dense

    couplings = (data[:-1] if reverse else data[1:]).to(device)
    if structure is linear.Dense:
        return dense.solve_coupled(linear.Dense(couplings), rhs.to(device), reverse=reverse).cpu()
    return block_diagonal.solve_coupled(
        linear.BlockDiagonal(couplings.unsqueeze(-3)), rhs.to(device), reverse=reverse
    ).cpu()


CASES = list(itertools.product(FILTERS, (linear.Dense, linear.BlockDiagonal), (False, True)))
#: Every pair of the first two filters, the structures and the directions.
FEW = [CASES[each] for each in (0, 3, 5, 6)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("which", "structure", "reverse"), [*FEW, *thorough(*(each for each in CASES if each not in FEW))]
)
def test_filters_are_as_exact_as_by_steps(which, length, structure, reverse, device):
    """One row beside another that turns, and has nothing to lose."""
    order, cutoff = which
    data, rhs = filtering(order, cutoff, torch.float32, length, (2,))
    data[:, 1] = torch.linalg.qr(torch.randn(length, order, order)).Q
    found = solved(structure, data, rhs, reverse, device)
    steps = linear.solve(linear.Dense(data), rhs, reverse=reverse, solver=linear.ForwardSubstitution())
    for row in range(2):
        expected = in_long_double(data[:, row], rhs[:, row], reverse)
        assert error(found[:, row], expected) <= 10 * error(steps[:, row], expected)


def resonating(length, width, batch):
    """Pairs of poles at 0.99, near the axis, in a companion's form, and noise."""
    blocks = torch.zeros(width, width)
    for at in range(0, width - 1, 2):
        blocks[at : at + 2, at : at + 2] = torch.tensor([[1.98 * math.cos(0.01 + 0.01 * at), -(0.99**2)], [1.0, 0.0]])
    return blocks.expand(length, *batch, width, width).contiguous(), torch.randn(length, *batch, width)


@pytest.mark.parametrize("width", [2, 8, *thorough(3, 4, 5, 6)])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_resonance_is_repaired_in_parallel(width, reverse, device):
    """In float64, which shows: steps lose more."""
    data, rhs = resonating(600, width, (2,))
    data[:, 1] = torch.linalg.qr(torch.randn(600, width, width)).Q
    found = solved(linear.Dense, data, rhs, reverse, device)
    steps = linear.solve(linear.Dense(data), rhs, reverse=reverse, solver=linear.ForwardSubstitution())
    expected = in_long_double(data[:, 0], rhs[:, 0], reverse)
    assert error(found[:, 0], expected) < 0.3 * error(steps[:, 0], expected)


def test_many_rows_and_wide_blocks_are_repaired_step_by_step():
    from deeppcr.linear.kernels import repair

    assert repair.lanes_for(2, 2) == (512, 8)
    assert repair.lanes_for(1000, 8) == (32, 4)
    assert repair.lanes_for(1000, 16) == repair.lanes_for(10_000, 2) == (1, 0)


@pytest.mark.parametrize("kind", ["contracting", "orthogonal", "growing", "up and down", "residual"])
@pytest.mark.parametrize("structure", [linear.Dense, linear.BlockDiagonal])
@pytest.mark.parametrize("width", [3, *thorough(1, 2, 8)])
def test_ordinary_systems_are_left_to_products(kind, structure, width, device, monkeypatch):
    from deeppcr.linear.kernels import block_diagonal, dense

    marked = []

    def watched(kernel, programs, arguments, *rest, launch=dense.launch, **options):
        launch(kernel, programs, arguments, *rest, **options)
        marked.extend(
            int(each.sum()) for each in arguments if isinstance(each, torch.Tensor) and each.dtype == torch.int8
        )

    for module in (dense, block_diagonal):
        monkeypatch.setattr(module, "launch", watched)
    solved(structure, ordinary(kind, 200, width, torch.float32), torch.randn(200, 2, width), False, device)
    assert marked
    assert not any(marked)
