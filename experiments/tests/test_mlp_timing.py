"""Deep networks: references that are right, wrong results that are not timed, memory that runs out."""

import re
from dataclasses import replace

import pytest
import torch

from deeppcr.nn.base import ACTIVATIONS
from deeppcr_paper import (
    mlp,
    mlp_memory,
    mlp_newton,
    mlp_timing,
)
from deeppcr_paper.experiment import Context, is_out_of_memory
from deeppcr_paper.mlp import LAYERS, Network
from deeppcr_paper.mlp_gradients import Adjoints, backward_loop
from deeppcr_paper.mlp_summary import break_even, lines, summarise, threshold
from deeppcr_paper.table import table

TIMING = mlp_timing.Settings(depths=(32,), widths=(4,), budget=0.0, fewest=2, most=2)


@pytest.mark.parametrize("activation", LAYERS)
def test_layers_and_their_jacobians(activation, device):
    network = Network.make(3, 5, device, activation=activation).double()
    step, jacobian = LAYERS[activation]
    x = (network.weights[0], network.biases[0])
    exact = torch.func.jacrev(lambda z: step(z, x))(network.z0[0])
    assert torch.allclose(jacobian(network.z0[0], x).data, exact)
    assert torch.allclose(torch.stack(network.loop()), network.exact_states())


@pytest.mark.parametrize("activation", LAYERS)
@pytest.mark.parametrize("at_once", [7, 2])
def test_the_exact_gradients_are_those_of_autograd(activation, at_once, device, monkeypatch):
    monkeypatch.setattr(mlp, "_CONVERTED", at_once * 5**2)
    network = Network.make(7, 5, device, activation=activation)
    assert [len(range(7)[part]) for part in network.parts()] == ([7] if at_once == 7 else [2, 2, 2, 1])
    assert torch.allclose(network.exact_states(), torch.stack(network.double().loop()))
    adjoints = Adjoints(network, network.exact_states())
    double = network.double().trainable()
    for which in (0, 1):
        states = double.loop()
        loss = states[-1].sum() if which == 0 else torch.stack(states).sum()
        gradients = torch.autograd.grad(loss, double.tensors)
        assert adjoints.error(gradients, which) < 1e-14
        for index in range(3):
            wrong = [each.clone() for each in gradients]
            wrong[index] *= 1.1
            assert adjoints.error(wrong, which) == pytest.approx(0.1)
    assert adjoints.error([torch.full_like(each, torch.nan) for each in gradients], 1) == float("inf")


@pytest.mark.parametrize("activation", LAYERS)
@pytest.mark.parametrize("every", [False, True])
def test_the_backward_loop_by_hand_is_autograd(activation, every, device):
    network = Network.make(7, 5, device, activation=activation).double().trainable()
    states = network.loop()
    loss = torch.stack(states).sum() if every else states[-1].sum()
    expected = torch.autograd.grad(loss, network.tensors)
    with torch.no_grad():
        inputs = ACTIVATIONS[activation][0](torch.stack([network.z0, *states[:-1]]))
        found = backward_loop(network, inputs, every=every)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def test_a_backward_pass_is_captured_while_eager_ones_are_alive(context):
    """The streams of their leaves must not become part of the capture."""
    if context.device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    network = Network.make(64, 4, context.device)
    backward = mlp_timing.Backward(network, network.exact_states())
    eager = [backward(name) for name in ("loop", "auto")]
    for _ in range(3):
        graph = backward("graph")
        assert graph.entry(TIMING.backward_tolerance)["status"] == "ok"
    assert len(eager) == 2


@pytest.mark.parametrize("activation", LAYERS)
def test_every_column_is_timed_in_both_directions(activation, context):
    cell = {"activation": activation, "L": 32, "w": 4}
    record = mlp_timing.measure_cell(cell, TIMING, context)
    for way in mlp_timing.DIRECTIONS:
        assert tuple(record[way]) == mlp_timing.columns(context.device, 4)
        for column, entry in record[way].items():
            assert entry["status"] == "ok", (way, column, entry)
            assert len(entry["seconds"]) == 2
            assert entry["turn"] == TIMING.fewest
            assert entry["error"] < 1e-3
    assert record["forward"]["printed"]["chunk"] == 1
    assert record["forward"]["printed"]["iterations"] <= 6


