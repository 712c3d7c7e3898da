"""Products of blocks lose digits where they are far from normal: the residual tells, and what was lost is given back."""

import math

import numpy as np
import pytest
import torch
from torch.func import vmap

from deeppcr import linear
from deeppcr.linear import refine as refining
from linear.conformance import either_way
from linear.reference import PARALLEL_SOLVERS, random_blocks

FILTERS = ((2, 0.01), (4, 0.01), (6, 0.05), (8, 0.1))
LENGTH = 2000
every_filter = pytest.mark.parametrize(("order", "cutoff"), FILTERS, ids=str)


def butterworth(order: int, cutoff: float) -> torch.Tensor:
    """[n, n]: the companion matrix of a low-pass filter, as ``scipy.signal.butter(order, cutoff)`` has its denominator."""
    warped = 4 * np.tan(np.pi * cutoff / 2)
    angles = np.pi * (2 * np.arange(1, order + 1) + order - 1) / (2 * order)
    poles = warped * np.exp(1j * angles)
    denominator = np.real(np.poly((4 + poles) / (4 - poles)))
    companion = np.eye(order, k=-1)
    companion[0] = -denominator[1:]
    return torch.from_numpy(companion)


def filtering(order, cutoff, dtype=torch.float64, length=LENGTH, batch=()):
    """The filter's blocks, all alike but stored one by one, and noise that enters the first component."""
    blocks = butterworth(order, cutoff).to(dtype).expand(length, *batch, order, order).contiguous()
    rhs = torch.zeros(length, *batch, order, dtype=dtype)
    rhs[..., 0] = torch.randn(length, *batch, dtype=dtype)
    return blocks, rhs


def in_long_double(blocks, rhs, reverse=False):
    """[L, D] of one row: the loop with eleven further bits at least."""
    matrices, terms = (each.double().numpy().astype(np.longdouble) for each in (blocks, rhs))
    state, states = np.zeros_like(terms[0]), np.zeros_like(terms)
    for step in reversed(range(len(terms))) if reverse else range(len(terms)):
        state = matrices[step] @ state + terms[step]
        states[step] = state
    return states


def error(states, expected):
    """The largest, relative to the largest state."""
    return float(np.abs(states.double().numpy().astype(np.longdouble) - expected).max() / np.abs(expected).max())


@pytest.fixture
def walks(monkeypatch):
    """How often the refinement gave up and took one step after the other."""
    counted = []

    class Counting(linear.ForwardSubstitution):
        def solve_coupled(self, couplings, rhs, *, reverse=False):
            counted.append(len(couplings))
            return super().solve_coupled(couplings, rhs, reverse=reverse)

    monkeypatch.setattr(refining, "ForwardSubstitution", Counting)
    return counted


@every_filter
@either_way
def test_filters_in_float64_are_as_exact_as_by_steps(order, cutoff, reverse, walks):
    data, rhs = filtering(order, cutoff)
    expected, blocks = in_long_double(data, rhs, reverse), linear.Dense(data)
    allowed = error(linear.solve(blocks, rhs, reverse=reverse, solver=linear.ForwardSubstitution()), expected)
    for solver in (linear.Hierarchical(), linear.Auto(), linear.PCR()):
        assert not walks  # PCR loses most, and may end so
        assert error(linear.solve(blocks, rhs, reverse=reverse, solver=solver), expected) <= 30 * allowed, solver


@every_filter
def test_filters_in_float32_are_as_exact_as_by_steps(order, cutoff):
    data, rhs = filtering(order, cutoff, torch.float32)
    expected, blocks = in_long_double(data, rhs), linear.Dense(data)
    allowed = error(linear.solve(blocks, rhs, solver=linear.ForwardSubstitution()), expected)
    for solver in (linear.PCR(), linear.Auto()):
        assert error(linear.solve(blocks, rhs, solver=solver), expected) <= 10 * allowed


def test_what_imaginary_parts_lose_is_given_back():
    data, rhs = filtering(4, 0.01)
    expected = in_long_double(data, rhs)
    allowed = error(linear.solve(linear.Dense(data), rhs, solver=linear.ForwardSubstitution()), expected)
    found = linear.solve(linear.Dense(data + 0j), 1j * rhs, solver=linear.PCR())
    assert error(found.imag, expected) <= 30 * allowed


