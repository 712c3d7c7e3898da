"""The benchmark of what "auto" chooses: how it reads its own numbers."""

import json

import pytest
import torch

from scripts import script

bench = script("benchmarks", "auto_choice")


def cell(auto, wrong=None, **seconds):
    seconds = {name.replace("_", " "): value for name, value in seconds.items()} | {"auto": auto}
    return {"L": 1024, "w": 16, "seconds": seconds, "chosen": "chunk 8", "wrong": wrong or {}}


def test_what_counts(bench):
    good = cell(0.3e-3, sequential=1e-3, chunk_8=0.29e-3)
    short = cell(0.19e-3, sequential=0.05e-3)
    slow = cell(0.4e-3, sequential=1e-3, chunk_8=0.4e-3, chunk_16=0.3e-3)
    wrong = cell(0.3e-3, {"auto": 0.1}, sequential=0.3e-3)
    assert bench.judge(good) == {
        "best": "chunk 8",
        "ratio": pytest.approx(0.3 / 0.29),
        "counts": True,
        "too slow": False,
    }
    assert not bench.judge(short)["counts"]
    assert bench.judge(slow)["best"] == "chunk 16"
    assert bench.judge(slow)["too slow"]
    assert not bench.failed([good, short])
    assert bench.failed([good, slow])
    assert bench.failed([wrong])
    text = "\n".join(bench.summary([good, short, slow]))
    assert "3 cells, 2 over 0.2 ms, 1 of them over 1.25x" in text
    assert text.count("TOO SLOW") == 2  # as the worst, and in the list
    assert "none over" in bench.summary([short])[0]
    assert "WRONG" in bench.line(wrong)


def test_choices(bench):
    networks = bench.Networks(3, 16, torch.device("cpu"))
    assert list(networks.choices(2)) == ["sequential"]
    assert list(networks.choices(16)) == ["sequential", "chunk 2", "chunk 4", "chunk 8"]
    found = [run() for run in networks.choices(16).values()]
    assert all(torch.allclose(states, found[0], atol=1e-4) for states in found)


def test_a_dry_run(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bench, "COUNTS", 1e9)
    assert bench.main(["--quick", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc"]) == 0
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert [(each["w"], each["L"]) for each in record["cells"]] == [(3, 8), (3, 40)]
    assert {"sequential", "chunk 2", "auto"} <= set(record["cells"][0]["seconds"])
    assert record["cells"][0]["chosen"] == "sequential"
    assert "2 cells" in capsys.readouterr().out
    assert bench.main(["--device", "cpu"]) == 2
