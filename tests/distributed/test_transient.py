"""What was large once, on whichever rank, hides nothing that comes after it on any of them: see tests/test_transient.py."""

from __future__ import annotations

import pytest
import torch

import test_transient as alone
from problems import plain_loop


def solved(team, step, z0, xs, *, lengths, **options):
    """What each rank says, the states of all, and those of the loop."""
    found = team.results(
        len(lengths), "distributed.transients", "solved", step=step, z0=z0, xs=xs, lengths=lengths, **options
    )
    states = torch.cat([each.pop("states") for each in found])
    (said,) = {str(each): each for each in found}.values()  # all ranks the same
    return said, states, plain_loop(getattr(alone, step), z0, xs)


@pytest.mark.parametrize("chunk", ["auto", 1])
@pytest.mark.parametrize("lengths", [[150, 150], [5, 295], [290, 10]])
def test_a_large_start(team, lengths, chunk):
    xs, z0 = alone.driven(), torch.tensor([1e7])
    said, states, loop = solved(team, "forgetting", z0, xs, lengths=lengths, chunk=chunk)
    assert (states - loop).abs()[20:].max() <= 1e-3
    assert said["result"] == "CONVERGED"
    assert said["local"] == [True]
    assert said["known"] == [len(xs)]
    assert said["asked"]
    assert not said["told"]
    usual, *_ = solved(team, "forgetting", torch.ones(1), xs, lengths=lengths, chunk=chunk)
    assert said["iterations"][0] <= usual["iterations"][0] + 4
    assert usual["local"] is None


def test_a_burst_on_one_rank_and_rows_by_themselves(team):
    """What it hides is on the next rank, where nothing was ever large; the other row is solved as without it."""
    xs, z0 = alone.driven().view(-1, 1, 1).repeat(1, 2, 1), torch.zeros(2, 1)
    xs[20, 1] = 3e8
    said, states, loop = solved(team, "forgetting", z0, xs, lengths=[24, 276])
    assert said["local"] == [False, True]
    off = (states - loop).abs()
    assert off[:20].max() <= 1e-3
    assert off[40:].max() <= 1e-3
    usual, *_ = solved(team, "forgetting", z0[:1], xs[:, :1], lengths=[24, 276])
    assert said["iterations"][0] == usual["iterations"][0]


def test_a_burst_in_more_steps_than_are_told_of(team):
    """Of so many chunks ranks tell each other the largest of groups; what is finer each sees in its own part."""
    length = 2 * 3000
    xs, z0 = torch.sin(torch.arange(length) ** 2.0), torch.zeros(1)
    xs[100], xs[400] = 3e8, 3e8  # what lives between is shorter than groups tell of
    said, states, loop = solved(team, "forgetting", z0, xs, lengths=[3000, 3000], chunk=1)
    assert said["local"] == [True]
    off = (states - loop).abs()
    assert off[120:400].max() <= 1e-3
    assert off[420:].max() <= 1e-3


def test_what_cannot_be_found_is_left_to_the_loop_and_told(team):
    xs, z0 = alone.driven(), torch.tensor([1e7])
    said, states, loop = solved(team, "chaotic", z0, xs, lengths=[150, 150])
    assert said["result"] == "FINISHED_BY_LOOP"
    assert said["told"]
    assert torch.allclose(states, loop)


@pytest.mark.parametrize("solver", ["jacobi", "diagonal", "picard"])
def test_other_jacobians(team, solver):
    xs, z0 = alone.driven(), torch.tensor([1e7])
    said, states, loop = solved(team, "forgetting", z0, xs, lengths=[150, 150], solver=solver)
    assert said["told"] or said["result"] == "CONVERGED"
    assert (states - loop).abs()[20:].max() <= 1e-3


@pytest.mark.parametrize("lengths", [[300, 300], [100, 500]])
def test_signals_that_die_out_keep_their_iterations(team, lengths):
    found = team.results(2, "distributed.transients", "died_out", seed=0, lengths=lengths)
    assert all(local is None and result == "CONVERGED" and iterations <= 8 for result, local, iterations in found)
