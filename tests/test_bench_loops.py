"""The benchmark of users' loops: what it checks before it times, what it writes, and how it reads its own numbers."""

import importlib
import json
import sys
import time
from dataclasses import replace

import pytest
import torch

import deeppcr
from scripts import ROOT, script

bench = script("benchmarks", "loops")


@pytest.fixture(autouse=True)
def quickly(bench, precision, monkeypatch):
    monkeypatch.setattr(sys.modules["kernels"], "LONG", 0.0)  # nothing is repeated
    monkeypatch.setattr(sys.modules["loop_methods"], "HAS_PARARNN", False)


def of_method(record: dict, method: str) -> list[dict]:
    return [case for case in record["cases"] if case["method"] == method]


def test_a_dry_run_of_the_table(dry_run, capsys, monkeypatch, device):
    ways = {"Newton()": deeppcr.Newton, "Loop()": deeppcr.Loop, "nothing": lambda: deeppcr.Newton(chunk="none")}
    monkeypatch.setattr(sys.modules["loop_methods"], "WAYS", ways)
    code, record = dry_run("--part", "table", "--only", "gru")
    assert code == 0
    assert record["experiment"] == "loops-quick"
    assert record["commit"] == "abc1234"
    assert record["machine"]["hardware"]
    assert record["versions"]["deeppcr"] == deeppcr.__version__
    assert record["settings"]["parts"] == ["table"]
    for method in ("solve", "solve, with projections", "Newton()", "Loop()", "bare loop"):
        cases = of_method(record, method)
        assert [case["parameters"]["direction"] for case in cases] == ["forward", "forward and backward"]
        for case in cases:
            assert case["passed"], case
            assert case["error"] <= 1
            assert all(each > 0 for each in case["seconds"])
            assert case["first_seconds"] > 0
    # So few steps are one chunk where there are kernels.
    assert of_method(record, "Newton()")[0]["iterations"] >= int(device.type == "cpu")
    assert all("chunk: expected" in case["failure"] for case in of_method(record, "nothing"))  # which is no failure
    assert [target["limit"] for target in record["targets"]] == pytest.approx([0.3, 0.9])
    output = capsys.readouterr().out
    assert "0 failed their check" in output
    assert "gru, forward and backward, ms" in output


def test_a_loop_that_fails_is_told_and_the_others_go_on(bench, dry_run, capsys, monkeypatch):
    def breaks(*_):
        raise RuntimeError("out of memory\nand much more")

    kalman, langevin = (next(each for each in bench.TABLE if each.name == name) for name in ("kalman", "langevin"))
    monkeypatch.setattr(bench, "TABLE", (replace(kalman, make=breaks), langevin))
    monkeypatch.setattr(bench, "ways", lambda *_: {})
    code, record = dry_run("--part", "table")
    assert code == 1
    first, *rest = record["cases"]
    assert first["parameters"]["loop"] == "kalman"
    assert first["failure"] == "RuntimeError: out of memory"
    assert all(case["passed"] for case in rest)
    assert {case["parameters"]["loop"] for case in rest} == {"langevin"}
    assert "FAILED: RuntimeError: out of memory" in capsys.readouterr().out


def test_a_loop_whose_kernels_are_not_made_in_time_is_not_waited_for(bench, dry_run, monkeypatch):
    chosen = [replace(each, make=None) for each in bench.TABLE if each.name == "kalman"]
    monkeypatch.setattr(bench, "TABLE", chosen)
    monkeypatch.setattr(bench, "make_ready", time.sleep)
    monkeypatch.setattr(bench, "PREPARING", 0.0)
    monkeypatch.setattr(bench.loop_problems, "REFERENCES", None)  # and as it was, afterwards
    code, record = dry_run("--part", "table", "--workers", "2")
    assert code == 1
    (case,) = record["cases"]
    assert case["failure"] == "TimeoutError: its kernels were not made in 0 s"


@pytest.mark.parametrize("name", ["langevin", "lorenz"])  # by a loop in float64, by residuals
def test_a_wrong_result_is_written_and_not_timed(bench, dry_run, monkeypatch, name):
    solve = deeppcr.solve

    def wrong(*arguments, **settings):
        solution = solve(*arguments, **settings, solver=deeppcr.Loop())
        return replace(solution, states=torch.cat([solution.states[:-1], solution.states[-1:] * 1.001]))

    monkeypatch.setattr(deeppcr, "solve", wrong)
    monkeypatch.setattr(bench, "ways", lambda *_: {})
    code, record = dry_run("--part", "table", "--only", name)
    assert code == 1
    for case in of_method(record, "solve"):
        assert not case["passed"]
        assert case["seconds"] == []
        assert case["error"] > 1


