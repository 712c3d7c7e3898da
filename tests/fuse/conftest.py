"""Runs the kernels without a GPU, too."""

import pytest

import deeppcr
from deeppcr import runtime
from kernel_support import compiled, gpu, interpreted, poisoned_memory, pytest_configure

__all__ = ["compiled", "gpu", "interpreted", "kernels", "poisoned_memory", "pytest_configure"]


@pytest.fixture
def kernels(device, monkeypatch):
    """Kernels on the device, whichever it is, and nothing known of any step."""
    monkeypatch.setattr(runtime, "KERNEL_DEVICES", {device.type})
    deeppcr.clear_caches()
    yield
    deeppcr.clear_caches()
