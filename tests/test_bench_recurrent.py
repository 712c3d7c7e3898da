"""The benchmark of recurrent modules: what it checks before it times, and what it writes."""

import pytest
import torch

from scripts import script

bench = script("benchmarks", "recurrent")


@pytest.fixture
def run(bench, dry_run, monkeypatch):
    """Of one size."""
    chosen = [each for each in bench.sizes(["GRU"], quick=True) if (each.T, each.B) == (33, 3)]
    monkeypatch.setattr(bench, "sizes", lambda kinds, quick: chosen)
    monkeypatch.setattr(bench, "TARGETS", {("GRU", 33, 1, 2): {bench.PARALLEL: 1e-9}})
    return dry_run


def test_a_dry_run(run, bench):
    code, record = run()
    assert code == 0
    assert record["experiment"] == "recurrent-quick"
    assert record["commit"] == "abc1234"
    found = {(case["suite"], case["method"]) for case in record["cases"] if case["passed"] and case["seconds"]}
    assert {("torch", "torch.nn"), ("torch", "auto"), ("torch", "parallel"), ("diagonal", "DiagonalGRU")} <= found
    assert {case["parameters"]["direction"] for case in record["cases"]} == {bench.FORWARD, bench.BOTH}
    target, other, of_grid = record["targets"]
    assert target["name"] == "GRU 33 1 2 forward and backward: parallel over torch.nn"
    assert target["met"]
    assert other["name"].endswith("DiagonalGRU over pararnn-torch")
    assert of_grid["name"].startswith("of 2 sizes")


def test_what_is_wrong_is_not_timed(run, bench, monkeypatch):
    module = bench.Layer.module

    def wrong(self, mode, **options):
        found = module(self, mode, **options)
        if mode == "parallel":
            with torch.no_grad():
                found.weight_hh_l0 += 1e-4
        return found

    monkeypatch.setattr(bench.Layer, "module", wrong)
    code, record = run("--part", "torch")
    assert code == 1
    wrong = [case for case in record["cases"] if case["method"] == "parallel"]
    assert len(wrong) == 2
    assert not any(case["passed"] or case["seconds"] for case in wrong)


def test_a_budget_leaves_out_what_it_cannot_pay(run):
    code, record = run("--budget", "0")
    assert code == 0
    assert record["cases"] == []
    assert record["settings"]["left_out"] == 5
    assert record["targets"][-1]["value"] is None


def test_the_grid_does_not_depend_on_the_budget(bench):
    every = bench.sizes(bench.KINDS, quick=False)
    assert every == bench.sizes(bench.KINDS, quick=False)
    assert {each.kind for each in every[:20]} == set(bench.KINDS)
    assert {(each.T, each.H) for each in every} >= {(64, 512), (65536, 8)}


def test_gates_of_the_peer_are_ours(bench):
    """Its gradients come back in our order."""
    order = bench.gates_of(2, torch.device("cpu"))
    assert order.tolist() == [2, 3, 0, 1, 4, 5]
    assert order[order].tolist() == list(range(6))
    weight, bias = torch.arange(12.0).view(6, 2)[order], torch.arange(6.0)[order]
    update, reset, new = (torch.full((2,), float(at)) for at in (1, 0, 2))
    found = bench.as_ours([torch.zeros(3, 4, 2), torch.zeros(3, 4, 2), weight, update, reset, new, bias], 2)
    assert found[0].shape == (4, 3, 2)
    assert torch.equal(found[2], torch.arange(12.0).view(6, 2))
    assert found[3][:, 0].tolist() == [0, 1, 2]
    assert found[4].tolist() == list(range(6))