def test_wrong_gradients_are_seen(bench):
    prepared = bench.Prepared(next(each for each in bench.TABLE if each.name == "kalman").small(), torch.device("cpu"))
    found = prepared.part("forward and backward", prepared.loop.L)()
    assert prepared.error(found) < 0.1
    spoilt = [each.clone() for each in found.gradients]
    spoilt[2][-1] *= 1.01  # of the last observation
    spoilt[2][-1] += 0.01 * spoilt[2].abs().max()
    assert prepared.error(replace(found, gradients=spoilt)) > 1


def test_the_choice_is_judged(bench, dry_run, capsys, monkeypatch):
    times = {"solve": 2e-3, "Loop()": 1e-3, "bare loop": 1.4e-3}
    monkeypatch.setattr(sys.modules["loop_methods"], "WAYS", {"Loop()": deeppcr.Loop})

    def timed(case, *_):
        case.seconds = [times[case.method]]

    monkeypatch.setattr(sys.modules["kernels"], "time_case", timed)
    names = [each.name for each in bench.CHOICE if each.make.__name__ == "filter_of_a_signal"][:2]
    _, record = dry_run("--part", "choice", "--only", *names)
    share, slow = record["targets"]
    assert (share["value"], share["met"]) == (1.0, False)
    assert (slow["value"], slow["met"]) == (2, False)
    assert all(name in slow["name"] for name in names)
    assert "2.00 of the best way" in capsys.readouterr().out
    times |= {"solve": 1.2e-3}
    share, slow = dry_run("--part", "choice", "--only", *names)[1]["targets"]
    assert share["met"]
    assert slow["met"]


def test_a_run_goes_on_with_what_an_earlier_one_wrote(bench, dry_run, tmp_path):
    """What it timed is not timed again, and counts; that of another commit is refused."""
    names = [each.name for each in bench.CHOICE if each.make.__name__ == "filter_of_a_signal"][:3]
    _, first = dry_run("--part", "choice", "--only", *names[:2], "--commit", "abc")
    before = tmp_path / "before.json"
    before.write_text(json.dumps(first))
    _, both = dry_run("--part", "choice", "--only", *names, "--commit", "abc", "--onto", str(before))
    assert both["cases"][: len(first["cases"])] == first["cases"]
    assert {case["parameters"]["loop"] for case in both["cases"][len(first["cases"]) :]} == {names[2]}
    assert "share of 3 loops" in both["targets"][0]["name"]
    assert both["seconds"] > first["seconds"]
    with pytest.raises(SystemExit, match="which this is not"):
        dry_run("--part", "choice", "--only", *names, "--commit", "abcd", "--onto", str(before))


def test_a_call_that_is_timed_twice_counts_by_its_best(bench):
    """A minute in which the host is busy with something else is no result."""
    gru, seconds = bench.TABLE[0], {"table": 4e-4, "choice": 2e-4}
    parameters = gru.parameters | {"direction": "forward"}
    cases = [bench.Case(suite, parameters, "solve", 1.0, True, seconds=[taken]) for suite, taken in seconds.items()]
    claim = next(iter(bench.claims(["table"], cases, bench.TABLE)))
    assert (claim.name, claim.value, claim.met) == ("gru, forward, ms", pytest.approx(0.2), True)
    cases[1].passed = False
    assert not next(iter(bench.claims(["table"], cases, bench.TABLE))).met


def test_cold_calls_and_the_host(dry_run):
    code, record = dry_run("--part", "cold", "host", "--only", "langevin")
    assert code == 0
    cold, host = record["targets"]
    assert cold["name"].startswith("cold calls over bare loops")
    assert cold["value"] > 0
    assert (host["name"], host["limit"]) == ("langevin, host, ms", 0.15)
    assert host["value"] > 0


