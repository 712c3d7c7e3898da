"""Runs the kernels without a GPU: interpreted, unless --device says otherwise."""

import os
import sys

import pytest


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
