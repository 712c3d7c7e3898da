"""Verdicts follow the numbers: networks and their training."""

import json
import math
import re
from dataclasses import replace
from statistics import median

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

import made_up
from claims_support import TIMING, by_what, finished
from deeppcr_paper.claims import networks, results
from deeppcr_paper.claims.check import NO, OPEN, YES, Check, Verdict, causes, verdict
from deeppcr_paper.claims.rules import RULES, judge, judge_all
from deeppcr_paper.claims.words import listed
from deeppcr_paper.figures import drawings


def test_verdicts():
    def of(*held):
        return verdict([Check(what="", holds=each, rule="bounded") for each in held])

    assert of(YES, YES) is Verdict.AGREES
    assert of(YES, NO) is Verdict.PARTLY
    assert of(YES, "") is Verdict.AGREES
    assert of(YES, OPEN) is Verdict.SO_FAR
    assert of(YES, NO, OPEN) is Verdict.PARTLY
    assert of(NO, OPEN) is Verdict.DIFFERS
    assert of(OPEN, "") is Verdict.OPEN
    both = [
        Check(what="a", holds=NO, rule="bounded", why="because"),
        Check(what="b", holds=YES, rule="bounded", why="not said"),
    ]
    assert causes(both) == ["because"]
    with pytest.raises(ValueError, match="by no rule of the table"):
        Check(what="a", holds=YES)
    assert listed(["a"]) == "a"


def test_every_rule_can_hold_and_fail():
    """The least number for which it does, the first for which it does not, and the paper's."""
    sides = {
        "speed-up": (1.25, 0.6, 1), "break-even": (1.0, 2.0, 1), "linear": (1.0, 4.0), "logarithmic": (0.7, 1.4), "isoline": (16, 17),
        "steady": (1.1, 2.1), "gains more": (1.8, 0.5), "newer gains": (0.7, 1.4), "negligible": (0.1, 0.11), "memory": (0.7, 0.71),
        "at most 6": (6, 7), "6 at every point": (6.0, 6.1), "converged": (0, 1), "flat": (1.0, 1.1), "ReLU more": (1.1, 1.0),
        "machine precision": (0.9, 0.89), "comparable": (1.0, 1.1), "same loss": (0.02, 0.021), "accuracy": (1.0, 1.1),
        "same accuracy": (1.0, 1.1), "seeds": (2.0, 2.1), "bounded": (0.9, 1.0), "trains as well": (True, False), "suffice": (3, 5, 3),
        "needed": (8, 5, 5), "iterations": (1.3, 1.31, 1), "error": (1.0, 1.1, 1), "same distance": (1.0, 1.1), "not visible": (0.01, 0.011),
        "below 0.1": (14, 15, 15), "stalls": (0.01, 0.009), "fewer": (0.9, 1.1),
    }  # fmt: skip
    assert sides.keys() == RULES.keys()
    for name, (good, bad, *paper) in sides.items():
        assert judge(name, good, *paper) == YES, name
        assert judge(name, bad, *paper) == NO, name


def test_what_noise_could_have_made_is_open():
    for name, limit, paper in (("speed-up", 0.9 * 7, (7,)), ("logarithmic", 1, ()), ("steady", 1.5, ())):
        assert {judge(name, factor * limit, *paper) for factor in (0.8, 1.0, 1.25)} == {OPEN}, name
        assert {judge(name, factor * limit, *paper) for factor in (0.7, 1.4)} == {YES, NO}, name
    assert judge("at most 6", 6.5) == NO  # counts have no noise
    assert judge("break-even", lambda factor: 70 / factor, 64) == OPEN
    assert judge("break-even", lambda factor: 40 / factor, 64) == YES
    assert judge_all("speed-up", [(20, 11), (10, 11)]) == (OPEN, 2)
    assert judge_all("speed-up", [(20, 11), (4, 11)]) == (NO, 1)


def timing(**scale):
    """A result in which the columns take so many times as long."""
    content = made_up.mlp_timing_result(TIMING)
    for record in content["records"]:
        for way in ("forward", "backward"):
            for column, entry in record[way].items():
                if "seconds" in entry:
                    entry["seconds"] = [scale.get(column, 1.0) * each for each in entry["seconds"]]
    return finished(content)


def test_timing_holds_or_not_by_the_times_as_printed():
    read = networks.timing("relu")
    slow, fast = read(timing(printed=10)), read(timing(printed=0.1))
    for part in ("forward pass over the eager loop", "backward pass over the eager", "forward pass, break-even"):
        assert by_what(slow, part).holds == NO, part
        assert by_what(fast, part).holds == YES, part
    assert by_what(slow, "forward pass over").defaults == "28× (L = 16,384, w = 2: 4.97 ms)"
    assert by_what(slow, "DeepPCR, time").holds == YES, "logarithmic, however slow"
    linear = timing()
    for record in linear.records:
        record["forward"]["printed"]["seconds"] = record["forward"]["loop"].get("seconds", [1.0])
    assert by_what(read(linear), "DeepPCR, time").holds == NO


