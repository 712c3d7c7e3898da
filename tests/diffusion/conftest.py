from weakref import WeakKeyDictionary

import pytest

from deeppcr.diffusion import problem


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    """Denoisers that a test before has had checked are checked again."""
    monkeypatch.setattr(problem, "_by_themselves", WeakKeyDictionary())