def test_inside_a_graph_of_the_caller(bench, dry_run, device, capsys, monkeypatch):
    if device.type == "cpu":
        assert dry_run("--part", "captured")[0] == 0
        assert "needs a CUDA device" in capsys.readouterr().out
        # What is captured on a GPU runs as it is here: all but the CUDA graph itself.
        monkeypatch.setattr(bench, "can_capture", lambda device: True)
        monkeypatch.setattr(bench, "captured", lambda function: function)
    code, record = dry_run("--part", "captured", "--only", "langevin")
    assert code == 0
    forward, both = record["cases"]
    assert forward["result"] == both["result"] == "ITERATIONS_DONE"
    assert [target["limit"] for target in record["targets"]] == pytest.approx([0.8 * 1.5, 0.8 * 4])


def test_what_is_measured(bench):
    names = [loop.name for loop in bench.CHOICE]
    assert len(names) >= 60
    assert len(set(names)) == len(names)
    assert {loop.D for loop in bench.CHOICE} >= {1, 2, 4, 8, 16, 32, 64}
    gru = bench.TABLE[0]
    assert gru.captured_limit("forward") == pytest.approx(0.8 * 0.30e-3)
    assert gru.captured_limit("forward and backward") == pytest.approx(0.8 * 0.9e-3)
    assert replace(gru, lab=1.0).captured_limit("forward") == pytest.approx(1.15e-3)
    assert gru.limit("forward") == pytest.approx(0.3e-3)


def test_every_kind_of_step_is_what_its_check_says(bench):
    kinds = {loop.make: loop for loop in bench.CHOICE}.values()
    for loop in kinds:
        prepared = bench.Prepared(replace(loop.small(), L=7), torch.device("cpu"))
        found = prepared.part("forward" if loop.chaotic else "forward and backward", 7)()
        assert prepared.error(found) < 0.1, loop.name
        assert prepared.residual(found) < 0.1, loop.name
        moved = [leaf.clone() for leaf in found.states]
        moved[0][3] *= 1.001
        assert prepared.residual(replace(found, states=moved)) > 1, loop.name


def test_errors_are_relative_to_the_largest_size_so_far(bench):
    largest_so_far = sys.modules["loop_problems"].largest_so_far
    initial, states = torch.tensor([1.0, 0.0]), torch.tensor([[0.5, 0.0], [4.0, 2.0], [0.1, 1e-3]])
    off = torch.zeros_like(states)
    assert largest_so_far(off, states, initial) == 0
    off[0, 0], off[2, 0] = 0.1, 0.2
    assert largest_so_far(off, states, initial) == pytest.approx(0.1)  # 0.1 of 1, 0.2 of 4
    off[2, 1] = 0.5
    assert largest_so_far(off, states, initial) == pytest.approx(0.25)
    off[0, 1] = 1e-9
    assert largest_so_far(off, states, initial) == float("inf")
    off[0, 1] = torch.nan
    assert largest_so_far(off, states, initial) == float("inf")


def test_bad_arguments(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--only", "nothing-like-it"])
    assert "no such loop: nothing-like-it" in capsys.readouterr().err


def test_the_fastest_time_is_bold_whoever_it_is(bench):
    times = importlib.import_module("loop_report")._times

    def cells(**milliseconds):
        names = {
            "ours": "solve",
            "captured": "solve, captured",
            "kernel": 'Loop(by="kernel")',
            "cudnn": "cuDNN",
            "graph": "bare loop in a CUDA graph",
        }
        # the median, not the least or the mean
        return times({names[name]: {"seconds": [0.0, 1e-3 * ms, 9.0]} for name, ms in milliseconds.items()})

    assert cells(ours=1.0, kernel=2.0, cudnn=4.0, graph=3.0) == ["**1.000**", "2.000", "3.000, CUDA graph"]
    assert cells(ours=1.0, captured=0.5, kernel=2.0) == ["**1.000** (0.5000)", "2.000", ""]
    assert cells(ours=5.0, kernel=6.0, cudnn=4.0) == ["5.000", "6.000", "**4.000**, cuDNN"]
    assert cells(kernel=6.0) == ["", "**6.000**", ""]
    assert cells() == ["", "", ""]


def test_the_page_has_the_table_of_the_newest_results(bench):
    report, pages = map(importlib.import_module, ("loop_report", "report_page"))
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    path, record = pages.newest(list((ROOT / "results").glob("loops-nvidia-*.json")))
    table = report.markdown(record, path.name)
    assert "| GRU | 16,384, 1, 16 |" in table
    assert page == pages.put(page, table, report.BEGIN, report.END), "make paper"