def test_what_is_wrong_is_not_timed(context):
    cell = {"activation": "tanh", "L": 32, "w": 4}
    record = mlp_timing.measure_cell(cell, replace(TIMING, forward_tolerance=0.0), context)
    for entry in record["forward"].values():
        assert "differs from the loop in float64" in entry["status"]
        assert "seconds" not in entry
    assert all(entry["status"] == "ok" for entry in record["backward"].values())


def test_what_does_not_fit_is_recorded_as_that(context, monkeypatch):
    def too_much(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Network, "parallel", too_much)
    cell = {"activation": "relu", "L": 32, "w": 4}
    record = mlp_timing.measure_cell(cell, TIMING, context)
    for way in mlp_timing.DIRECTIONS:
        assert record[way]["printed"] == {"status": "out of memory"}
        assert record[way]["loop"]["status"] == "ok"  # the others are timed by themselves
        assert len(record[way]["loop"]["seconds"]) == 2
    summary = summarise([{**cell, **record}])
    assert summary["not_timed"]["forward printed: out of memory"] == 1
    assert any("out of memory" in line for line in lines(summary))
    assert (
        mlp_memory.measure({"L": 32, "w": 4}, mlp_memory.QUICK, context)["peaks"]["printed"]["status"]
        == "out of memory"
    )

    monkeypatch.setattr(Network, "make", too_much)
    record = mlp_timing.measure_cell(cell, TIMING, context)
    assert {entry["status"] for way in mlp_timing.DIRECTIONS for entry in record[way].values()} == {"out of memory"}
    newton = mlp_newton.measure({**cell, "guess": "random"}, mlp_newton.QUICK, context)
    assert newton["status"] == "out of memory"
    peaks = mlp_memory.measure({"L": 32, "w": 4}, mlp_memory.QUICK, context)["peaks"]
    assert {entry["status"] for entry in peaks.values()} == {"out of memory"}


def test_what_takes_too_long_is_not_repeated_and_not_tried_deeper(context):
    impatient = replace(TIMING, patience=0.0)
    record = mlp_timing.measure_cell({"activation": "relu", "L": 32, "w": 4}, impatient, context)
    deeper = mlp_timing.measure_cell({"activation": "relu", "L": 64, "w": 4}, impatient, context)
    for way in mlp_timing.DIRECTIONS:
        for column in ("printed", "auto"):
            assert len(record[way][column]["seconds"]) == 1
            assert record[way][column]["repeats"] == "none: the second call took too long, too"
            assert re.fullmatch(rf"not timed: the {way} pass took .* s at L = 32", deeper[way][column]["status"])
        for each in (record, deeper):
            assert len(each[way]["loop"]["seconds"]) == 2
            assert tuple(each[way]) == mlp_timing.columns(context.device, 4)
    other = mlp_timing.measure_cell({"activation": "relu", "L": 64, "w": 8}, impatient, context)
    assert other["forward"]["printed"]["status"] == "ok"
    summary = summarise([{"activation": "relu", "L": 64, "w": 4, **deeper}])
    assert any(reason.startswith("forward printed: not timed") for reason in summary["not_timed"])

    impatient = replace(mlp_newton.QUICK, patience=0.0)
    newton = {"activation": "relu", "guess": "random", "w": 4}
    assert len(mlp_newton.measure({**newton, "L": 8}, impatient, context)["iterations"]) == 1
    assert "at L = 8" in mlp_newton.measure({**newton, "L": 16}, impatient, context)["status"]
    impatient = replace(mlp_memory.QUICK, patience=0.0)
    peaks = [mlp_memory.measure({"L": depth, "w": 4}, impatient, context)["peaks"] for depth in (8, 16)]
    assert [each["printed"]["status"].partition(":")[0] for each in peaks] == ["ok", "not measured"]


def slow_at_first(call, seconds, clock):
    """What compiles, as it were, on its first call."""
    calls = []

    def called(*arguments, **more):
        calls.append(1)
        if len(calls) == 1:
            clock.sleep(seconds)
        return call(*arguments, **more)

    return called


def test_what_is_set_up_once_is_not_held_against_a_column(context):
    """The first call took longer than anyone would wait, the others do not."""

    def prepare(name):
        return mlp_timing.Column(lambda: None, took=60.0, error=0.0)

    record = mlp_timing.time_columns(prepare, ["auto"], 1e-3, TIMING, context.device)["auto"]
    assert "repeats" not in record
    assert len(record["seconds"]) == 2
    assert max(record["seconds"]) < 1


