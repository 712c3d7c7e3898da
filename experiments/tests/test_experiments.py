"""What the experiments measure: references that are right, wrong results that are not timed, memory that runs out."""

import math
import re
from dataclasses import replace
from statistics import median

import pytest
import torch

import deeppcr
import tape
from deeppcr.nn.base import ACTIVATIONS
from deeppcr_paper import (
    mlp,
    mlp_gain,
    mlp_memory,
    mlp_newton,
    mlp_timing,
    replay,
    resnet,
    resnet_ablations,
    resnet_runner,
    resnet_training,
)
from deeppcr_paper.data import Images
from deeppcr_paper.experiment import Context, OutOfTime, is_out_of_memory, name_of
from deeppcr_paper.figures.mlp_gain import caption
from deeppcr_paper.memory import peak_bytes
from deeppcr_paper.mlp import LAYERS, Network
from deeppcr_paper.mlp_gradients import Adjoints, backward_loop
from deeppcr_paper.mlp_summary import break_even, lines, summarise, threshold
from deeppcr_paper.store import checkpoint_path
from deeppcr_paper.table import table
from deeppcr_paper.timing import relative_error

TIMING = mlp_timing.Settings(depths=(32,), widths=(4,), budget=0.0, fewest=2, most=2)


@pytest.fixture
def context(device):
    return Context(device)


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
    nothing = threshold([wide(4, width) for width in (2, 4)], "forward", "printed")
    assert nothing == {"by_depth": {}, "w2L": None, "widths": None}


def test_tables_are_aligned():
    rows = [{"a": "x", "long heading": 1.5, "none": None}, {"a": "longer", "long heading": None, "none": None}]
    assert table(rows) == [
        "a       long heading  none",
        "x                1.5  –",
        "longer             –  –",
    ]
    assert table([]) == []


def test_peak_memory_of_a_known_call(device):
    x = torch.ones(2**16, device=device)
    assert peak_bytes(lambda: (x + 1) + (x + 2), device, x) == 3 * 4 * 2**16
    assert peak_bytes(lambda: x[1:], device, x) == 0


def test_chunks_take_less_memory(context):
    record = mlp_memory.measure({"L": 1024, "w": 16}, mlp_memory.QUICK, context)
    peaks = {name: entry["bytes"] for name, entry in record["peaks"].items()}
    assert peaks["printed"] > record["network_bytes"]  # at least one block for every layer
    assert peaks["chunk 16"] < peaks["printed"] / 2
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


TRAINING = resnet.Settings(depths=(16,), width=8, epochs=2, rate=0.05, window=4, batch=4, seeds=1, data="digits")


@pytest.fixture
def images(device):
    generator = torch.Generator().manual_seed(0)
    pixels, labels = torch.randn(48, 12, generator=generator), torch.arange(48) % 10
    return Images(pixels, labels, pixels[:10], labels[:10]).to(device)


def test_both_modes_train_alike(images, context):
    context.cache["images"] = images
    record = resnet_training.measure({"L": 16, "seed": 3}, TRAINING, context)
    one, other = (record["runs"][mode]["curves"] for mode in ("sequential", "parallel"))
    assert one["step"] == other["step"] == [4, 8, 12, 16, 20, 24]
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-3)
    assert record["runs"]["parallel"]["test_accuracy"] == record["runs"]["sequential"]["test_accuracy"]
    assert len(record["parameter_distance"]) == 6
    assert max(record["parameter_distance"]) < 1e-4
    assert max(other["iterations"]) <= 6
    assert sum(other["not_converged"]) == 0
    assert one["loss"][-1] < one["loss"][0]


@pytest.mark.parametrize("guess", ["batch-mean", "random", "zeros", "first-layer"])
def test_guesses_change_the_way_not_the_result(guess, images):
    newton = deeppcr.Newton(chunk=1)
    runner = resnet_runner.Runner(TRAINING, 16, 0, images, "parallel", newton, guess)
    reference = resnet_runner.Runner(TRAINING, 16, 0, images, "eager")
    starts = []
    for _ in range(3):
        x = images.train[:4]
        runner.prepare()
        starts.append(runner.network.guess.clone() if guess == "random" else runner.network.guess)
        assert relative_error([runner.forward(x)], [reference.forward(x)]) < 1e-4
    assert runner.network.warm_start == (guess == "batch-mean")
    if guess == "random":
        assert len({start.sum().item() for start in starts}) == 3  # new at every pass
        assert all(abs(start.std().item() - 1) < 0.3 for start in starts)
        runner.passes = 1  # as a checkpoint says
        runner.prepare()
        assert torch.equal(runner.network.guess, starts[1])
    else:
        assert starts[-1] == (deeppcr.Zeros() if guess == "zeros" else deeppcr.RepeatInitial())


