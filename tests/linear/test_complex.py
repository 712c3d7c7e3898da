"""Systems of complex numbers: every structure and solver, and their gradients, in PyTorch's convention."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from deeppcr import linear
from kernel_support import thorough
from linear.conformance import ONE_OF_A_KIND, assert_compiles, either_way, either_way_once, every_solver
from linear.reference import SOLVERS, STRUCTURES, one_after_the_other, random_blocks

every_structure = pytest.mark.parametrize("structure", STRUCTURES)


def system(structure, length, batch=(), width=4, *, device, dtype=torch.complex128, requires_grad=False):
    data = random_blocks(structure, length, batch, width, dtype=dtype, device=device).data
    rhs, initial = (torch.randn(*shape, *batch, width, dtype=dtype, device=device) for shape in ((length,), ()))
    return tuple(tensor.requires_grad_(requires_grad) for tensor in (data, rhs, initial))


@either_way
@every_solver
@every_structure
@pytest.mark.parametrize(("length", "batch"), [(1, ()), (2, (3,)), (3, ()), (63, (2, 3)), (65, ())], ids=str)
def test_solutions_are_those_of_the_loop(structure, solver, length, batch, reverse, device):
    data, rhs, initial = system(structure, length, batch, device=device)
    found = linear.solve(structure(data), rhs, initial, reverse=reverse, solver=solver)
    expected = one_after_the_other(structure(data).to_dense(4), rhs, initial, reverse)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@either_way_once
@every_structure
def test_gradients_by_finite_differences(structure, solver, reverse, device):
    tensors = system(structure, 6, (2,), device=device, requires_grad=True)
    solve = lambda *each: linear.solve(structure(each[0]), *each[1:], reverse=reverse, solver=solver)  # noqa: E731
    assert gradcheck(solve, tensors, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(solve, tensors, fast_mode=True)


@either_way
@every_structure
def test_gradients_are_those_of_the_loop(structure, reverse, device):
    data, rhs, initial = tensors = system(structure, 65, (3,), device=device, requires_grad=True)

    def gradients(states):
        return torch.autograd.grad((states * states.conj()).real.sum() + states.imag.sin().sum(), tensors)

    expected = gradients(one_after_the_other(structure(data).to_dense(4), rhs, initial, reverse))
    for solver in SOLVERS:
        found = gradients(linear.solve(structure(data), rhs, initial, reverse=reverse, solver=solver))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@every_structure
def test_blocks_of_fewer_rows_and_conjugated_views(structure, device):
    data, rhs, initial = system(structure, 9, (2, 3), device=device)
    data = data[:, :1, :1].conj()
    assert data.is_conj()
    expected = one_after_the_other(structure(data).to_dense(4), rhs.conj(), initial)
    for solver in ONE_OF_A_KIND:
        found = linear.solve(structure(data), rhs.conj(), initial, solver=solver)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@every_structure
def test_as_real_does_the_same_to_pairs(structure, device):
    data, vectors, _ = system(structure, 5, (2, 3), 4, device=device)
    data = data[:, :1]
    blocks, pairs = structure(data).as_real(vectors.conj())
    assert not blocks.data.is_complex()
    expected = structure(data).apply(vectors.conj())
    found = torch.view_as_complex(blocks.apply(pairs).reshape(*vectors.shape, 2))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("structure", [linear.Diagonal, *thorough(linear.Dense, linear.Scalar)])
def test_it_compiles(structure, device):
    tensors = system(structure, 5, (2,), device=device)

    def solve(data, rhs, initial):
        return torch.view_as_real(linear.solve(structure(data), rhs, initial))

    assert_compiles(solve, tensors)
