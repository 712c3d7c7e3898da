"""What was large once, on whichever rank, hides nothing that comes after it on any of them: see tests/test_transient.py."""

from __future__ import annotations

import pytest
import torch

import test_transient as alone
from deeppcr.tolerance import Tolerance
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


def signal(kind, length):
    """The sizes of states, the initial one first."""
    at = torch.arange(length + 1.0)
    sizes = {
        "lives": torch.ones(length + 1),
        "dies": 0.99**at,
        "lives for a while": torch.where(at < max(40, length // 12), 1.0, 0.0),
        "becomes large in the end": torch.where(at > length - 5, 1e9, 1.0),
    }[kind]
    sizes[0] = 1.0 if kind == "dies" else 1e7
    return sizes


@pytest.mark.parametrize("length", [60, 3000])  # of the longer one the largest of groups are told
@pytest.mark.parametrize("kind", ["lives", "dies", "lives for a while", "becomes large in the end"])
def test_the_rule_is_that_of_one_process(team, kind, length):
    sizes = signal(kind, length)
    for lengths in ([length // 2] * 2, [length // 4, length - length // 4], [0, length]):
        for errors in (0.5, 1e-6):
            found = team.results(
                2, "distributed.transients", "hides", sizes=sizes, errors=errors, lengths=lengths, rtol=1e-5
            )
            initial, states = sizes[0].view(1, 1), sizes[1:].view(-1, 1, 1)
            expected = Tolerance(0.0, 1e-5).hides(states, initial, torch.full_like(states, errors))
            assert found == [bool(expected)] * 2
            assert bool(expected) == (kind != "dies" and errors == 0.5)


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
