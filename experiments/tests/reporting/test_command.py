"""The command that builds the report: where it writes, and one clear line for whatever is wrong."""

import os

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
from typer.testing import CliRunner

from deeppcr_paper import (
    cli,
)
from small_results import timing_content, write


@pytest.fixture
def run(tmp_path):
    def run(*arguments):
        return CliRunner().invoke(cli.app, ["report", *map(str, arguments)])

    return run


def fails_clearly(result, *parts):
    assert result.exit_code == cli.BAD, result.output
    (line,) = [line for line in result.output.splitlines() if line.strip()]
    assert line.startswith("deeppcr-paper: ")
    assert "Traceback" not in result.output
    for part in parts:
        assert part in line


def test_writes_the_page_and_says_where(run, tmp_path, monkeypatch):
    write(tmp_path / "results", timing_content(quick=True))
    monkeypatch.chdir(tmp_path)
    done = run()
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "written to report.html"
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert not list(tmp_path.glob(".*"))


def test_no_results(run, tmp_path):
    fails_clearly(run("--results", tmp_path / "none"), str(tmp_path / "none"), "no such folder")
    fails_clearly(run("--results", tmp_path), str(tmp_path), "no finished results", "deeppcr-paper reproduce")
    (tmp_path / "mlp-timing-a-b.partial.json").write_text("{}")
    fails_clearly(run("--results", tmp_path), "mlp-timing-a-b.partial.json is unfinished")
    (tmp_path / "file").write_text("")
    fails_clearly(run("--results", tmp_path / "file"), "not a folder")


def drop(content):
    del content["records"][0]["forward"]


def misname(content):
    content["records"][0]["L"] = "deep"


def empty(content):
    content["records"] = []


def untype(content):
    content["settings"] = 3


@pytest.mark.parametrize("text", ["{}", "[1, 2]", '{"schema": 1, "rec'])
def test_a_file_with_the_name_of_an_experiment_and_not_its_content_is_named(run, tmp_path, text):
    write(tmp_path, timing_content(quick=True))
    path = tmp_path / "mlp-timing-other.json"
    path.write_text(text)
    fails_clearly(run("--results", tmp_path, "--out", tmp_path / "report.html"), str(path), "move it away")
    path.rename(tmp_path / "notes.json")
    if text.endswith(("}", "]")):  # another program's
        assert run("--results", tmp_path, "--out", tmp_path / "report.html").exit_code == 0


@pytest.mark.parametrize("damage", [drop, misname, empty, untype])
def test_a_damaged_file_is_named_and_the_old_page_stays(run, tmp_path, damage):
    content, out = timing_content(quick=True), tmp_path / "report.html"
    damage(content)
    path = write(tmp_path, content)
    out.write_text("the old page")
    fails_clearly(run("--results", tmp_path, "--out", out), str(path), "move it away")
    assert out.read_text() == "the old page"


@pytest.mark.parametrize("text", ['{"schema": 1, "rec', '{"schema": 0}', "\xff"])
def test_a_file_that_is_cut_off_or_old(run, tmp_path, text):
    path = tmp_path / "mlp-timing-old.json"
    path.write_text(text, encoding="latin-1")
    fails_clearly(run("--results", tmp_path, "--out", tmp_path / "report.html"), str(path))


def test_a_page_that_cannot_be_written(run, tmp_path, monkeypatch):
    write(tmp_path / "results", timing_content(quick=True))
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for out in (folder, "."):
        fails_clearly(run("--results", tmp_path / "results", "--out", out), f"{out}: is a folder", "report.html")
    (tmp_path / "file").write_text("")
    below = run("--results", tmp_path / "results", "--out", tmp_path / "file" / "page.html")
    fails_clearly(below, f"{tmp_path / 'file'}: is a file")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    out = tmp_path / "report.html"
    out.write_text("the old page")
    monkeypatch.setattr(os, "fsync", full_disk)
    fails_clearly(run("--results", tmp_path / "results", "--out", out), "no space left")
    assert out.read_text() == "the old page"
    assert not list(tmp_path.glob(".*"))
