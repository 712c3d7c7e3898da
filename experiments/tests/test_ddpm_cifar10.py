"""``ddpm-cifar10``, with a network of no size."""

import time
from dataclasses import replace

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("sklearn")

from deeppcr_paper import ddpm_cifar10
from deeppcr_paper.experiment import Context, OutOfTime
from deeppcr_paper.store import PaperError

SETTINGS = replace(ddpm_cifar10.QUICK, seconds=0.3, samplers=("ddim-8",), runs=1, samples=12, draws=3, beside=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Where the network is kept, which the first test trains."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def context(models, device):
    return Context(device, models=models)


def test_all_cells(context):
    settings = replace(SETTINGS, precisions=ddpm_cifar10.PRECISIONS)
    found = [
        {**cell, **ddpm_cifar10.measure(cell, settings, context)} for cell in ddpm_cifar10.cells(settings, context)
    ]
    training, *times, distance = found
    assert training["steps"] > 0
    assert [each["precision"] for each in times] == (
        ["float32"] if context.device.type == "cpu" else ["float32", "tf32", "bfloat16"]
    )
    assert times[0]["results"] == ["CONVERGED"]
    assert max(times[0]["errors"]) <= 1e-3
    assert times[0]["images"]["shape"] == [1, 1, 8, 8]
    assert distance["samples"] == 12
    assert abs(distance["difference"]) <= 1e-4 * max(1, distance["sequential"])
    line, *_ = ddpm_cifar10.lines(ddpm_cifar10.summarise(found))
    assert line.startswith("ddim-8, float32: loop")
    again = ddpm_cifar10.network(settings, Context(context.device, models=context.models))[2]
    assert again["seconds"] == training["seconds"]  # it was loaded
    assert len({again["network"], *(each["network"] for each in found)}) == 1


def test_distances_are_gone_on_with(context, tmp_path, monkeypatch):
    cell = {"part": "distance", "sampler": "ddim-8"}
    whole = ddpm_cifar10.measure(cell, SETTINGS, context)
    context.checkpoint, checks = tmp_path / "a.checkpoint.partial", []

    def after_two(self):
        checks.append(1)
        if len(checks) == 3:
            raise OutOfTime

    monkeypatch.setattr(Context, "check_time", after_two)
    with pytest.raises(OutOfTime):
        ddpm_cifar10.measure(cell, SETTINGS, context)
    again = ddpm_cifar10.measure(cell, SETTINGS, context)
    for name in ("samples", "sequential", "parallel", "sequential_interval"):
        assert again[name] == pytest.approx(whole[name], rel=1e-4), name
    assert len(checks) == 5  # four batches, and one that was not begun


def test_cells_of_two_networks_do_not_meet(context, device, tmp_path):
    """What is trained for a time comes out differently every time."""
    record = ddpm_cifar10.network(SETTINGS, context)[2]

    def again(**more):
        return ddpm_cifar10.network(SETTINGS, Context(device, **{"models": context.models, **more}))[2]

    assert again(finished=[record])["network"] == record["network"]
    with pytest.raises(PaperError, match="another network"):
        again(models=tmp_path, finished=[record])
    with pytest.raises(PaperError, match="another network"):
        again(finished=[{"network": "other"}])
    with pytest.raises(PaperError, match=r"training alone takes 0\.3 seconds"):
        again(models=tmp_path, deadline=time.monotonic())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["euler-5", "ddim-0", "ddpm", "ddim-1001"])
def test_names_of_samplers(name):
    with pytest.raises(PaperError, match="expected ddpm-N or ddim-N"):
        ddpm_cifar10.sampler(name)
