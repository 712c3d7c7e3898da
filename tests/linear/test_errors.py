"""Bad input is named: the argument, what was expected, what came."""

import pytest
import torch

from deeppcr import linear


def dense(*shape, dtype=torch.float32):
    return linear.Dense(torch.zeros(*shape, dtype=dtype))


REFUSED = {
    "a list for rhs": ((dense(5, 3, 3), [0.0]), TypeError, r"^rhs: expected a tensor, got list"),
    "a list for initial": (
        (dense(5, 3, 3), torch.zeros(5, 3), [0.0]),
        TypeError,
        r"^initial: expected a tensor, got list",
    ),
    "a list in blocks": ((linear.Dense([0.0]), torch.zeros(5, 3)), TypeError, r"^blocks: expected a tensor, got list"),
    "a tensor for blocks": (
        (torch.zeros(5, 3, 3), torch.zeros(5, 3)),
        TypeError,
        r"^blocks: expected linear.Dense, Diagonal, BlockDiagonal or Scalar around a tensor, got Tensor",
    ),
    "rhs without a width": (
        (linear.Scalar(torch.zeros(5)), torch.zeros(5)),
        ValueError,
        r"^rhs: expected \[L, \*batch, D\], got shape \(5,\)",
    ),
    "no steps": ((dense(0, 3, 3), torch.zeros(0, 3)), ValueError, r"^rhs: has no steps \(L = 0\)"),
    "too few dimensions": (
        (dense(3, 3), torch.zeros(3, 3)),
        ValueError,
        r"^blocks: Dense expects at least 3 dimensions, got shape \(3, 3\)",
    ),
    "a scalar without steps": (
        (linear.Scalar(torch.zeros(())), torch.zeros(3, 3)),
        ValueError,
        r"^blocks: Scalar expects at least 1 dimensions, got shape \(\)",
    ),
    "matrices that are not square": (
        (dense(5, 2, 3), torch.zeros(5, 3)),
        ValueError,
        r"^blocks: the matrices must be square, got shape \(5, 2, 3\)",
    ),
    "small blocks that are not square": (
        (linear.BlockDiagonal(torch.zeros(5, 2, 2, 3)), torch.zeros(5, 6)),
        ValueError,
        r"^blocks: the matrices must be square, got shape \(5, 2, 2, 3\)",
    ),
    "another length": ((dense(4, 3, 3), torch.zeros(5, 3)), ValueError, r"^blocks: 4 of them for 5 steps in rhs"),
    "another width": ((dense(5, 2, 2), torch.zeros(5, 3)), ValueError, r"^blocks: width 2, but rhs has width 3"),
    "small blocks of another width": (
        (linear.BlockDiagonal(torch.zeros(5, 2, 2, 2)), torch.zeros(5, 3)),
        ValueError,
        r"^blocks: width 4, but rhs has width 3",
    ),
    "an initial state of another width": (
        (dense(5, 3, 3), torch.zeros(5, 3), torch.zeros(2)),
        ValueError,
        r"^initial: expected \[\*batch, 3\], got shape \(2,\)",
    ),
    "an initial state without a width": (
        (linear.Scalar(torch.zeros(5)), torch.zeros(5, 1), torch.zeros(())),
        ValueError,
        r"^initial: expected \[\*batch, 1\], got shape \(\)",
    ),
    "integers": (
        (dense(5, 3, 3), torch.zeros(5, 3, dtype=torch.int64)),
        TypeError,
        r"^rhs: expected a floating dtype, complex64 or complex128, got torch.int64",
    ),
    "complex blocks for real vectors": (
        (dense(5, 3, 3, dtype=torch.complex64), torch.zeros(5, 3)),
        TypeError,
        r"^blocks: is torch.complex64 on cpu, but rhs is torch.float32 on cpu",
    ),
    "complex numbers of half precision": (
        (dense(5, 3, 3, dtype=torch.complex32), torch.zeros(5, 3, dtype=torch.complex32)),
        TypeError,
        r"^rhs: expected a floating dtype, complex64 or complex128, got torch.complex32",
    ),
    "blocks of another dtype": (
        (dense(5, 3, 3, dtype=torch.float64), torch.zeros(5, 3)),
        TypeError,
        r"^blocks: is torch.float64 on cpu, but rhs is torch.float32 on cpu",
    ),
    "an initial state of another dtype": (
        (dense(5, 3, 3), torch.zeros(5, 3), torch.zeros(3).half()),
        TypeError,
        r"^initial: is torch.float16 on cpu, but rhs is torch.float32 on cpu",
    ),
    "blocks on another device": (
        (linear.Dense(torch.zeros(5, 3, 3, device="meta")), torch.zeros(5, 3)),
        TypeError,
        r"^blocks: is torch.float32 on meta, but rhs is torch.float32 on cpu",
    ),
    "batches that do not broadcast": (
        (dense(5, 2, 3, 3), torch.zeros(5, 4, 3)),
        ValueError,
        r"^blocks, rhs, initial: batch shapes \(2,\), \(4,\) and \(\) do not broadcast",
    ),
    "an initial state that does not broadcast": (
        (dense(5, 3, 3), torch.zeros(5, 4, 3), torch.zeros(2, 3)),
        ValueError,
        r"^blocks, rhs, initial: batch shapes \(\), \(4,\) and \(2,\) do not broadcast",
    ),
}


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        linear.solve(*arguments)


@pytest.mark.parametrize("chunk", [1, 0, -3])
def test_chunks_of_one_merge_nothing(chunk):
    with pytest.raises(ValueError, match=f"^chunk: at least 2 steps are merged at a level, got {chunk}"):
        linear.Hierarchical(chunk=chunk)


@pytest.mark.parametrize("solver", [linear.ForwardSubstitution(), linear.PCR(), linear.Hierarchical(), linear.Auto()])
def test_solvers_are_frozen_settings(solver):
    assert solver == type(solver)()
    assert hash(solver) == hash(type(solver)())
    with pytest.raises(AttributeError):
        solver.chunk = 3


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "solver", [linear.ForwardSubstitution(), linear.PCR(), linear.Hierarchical(chunk=2), linear.Auto()]
)
@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
def test_nothing_to_solve(shape, solver, reverse):
    rows, width = shape
    data, rhs = torch.zeros(5, rows, width, width, requires_grad=True), torch.zeros(5, rows, width)
    found = linear.solve(linear.Dense(data), rhs, reverse=reverse, solver=solver)
    found.sum().backward()
    assert found.shape == rhs.shape
    assert data.grad.shape == data.shape