@pytest.mark.thorough
@every_filter
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_long_signals_are_filtered_as_by_scipy(order, cutoff, dtype):
    signal = pytest.importorskip("scipy.signal")
    data, rhs = filtering(order, cutoff, dtype, 20_000)
    # lfilter's all-pole filter in long double is the recurrence of the first component.
    poles = np.concatenate([[1.0], -data[0, 0].double().numpy()]).astype(np.longdouble)
    expected = signal.lfilter(np.ones(1, np.longdouble), poles, rhs[:, 0].double().numpy().astype(np.longdouble))
    blocks = linear.Dense(data)
    allowed = error(linear.solve(blocks, rhs, solver=linear.ForwardSubstitution())[:, 0], expected)
    for solver in PARALLEL_SOLVERS:
        found = error(linear.solve(blocks, rhs, solver=solver)[:, 0], expected)
        assert found <= (100 if dtype == torch.float64 else 10) * allowed, solver


def test_without_refinement_the_digits_are_gone():
    data, rhs = filtering(4, 0.01)
    expected = in_long_double(data, rhs)
    found = linear.solve_coupled(linear.Dense(data[1:]), rhs, reverse=False, solver=linear.PCR(), refined=False)
    assert error(found, expected) > 1e-7


@pytest.mark.parametrize("structure", [linear.Dense, linear.BlockDiagonal])
def test_one_bad_row_of_many_is_found_in_any_unit(structure):
    bad, rhs = filtering(4, 0.01, batch=(3,))
    data = 0.5 * torch.linalg.qr(torch.randn_like(bad)).Q
    data[:, 1] = bad[:, 1]
    unit = torch.tensor([1e3, 1e-30, 1e8], dtype=rhs.dtype)[:, None]  # of a row
    units = torch.tensor([1.0, 2.0**-40, 2.0**30, 1.0], dtype=rhs.dtype)  # of a component
    data, rhs = data * units[:, None] / units, rhs * unit * units
    blocks = structure(data if structure is linear.Dense else data.unsqueeze(-3))
    expected = in_long_double(data[:, 1], rhs[:, 1])
    states = linear.solve(blocks, rhs, solver=linear.Hierarchical())[:, 1]
    stepwise = linear.solve(blocks, rhs, solver=linear.ForwardSubstitution())[:, 1]
    for component in range(4):
        allowed = error(stepwise[:, component], expected[:, component])
        assert error(states[:, component], expected[:, component]) <= 30 * allowed


