"""Inputs may lie in memory in any way, are never written to, and share nothing with the result."""

import pytest
import torch

from deeppcr import linear
from linear.reference import SOLVERS, STRUCTURES, random_blocks

every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=str)
every_structure = pytest.mark.parametrize("structure", STRUCTURES)


def strided(tensor):
    """The same values, every other element of a larger tensor, dimensions laid out backwards, not from its start."""
    backwards = tensor.permute(*reversed(range(tensor.ndim)))
    room = torch.full((2 * tensor.numel() + 3,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    spread = room[3::2].unflatten(0, backwards.shape).copy_(backwards)
    return spread.permute(*reversed(range(tensor.ndim)))


def system(structure, device, length=13, batch=(2,), width=6):
    return (
        random_blocks(structure, length, batch, width, device=device).data,
        torch.randn(length, *batch, width, dtype=torch.float64, device=device),
        torch.randn(*batch, width, dtype=torch.float64, device=device),
    )


@every_structure
@every_solver
def test_strides_and_offsets_do_not_matter(structure, solver, device):
    tensors = system(structure, device)
    scattered = [strided(tensor) for tensor in tensors]
    assert all(not tensor.is_contiguous() and tensor.storage_offset() == 3 for tensor in scattered)
    for reverse in (False, True):
        actual, expected = (
            linear.solve(structure(data), rhs, initial, reverse=reverse, solver=solver)
            for data, rhs, initial in (scattered, tensors)
        )
        torch.testing.assert_close(actual, expected)


@every_structure
@every_solver
def test_expanded_inputs_are_as_good_as_copies(structure, solver, device):
    one_step = [tensor[:1] for tensor in system(structure, device)[:2]]
    expanded = [tensor.expand(13, *tensor.shape[1:]).requires_grad_() for tensor in one_step]
    copied = [tensor.detach().contiguous().requires_grad_() for tensor in expanded]
    results = []
    for data, rhs in (expanded, copied):
        states = linear.solve(structure(data), rhs, solver=solver)
        results.append((states, *torch.autograd.grad(states.sin().sum(), (data, rhs))))
    torch.testing.assert_close(*results)


@every_structure
@every_solver
@pytest.mark.parametrize("length", [1, 2, 13])
@pytest.mark.parametrize("with_initial", [False, True], ids=["from zero", "from initial"])
def test_the_result_is_the_callers_own(structure, solver, length, with_initial, device):
    data, rhs, initial = system(structure, device, length)
    before = [tensor.clone() for tensor in (data, rhs, initial)]
    for reverse in (False, True):
        start = initial if with_initial else None
        states = linear.solve(structure(data), rhs, start, reverse=reverse, solver=solver)
        states.fill_(float("nan"))
        for tensor, untouched in zip((data, rhs, initial), before, strict=True):
            torch.testing.assert_close(tensor, untouched, rtol=0, atol=0)


@pytest.mark.parametrize("length", [1, 13])
def test_rows_of_a_broadcast_result_are_independent(length, device):
    rhs = torch.ones(length, 1, 2, device=device)
    states = linear.solve(linear.Scalar(torch.ones(length, 3, device=device)), rhs)
    states[:, 0] = 7.0
    assert (states[:, 1:] != 7.0).any()
    assert (rhs == 1).all()
