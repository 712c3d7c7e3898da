"""Under a compiler and in exported programs, ``linear.solve`` is one operator, whatever the length."""

import io

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.export import Dim, export

from compiling import compiled_and_counted, value_and_gradients
from deeppcr import linear
from deeppcr.linear.operator import linear_solve
from kernel_support import thorough

CORES = {"Dense": (4, 4), "Diagonal": (4,), "BlockDiagonal": (2, 2, 2), "Scalar": ()}
#: Every structure once, and every direction; how a structure and a direction meet is no part of the operator.
structures_and_directions = pytest.mark.parametrize(
    ("structure", "reverse"),
    [
        *(("Dense", False), ("Diagonal", True), ("BlockDiagonal", False), ("Scalar", True)),
        *thorough(("Dense", True), ("Diagonal", False), ("BlockDiagonal", True), ("Scalar", False)),
    ],
)


def system(length, batch=(2,), structure="Dense", dtype=torch.float64):
    """The blocks' data, right-hand side and initial state."""
    data = torch.randn(length, *batch, *CORES[structure], dtype=dtype) / 2
    return data, torch.randn(length, 2, 4, dtype=dtype), torch.randn(2, 4, dtype=dtype)


def solving(structure="Dense", **options):
    return lambda data, rhs, initial=None: linear.solve(getattr(linear, structure)(data), rhs, initial, **options)


def operands(length, structure="Dense", batch=(2,), solver="Auto", chunk=0, reverse=False):
    data, rhs, _ = system(length, batch, structure)
    return data[1:].clone().requires_grad_(), rhs.requires_grad_(), structure, solver, chunk, reverse, True


@structures_and_directions
def test_pytorch_finds_nothing_wrong_with_the_operator(structure, reverse):
    batch, solver = ((1,), ("Hierarchical", 2)) if reverse else ((2,), ("Auto", 0))
    torch.library.opcheck(linear_solve, operands(5, structure, batch, *solver, reverse))


def test_the_operator_of_one_step_returns_no_argument():
    """Which a caller may change."""
    for length in (1, 2):
        torch.library.opcheck(linear_solve, operands(length), test_utils=("test_schema", "test_faketensor"))


@structures_and_directions
def test_the_operator_is_differentiable_twice(structure, reverse):
    data, rhs, *settings = operands(3, structure, reverse=reverse)
    assert gradcheck(lambda *tensors: linear_solve(*tensors, *settings), (data, rhs))
    assert gradgradcheck(lambda *tensors: linear_solve(*tensors, *settings), (data, rhs))


@pytest.mark.parametrize(
    ("structure", "options"),
    [("Dense", {}), ("Diagonal", {"solver": linear.Hierarchical(chunk=2), "reverse": True})],
    ids=str,
)
def test_one_graph_for_all_lengths(structure, options):
    solve = solving(structure, **options)
    compiled, graphs = compiled_and_counted(solve)
    for length in (17, 33, 50, 63, 64, 65, 3):
        tensors = system(length, structure=structure)
        found = value_and_gradients(compiled, *tensors, changing=2)
        torch.testing.assert_close(found, value_and_gradients(solve, *tensors))
    assert len(graphs) == 1


def test_the_shortest_systems():
    """PyTorch makes graphs of their own for them: a size of 1, of couplings or unknowns, is never a symbol."""
    compiled, graphs = compiled_and_counted(solving(), dynamic=True)
    for length in (1, 2):
        tensors = system(length)
        torch.testing.assert_close(value_and_gradients(compiled, *tensors), value_and_gradients(solving(), *tensors))
    assert len(graphs) == 2


@pytest.mark.thorough  # a minute, for a compiler of C++
def test_compiled_by_inductor():
    compiled, graphs = compiled_and_counted(solving(), backend="inductor", dynamic=True)
    for length in (9, 65):
        tensors = system(length)
        torch.testing.assert_close(value_and_gradients(compiled, *tensors), value_and_gradients(solving(), *tensors))
    assert len(graphs) == 1


def test_no_precision_is_lost_under_autocast():
    data, rhs, _ = system(65, dtype=torch.float32)
    exact = value_and_gradients(solving(), data.double(), rhs.double())
    for backend in ("eager", "aot_eager"):
        compiled, _ = compiled_and_counted(solving(), backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            found = value_and_gradients(compiled, data, rhs)
        for ours, theirs in zip(found, exact, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def test_what_overflows_is_mended_as_it_is_eagerly():
    data = torch.diag_embed(torch.tensor([1e20, 1e-20])).expand(64, 2, 2)
    rhs = torch.tensor([0.0, 1.0]).expand(64, 2)
    compiled, _ = compiled_and_counted(solving(), backend="eager")
    assert torch.isfinite(compiled(data, rhs)).all()
    torch.testing.assert_close(compiled(data, rhs), solving(solver=linear.ForwardSubstitution())(data, rhs))


def test_half_precision():
    data, rhs, initial = system(33, dtype=torch.bfloat16)
    compiled, _ = compiled_and_counted(solving())
    found = compiled(data, rhs, initial)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, solving()(data, rhs, initial))


@pytest.mark.parametrize("transform", ["grad", "jacfwd", "vmap"])
def test_transforms_are_traced_through(transform):
    data, rhs, initial = system(5, ())
    functions = {
        "grad": torch.func.grad(lambda rhs: solving()(data, rhs, initial).sin().sum()),
        "jacfwd": torch.func.jacfwd(lambda rhs: solving()(data, rhs, initial)),
        "vmap": torch.vmap(lambda rhs: solving()(data, rhs, initial[0]), in_dims=1, out_dims=1),
    }
    compiled, graphs = compiled_and_counted(functions[transform], backend="eager")
    torch.testing.assert_close(compiled(rhs), functions[transform](rhs))
    assert "linear_solve" not in graphs[0].code


class Backwards(linear.LinearSolver):
    """A solver of a caller's."""

    overflows = False

    def solve_coupled(self, couplings, rhs, *, reverse=False):
        return -linear.PCR().solve_coupled(couplings, -rhs, reverse=reverse)


def test_a_solver_of_the_callers_is_traced_through():
    compiled, graphs = compiled_and_counted(solving(solver=Backwards()))
    tensors = system(5)
    torch.testing.assert_close(value_and_gradients(compiled, *tensors), value_and_gradients(solving(), *tensors))
    assert "linear_solve" not in graphs[0].code


def test_second_derivatives_of_a_compiled_graph_are_refused():
    """By PyTorch, of any graph that it differentiates ahead of time; outside of one, the operator has them."""
    compiled, _ = compiled_and_counted(solving())
    data, rhs, initial = (tensor.requires_grad_() for tensor in system(5))
    (slope,) = torch.autograd.grad(compiled(data, rhs, initial).sin().sum(), data, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        slope.sum().backward()


class Solve(torch.nn.Module):
    def forward(self, data, rhs, initial):
        return 2 * linear.solve(linear.Dense(data), rhs, initial)


def test_an_exported_program_takes_any_length():
    steps = Dim("steps", min=3)
    program = export(Solve(), system(7), dynamic_shapes=({0: steps}, {0: steps}, None))
    written = io.BytesIO()
    torch.export.save(program, written)
    written.seek(0)
    run = torch.export.load(written).module()
    for length in (3, 4, 63, 65):
        tensors = system(length)
        torch.testing.assert_close(value_and_gradients(run, *tensors), value_and_gradients(Solve(), *tensors))
