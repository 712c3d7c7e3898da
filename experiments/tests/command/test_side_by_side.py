"""``--jobs``: what is not timed is measured in processes of their own, side by side."""

import signal
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from command_support import fails_clearly, files
from deeppcr_paper import cli, side_by_side, store
from deeppcr_paper.experiment import name_of

NAMES = ("resnet-training", "resnet-guess", "mlp-newton", "latent-diffusion", "pixel-diffusion", "diffusion-iterations")


class Made:
    """Processes that are none: what they are to do is done when they are asked for the first time whether they have ended.

    Attributes:
        commands: that were started
        measured: cells, by name
        returncodes: of a process by a part of its command, which then does nothing
        signals: that were sent
    """

    def __init__(self):
        self.commands, self.measured, self.returncodes, self.signals = [], [], {}, []
        self.endless = False

    def start(self, command, *, env, stdout, **_):
        assert env["DEEPPCR_CALIBRATE"] == "0"
        self.commands.append(command)
        return Process(self, command[3:], stdout)


class Process:
    def __init__(self, made, arguments, log):
        self.made, self.arguments, self.log, self.returncode = made, arguments, log, None
        self.log_path = log.name

    def poll(self):
        if self.returncode is None and not self.made.endless:
            told = " ".join(self.arguments)
            code = next((code for part, code in self.made.returncodes.items() if part in told), None)
            result = None if code is not None else CliRunner().invoke(cli.app, self.arguments)
            with open(self.log_path, "w") as log:
                log.write(result.output if result else "Traceback\nOSError: the disk is on fire\n")
            self.returncode = result.exit_code if result else code
        return self.returncode

    def wait(self):
        return self.returncode

    def send_signal(self, number):
        self.made.signals.append(number)


@pytest.fixture
def made(monkeypatch, light):
    made = Made()

    def measure(cell, settings, context):
        made.measured.append(name_of(cell))
        return {}

    monkeypatch.setattr(cli, "EXPERIMENTS", tuple(replace(each, measure=measure) for each in cli.EXPERIMENTS))
    stand_in = SimpleNamespace(Popen=made.start, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(side_by_side, "subprocess", stand_in)
    monkeypatch.setattr(side_by_side.time, "sleep", lambda seconds: None)
    return made


def content(folder):
    (found,) = files(folder)
    return store.read(folder / found)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_timed_then_the_others(run, tmp_path, made, name):
    changes = {"resnet-training": ("--set", "seeds=3"), "resnet-guess": ("--set", "timed_seeds=0")}.get(name, ())
    arguments = (name, "--quick", *changes, "--models", tmp_path / "models")
    result = run(*arguments, "--jobs", 2)
    assert result.exit_code == 0, result.output
    beside, processes = list(made.measured), len(made.commands)
    assert processes > (name != "latent-diffusion")  # which has one model here
    assert not (tmp_path / "results" / side_by_side.FOLDER).exists()
    if not content(tmp_path / "results")["complete"]:
        assert "without it the same command" in result.output
        assert run(*arguments, "--jobs", 2).exit_code == 0
        assert made.measured == beside
        assert run(*arguments).exit_code == 0
    assert len(made.commands) == processes
    assert len(set(made.measured)) == len(made.measured)
    found = content(tmp_path / "results")
    assert found["complete"]
    assert sorted(record["key"] for record in found["records"]) == sorted(made.measured)
    assert run(*arguments, out=tmp_path / "at once").exit_code == 0
    at_once = content(tmp_path / "at once")
    assert [each["key"] for each in at_once["records"]] == [each["key"] for each in found["records"]]


def test_one_that_fails_stops_no_other_and_is_told(run, tmp_path, made):
    made.returncodes = {"activation=sigmoid": 1}
    result = run("mlp-newton", "--quick", "--jobs", 2)
    fails_clearly(result, ": OSError: the disk is on fire")
    before = list(made.measured)
    assert before
    made.returncodes = {}
    assert run("mlp-newton", "--quick", "--jobs", 2).exit_code == 0
    assert content(tmp_path / "results")["complete"]
    assert len(set(made.measured)) == len(made.measured) > len(before)


def test_out_of_time(run, tmp_path, made):
    made.returncodes = {"activation=sigmoid": cli.AGAIN}
    result = run("mlp-newton", "--quick", "--jobs", 2, "--time-limit", 5)
    assert result.exit_code == cli.AGAIN
    assert "time limit reached" in result.output
    limits = [float(command[command.index("--time-limit") + 1]) for command in made.commands]
    assert all(4.5 < limit <= 5 for limit in limits)
    assert not content(tmp_path / "results")["complete"]


def test_interrupted(run, tmp_path, made, monkeypatch):
    """Processes are told to end, and what they have is kept."""
    made.endless = True

    def interrupt(seconds):
        made.endless = False
        raise KeyboardInterrupt

    monkeypatch.setattr(side_by_side.time, "sleep", interrupt)
    monkeypatch.setattr(Process, "send_signal", lambda self, number: (made.signals.append(number), self.poll()))
    result = run("mlp-newton", "--quick", "--jobs", 2)
    assert result.exit_code == cli.STOPPED
    assert made.signals == [signal.SIGINT] * 2
    assert len(content(tmp_path / "results")["records"]) == len(made.measured) > 0


def test_where_everything_is_timed(run, made):
    fails_clearly(run("mlp-timing", "--quick", "--jobs", 2), "every cell of it is timed")


def test_all(run, tmp_path, made, monkeypatch):
    some = tuple(each for each in cli.EXPERIMENTS if each.name in ("mlp-timing", "mlp-newton", "pixel-diffusion"))
    monkeypatch.setattr(cli, "EXPERIMENTS", some)
    result = run("all", "--quick", "--jobs", 3, "--models", tmp_path / "models")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert any(line.startswith("mlp-timing: timed") for line in lines)
    assert any(line.startswith("mlp-newton: finished: ") for line in lines)
    assert any(line.startswith("pixel-diffusion: finished what is not timed") for line in lines)


def test_processes_find_what_one_alone_finds(run, tmp_path):
    changes = ("--set", "activations=relu", "--set", "depths=4,8", "--set", "widths=2,4", "--set", "samples=1")
    arguments = ("mlp-newton", "--quick", *changes)
    assert run(*arguments, "--jobs", 2).exit_code == 0
    assert run(*arguments, out=tmp_path / "alone").exit_code == 0
    beside, alone = content(tmp_path / "results"), content(tmp_path / "alone")
    assert beside["complete"]
    assert beside["summary"] == alone["summary"]
    assert torch.tensor([each["iterations"] for each in beside["records"]]).amax() > 1
