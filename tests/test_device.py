"""Where a GPU is asked for and missing, the suite fails; it does not skip its way to green."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITHOUT_A_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_test_gpu_fails_without_one():
    """Before it collects anything, and so whatever is asked for."""
    command = ["make", "test-gpu", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=WITHOUT_A_GPU, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "finds no CUDA device on this machine" in done.stderr
    assert f"Error {pytest.ExitCode.USAGE_ERROR:d}" in done.stderr  # of pytest, by make
    assert "skipped" not in done.stdout
