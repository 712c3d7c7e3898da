"""Every benchmark in one run: what is measured, what is there already, what is left out and why."""

import argparse
import json

import pytest

from scripts import ROOT, script

bench = script("benchmarks", "everything")

#: Writes a result as a benchmark does, of its own arguments.
PROGRAM = """
import json, sys
from pathlib import Path
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
path = Path(given["--out"]) / f"NAME-some-gpu-2026-01-02-{given['--commit']}.json"
path.parent.mkdir(exist_ok=True)
path.write_text(json.dumps({"seconds": 40.0, "commit": given["--commit"], "given": given}))
sys.exit(CODE)
"""


@pytest.fixture
def everything(bench, tmp_path, monkeypatch, capsys):
    """Small programs in place of the benchmarks, on one GPU: what became of each, and the exit code."""
    monkeypatch.setattr(bench, "HERE", tmp_path / "benchmarks")
    monkeypatch.setattr(bench, "machine", lambda device: {"hardware": "Some(R) GPU"})
    monkeypatch.setattr(bench, "parse", argparse.ArgumentParser.parse_args)
    monkeypatch.delenv("DEEPPCR_DATA", raising=False)
    bench.HERE.mkdir()

    def run(benchmarks, *arguments, fails=()):
        for each in benchmarks:
            code = str(3 * (each.name in fails))
            (bench.HERE / each.program).write_text(PROGRAM.replace("NAME", each.name).replace("CODE", code))
        monkeypatch.setattr(bench, "BENCHMARKS", benchmarks)
        code = bench.main(["--out", str(tmp_path / "results"), "--commit", "abc1234", "--device", "cuda", *arguments])
        lines = capsys.readouterr().out.splitlines()
        return code, {line[:16].rstrip(): line[16:] for line in lines if line and not line.startswith("==")}

    return run


def test_what_is_there_is_not_measured_again(bench, everything, tmp_path):
    both = bench.Benchmark("core", "run.py"), bench.Benchmark("loops", "loops.py", ("--budget", "0.08"))
    code, became = everything(both, "--only", "loops")
    assert code == 0
    assert became.keys() == {"loops"}
    assert became["loops"].startswith("measured (")
    (path,) = (tmp_path / "results").iterdir()
    given = json.loads(path.read_text())["given"]
    assert given == {"--budget": "0.08", "--device": "cuda", "--out": str(path.parent), "--commit": "abc1234"}
    code, became = everything(both)
    assert code == 0
    assert became["core"].startswith("measured (")
    assert became["loops"] == "there, of commit abc1234"
    code, became = everything(both, "--commit", "def5678")
    assert became["loops"].startswith("measured (")


def test_one_that_fails_is_told_and_the_others_go_on(bench, everything):
    code, became = everything(
        (bench.Benchmark("core", "run.py"), bench.Benchmark("loops", "loops.py")), fails=("core",)
    )
    assert code == 1
    assert became["core"].startswith("FAILED, exit code 3 (")
    assert became["loops"].startswith("measured (")


def test_what_would_not_end_in_time_is_left(bench, everything):
    one = (bench.Benchmark("core", "run.py"),)
    everything(one)  # into the results of the repository: 40 s
    code, became = everything(one, "--commit", "def5678", "--seconds", "47")
    assert code == 0
    assert became["core"].startswith("left for another call: 48 s expected, 4")
    _, became = everything(one, "--commit", "def5678", "--seconds", "60")
    assert became["core"].startswith("measured (")


def test_what_cannot_run_here_is_named(bench, everything, tmp_path, monkeypatch):
    benchmarks = (
        bench.Benchmark("kernels", "kernels.py"),
        bench.Benchmark("core", "run.py", on_cpu=True),
        bench.Benchmark("trainings", "trainings.py", data="--data-dir"),
        bench.Benchmark("compile-time", "compile_time.py", on_cpu=True, dry=False, module="nowhere"),
    )
    _, became = everything(benchmarks, "--device", "cpu")
    assert became.pop("core").startswith("measured (")
    assert became == {
        "kernels": "left out: needs a GPU",
        "trainings": "left out: needs a GPU",
        "compile-time": "left out: needs nowhere",
    }
    _, became = everything(benchmarks)
    assert became["kernels"].startswith("measured (")
    assert became["trainings"] == "left out: needs --data-dir, or DEEPPCR_DATA"
    monkeypatch.setenv("DEEPPCR_DATA", str(tmp_path))
    _, became = everything(benchmarks, "--commit", "def5678")
    assert became["trainings"].startswith("measured (")


def test_these_are_the_benchmarks_of_the_repository(bench):
    for each in bench.BENCHMARKS:
        program = (ROOT / "benchmarks" / each.program).read_text()
        assert f'Results("{each.name}"' in program
        assert all(option in program for option in (*each.options, each.data or "") if option.startswith("--"))
    kept = {path.name for path in (ROOT / "results").glob("*.json") if "cases" in json.loads(path.read_text())}
    assert all(name.startswith(tuple(f"{each.name}-" for each in bench.BENCHMARKS)) for name in kept)


def test_how_old_results_are(bench, tmp_path, capsys):
    (tmp_path / "old.json").write_text('{"commit": "0000000"}')
    (tmp_path / "older.json").write_text("{}")
    assert bench.main(["--list", "--out", str(tmp_path)]) == 0
    old, older = capsys.readouterr().out.splitlines()
    assert " ".join(old.split()) == "old an unknown number of commits to src since"
    assert " ".join(older.split()) == "older names no commit"


def test_one_file_is_not_enough(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--json", "all.json"])
    assert "--json: there are several files" in capsys.readouterr().err
