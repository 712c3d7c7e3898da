"""Systems of diagonal, scalar and block-diagonal couplings for the tests of the scans, and what solves them."""

from __future__ import annotations

import pytest
import torch

from deeppcr import linear
from kernel_support import thorough

LENGTHS = [1, 2, 65, *thorough(3, 63, 64, 1000)]

either_way = pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "reverse"])


def system(
    structure, length, batch=(), width=6, size=2, *, device, dtype=torch.float32, coupling_batch=None, reverse=False
):
    """Couplings and right-hand side of any sign, yet no state is a difference: each is right to its own last digits.

    With signs s_t for every entry, ``s_t A s_{t-1}`` and ``s_t b`` have the solution ``s_t z``; A, b, z positive.
    """
    coupling_batch = batch if coupling_batch is None else coupling_batch
    signs = torch.randn(length, *(1,) * len(batch), width).sign()
    rhs = signs * (0.1 + torch.rand(length, *batch, width))
    if structure is linear.Scalar:
        signs = signs[..., 0]
        rhs = rhs.abs() * signs[..., None]
        data = signs[1:] * (0.2 + 0.7 * torch.rand(length - 1, *coupling_batch)) * signs[:-1]
    elif structure is linear.Diagonal:
        data = signs[1:] * (0.2 + 0.7 * torch.rand(length - 1, *coupling_batch, width)) * signs[:-1]
    else:
        s = signs.unflatten(-1, (width // size, size))
        entries = (0.2 + 0.7 * torch.rand(length - 1, *coupling_batch, width // size, size, size)) / size
        data = s[1:].unsqueeze(-1) * entries * s[:-1].unsqueeze(-2)
    if reverse:
        data, rhs = data.flip(0), rhs.flip(0)
    return structure(data.to(device, dtype)), rhs.to(device, dtype)


def expected(couplings, rhs, reverse):
    full = type(couplings)(couplings.data.double())
    return linear.ForwardSubstitution().solve_coupled(full, rhs.double(), reverse=reverse)


def assert_right(actual, couplings, rhs, reverse, rtol=1e-5):
    assert actual.dtype == rhs.dtype
    torch.testing.assert_close(actual.double(), expected(couplings, rhs, reverse), rtol=rtol, atol=0)