@either_way
def test_derivatives_are_refined_as_well(reverse):
    data, rhs = filtering(4, 0.01, length=1000)
    cotangent = torch.randn_like(rhs)

    def gradients(solver):
        leaves = data.clone().requires_grad_(), rhs.clone().requires_grad_()
        states = linear.solve(linear.Dense(leaves[0]), leaves[1], reverse=reverse, solver=solver)
        first = torch.autograd.grad((states * cotangent).sum(), leaves, create_graph=True)
        second = torch.autograd.grad((first[1] * cotangent).sum(), leaves[0])
        tangent = torch.func.jvp(
            lambda given: linear.solve(linear.Dense(data), given, reverse=reverse, solver=solver), (rhs,), (cotangent,)
        )[1]
        return (*first, *second, tangent)

    expected = gradients(linear.ForwardSubstitution())
    for ours, theirs in zip(gradients(linear.PCR()), expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max()


def ordinary(kind, length, width, dtype):
    turns = torch.linalg.qr(torch.randn(length, 2, width, width, dtype=dtype)).Q
    upper = torch.triu(random_blocks(linear.Dense, length, (2,), width, dtype=dtype).data, 1)
    return {
        "contracting": lambda: random_blocks(linear.Dense, length, (2,), width, dtype=dtype, gain=0.9).data,
        "orthogonal": lambda: turns,
        "growing": lambda: turns * 1.01,
        "up and down": lambda: (
            turns * torch.where(torch.arange(length) % 40 < 20, 2.0, 0.5)[:, None, None, None].to(dtype)
        ),
        "triangular": lambda: upper + torch.diag_embed(torch.rand(length, 2, width, dtype=dtype)),
        "residual": lambda: torch.eye(width, dtype=dtype) + 0.01 * turns,
    }[kind]()


@pytest.mark.parametrize("kind", ["contracting", "orthogonal", "growing", "up and down", "triangular", "residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("impulse", [False, True], ids=["noise", "impulse"])
def test_ordinary_systems_cost_one_look(kind, dtype, impulse, monkeypatch):
    def refuse(*_):
        raise AssertionError("nothing was lost that a correction could bring")

    monkeypatch.setattr(refining, "_corrected", refuse)
    for length, width in ((65, 2), (300, 3), (1000, 8)):
        rhs = torch.randn(length, 2, width, dtype=dtype)
        if impulse:
            rhs[1:] = 0
        blocks = linear.Dense(ordinary(kind, length, width, dtype))
        for solver in (linear.PCR(), linear.Hierarchical()):
            linear.solve(blocks, rhs, solver=solver)


def test_states_whose_squares_leave_the_range_are_judged_as_well(walks):
    turns = torch.linalg.qr(torch.randn(300, 3, 3, dtype=torch.float64)).Q
    states = linear.solve(linear.Dense(5 * turns), torch.ones(300, 3, dtype=torch.float64), solver=linear.PCR())
    assert states.abs().max() > 1e200
    assert not walks


def test_rows_under_vmap_are_refined_each():
    data, rhs = filtering(4, 0.01, batch=(2,))
    expected = linear.solve(linear.Dense(data), rhs, solver=linear.ForwardSubstitution())
    for blocks, dims in ((data, (1, 1)), (data[:, 0], (None, 1))):  # blocks that differ between rows, or are shared
        solve = vmap(lambda blocks, given: linear.solve(linear.Dense(blocks), given), dims, 1)
        assert (solve(blocks, rhs) - expected).abs().max() <= 1e-8 * expected.abs().max()


def test_where_values_cannot_be_read_one_correction_is_made(monkeypatch):
    monkeypatch.setattr(refining, "values_can_be_read", lambda _: False)
    data, rhs = filtering(6, 0.05)
    expected, blocks = in_long_double(data, rhs), linear.Dense(data)
    lossy = linear.solve_coupled(blocks[1:], rhs, reverse=False, solver=linear.PCR(), refined=False)
    assert error(linear.solve(blocks, rhs, solver=linear.PCR()), expected) <= 0.01 * error(lossy, expected)


@pytest.mark.parametrize("angle", [0.01, 0.1, 0.2])
def test_a_resonance_in_float32_is_within_ten_times_the_error_of_steps(angle):
    """Poles at 0.99, near the axis: products lose about a digit."""
    rows = [[2 * 0.99 * math.cos(angle), -(0.99**2)], [1.0, 0.0]]
    data = torch.tensor(rows).expand(5000, 2, 2).contiguous()
    rhs = torch.zeros(5000, 2)
    rhs[:, 0] = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    expected = in_long_double(data, rhs)
    allowed = error(linear.solve(linear.Dense(data), rhs, solver=linear.ForwardSubstitution()), expected)
    for solver in (linear.Auto(), linear.Hierarchical()):
        assert error(linear.solve(linear.Dense(data), rhs, solver=solver), expected) <= 10 * allowed


def test_what_corrections_do_not_find_in_float32_is_found_in_float64(walks):
    data, rhs = filtering(4, 0.01, torch.float32, 500)
    expected, blocks = in_long_double(data, rhs), linear.Dense(data)
    allowed = error(linear.solve(blocks, rhs, solver=linear.ForwardSubstitution()), expected)
    assert error(linear.solve(blocks, rhs, solver=linear.PCR()), expected) < 0.1 * allowed
    assert not walks


def test_what_leaves_the_range_of_float32_stays_outside(walks):
    data = torch.cat([torch.full((60,), 10.0), torch.full((60,), 0.1)])[:, None, None] * torch.tensor(
        [[1.0, 1], [0, 1]]
    )
    rhs = torch.ones(120, 2)
    expected = linear.solve(linear.Dense(data), rhs, solver=linear.ForwardSubstitution())
    assert not expected[-1].isfinite().any()
    assert torch.equal(linear.solve(linear.Dense(data), rhs, solver=linear.PCR()).isfinite(), expected.isfinite())
    assert walks


@pytest.mark.parametrize("size", [0.5, 0.99, 1.0005])
@pytest.mark.parametrize("width", [2, 8])
def test_what_is_well_conditioned_is_solved_once(size, width, monkeypatch):
    solves, solve = [], linear.Hierarchical.solve_coupled

    def counted(self, *arguments, **options):
        solves.append(self)
        return solve(self, *arguments, **options)

    blocks = size * torch.linalg.qr(torch.randn(4096, width, width, generator=torch.Generator().manual_seed(0))).Q
    rhs = torch.randn(4096, width, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(linear.Hierarchical, "solve_coupled", counted)
    linear.solve_coupled(linear.Dense(blocks[1:]), rhs, reverse=False, solver=linear.Hierarchical(), refined=False)
    levels = len(solves)
    linear.solve(linear.Dense(blocks), rhs, solver=linear.Hierarchical())
    assert len(solves) == 2 * levels
