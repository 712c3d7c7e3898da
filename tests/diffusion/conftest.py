from weakref import WeakKeyDictionary

import pytest

import deeppcr
from deeppcr.diffusion import problem


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    """Denoisers that a test before has had checked are checked again, and their runs are the first of their kind."""
    for kept in ("_by_themselves", "_roundings"):
        monkeypatch.setattr(problem, kept, WeakKeyDictionary())
    deeppcr.clear_caches()
