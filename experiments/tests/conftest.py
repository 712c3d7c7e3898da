"""What the tests of the experiments share: a clock that no other program delays, and short searches for garbage."""

import gc

import pytest

from deeppcr_paper import timing
from deeppcr_paper.experiment import Context


class Clock:
    """Stands in for the module ``time``: nothing takes time but what says so."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def context(device):
    return Context(device)


@pytest.fixture
def clock(monkeypatch):
    """What the experiments time, they time by this."""
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


@pytest.fixture(autouse=True)
def stays_frozen(monkeypatch):
    """An experiment unfreezes at its end whatever was frozen before: each search for garbage after it took a third of a second."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
