"""Fixtures of the tests of benchmarks, and the interpreter that runs kernels."""

from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from deeppcr import runtime
from deeppcr.ways import fused, plan
from quicker import quick_interpreter
from scripts import dry_run, precision

__all__ = [
    "dry_run",
    "impatient",
    "nothing_is_cold",
    "precision",
    "quick_interpreter",
    "sources_of_their_own",
    "without_kernels",
]


@pytest.fixture(autouse=True)
def nothing_is_cold(monkeypatch):
    """What a solve does is not to depend on what tests before it have imported."""
    monkeypatch.setattr(plan, "_COLD", 0.0)


@pytest.fixture
def whole_float32():
    """Of cuDNN, too, against which results are held."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture
def without_kernels(monkeypatch):
    """Steps have none, on a GPU either: where earlier runs have left compiled ones, first calls would take them."""
    monkeypatch.setattr(runtime, "KERNEL_DEVICES", set())


@pytest.fixture
def impatient(without_kernels, monkeypatch, device):
    """Every loop is long enough to try other ways, of which nothing is known, and a parallel solve is expected to pay."""
    monkeypatch.setitem(plan._WORTH_NEWTON, device.type, 0.0)
    monkeypatch.setitem(plan._OPERATION, device.type, (1.0, 0.0, 0.0))
    plan.forget_records()
    fused.forget_kernels()
    yield
    plan.forget_records()
    fused.forget_kernels()


@pytest.fixture(autouse=True, scope="session")
def sources_of_their_own(tmp_path_factory):
    """What tests have written of steps, now and then by changed rules, nobody else is to find; nor they what somebody left."""
    if find_spec("triton") is None:
        yield
        return
    from deeppcr.fuse import kept

    with mock.patch.object(kept, "_folder", return_value=tmp_path_factory.mktemp("sources", numbered=False)):
        yield
