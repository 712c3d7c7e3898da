"""``--jobs``: what is not timed is measured in processes of their own, side by side."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from command_support import COMMAND, fails_clearly, files
from deeppcr_paper import cli, side_by_side, store
from deeppcr_paper.experiment import OutOfTime, name_of

ONE_TIMED = ("resnet-training", "--quick", "--set", "depths=64", "--set", "seeds=3")
GUESSES = ("resnet-guess", "--quick", "--set", "timed_seeds=0")  # 6 cells


class Made:
    """What is measured, in threads instead of processes, and how many at a time.

    Attributes:
        measured: cells, by name
        told: contexts and settings
        errors: what is raised in a cell, by a part of its name
    """

    def __init__(self):
        self.measured, self.told, self.errors, self.processes, self.now, self.most = [], [], {}, [], 0, 0
        self._lock = threading.Lock()

    class Process:
        exitcode = -9

        def __init__(self, thread):
            self.thread, self.killed = thread, False

        def join(self):
            self.thread.join()

        def kill(self):
            self.killed = True

    def measure(self, cell, settings, context):
        name = name_of(cell)
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        context.watcher.part(0.25)
        time.sleep(0.02)
        with self._lock:
            self.now -= 1
        for part, error in self.errors.items():
            if part in name:
                raise error
        context.save_checkpoint({"step": 1})  # to be gone with the record
        self.measured.append(name)
        self.told.append((context, settings))
        return {}


@pytest.fixture
def made(monkeypatch, light):
    made = Made()

    def start(threads, arguments):
        ours, theirs = multiprocessing.Pipe()

        def measure():
            with suppress(SystemExit), theirs:  # which a process that ends closes
                side_by_side._measure(theirs, *arguments)

        process = Made.Process(threading.Thread(target=measure))
        made.processes.append(process)
        process.thread.start()
        return ours, process

    experiments = tuple(replace(each, measure=made.measure) for each in cli.EXPERIMENTS)
    monkeypatch.setattr(cli, "EXPERIMENTS", experiments)
    monkeypatch.setattr(side_by_side, "EXPERIMENTS", experiments)
    monkeypatch.setattr(side_by_side, "_start", start)
    return made


def content(folder):
    (found,) = files(folder)
    return store.read(folder / found)


@pytest.mark.parametrize(
    ("arguments", "beside"),
    [
        (ONE_TIMED, ["L=64 seed=1", "L=64 seed=2"]),
        ((*ONE_TIMED, "--seed", 7), ["L=64 seed=8", "L=64 seed=9"]),
        (GUESSES, [f"L=16 guess={g} iterations={n} seed=0" for g in ("batch-mean", "random", "zeros") for n in (0, 3)]),
        (("latent-diffusion", "--quick"), ["data=digits w=4 part=training"]),
        (("pixel-diffusion", "--quick"), [f"data=digits side=4 conditional={c} part=training" for c in ("no", "yes")]),
    ],
    ids=["resnet-training", "another-seed", "resnet-guess", "latent-diffusion", "pixel-diffusion"],
)
def test_what_is_not_timed_then_the_others(run, tmp_path, made, arguments, beside):
    result = run(*arguments, "--jobs", 2)
    assert result.exit_code == 0, result.output
    assert sorted(made.measured) == sorted(beside)
    all_of_it = arguments is GUESSES
    assert content(tmp_path / "results")["complete"] == all_of_it
    if not all_of_it:
        assert f"{len(beside)} cells as asked for by --jobs" in result.output
        assert run(*arguments, "--jobs", 2).exit_code == 0
        assert len(made.measured) == len(beside)
        assert run(*arguments).exit_code == 0
    found = content(tmp_path / "results")
    assert found["complete"]
    assert sorted(record["key"] for record in found["records"]) == sorted(made.measured)
    assert run(*arguments, out=tmp_path / "at once").exit_code == 0
    at_once = content(tmp_path / "at once")
    assert [each["key"] for each in at_once["records"]] == [each["key"] for each in found["records"]]


def test_as_many_at_a_time_as_asked_for(run, tmp_path, made):
    for jobs in (2, 3):
        made.most = 0
        assert run(*GUESSES, "--jobs", jobs, out=tmp_path / str(jobs)).exit_code == 0
        assert made.most == jobs
    fails_before = run(*GUESSES, "--jobs", 0)
    assert (fails_before.exit_code, made.measured) == (2, made.measured[:12])


def test_what_the_command_says_reaches_the_cells(run, tmp_path, made):
    more = ("--seed", 5, "--only", "guess=zeros", "--models", tmp_path / "elsewhere", "--time-limit", 5)
    result = run(*GUESSES, *more, "--set", "rate=0.5", "--jobs", 2, on="cpu")
    assert "2 cells as asked for by --only and --jobs" in result.output
    assert sorted(made.measured) == [f"L=16 guess=zeros iterations={n} seed=5" for n in (0, 3)]
    for context, settings in made.told:
        assert (settings.seed, settings.rate) == (5, 0.5)
        assert context.models == tmp_path / "elsewhere"
        assert 0 < context.deadline - time.monotonic() < 300
        assert context.checkpoint.parent == tmp_path / "results"
        assert context.device.type == "cpu"
    assert run(*GUESSES, "--seed", 6, "--jobs", 2).exit_code == 0
    assert made.told[-1][0].models == tmp_path / "results" / "models"


def test_one_that_fails_stops_no_other_and_is_told(run, tmp_path, made):
    made.errors = {"guess=random iterations=0": RuntimeError("CUDA error\nand how to find it"), "zeros": OutOfTime()}
    result = run(*GUESSES, "--jobs", 2)
    assert result.exit_code == 1
    told = str(result.exception)
    assert told.startswith("in the cell L=16 guess=random iterations=0 seed=0: RuntimeError: CUDA error\nand how")
    assert "in measure" in told  # the traceback
    assert len(content(tmp_path / "results")["records"]) == 3
    made.errors = {f"random iterations={n}": store.PaperError(f"diverged {n}") for n in (0, 3)}
    result = run(*GUESSES, "--jobs", 2, out=tmp_path / "two")
    fails_clearly(result, "guess=random iterations=0 seed=0: diverged 0", "; ", "iterations=3 seed=0: diverged 3")
    made.errors, made.measured = {}, [record["key"] for record in content(tmp_path / "results")["records"]]
    assert run(*GUESSES, "--jobs", 2).exit_code == 0
    assert content(tmp_path / "results")["complete"]
    assert len(set(made.measured)) == len(made.measured) == 6


def test_a_process_that_ends_is_noticed(run, tmp_path, made):
    made.errors = {"guess=zeros iterations=0": SystemExit()}  # closes its pipe without a word
    result = run(*GUESSES, "--jobs", 3)
    fails_clearly(result, "guess=zeros iterations=0 seed=0: its process ended (exit code -9)", "fewer --jobs")
    assert len(content(tmp_path / "results")["records"]) == 5


def test_how_far_they_have_come_is_told(run, made, monkeypatch):
    told = []
    monkeypatch.setattr(cli.Bars, "part", lambda self, fraction: told.append(fraction))
    assert run(*GUESSES, "--jobs", 2).exit_code == 0
    assert set(told) == {0.25}


def test_out_of_time(run, tmp_path, made):
    made.errors = {"guess=zeros": OutOfTime()}
    result = run(*GUESSES, "--jobs", 2, "--time-limit", 5)
    assert result.exit_code == cli.AGAIN
    assert "time limit reached; 4 of 6 cells" in result.output
    assert not content(tmp_path / "results")["complete"]
    started = len(made.processes)
    assert run(*GUESSES, "--jobs", 2, "--time-limit", 1e-9).exit_code == cli.AGAIN
    assert len(made.processes) == started, "what is late does not begin"


@pytest.mark.parametrize("again", [False, True])
def test_interrupted(run, tmp_path, made, monkeypatch, again):
    """Those at work are told to stop, the others do not begin; what is finished is kept."""
    hear, stopped = side_by_side.connection.wait, []

    def interrupt(pipes, timeout):
        if timeout is None and again:
            raise KeyboardInterrupt
        if timeout is not None and len(made.measured) >= 2:
            raise KeyboardInterrupt
        return hear(pipes, timeout)

    def until_stopped(measure):
        def wrapped(cell, settings, context):
            while cell["guess"] == "zeros":
                time.sleep(0.01)
                if context.is_late:
                    stopped.append(name_of(cell))
                    raise OutOfTime
            return measure(cell, settings, context)

        return wrapped

    known = side_by_side.EXPERIMENTS
    with monkeypatch.context() as patched:
        interrupting = SimpleNamespace(wait=interrupt, Connection=side_by_side.connection.Connection)
        patched.setattr(side_by_side, "connection", interrupting)
        slow = tuple(replace(each, measure=until_stopped(each.measure)) for each in known)
        patched.setattr(side_by_side, "EXPERIMENTS", slow)
        result = run(*GUESSES, "--set", "guesses=zeros,random", "--jobs", 3)
        assert result.exit_code == cli.STOPPED
        for process in made.processes:
            process.join()
    assert len(stopped) == 2
    assert any(process.killed for process in made.processes) == again
    kept = [each["key"] for each in content(tmp_path / "results")["records"]]
    assert kept == [name for name in made.measured if name in kept]
    assert len(kept) == 2 or again
    assert f"{len(kept)} of 4 cells" in result.output
    assert run(*GUESSES, "--set", "guesses=zeros,random", "--jobs", 2).exit_code == 0
    assert content(tmp_path / "results")["complete"]


def test_where_everything_is_timed(run, made):
    fails_clearly(run("mlp-timing", "--quick", "--jobs", 2), "all of these cells are timed")
    fails_clearly(run(*ONE_TIMED, "--only", "seed=0", "--jobs", 2), "all of these cells are timed")
    assert not made.measured


def test_all(run, tmp_path, made, monkeypatch):
    some = tuple(each for each in cli.EXPERIMENTS if each.name in ("mlp-timing", "latent-diffusion", "pixel-diffusion"))
    monkeypatch.setattr(cli, "EXPERIMENTS", some)
    result = run("all", "--quick", "--jobs", 3)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert any(line.startswith("mlp-timing: timed") for line in lines)
    assert any(line.startswith("latent-diffusion: finished what is not timed, 1 cells") for line in lines)
    assert any(line.startswith("pixel-diffusion: finished what is not timed, 2 cells") for line in lines)


def children(process):
    """The ids of what it has started."""
    return [int(each) for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def reads(number, path):
    """What the kernel says of a process; nothing where there is none."""
    try:
        return Path(f"/proc/{number}/{path}").read_text()
    except OSError:
        return ""


def is_running(number):
    return reads(number, "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def wait_for(condition):
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Running:
    """The command as from a terminal, where Ctrl-C reaches all of its processes; a training takes long."""

    def __init__(self, out, *more, counts="3"):
        arguments = ["resnet-guess", "--quick", "--set", "timed_seeds=0", "--set", "depths=16", "--device", "cpu"]
        arguments += [
            "--set",
            "guesses=zeros",
            "--set",
            f"iterations={counts}",
            "--set",
            "epochs=500",
            "--set",
            "window=1",
        ]
        command = [*COMMAND, "reproduce", *arguments, "--out", str(out), *more]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def children(self):
        number = self.process.pid
        return [int(each) for each in reads(number, f"task/{number}/children").split()]

    def wait_until(self, count):
        """So many of its children train: they have loaded the images. Returns all of its children.

        Before it becomes a program of its own, a child has the memory of its parent, which has loaded them, too.
        """

        def trains(number):
            return "--multiprocessing-fork" in reads(number, "cmdline") and "sklearn" in reads(number, "maps")

        wait_for(lambda: sum(map(trains, self.children())) == count)
        return self.children()

    def end(self, how=0):
        if how:
            os.killpg(self.process.pid, how) if how is signal.SIGINT else self.process.send_signal(how)
        said, _ = self.process.communicate(timeout=180)
        return self.process.returncode, said


def steps(folder):
    return [store.read_checkpoint(each)["step"] for each in sorted(folder.glob(f"*{store.CHECKPOINT}"))]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_training_that_is_interrupted_is_kept(tmp_path):
    running = Running(tmp_path, "--jobs", "2")
    children = running.wait_until(1)
    code, said = running.end(signal.SIGINT)
    assert code == cli.STOPPED, said
    assert "interrupted; 0 of 1 cells" in said
    assert "Traceback" not in said
    wait_for(lambda: not any(map(is_running, children)))
    assert min(steps(tmp_path)) > 0


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nobody_is_left_behind_and_a_training_goes_on_where_it_was(tmp_path):
    running = Running(tmp_path, "--jobs", "2", counts="1,3")
    children = running.wait_until(2)
    time.sleep(2)  # in which they go on
    running.end(signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, children)))
    killed = steps(tmp_path)
    assert len(killed) == 2, "the processes find that the first one is gone, and keep their state"
    assert min(killed) > 0

    running = Running(tmp_path, "--jobs", "2", counts="1,3")
    children = running.wait_until(2)
    time.sleep(2)  # in which they go on
    os.kill(children[-1], signal.SIGKILL)
    running.end(signal.SIGINT)
    first = steps(tmp_path)
    assert [now > before for now, before in zip(first, killed, strict=True)] in ([True, False], [False, True])

    code, said = Running(tmp_path, "--jobs", "2", "--time-limit", "0.25", counts="1,3").end()
    assert code == cli.AGAIN, said
    second = steps(tmp_path)
    assert all(now > before for now, before in zip(second, first, strict=True))

    # Alone, it goes on from there and ends soon.
    code, said = Running(tmp_path, "--time-limit", "0.25", counts="1,3").end()
    assert code == cli.AGAIN, said
    third = steps(tmp_path)
    assert third[0] > second[0]
    assert third[1:] == second[1:]


def test_processes_are_set_as_the_first_one_and_keep_no_times(monkeypatch):
    """By what they do first of all."""
    done = []
    monkeypatch.setattr(side_by_side, "_measure", lambda *arguments: done.append((arguments, os.environ.copy())))
    monkeypatch.setattr(side_by_side.torch, "set_num_threads", done.append)
    monkeypatch.setattr(side_by_side.warnings, "simplefilter", lambda *_: None)
    for before, after in ((None, "read"), ("0", "0")):
        monkeypatch.delenv("DEEPPCR_CALIBRATE", raising=False)
        if before is not None:
            monkeypatch.setenv("DEEPPCR_CALIBRATE", before)
        else:
            monkeypatch.setattr(os, "environ", os.environ.copy())
        side_by_side._be_one_of_many(3, "a", "b")
        threads, (arguments, environment) = done[-2:]
        assert (threads, arguments, environment["DEEPPCR_CALIBRATE"]) == (3, ("a", "b"), after)


@pytest.mark.thorough
def test_processes_find_what_one_alone_finds(run, tmp_path):
    arguments = ("resnet-guess", "--quick", "--set", "timed_seeds=0", "--set", "depths=16", "--set", "guesses=zeros")
    folders = {"beside": ("--jobs", 2), "alone": ()}
    for name, more in folders.items():
        assert run(*arguments, *more, out=tmp_path / name).exit_code == 0
    beside, alone = (content(tmp_path / name) for name in folders)
    assert beside["complete"]
    assert beside["summary"] == alone["summary"]
    assert beside["records"][0].keys() == alone["records"][0].keys()
