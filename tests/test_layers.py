"""A module imports only from the layers below it, and importing the library costs little."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_import_contracts_hold():
    pytest.importorskip("importlinter")
    code = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_needs_nothing_but_torch():
    """None of the extras is imported, nor the experiments, nor a kernel."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import deeppcr, deeppcr.diffusion\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert not new & {'triton', 'rich', 'typer', 'matplotlib', 'sklearn', 'scipy', 'diffusers'}, new\n"
        "assert not {'deeppcr_paper', 'deeppcr.linear.kernels'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
