"""Figures of trainings show the numbers of the result files, and something sensible where these have holes."""

from dataclasses import replace
from statistics import fmean, median

import pytest

pytest.importorskip("matplotlib")

import made_up
from deeppcr_paper import (
    figures,
    resnet_training,
)
from deeppcr_paper.table import times
from drawing_support import COUNTS, GUESSES, TRAINING, by_name, line, panel, silent


def test_training_curves(results, drawings):
    records = [
        record for record in results["resnet-training"]["records"] if record.get("seed") == 0 and record["L"] == 128
    ]
    runs = {mode: run["curves"] for mode, run in records[0]["runs"].items()}
    both = drawings["resnet-training"]
    assert [drawing.name.removeprefix("resnet-training-") for drawing in both] == [
        "time",
        "loss",
        "accuracy",
        "seeds",
        "newton",
    ]
    time, loss, accuracy, seeds, newton = both
    x, y = line(panel(loss, "DeepPCR, defaults"), "L=128")
    assert y == runs["parallel"]["loss"]
    assert x[-1] == 3, "epochs"
    _, apart = line(panel(loss, "sequential − defaults"), "L=128")
    assert apart == [a - b for a, b in zip(runs["sequential"]["loss"], runs["parallel"]["loss"], strict=True)]
    _, ratio = line(panel(time, "defaults over CUDA graph"), "L=128")
    assert ratio[0] == runs["sequential"]["forward_seconds"][0] / runs["parallel"]["forward_seconds"][0]
    _, dashed = line(panel(time, "CUDA graph (eager: dashed)"), "eager L=128")
    assert dashed == pytest.approx([128 * 1.1e-4] * 2)
    tested = [100 * value for value in records[0]["runs"]["sequential"]["test_accuracy"]]
    assert line(panel(accuracy, "sequential"), "L=128") == ([1, 2, 3], tested)
    others = [
        record["runs"]["parallel"]["curves"]["loss"]
        for record in results["resnet-training"]["records"]
        if record["L"] == 128 and "seed" in record
    ]
    assert line(panel(seeds, "defaults, loss"), "L=128")[1] == pytest.approx(
        [sum(each) / 2 for each in zip(*others, strict=True)]
    )
    assert line(panel(newton, "iterations, defaults"), "L=128")[1] == runs["parallel"]["iterations"]
    assert line(panel(newton, "sequential − defaults"), "L=128")[1] == records[0]["parameter_distance"]


