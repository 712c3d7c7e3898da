"""Launches on tensors that lie where they lay before: made as one, and nothing else is another."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

import triton
import triton.language as tl

from deeppcr import driver, launch, runtime

SIZE = 16


@triton.jit
def _scale_and_add(into, given, factor, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(into + at, factor * tl.load(into + at) + tl.load(given + at))


class Recorded:
    """Stands for a graph of the driver where there is no GPU: it does nothing when it is made."""

    def __init__(self, launch, device):
        self.launch = launch

    def __call__(self, stream):
        self.launch(stream)


@pytest.fixture
def graphs(compiled, device, monkeypatch):
    """How many were made, and how often one was used: both can be asked for, and reset."""
    counts, record = {"made": 0, "used": 0}, driver.record if device.type == "cuda" else Recorded
    of = launch._Graphs.of

    def counted(*arguments):
        counts["made"] += 1
        return record(*arguments)

    def used(*arguments):
        found = of(*arguments)
        counts["used"] += found is not None
        return found

    monkeypatch.setattr(driver, "record", counted)
    monkeypatch.setattr(launch._Graphs, "of", used)
    monkeypatch.setattr(driver, "covers", lambda device: True)
    monkeypatch.setattr(launch, "_noted", {})
    if device.type == "cpu":
        monkeypatch.setitem(runtime.CAPTURING, "cuda", lambda: False)
    return counts


def call(into, given, launches=4):
    """``into`` becomes 2 into + given, so many times."""

    def make():
        for _ in range(launches):
            launch.launch(_scale_and_add, 1, (into, given, 2.0), (SIZE,), warps=1)

    launch.repeat(("test", launches), (into, given), make)


def assert_right(into, given, launches=4):
    """One call, on other numbers each time."""
    into.normal_()
    given.normal_()
    expected = into.clone()
    for _ in range(launches):
        expected = 2 * expected + given
    call(into, given, launches)
    assert torch.equal(into, expected)


@pytest.fixture
def two(device):
    return torch.empty(SIZE, device=device), torch.empty(SIZE, device=device)


def test_the_fourth_call_in_the_same_places_is_one_launch(two, graphs):
    """The first is noted, and two more are seen; what tensors hold is read when it is used."""
    for made, used in ((0, 0), (0, 0), (0, 0), (1, 1), (1, 2), (1, 3)):
        assert_right(*two)
        assert graphs == {"made": made, "used": used}


def test_tensors_in_turn_have_a_graph_each(two, graphs):
    other = torch.empty_like(two[0])
    for _ in range(6):
        assert_right(*two)
        assert_right(other, two[1])
    assert graphs["made"] == 2
    assert graphs["used"] >= 4


def test_tensors_that_lie_elsewhere_each_time_have_none(device, graphs):
    kept = [torch.empty(SIZE, device=device) for _ in range(12)]
    for into in kept[1:]:
        assert_right(into, kept[0])
    assert graphs == {"made": 0, "used": 0}


def test_fewer_launches_are_made_one_by_one(two, graphs):
    for _ in range(6):
        assert_right(*two, launches=2)
    assert graphs == {"made": 0, "used": 0}


@pytest.mark.parametrize("who", ["a profiler", "a graph of the caller"])
def test_who_wants_to_see_each_launch_does(who, two, graphs, monkeypatch):
    for _ in range(5):
        assert_right(*two)
    before = dict(graphs)
    if who == "a profiler":
        monkeypatch.setattr(launch, "is_watched", lambda: True)
    else:
        monkeypatch.setitem(runtime.CAPTURING, "cuda", lambda: True)
    assert_right(*two)
    assert graphs == before


def test_where_the_driver_refuses_launches_are_made_one_by_one(two, graphs, monkeypatch):
    asked = []
    monkeypatch.setattr(driver, "record", lambda *given: asked.append(given))
    for _ in range(8):
        assert_right(*two)
    assert len(asked) == 1
    assert graphs["used"] == 0


def test_graphs_that_are_not_used_are_not_made_for_ever(device, graphs, monkeypatch):
    """Tensors that come back three times, and never again."""
    monkeypatch.setattr(launch, "_MOST_GRAPHS", 2)
    given, kept = torch.empty(SIZE, device=device), [torch.empty(SIZE, device=device) for _ in range(8)]
    for into in kept:
        for _ in range(4):
            assert_right(into, given)
    assert graphs["made"] == 3
    (noted,) = launch._noted.values()
    assert len(noted._graphs._graphs) == 2
    assert_right(kept[2], given)  # which is kept
    assert graphs["used"] >= 4


def test_places_that_are_remembered_are_bounded(device, graphs, monkeypatch):
    monkeypatch.setattr(launch, "_MOST_PLACES", 3)
    given, kept = torch.empty(SIZE, device=device), [torch.empty(SIZE, device=device) for _ in range(9)]
    for into in kept:
        assert_right(into, given)
    (noted,) = launch._noted.values()
    assert len(noted._graphs._seen) <= 3


def test_without_a_driver_nothing_is_covered(device):
    assert driver.covers(0) == (device.type == "cuda")
    assert not driver.covers(-1)


@pytest.mark.gpu
def test_a_graph_runs_on_the_stream_it_is_given(two, graphs, device):
    if device.type != "cuda":
        pytest.skip("there are no streams")
    stream = torch.cuda.Stream()
    for _ in range(6):
        with torch.cuda.stream(stream):
            assert_right(*two)
    assert graphs["used"] == 3
    torch.cuda.synchronize()