def test_the_defaults_decide_nothing():
    read = networks.timing("relu")
    held = [[check.holds for check in read(timing(auto=scale, printed=0.1))] for scale in (1e-3, 1.0, 1e3)]
    assert held[0] == held[1] == held[2]
    shown = {by_what(read(timing(auto=scale)), "forward pass over").defaults for scale in (1e-3, 1.0)}
    assert len(shown) == 2


def test_medians_are_compared_however_often_a_column_was_timed():
    result = timing()
    before = by_what(networks.timing("relu")(result), "forward pass over")
    for record in result.records:
        for entry in record["forward"].values():
            if entry.get("seconds"):
                entry["seconds"] = [median(entry["seconds"])] * 3 + [0.0, 99.0]
    assert by_what(networks.timing("relu")(result), "forward pass over") == before


def test_calls_just_after_another_column_do_not_count(tmp_path):
    """Results say how long turns were; of those from before they did, the settings do. A column that was called once was not timed in turns."""
    result = timing()
    read = networks.timing("relu")
    before = {check.what: check for check in read(result)}
    for turn in ({"turn": 3}, {}):
        content = timing().content
        for record in content["records"]:
            for entry in (*record["forward"].values(), *record["backward"].values()):
                if entry.get("seconds"):
                    middle = median(entry["seconds"])
                    entry |= {"seconds": [1e3, middle, middle] * 2, **turn}
        content["records"][0]["forward"]["printed"] |= {"seconds": [7.0], "repeats": "none"}
        if turn:
            found = finished(content)
        else:
            content["settings"]["fewest"] = 3
            (tmp_path / "mlp-timing-made.json").write_text(json.dumps(content), encoding="utf-8")
            (found,) = results.finished(tmp_path)
        assert {check.what: check for check in read(found)} == before
        assert networks.seconds(found.records[0], "forward", "printed") == 7.0


def test_smooth_activations_have_their_own_break_even():
    checks = networks.timing("tanh")(timing(printed=0.1))
    assert by_what(checks, "forward pass, break-even").paper == "nearer to 64 than to 128"
    assert not [check for check in checks if "at best" in check.what], "the paper names none"


def test_stronger_loops_stand_beside():
    checks = networks.timing("relu")(timing())
    assert re.fullmatch(r"printed [\d.]+×; defaults [\d.]+×", by_what(checks, "forward pass over").loop)
    assert "of" in by_what(checks, "the fastest loop wins").loop
    eager = timing()
    for record in eager.records:
        for way in ("forward", "backward"):
            record[way] = {name: record[way][name] for name in ("loop", "printed", "auto")}
    assert {check.loop for check in networks.timing("relu")(eager)} == {""}


def test_the_method_in_a_graph_stands_beside_the_eager_one():
    result = timing()
    for record in result.records:
        record["forward"]["printed graph"] = {"status": "ok", "seconds": [1e-6 * record["L"]]}
    checks, eager = networks.timing("relu")(result), networks.timing("relu")(timing())
    found = by_what(checks, "forward pass over")
    assert "; in a CUDA graph " in found.printed
    assert found.holds == by_what(eager, "forward pass over").holds
    grown = by_what(checks, "DeepPCR, time")
    assert grown.printed == by_what(eager, "DeepPCR, time").printed + "; in a CUDA graph 256×"
    assert grown.holds == YES, "the eager one decides"


def test_the_best_is_not_read_off_restless_times():
    result = timing(printed=0.1)
    records = networks.of_activation(result, "relu")
    before = networks.best_speedup(records, "forward", "printed", "loop")
    middle = median(before[1]["forward"]["printed"]["seconds"])
    before[1]["forward"]["printed"]["seconds"] = [0.8 * middle, 0.8 * middle, middle, 1.2 * middle, 1.2 * middle]
    after = networks.best_speedup(records, "forward", "printed", "loop")
    assert after[0] < before[0]
    assert after[1] is not before[1]
    for record in records:
        record["forward"]["loop"]["seconds"] = [1.0, 1.0, 2.0, 3.0, 3.0]
    assert networks.best_speedup(records, "forward", "printed", "loop") is None
    found = by_what(networks.timing("relu")(result), "forward pass over the")
    assert (found.printed, found.holds, found.defaults) == ("times too restless", OPEN, "")
    assert networks.best_speedup(records, "forward", "printed", "graph") is not None
    assert networks.best_speedup(records, "forward", "printed", "fastest") is None
    for record in records:
        record["forward"]["printed"]["seconds"] = []
    assert by_what(networks.timing("relu")(result), "forward pass over the").printed == "not timed"
    caption = next(each.caption for each in drawings(result.content) if each.name == "mlp-timing-relu-forward")
    assert "Over the eager loop no size is timed calmly; " in caption
    entries = [e for e in result.summary["entries"] if (e["activation"], e["direction"]) == ("relu", "forward")]
    assert [entry["over_loop"]["best"] for entry in entries if "over_loop" in entry] == [None]
    assert any("–" in line for line in result.experiment.lines(result.summary))


