"""What ranks say to each other: how often, how much, and that it does not depend on the number of steps."""

from __future__ import annotations

import pytest
import torch

from distributed import cases
from distributed.test_linear import CUTS as LINEAR_CUTS
from distributed.test_linear import assert_same as assert_same_system
from distributed.test_linear import of_one
from distributed.test_solve import CUTS, assert_same


def traffic(team, length, **options):
    (first, *others) = team.results(3, "distributed.more_cases", "traffic", length=length, **options)
    if not options.get("rounds"):  # in which the last rank tells nobody
        assert all(each == first for each in others)
    return first


def test_messages_and_bytes_do_not_depend_on_the_number_of_steps(team):
    short, long = traffic(team, 60, solver="fixed"), traffic(team, 600, solver="fixed")
    assert short == long


def test_an_iteration_is_one_prefix_and_one_packed_message(team):
    """docs/distributed.md says how many messages and bytes these are; B rows of D numbers of 8 bytes."""
    forward, backward, iterations = traffic(team, 90, solver="fixed")
    rows, width = 2, 3
    maps, facts = 8 * rows * (width * width + width), 8
    edges, measures = 8 * (2 * rows * width + 1), 8 * (1 + rows * (7 + width))
    gathered = forward["all_gather"]
    assert iterations == 4
    assert gathered.count(maps) == iterations
    assert gathered.count(edges + measures) == iterations
    # What is said once a solve: who has what, whether all can, the chunk, the structure; the first edges, the last, and what is judged.
    once = [each for each in gathered if each not in (maps, edges + measures)]
    assert len(once) == 8
    assert sum(once) < 8 * facts * (8 + rows * (2 * width + 4))
    assert {name: len(each) for name, each in forward.items()} == {"all_gather": len(gathered), "broadcast": 1}
    # Backwards: twice a prefix and a packed message, the second of which shows that the first was right.
    assert backward["all_gather"].count(maps) == 2
    assert len(backward["all_gather"]) == 5
    assert len(backward["all_reduce"]) == 1


def test_many_ranks_speak_in_rounds(team):
    forward, _, iterations = traffic(team, 90, solver="fixed", rounds=True)
    maps = 8 * 2 * (3 * 3 + 3)
    assert forward["batch_isend_irecv"].count(maps) + forward["batch_isend_irecv"].count(2 * maps) == 2 * iterations
    assert len(forward["all_reduce"]) >= iterations


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_rounds_give_the_same(team, name):
    found = team.results(3, "distributed.more_cases", "solved_in_rounds", name=name, lengths=CUTS[3])
    assert_same(found, cases.solved(None, name, CUTS[3]))


@pytest.mark.parametrize("reverse", [False, True])
def test_rounds_give_the_same_systems(team, reverse):
    settings = {"kind": "dense", "reverse": reverse}
    found = team.results(3, "distributed.more_cases", "linear_in_rounds", lengths=LINEAR_CUTS[3], **settings)
    assert_same_system(found, of_one(length=9, **settings))


@pytest.mark.thorough
def test_rounds_of_eight(team):
    for name in ("mlp", "gru"):
        found = team.results(8, "distributed.more_cases", "solved_in_rounds", name=name, lengths=CUTS[8])
        assert_same(found, cases.solved(None, name, CUTS[8]))


def test_memory_of_a_rank_falls_with_their_number(team):
    alone, *_ = team.results(1, "distributed.more_cases", "memory", length=1500)
    shared = team.results(3, "distributed.more_cases", "memory", length=1500)
    assert all(each < alone / 2.4 for each in shared)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("size", "lengths"), [(7, None), (2, None), (7, [0, 5, 2])])
def test_shard_and_gather(team, size, lengths, dim):
    found = team.results(3, "distributed.more_cases", "cut_and_put_together", size=size, lengths=lengths, dim=dim)
    parts, wholes, of_wholes, of_parts = zip(*found, strict=True)
    whole = torch.cat(parts, dim)
    assert whole.shape[dim] == size
    assert all(torch.equal(each, whole) for each in wholes)
    sizes = [each.shape[dim] for each in parts]
    assert sizes == (lengths or [size // 3 + (rank < size % 3) for rank in range(3)])
    torch.testing.assert_close(sum(of_wholes), 2 * whole)
    torch.testing.assert_close(torch.cat(of_parts, dim), (1 + 2 + 3) * 2 * whole)


def test_dtensors_stay_dtensors(team):
    assert team.results(2, "distributed.more_cases", "with_dtensors") == [True, True]
