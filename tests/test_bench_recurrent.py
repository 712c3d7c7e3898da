"""The benchmark of recurrent modules: what it checks before it times, and what it writes."""

import sys
from dataclasses import astuple

import pytest
import torch

from scripts import script

bench = script("benchmarks", "recurrent")


@pytest.fixture
def run(bench, dry_run, monkeypatch):
    """Of two sizes, one of them with gradients."""
    chosen = [each for each in bench.sizes(["GRU"], quick=True) if each.T == 33]
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
    assert len(wrong) == 3
    assert not any(case["passed"] or case["seconds"] for case in wrong)


def test_a_budget_leaves_out_what_it_cannot_pay(run):
    code, record = run("--budget", "0")
    assert code == 0
    assert record["cases"] == []
    assert record["settings"]["left_out"] == 6
    assert record["targets"][-1]["value"] is None


def test_any_part_of_the_grid_covers_all_of_it(bench):
    every = bench.sizes(bench.KINDS, quick=False)
    assert every == bench.sizes(bench.KINDS, quick=False)
    assert 130 <= len(every) == len(set(every)) <= 150
    assert max(each.T for each in every) == 32_768  # cuDNN refuses 65,536
    axes = [bench.KINDS, bench.STEPS, bench.ROWS, (*bench.HIDDEN, 64), (bench.FORWARD, bench.BOTH)]
    for first in (every[:24], every[:60], every):
        for axis, values in enumerate(axes):
            counts = [sum(astuple(each)[axis] == value for each in first) for value in values]
            assert sum(counts) == len(first)
            assert min(counts) > 0.5 * max(counts) or axis == 3  # of widths, the one between has fewer places
            assert min(counts) >= 4
    pairs = {(each.kind, each.H, each.direction) for each in every}
    assert len(pairs) == 3 * 5 * 2


def test_kernels_are_made_for_what_is_measured(bench):
    made = bench.with_kernels(("targets", "torch"), ("LSTM",))
    assert {each.kind for each in made} == {"LSTM"}
    assert {each.H for each in made} == {8, 16, 32, 64}  # of wider ones the state has more numbers than kernels take
    assert all(each in made for each in bench.sizes(["LSTM"], quick=False) if each.H <= 64)
    assert bench.TOO_LONG in bench.with_kernels(("torch",), ("GRU",))


def test_what_pytorch_refuses_is_no_failure_where_auto_runs_it(run, bench, monkeypatch):
    """Float64, and PyTorch's own errors, are taken piece by piece there."""
    monkeypatch.setattr(sys.modules["recurrent_methods"], "PIECE", 20)
    plain = torch.nn.GRU.forward

    def refuses(self, input, hx=None):
        if len(input) > 20 and type(self) is torch.nn.GRU:
            raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")
        return plain(self, input, hx)

    monkeypatch.setattr(torch.nn.GRU, "forward", refuses)
    monkeypatch.setattr(bench, "sizes", lambda kinds, quick: [])
    code, record = run("--part", "torch")
    assert code == 0
    found = {case["method"]: case for case in record["cases"] if case["suite"] == "too long"}
    assert "CUDNN" in found["torch.nn"]["failure"]
    assert not found["torch.nn"]["seconds"]
    assert found["auto"]["seconds"]
    assert found["auto"]["error"] <= 1


def test_pieces_are_the_whole(bench):
    from recurrent_methods import InPieces

    torch.manual_seed(0)
    x = torch.randn(11, 2, 3, dtype=torch.float64, requires_grad=True)
    for kind in bench.KINDS:
        module = getattr(torch.nn, kind)(3, 3, dtype=torch.float64)
        found, right = (bench.run_of(each, x, x.detach(), bench.BOTH)() for each in (InPieces(module, 4), module))
        assert len(found) == 6
        torch.testing.assert_close(found, right, rtol=0, atol=1e-13)


def test_gates_of_the_peer_are_ours(bench):
    """Its gradients come back in our order."""
    from recurrent_methods import as_ours, gates_of

    order = gates_of(2, torch.device("cpu"))
    assert order.tolist() == [2, 3, 0, 1, 4, 5]
    assert order[order].tolist() == list(range(6))
    weight, bias = torch.arange(12.0).view(6, 2)[order], torch.arange(6.0)[order]
    update, reset, new = (torch.full((2,), float(at)) for at in (1, 0, 2))
    found = as_ours([torch.zeros(3, 4, 2), torch.zeros(3, 4, 2), weight, update, reset, new, bias], 2)
    assert found[0].shape == (4, 3, 2)
    assert torch.equal(found[2], torch.arange(12.0).view(6, 2))
    assert found[3][:, 0].tolist() == [0, 1, 2]
    assert found[4].tolist() == list(range(6))


@pytest.mark.parametrize(("later", "slower"), [(1.0, False), (1.3, True)])
def test_rounds_go_on_where_auto_seems_slower(bench, monkeypatch, later, slower):
    """A third more in the first rounds may be noise; what stays slower is told."""
    runs = {bench.TORCH: lambda: 0.0, bench.AUTO: lambda: 0.0}
    rounds = iter(range(10**6))

    def seconds_of(run, calls, device):
        return 1.0 if run is runs[bench.TORCH] else 1.3 if next(rounds) < 3 else later

    monkeypatch.setattr(bench, "seconds_of", seconds_of)
    run = bench.Run(torch.device("cpu"), False, ["GRU"], 1.0, bench.Results("recurrent", bench.options_of([])))
    methods = ((name, bench.Method(each, abs)) for name, each in runs.items())
    found = run.examine("torch", bench.Size("GRU", 5, 1, 2, bench.FORWARD), methods, (3, 0.0), bench.is_slower)
    assert bench.is_slower(found) is slower
    assert [len(case.seconds) for case in found] == [bench.DOUBTED[0]] * 2
