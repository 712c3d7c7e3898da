"""Training residual networks: the same in every mode, in one go, gone on with, and replayed."""

from dataclasses import replace
from statistics import median

import pytest
import torch

import deeppcr
import tape
from deeppcr_paper import (
    replay,
    resnet,
    resnet_ablations,
    resnet_runner,
    resnet_training,
)
from deeppcr_paper.data import Images
from deeppcr_paper.experiment import Context, OutOfTime, name_of
from deeppcr_paper.lean_resnet import Pass
from deeppcr_paper.store import checkpoint_path
from deeppcr_paper.timing import relative_error

TRAINING = resnet.Settings(depths=(16,), width=8, epochs=2, rate=0.05, window=4, batch=4, seeds=1, data="digits")


@pytest.fixture
def images(device):
    generator = torch.Generator().manual_seed(0)
    pixels, labels = torch.randn(48, 12, generator=generator), torch.arange(48) % 10
    return Images(pixels, labels, pixels[:10], labels[:10]).to(device)


@pytest.mark.parametrize("solver", ["paper", "default"])
def test_both_modes_train_alike(solver, images, context):
    context.cache["images"] = images
    record = resnet_training.measure({"L": 16, "seed": 3}, replace(TRAINING, solver=solver), context)
    assert record["runs"]["parallel"]["method"] == ("printed" if solver == "paper" else "parallel")
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


@pytest.mark.parametrize("mode", ["parallel", "printed"])
@pytest.mark.parametrize("breaks", [(4,), (1, 2, 1)])
def test_a_checkpoint_is_gone_on_with(mode, breaks, images, context, tmp_path, monkeypatch):
    """However often it is interrupted, the same numbers come out: on a CPU to the last bit."""
    rounding = 1e-5 if context.device.type == "cuda" else 0
    modes, steps, left = ("sequential", mode), [], [0]

    def trained():
        runners = {each: resnet_runner.Runner(TRAINING, 16, 0, images, each, resnet.newton(TRAINING)) for each in modes}
        return resnet_runner.train(runners, images, TRAINING, 0, context)

    def check_time(self):
        left[0] -= 1
        if not left[0]:
            raise OutOfTime

    whole = trained()
    context.checkpoint = checkpoint_path(tmp_path / "a.partial.json", name_of({"L": 16, "seed": 0}))
    monkeypatch.setattr(Context, "check_time", check_time)
    take_step = resnet_runner.Runner.take_step
    monkeypatch.setattr(
        resnet_runner.Runner, "take_step", lambda self, *a: (steps.append((self.mode, a[2])), take_step(self, *a))
    )
    for windows in breaks:
        left[0] = windows
        with pytest.raises(OutOfTime):
            trained()
    again = trained()
    if context.device.type == "cpu":  # where every step is launched by Python
        assert [number for each, number in steps if each == mode] == list(range(24))  # none twice
    for each in modes:
        for curve in ("step", "loss", "loss_std", "accuracy", *(["iterations"] if each == mode else [])):
            found, expected = (run["runs"][each]["curves"][curve] for run in (again, whole))
            assert found == pytest.approx(expected, rel=rounding, abs=0), (each, curve)
        assert again["runs"][each]["test_accuracy"] == whole["runs"][each]["test_accuracy"]
    assert again["parameter_distance"] == pytest.approx(whole["parameter_distance"], rel=0, abs=rounding)
    assert again["loss_distance"] == pytest.approx(whole["loss_distance"], rel=0, abs=rounding)


@pytest.mark.parametrize("timed", [True, False])
def test_of_the_method_as_printed_two_steps_of_a_window_are_eager_where_there_are_graphs(timed, images, context):
    def run(graphed):
        runner = resnet_runner.Runner(TRAINING, 16, 0, images, "printed", timed=timed)
        assert (runner.graphed is not None) == (context.device.type == "cuda")
        if not graphed:
            runner.graphed = None
        elif runner.graphed is None:  # what the graphs would do, without them
            runner.graphed = Pass(runner.network, TRAINING.batch)
        calls = []
        for name in ("forward", "graphed") if graphed else ("forward",):
            inner = getattr(runner, name).forward
            getattr(runner, name).forward = lambda hidden, inner=inner, name=name: calls.append(name) or inner(hidden)
        found = resnet_runner.train({"printed": runner}, images, TRAINING, 0, context)["runs"]["printed"]["curves"]
        return found, calls[(2 if graphed else 1) * resnet_runner.WARM_UP :]

    (eager, _), (both, calls) = run(False), run(True)
    eager_ones = 2 if timed else 0
    assert calls == (["forward"] * eager_ones + ["graphed"] * (4 - eager_ones)) * 6
    for curve in ("step", "loss", "accuracy", "iterations", "not_converged"):
        assert both[curve] == pytest.approx(eager[curve], rel=1e-5), curve
    seconds = {name for name in both if name.endswith("seconds")}
    kinds = {"forward_seconds", "step_seconds", "graphed_forward_seconds", "graphed_step_seconds"}
    assert seconds == (kinds if timed else set())


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
        if replayed and images.train.is_cuda and not runner.replayable:
            pytest.skip("of so small a network there are no kernels, and nothing else can be recorded")
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


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
@pytest.mark.parametrize("solver", ["paper", "default"])
def test_a_training_that_diverges_says_so(solver, images, context):
    settings = replace(TRAINING, rate=1e30, solver=solver)
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
