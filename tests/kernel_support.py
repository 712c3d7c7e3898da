"""What the tests of kernels share: without a GPU they run interpreted, unless --device says otherwise.

The ``conftest.py`` of each folder with such tests takes the hook and the fixtures from here.
"""

import os
import sys

import pytest
import torch


def pytest_configure(config):
    # Called as soon as this file is collected, hence before the first test of any file runs. Triton decides when it
    # is imported.
    if config.getoption("--device") == "cpu":
        assert os.environ.get("TRITON_INTERPRET") == "1" or "triton" not in sys.modules
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def scan_by_doubling(pytestconfig):
    """Interpreted scans go element by element: a thousand times too slow, and kinder to products than a GPU is."""
    if pytestconfig.getoption("--device") != "cpu":
        yield
        return
    np = pytest.importorskip("numpy")
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def generic_scan(self, inputs):
        values, stride = [one.handle.data for one in inputs], 1
        places = np.indices(values[0].shape)[self.axis]
        while stride < values[0].shape[self.axis]:
            earlier = [np.roll(value, stride, self.axis) for value in values]
            tensors = [self.to_tensor(v, one.dtype) for v, one in zip(earlier + values, inputs * 2, strict=True)]
            joined = self.combine_fn.fn(*tensors)
            values = [np.where(places < stride, v, new.handle.data) for v, new in zip(values, joined, strict=True)]
            stride *= 2
        return [self.to_tensor(value, one.dtype) for value, one in zip(values, inputs, strict=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.ScanOps, "generic_scan", generic_scan)
        yield


@pytest.fixture
def gpu(device) -> torch.device:
    """The device, for tests that make no sense without a GPU; asked for one that is missing, the suite does not start."""
    if device.type != "cuda":
        pytest.skip("needs a GPU: --device=cuda")
    return device


@pytest.fixture
def poisoned_memory(device):
    """Memory that nobody has written to holds NaN, and the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=device).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def strided(tensor):
    """The same values, every other element of a larger tensor, dimensions laid out backwards, not from its start."""
    backwards = tensor.permute(*reversed(range(tensor.ndim)))
    room = torch.full((2 * tensor.numel() + 3,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    spread = room[3::2].unflatten(0, backwards.shape).copy_(backwards)
    return spread.permute(*reversed(range(tensor.ndim)))


def offset(tensor):
    """The same values in a tensor that starts and whose rows start at odd places."""
    room = torch.full((tensor.shape[0] + 1, tensor[0].numel() + 1), float("nan")).to(tensor)
    rows = room[1:, 1:].unflatten(-1, tensor.shape[1:])
    return rows.copy_(tensor)


def misaligned(tensor):
    """The same values, contiguous, in a tensor that starts at an odd place."""
    room = torch.full((tensor.numel() + 1,), float("nan")).to(tensor)
    return room[1:].unflatten(0, tensor.shape).copy_(tensor)


def error(actual, expected) -> float:
    """In norm, relative to what was expected."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
