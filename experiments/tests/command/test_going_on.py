"""The command: interrupted, out of time, twice at a time, and gone on with."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from command_support import COMMAND, fails_clearly, files, patch_measure
from deeppcr_paper import cli, experiment, lock, store


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt, cli.STOPPED), (cli.OutOfTime, cli.AGAIN)])
def test_interrupted_and_gone_on_with(run, tmp_path, monkeypatch, stop, code, light):
    measured = []

    def interrupting(measure):
        def wrapped(cell, settings, context):
            if len(measured) == 3:
                raise stop
            measured.append(cell)
            return measure(cell, settings, context)

        return wrapped

    with monkeypatch.context() as patched:
        patch_measure(patched, "mlp-newton", interrupting)
        patched.setattr(sys, "argv", ["deeppcr-paper", "reproduce", "mlp-newton", "--quick"])
        result = run("mlp-newton", "--quick")
    assert result.exit_code == code
    assert "3 of 8 cells" in result.output
    assert "deeppcr-paper reproduce mlp-newton --quick" in result.output
    assert "Traceback" not in result.output
    (found,) = files(tmp_path / "results")
    assert found.endswith(store.PARTIAL)
    before = store.read(tmp_path / "results" / found)["records"]

    def counting(measure):
        def wrapped(cell, settings, context):
            measured.append(cell)
            return measure(cell, settings, context)

        return wrapped

    patch_measure(monkeypatch, "mlp-newton", counting)
    result = run("mlp-newton", "--quick")
    assert result.exit_code == 0, result.output
    assert "3 of 8 cells are there already" in result.output
    (found,) = files(tmp_path / "results")
    content = store.read(tmp_path / "results" / found)
    assert content["complete"]
    assert len(measured) == len(content["records"]) == 8
    assert content["records"][:3] == before


def some(monkeypatch, *names, **measures):
    """Only these, some with another way to measure."""
    made = (
        replace(each, measure=measures.get(each.name[4:], each.measure))
        for each in cli.EXPERIMENTS
        if each.name in names
    )
    monkeypatch.setattr(cli, "EXPERIMENTS", tuple(made))


def test_all_goes_on_where_the_time_was_up_and_does_nothing_twice(run, tmp_path, monkeypatch, light):
    measured, patience = [], [3]

    def counting(cell, settings, context):
        measured.append(cell)
        return {}

    def check_time(context):
        if len(measured) == patience[0]:
            raise cli.OutOfTime

    monkeypatch.setattr(cli.Context, "check_time", check_time)
    some(monkeypatch, "mlp-newton", "mlp-timing", "hardware", newton=counting, timing=counting)
    result = run("all", "--quick", "--time-limit", 60)
    assert result.exit_code == cli.AGAIN, result.output
    assert "mlp-timing: out of time: 3 of 8 cells\n" in result.output
    assert "mlp-newton: out of time\n" in result.output
    assert len(files(tmp_path / "results")) == 1  # the next one was not begun
    patience[0] = None
    (tmp_path / "results").rename(tmp_path / "carried")  # as to another machine
    result = run("all", "--quick", out=tmp_path / "carried")
    assert result.exit_code == 0, result.output
    assert len(measured) == 16
    made = files(tmp_path / "carried")
    assert [name.rpartition("-20")[0].split("-")[1] for name in made] == ["newton", "timing"]
    content = store.read(tmp_path / "carried" / made[1])
    assert [record["session"] for record in content["records"]] == [0, 0, 0, 1, 1, 1, 1, 1]
    lines = [line for line in result.output.splitlines() if ": finished: " in line]
    assert [line.partition(":")[0] for line in lines] == ["mlp-timing", "mlp-newton"]
    result = run("all", "--quick", out=tmp_path / "carried")
    assert result.exit_code == 0
    assert result.output.count("from before") == 2
    assert files(tmp_path / "carried") == made
    assert len(measured) == 16


def test_all_goes_on_with_the_next_where_one_fails(run, tmp_path, monkeypatch, light):
    some(monkeypatch, "mlp-newton", "mlp-memory", "mlp-gain")

    def broken(measure):
        def wrapped(cell, settings, context):
            raise RuntimeError("a bug")

        return wrapped

    patch_measure(monkeypatch, "mlp-newton", broken)
    patch_measure(
        monkeypatch, "mlp-gain", lambda measure: lambda *_: (_ for _ in ()).throw(store.PaperError("no data"))
    )
    result = run("all", "--quick")
    assert result.exit_code == cli.BAD
    assert "mlp-newton: failed: RuntimeError: a bug" in result.output
    assert "mlp-memory: finished: " in result.output
    assert "mlp-gain: failed: no data" in result.output
    fails_clearly(run("all", "--quick", "--set", "depths=2"), "--set and --only")


def test_only_some_cells_and_then_the_others(run, tmp_path, monkeypatch, light):
    monkeypatch.setattr(store, "INTERVAL", 60.0)  # they are written at the end, too
    changes = ("mlp-newton", "--quick", "--set", "samples=1")
    result = run(*changes, "--only", "L=64", "--only", "guess=random,zeros")
    assert result.exit_code == 0, result.output
    (found,) = files(tmp_path / "results")
    assert found.endswith(store.PARTIAL)
    assert [record["key"] for record in store.read(tmp_path / "results" / found)["records"]] == [
        f"activation={activation} guess=random L=64 w=4" for activation in ("relu", "sigmoid")
    ]
    fails_clearly(run(*changes, "--only", "L=3"), "--only L=3", "no cell is like that", "L=8,64")
    fails_clearly(run(*changes, "--only", "depth=3"), "no depth")
    fails_clearly(run(*changes, "--only", "L"), "expected NAME=VALUE")
    assert run(*changes).exit_code == 0
    (found,) = files(tmp_path / "results")
    content = store.read(tmp_path / "results" / found)
    assert content["complete"]
    assert [record["L"] for record in content["records"]] == [8, 8, 64, 64] * 2  # in the usual order


def test_the_same_command_twice_at_a_time(run, tmp_path, monkeypatch, light):
    """The second one says so and does nothing; another command goes on beside it."""
    seen = []

    def meanwhile(measure):
        def wrapped(cell, settings, context):
            if settings.seed == 0 and not seen:
                seen.append(run("mlp-newton", "--quick"))
                seen.append(run("mlp-newton", "--quick", "--seed", 1))
            return measure(cell, settings, context)

        return wrapped

    patch_measure(monkeypatch, "mlp-newton", meanwhile)
    assert run("mlp-newton", "--quick").exit_code == 0
    fails_clearly(seen[0], "the same command is running there already")
    assert seen[1].exit_code == 0, seen[1].output
    written = files(tmp_path / "results")
    assert len(written) == 2
    assert all(name.endswith(("-quick.json", "-quick-2.json")) for name in written)
    assert {len(store.read(tmp_path / "results" / name)["records"]) for name in written} == {8}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_what_a_crash_leaves_behind_locks_nothing(tmp_path):
    child = os.fork()
    if not child:
        try:
            with lock.only_run(tmp_path, "mlp-newton", {}, "cpu"):
                os._exit(3)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    (left,) = files(tmp_path)
    assert left.endswith(".lock")
    with (
        lock.only_run(tmp_path, "mlp-newton", {}, "cpu"),
        pytest.raises(store.PaperError, match="running there already"),
        lock.only_run(tmp_path, "mlp-newton", {}, "cpu"),
    ):
        pass
    assert files(tmp_path) == []


@pytest.mark.parametrize("limit", ["0", "-1", "nan"])
def test_a_time_limit_in_which_nothing_can_be_done(run, tmp_path, limit):
    fails_clearly(run("mlp-newton", "--quick", "--time-limit", limit), f"--time-limit {limit}", "more than 0")
    assert files(tmp_path / "results") == []


def test_hardly_any_time(run, tmp_path, light):
    result = run("mlp-newton", "--quick", "--time-limit", 1e-9)
    assert result.exit_code == cli.AGAIN
    assert "time limit" in result.output
    assert run("mlp-newton", "--quick").exit_code == 0
    assert len(files(tmp_path / "results")) == 1


def test_a_cell_that_takes_long_goes_on_inside(run, tmp_path, monkeypatch):
    """A training that runs out of time leaves a checkpoint, and ends as if nothing had happened."""
    one_depth = ("resnet-training", "--quick", "--set", "depths=8")
    assert run(*one_depth, out=tmp_path / "whole").exit_code == 0
    checks = []

    def after_a_while(self):
        checks.append(1)
        if len(checks) == 4:  # two for the cells that time, one for the training, and then its first window
            raise experiment.OutOfTime

    with monkeypatch.context() as patched:
        patched.setattr(experiment.Context, "check_time", after_a_while)
        assert run(*one_depth).exit_code == cli.AGAIN
    assert sum(name.endswith(".checkpoint.partial") for name in files(tmp_path / "results")) == 1
    assert run(*one_depth).exit_code == 0
    (name,) = files(tmp_path / "results")
    one, other = (
        [run for record in store.read(path)["records"] for run in record.get("runs", {}).values()]
        for path in (tmp_path / "results" / name, next((tmp_path / "whole").iterdir()))
    )
    for mine, theirs in zip(one, other, strict=True):
        for curve in ("step", "loss", "accuracy"):
            assert mine["curves"][curve] == pytest.approx(theirs["curves"][curve], rel=1e-5)
        assert mine["test_accuracy"] == theirs["test_accuracy"]


def test_ctrl_c_from_outside(tmp_path):
    """Of the command as a module, in a process of its own."""
    line = [*COMMAND, "reproduce", "mlp-timing", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not list(tmp_path.glob(f"*{store.PARTIAL}")) and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == cli.STOPPED, errors
    assert "Traceback" not in errors
    assert "To go on" in errors
    (found,) = files(tmp_path)
    assert not store.read(tmp_path / found)["complete"]


def test_ctrl_c_during_the_imports():
    """Most of the time before the command itself goes into that of torch."""
    code = """
import sys
class CtrlC:
    def find_spec(self, name, *_):
        if name == "torch":
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
from deeppcr_paper.__main__ import main
main()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (cli.STOPPED, "", "deeppcr-paper: interrupted\n")
