"""Sampling with the rows of the window spread over ranks gives the samples, and the certificate, of one process."""

from __future__ import annotations

import pytest
import torch

import deeppcr
from distributed import more_cases

OPTIONS = [
    {},
    {"step": "ddpm", "samples": 1},
    pytest.param({"guided": True, "samples": 3}, marks=pytest.mark.thorough),
    {"width": 8, "length": 40},
    {"length": 2, "samples": 1},
    {"solver": deeppcr.Loop(), "samples": 5},
]


@pytest.mark.parametrize("size", [3, pytest.param(8, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_samples(team, options, size):
    found = team.results(size, "distributed.more_cases", "denoised", **options)
    expected = more_cases.denoised(None, **options)
    for each in found:
        torch.testing.assert_close(each["final"], expected["final"], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(each["noise"], expected["noise"], rtol=1e-9, atol=1e-9)
        assert each["results"] == expected["results"]
        for name in ("iterations", "evaluations"):
            assert torch.equal(each[name], expected[name])
    for at, wanted in enumerate(expected["weights"]):
        torch.testing.assert_close(sum(each["weights"][at] for each in found), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"wrong": "noise"}, "ValueError", "noise: must be the same on every rank"),
        ({"wrong": "raises"}, "RankError", "rank 1 of 3: ArithmeticError: no such noise"),
        ({"solver": deeppcr.Newton()}, "ValueError", "solver: with a mesh, expected Window"),
    ],
    ids=str,
)
def test_what_is_refused(team, options, kind, words):
    raised = team.run(3, "distributed.more_cases", "denoised", **options)
    assert {each.kind for each in raised} == {kind}, raised
    assert len({each.message for each in raised}) == 1
    assert words in raised[0].message
