"""The table of the README: strong baselines, and rows where the loop wins."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

import made_up
import made_up_diffusion
from claims_support import finished, trained
from deeppcr_paper import (
    latent_diffusion,
)
from deeppcr_paper.walkthrough import headline

ROOT = Path(__file__).resolve().parents[2]


# The README's table, and the command


def made_up_loops(*cases):
    """A file of benchmarks/loops.py; cases: loop, direction, method, result, seconds."""
    sizes = {"L": 2048, "B": 8, "D": 256, "dtype": "float32"}
    content = {
        "date": "2026-02-01", "commit": "def", "machine": {"hardware": "Some GPU"},
        "cases": [
            {"suite": "table", "parameters": sizes | {"loop": loop, "direction": direction}, "method": method, "passed": True,
             "result": result, "seconds": [seconds, seconds, 9 * seconds]}
            for loop, direction, method, result, seconds in cases
        ],
    }  # fmt: skip
    return "loops-nvidia-some-gpu.json", content


def made_up_benchmarks(loops, *, good=True):
    """Besides, one file each of benchmarks/recurrent.py and benchmarks/real_diffusion.py."""
    head = {"date": "2026-02-01", "commit": "def", "machine": {"hardware": "Some GPU"}}
    layers = [
        {"suite": "targets", "parameters": headline.LAYER, "method": method, "passed": True, "seconds": [seconds, seconds, 9 * seconds]}
        for method, seconds in (("torch.nn", 0.03), ("auto", 0.002), ("parallel", 0.001))
    ]  # fmt: skip
    name, precision = headline.SAMPLER
    sampled = [
        {"name": name, "precision": each, "loop": 2.0, "found": 0.5, "error": 3e-3, "good": good} for each in (precision, "float32")
    ]  # fmt: skip
    return {
        "loops": loops,
        "recurrent": ("recurrent-nvidia-some-gpu.json", head | {"cases": layers}),
        "real-diffusion": ("real-diffusion-nvidia-some-gpu.json", head | {"lines": sampled}),
    }


def test_the_table_shows_the_strong_baselines():
    small = {"steps": (1024,), "images": 1, "runs": 2}
    sampled = finished(
        made_up_diffusion.latent_result(replace(latent_diffusion.FULL, data=("mnist",), widths=(16,), **small))
    )
    timed = finished(made_up.mlp_timing_result())
    loops = made_up_loops(
        ("gru", "forward", "solve", "CONVERGED", 1e-3),
        ("gru", "forward", 'Loop(by="kernel")', "LOOP", 2e-3),
        ("gru", "forward", "pararnn-torch", None, 4e-3),
        ("gru", "forward", "bare loop in a CUDA graph", None, 5e-3),
        ("gru", "forward", "bare loop", None, 1.0),
        ("lorenz", "forward", "solve", "LOOP", 1e-3),
        ("lorenz", "forward", 'Loop(by="kernel")', "LOOP", 1e-3),
        ("lorenz", "forward", "bare loop in a CUDA graph", None, 5e-4),
    )
    lines = headline.lines([timed, trained(), sampled], made_up_benchmarks(loops))
    (layer,) = [line for line in lines if "`nn.GRU` with gradients, 32,768 × 1 × 16" in line]
    assert layer.endswith("| – | 30 ms cuDNN (15×) | – | **2 ms** |"), "by default"
    (real,) = [line for line in lines if "a UNet of 36 million" in line]
    assert real.endswith("| – | 2 s CUDA graph (4×) | – | **500 ms** |")
    wrong = headline.lines([timed, trained(), sampled], made_up_benchmarks(loops, good=False))
    assert wrong == [line for line in wrong if "UNet of" not in line]
    assert lines[0].count("|") == 6
    assert all(name in lines[0] for name in ("loop in Python", "fastest without", "one kernel", "in parallel"))
    (elementwise,) = [line for line in lines if "elementwise GRU, 2,048 × 8 × 256" in line]
    assert elementwise.endswith("| 1 s (1,000×) | 4 ms pararnn-torch (4×) | 2 ms | **1 ms** |"), "the medians"
    (chaotic,) = [line for line in lines if "chaotic" in line]
    assert chaotic.endswith("| – | **500 µs** CUDA graph (0.5×) | 1 ms | – |"), (
        "where the loop wins stands in the table"
    )
    (short,) = [line for line in lines if "MLP forward, 64 × 1 × 16" in line]
    assert "**" in short.split("|")[3] + short.split("|")[4]
    assert any("diffusion, latents of MNIST, 1,024 × 1 × 16" in line for line in lines)
    assert any("diffusion, latents of MNIST, 1,024 × 64 × 16" in line for line in lines)
    assert "`loops-nvidia-some-gpu.json`" in lines[-1]
    (slow,) = headline.lines([timed, trained(dtype="float64"), sampled], made_up_benchmarks(loops))
    assert (
        slow == "Not run yet: `deeppcr-paper reproduce resnet-training --device cuda --data-dir DIR`."
    )  # it shows no speed
    with pytest.raises(ValueError, match="lacks the marks"):
        headline.put("no marks here", [], {})


def test_the_table_that_is_committed_is_short_and_says_where_the_loop_wins():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|") and " × " in line][1:]
    assert 10 <= len(rows) <= headline.MOST
    assert any("ResNet, a training step in a CUDA graph, 1,024 × 8 × 16" in row for row in rows)
    assert sum("| **" in row.rsplit("|", 2)[0] for row in rows) >= 3
    assert all(row.count("**") == 2 for row in rows)
    assert len(page.splitlines()) <= 130
