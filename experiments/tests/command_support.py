"""What the tests of the command share."""

import sys
from dataclasses import replace

from deeppcr_paper import cli

# Where the tests run in the background, a shell has told them to ignore Ctrl-C, and so what they start.
_HEARS = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
_RUNS = "runpy.run_module('deeppcr_paper', run_name='__main__', alter_sys=True)"
#: The command in a process of its own, that hears Ctrl-C as from a terminal.
COMMAND = [sys.executable, "-c", _HEARS + _RUNS]


def files(folder):
    """But not the folder of trained networks."""
    return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.exists() else []


def fails_clearly(result, *parts, code=cli.BAD):
    """One line, the code, no traceback."""
    assert result.exit_code == code, result.output
    lines = [line for line in result.output.splitlines() if line.strip()]
    assert len(lines) == 1, result.output
    assert lines[0].startswith("deeppcr-paper: ")
    assert "Traceback" not in result.output
    for part in parts:
        assert part in lines[0]


def patch_measure(monkeypatch, name, wrap):
    made = tuple(replace(each, measure=wrap(each.measure)) if each.name == name else each for each in cli.EXPERIMENTS)
    monkeypatch.setattr(cli, "EXPERIMENTS", made)
