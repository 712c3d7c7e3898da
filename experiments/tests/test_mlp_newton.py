"""Deep networks: how many iterations they take, how much memory, and where errors grow."""

import math
from dataclasses import replace

import pytest
import torch

from deeppcr_paper import (
    mlp_gain,
    mlp_memory,
    mlp_newton,
)
from deeppcr_paper.figures.mlp_gain import caption
from deeppcr_paper.memory import peak_bytes
from deeppcr_paper.mlp import Network


def test_only_the_solves_count_where_iterations_are_counted(context, clock, monkeypatch):
    """Networks and loops are made for the first guess alone: it is not the one to pay for them."""
    exact = Network.exact_states
    monkeypatch.setattr(Network, "exact_states", lambda self: clock.sleep(2.0) or exact(self))
    settings = mlp_newton.Settings(samples=2, patience=1.0)
    cell = {"activation": "relu", "guess": "random", "w": 4}
    assert len(mlp_newton.measure({**cell, "L": 4}, settings, context)["iterations"]) == 2
    assert mlp_newton.measure({**cell, "L": 8}, replace(settings, samples=1), context)["status"] == "ok"


def test_guesses_share_what_they_are_compared_with(context, monkeypatch):
    loop, looped = Network.loop, []
    monkeypatch.setattr(Network, "loop", lambda self: looped.append(1) or loop(self))
    settings = mlp_newton.Settings(depths=(8, 16), widths=(2,), activations=("relu",), samples=2)
    cells = list(mlp_newton.cells(settings, context))
    records = [mlp_newton.measure(cell, settings, context) for cell in cells]
    assert [(cell["L"], cell["guess"]) for cell in cells][:2] == [(8, "repeat-initial"), (8, "random")]
    assert len(looped) == 8  # two networks of two depths, in float32 and in float64
    assert all(max(record["error"]) < 1e-3 for record in records)


def test_peak_memory_of_a_known_call(device):
    x = torch.ones(2**16, device=device)
    assert peak_bytes(lambda: (x + 1) + (x + 2), device, x) == 3 * 4 * 2**16
    assert peak_bytes(lambda: x[1:], device, x) == 0


def test_chunks_take_less_memory(context):
    record = mlp_memory.measure({"L": 1024, "w": 16}, mlp_memory.QUICK, context)
    peaks = {name: entry["bytes"] for name, entry in record["peaks"].items()}
    assert peaks["printed"] > record["network_bytes"]  # at least one block for every layer
    assert peaks["chunk 16"] < peaks["printed"] / 2
    if (
        context.device.type == "cpu"
    ):  # a GPU's allocator gives each of the loop's states half a KiB, eight times what it needs
        assert peaks["loop"] < peaks["chunk 16"]


@pytest.mark.parametrize(
    ("activation", "guess"),
    [
        ("relu", "repeat-initial"),
        ("sigmoid", "random"),
        pytest.param("relu", "random", marks=pytest.mark.thorough),
        pytest.param("sigmoid", "repeat-initial", marks=pytest.mark.thorough),
    ],
)
def test_iterations_do_not_grow_with_the_depth(activation, guess, context):
    settings = mlp_newton.Settings(samples=2)
    for depth in (16, 256, 2048):
        cell = {"activation": activation, "guess": guess, "L": depth, "w": 8}
        record = mlp_newton.measure(cell, settings, context)
        assert max(record["iterations"]) <= 6
        assert record["results"] == ["CONVERGED"] * 2
        assert max(record["error_float64"]) < 1e-2


def test_errors_that_are_not_finite_are_the_largest():
    """As they come back from a file: by their names."""
    record = {"activation": "relu", "guess": "random", "L": 8, "w": 4, "status": "ok"}
    record |= {"iterations": [3, 3, 15], "results": ["CONVERGED", "CONVERGED", "NON_FINITE"]}
    for name in ("nan", "inf", math.nan):
        (entry,) = mlp_newton.summarise([{**record, "error": [0.5, 2.0, name]}])
        assert entry["largest_error"] == math.inf
        assert "inf" in mlp_newton.lines([entry])[1]
    (entry,) = mlp_newton.summarise([{**record, "error": [0.5, 2.0]}])
    assert entry["largest_error"] == 2.0