def test_break_even_where_it_is_always_ahead_or_never():
    records = timing(printed=1e-6).records
    always = networks.BreakEven.of(records, "forward", "printed", "loop")
    assert (str(always), always.middle) == ("L = 16, the least timed", 16)
    records = timing(printed=1e6).records
    never = networks.BreakEven.of(records, "forward", "printed", "loop")
    assert (str(never), never.middle) == ("never", math.inf)
    assert str(networks.BreakEven.of(records, "forward", "unheard-of", "loop")) == "not timed"
    half = networks.BreakEven({2: 10.0, 4: 100.0, 8: 1000.0, 16: None}, 2)
    assert (half.middle, str(half)) == (100.0, "L ≈ 100 (10 to 1,000, 3 of 4 widths)")


def test_the_size_at_which_the_logarithmic_regime_ends():
    checks = networks.widths(finished(made_up.mlp_timing_result()))
    assert by_what(checks, "one value of w²L").holds == YES
    shallow = made_up.mlp_timing_result()
    for record in shallow["records"]:
        if record["L"] == 16 and record["w"] > 4 and record["forward"]["printed"].get("seconds"):
            record["forward"]["printed"]["seconds"] = [1e3]
    assert by_what(networks.widths(finished(shallow)), "one value of w²L").holds == NO
    for record in shallow["records"]:
        record["forward"]["printed graph"] = {"seconds": [1.0 if record["w"] < 8 else 4.0]}
    assert "depths; in a CUDA graph " in by_what(networks.widths(finished(shallow)), "one value of w²L").printed
    few = networks.widths(finished(made_up.mlp_timing_result(replace(TIMING, depths=(16,)))))
    assert by_what(few, "one value of w²L").holds == OPEN
    wide = made_up.mlp_timing_result()
    for record in wide["records"]:
        if record["forward"]["auto"].get("seconds"):
            record["forward"]["auto"]["seconds"] = [1e-3 if record["w"] < 64 else 4e-3]
        if record["forward"]["printed"].get("seconds"):
            record["forward"]["printed"]["seconds"] = [1e-3 if record["w"] < 64 else 4e-3]
    checks = networks.widths(finished(wide))
    assert "w ≈ 45 (L = 2) to 45 (L = " in by_what(checks, "has doubled").defaults
    assert by_what(checks, "one value of w²L").holds == NO, "it is one width"


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
    check = by_what(networks.timing("relu")(finished(content)), "gradients")
    relu = [record for record in content["records"] if record["activation"] == "relu"]
    assert check.printed == f"up to 12% off: 2 of {len(relu)} cells not timed"
    (caption,) = (each.caption for each in drawings(content) if each.name == "mlp-timing-relu-backward")
    assert "(2 gave a result that is off by up to 12%" in caption


def test_memory():
    content = made_up.mlp_memory_result()
    for record in content["records"]:
        total = record["network_bytes"] + record["peaks"]["loop"]["bytes"]
        record["peaks"]["printed"] = {"status": "ok", "bytes": total / 0.6 - record["network_bytes"]}
    (check,) = networks.memory(finished(content))
    assert (check.printed, check.holds) == ("0.60 (0.60 to 0.60); w ≥ 128: 0.60", YES)
    for record in content["records"]:
        if record["w"] != 128:
            record["peaks"]["printed"]["bytes"] *= 9 if record["w"] < 128 else 1.5
    content["records"] = [record for record in content["records"] if record["w"] <= 256]
    (check,) = networks.memory(finished(content))
    assert check.printed.endswith("; w ≥ 128: 0.55"), "between 0.6 and 0.5"
    assert "at least 512 bytes" in check.why
    content["device"] = "cpu"
    assert "512 bytes" not in networks.memory(finished(content))[0].why
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
    for record in content["records"]:
        if record["status"] == "ok" and record["L"] > 2000:
            record["iterations"] = [9] * 3
    assert by_what(networks.newton(finished(content)), "change with L").holds == NO


def test_the_error_of_the_output_is_judged_by_activation():
    """The small ones of one do not hide those of the other."""
    content = made_up.mlp_newton_result()
    for record in content["records"]:
        if record["status"] == "ok":
            record["error"] = [1e-4 if record["activation"] == "sigmoid" else 1e-8] * 3
    checks = networks.newton(finished(content))
    assert by_what(checks, "error of the output, ReLU").holds == YES
    sigmoid = by_what(checks, "error of the output, sigmoid")
    assert (sigmoid.holds, sigmoid.printed[:2]) == (NO, "0%")
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
