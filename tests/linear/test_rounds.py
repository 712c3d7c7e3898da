"""How much work a solver does, how many rounds it takes, and that no accuracy is lost on the way."""

import math
from dataclasses import dataclass, field

import pytest
import torch

from deeppcr import linear
from linear.conformance import either_way
from linear.reference import PARALLEL_SOLVERS, STRUCTURES, assert_same_steps, one_after_the_other, random_blocks


@dataclass
class Work:
    """How many blocks each call of ``apply`` and of ``compose`` dealt with: one call is one round."""

    applied: list[int] = field(default_factory=list)
    composed: list[int] = field(default_factory=list)


@pytest.fixture
def work(monkeypatch):
    counted, apply, compose = Work(), linear.Scalar.apply, linear.Scalar.compose

    def counting_apply(blocks, vectors):
        counted.applied.append(len(blocks))
        return apply(blocks, vectors)

    def counting_compose(blocks, first):
        assert len(blocks) == len(first)
        counted.composed.append(len(blocks))
        return compose(blocks, first)

    monkeypatch.setattr(linear.Scalar, "apply", counting_apply)
    monkeypatch.setattr(linear.Scalar, "compose", counting_compose)
    return counted


def solve_scalar(length, device, solver, reverse=False):
    blocks = random_blocks(linear.Scalar, length, device=device)
    return linear.solve(
        blocks, torch.ones(length, 1, dtype=torch.float64, device=device), solver=solver, reverse=reverse
    )


@either_way
@pytest.mark.parametrize("length", [*range(1, 34), 63, 64, 65, 100, 127, 128, 129, 130])
def test_pcr_takes_log2_rounds_without_padding(length, reverse, work, device):
    solve_scalar(length, device, linear.PCR(), reverse)
    strides = [2**k for k in range(math.ceil(math.log2(length)))]
    # A round leaves out the rows that are solved; the last one needs no further products.
    assert work.applied == [length - stride for stride in strides]
    assert work.composed == [length - 2 * stride for stride in strides[:-1]]


@either_way
@pytest.mark.parametrize("length", [9, 64, 65, 1000])
@pytest.mark.parametrize("chunk", [2, 3, 4, 7])
def test_hierarchical_needs_one_product_a_step(length, chunk, reverse, work, device):
    solve_scalar(length, device, linear.Hierarchical(chunk=chunk), reverse)
    assert sum(work.composed) <= length
    assert sum(work.applied) <= 3 * length
    assert len(work.applied) <= 2 * chunk * math.ceil(math.log(length, chunk))


def test_pcr_needs_log_times_as_many(work, device):
    solve_scalar(1024, device, linear.PCR())
    assert 7 * 1024 < sum(work.composed) < 10 * 1024


def test_forward_substitution_needs_no_products(work, device):
    solve_scalar(100, device, linear.ForwardSubstitution())
    assert work.composed == []
    assert work.applied == [1] * 99


def test_blocks_that_need_no_gradient_cost_none(monkeypatch, device):
    def refuse(*_):
        raise AssertionError("nobody asked for the gradient in the blocks")

    monkeypatch.setattr(linear.Dense, "outer", refuse)
    rhs = torch.ones(9, 3, dtype=torch.float64, device=device, requires_grad=True)
    linear.solve(random_blocks(linear.Dense, 9, device=device), rhs).sum().backward()
    assert torch.isfinite(rhs.grad).all()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("solver", PARALLEL_SOLVERS, ids=str)
@pytest.mark.parametrize(("gain", "least", "most"), [(0.5, 0, 1e2), (4.0, 1e20, 1e80)], ids=["stable", "unstable"])
def test_every_step_is_as_accurate_as_by_forward_substitution(gain, least, most, structure, solver, device):
    blocks = random_blocks(structure, 100, (4,), 6, device=device, gain=gain)
    rhs = torch.randn(100, 4, 6, dtype=torch.float64, device=device)
    for reverse in (False, True):
        expected = one_after_the_other(blocks.to_dense(6), rhs, reverse=reverse)
        assert least <= expected.abs().amax() <= most
        reference = linear.solve(blocks, rhs, reverse=reverse, solver=linear.ForwardSubstitution())
        assert_same_steps(reference, expected, 1e-10)
        assert_same_steps(linear.solve(blocks, rhs, reverse=reverse, solver=solver), reference, 1e-10)


@pytest.mark.parametrize("solver", PARALLEL_SOLVERS, ids=str)
def test_states_of_very_different_sizes_are_all_accurate(solver, device):
    # Sixty steps up to 1e30 and sixty down again: an error relative to the largest state would hide the small ones.
    gain = torch.cat([torch.full((60,), 10**0.5), torch.full((60,), 10**-0.5)]).double()
    rotations = torch.linalg.qr(torch.randn(120, 5, 5, dtype=torch.float64)).Q
    blocks = linear.Dense((rotations * gain[:, None, None]).to(device))
    rhs = torch.zeros(120, 5, dtype=torch.float64, device=device)
    rhs[0] = 1.0
    expected = one_after_the_other(blocks.data, rhs)
    assert expected.abs().amax() > 1e28
    assert expected[-1].abs().amax() < 10
    assert_same_steps(linear.solve(blocks, rhs, solver=solver), expected, 1e-10)
