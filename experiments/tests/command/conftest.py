"""The command on experiments that take no time."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from deeppcr_paper import cli, compare_hardware, experiment, store
from deeppcr_paper.catalogue import EXPERIMENTS
from small_results import TINY


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


@pytest.fixture
def light(monkeypatch):
    """The experiments measure nothing: what is under test is what happens around them."""
    made = (replace(each, measure=lambda *_: {}, summarise=len, lines=lambda count: []) for each in cli.EXPERIMENTS)
    monkeypatch.setattr(cli, "EXPERIMENTS", tuple(made))
