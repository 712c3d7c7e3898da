"""Runs the kernels without a GPU, too."""

import pytest

import deeppcr
from deeppcr import runtime
from kernel_support import compiled, gpu, poisoned_memory, pytest_configure, quick_interpreter

__all__ = ["compiled", "gpu", "kernels", "poisoned_memory", "pytest_configure", "quick_interpreter"]


@pytest.fixture
def kernels(device, monkeypatch):
    """Kernels on the device, whichever it is, and nothing known of any step."""
    monkeypatch.setattr(runtime, "KERNEL_DEVICES", {device.type})
    deeppcr.clear_caches()
    yield
    deeppcr.clear_caches()
