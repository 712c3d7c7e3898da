"""Fixtures of the tests of benchmarks, and the interpreter that runs kernels."""

import pytest

from deeppcr.ways import plan
from quicker import quick_interpreter
from scripts import dry_run, precision

__all__ = ["dry_run", "nothing_is_cold", "precision", "quick_interpreter"]


@pytest.fixture(autouse=True)
def nothing_is_cold(monkeypatch):
    """What a solve does is not to depend on what tests before it have imported."""
    monkeypatch.setattr(plan, "_COLD", 0.0)
