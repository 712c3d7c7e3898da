"""The scripts of benchmarks/, examples/ and .ci/ as modules, and dry runs of benchmarks."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]


@contextmanager
def scripts(folder: str) -> Iterator[Callable[[str], ModuleType]]:
    """Import scripts of a folder by name, as they import each other; afterwards they are forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / folder))
        before = set(sys.modules)
        yield importlib.import_module
        folders = tuple(str(ROOT / each) for each in ("benchmarks", "examples", ".ci"))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(folders):
                del sys.modules[name]


def script(folder: str, name: str):
    """A fixture: one of them."""

    @pytest.fixture(scope="module")
    def module():
        with scripts(folder) as load:
            yield load(name)

    return module


@pytest.fixture
def precision():
    """Benchmarks ask for full precision, of the whole process."""
    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    yield
    torch.set_float32_matmul_precision(before[0])
    cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = before[1:]


@pytest.fixture
def dry_run(bench, precision, tmp_path, device):
    """Runs the benchmark of the file, quickly: its exit code, and what it wrote."""

    def run(*arguments: str) -> tuple[int, dict]:
        path = tmp_path / "results" / "found.json"
        code = bench.main(["--quick", "--device", device.type, "--json", str(path), "--commit", "abc1234", *arguments])
        assert list(path.parent.iterdir()) == [path]  # no partial file beside it
        return code, json.loads(path.read_text())

    return run
