"""The benchmark of the kernels: what it checks before it times, what it writes, and how it reads its own numbers."""

import importlib
import json
import re
import sys

import pytest
import torch

from scripts import ROOT, script

bench = script("benchmarks", "kernels")
pytestmark = pytest.mark.usefixtures("precision")


@pytest.fixture(scope="module")
def report(bench):
    return importlib.import_module("kernel_report")


def pages():
    return sys.modules["report_page"]


@pytest.mark.thorough
def test_a_dry_run_checks_times_and_writes_every_case(bench, tmp_path, capsys, monkeypatch):
    # What is captured on a GPU runs as it is here: all but the CUDA graph itself.
    for name in ("kernel_problems", "kernel_training", "kernel_methods"):
        monkeypatch.setattr(sys.modules[name], "can_capture", lambda device: True)
        monkeypatch.setattr(sys.modules[name], "captured", lambda function: function)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # interpreted, the adjoint takes half a minute
    out = tmp_path / "results"
    assert bench.main(["--quick", "--device", "cpu", "--out", str(out), "--commit", "abc1234"]) == 0
    (path,) = out.iterdir()  # and no partial file beside it
    record = json.loads(path.read_text())
    assert path.name.startswith("kernels-quick-")
    assert path.name.endswith(f"-{record['date'][:10]}-abc1234.json")
    assert record["commit"] == "abc1234"
    assert record["machine"]["hardware"]
    assert record["versions"]["torch"]
    cases = record["cases"]
    assert {case["suite"] for case in cases} == {
        "forward", "gradients", "forward and backward", "dense solve", "diagonal solve", "ResNet step", "break-even",
    }  # fmt: skip
    methods = {case["method"] for case in cases}
    assert {"call", "captured", "eager loop", "loop in a CUDA graph", "fused loop", "fused loop, captured"} <= methods
    steps = {case["method"]: case for case in cases if case["suite"] == "ResNet step"}
    assert {"call", "default mode", "fused loop", "all but the layers"} <= set(steps)
    # On a CPU the default is the loop, for so few layers.
    assert steps["call"]["result"] == "CONVERGED"
    assert steps["default mode"]["result"] == steps["fused loop"]["result"] == "LOOP"
    for case in cases:
        if case["failure"] == "jax is not installed":
            continue
        assert case["passed"], case
        assert case["error"] <= case["tolerance"]
        assert len(case["seconds"]) >= 3
        assert all(each > 0 for each in case["seconds"])
    assert {case["iterations"] for case in cases if case["suite"] == "forward" and case["method"] == "call"} != {None}
    output = capsys.readouterr().out
    assert f"{len(cases)} cases, 0 failed" in output
    assert "dry run" in output