def test_fixed_iterations_are_what_was_asked_for(images, context):
    context.cache["images"] = images
    for count in (1, 3):
        cell = {"L": 64, "guess": "zeros", "iterations": count, "seed": 0}
        curves = resnet_ablations.measure(cell, TRAINING, context)["runs"]["parallel"]["curves"]
        assert set(curves["iterations"]) == {count}


@pytest.mark.parametrize("guess", ["batch-mean", "random"])
def test_three_passes_before_anything_is_timed_leave_no_trace(guess, images):
    """The second solve of a kind is recorded: it must not be one of the two in a hundred steps that are timed."""
    runner = resnet_runner.Runner(TRAINING, 16, 0, images, "parallel", resnet.newton(TRAINING, 3), guess)
    forward, calls = runner.forward, []
    runner.forward = lambda x: calls.append(1) or forward(x)
    for passes in (0, 5):
        before = [each.clone() for each in (*runner.network.parameters(), runner.network.activations)]
        warm, runner.passes = runner.network._warm, passes
        runner.warm_up(TRAINING.batch)
        after = (*runner.network.parameters(), runner.network.activations)
        assert all(torch.equal(*each) for each in zip(before, after, strict=True))
        assert all(each.grad is None for each in runner.network.parameters())
        assert (runner.network._warm, runner.passes) == (warm, passes)
        assert len(calls) >= 3
        calls.clear()
        runner.take_step(images.train[:4], images.train_labels[:4], 0)
        calls.clear()


def test_one_slow_step_changes_no_time():
    """A mean would be ten times as long, of a run with the clock on few of its steps."""

    def run(slowest):
        return {
            "curves": {"forward_seconds": [1.0] * 9 + [slowest], "loss": [1.0], "accuracy": [1.0], "iterations": [3.0]},
            "test_accuracy": [],
            "diverged": None,
        }

    about = {"L": 16, "guess": "zeros", "seed": 0}
    records = [{**about, "iterations": count, "runs": {"parallel": run(1 + 90 * count)}} for count in (0, 1)]
    assert [entry["speedup_over_tested"] for entry in resnet_ablations.summarise(records)] == [1.0, 1.0]

    timed = [{"L": 16, "timing": each, "forward_seconds": [2.0, 2.0, 9.0]} for each in ("eager", "printed")]
    timed[1]["iterations"] = [3.0]
    runs = [
        {"L": 16, "seed": seed, "runs": {"sequential": run(91.0), "parallel": run(1.0)}, "parameter_distance": []}
        for seed in range(2)
    ]
    (entry,) = resnet_training.summarise([*timed, *runs])
    assert entry["eager_forward_seconds"] == entry["printed_forward_seconds"] == 2.0
    assert (entry["speedup_over_eager"], entry["speedup_over_fastest_loop"]) == (2.0, 1.0)


def test_a_training_that_diverges_ends_there(images, context):
    settings = replace(TRAINING, rate=1e30)
    runner = resnet_runner.Runner(settings, 16, 0, images, "sequential")
    found = resnet_runner.train({"sequential": runner}, images, settings, 0, context)["runs"]["sequential"]
    assert found["diverged"] is not None
    assert all(value == value for value in found["curves"].get("loss", []))
    entry = {"L": 16, "guess": "zeros", "iterations": 3, "seed": 0, "runs": {"parallel": {**found, "curves": {}}}}
    assert "diverged" in resnet_ablations.lines(resnet_ablations.summarise([entry]))[1]


