"""What goes wrong on one rank ends alike on all of them, in time, and says where."""

from __future__ import annotations

import time

import pytest
import torch

from distributed import cases, more_cases
from distributed.team import Raised, Team

LENGTHS = [6, 0, 30]
LONG = [60, 0, 240]


def broken(team, what, lengths=LENGTHS, **options):
    return team.run(3, "distributed.cases", "broken", lengths=lengths, what=what, **options)


@pytest.mark.parametrize("what", ["non-finite", "overflow", "overflow in a rank's first step"])
@pytest.mark.parametrize("solver", ["newton", "loop"])
def test_a_value_that_is_not_finite(team, what, solver):
    found = broken(team, what, solver=solver)
    expected = cases.broken(None, LENGTHS, what, solver=solver)
    assert {each["result"] for each in found} == {"NON_FINITE"}
    assert all(torch.equal(each["exact"], expected["exact"]) for each in found)
    (said,) = {each["description"] for each in found}
    assert f"step {int(expected['exact'].min()) + 1} produced a value that is not finite" in said
    assert "rank 2 holds that step" in said
    assert "xs holds NaN" in said or what.startswith("overflow")
    assert all(each["warned"] == ["ConvergenceWarning"] for each in found)
    states = torch.cat([each["states"] for each in found])
    torch.testing.assert_close(states, expected["states"], rtol=1e-9, atol=1e-12, equal_nan=True)
    if what == "non-finite":  # the other row's gradient is known on ranks before that step, too
        gradient = sum(each["z0"] for each in found)
        torch.testing.assert_close(gradient, expected["z0"], rtol=1e-9, atol=1e-12, equal_nan=True)


def test_a_value_that_is_not_finite_where_the_loop_does_not_finish(team):
    found, expected = (
        broken(team, "non-finite", on_failure="return"),
        cases.broken(None, LENGTHS, "non-finite", on_failure="return"),
    )
    assert {each["result"] for each in found} == {expected["result"]} == {"NON_FINITE"}
    assert all(torch.equal(each["exact"], expected["exact"]) for each in found)
    raised = broken(team, "non-finite", on_failure="raise")
    assert {each.kind for each in raised} == {"ConvergenceError"}
    assert len({each.message for each in raised}) == 1
    assert "step 8 produced a value that is not finite; xs holds NaN there" in raised[0].message


def test_chaos_is_left_to_the_loop_from_rank_to_rank(team):
    found, expected = broken(team, "logistic", LONG), cases.broken(None, LONG, "logistic", solver="loop")
    assert {each["result"] for each in found} == {"FINISHED_BY_LOOP"}
    assert torch.equal(torch.cat([each["states"] for each in found]), expected["states"])
    total = sum(each["z0"] for each in found)
    torch.testing.assert_close(total, expected["z0"], rtol=1e-9, atol=0)
    assert len({each["description"] for each in found}) == 1


def test_states_that_do_not_determine_the_derivatives_of_their_steps(team):
    lengths = [20, 0, 44]
    found, (expected, _, _) = (
        team.results(3, "distributed.more_cases", "vanishing", lengths=lengths),
        more_cases.vanishing(None, lengths),
    )
    gradients, results, warned = zip(*found, strict=True)
    assert set(results) == {"FINISHED_BY_LOOP"}
    assert all("have died out below the tolerance" in " ".join(each) for each in warned)
    assert (sum(gradients) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_on_failure(team):
    raised = broken(team, "logistic", LONG, on_failure="raise")
    assert {each.kind for each in raised} == {"ConvergenceError"}
    assert len({each.message for each in raised}) == 1
    returned = broken(team, "logistic", LONG, on_failure="return")
    assert {each["result"] for each in returned} == {"NOT_CONVERGED"}


@pytest.mark.parametrize("solver", ["newton", "paper", "loop"])
def test_an_exception_in_the_step_of_one_rank(team, solver):
    raised = broken(team, "raises", solver=solver)
    assert {each.kind for each in raised} == {"RankError"}
    (message,) = {each.message for each in raised}
    assert "rank 2 of 3: ArithmeticError: 77 is no input" in message
    assert "step 8" in message if solver == "paper" else "step" in message


def test_an_exception_in_the_backward_pass_of_one_rank(team):
    raised = broken(team, "backward")
    assert {each.kind for each in raised} == {"RankError"}, raised
    assert len({each.message for each in raised}) == 1
    assert "no derivative at 77" in raised[0].message


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("z0 differs", "ValueError", "z0: must be the same on every rank, and its values differ"),
        ("z0 changes places", "ValueError", "z0: must be the same on every rank, and its values differ"),
        (
            "z0 differs beside something large",
            "ValueError",
            "z0: must be the same on every rank, and its values differ",
        ),
        ("solver differs", "ValueError", "solver, on_failure: must be the same on every rank"),
        ("tolerance differs", "ValueError", "solver, on_failure: must be the same on every rank"),
        ("on_failure differs", "ValueError", "solver, on_failure: must be the same on every rank"),
        ("shape differs", "ValueError", "z0: must be the same on every rank"),
        ("no steps", "ValueError", "no rank has any"),
        ("unrolled", "ValueError", "gradient: over ranks there is Implicit() alone"),
        ("kept", "ValueError", "keep: with a mesh there is 'all' alone"),
        ("graph", "ValueError", "solver: over ranks the loop is Loop()"),
        ("guess", "RankError", "rank 1 of 3: ValueError: guess: expected states of shape"),
        ("step", "RankError", "rank 1 of 3"),
        ("mesh", "TypeError", "mesh: expected a one-dimensional DeviceMesh"),
    ],
)
def test_what_is_refused(team, what, kind, words):
    raised = team.run(3, "distributed.cases", "refused_solve", what=what)
    assert all(isinstance(each, Raised) for each in raised), raised
    assert {each.kind for each in raised} == {kind}
    assert len({each.message for each in raised}) == 1
    assert words in raised[0].message


def test_a_rank_that_is_killed(tmp_path):
    """The others end with an error before the timeout, and no process is left."""
    team = Team(2, (2,))
    begin = time.monotonic()
    found = team.run_and_kill(1, 2, "distributed.cases", "endless")
    assert time.monotonic() - begin < 40
    assert isinstance(found, Raised)
    assert found.kind in ("RuntimeError", "DistBackendError", "DistNetworkError")
    team.close()
    assert not any(process.is_alive() for process in team.processes)
