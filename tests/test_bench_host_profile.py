"""What the host does in a warm call, counted without a device: a path that grows is seen here, not months later on a GPU."""

from dataclasses import replace

import pytest

from deeppcr import launch, runtime
from scripts import script

bench = script("benchmarks", "host_profile")

#: In each phase: functions of Python, and functions of C that they call. What a change adds it has to be worth.
MOST = {"before": (72, 90), "beside": (75, 80), "after": (9, 8)}


@pytest.fixture
def loop(bench):
    return replace(next(each for each in bench.TABLE if each.name == "lstm"), L=600, D=4)


def test_a_warm_call_does_little(loop, bench):
    kept = launch._compiled, launch._noted, launch.current_stream, runtime.KERNEL_DEVICES
    found = bench.profile(loop)
    for phase, most in MOST.items():
        _, *calls = found.of(phase)
        assert all(0 < one <= other for one, other in zip(calls, most, strict=True)), (phase, calls)
    assert kept == (launch._compiled, launch._noted, launch.current_stream, runtime.KERNEL_DEVICES)


def test_it_is_told_by_function(loop, bench, capsys, monkeypatch):
    monkeypatch.setattr(bench, "TABLE", (loop, replace(loop, name="another")))
    bench.main(["-v", "lstm"])
    text = capsys.readouterr().out
    assert "another" not in text
    assert "  before" in text.partition("Passes.__init__")[0]
