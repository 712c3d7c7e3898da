"""Linear systems over ranks are those of one process: states and all derivatives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deeppcr import linear
from distributed import cases

CUTS = {1: [7], 2: [5, 4], 3: [4, 0, 5], 4: [0, 1, 0, 6], 8: [3, 0, 1, 2, 0, 4, 1, 1]}
sizes = [2, 3, *(pytest.param(size, marks=pytest.mark.thorough) for size in (1, 4, 8))]


def of_one(kind, length, reverse, dtype=torch.float64, initial=True, twice=False, gain=0.9, width=4):
    """The same in one process."""
    data, rhs, start, weights = cases.system(kind, length, dtype=dtype, gain=gain, width=width)
    leaves = [each.requires_grad_() for each in (data, rhs, *([start] if initial else []))]
    states = linear.solve(cases.STRUCTURES[kind](data), rhs, start if initial else None, reverse=reverse)
    loss = (states * weights).abs().square().sum()
    if not twice:
        return states.detach(), *torch.autograd.grad(loss, leaves)
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    return states.detach(), *torch.autograd.grad(sum(each.abs().square().sum() for each in first), leaves)


def assert_same(found, expected, tolerance=1e-10):
    """Parts of ranks put together: states and gradients of parts follow each other, those of the initial state add up."""
    states, data, rhs, *start = zip(*found, strict=True)
    together = [torch.cat(each) for each in (states, data, rhs)] + [sum(each) for each in start]
    for each, wanted in zip(together, expected, strict=True):
        scale = wanted.abs().max()
        assert (each - wanted).abs().max() <= tolerance * scale


@pytest.mark.parametrize("size", sizes)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", list(cases.STRUCTURES))
def test_states_and_gradients(team, kind, reverse, size):
    lengths = CUTS[size]
    found = team.results(size, "distributed.cases", "linear_solve", kind=kind, lengths=lengths, reverse=reverse)
    assert_same(found, of_one(kind, sum(lengths), reverse))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["dense", "diagonal"])
def test_second_derivatives(team, kind, reverse):
    settings = {"kind": kind, "reverse": reverse, "twice": True}
    found = team.results(3, "distributed.cases", "linear_solve", lengths=CUTS[3], **settings)
    assert_same(found, of_one(length=9, **settings))


def test_complex_numbers(team):
    settings = {"kind": "diagonal", "reverse": False, "dtype": torch.complex128}
    found = team.results(3, "distributed.cases", "linear_solve", lengths=CUTS[3], **settings)
    assert_same(found, of_one(length=9, **settings))


def test_without_an_initial_state(team):
    settings = {"kind": "dense", "reverse": True, "initial": False}
    found = team.results(3, "distributed.cases", "linear_solve", lengths=CUTS[3], **settings)
    assert_same(found, of_one(length=9, **settings))


def test_half_precision_is_accumulated_in_float32(team):
    settings = {"kind": "dense", "reverse": False, "dtype": torch.bfloat16}
    found = team.results(2, "distributed.cases", "linear_solve", lengths=CUTS[2], **settings)
    assert all(each.dtype is torch.bfloat16 for each in found[0])
    assert_same(found, of_one(length=9, **settings), tolerance=0.02)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_cuts(team, data):
    size = data.draw(st.sampled_from([each for each in team.sizes if each > 1]))
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=size, max_size=size).filter(sum))
    kind, reverse = data.draw(st.sampled_from(list(cases.STRUCTURES))), data.draw(st.booleans())
    found = team.results(size, "distributed.cases", "linear_solve", kind=kind, lengths=lengths, reverse=reverse)
    assert_same(found, of_one(kind, sum(lengths), reverse))


def test_products_that_overflow(team):
    lengths = [300, 300, 300]
    found = team.results(3, "distributed.cases", "overflowing", lengths=lengths)
    torch.testing.assert_close(torch.cat(found), cases.overflowing(None, lengths), rtol=1e-12, atol=1e-12)


def test_products_that_lose_digits(team):
    lengths = [700, 700, 600]
    found, expected = team.results(3, "distributed.cases", "filtering", lengths=lengths), cases.filtering(None, lengths)
    assert (torch.cat(found) - expected).abs().max() <= 1e-9 * expected.abs().max()


def test_bad_arguments_are_refused_on_all_ranks(team):
    for wrong, words in (("structure", "the same on every rank"), ("width", "rank 1 of 3: ValueError: blocks: width")):
        found = team.run(3, "distributed.cases", "refused", wrong=wrong)
        assert all(words in each.message for each in found)
        assert len({each.message for each in found}) == 1
