"""Verdicts follow the numbers: networks and their training."""

from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

import made_up
from claims_support import TIMING, by_what, finished, trained
from deeppcr_paper import resnet_ablations
from deeppcr_paper.claims import findings, networks, trainings
from deeppcr_paper.claims.check import NO, OPEN, YES, Check, Verdict, causes, verdict
from deeppcr_paper.claims.results import best
from deeppcr_paper.claims.words import listed
from deeppcr_paper.figures import drawings
from deeppcr_paper.walkthrough import headline


def test_verdicts():
    def of(*held):
        return verdict([Check("", "", "", each) for each in held])

    assert of(YES, YES) is Verdict.AGREES
    assert of(YES, NO) is Verdict.PARTLY
    assert of(NO, OPEN) is Verdict.DIFFERS
    assert of(OPEN, "") is Verdict.OPEN
    assert causes([Check("a", "1", "2", NO, "because"), Check("b", "", "3", YES, "not said")]) == ["because"]
    assert listed(["a"]) == "a"


def timing(**scale):
    """A result in which the columns take so many times as long."""
    content = made_up.mlp_timing_result(TIMING)
    for record in content["records"]:
        for way in ("forward", "backward"):
            for column, entry in record[way].items():
                if "seconds" in entry:
                    entry["seconds"] = [scale.get(column, 1.0) * each for each in entry["seconds"]]
    return finished(content)


def test_timing_holds_or_not_by_the_times():
    read = networks.timing("relu")
    slow, fast = read(timing(printed=10)), read(timing(printed=0.1))
    for part, why in (
        ("forward pass over the eager loop", "as printed"),
        ("backward pass over the eager", "as printed"),
    ):
        assert by_what(slow, part).holds == NO
        assert why in by_what(slow, part).why
        assert by_what(fast, part).holds == YES
    assert by_what(slow, "forward pass, depth").holds == NO
    assert by_what(fast, "forward pass, depth").holds == YES
    assert (
        "28× with the defaults (L = 16,384, w = 2: 4.73 ms instead of 131 ms)"
        in by_what(slow, "forward pass over").ours
    )
    assert by_what(slow, "DeepPCR as printed, time").holds == YES, "logarithmic, however slow"
    linear = timing()
    for record in linear.records:
        record["forward"]["printed"]["seconds"] = record["forward"]["loop"].get("seconds", [1.0])
    assert by_what(read(linear), "DeepPCR as printed, time").holds == NO


def test_a_slow_pass_is_told_with_its_time_at_the_least_depth():
    """Which tells launches from arithmetic."""
    content = timing()
    for record in content.records:
        record["forward"]["printed"]["seconds"] = [1e-5 * record["L"] + 0.02]
    why = by_what(networks.timing("relu")(content), "forward pass over").why
    assert "takes 20.2 ms at L = 16 and 184 ms at L = 16,384; the paper's took 15 ms at its best" in why


def test_smooth_activations_have_their_own_break_even():
    checks = networks.timing("tanh")(timing(printed=0.1))
    assert by_what(checks, "forward pass, depth").paper == "closer to 64 than to 128"
    assert by_what(checks, "forward pass over").holds == ""
    assert "over the fused loop" in networks.strong_baselines("tanh")(timing()).heads


def test_break_even_where_it_is_always_ahead_or_never():
    records = timing(printed=1e-6).records
    assert str(networks.BreakEven.of(records, "forward", "printed", "loop")).startswith("ahead at every depth timed")
    records = timing(printed=1e6).records
    assert str(networks.BreakEven.of(records, "forward", "printed", "loop")) == "never ahead on this grid"
    assert str(networks.BreakEven.of(records, "forward", "unheard-of", "loop")) == "not timed"


def test_the_size_at_which_the_logarithmic_regime_ends():
    checks = networks.widths(finished(made_up.mlp_timing_result()))
    assert by_what(checks, "one value of w²L").holds == YES
    assert by_what(checks, "how far chunks").ours == "20× as large"
    assert "20× as far" in findings.size_limit(finished(made_up.mlp_timing_result()))
    few = networks.widths(finished(made_up.mlp_timing_result(replace(TIMING, depths=(16,)))))
    assert by_what(few, "one value of w²L").holds == OPEN
    wide = made_up.mlp_timing_result()
    for record in wide["records"]:
        if record["forward"]["auto"].get("seconds"):
            record["forward"]["auto"]["seconds"] = [1e-3 if record["w"] < 64 else 4e-3]
    assert by_what(networks.widths(finished(wide)), "how far chunks").ours.startswith(
        "with the defaults it follows no line"
    )
    assert "the width varies less: w ≈ 45 (L = 2) to 45 (L = " in findings.size_limit(finished(wide))