def test_what_is_set_up_once_is_not_held_against_deeper_networks(context, clock, monkeypatch):
    patience, parallel = 1.0, Network.parallel
    monkeypatch.setattr(Network, "parallel", slow_at_first(parallel, 3 * patience, clock))
    settings = mlp_memory.Settings(chunks=(), patience=patience)
    peaks = [mlp_memory.measure({"L": depth, "w": 4}, settings, context)["peaks"] for depth in (4, 8)]
    assert [each["printed"]["status"] for each in peaks] == ["ok", "ok"]

    monkeypatch.setattr(Network, "parallel", slow_at_first(parallel, 2 * patience, clock))
    settings = mlp_newton.Settings(samples=2, patience=patience)
    newton = {"activation": "relu", "guess": "random", "w": 4}
    for depth in (4, 8):
        assert len(mlp_newton.measure({**newton, "L": depth}, settings, context)["iterations"]) == 2


def test_a_cpu_is_not_filled_up(monkeypatch):
    monkeypatch.setattr(mlp, "free_memory", lambda device: 2**20)
    cell = {"activation": "relu", "L": 2**14, "w": 64}
    record = mlp_timing.measure_cell(cell, TIMING, Context(torch.device("cpu")))
    assert record["forward"]["loop"]["status"] == "out of memory"
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize(
    ("ratios", "depth"),
    [
        ({2: 0.5, 4: 2.0, 8: 4.0}, 2**1.5),
        ({2: 2.0, 4: 3.0}, 2.0),
        ({2: 0.5, 4: 0.9}, None),
        ({2: 2.0, 4: 0.5, 8: 2.0}, 2**2.5),  # what comes after the last dip counts
        ({}, None),
    ],
)
def test_break_even(ratios, depth):
    assert break_even(ratios) == (None if depth is None else pytest.approx(depth))


def test_the_threshold_in_w2L():
    def record(depth, width):
        return {"L": depth, "w": width, "forward": {"printed": {"seconds": [max(1.0, width**2 * depth / 2**10)]}}}

    found = threshold(
        [record(depth, width) for depth in (4, 16, 64) for width in (2, 4, 8, 16, 32)], "forward", "printed"
    )
    assert found["by_depth"] == pytest.approx(dict.fromkeys((4, 16, 64), 2**11)), "between two widths"
    assert found["w2L"] == pytest.approx(2**11)
    assert found["widths"] is None

    def wide(depth, width):
        return {"L": depth, "w": width, "forward": {"printed": {"seconds": [max(1.0, width / 4) * depth]}}}

    found = threshold([wide(depth, width) for depth in (4, 16, 64) for width in (2, 4, 16)], "forward", "printed")
    assert found["widths"] == pytest.approx(dict.fromkeys((4, 16, 64), 8.0)), "which vary less"
    nothing = {"by_depth": {}, "w2L": None, "widths": None}
    assert threshold([wide(4, width) for width in (2, 4)], "forward", "printed") == nothing

    def disturbed(*times):
        records = [{"L": 4, "w": 2**n, "forward": {"printed": {"seconds": [t]}}} for n, t in enumerate(times, 1)]
        return threshold(records, "forward", "printed")

    assert disturbed(1.0, 3.0, 1.0, 4.0)["by_depth"] == pytest.approx({4: 4 * (8 * 2**0.5) ** 2}), (
        "what falls again is not it"
    )
    assert disturbed(1.0, 3.0, 1.5) == nothing


def test_tables_are_aligned():
    rows = [{"a": "x", "long heading": 1.5, "none": None}, {"a": "longer", "long heading": None, "none": None}]
    assert table(rows) == [
        "a       long heading  none",
        "x                1.5  –",
        "longer             –  –",
    ]
    assert table([]) == []


@pytest.mark.parametrize("fails", [None, "graph"])
def test_columns_are_timed_equally_often_whatever_they_take(fails, context, clock):
    """Also where one fails, and the others are timed one by one: a quick one would be timed more often."""
    seconds = {"loop": 0.3, "graph": 0.02, "auto": 0.001}

    def prepare(name):
        if name == fails:
            raise RuntimeError("does not fit")
        return mlp_timing.Column(lambda: clock.sleep(seconds[name]), took=seconds[name], error=0.0)

    settings = replace(TIMING, budget=1.5, fewest=2, most=100)
    found = mlp_timing.time_columns(prepare, list(seconds), 1e-3, settings, context.device)
    counts = {name: len(entry["seconds"]) for name, entry in found.items() if name != fails}
    assert set(counts.values()) == ({6} if fails is None else {2})
    if fails:
        assert found[fails] == {"status": "failed: RuntimeError: does not fit"}
