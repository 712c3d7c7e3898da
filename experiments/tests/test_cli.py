"""The command: every experiment, interruption and going on, and one clear line for whatever is wrong."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import deeppcr
from deeppcr_paper import cli, compare_hardware, experiment, lock, store
from deeppcr_paper.catalogue import EXPERIMENTS
from small_results import TINY

#: A few steps and runs show as well as many that samples are drawn and timed.
FEWER = {
    "latent-diffusion": ["steps=8,16", "runs=2", "loop_runs=1", "batch=2", "budget=0"],
    "pixel-diffusion": ["steps=8", "runs=2", "loop_runs=1", "batch=2", "budget=0", "conditional=yes"],
    "diffusion-iterations": ["steps=8", "iterations=3"],
    "diffusion-guess": ["steps=8", "runs=1", "loop_runs=1", "guesses=class-mean,prior"],
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """The experiments with tiny settings for --quick."""
    precision = torch.get_float32_matmul_precision()
    made = tuple(replace(each, quick=replace(each.quick, **TINY[each.name])) for each in EXPERIMENTS)
    monkeypatch.setattr(cli, "EXPERIMENTS", made)
    grid = replace(compare_hardware.GRID, depths=(16,), widths=(2,), budget=0.01)
    monkeypatch.setattr(compare_hardware, "GRID", grid)
    monkeypatch.setattr(store, "INTERVAL", 0.0)
    monkeypatch.setattr(experiment, "_frozen_garbage", nullcontext)  # it takes longer than these experiments
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def run(tmp_path, device):
    def run(*arguments, out=tmp_path / "results", on=device.type):
        line = ["reproduce", *map(str, arguments), "--out", str(out), "--device", on]
        return CliRunner().invoke(cli.app, line)

    return run


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """What one experiment has trained is there for the next."""
    return tmp_path_factory.mktemp("models")


def files(folder):
    """But not the folder of trained networks."""
    return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.exists() else []


def fails_clearly(result, *parts, code=cli.BAD):
    """One line, the code, no traceback."""
    assert result.exit_code == code, result.output
    lines = [line for line in result.output.splitlines() if line.strip()]
    assert len(lines) == 1, result.output
    assert lines[0].startswith("deeppcr-paper: ")
    assert "Traceback" not in result.output
    for part in parts:
        assert part in lines[0]


@pytest.fixture
def light(monkeypatch):
    """The experiments measure nothing: what is under test is what happens around them."""
    made = (replace(each, measure=lambda *_: {}, summarise=len, lines=lambda count: []) for each in cli.EXPERIMENTS)
    monkeypatch.setattr(cli, "EXPERIMENTS", tuple(made))


def patch_measure(monkeypatch, name, wrap):
    made = tuple(replace(each, measure=wrap(each.measure)) if each.name == name else each for each in cli.EXPERIMENTS)
    monkeypatch.setattr(cli, "EXPERIMENTS", made)


def test_lists_every_experiment():
    output = CliRunner().invoke(cli.app, ["reproduce", "--list"]).output
    for each in EXPERIMENTS:
        assert each.name in output
    assert {each.name for each in EXPERIMENTS} == TINY.keys()


def test_help_says_how_to_begin():
    assert "reproduce" in CliRunner().invoke(cli.app, []).output
    found = CliRunner().invoke(cli.app, ["reproduce", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert found.exit_code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", found.output)
    for word in (
        "--quick",
        "--device",
        "--data-dir",
        "--models",
        "--out",
        "--seed",
        "--time-limit",
        "--list",
        "--set",
        "--only",
        "reproduce all",
        "mlp-timing --quick",
    ):
        assert word in plain


def test_version_as_a_command_and_as_an_option():
    command, option = (CliRunner().invoke(cli.app, [word]) for word in ("version", "--version"))
    assert (command.exit_code, option.exit_code) == (0, 0)
    assert command.output == option.output == f"deeppcr {deeppcr.__version__}, torch {torch.__version__}\n"


#: Those that train a network first; the others reach the same code but for the training, which has tests of its own. The last two are
#: also run where trained networks are shared.
SLOW = ("latent-diffusion", "pixel-diffusion", "diffusion-guess", "diffusion-iterations")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.thorough) if n in SLOW else n for n in TINY])
def test_every_experiment_end_to_end(name, run, tmp_path, models, device):
    changes = [part for change in FEWER.get(name, ()) for part in ("--set", change)]
    result = run(name, "--quick", "--models", models, *changes)
    assert result.exit_code == 0, result.output
    (found,) = files(tmp_path / "results")
    assert found.startswith(f"{name}-")
    assert found.endswith("-quick.json")
    assert found in result.output.replace("\n", "")
    content = store.read(tmp_path / "results" / found)
    assert content["complete"]
    assert content["experiment"] == name
    assert content["device"] == device.type
    assert content["summary"]
    assert content["records"]
    assert all("failed" not in json.dumps(record) for record in content["records"])


def test_settings_are_changed_and_recorded(run, tmp_path):
    changes = ["--set", "depths=4, 16", "--set", "guesses=random", "--set", "samples=1"]
    result = run("mlp-newton", "--quick", *changes)
    assert result.exit_code == 0, result.output
    (found,) = files(tmp_path / "results")
    content = store.read(tmp_path / "results" / found)
    assert (content["settings"]["depths"], content["settings"]["guesses"]) == ([4, 16], ["random"])
    assert {(record["L"], record["guess"]) for record in content["records"]} == {(4, "random"), (16, "random")}
    assert all(len(record["iterations"]) == 1 for record in content["records"])
    # What is gone on with is the run with the same changes.
    assert run("mlp-newton", "--quick", "--set", "samples=2", "--time-limit", 1e-9).exit_code == cli.AGAIN
    assert run("mlp-newton", "--quick", "--set", "samples=1", "--time-limit", 1e-9).exit_code == cli.AGAIN
    assert len([name for name in files(tmp_path / "results") if name.endswith(store.PARTIAL)]) == 2


@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        (
            "mlp-timing",
            "depth=3",
            ["no setting 'depth'", "depths=2,64 widths=2,4 other_widths=2,4 activations=relu,tanh budget"],
        ),
        ("mlp-timing", "depths=a", ["expected a whole number, got 'a'", "depths=2,64"]),
        ("mlp-timing", "depths=8,0", ["at least 1, got 0"]),
        ("mlp-timing", "depths=1.5", ["expected a whole number, got '1.5'"]),
        ("mlp-timing", "budget=nan", ["expected a number of at least 0"]),
        ("mlp-timing", "depths=32,64,32", ["32 is there twice"]),
        ("resnet-training", "iterations=3", ["iterations: not a setting of resnet-training", "resnet-iterations"]),
        ("resnet-training", "guesses=zeros", ["guesses: not a setting of resnet-training", "resnet-guess"]),
        ("mlp-timing", "depths", ["expected NAME=VALUE"]),
        ("mlp-timing", "activations=rely", ["expected relu or tanh or sigmoid, got 'rely'"]),
        ("mlp-timing", "seed=3", ["--seed"]),
        ("mlp-memory", "chunks=big", ["expected auto, got 'big'"]),
        ("resnet-training", "depths=10", ["multiples of skip = 4, got 10"]),
        ("resnet-training", "steps=many", ["expected a whole number"]),
        ("resnet-training", "batch=999", ["batch: 999 images"]),
    ],
)
def test_settings_that_do_not_exist_or_fit(run, tmp_path, name, change, parts):
    fails_clearly(run(name, "--quick", "--set", change), *parts)
    assert files(tmp_path / "results") == []


def test_a_training_of_so_many_steps(run, tmp_path):
    changes = ["depths=8", "steps=7", "seeds=1", "dtype=float64", "solver=default", "train=none"]
    result = run("resnet-training", "--quick", *(part for change in changes for part in ("--set", change)))
    assert result.exit_code == 0, result.output
    (found,) = files(tmp_path / "results")
    content = store.read(tmp_path / "results" / found)
    assert content["settings"]["train"] is None
    run_of = content["records"][-1]["runs"]["parallel"]
    assert run_of["curves"]["step"] == [4, 7]
    assert len(run_of["test_accuracy"]) == 1
    (largest,) = content["summary"][0]["loss_difference"]
    assert largest == max(content["records"][-1]["loss_distance"]) < 1e-9
    assert f"{largest:.1e}" in result.output


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
    # Where the tests run in the background, a shell may have told them to ignore Ctrl-C, and so what they start.
    code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); runpy.run_module('deeppcr_paper', run_name='__main__', alter_sys=True)"
    line = ["reproduce", "mlp-timing", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *line], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
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


def test_unknown_names(run, tmp_path):
    fails_clearly(run("mlp-timings", "--quick"), "'mlp-timings'", "mlp-timing, mlp-printed, mlp-memory")
    fails_clearly(run(), "which experiment?", "mlp-timing")
    fails_clearly(run("mlp-timing", "a.json"), "takes no files")
    assert files(tmp_path / "results") == []


@pytest.mark.parametrize("name", ["cuda:99", "mps", "tpu!"])
def test_a_device_that_is_not_there(run, tmp_path, name):
    fails_clearly(run("mlp-timing", "--quick", on=name), f"--device {name}")
    assert files(tmp_path / "results") == []


def test_no_gpu(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fails_clearly(run("mlp-timing", "--quick", on="cuda"), "--device cuda", "no CUDA device")


def test_the_largest_seed(run, tmp_path):
    assert run("mlp-newton", "--quick", "--seed", 2**63 - 1).exit_code == 0
    assert run("resnet-iterations", "--quick", "--seed", 2**63 - 1).exit_code == 0
    result = run("mlp-newton", "--quick", "--seed", 2**63)
    assert result.exit_code == cli.BAD
    assert "Traceback" not in result.output
    assert "--seed" in result.output


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


@pytest.mark.parametrize("name", ["mlp-newton", "all"])
def test_out_is_no_folder(run, tmp_path, name):
    """The folder is named, and not what was to be written there."""
    taken = tmp_path / "taken"
    taken.write_text("")
    fails_clearly(run(name, "--quick", out=taken), f"deeppcr-paper: {taken}: is a file, expected a folder")
    fails_clearly(run(name, "--quick", out=taken / "below"), f"deeppcr-paper: {taken}: is a file, expected a folder")
    fails_clearly(run(name, "--quick", "--models", taken), f"deeppcr-paper: {taken}: is a file, expected a folder")
    assert files(tmp_path / "results") == []


@pytest.mark.parametrize("name", ["mlp-newton", "all"])
def test_out_cannot_be_made(run, tmp_path, name, monkeypatch, light):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    folder = tmp_path / "results"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refuse)
        found = run(name, "--quick")
    fails_clearly(found, f"deeppcr-paper: {folder}: no folder can be made there: Permission denied")


def test_out_takes_no_files(run, tmp_path, monkeypatch, light):

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(lock.FileLock, "acquire", refuse)
    fails_clearly(
        run("mlp-newton", "--quick"), f"deeppcr-paper: {tmp_path / 'results'}: cannot be written: Permission denied"
    )


def test_bad_data(run, tmp_path):
    folder = tmp_path / "data"
    fails_clearly(run("resnet-training", "--data-dir", folder), str(folder), "no such folder")
    folder.mkdir()
    fails_clearly(run("resnet-training", "--quick", "--data-dir", folder), str(folder), "lacks train-images")
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte.gz").write_bytes(b"not an image")
    fails_clearly(run("resnet-training", "--data-dir", folder), "train-images-idx3-ubyte.gz: corrupt")
    assert files(tmp_path / "results") == []


def test_trained_networks_are_shared_and_checked(run, tmp_path):
    few = ["--quick", "--set", "steps=8"]
    assert run("diffusion-iterations", *few, "--set", "spaces=pixel", "--set", "iterations=1").exit_code == 0
    (model,) = (tmp_path / "results" / "models").iterdir()
    before = model.stat().st_mtime_ns
    once = ["--set", "guesses=mean", "--set", "runs=1", "--set", "loop_runs=1"]
    assert run("diffusion-guess", *few, "--set", "conditional=no", *once).exit_code == 0
    assert [each.stat().st_mtime_ns for each in model.parent.iterdir()] == [before]
    model.write_bytes(model.read_bytes()[:-7])
    again = ("diffusion-iterations", *few, "--set", "spaces=pixel", "--set", "iterations=2")
    fails_clearly(run(*again), str(model), "cut short")
    assert run(*again, "--models", tmp_path / "elsewhere").exit_code == 0
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_bad_images(run, tmp_path):
    """A folder with an image that cannot be read is named before anything is trained."""
    folder = tmp_path / "data" / "celeba"
    folder.mkdir(parents=True)
    for number in range(12):
        (folder / f"{number}.jpg").write_bytes(b"not an image")
    result = run("latent-diffusion", "--quick", "--set", "data=celeba", "--data-dir", folder.parent)
    fails_clearly(result, str(folder / "0.jpg"), "not an image")
    fails_clearly(run("latent-diffusion", "--quick", "--set", "data=cifar10", "--data-dir", folder), "lacks CIFAR-10")
    fails_clearly(run("pixel-diffusion", "--quick", "--set", "sides=5"), "got 5")
    assert files(tmp_path / "results") == []


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_at_the_start(run, tmp_path, monkeypatch, light):
    monkeypatch.setattr(os, "fsync", full_disk)
    fails_clearly(run("mlp-newton", "--quick"), "no space left on the disk")
    assert files(tmp_path / "results") == []


def test_a_full_disk_on_the_way(run, tmp_path, monkeypatch, light):
    with monkeypatch.context() as patched:

        def filling(measure):
            def wrapped(cell, settings, context):
                if cell["L"] == 64:
                    patched.setattr(os, "fsync", full_disk)
                return measure(cell, settings, context)

            return wrapped

        patch_measure(patched, "mlp-newton", filling)
        fails_clearly(run("mlp-newton", "--quick"), "no space left on the disk")
    (found,) = files(tmp_path / "results")
    assert len(store.read(tmp_path / "results" / found)["records"]) == 2  # what was there before is still there
    assert run("mlp-newton", "--quick").exit_code == 0


@pytest.mark.parametrize("text", ['{"schema": 0, "records": []}', '{"schema": 1, "rec'])
def test_results_of_an_older_version_or_cut_off(run, tmp_path, text):
    folder = tmp_path / "results"
    folder.mkdir()
    old = folder / f"mlp-newton-old{store.PARTIAL}"
    old.write_text(text)
    fails_clearly(run("mlp-newton", "--quick"), str(old), "move it away")
    assert files(folder) == [old.name]
    assert old.read_text() == text
    fails_clearly(run("hardware", old, old), str(old))


def test_hardware_compares_two_files(run, tmp_path):
    folder = tmp_path / "results"
    one, other = two_machines(run, tmp_path)
    result = run("hardware", one, other)
    assert result.exit_code == 0, result.output
    (found,) = [name for name in files(folder) if name.startswith("hardware")]
    content = store.read(folder / found)
    for record in content["records"]:
        entry = record["forward"]["loop"]
        assert entry["ratio"] == pytest.approx(entry["seconds"][1] / entry["seconds"][0])
    assert "forward loop" in content["summary"]["ratios"]
    # It is no more than what it was made from: a quick run, of one depth.
    assert content["quick"]
    assert found.endswith("-quick.json")
    assert "depths" in content["settings"]["changed"]


def two_machines(run, tmp_path):
    """The result of this machine, with another setting, and the same times by another name."""
    assert run("mlp-timing", "--quick", "--set", "depths=64", out=tmp_path / "here").exit_code == 0
    (one,) = (tmp_path / "here").iterdir()
    content = store.read(one)
    content["records"] = [{**record, "hardware": "Another"} for record in content["records"]]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    return one, other


def test_hardware_wants_two_machines(run, tmp_path):
    one, _ = two_machines(run, tmp_path)
    fails_clearly(run("hardware", one, one), str(one), "given twice")
    copy = tmp_path / "copy.json"
    copy.write_bytes(one.read_bytes())
    fails_clearly(run("hardware", one, copy), str(one), str(copy), "both measured on ")
    assert files(tmp_path / "results") == []


def test_hardware_with_the_wrong_files(run, tmp_path, light):
    fails_clearly(run("hardware"), "two result files")
    fails_clearly(run("hardware", "a.json", "b.json"), "a.json: there is no such file")
    assert run("mlp-newton", "--quick").exit_code == 0
    (found,) = files(tmp_path / "results")
    path = tmp_path / "results" / found
    fails_clearly(run("hardware", path, path), "results of mlp-newton, expected those of mlp-timing")
    run("mlp-timing", "--quick", "--time-limit", 1e-9)
    (found,) = [name for name in files(tmp_path / "results") if name.startswith("mlp-timing")]
    path = tmp_path / "results" / found
    fails_clearly(run("hardware", path, path), "not finished")