def test_gradients_that_were_too_far_off_are_told():
    content = made_up.mlp_timing_result(replace(TIMING, activations=("relu",)))
    assert not [check for check in networks.timing("relu")(finished(content)) if "float64" in check.what]
    for record in content["records"][:2]:
        record["backward"]["printed"] = {
            "status": "differs from the loop in float64 by 1.2e-01",
            "error": 0.12,
            "seconds": [],
        }
    for record in content["records"]:
        record["backward"]["printed"].setdefault("error", 1e-6)
    check = by_what(networks.timing("relu")(finished(content)), "float64")
    relu = [record for record in content["records"] if record["activation"] == "relu"]
    assert check.ours == f"too far off to be timed in 2 of {len(relu)} cells, by up to 12%"
    (caption,) = (each.caption for each in drawings(content) if each.name == "mlp-timing-relu-backward")
    assert "(2 gave a result that is off by up to 12%" in caption


def test_why_the_break_even_is_late():
    content = made_up.mlp_timing_result()
    for record in content["records"]:
        printed = record["forward"]["printed"]
        printed["seconds"] = [50 * each for each in printed.get("seconds", [])]
    late = by_what(networks.timing("relu")(finished(content)), "forward pass, depth from which on")
    assert late.why.startswith("At L = 64, w = "), late.why


def test_a_width_at_which_the_loop_always_wins():
    content = made_up.mlp_timing_result()
    slow = max(record["w"] for record in content["records"])
    for record in content["records"]:
        if record["w"] == slow:
            record["backward"]["auto"]["seconds"] = [1e3]
        if record["L"] == max(each["L"] for each in content["records"]) and record["w"] == slow:
            record["backward"]["auto"] = {"status": "out of memory"}
    said = findings.loop_wins(finished(content))
    assert f"at w = {slow} at every depth that was timed" in said.partition("backward")[2]


def test_memory():
    content = made_up.mlp_memory_result()
    for record in content["records"]:
        total = record["network_bytes"] + record["peaks"]["loop"]["bytes"]
        record["peaks"]["printed"] = {"status": "ok", "bytes": total / 0.6 - record["network_bytes"]}
    assert networks.memory(finished(content))[0] == Check(
        "as printed",
        "about 0.6",
        "0.60 (0.60 to 0.60), so 1.7× the memory",
        YES,
        networks.memory(finished(content))[0].why,
    )
    assert networks.memory(finished(made_up.mlp_memory_result()))[0].holds == NO


def test_newton_counts_iterations():
    content = made_up.mlp_newton_result()
    checks = networks.newton(finished(content))
    assert by_what(checks, "at most").holds == NO, "made up with 8 of them"
    assert by_what(checks, "did not converge").holds == NO
    for record in content["records"]:
        if record["status"] == "ok":
            record["iterations"] = [5 if record["activation"] == "relu" else 3] * 3
            record["results"] = ["CONVERGED"] * 3
            record["error"] = [1e-8] * 3
    checks = networks.newton(finished(content))
    assert verdict(checks) is Verdict.AGREES
    assert "ReLU yes, at most 5" in findings.iterations(finished(content))
    for record in content["records"]:
        if record["status"] == "ok" and record["L"] > 2000:
            record["iterations"] = [9] * 3
    assert by_what(networks.newton(finished(content)), "change with L").holds == NO
    assert "ReLU no, at most 9" in findings.iterations(finished(content))


def test_the_error_of_the_output_is_judged_by_activation():
    """The small ones of one do not hide those of the other."""
    content = made_up.mlp_newton_result()
    for record in content["records"]:
        if record["status"] == "ok":
            record["error"] = [1e-4 if record["activation"] == "sigmoid" else 1e-8] * 3
    checks = networks.newton(finished(content))
    assert by_what(checks, "error of the output, ReLU").holds == YES
    sigmoid = by_what(checks, "error of the output, sigmoid")
    assert (sigmoid.holds, sigmoid.ours[:2]) == (NO, "0%")
    assert "10⁻⁴" in sigmoid.why


def test_iterations_are_compared_over_the_same_widths():
    """Where the widest are missing at large depth, fewer iterations of theirs change nothing; nor do shallow networks."""
    content = made_up.mlp_newton_result()
    widest = max(record["w"] for record in content["records"])
    deepest = max(record["L"] for record in content["records"])
    for record in content["records"]:
        if record["status"] == "ok":
            record["iterations"] = [2 if record["w"] == widest else 5] * 3 if record["L"] >= 64 else [1] * 3
        if (record["w"], record["L"]) == (widest, deepest):
            record["status"] = "out of memory"
            record.pop("iterations", None)
    mine = [record for record in content["records"] if record["activation"] == "relu"]
    assert set(networks.mean_iterations_by_depth(mine).values()) == {5.0}
    assert min(networks.mean_iterations_by_depth(mine)) == 64


