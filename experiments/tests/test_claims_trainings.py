"""Claims about trainings hold or fail by the numbers of a result."""

from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

import made_up
from claims_support import by_what, finished, trained
from deeppcr_paper import resnet_ablations
from deeppcr_paper.claims import trainings
from deeppcr_paper.claims.answers import best_answers, verdict_of
from deeppcr_paper.claims.check import NO, OPEN, YES, Verdict, verdict
from deeppcr_paper.claims.items import ITEMS
from deeppcr_paper.claims.results import best
from deeppcr_paper.walkthrough import headline


def test_training_is_as_fast_and_as_good_as_its_numbers():
    result = trained(solver="paper")
    for read in (trainings.losses, trainings.accuracies, trainings.seeds, trainings.newton):
        assert verdict(read(result)) is Verdict.AGREES, read
    for record in result.records:
        if record.get("timing") == "printed":
            record["forward_seconds"] = [1.0] * 20
        if "runs" in record:
            run = record["runs"]["parallel"]
            run["test_accuracy"] = [0.8 + 0.1 * record["seed"]] * 8
            run["curves"]["loss"] = [2 * value for value in run["curves"]["loss"]]
            run["curves"]["forward_seconds"] = [0.1 * (1 + number) for number in range(20)]
            record["parameter_distance"][-1] = 3.0
            run["curves"]["iterations"] = [9.0] * 20
        if "iterations" in record:
            record["iterations"] = [7.0] * 20
    for read in (trainings.losses, trainings.accuracies, trainings.seeds, trainings.newton, trainings.times_of_passes):
        assert verdict(read(result)) is Verdict.DIFFERS, read


def test_a_training_with_the_defaults_decides_nothing():
    result = trained()
    for read in (trainings.losses, trainings.accuracies, trainings.seeds):
        checks = read(result)
        assert {check.holds for check in checks} == {OPEN}
        assert {check.why for check in checks} == {"Not yet trained as printed."}
        assert all(check.defaults and not check.printed for check in checks)
    eager = next(record for record in result.records if record.get("timing") == "eager" and record["L"] == 128)
    result.records.append({**eager, "timing": "printed", "iterations": [4.0]})
    passes = trainings.times_of_passes(result)
    assert (by_what(passes, "forward pass over").holds, by_what(passes, "forward pass over").printed[:2]) == (NO, "1×")
    assert by_what(passes, "last quarter").holds == OPEN


def test_a_claim_is_decided_once_by_the_first_part_that_tells():
    (item,) = [item for item in ITEMS if item.label == "Figure 5"]
    defaults, printed = trained(), trained(solver="paper")
    assert [bool(each) for each in best_answers(item, [defaults])] == [False, True]
    assert verdict_of(item, filter(None, best_answers(item, [defaults]))) is Verdict.OPEN
    first, second = best_answers(item, [defaults, printed])
    assert ([check.holds for check in first.checks], [check.holds for check in second.checks]) == ([YES], [""])
    assert second.checks[0].defaults
    assert verdict_of(item, [first, second]) is Verdict.AGREES


def test_a_training_that_was_cut_short_does_not_tell_the_accuracy():
    result = trained(steps=300, solver="paper")
    accuracy = by_what(trainings.accuracies(result), "final accuracy")
    assert (accuracy.holds, "ends after 300 steps" in accuracy.why) == (OPEN, True)
    assert "2 epochs" in trainings.cut_short(trained(epochs=2))
    slow = trained(dtype="float64", eager_steps=1)
    assert "float64" in by_what(trainings.times_of_passes(slow), "forward pass over").why


def test_a_pass_takes_as_long_at_the_end():
    """By medians of quarters: single points are the host's unrest."""
    result = trained(solver="paper")

    def steady(points):
        for record in result.records:
            if "runs" in record:
                record["runs"]["parallel"]["curves"]["forward_seconds"] = points
        return by_what(trainings.times_of_passes(result), "last quarter over second")

    assert steady([9.0] * 5 + [1.0, 1.0, 1.0, 1.0, 3.0] + [1.0] * 9 + [5.0]).holds == YES
    assert steady([1.0] * 15 + [3.0] * 5).holds == NO
    assert steady([1.0] * 15 + [1.3] * 5).holds == OPEN


def test_steps_in_a_graph_tell_of_time_without_the_host():
    result = trained()
    assert not [check for check in trainings.times_of_passes(result) if "inside a CUDA graph" in check.what]
    for record in result.records:
        for mode, run in record.get("runs", {}).items():
            if "forward_seconds" in run["curves"]:
                run["method"] = "fused"
                usual = 4e-4 if mode == "sequential" else 2e-4
                run["curves"]["replayed_seconds"] = [1e-3] * 5 + [usual] * 14 + [2.1e-4]
    in_graph = by_what(trainings.times_of_passes(result), "inside a CUDA graph, L = 128")
    assert (in_graph.defaults, in_graph.loop, in_graph.holds) == ("200 µs", "fused loop 400 µs: 2×", "")
    (row,) = headline._training(result)
    assert row.startswith("| ResNet, a training step in a CUDA graph, 128 × ")
    assert row.endswith("| 400 µs | **200 µs** |")
    for record in result.records:
        for run in record.get("runs", {}).values():
            run["method"] = "graph"
    assert not any("training step" in each for each in headline._training(result))