def test_the_exponent_of_known_layers(device):
    """Linear layers in effect: tanh of nearly nothing, and ReLU of what is positive."""
    turn = torch.linalg.qr(torch.randn(12, 5, 5, dtype=torch.float64))[0].to(device)
    z0, biases = torch.full((1, 5), 1e-9, dtype=torch.float64, device=device), torch.zeros(12, 5, device=device)
    assert mlp_gain.exponent(Network(z0, 0.5 * turn, biases, "tanh")) == pytest.approx(math.log(0.5))
    assert mlp_gain.exponent(Network(z0, 1.5 * turn, biases, "tanh")) == pytest.approx(math.log(1.5))
    diagonal = torch.diag(torch.tensor([3.0, 1.0, 1.0, 1.0, 1.0])).expand(3000, 5, 5).to(device)
    long = torch.zeros(3000, 5, device=device)  # overflows after 646 layers
    assert mlp_gain.exponent(Network(z0, diagonal, long)) == pytest.approx(math.log(3), abs=0.01)
    assert mlp_gain.exponent(Network(-z0, diagonal, long)) is None  # every unit is dead


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
def test_iterations_grow_with_the_depth_where_errors_do(context):
    settings = mlp_gain.Settings(samples=1)
    found = {
        (gain, depth): mlp_gain.measure({"activation": "tanh", "gain": gain, "L": depth, "w": 16}, settings, context)
        for gain in (1.0, 4.0)
        for depth in (32, 128)
    }
    for depth in (32, 128):
        (calm,), (wild,) = (found[gain, depth]["exponents"] for gain in (1.0, 4.0))
        assert calm < 0 < wild
        assert found[1.0, depth]["paper"]["iterations"][0] <= 6
        assert found[1.0, depth]["paper"]["results"] == found[1.0, depth]["default"]["results"] == ["CONVERGED"]
    few, many = (found[4.0, depth]["paper"]["iterations"][0] for depth in (32, 128))
    assert few > 15
    assert many > 2 * few
    assert found[4.0, 128]["default"]["results"] == ["FINISHED_BY_LOOP"]
    records = [
        {"activation": "tanh", "gain": gain, "L": depth, "w": 16, **record} for (gain, depth), record in found.items()
    ]
    (entry,) = mlp_gain.summarise(records)
    assert entry["most_iterations_at_default"] <= 6
    assert entry["positive_from_gain"] == entry["worst"]["gain"] == 4.0
    assert entry["worst"]["mean_iterations_by_depth"] == {32: few, 128: many}
    assert entry["worst"]["most_iterations"] == many
    assert entry["overflow_from_gain"] is None


def gain_record(gain, depth, exponents, counts, result="CONVERGED"):
    runs = {"iterations": counts, "results": [result] * len(counts)}
    return {"activation": "relu", "gain": gain, "L": depth, "w": 16, "exponents": exponents} | {
        "paper": runs,
        "default": runs,
    }


def test_the_worst_gain_may_be_one_that_does_not_amplify():
    """As measured for ReLU: the most iterations just below zero, fewer above, and then the states overflow."""
    records = [
        gain_record(2.0, 64, [None, None], [9, 9]),
        gain_record(2.6, 16, [-0.1, -0.3], [10, 12]),
        gain_record(2.6, 64, [-0.01, None], [40, 50]),
        gain_record(2.8, 64, [0.06, 0.06], [20, 30]),
        gain_record(3.2, 64, [0.2, 0.2], [70, 60], "NON_FINITE"),
    ]
    (entry,) = mlp_gain.summarise(records)
    assert entry["exponent_by_gain"] == {2.6: -0.01, 2.8: 0.06, 3.2: pytest.approx(0.2)}
    assert entry["worst"] | {"gain": 2.6, "exponent": -0.01, "most_iterations": 50} == entry["worst"]
    assert entry["worst"]["mean_iterations_by_depth"] == {16: 11, 64: 45}
    assert (entry["positive_from_gain"], entry["overflow_from_gain"]) == (2.8, 3.2)
    text = caption(records)
    for part in (
        "at gain 2.6 (exponent −0.01)",
        "11 and 45 iterations at L = 16",
        "the largest 50",
        "from gain 3.2 on",
    ):
        assert part in text