def test_two_machines():
    content = made_up.hardware_result()
    assert by_what(networks.machines(finished(content)), "gains more beyond").holds == YES
    for record in content["records"]:
        record["forward"]["printed"]["ratio"] = 1 + record["w"] / 1000
    assert by_what(networks.machines(finished(content)), "gains more beyond").holds == NO


def test_training_is_as_fast_and_as_good_as_its_numbers():
    result = trained()
    assert by_what(trainings.times_of_passes(result), "with the defaults over").holds == YES
    assert verdict(trainings.losses(result)) is Verdict.AGREES
    assert verdict(trainings.accuracies(result)) is Verdict.AGREES
    assert verdict(trainings.seeds(result)) is Verdict.AGREES
    assert verdict(trainings.newton(result)) is Verdict.AGREES
    assert findings.accuracy(result).startswith("Yes: at depth 128 the mean of 2 seeds is 9")
    for record in result.records:
        if "runs" in record:
            run = record["runs"]["parallel"]
            run["test_accuracy"] = [0.8 + 0.1 * record["seed"]] * 8
            run["curves"]["loss"] = [2 * value for value in run["curves"]["loss"]]
            run["curves"]["iterations"] = [7.0] * 20
            run["curves"]["forward_seconds"] = [0.1 * (1 + number) for number in range(20)]
            record["parameter_distance"][-1] = 3.0
    for read in (trainings.losses, trainings.accuracies, trainings.seeds, trainings.newton, trainings.times_of_passes):
        assert verdict(read(result)) is Verdict.DIFFERS, read
    assert findings.accuracy(result).startswith("No: ")


def test_a_training_that_was_cut_short_does_not_tell_the_accuracy():
    result = trained(steps=300)
    assert by_what(trainings.accuracies(result), "accuracy at the end, L = 128").holds == OPEN
    assert "ends after 300 steps" in by_what(trainings.accuracies(result), "accuracy at the end, L = 128").why
    assert findings.accuracy(result) is None
    assert "2 epochs" in trainings.cut_short(trained(epochs=2))
    slow = trained(dtype="float64", eager_steps=1)
    assert "float64" in by_what(trainings.times_of_passes(slow), "with the defaults over").why


def test_a_steady_time_is_no_agreement_where_there_is_no_speed_up():
    result = trained()
    assert by_what(trainings.times_of_passes(result), "most over least").holds == YES
    for record in result.records:
        for run in record.get("runs", {}).values():
            run["curves"]["forward_seconds"] = [10.0] * 20
    assert by_what(trainings.times_of_passes(result), "with the defaults over").holds == NO
    assert by_what(trainings.times_of_passes(result), "most over least").holds == ""
    assert verdict(trainings.times_of_passes(result)) is Verdict.DIFFERS


def test_steps_in_a_graph_tell_of_time_without_the_host():
    result = trained()
    assert not [check for check in trainings.times_of_passes(result) if "inside a CUDA graph" in check.what]
    for record in result.records:
        for mode, run in record.get("runs", {}).items():
            if "forward_seconds" in run["curves"]:
                run["method"] = "fused"
                run["curves"]["forward_seconds"][-1] *= 5  # the host's unrest
                usual = 4e-4 if mode == "sequential" else 2e-4
                run["curves"]["replayed_seconds"] = [1e-3] * 5 + [usual] * 14 + [2.1e-4]
    checks = trainings.times_of_passes(result)
    in_graph = by_what(checks, "inside a CUDA graph over the fused loop, L = 128")
    assert in_graph.ours == "2× (200 µs instead of 400 µs); times 60,000 steps: 12 s instead of 24 s"
    assert in_graph.holds == ""
    passes, steps = (each for each in checks if "most over least" in each.what)
    assert (passes.holds, "the host's" in passes.why) == (NO, True)
    assert (steps.ours, steps.holds) == ("1.05", "")  # without the first quarter, which sets up
    (row,) = headline._training(result)
    assert row.startswith("| ResNet, a training step in a CUDA graph, 128 × ")
    assert row.endswith("| 400 µs | **200 µs** |")
    for record in result.records:
        for run in record.get("runs", {}).values():
            run["method"] = "graph"
    assert not any("training step" in each for each in headline._training(result))
    result.content["settings"]["batch"] = 32
    assert "times 15,000 steps" in by_what(trainings.times_of_passes(result), "inside a CUDA graph over").ours
    result.content["settings"]["data"] = "digits"
    assert "steps" not in by_what(trainings.times_of_passes(result), "inside a CUDA graph over").ours