def test_a_training_as_printed_tells_its_iterations_and_its_time_in_graphs():
    result = trained(solver="paper")
    for record in result.records:
        if record.get("timing") == "eager":
            record["forward_seconds"] = [0.05] * 3
        for mode, run in record.get("runs", {}).items():
            if mode == "parallel":
                run["curves"] |= {"iterations": [4.0] * 10 + [5.0] * 10, "graphed_forward_seconds": [2e-3] * 19 + [9.0]}
    (graphed,) = [check for check in trainings.times_of_passes(result) if "in CUDA graphs, L = 128" in check.what]
    assert (graphed.printed, graphed.holds) == ("25× (2 ms)", "")
    counted = by_what(trainings.newton(result), "iterations in training")
    assert (counted.holds, "128: 4.5 (5.0)" in counted.printed) == (YES, True)
    for record in result.records:
        for run in record.get("runs", {}).values():
            if "iterations" in run["curves"]:
                run["curves"]["iterations"] = [4.0] * 19 + [7.0]
    assert by_what(trainings.newton(result), "iterations in training").holds == NO, "at one point of the curve"
    for record in result.records:
        for run in record.get("runs", {}).values():
            if "iterations" in run["curves"] and record["L"] == 128:
                run["curves"]["iterations"] = [4.0] * 20
    assert by_what(trainings.newton(result), "iterations in training").holds == NO, "at one depth"


def test_the_whole_training_decides_beside_its_first_steps():
    """Newton takes more iterations later on, and plain PyTorch is not what trains."""
    result = trained(solver="paper")
    eager = next(record for record in result.records if record.get("timing") == "eager" and record["L"] == 128)
    result.records.append({**eager, "timing": "printed", "iterations": [4.0]})

    def passes(first, whole):
        for record in result.records:
            if "timing" in record and record["L"] == 128:
                record["forward_seconds"] = [1.0 if record["timing"] == "eager" else 1 / first] * 3
            for run in record.get("runs", {}).values():
                run["curves"]["forward_seconds"] = [1 / whole] * 20
        return by_what(trainings.times_of_passes(result), "forward pass over")

    assert passes(20, 20).holds == YES
    assert passes(20, 6).holds == OPEN
    assert passes(20, 2).holds == passes(2, 20).holds == NO
    assert passes(20, 2).printed == "20× at first (50 ms, plain PyTorch); 2× in all (500 ms, our solver)"


def test_a_training_that_was_timed_is_preferred():
    timed, untimed = trained(), trained(timed_seeds=0)
    untimed.content["end"] = "2099-01-01T00:00:00+00:00"
    assert best([timed, untimed], "resnet-training") is timed
    assert best([untimed], "resnet-training") is untimed


@pytest.mark.parametrize("ends", [(0.96, 0.96), (0.96, 0.93), (0.9, 0.9)])
def test_other_accuracies_than_the_papers(ends):
    result = trained(solver="paper")
    for record in result.records:
        for run, end in zip(record.get("runs", {}).values(), ends, strict=False):
            run["test_accuracy"] = [end] * 8
    assert by_what(trainings.accuracies(result), "final accuracy").holds == NO


def test_one_iteration_says_nothing_of_newtons_method():
    result = trained()
    for record in result.records:
        if "runs" in record:
            curves = record["runs"]["parallel"]["curves"]
            curves["iterations"] = [1.0 if record["L"] == 64 else 4.0] * 20
            curves["not_converged"] = [0.0 if record["L"] == 64 else 0.03] * 20
    found = by_what(trainings.newton(result), "iterations in training").defaults
    assert found == "L = 64: 1 (two chunks); 128: 4.0 (4.0); the loop finished 3.0% of steps"


def test_losses_that_differ_by_a_tenth_are_not_equivalent():
    result = trained(solver="paper")
    for record in result.records:
        if "runs" in record:
            record["runs"]["parallel"]["curves"]["loss"] = [0.3 * 1.05] * 20
    assert verdict(trainings.losses(result)) is Verdict.DIFFERS


def test_one_seed_does_not_tell_of_several():
    (check,) = trainings.seeds(trained(seeds=1, solver="paper"))
    assert (check.holds, check.printed) == (OPEN, "one seed only")


def test_few_iterations_and_guesses():
    few = made_up.ablation_result("resnet-iterations", replace(resnet_ablations.ITERATIONS, depths=(64,)), points=20)
    guess = made_up.ablation_result("resnet-guess", replace(resnet_ablations.GUESS, depths=(64,)), points=20)
    enough = {"batch-mean": 3, "random": 8, "zeros": 8}
    for content in (few, guess):
        for record in content["records"]:
            good = not record["iterations"] or record["iterations"] >= enough[record["guess"]]
            run = record["runs"]["parallel"]
            run["curves"]["loss"] = [0.3 if good else 0.9] * len(run["curves"]["loss"])
    assert by_what(trainings.few_iterations(finished(few)), "final loss").holds == YES
    checks = trainings.guesses(finished(guess))
    assert [check.holds for check in checks] == [YES] * 3
    for content in (few, guess):
        for record in content["records"]:
            if record["iterations"] in (3, 5):
                record["runs"]["parallel"]["diverged"] = 77
    assert by_what(trainings.few_iterations(finished(few)), "final loss").holds == NO
    assert trainings.guesses(finished(guess))[0].holds == NO
    for record in guess["records"]:
        if not record["iterations"]:
            record["runs"]["parallel"]["curves"]["iterations"] = [4.0] * 20
    assert "from any start" in trainings.guesses(finished(guess))[1].why
    for record in guess["records"]:
        if not record["iterations"] and record["guess"] == "zeros":
            record["runs"]["parallel"]["curves"]["iterations"] = [6.0] * 20
    assert {check.why for check in trainings.guesses(finished(guess))} == {""}, "not from any start"
