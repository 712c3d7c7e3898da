"""What every test shares: the device, the seed and the Hypothesis profile."""

import gc
import os

import pytest
import torch
from hypothesis import settings

# These are inherited or called, not collected: their assertions are to explain themselves all the same.
pytest.register_assert_rewrite(
    "fuse.compared", "linear.conformance", "linear.reference", "nn.kernels.modules", "nn.kernels.plain"
)

# A program by itself, whose Triton does not interpret: see test_compile.py.
collect_ignore = ["tests/kernel_compiler.py"]

# The tensors are small: more threads only wait for each other, and the tests run side by side anyway.
torch.set_num_threads(1)

# What the cost model chooses is to be the same on every machine, and nothing is left in the user's cache folder.
os.environ["DEEPPCR_CALIBRATE"] = "0"

# What commands print is to be the same wherever the tests run: Rich colours it where one of these is set.
for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)

settings.register_profile("deeppcr", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("deeppcr")


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where the tests put their tensors: cpu (the default) or cuda")
    parser.addoption("--all", action="store_true", help="also run what is marked thorough; on a GPU it always runs")


def pytest_configure(config):
    name = config.getoption("--device")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise pytest.UsageError(f"--device={name}: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        # A suite that skips where it was asked to run looks green and has tested nothing.
        raise pytest.UsageError(f"--device={name}: torch {torch.__version__} finds no CUDA device on this machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: to look through it for garbage takes a fifth of that time, and each search after it longer."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def left_over() -> None:
    """What earlier files left behind is not looked through for garbage again and again, a quarter of a second each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # what is frozen when Python ends is reported as leaked, by Triton's compiler


def pytest_collection_modifyitems(config, items):
    """Full matrices of sizes wait for ``make test-all``: interpreted, a kernel takes a millisecond an operation."""
    if config.getoption("--all") or config.getoption("--device") != "cpu":
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


@pytest.fixture(scope="session")
def device(pytestconfig) -> torch.device:
    return torch.device(pytestconfig.getoption("--device"))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
