"""What every test shares: the device, the seed and the Hypothesis profile."""

import atexit
import gc
import os
import traceback
from types import ModuleType

import pytest
import torch
from hypothesis import settings
from torch._subclasses import fake_tensor

# These are inherited or called, not collected: their assertions are to explain themselves all the same.
pytest.register_assert_rewrite(
    "fuse.compared", "linear.conformance", "linear.reference", "nn.kernels.modules", "nn.kernels.plain"
)

# A program by itself, whose Triton does not interpret (see test_compile.py), and what only such programs import.
collect_ignore = ["tests/kernel_compiler.py", "tests/compiler_stages.py"]

# The tensors are small: more threads only wait for each other, and the tests run side by side anyway.
torch.set_num_threads(1)

# What the cost model chooses is to be the same on every machine, and nothing is left in the user's cache folder.
os.environ["DEEPPCR_CALIBRATE"] = "0"

# What commands print is to be the same wherever the tests run: Rich colours it where one of these is set.
for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)

# For every operation that is traced on real numbers PyTorch writes down the stack, in case somebody asks: pytest's is deep, and that took
# a fourteenth of the time of tests that make kernels.
fake_tensor.traceback = ModuleType("traceback")
vars(fake_tensor.traceback).update(vars(traceback), extract_stack=list)

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


# What is frozen when Python ends is reported as leaked, by Triton's compiler. Not earlier: pytest looks for garbage five times at its end.
atexit.register(gc.unfreeze)


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
def seed(pytestconfig) -> None:
    """By the generator itself on a CPU: for devices that may come, PyTorch writes down the whole stack, half a millisecond a test."""
    (torch.default_generator if pytestconfig.getoption("--device") == "cpu" else torch).manual_seed(0)
