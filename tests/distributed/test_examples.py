"""The examples run as their README says, on fewer ranks and steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "steps", "words"),
    [
        ("long_sequence", 20_000, "20000 steps over 2 ranks on"),
        ("sampling", 60, "60 steps, window of 60, over 2 ranks on"),
    ],
)
def test_examples(name, steps, words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = ROOT / "examples" / "distributed" / f"{name}.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    found = subprocess.run(
        [*command, str(script), f"--steps={steps}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert words in found.stdout
    assert "CONVERGED" in found.stdout


def test_every_example_is_listed():
    page = (ROOT / "examples" / "README.md").read_text()
    for path in (ROOT / "examples" / "distributed").glob("*.py"):
        assert f"distributed/{path.name}" in page