def test_fixed_iterations(results, drawings):
    (drawing,) = drawings["resnet-iterations"]
    ends = {}
    for record in results["resnet-iterations"]["records"]:
        if record["L"] == 64:
            curves = record["runs"]["parallel"]["curves"]
            ends[record["iterations"]] = (
                fmean(curves["loss"][-min(10, len(curves["loss"]) // 10) :]),
                median(curves["forward_seconds"]),
            )
    x, y = line(panel(drawing, "loss at the end"), "L=64")
    assert (x, y) == ([1, 3], [None, pytest.approx(ends[3][0])]), "one iteration diverged"
    assert line(panel(drawing, "loss at the end"), "diverged L=64")[0] == [1]
    assert line(panel(drawing, "against the paper's test"), "L=64")[1][1] == pytest.approx(ends[0][1] / ends[3][1])
    assert f"L = 64: 3 iterations are {ends[0][1] / ends[3][1]:.2g}× as fast" in drawing.caption
    assert "L = 64 with 1" in drawing.caption


def test_guesses(results, drawings):
    loss, iterations = drawings["resnet-guess"]
    record = next(r for r in results["resnet-guess"]["records"] if (r["guess"], r["iterations"]) == ("zeros", 0))
    assert line(panel(loss, "zeros"), "iterations=0")[1] == record["runs"]["parallel"]["curves"]["loss"]
    assert line(iterations.canvas.axes[0], "zeros")[1] == record["runs"]["parallel"]["curves"]["iterations"]


def test_training_with_holes():
    """One seed, no eager timing, a run that diverged, another that did at once, numbers that are not finite."""
    result = made_up.resnet_training_result(replace(TRAINING, depths=(32, 64, 128), seeds=1), points=12)
    result["records"] = [record for record in result["records"] if "timing" not in record]
    short = result["records"][1]["runs"]["parallel"]
    short["curves"] = {name: values[:5] for name, values in short["curves"].items()}
    short |= {"diverged": 555, "test_accuracy": []}
    short["curves"]["loss"][-1] = "nan"
    result["records"][2]["runs"]["sequential"] = {"curves": {}, "test_accuracy": [], "diverged": 3}
    found = silent(result)
    assert [figure.name.removeprefix("resnet-training-") for figure in found] == ["time", "loss", "accuracy", "newton"]
    assert "Diverged: L = 64, seed 0, defaults at step 555." in found[1].caption
    for record in result["records"]:
        for run in record["runs"].values():
            run |= {"curves": {}, "test_accuracy": [], "diverged": 3}
    assert silent(result) == []


def test_trainings_that_were_not_timed():
    """Of a later seed alone, or of none."""
    result = made_up.resnet_training_result(replace(TRAINING, depths=(32,), seeds=2), points=12)
    first, second = (record["runs"] for record in result["records"] if "runs" in record)
    for mode, run in first.items():
        second[mode]["curves"] |= {name: values for name, values in run["curves"].items() if "seconds" in name}
        made_up.untimed(run["curves"])
    drawings = figures.drawings(result)
    assert drawings[0].name == "resnet-training-time"
    ratio = line(panel(drawings[0], "defaults over CUDA graph"), "L=32")[1]
    seconds = {mode: run["curves"]["forward_seconds"] for mode, run in second.items()}
    assert ratio[0] == seconds["sequential"][0] / seconds["parallel"][0]
    for run in second.values():
        made_up.untimed(run["curves"])
    names = [each.name.removeprefix("resnet-training-") for each in figures.drawings(result)]
    assert names == ["loss", "accuracy", "seeds", "newton"]


def test_trainings_that_all_diverged():
    """Steps, as nobody knows how many make an epoch."""
    settings = replace(COUNTS, depths=(64,), iterations=(1,))
    (figure,) = figures.drawings(made_up.ablation_result("resnet-iterations", settings, points=12))
    assert panel(figure, "loss curves, L = 64").get_xlabel() == "training (steps)"
    assert silent(made_up.ablation_result("resnet-guess", replace(GUESSES, iterations=(1,)), points=12))


def test_trainings_of_which_none_diverged():
    assert silent(made_up.ablation_result("resnet-iterations", replace(COUNTS, iterations=(0, 3)), points=12))


def test_the_page_and_the_screen_give_the_same_numbers_of_a_training(results, drawings):
    summary = resnet_training.summarise(results["resnet-training"]["records"])
    screen = "\n".join(resnet_training.lines(summary))
    time, loss, *_ = (drawing.caption for drawing in drawings["resnet-training"])
    for entry in summary:
        for way in ("eager", "fastest_loop"):
            assert times(entry[f"speedup_over_{way}"]) in time
            assert times(entry[f"speedup_over_{way}"]) in screen
        for mode in ("sequential", "parallel"):
            assert f"{fmean(entry[mode]['loss']):.4f}" in loss
            assert f"{fmean(entry[mode]['loss']):.4f}" in screen
        assert f"differ by at most {figures.style.plain(max(entry['loss_difference']))}" in loss
        assert f"{max(entry['loss_difference']):.1e}" in screen


def test_a_training_of_an_earlier_version_is_still_drawn():
    result = made_up.resnet_training_result(TRAINING, points=5)
    for record in result["records"]:
        record.pop("loss_distance", None)
    assert resnet_training.lines(resnet_training.summarise(result["records"]))[1].endswith("–")
    assert "differ by" not in by_name(figures.drawings(result), "resnet-training-loss").caption


def test_equal_accuracies_are_one_number():
    result = made_up.resnet_training_result(replace(TRAINING, seeds=1), points=5)
    for record in result["records"]:
        for run in record.get("runs", {}).values():
            run["test_accuracy"] = [0.1, 0.119]
    caption = by_name(figures.drawings(result), "resnet-training-accuracy").caption
    expected = "sequential 11.9%, defaults 11.9%; the two are equal after every epoch."
    assert caption == f"At the end of the training: {expected}"
