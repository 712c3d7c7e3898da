"""Auto chooses a solver and says why."""

import pytest
import torch

from deeppcr import linear
from linear.conformance import assert_compiles
from linear.reference import random_blocks


def couplings(structure, steps, width=3, device="cpu"):
    """Those between ``steps`` unknowns; only their shape and device are looked at."""
    return random_blocks(structure, steps - 1, (), width, device=device)


@pytest.mark.parametrize(
    ("structure", "steps", "width", "device", "expected", "because"),
    [
        (linear.Dense, 2, 3, "cpu", linear.ForwardSubstitution(), "2 steps are too few"),
        (linear.Scalar, 8, 3, "cpu", linear.ForwardSubstitution(), "8 steps are too few"),
        (linear.Diagonal, 9, 300, "cpu", linear.PCR(), "diagonal blocks are cheap"),
        (linear.Scalar, 1000, 3, "cpu", linear.PCR(), "diagonal blocks are cheap"),
        (linear.Dense, 9, 40, "cpu", linear.PCR(), "few or narrow blocks are cheap"),
        (linear.Dense, 64, 40, "cpu", linear.PCR(), "few or narrow blocks are cheap"),
        (linear.Dense, 1000, 16, "meta", linear.PCR(), "few or narrow blocks are cheap"),
        (linear.BlockDiagonal, 1000, 34, "meta", linear.PCR(), "few or narrow blocks are cheap"),
        (linear.Dense, 1000, 17, "meta", linear.Hierarchical(chunk=4), "the least work wins"),
        (linear.Dense, 65, 3, "cpu", linear.Hierarchical(chunk=4), "the least work wins"),
        (linear.Dense, 65, 32, "cpu", linear.Hierarchical(chunk=4), "the least work wins"),
        (linear.BlockDiagonal, 65, 34, "cpu", linear.Hierarchical(chunk=4), "the least work wins"),
        (linear.Dense, 65, 33, "cpu", linear.Hierarchical(chunk=2), "the least work wins"),
    ],
)
def test_choice_and_reason(structure, steps, width, device, expected, because):
    solver, reason = linear.Auto().choose(couplings(structure, steps, width, device))
    assert solver == expected
    assert because in reason
    assert len(reason.split()) > 4


@pytest.mark.parametrize("steps", [5, 40, 100])
def test_auto_does_what_it_chose(steps, device):
    blocks = random_blocks(linear.Dense, steps, device=device)
    rhs = torch.randn(steps, 3, dtype=torch.float64, device=device)
    chosen, _ = linear.Auto().choose(blocks[1:])
    expected = linear.solve(blocks, rhs, solver=chosen)
    torch.testing.assert_close(linear.solve(blocks, rhs), expected, rtol=0, atol=0)


def test_auto_compiles(device):
    data = random_blocks(linear.Dense, 12, device=device).data
    rhs = torch.randn(12, 3, dtype=torch.float64, device=device)
    assert_compiles(lambda data, rhs: linear.solve(linear.Dense(data), rhs), (data, rhs))
