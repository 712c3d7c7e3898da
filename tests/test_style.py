"""What the linter and the formatter say: ``make lint`` asks the type checker, too, which takes a minute."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(find_spec("ruff") is None, reason="needs ruff")
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids="-".join)
def test_ruff_has_nothing_to_say(command):
    found = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
