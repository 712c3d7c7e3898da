"""The benchmark of the two trainings, dry; what is said of its measurements, and that the page says it of the newest ones."""

import gzip
import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch

from deeppcr_paper import data
from scripts import ROOT, dry_run, precision, script  # noqa: F401 - fixtures

bench, report = script("benchmarks", "trainings"), script("benchmarks", "training_report")


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """A folder with four files like those of MNIST, of noise."""
    folder, sums = tmp_path / "mnist", {}
    folder.mkdir()
    for name in data.MD5:
        count = 130
        head = [2051, count, 28, 28] if "images" in name else [2049, count]
        size = count * 784 if "images" in name else count
        body = torch.randint(0, 256 if "images" in name else 10, (size,), dtype=torch.uint8).numpy().tobytes()
        content = b"".join(number.to_bytes(4, "big") for number in head) + body
        sums[name] = hashlib.md5(content).hexdigest()
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(data, "MD5", sums)
    return folder


def test_a_dry_run(dry_run, digits, capsys):  # noqa: F811
    code, record = dry_run("--data-dir", str(digits), "--every", "1", "--print")
    assert (code, record["experiment"], record["commit"]) == (0, "trainings-quick", "abc1234")
    mnist, amplifier = record["cases"]
    assert (mnist["steps"], mnist["done"], amplifier["steps"], amplifier["done"]) == (1, 1, 4, 4)
    for case in record["cases"]:
        sides = ["torch", "deeppcr", "reordered"]
        assert list(case["losses"]) == list(case["milliseconds"]) == sides
        assert all(len(losses) == case["done"] for losses in case["losses"].values())
        assert case["losses"]["deeppcr"] == pytest.approx(case["losses"]["torch"], rel=1e-4)
        assert set(case["apart"]) == {"deeppcr", "reordered"}
        assert sum(case["solves"].values()) == case["done"]
    assert [claim["limit"] for claim in record["targets"]] == pytest.approx([0.1, 0.1, 1, 0.2, 1])
    assert record["targets"][-1]["met"]
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["cases"] == record["cases"]
    assert (digits / "amplifier-10-65-0.npz").exists()


def test_one_of_them_for_no_time(dry_run):  # noqa: F811
    code, record = dry_run("--only", "amplifier", "--minutes", "0", "--epochs", "amplifier=3")
    (case,) = record["cases"]
    assert (code, case["done"], case["steps"]) == (1, 0, 6)
    assert [claim["value"] for claim in record["targets"]] == [None, None]


def test_epochs_that_are_no_numbers_are_refused(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--epochs", "mnist"])
    assert "--epochs: expected NAME=N, got mnist" in capsys.readouterr().err


def test_targets(bench):
    """Accuracy of both sides, the time of a step, and losses beside what they differ by anyway."""
    scores = [{"step": 5.0, "torch": 0.8, "deeppcr": 0.8}, {"step": 10.0, "torch": 0.95, "deeppcr": 0.85}]
    times, far = {"torch": 40.0, "deeppcr": 5.0, "reordered": 41.0}, {"deeppcr": 0.01, "reordered": 0.04}
    mnist = bench.Training("mnist", {}, "accuracy", 10, 10, {}, times, scores, {}, far)
    found = [value for _, value, _ in bench.claims_of(mnist)]
    assert found == pytest.approx([0.05, 0.15, 0.25])
    mnist.done = 9
    assert mnist.failed
    assert [value for _, value, _ in bench.claims_of(mnist)][:2] == [None, None]
    mnist.name = "amplifier"
    assert [value for _, value, _ in bench.claims_of(mnist)] == pytest.approx([0.125, 0.25])


def test_tables(report, tmp_path):
    case = {
        "name": "amplifier", "settings": {}, "measure": "error-to-signal ratio", "steps": 1200, "done": 1200,
        "losses": {"torch": [1.234567, *range(2, 10), 0.5], "deeppcr": [1.234, *range(9)], "reordered": [1.1] * 10},
        "milliseconds": {"torch": 41.234, "deeppcr": 4.5678, "reordered": 42.0},
        "scores": [{"step": 1200, "torch": 0.0123, "deeppcr": 0.0124, "reordered": 0.02}], "solves": {"CONVERGED": 1200},
        "apart": {},
    }  # fmt: skip
    targets = [
        {"name": "amplifier: a step", "value": 0.11, "limit": 0.2, "met": True},
        {"name": "amplifier: losses apart", "value": None, "limit": 1.0, "met": False},
    ]
    record = {
        "date": "2026-01-02T03:04:05", "commit": "abc1234", "machine": {"hardware": "NVIDIA H200"},
        "versions": {"torch": "2.11"}, "cases": [case], "targets": targets,
    }  # fmt: skip
    text = report.markdown(record, "trainings-x.json")
    assert "| ms a step | loss, tenth 1 | 4 | 7 | 10 | error-to-signal ratio |" in text
    assert "| `torch.nn` | 41.23 | 1.23 | 4 | 7 | 0.5 | 0.0123 |" in text
    assert "| `deeppcr.nn.convert` | 4.568 | 1.23 | 2 | 5 | 8 | 0.0124 |" in text
    assert "1,200 of 1,200 steps; solves in parallel ended so: 1,200 CONVERGED." in text
    assert "1 of 2 goals, set before the run, were reached; the file lists them." in text
    page, file = tmp_path / "page.md", tmp_path / "trainings-x.json"
    page.write_text(f"before\n\n{report.BEGIN}\n\nold\n\n{report.END}\n\nafter\n")
    file.write_text(json.dumps(record))
    assert report.main([str(file), "--page", str(page)]) == 0
    assert page.read_text() == f"before\n\n{report.BEGIN}\n\n{text}\n\n{report.END}\n\nafter\n"


def test_the_page_tells_the_newest_measurements(report):
    pages = sys.modules["report_page"]
    page, files = (ROOT / "docs" / "recurrent.md").read_text(encoding="utf-8"), pages.stored("trainings")
    path, record = pages.newest(files) if files else (Path(), None)
    text = report.NOTHING_YET if record is None else report.markdown(record, path.name)
    assert f"{report.BEGIN}\n\n{text}\n\n{report.END}" in page
