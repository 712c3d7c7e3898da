"""Products of a filter's blocks lose digits that steps keep: the kernels see it where chunks join, and take the steps."""

import itertools

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
