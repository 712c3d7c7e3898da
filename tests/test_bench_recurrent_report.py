"""What is said of the measurements of recurrent layers, on a record that is made up; and that the page says it of the newest ones."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import script

matplotlib = pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[1]
BOTH = "forward and backward"


report = script("benchmarks", "recurrent_report")


def case(suite, method, ms, kind, T, B, H, direction=BOTH, result=None):
    parameters = {"kind": kind, "T": T, "B": B, "H": H, "direction": direction}
    return {
        "suite": suite, "parameters": parameters, "method": method, "passed": ms is not None, "result": result,
        "failure": "" if ms else "RuntimeError: cuDNN error. It may appear if", "seconds": [1.0, 1e-3 * ms, 0.0] if ms else [],
    }  # fmt: skip


@pytest.fixture
def record():
    size, diagonal = ("GRU", 32768, 1, 16), ("DiagonalGRU", 2048, 8, 256)
    cases = [
        case("targets", "torch.nn", 30, *size),
        case("targets", "auto", 3, *size, result="CONVERGED"),
        case("targets", "parallel", 2.5, *size),
        case("targets", "torch.nn, captured", 24, *size),
        case("targets", "parallel, captured", 1, *size),
        case("diagonal", "DiagonalGRU", 2, *diagonal),
        case("diagonal", "pararnn-torch", 5, *diagonal),
        case("too long", "torch.nn", None, "GRU", 65536, 1, 32),
        case("too long", "auto", 5, "GRU", 65536, 1, 32, result="CONVERGED"),
    ]
    grid = [
        ("GRU", 64, 8, 8, "forward", 1.0, 1.0, "LOOP"),
        ("GRU", 8192, 8, 8, BOTH, 8.0, 2.0, "CONVERGED"),
        ("LSTM", 8192, 1, 32, BOTH, 6.0, 1.0, "CONVERGED"),
        ("LSTM", 64, 1, 32, "forward", 1.0, 1.079, "LOOP"),  # within 1.05 and 30 us
        ("RNN", 64, 1, 512, "forward", 1.0, 1.081, "LOOP"),  # not
    ]
    for *size, torch, auto, result in grid:
        cases += [case("torch", "torch.nn", torch, *size), case("torch", "auto", auto, *size, result=result)]
    cases.append(case("torch", "torch.nn", None, "RNN", 64, 1, 8))
    name, other = f"GRU 32768 1 16 {BOTH}: parallel", f"DiagonalGRU 2048 8 256 {BOTH}: DiagonalGRU"
    return {
        "experiment": "recurrent", "date": "2026-02-03T04:05:06+00:00", "commit": "abc1234",
        "machine": {"hardware": "NVIDIA H200"}, "versions": {"deeppcr": "0.1.0", "torch": "2.11.0"}, "settings": {"left_out": 2}, "cases": cases,
        "targets": [
            {"name": f"{name} over torch.nn", "value": 2.5 / 30, "limit": 1 / 12, "met": True},
            {"name": f"{name}, captured over torch.nn, captured", "value": None, "limit": 1 / 8, "met": False},
            {"name": f"{other} over pararnn-torch", "value": 2 / 5, "limit": 1 / 3.3, "met": False},
        ],
    }  # fmt: skip


def test_tables_say_what_was_measured(report, record):
    text = report.markdown(record, "recurrent-x.json")
    assert "NVIDIA H200, 2026-02-03, commit abc1234, torch 2.11.0; `results/recurrent-x.json`" in text
    assert "| GRU | 32,768, 1, 16 | 30.00 | 2.500 | 12.0x | 24.00 | 1.000 | 24.0x |" in text
    assert f"| 2,048, 8, 256 | {BOTH} | 2.000 | 5.000 | 2.5x |" in text
    assert "1 of 3 goals, set before the run, were reached; the file lists them." in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert 'Of 5 layers by `mode="auto"`, 4 take at most 1.05 times as long as `torch.nn`, or 30 µs more.' in text
    assert "2 run in parallel, 4.0 to 6.0 times as fast (median 5.0)." in text
    assert "Slower: RNN T 64 B 1 H 512 forward (1.081 ms against 1.000)." in text
    assert "2 more sizes were not timed" in text
    assert "figures/recurrent-map.svg" in text
    assert "With T = 65,536, B = 1, H = 32 a GRU of `torch.nn` raises (`RuntimeError: cuDNN error`)" in text


def test_what_was_not_measured_is_not_said(report, record):
    record["cases"] = [
        each
        for each in record["cases"]
        if each["suite"] in ("targets", "diagonal") and each["method"] != "parallel, captured"
    ]
    text = report.markdown(record, "x")
    assert "| 12.0x | 24.00 |  |  |" in text
    assert "layers" not in text
    assert "raises" not in text


def test_the_map_has_a_panel_for_each_kind_and_a_mark_for_each_layer(report, record):
    root = ElementTree.fromstring(report.picture(record))
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    for expected in ("GRU", "LSTM", "RNN", "8, 8", "32, 1", "512, 1", "2¹³", "4.0", "6.0", "0.93", "1.0"):
        assert expected in texts
    # Every place of the grid but the five layers is hatched, as the legend says.
    assert "not measured" in texts
    hatched = [
        each
        for each in root.iter("{http://www.w3.org/2000/svg}path")
        if "fill:url(#" in each.get("style", "").replace(" ", "")
    ]
    assert len(hatched) == 3 * len({64, 8192}) * len({(8, 8), (32, 1), (512, 1)}) - 5 + 1  # and one in the legend
    assert "2 of 5 layers are run in parallel" in root.attrib["aria-label"]
    assert float(root.attrib["viewBox"].split()[2]) < 420  # points: on a phone its letters are large enough to read
    assert "background:#ffffff" in root.attrib["style"]  # it brings its own paper, for dark pages too
    assert report.picture(record) == report.picture(record)


def test_a_page_is_written(report, record, tmp_path, capsys):
    old, new = tmp_path / "recurrent-a.json", tmp_path / "recurrent-b.json"
    old.write_text(json.dumps({**record, "date": "2025-01-01T00:00:00+00:00", "commit": "old"}))
    new.write_text(json.dumps(record))
    (tmp_path / "recurrent-quick-a.json").write_text("{}")
    assert sys.modules["report_page"].stored("recurrent", tmp_path) == [old, new]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    assert report.main([str(old), str(new), "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "abc1234" in text
    assert "\nold\n" not in text
    assert (tmp_path / "figures" / "recurrent-map.svg").read_text() == report.picture(record)
    assert report.main([str(new)]) == 0
    assert "abc1234" in capsys.readouterr().out


def test_the_page_has_the_tables_of_the_newest_results(report):
    pages = sys.modules["report_page"]
    page, files = (ROOT / "docs" / "recurrent.md").read_text(encoding="utf-8"), pages.stored("recurrent")
    text = report.NOTHING_YET
    if files:
        path, record = pages.newest(files)
        text = report.markdown(record, path.name)
        drawn = (ROOT / "docs" / "figures" / "recurrent-map.svg").read_text(encoding="utf-8")
        if f"drawn by matplotlib {matplotlib.__version__} " in drawn:  # another one may put things elsewhere by a hair
            assert drawn == report.picture(record), "make paper"
    assert page == pages.put(page, text, report.BEGIN, report.END), "make paper"
