"""A loop over ranks gives what it gives in one process: states, all gradients, and what is said of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed import cases

CUTS = {1: [23], 2: [9, 14], 3: [11, 0, 12], 4: [0, 1, 20, 2], 8: [3, 0, 1, 8, 0, 9, 1, 1]}
LOOPS = ("mlp", "gru", "lstm", "elementwise", "rk4", "complex")
sizes = [2, 3, *(pytest.param(size, marks=pytest.mark.thorough) for size in (1, 4, 8))]


def assert_same(found, expected, tolerance=1e-10):
    def close(each, wanted):
        assert each.shape == wanted.shape
        assert (each - wanted).abs().max() <= tolerance * max(float(wanted.abs().max()), 1e-30)

    for at, wanted in enumerate(expected["states"]):
        close(torch.cat([each["states"][at] for each in found]), wanted)
    for at, wanted in enumerate(expected["final"]):
        for each in found:
            close(each["final"][at], wanted)
    close(torch.cat([each["xs"] for each in found]), expected["xs"])
    for at, wanted in enumerate(expected["shared"]):
        close(sum(each["shared"][at] for each in found), wanted)


def assert_said_alike(found, expected, *names):
    for each in found:
        for name in names:
            torch.testing.assert_close(each[name], expected[name]) if isinstance(expected[name], torch.Tensor) else None
            if not isinstance(expected[name], torch.Tensor):
                assert each[name] == expected[name], name


@pytest.mark.parametrize("size", sizes)
@pytest.mark.parametrize("name", LOOPS)
def test_loops(team, name, size):
    lengths = CUTS[size]
    found = team.results(size, "distributed.cases", "solved", name=name, lengths=lengths)
    expected = cases.solved(None, name, lengths)
    assert_same(found, expected)
    assert_said_alike(found, expected, "result", "exact", "known", "message")


def test_what_adds_up_unseen_over_ranks_is_found(team):
    lengths = [6, 0, 7]
    found = team.results(3, "distributed.cases", "solved", name="creeping", lengths=lengths, solver="paper")
    assert_same(found, cases.solved(None, "creeping", lengths, solver="loop"))
    assert {each["result"] for each in found} == {"FINISHED_BY_LOOP"}


def test_what_was_large_on_another_rank_does_not_hide_what_adds_up(team):
    lengths = [20, 0, 90]
    found = team.results(3, "distributed.cases", "solved", name="reset", lengths=lengths, solver="paper")
    assert_same(found, cases.solved(None, "reset", lengths, solver="loop"))
    assert {each["result"] for each in found} == {"FINISHED_BY_LOOP"}


@pytest.mark.parametrize(
    "solver",
    [
        pytest.param(each, marks=pytest.mark.thorough) if each in ("paper", "usual", "fixed", "scalar") else each
        for each in cases.SOLVERS
        if each != "newton"
    ],
)
def test_solvers(team, solver):
    name = "elementwise" if solver in ("diagonal", "hutchinson", "jacobi") else "mlp"
    found = team.results(3, "distributed.cases", "solved", name=name, lengths=CUTS[3], solver=solver)
    expected = cases.solved(None, name, CUTS[3], solver=solver)
    assert_same(found, expected, 1e-9)
    assert len({each["message"] for each in found}) == 1
    if solver != "usual":
        assert_said_alike(found, expected, "result", "exact")


def test_iterations_are_those_of_one_process(team):
    found = team.results(3, "distributed.cases", "solved", name="mlp", lengths=[40, 24, 36])
    assert_said_alike(found, cases.solved(None, "mlp", [40, 24, 36]), "iterations")


def test_tolerances_are_relative_to_what_was_seen_on_any_rank_before(team):
    """A signal that dies out is known to the tolerance of its largest size; what is known of it is what one process says."""
    lengths = [8, 0, 80]
    found, expected = team.results(3, "distributed.cases", "solved", name="dying", lengths=lengths), None
    expected = cases.solved(None, "dying", lengths)
    assert int(expected["known"].max()) < 60
    assert_said_alike(found, expected, "known", "message", "result", "iterations")


def test_what_approximate_jacobians_find_is_certified(team):
    """Or not: of a step whose derivative is not that of its values nothing is known but what each iteration made exact."""
    found = team.results(3, "distributed.cases", "said", name="detached", lengths=[20, 0, 20], solver="scalar")
    expected = cases.said(None, "detached", [20, 0, 20], solver="scalar")
    assert expected["result"] == "UNCERTIFIED"
    assert_said_alike(found, expected, "result", "exact", "iterations")


def test_a_certificate_follows_an_error_from_rank_to_rank(team):
    """What is left of it where a part ends is far below the tolerance, and what the next part makes of it is not."""
    lengths = [40, 0, 40]
    found, expected = team.results(3, "distributed.cases", "misled", lengths=lengths), cases.misled(None, lengths)
    assert expected["result"] == "NOT_CONVERGED"
    assert_said_alike(found, expected, "result", "exact", "iterations")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_cuts(team, data):
    size = data.draw(st.sampled_from([each for each in team.sizes if each > 1]))
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(sum))
    name, solver = data.draw(st.sampled_from(LOOPS)), data.draw(st.sampled_from(["newton", "paper", "long chunks"]))
    found = team.results(size, "distributed.cases", "solved", name=name, lengths=lengths, solver=solver)
    assert_same(found, cases.solved(None, name, lengths, solver=solver))
