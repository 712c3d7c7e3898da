"""What the tests of the command share."""

from dataclasses import replace

from deeppcr_paper import cli


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
