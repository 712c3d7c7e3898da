"""Half precision is accumulated in float32, and products that overflow do not spoil a finite solution."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import vmap

from deeppcr import linear
from deeppcr.linear import refine as refining
from linear.conformance import either_way
from linear.reference import PARALLEL_SOLVERS, SOLVERS, STRUCTURES, assert_same_steps, one_after_the_other

HALF = (torch.bfloat16, torch.float16)
half = pytest.mark.parametrize("dtype", HALF, ids=str)
parallel_solvers = pytest.mark.parametrize("solver", PARALLEL_SOLVERS, ids=str)


def nearly_orthogonal(structure, length, dtype, device):
    """Blocks that forget nothing, and so sums so long that half precision loses whatever comes late."""
    eps = torch.finfo(dtype).eps

    def gains(*shape):
        """One unit below 1 or above it, so that their product stays about 1."""
        return torch.where(torch.rand(*shape, device=device) < 2 / 3, 1 - eps / 2, 1 + eps).to(dtype)

    def rotation(size):
        return torch.eye(size, dtype=dtype, device=device).roll(1, 0)

    return {
        linear.Dense: lambda: structure(gains(length, 1, 1) * rotation(6)),
        linear.Diagonal: lambda: structure(gains(length, 6)),
        linear.BlockDiagonal: lambda: structure(gains(length, 3, 2, 2) * rotation(2)),
        linear.Scalar: lambda: structure(gains(length)),
    }[structure]()


def small_changes(length, dtype, device):
    """A right-hand side of which half precision would not notice a single step, and an initial state of about 1."""
    rhs = torch.finfo(dtype).eps / 4 * (1 + torch.rand(length, 6, device=device)) / 2
    return rhs.to(dtype), (1 + torch.rand(6, device=device) / 4).to(dtype)


@half
@either_way
@pytest.mark.parametrize("structure", STRUCTURES)
def test_half_precision_is_rounded_once(dtype, structure, reverse, device):
    blocks = nearly_orthogonal(structure, 300, dtype, device)
    rhs, initial = small_changes(300, dtype, device)
    matrices = blocks.to_dense(6)
    expected = one_after_the_other(matrices.double(), rhs.double(), initial.double(), reverse)
    # Half a unit in the last place of the result, and float32's own error over 300 steps.
    allowed = (torch.finfo(dtype).eps / 2 + 300 * torch.finfo(torch.float32).eps) * expected.abs()
    for solver in SOLVERS:
        states = linear.solve(blocks, rhs, initial, reverse=reverse, solver=solver)
        assert states.dtype == dtype
        assert ((states.double() - expected).abs() <= allowed).all(), solver

    naive = one_after_the_other(matrices, rhs, initial, reverse)
    assert ((naive.double() - expected).abs() > 10 * allowed).any(), "the bound does not tell float32 from half"


@half
@pytest.mark.parametrize("structure", STRUCTURES)
def test_gradients_keep_the_dtype_and_are_accumulated_in_float32(dtype, structure, device):
    leaves = (nearly_orthogonal(structure, 300, dtype, device).data, *small_changes(300, dtype, device))
    wide = [leaf.double() for leaf in leaves]

    def gradients(data, rhs, initial):
        tensors = [tensor.requires_grad_() for tensor in (data, rhs, initial)]
        states = linear.solve(structure(data), rhs, initial, solver=linear.PCR())
        # A cotangent that half precision holds exactly, so that nothing but the solver rounds.
        return torch.autograd.grad(states, tensors, torch.full_like(states, 1 / 8))

    for ours, theirs in zip(gradients(*leaves), gradients(*wide), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=1.1 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
@pytest.mark.parametrize("length", [1, 40])
def test_the_dtype_is_kept(dtype, solver, length, device):
    blocks = linear.Scalar(torch.full((length,), 0.5, dtype=dtype, device=device))
    states = linear.solve(blocks, torch.ones(length, 2, dtype=dtype, device=device), solver=solver)
    assert states.dtype == dtype
    assert states.device.type == device.type


@pytest.fixture
def up_and_down(device):
    """Products of 13 blocks leave float32, while the states go from 1e-36 up to 1e36, back, and up again."""
    gain = torch.tensor([1e3] * 24 + [1e-3] * 24 + [1e3] * 24, dtype=torch.float64)
    turns = torch.linalg.qr(torch.randn(72, 3, 3, dtype=torch.float64)).Q
    blocks = linear.Dense((turns * gain[:, None, None]).float().to(device))
    return blocks, torch.zeros(72, 3, device=device), torch.full((3,), 1e-36, device=device)


@parallel_solvers
def test_products_may_overflow_where_the_solution_does_not(up_and_down, solver):
    blocks, rhs, initial = up_and_down
    expected = one_after_the_other(blocks.data.double(), rhs.double(), initial.double())
    chosen = solver.choose(blocks[1:])[0] if isinstance(solver, linear.Auto) else solver
    naive = chosen.solve_coupled(blocks[1:], expected.float())
    # The kernels find out by themselves; for the others linear.solve looks at what comes out.
    assert torch.isfinite(naive).all() == isinstance(chosen, linear.Fused)
    assert_same_steps(linear.solve(blocks, rhs, initial, solver=solver), expected, 1e-4)


@parallel_solvers
@either_way
def test_products_may_overflow_where_all_is_zero(solver, reverse, device):
    blocks = linear.Scalar(torch.full((80,), 1e10, device=device))
    states = linear.solve(blocks, torch.zeros(80, 3, device=device), reverse=reverse, solver=solver)
    assert (states == 0).all()


@parallel_solvers
def test_gradients_survive_overflowing_products(up_and_down, solver):
    leaves = [tensor.requires_grad_() for tensor in (up_and_down[0].data, *up_and_down[1:])]

    def gradients(dtype, solver):
        data, rhs, initial = (leaf.to(dtype) for leaf in leaves)
        states = linear.solve(linear.Dense(data), rhs, initial, solver=solver)
        return torch.autograd.grad(states[-1].sum() * 1e-36, leaves)

    expected = gradients(torch.float64, linear.ForwardSubstitution())
    for ours, theirs in zip(gradients(torch.float32, solver), expected, strict=True):
        # An H200 adds up in another order than a CPU: 1.07e-4 was measured there.
        assert_same_steps(ours, theirs, 1e-4 if ours.device.type == "cpu" else 2e-4)


@parallel_solvers
def test_products_may_overflow_under_vmap(up_and_down, solver):
    blocks, rhs, initial = up_and_down
    states = vmap(lambda start: linear.solve(blocks, rhs, start, solver=solver))(initial.expand(2, 3))
    assert_same_steps(states[1], linear.solve(blocks, rhs, initial, solver=linear.ForwardSubstitution()), 1e-4)


def test_where_values_cannot_be_read_an_overflow_stays_visible(up_and_down, monkeypatch):
    monkeypatch.setattr(refining, "values_can_be_read", lambda _: False)
    assert not torch.isfinite(linear.solve(*up_and_down, solver=linear.PCR())).all()


@parallel_solvers
@either_way
def test_a_solution_that_overflows_is_right_up_to_there(solver, reverse, device):
    blocks = linear.Scalar(torch.full((80,), 10.0, device=device))
    rhs = torch.ones(80, 1, device=device)
    states = linear.solve(blocks, rhs, reverse=reverse, solver=solver).flatten()
    ordered = states.flip(0) if reverse else states
    finite = torch.isfinite(ordered)
    assert 38 <= finite.sum() < 80
    assert finite[: int(finite.sum())].all()
    expected = torch.tensor([(10.0**k - 1) / 9 for k in range(1, 39)], device=device)
    torch.testing.assert_close(ordered[:38], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_nothing_before_a_nan_is_spoiled(solver, device):
    rhs = torch.ones(40, 2, device=device)
    rhs[25] = float("nan")
    states = linear.solve(linear.Scalar(torch.full((40,), 0.5, device=device)), rhs, solver=solver)
    assert torch.isfinite(states[:25]).all()
    assert torch.isnan(states[25:]).all()


@pytest.mark.parametrize("reverse", [False, True])
def test_autocast_lowers_neither_the_initial_state_nor_derivatives(reverse, device):
    blocks = linear.Dense(torch.randn(9, 16, 16, device=device) / 6)
    rhs, initial = torch.randn(9, 16, device=device, requires_grad=True), torch.randn(16, device=device)

    def solve_and_differentiate():
        found = linear.solve(blocks, rhs, initial, reverse=reverse)
        backward = torch.autograd.grad(found.square().sum(), rhs)[0]
        with forward_ad.dual_level():
            dual = linear.solve(blocks, forward_ad.make_dual(rhs.detach(), torch.ones_like(rhs)), reverse=reverse)
            return found, backward, forward_ad.unpack_dual(dual).tangent

    plain = solve_and_differentiate()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        lowered = solve_and_differentiate()
    for ours, theirs in zip(lowered, plain, strict=True):
        assert torch.equal(ours, theirs)


def test_autocast_does_not_lower_the_precision_of_products(device):
    blocks, rhs = linear.Dense(torch.randn(100, 3, 3, device=device) / 2), torch.randn(100, 3, device=device)
    expected = linear.solve(blocks, rhs)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(linear.solve(blocks, rhs), expected)