def test_a_checkpoint_is_gone_on_with(images, context, tmp_path, monkeypatch):
    def runners():
        return {
            mode: resnet_runner.Runner(TRAINING, 16, 0, images, mode, resnet.newton(TRAINING))
            for mode in ("sequential", "parallel")
        }

    whole = resnet_runner.train(runners(), images, TRAINING, 0, context)
    context.checkpoint = checkpoint_path(tmp_path / "a.partial.json", name_of({"L": 16, "seed": 0}))
    checks = []

    def late(self):
        checks.append(1)
        if len(checks) == 4:
            raise OutOfTime

    with monkeypatch.context() as patched:
        patched.setattr(Context, "check_time", late)
        with pytest.raises(OutOfTime):
            resnet_runner.train(runners(), images, TRAINING, 0, context)
    steps = []
    take_step = resnet_runner.Runner.take_step
    monkeypatch.setattr(resnet_runner.Runner, "take_step", lambda self, *a: (steps.append(a[-1]), take_step(self, *a)))
    again = resnet_runner.train(runners(), images, TRAINING, 0, context)
    assert steps[0] == 16  # four windows of four were not done again
    for mode in ("sequential", "parallel"):
        for curve in ("step", "loss", "accuracy", *(["iterations"] if mode == "parallel" else [])):
            found, expected = (run["runs"][mode]["curves"][curve] for run in (again, whole))
            assert found == pytest.approx(expected, rel=1e-5)
    assert again["parameter_distance"] == pytest.approx(whole["parameter_distance"], abs=1e-6)


def test_a_checkpoint_that_is_spoilt_is_as_good_as_none(images, context, tmp_path):
    context.checkpoint = tmp_path / "a.checkpoint.partial"
    context.checkpoint.write_bytes(b"spoilt")
    runner = resnet_runner.Runner(TRAINING, 16, 0, images, "eager")
    found = resnet_runner.train({"eager": runner}, images, TRAINING, 0, context)
    assert found["runs"]["eager"]["curves"]["step"][-1] == 24


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_replayed_steps_train_as_steps_taken_one_by_one(mode, timed, images, context, monkeypatch):
    settings = replace(TRAINING, window=5)  # ends inside an epoch of 12 steps

    def run(replayed):
        runner = resnet_runner.Runner(settings, 16, 0, images, mode, resnet.newton(settings), timed=timed)
        runner.replayable = replayed
        return runner, resnet_runner.train({mode: runner}, images, settings, 0, context)["runs"][mode]

    one, by_one = run(False)
    taken = []
    take_step = resnet_runner.Runner.take_step
    monkeypatch.setattr(resnet_runner.Runner, "take_step", lambda *arguments: taken.append(1) or take_step(*arguments))
    other, replayed = run(True)
    assert bool(taken) is timed
    for curve in ("step", "loss", "accuracy"):
        assert replayed["curves"][curve] == pytest.approx(by_one["curves"][curve], rel=1e-5)
    assert replayed["test_accuracy"] == by_one["test_accuracy"]
    assert resnet_runner.distance(one, other) < 1e-5
    if timed:
        assert len(replayed["curves"]["replayed_seconds"]) >= 4
    else:
        assert not [name for name in replayed["curves"] if "seconds" in name]


def test_only_the_first_seeds_of_a_training_are_timed(images, context, monkeypatch):
    """The others can share a device."""
    settings = replace(resnet_training.QUICK, depths=(16,), seeds=2, epochs=1, window=5)
    context.cache["images"] = images
    seen = []

    class Noted(resnet_runner.Runner):
        def __init__(self, *arguments, timed, **more):
            seen.append(timed)
            super().__init__(*arguments, timed=timed, **more)

    monkeypatch.setattr(resnet_training, "Runner", Noted)
    cells = [{"L": 16, "seed": seed} for seed in (0, 1)]
    records = [{**cell, **resnet_training.measure(cell, settings, context)} for cell in cells]
    assert seen == [True, True, False, False]
    assert not [name for run in records[1]["runs"].values() for name in run["curves"] if "seconds" in name]
    entry = resnet_training.summarise(records)[0]
    first = records[0]["runs"]["parallel"]["curves"]["forward_seconds"]
    assert entry["parallel"]["forward_seconds"] == median(first)
    assert len(entry["parallel"]["loss"]) == 2


@pytest.mark.parametrize("solver", ["paper", "default"])
def test_a_fixed_number_of_iterations_is_fixed_with_either_solver(solver):
    settings = replace(TRAINING, solver=solver)
    assert resnet.newton(settings, 3).stop == deeppcr.FixedIterations(3)
    assert resnet.newton(settings).stop != deeppcr.FixedIterations(3)


