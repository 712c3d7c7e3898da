"""The benchmarks run, check before they time, and write what a result has to be read with."""

import json
import sys
from pathlib import Path

import pytest

import deeppcr
from scripts import script

bench = script("benchmarks", "run")
pytestmark = pytest.mark.usefixtures("precision")


def record_in(folder: Path) -> dict:
    (path,) = folder.iterdir()  # and no temporary file beside it
    assert path.name.startswith("core-")
    return json.loads(path.read_text())


def test_every_case_passes_and_is_written(bench, device, tmp_path, capsys):
    out = tmp_path / "results"
    assert bench.main(["--quick", "--device", device.type, "--out", str(out), "--commit", "abc1234"]) == 0
    record = record_in(out)
    (path,) = out.iterdir()
    assert path.name.endswith(f"-{record['date'][:10]}-abc1234.json")
    assert record["commit"] == "abc1234"
    assert record["machine"]["hardware"]
    assert record["versions"]["torch"]
    assert record["versions"]["deeppcr"] == deeppcr.__version__
    assert record["settings"] == {"dtype": "float32", "tf32": False, "quick": True, "budget_seconds": 0.02}

    cases = record["cases"]
    assert {case["suite"] for case in cases} == {"linear", "forward", "forward and backward"}
    assert {case["parameters"]["blocks"] for case in cases if case["suite"] == "linear"} == {"Dense", "Diagonal"}
    methods = {case["method"] for case in cases}
    assert {"ForwardSubstitution()", "PCR()", "Hierarchical(chunk=4)", "Auto()", "loop", *bench.SOLVERS} <= methods
    for case in cases:
        assert case["passed"], case
        assert case["error"] <= case["tolerance"]
        assert len(case["seconds"]) >= 3
        assert all(each > 0 for each in case["seconds"])
        if case["method"] in bench.SOLVERS:
            assert case["iterations"] >= 1
            assert case["chunk"] >= 1
    output = capsys.readouterr().out
    assert f"{len(cases)} cases, 0 failed" in output


def test_a_failed_check_is_written_and_not_timed(bench, tmp_path, capsys, monkeypatch):
    def wrong(self, couplings, rhs, *, reverse=False):
        return deeppcr.ForwardSubstitution().solve_coupled(couplings, rhs, reverse=reverse) * 1.01

    monkeypatch.setattr(deeppcr.PCR, "solve_coupled", wrong)
    monkeypatch.setattr(bench, "NETWORKS_QUICK", ())
    assert bench.main(["--quick", "--device", "cpu", "--out", str(tmp_path)]) == 1
    failed = [case for case in record_in(tmp_path)["cases"] if not case["passed"]]
    assert "PCR()" in {case["method"] for case in failed}
    for case in failed:
        assert case["seconds"] == []
        assert "differs from the reference" in case["failure"]
    assert "FAILED" in capsys.readouterr().out


def test_a_method_that_raises_is_a_failed_case(bench, device, tmp_path, capsys, monkeypatch):
    def breaks(self, couplings, rhs, *, reverse=False):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(deeppcr.Hierarchical, "solve_coupled", breaks)
    monkeypatch.setattr(bench, "NETWORKS_QUICK", ())
    assert bench.main(["--quick", "--device", "cpu", "--out", str(tmp_path)]) == 1
    failed = [case for case in record_in(tmp_path)["cases"] if not case["passed"]]
    assert all(case["failure"] == "RuntimeError: out of memory" for case in failed)
    assert "FAILED: RuntimeError: out of memory" in capsys.readouterr().out


def test_an_interrupted_write_leaves_the_old_file(bench, tmp_path):
    write = sys.modules["records"].write
    path = tmp_path / "core.json"
    write({"run": 1}, path)
    with pytest.raises(TypeError):
        write({"run": object()}, path)
    assert json.loads(path.read_text()) == {"run": 1}
    assert list(tmp_path.iterdir()) == [path]
