import pytest

import deeppcr
from deeppcr.graphs import record
from deeppcr.ways import given as ways
from tape import Tape


@pytest.fixture
def recording(device, monkeypatch):
    """Solves are recorded, and nothing was before."""
    if device.type == "cpu":
        monkeypatch.setitem(record.RECORDERS, "cpu", Tape)
    else:  # where steps have kernels, which come first, nothing would be recorded
        monkeypatch.setattr(ways, "_by_kernels", lambda *_: None)
    deeppcr.clear_caches()
    yield
    deeppcr.clear_caches()