def test_a_training_that_diverges_says_so(images, context):
    settings = replace(TRAINING, rate=1e30)
    context.cache["images"] = images
    record = {"L": 16, "seed": 0, **resnet_training.measure({"L": 16, "seed": 0}, settings, context)}
    (entry,) = resnet_training.summarise([record])
    assert entry["sequential"]["diverged"] == entry["parallel"]["diverged"] == 1
    assert "1 diverged" in "\n".join(resnet_training.lines([entry]))


def test_ablations_from_further_seeds_are_not_timed(images, context):
    settings = replace(resnet_ablations.ITERATIONS_QUICK, depths=(16,), seeds=2, epochs=1, window=5, batch=4)
    context.cache["images"] = images
    cells = [{"L": 16, "guess": "batch-mean", "iterations": count, "seed": seed} for count in (0, 2) for seed in (0, 1)]
    records = [{**cell, **resnet_ablations.measure(cell, settings, context)} for cell in cells]
    found = resnet_ablations.summarise(records)
    assert [entry["forward_seconds"] is None for entry in found] == [False, True, False, True]
    assert [entry["speedup_over_tested"] is None for entry in found] == [False, True, False, True]


@pytest.mark.parametrize(("guess", "count"), [("batch-mean", 1), ("random", 2), ("zeros", 5)])
def test_a_fixed_number_of_iterations_is_replayed_whole(guess, count, images, context, monkeypatch):
    """On a CPU by a tape, on which nothing can ask the host: every step, its guess and what it found as one by one."""
    dtype, tolerance = "float32", 1e-3  # in which there are kernels on a GPU
    if context.device.type == "cpu":
        dtype, tolerance = "float64", 1e-10
        monkeypatch.setattr(replay, "record", lambda step, device: tape.capture(step))
    images = images.to(images.train.device, resnet.DTYPES[dtype])
    settings = replace(TRAINING, window=5, dtype=dtype, epochs=1)

    def run(replayed):
        newton = resnet.newton(settings, count)
        runner = resnet_runner.Runner(settings, 16, 0, images, "parallel", newton, guess)
        runner.replayable = replayed
        return runner, resnet_runner.train({"parallel": runner}, images, settings, 0, context)["runs"]["parallel"]

    (one, by_one), (other, replayed) = run(False), run(True)
    for curve in ("step", "loss", "accuracy", "iterations", "not_converged"):
        assert replayed["curves"][curve] == pytest.approx(by_one["curves"][curve], rel=tolerance), curve
    assert set(replayed["curves"]["iterations"]) == {count} or count > 4  # after four, all steps of the solve are exact
    assert resnet_runner.distance(one, other) < tolerance
    assert other._replayed is not None
    assert other.passes == one.passes


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
def test_a_fixed_number_of_iterations_that_diverges_says_where(images, context, monkeypatch):
    settings = replace(TRAINING, rate=5.0, window=8)
    if context.device.type == "cpu":
        monkeypatch.setattr(replay, "record", lambda step, device: tape.capture(step))

    def run(replayed):
        # As the kernels of a GPU, this one does not overflow where the solution does not.
        newton = replace(resnet.newton(settings, 1), linear=deeppcr.linear.ForwardSubstitution())
        runner = resnet_runner.Runner(settings, 64, 0, images, "parallel", newton)
        runner.replayable = replayed
        return resnet_runner.train({"parallel": runner}, images, settings, 0, context)["runs"]["parallel"]

    by_one, replayed = run(False), run(True)
    assert by_one["diverged"] == replayed["diverged"]
    assert replayed["diverged"] > resnet_runner.TIMED
    assert replayed["curves"]["loss"] == pytest.approx(by_one["curves"]["loss"], rel=1e-4)


def test_a_replayed_training_that_diverges_says_where(images, context):
    settings = replace(TRAINING, rate=50.0, window=8)

    def run(replayed):
        runner = resnet_runner.Runner(settings, 16, 0, images, "sequential")
        runner.replayable = replayed
        return resnet_runner.train({"sequential": runner}, images, settings, 0, context)["runs"]["sequential"]

    by_one, replayed = run(False), run(True)
    assert by_one["diverged"] == replayed["diverged"]
    assert by_one["diverged"] is not None
    assert by_one["diverged"] % 8 >= resnet_runner.TIMED  # in a replayed step
    assert replayed["curves"].get("loss", []) == pytest.approx(by_one["curves"].get("loss", []), rel=1e-4)
