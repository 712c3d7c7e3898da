"""Runs the kernels without a GPU, too."""

import contextlib

import pytest
import torch

from kernel_support import compiled, gpu, interpreted, poisoned_memory, pytest_configure, uncomputed

__all__ = [
    "by_kernels",
    "compiled",
    "few_rounds",
    "gpu",
    "interpreted",
    "poisoned_memory",
    "pytest_configure",
    "several_groups",
    "uncomputed",
]


@pytest.fixture
def by_kernels(device, monkeypatch):
    """Modules use the kernels: on a GPU they do, elsewhere they are told to."""
    from deeppcr.nn.base import Network

    if device.type == "cpu":
        monkeypatch.setattr(Network, "_may_use_kernels", lambda self, hidden: True)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return device


@pytest.fixture
def several_groups(monkeypatch):
    """Networks that an interpreter can do have few chunks, which would be one group: see also ``test_one_group``."""
    from deeppcr.nn import cost, forward

    monkeypatch.setattr(cost, "ONE_GROUP", 1)
    forward.plan_for.cache_clear()
    yield
    forward.plan_for.cache_clear()


@pytest.fixture
def few_rounds(monkeypatch):
    """Two rounds, so four passes, before the rest is taken one layer after the other."""
    from deeppcr.nn import forward

    monkeypatch.setattr(forward, "_ROUNDS", 2)