def test_a_training_that_was_timed_is_preferred():
    timed, untimed = trained(), trained(timed_seeds=0)
    untimed.content["end"] = "2099-01-01T00:00:00+00:00"
    assert best([timed, untimed], "resnet-training") is timed
    assert best([untimed], "resnet-training") is untimed


@pytest.mark.parametrize(
    ("ends", "answer", "why"),
    [
        ((0.96, 0.96), "More: at depth 128 the mean of 2 seeds is 96.0%", "At L = 128 ours is above the paper's."),
        ((0.96, 0.93), "No: ", ""),
        ((0.9, 0.9), "No: ", ""),
    ],
)
def test_other_accuracies_than_the_papers(ends, answer, why):
    result = trained()
    for record in result.records:
        for run, end in zip(record.get("runs", {}).values(), ends, strict=False):
            run["test_accuracy"] = [end] * 8
    assert findings.accuracy(result).startswith(answer)
    check = by_what(trainings.accuracies(result), "accuracy at the end, L = 128")
    assert (check.holds, check.why) == (NO, why)


def test_one_iteration_says_nothing_of_newtons_method():
    result = trained()
    for record in result.records:
        if "runs" in record:
            curves = record["runs"]["parallel"]["curves"]
            curves["iterations"] = [1.0 if record["L"] == 64 else 4.0] * 20
            curves["not_converged"] = [0.0 if record["L"] == 64 else 0.03] * 20
    shallow, deep = (by_what(trainings.newton(result), f"of 100 steps, L = {depth}") for depth in (64, 128))
    assert (shallow.holds, shallow.ours) == ("", "at most 1.0")
    assert "two chunks" in shallow.why
    assert (deep.holds, deep.ours, deep.why) == (YES, "at most 4.0; the loop finished 3.0% of the steps", "")


def test_losses_that_differ_by_a_tenth_are_not_equivalent():
    result = trained()
    for record in result.records:
        if "runs" in record:
            record["runs"]["parallel"]["curves"]["loss"] = [0.3 * 1.05] * 20
    assert verdict(trainings.losses(result)) is Verdict.DIFFERS


def test_one_seed_does_not_tell_of_several():
    assert by_what(trainings.seeds(trained(seeds=1)), "L = 128").holds == OPEN


def test_few_iterations_and_guesses():
    few = made_up.ablation_result("resnet-iterations", replace(resnet_ablations.ITERATIONS, depths=(64,)), points=20)
    guess = made_up.ablation_result("resnet-guess", replace(resnet_ablations.GUESS, depths=(64,)), points=20)
    enough = {"batch-mean": 3, "random": 8, "zeros": 8}
    for content in (few, guess):
        for record in content["records"]:
            good = not record["iterations"] or record["iterations"] >= enough[record["guess"]]
            run = record["runs"]["parallel"]
            run["curves"]["loss"] = [0.3 if good else 0.9] * len(run["curves"]["loss"])
    assert by_what(trainings.few_iterations(finished(few)), "loss at the end").holds == YES
    assert not [
        check for check in trainings.few_iterations(finished(few)) if "that count" in check.what
    ]  # all were taken
    for record in few["records"]:
        if record["iterations"] == 13:
            record["runs"]["parallel"]["curves"]["iterations"] = [6.0] * 20
    allowed = by_what(trainings.few_iterations(finished(few)), "of 13 that count, L = 64")
    assert allowed.ours == "6.0 on average; those after them change nothing but rounding"
    checks = trainings.guesses(finished(guess))
    assert [check.holds for check in checks] == [YES] * 3
    assert findings.guesses(finished(guess)).startswith("Yes: at depth 64")
    for content in (few, guess):
        for record in content["records"]:
            if record["iterations"] in (3, 5):
                record["runs"]["parallel"]["diverged"] = 77
    assert by_what(trainings.few_iterations(finished(few)), "loss at the end").holds == NO
    assert trainings.guesses(finished(guess))[0].holds == NO
    for record in guess["records"]:
        if not record["iterations"]:
            record["runs"]["parallel"]["curves"]["iterations"] = [4.0] * 20
    assert "from any start" in trainings.guesses(finished(guess))[0].why
    for record in guess["records"]:
        if not record["iterations"] and record["guess"] == "zeros":
            record["runs"]["parallel"]["curves"]["iterations"] = [6.0] * 20
    assert {check.why for check in trainings.guesses(finished(guess))} == {""}, "not from any start"
    assert findings.guesses(finished(guess)).startswith("Not quite")
