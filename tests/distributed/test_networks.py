"""Recurrent networks over ranks are those of one process."""

from __future__ import annotations

import pytest

from distributed import more_cases
from distributed.test_solve import CUTS, assert_same

OTHERS = [
    ("RNN", {}),
    ("LSTM", {"bidirectional": True, "num_layers": 2}),
    ("GRU", {"batch_first": True, "reset": True}),
    ("DiagonalGRU", {"bidirectional": True}),
    ("GRU", {"mode": "sequential"}),
    pytest.param("DiagonalLSTM", {}, marks=pytest.mark.thorough),
    pytest.param("GRU", {"hx": False}, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("name", "options"), OTHERS, ids=str)
def test_networks(team, name, options):
    found = team.results(3, "distributed.more_cases", "recurrent", name=name, lengths=CUTS[3], **options)
    expected = more_cases.recurrent(None, name, CUTS[3], **options | {"mode": "parallel"})
    assert_same(found, expected)
    assert len({tuple(each["results"]) for each in found}) == 1


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("packed", "expected a tensor"),
        ("reset", "in one direction alone"),
        ("start", "rank 1 of 3: TypeError: hx: expected torch.float64"),
        ("width", "rank 1 of 3: ValueError: input"),
    ],
)
def test_what_is_refused(team, what, words):
    raised = team.run(3, "distributed.more_cases", "refused_network", what=what)
    assert len({each.message for each in raised}) == 1
    assert words in raised[0].message