def test_without_a_gpu_it_refuses_in_one_line(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments in ([], ["--device", "cpu"], ["--device", "cuda", "--quick"]):
        assert bench.main([*arguments, "--out", str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "needs a CUDA device" in line
    assert not list(tmp_path.iterdir())


def run_of(bench, monkeypatch, tmp_path, **methods):
    problem = bench.Problem("dense solve", {"L": 3, "w": 2}, lambda device: methods)
    monkeypatch.setattr(bench, "problems", lambda quick: [problem])
    code = bench.main(["--quick", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc"])
    (path,) = tmp_path.iterdir()
    cases = json.loads(path.read_text())["cases"]
    path.unlink()
    return code, {case["method"]: case for case in cases if case["method"] in methods}


def test_a_wrong_result_is_written_and_not_timed(bench, tmp_path, capsys, monkeypatch):
    good = bench.Method(lambda: 0.0, lambda found: found)
    for optional in (False, True):
        wrong = bench.Method(lambda: 1.0, lambda found: found, optional=optional)
        code, cases = run_of(bench, monkeypatch, tmp_path, call=good, peer=wrong)
        assert code == 1
        assert cases["call"]["passed"]
        assert not cases["peer"]["passed"]
        assert cases["peer"]["seconds"] == []
        assert cases["peer"]["failure"] == "differs from the loop in float64 by 1.0e+00"
    assert "peer: differs" in capsys.readouterr().out
    nothing = bench.Method(lambda: float("nan"), lambda found: found)
    assert run_of(bench, monkeypatch, tmp_path, call=nothing)[0] == 1


def test_what_cannot_run_fails_unless_it_is_optional(bench, tmp_path, monkeypatch):
    def breaks():
        raise RuntimeError("out of memory\nand much more")

    for optional in (False, True):
        method = bench.Method(breaks, lambda found: 0.0, optional=optional)
        code, cases = run_of(bench, monkeypatch, tmp_path, call=method)
        assert code == (0 if optional else 1)
        assert cases["call"]["failure"] == "RuntimeError: out of memory"
        assert cases["call"]["seconds"] == []

    problem = bench.Problem("forward", {"L": 3, "w": 2}, lambda device: breaks())
    (case,) = bench.examine(problem, torch.device("cpu"), 0.01)
    assert case.failure == "RuntimeError: out of memory"
    assert not case.passed


def test_a_captured_call_is_timed_in_rows(bench):
    calls = []
    case = bench.Case("forward", {}, "captured", 1.0)
    bench.time_case(case, lambda: calls.append(1), torch.device("cpu"), 0.0)
    assert case.calls == bench.CALLS
    assert len(calls) == 2 + len(case.seconds) * bench.CALLS
    case = bench.Case("forward", {}, "call", 1.0)
    bench.time_case(case, lambda: calls.append(1), torch.device("cpu"), 0.0)
    assert case.calls == 1


def test_a_long_call_is_not_repeated_and_a_part_is_scaled(bench, monkeypatch):
    case = bench.Case("forward", {}, "call", 1.0, scale=10.0)
    monkeypatch.setattr(bench, "seconds_of", lambda run, calls, device: 0.5)
    bench.time_case(case, lambda: None, torch.device("cpu"), 0.0)
    assert case.seconds == [5.0] * bench.REPEATS[0]
    monkeypatch.setattr(bench, "LONG", 0.4)
    bench.time_case(case, lambda: None, torch.device("cpu"), 0.0)
    assert case.seconds == [5.0]


def test_kernels_are_compiled_by_others_or_later(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench.sys, "executable", str(tmp_path / "missing"))
    bench.compile_kernels(bench.__file__)
    assert "going on without" in capsys.readouterr().out
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\nexit 3\n")
    fails.chmod(0o755)
    monkeypatch.setattr(bench.sys, "executable", str(fails))
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 3)
    bench.compile_kernels(bench.__file__)
    assert "by 2 processes" in (output := capsys.readouterr().out)
    assert "2 of which failed" in output
    fails.write_text("#!/bin/sh\nsleep 60\n")
    monkeypatch.setattr(bench, "WARM_SECONDS", 0)
    bench.compile_kernels(bench.__file__)
    assert "timed out" in capsys.readouterr().out


def test_shares_of_the_compiling_make_up_the_whole(bench, monkeypatch):
    def problem(number, suite="forward"):
        method = bench.Method(lambda: ran.append(number), lambda found: 0.0)
        graph = bench.Method(lambda: ran.append("captured"), lambda found: 0.0, prepare=lambda run: run)
        peer = bench.Method(lambda: ran.append("peer"), lambda found: 0.0, kernels=False)
        return bench.Problem(suite, {"w": number}, lambda device: {"call": method, "captured": graph, "jax": peer})

    ran = []
    monkeypatch.setattr(bench, "problems", lambda quick: [*map(problem, range(7)), problem(7, "break-even")])
    for rank in range(3):
        bench.warm(rank, 3, torch.device("cpu"), quick=True)
    assert sorted(ran) == list(range(7))


# How the numbers are read.


def case(suite, parameters, method, milliseconds, **more):
    standard = {"passed": True, "failure": "", "iterations": None, "result": None, "peak_bytes": None}
    seconds = [1e-3 * milliseconds * factor for factor in (1.5, 1.0, 1.1)]
    return {"suite": suite, "parameters": parameters, "method": method, "seconds": seconds, **standard, **more}


def network(width, weights="default ReLU"):
    return {"weights": weights, "L": 16_384, "w": width}


def test_ratios_compare_like_with_like(report):
    parameters = network(16)
    (row,) = report.rows(
        [
            case("forward", parameters, "call", 0.2, iterations=2, result="CONVERGED"),
            case("forward", parameters, "captured", 0.1, iterations=3, result="FINISHED_BY_LOOP"),
            case("forward", parameters, "eager loop", 400.0),
            case("forward", parameters, "loop in a CUDA graph", 80.0),
            case("forward", parameters, "fused loop, captured", 3.0),
        ]
    )
    assert row.times["call"] == pytest.approx(0.2e-3)  # the minimum
    assert row.ratios == pytest.approx({"eager loop": 2000, "loop in a CUDA graph": 800, "fused loop, captured": 30})
    assert row.iterations == 3
    assert row.finished_by_loop
    assert row.met == {"call": True, "captured": True}
    assert "3, then the loop" in report.text([row])
    assert "(2,000x)" in report.text([row])


@pytest.mark.parametrize(
    ("suite", "parameters", "times", "expected"),
    [
        ("forward", network(4), {}, {"call": 0.25, "captured": 0.11}),
        ("forward", network(64), {}, {"captured": 0.42}),
        ("forward", network(64, "gain 1 tanh"), {}, {"captured": 0.84}),
        ("forward", network(8, "0.9 He ReLU"), {}, {"call": 0.5, "captured": 0.22}),
        ("forward", network(256), {"fused loop": 50.0}, {"call": 50.0}),
        ("forward", {**network(4), "L": 64}, {}, {}),
        ("backward", network(16), {}, {"captured": 0.10}),
        ("backward", network(64), {}, {}),
        ("dense solve", {"L": 1024, "w": 16}, {"jax.lax.associative_scan": 0.3}, {"call": 0.1, "captured": 0.1}),
        ("dense solve", {"L": 1024, "w": 64}, {"jax.lax.associative_scan": 1.0}, {"call": 0.5, "captured": 0.5}),
        ("dense solve", {"L": 1024, "w": 64}, {}, {}),
        ("diagonal solve", {"L": 16_384, "sequences": 2048}, {"copy, captured": 0.08}, {"captured": 0.1}),
        ("diagonal solve", {"L": 2**20, "sequences": 1}, {}, {"captured": 0.03}),
        ("ResNet step", {"depth": 1024}, {}, {"call": 0.9}),
        ("ResNet step", {"depth": 1024}, {"default mode": 0.8}, {"call": 0.9, "default mode": 0.9}),
        ("gradients", network(4), {}, {}),
    ],
)
def test_targets(report, suite, parameters, times, expected):
    found = report.limits(suite, parameters, {name: 1e-3 * each for name, each in times.items()})
    assert {name: 1e3 * each for name, each in found.items()} == pytest.approx(expected)


def test_the_default_mode_is_ours_and_no_baseline(report):
    names = {
        "call": 2.0,
        "captured": 0.2,
        "default mode": 0.8,
        "default mode, captured": 0.25,
        "fused loop, captured": 0.4,
    }
    (row,) = report.rows([case("ResNet step", {"depth": 1024}, name, each) for name, each in names.items()])
    assert row.ratios == pytest.approx({"fused loop, captured": 2.0})
    assert row.met == {"call": False, "default mode": True}
    assert "default mode 0.8000; default mode, captured 0.2500; fused loop, captured 0.4000 (2.0x)" in report.text(
        [row]
    )


def test_a_target_of_what_failed_is_missed(report):
    parameters = network(4)
    slow = case("forward", parameters, "call", 0.3)
    failed = case("forward", parameters, "captured", 1.0, passed=False, seconds=[], failure="differs")
    (row,) = report.rows([slow, failed])
    assert row.met == {"call": False, "captured": False}
    assert "captured: differs" in report.text([row])


def test_break_even_is_where_ours_wins_for_good(report):
    ours = dict.fromkeys((8, 16, 32, 64), 3.0)
    assert report.break_even(ours, {8: 4.0, 16: 2.0, 32: 4.0, 64: 8.0}) == 32
    assert report.break_even(ours, {8: 4.0, 16: 4.0, 32: 4.0, 64: 8.0}) == 8
    assert report.break_even(ours, {8: 4.0, 16: 4.0, 32: 4.0, 64: 3.0}) is None
    assert report.break_even(ours, {32: 4.0}) == 32
    assert report.break_even({}, {}) is None


def test_claims_of_several_rows(report):
    cases = []
    for depth, eager in ((8, 0.1), (16, 0.4), (32, 0.8)):
        for method, took in (("call", 0.2), ("captured", 0.05), ("eager loop", eager), ("fused loop", 0.01)):
            cases.append(case("break-even", {"L": depth, "w": 16}, method, took))
    weights = 4 * 16_384 * 64 * 65
    cases += [
        case("forward", network(64), "call", 1.0, peak_bytes=weights),
        case("forward", network(64), "fused loop", 1.0, peak_bytes=weights // 4),
    ]
    claims = {claim.name: claim for claim in report.claims(report.rows(cases))}
    assert claims["break-even depth, call against eager loop"].value == 16
    assert claims["break-even depth, call against eager loop"].met
    assert claims["break-even depth, captured against eager loop"].value == 8
    assert claims["break-even depth, call against fused loop"].value is None
    assert not claims["break-even depth, call against fused loop"].met
    assert "break-even depth, captured against fused loop, captured" not in claims  # not measured here
    peak = [claim for name, claim in claims.items() if name.startswith("peak memory")]
    assert [claim.value for claim in peak] == pytest.approx([1.6, 4.0])
    assert not peak[0].met


def test_the_table_goes_between_its_marks(report, tmp_path, capsys):
    record = {
        "machine": {"hardware": "A GPU"},
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "abc",
        "versions": {"torch": "2.11"},
        "cases": [case("forward", network(16), "call", 0.2), case("forward", network(16), "eager loop", 400.0)],
    }
    results, page = tmp_path / "kernels-a.json", tmp_path / "page.md"
    results.write_text(json.dumps(record))
    page.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    assert report.main([str(results), "--page", str(page)]) == 0
    written = page.read_text().replace("\u00a0", " ")
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "old" not in written
    assert "| forward, default ReLU, L = 16,384, w = 16 | 0.2000 |  |  |  | 400 |  |" in written
    assert "\n1 of 2 goals, set before the run, were reached;" in written  # the call is in time, what failed is not
    assert report.main([str(results), "--page", str(page)]) == 0
    assert page.read_text().replace("\u00a0", " ") == written
    with pytest.raises(ValueError, match="no place for the table"):
        pages().put("nothing here", "table", report.BEGIN, report.END)
    older = tmp_path / "kernels-b.json"
    older.write_text(json.dumps({**record, "date": "2026-01-01T03:04:05+00:00", "cases": []}))
    assert report.main([str(older), str(results)]) == 0
    assert "target call 0.2500" in capsys.readouterr().out


def test_the_page_has_the_table_of_the_newest_results(report):
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    files = [
        path
        for path in (ROOT / "results").glob("kernels-*.json")
        if not {"quick", "partial"} & set(re.split("[-.]", path.name))
    ]
    table = report.NOTHING_YET
    if files:
        path, record = pages().newest(files)
        table = report.markdown(record, path.name)
    assert page == pages().put(page, table, report.BEGIN, report.END), (
        "python benchmarks/kernel_report.py FILE --page docs/performance.md"
    )
