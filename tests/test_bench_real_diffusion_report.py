"""What is said of the measurements of sampling with real networks; and that the page says it of the newest ones."""

from pathlib import Path

import pytest

from scripts import script

ROOT = Path(__file__).parents[1]


report = script("benchmarks", "real_diffusion_report")


def line(name, precision="tf32", **other):
    return {
        "name": name, "precision": precision, "first": 0.5, "itself": None, "loop": 0.25, "found": 0.1, "gain": 2.5, "error": 1.5e-3,
        "good": True, "rows": 3.42, "notes": ["window: 16 of 50 steps at a time"], **other,
    }  # fmt: skip


@pytest.fixture
def record():
    return {
        "date": "2026-02-03T04:05:06+00:00", "commit": "abc1234", "machine": {"hardware": "NVIDIA H200"}, "versions": {"torch": "2.11"},
        "network": {"steps": 642, "seconds": 95.1}, "reserved": 12.8,
        "lines": [
            line("DDPM 1000, one sample", "bfloat16", itself=0.0, error=2e-2, good=False),
            line("DDIM 50, 1 samples", commit="old4321", notes=[], error=0.0, first=1.5),
            {"name": "DDIM 20, 4 samples", "precision": "tf32", "failed": "out of memory"},
            line("Euler 50, 1 samples", notes=[], error=9.0, good=False),
        ],
    }  # fmt: skip


def test_tables_say_what_was_measured(report, record):
    text = report.markdown(record, "x.json")
    assert "NVIDIA H200, 2026-02-03, commit abc1234, torch 2.11; `results/x.json`" in text
    assert "| DDPM 1,000, bfloat16 | 250 | 100 | (2.50x) | 3.4 | 2.0e-2 (0) |" in text
    assert r"`sample` took the loop, 2.50x to 2.50x as fast as the loop beside it: 1 sample of DDIM 50 \*." in text
    assert "With a star: measured at old4321." in text
    assert "A gain in (brackets)" in text
    assert "takes 0.5000 to 1.500 s" in text
    assert "DDIM 20" not in text
    assert (
        "| Euler 50, 1 sample, TF32 | 250 | 100 | (2.50x) |" in text
    )  # a loop that is wrong is not hidden in a sentence


def test_a_run_of_one_commit_within_its_limits_has_no_footnotes(report, record):
    del record["lines"][1:]
    record["lines"][0]["good"] = True
    text = report.markdown(record, "x.json")
    assert "star" not in text
    assert "(brackets)" not in text


def test_the_page_is_that_of_the_newest_file(report, tmp_path):
    page = ROOT / "docs" / "diffusion.md"
    copy = tmp_path / page.name
    copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    files = sorted(map(str, (ROOT / "results").glob("real-diffusion-*.json")))
    assert files
    assert report.main([*files, "--page", str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
