"""The command: every experiment, its settings, and what it says of itself."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

import deeppcr
from command_support import fails_clearly, files
from deeppcr_paper import cli, store
from deeppcr_paper.catalogue import EXPERIMENTS
from small_results import TINY

#: A few steps and runs show as well as many that samples are drawn and timed.
FEWER = {
    "latent-diffusion": ["steps=8,16", "runs=2", "loop_runs=1", "batch=2", "budget=0"],
    "pixel-diffusion": ["steps=8", "runs=2", "loop_runs=1", "batch=2", "budget=0", "conditional=yes"],
    "diffusion-iterations": ["steps=8", "iterations=3"],
    "diffusion-guess": ["steps=8", "runs=1", "loop_runs=1", "guesses=class-mean,prior"],
}


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
