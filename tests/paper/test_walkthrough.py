"""The walk-through of the paper: what is committed is what it builds, and its verdicts follow the numbers."""

import base64
import copy
import hashlib
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
import matplotlib
from matplotlib.image import imread, imsave

import made_up
from deeppcr import FixedIterations, PaperTest
from deeppcr.paper import mlp_timing, resnet_ablations, resnet_training
from deeppcr.paper.catalogue import EXPERIMENTS
from deeppcr.paper.figures import drawings
from deeppcr.paper.mlp import Network
from deeppcr.paper.report.collect import Finished
from deeppcr.paper.store import PaperError
from deeppcr.paper.walkthrough import build, diffusion, findings, headline, networks, trainings, write
from deeppcr.paper.walkthrough.__main__ import main
from deeppcr.paper.walkthrough.choice import Results, again, command, fewer, smaller
from deeppcr.paper.walkthrough.items import ITEMS
from deeppcr.paper.walkthrough.page import show, slug
from deeppcr.paper.walkthrough.reading import NO, OPEN, YES, Check, Verdict, listed, span, table, verdict

ROOT = Path(__file__).resolve().parents[2]
TIMING = replace(mlp_timing.FULL, depths=(16, 64, 1024, 2**14), widths=(2, 16, 256))
TRAINING = replace(resnet_training.FULL, depths=(64, 128), seeds=2, epochs=8)
DIFFUSION = {"latent-diffusion", "pixel-diffusion", "diffusion-iterations", "diffusion-guess"}


def finished(content, name="made.json", **changes):
    return Finished(Path(name), {"end": "2026-01-02T00:00:00+00:00", "commit": "abc", **content, **changes})


def by_what(checks, part):
    (found,) = [check for check in checks if part in check.what]
    return found


# What is committed


@pytest.fixture(scope="module")
def built():
    return build(ROOT)


def without_figures(html):
    return re.sub(r"<svg.*?</svg>", "<svg/>", html, flags=re.DOTALL)


def pixels(text):
    """The text with its pictures by their pixels: how they are packed is another library's business."""

    def unpacked(found):
        image = imread(io.BytesIO(base64.b64decode(found[1])), format="png")
        return f"{image.shape} {hashlib.sha256(image.tobytes()).hexdigest()}"

    return re.sub(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)", unpacked, text)


def texts(svg):
    return re.findall(r">([^<>\n]+)</text>", svg)


def test_what_is_committed_is_what_is_built(built):
    """Another version of matplotlib puts things elsewhere by a hair: then the words of the figures are compared."""
    files = {name: (ROOT / name).read_text(encoding="utf-8") for name in built}
    versions = {each for text in files.values() for each in re.findall(r"drawn by matplotlib (\S+)", text)}
    for name, built_now in built.items():
        committed, content = pixels(files[name]), pixels(built_now)
        if versions != {matplotlib.__version__}:
            if name.endswith(".svg"):
                committed, content = texts(committed), texts(content)
            elif name.endswith(".html"):
                committed, content = without_figures(committed), without_figures(content)
        assert committed == content, f"{name} is not what results/ give: run make paper"


def test_pictures_are_compared_by_their_pixels():
    def svg(picture, level):
        buffer = io.BytesIO()
        imsave(buffer, picture, format="png", cmap="gray", vmin=0, vmax=1, pil_kwargs={"compress_level": level})
        return f'<image href="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"/>'

    one, other = [[0.0, 1.0]] * 9, [[0.0, 0.9]] * 9
    assert svg(one, 0) != svg(one, 9)
    assert pixels(svg(one, 0)) == pixels(svg(one, 9))
    assert pixels(svg(one, 0)) != pixels(svg(other, 0))


def test_no_figure_is_left_over(built):
    committed = {f"docs/paper/{path.name}" for path in (ROOT / "docs" / "paper").iterdir()}
    assert committed == {name for name in built if name.startswith("docs/paper/")}


def test_the_page_shows_every_figure_that_is_built(built):
    shown = re.findall(r"\]\((paper/[^)]+)\)", built["docs/paper.md"])
    assert {f"docs/{name}" for name in shown} == {name for name in built if name.startswith("docs/paper/")}


def test_the_page_links_to_its_own_headings(built):
    page = built["docs/paper.md"]
    headings = {slug(heading) for heading in re.findall(r"^### (.*)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) == headings
    assert len(headings) == len(ITEMS)


# The paper's figures and tables


def test_all_of_the_paper_in_its_order():
    labels = [item.label for item in ITEMS]
    assert [label for label in labels if label.startswith("Figure")] == [f"Figure {n}" for n in range(1, 24)]
    assert [label for label in labels if label.startswith("Table")] == [f"Table {n}" for n in range(1, 4)]
    assert len(labels) == 26
    assert labels.index("Table 1") == labels.index("Figure 17") - 1
    assert labels.index("Table 2") == labels.index("Figure 18") + 1


def test_every_experiment_of_an_item_exists_and_draws_what_is_shown():
    known = {each.name for each in EXPERIMENTS}
    names = {
        name: {drawing.name for drawing in drawings(content)}
        for name, content in {
            "mlp-timing": made_up.mlp_timing_result(TIMING),
            "mlp-memory": made_up.mlp_memory_result(),
            "mlp-newton": made_up.mlp_newton_result(),
            "hardware": made_up.hardware_result(TIMING),
            "resnet-training": made_up.resnet_training_result(TRAINING, points=8),
            "resnet-iterations": made_up.ablation_result("resnet-iterations", resnet_ablations.ITERATIONS, points=8),
            "resnet-guess": made_up.ablation_result("resnet-guess", resnet_ablations.GUESS, points=8),
        }.items()
    }
    for item in ITEMS:
        for part in item.parts:
            assert part.experiment in known | DIFFUSION, item.label
            for pattern in part.figures if part.experiment in names else ():
                stem = pattern.rstrip("*")
                assert any(name.startswith(stem) for name in names[part.experiment]), (item.label, pattern)


def test_table_3_says_what_the_runs_as_printed_use():
    network = Network.make(4, 2, "cpu", 0, "relu")  # type: ignore[arg-type]
    newton = mlp_timing.solver(network, "printed")
    assert (newton.max_iterations, newton.chunk, newton.stop) == (15, 1, PaperTest(1e-4, 1e-4))
    assert repr(newton.linear) == "PCR()"
    (note,) = [item.note for item in ITEMS if item.label == "Table 3"]
    assert all(words in note for words in ("PaperTest(1e-4, 1e-4)", "max_iterations=15", "chunk=1", "PCR()"))
    assert newton.stop != FixedIterations(3)


def test_findings_from_some_of_the_cells_say_so(tmp_path):
    newton, memory = made_up.mlp_newton_result(), made_up.mlp_memory_result()
    mine = [record for record in newton["records"] if record["activation"] == "relu"]
    measured = f"{sum(record['status'] == 'ok' for record in mine)} of {len(mine)} cells"
    assert f"; {measured})" in findings.iterations(Finished(tmp_path, newton))
    first = [record for record in mine if record["guess"] == "repeat-initial"]
    measured = f"{sum(record['status'] == 'ok' for record in first)} of {len(first)} cells"
    iterations, *others = networks.newton(Finished(tmp_path, newton))
    assert f"({measured})" in iterations.ours
    assert sum("cells" in check.ours for check in others) == 2  # the error of the output, of each activation
    fits = sum(record["peaks"]["printed"]["status"] == "ok" for record in memory["records"])
    measured = f"{fits} of {len(memory['records'])} cells"
    assert f"as printed ({measured})," in findings.memory(Finished(tmp_path, memory))
    printed, *others = networks.memory(Finished(tmp_path, memory))
    assert printed.ours.endswith(f"; {measured}")
    assert not any("cells" in check.ours for check in others)

    for record in newton["records"]:
        record["status"] = "out of memory"
        record.pop("iterations", None)
    for record in memory["records"]:
        record["peaks"]["loop"] = {"status": "out of memory"}
    assert findings.iterations(Finished(tmp_path, newton)).endswith("ReLU not measured; sigmoid not measured.")
    assert [check.ours for check in networks.newton(Finished(tmp_path, newton))] == ["not measured"]
    assert findings.memory(Finished(tmp_path, memory)) is None
    assert {check.ours for check in networks.memory(Finished(tmp_path, memory))} == {"not measured"}


# Which results


def test_a_result_from_a_gpu_at_full_size_is_taken_then_the_newest():
    full = made_up.mlp_timing_result()
    small = made_up.mlp_timing_result(TIMING)

    def named(name, content, end, **changes):
        return finished({**content, "end": end}, name, **changes)

    old, new = (named(name, full, end) for name, end in (("old", "2026-01"), ("new", "2026-02")))
    cut = named("cut", small, "2026-03")
    cpu = named("cpu", full, "2026-04", device="cpu")
    quick = named("quick", full, "2026-05", quick=True)
    every = [old, new, cut, cpu, quick]
    for expected in (new, old, cut, cpu):
        assert Results(every).best("mlp-timing") is expected
        every.remove(expected)
    assert Results(every).best("mlp-timing") is None
    assert Results([new]).best("mlp-timing", lambda result: False) is None
    other = named("other", copy.deepcopy(full), "2025")
    for record in other.records:
        record["hardware"] = "Another GPU"
    assert Results([old, new]).second("mlp-timing") is None
    assert Results([old, new, other]).second("mlp-timing") is other


def test_fewer_repeats_are_no_smaller_run():
    full = finished(made_up.mlp_timing_result())
    repeats = finished(made_up.mlp_timing_result(replace(mlp_timing.FULL, budget=1.0)))
    small = finished(made_up.mlp_timing_result(TIMING))
    assert (smaller(full), fewer(full)) == ("", "")
    assert (smaller(repeats), fewer(repeats)) == ("", "budget=1.0")
    untimed = finished(made_up.resnet_training_result(replace(resnet_training.FULL, timed_seeds=0), points=8))
    assert smaller(untimed) == ""
    assert "timed_seeds=0" in fewer(untimed)
    assert smaller(small) == "depths=16,64,1024,16384, widths=2,16,256"
    assert fewer(small) == ""
    trained = finished(made_up.resnet_training_result(TRAINING, points=4))
    assert again(trained).endswith("--set depths=64,128 --set seeds=2 --data-dir DIR")
    assert command("mlp-newton") == "deeppcr reproduce mlp-newton --device cuda"


def test_what_was_not_run_says_so_and_nothing_else():
    nothing = Results([])
    for item in ITEMS:
        shown = show(item, nothing, lambda result: [])
        if item.parts:
            text = "\n".join(shown.lines)
            assert shown.verdict is Verdict.NOT_RUN
            assert "Not run yet at full size" in text
            assert all(command(part.experiment) in text for part in item.parts)
            assert not any(line.startswith("|") for line in shown.lines)
        else:
            assert shown.verdict is Verdict.NOTHING_MEASURED
    assert all("Not run yet at full size: `deeppcr reproduce" in line for line in findings.lines(nothing))
    assert headline.lines(nothing) == ["Not run yet: `deeppcr reproduce mlp-timing --device cuda`."]


def test_a_damaged_result_is_named():
    damaged = finished({**made_up.mlp_memory_result(), "records": [{"L": 2}]}, "damaged.json")
    (item,) = [item for item in ITEMS if item.label == "Figure 14"]
    with pytest.raises(PaperError, match=r"damaged\.json: damaged"):
        show(item, Results([damaged]), lambda result: [])


# Verdicts


def test_verdicts():
    def of(*held):
        return verdict([Check("", "", "", each) for each in held])

    assert of(YES, YES) is Verdict.AGREES
    assert of(YES, NO) is Verdict.PARTLY
    assert of(NO, OPEN) is Verdict.DIFFERS
    assert of(OPEN, "") is Verdict.OPEN
    lines = table([Check("a", "1", "2", NO, "because"), Check("b", "", "3", YES, "not said")])
    assert lines[2:] == ["| a | 1 | 2 | no |", "| b | – | 3 | yes |", "", "because"]
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert (listed(["a"]), span([88.4, 1234]), span([16])) == ("a", "88 to 1,200", "16")


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


def test_launches_are_told_from_arithmetic_by_the_least_depth():
    content = timing()
    for record in content.records:
        record["forward"]["printed"]["seconds"] = [1e-5 * record["L"]]
    assert "it grows with the work that it does" in by_what(networks.timing("relu")(content), "forward pass over").why
    for record in content.records:
        record["forward"]["printed"]["seconds"] = [0.02]
    why = by_what(networks.timing("relu")(content), "forward pass over").why
    assert "20 ms at L = 16 already, 100% of what it takes at L = 16,384" in why


def test_smooth_activations_have_their_own_break_even():
    checks = networks.timing("tanh")(timing(printed=0.1))
    assert by_what(checks, "forward pass, depth").paper == "closer to 64 than to 128"
    assert by_what(checks, "forward pass over").holds == ""
    assert "over the fused loop" in "\n".join(networks.strong_baselines("tanh")(timing()))


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
    content = made_up.mlp_timing_result()
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


def trained(**changes):
    """With the same losses in both modes: what was made up has noise."""
    result = finished(made_up.resnet_training_result(replace(TRAINING, **changes), points=20))
    for record in result.records:
        if "runs" in record:
            for run in record["runs"].values():
                run["curves"]["loss"] = [0.3] * 20
    return result


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
    row = "ResNet training step in a CUDA graph, L = 128, w = 16 | – | – | 400 µs (2×) | – | **200 µs**"
    assert any(row in each for each in headline._training(result))
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
    assert Results([timed, untimed]).best("resnet-training") is timed
    assert Results([untimed]).best("resnet-training") is untimed


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


# Diffusion: its experiments' summaries


class Summed(Finished):
    """A result whose summary is given."""

    @property
    def summary(self):
        return self.content["summary"]


def off(largest):
    return {"mean_error": largest / 10, "error": largest, "samples": 7}


def sampled(scale=1.0, paper=diffusion.LATENT, size="w", apart=0.0, **more):
    """Entries at ``scale`` times the paper's speed-ups, with its iterations and errors."""
    entries = []
    for (length, width), (speedup, count, error) in paper.items():
        entry = {"data": "mnist", size: width, "L": length, **more}
        entry["seconds"] = {"loop": 1.0, "graph": 0.2, "printed": 1 / (scale * speedup), "auto": 0.01}
        entry["printed"] = {"over_loop": scale * speedup, "iterations": count / scale, **off(error / scale)}
        entry["newton"] = {"over_loop": scale * speedup, "iterations": 0.9 * count / scale, **off(error / scale)}
        entry["auto"] = {"over_loop": 100.0, "over_graph": 20.0, "iterations": 15.0, **off(1e-4)}
        entry["batch"] = {"samples": 64, "over_fastest_loop": 0.5}
        entry["frechet"] = {"sequential": 2.0, "difference": apart, "sequential_interval": [1.9, 2.1]}
        entries.append(entry)
    return entries


def summed(name, entries, records=()):
    settings = {"seed": 0, "data": "mnist"}
    content = {"experiment": name, "device": "cuda", "settings": settings, "records": list(records), "summary": entries}
    return Summed(Path(f"{name}.json"), {"end": "2026-01-02", "commit": "abc", **content})


def test_latent_diffusion():
    good, bad = (summed("latent-diffusion", sampled(scale, apart=apart)) for scale, apart in ((1, 0.05), (0.5, 0.3)))
    for read in (diffusion.headline, diffusion.latents, diffusion.timing_table(diffusion.LATENT)):
        assert verdict(read(good)) is Verdict.AGREES
        assert (
            by_what(read(bad), "as printed over the eager loop" if "table" not in str(read) else "speed-up").holds == NO
        )
    assert by_what(diffusion.latents(bad), "distances").holds == NO
    assert by_what(diffusion.timing_table(diffusion.LATENT)(bad), "iterations").ours == "0 of 12 rows"
    rows = diffusion.timing_rows(diffusion.LATENT)(good)
    assert (
        "| w = 16 | 1,024 | 11.22× | 13.4 | 0.00523 | 11× | 13.4 (7) | 5.2·10⁻⁴ | 0.00523 | 12.1 (7) | 5.2·10⁻⁴ | 0.00523 | 100× | 20× | 15.0 (7) | 10⁻⁵ | 10⁻⁴ |"
        in rows
    )
    assert by_what(diffusion.timing_table(diffusion.LATENT)(bad), "path of Gaussian data").ours == "0 of 12 rows"
    for entry in good.summary:
        del entry["newton"]
    assert by_what(diffusion.timing_table(diffusion.LATENT)(good), "path of Gaussian data").holds == OPEN
    assert "| 0.00195 | – | – | – | 100×" in diffusion.timing_rows(diffusion.LATENT)(good)[2]
    assert verdict(diffusion.pictures(good)) is Verdict.AGREES
    assert [check.holds for check in diffusion.other_data(good)] == [OPEN, OPEN]
    colour = [{**entry, "data": "cifar10"} for entry in sampled()]
    assert by_what(diffusion.other_data(summed("latent-diffusion", colour)), "CIFAR-10, as printed").holds == YES
    assert "MNIST: yes, they differ by at most 0.05 of 2" in findings.distances(good)
    assert "MNIST: no, they differ by at most 0.3 of 2" in findings.distances(bad)
    shares = [{"w": 16, "L": 256, "printed": {"phases": {"jacobian": part, "total": 1.0}}} for part in (0.02, 0.6)]
    assert diffusion.jacobians(summed("latent-diffusion", [], shares[:1]))[0].holds == YES
    assert (
        diffusion.jacobians(summed("latent-diffusion", [], shares))[0].ours
        == "2% (w = 16, L = 256) to 60% (w = 16, L = 256)"
    )
    assert any("latents of MNIST, w = 128, L = 1,024 | 1 s (100×)" in row for row in headline._samples(good))


def test_pixel_diffusion_with_and_without_classes():
    entries = sampled(1, diffusion.PIXEL, "side", conditional="no") + sampled(
        1.2, diffusion.PIXEL, "side", conditional="yes"
    )
    result = summed("pixel-diffusion", entries)
    assert verdict(diffusion.timing_table(diffusion.PIXEL)(result)) is Verdict.AGREES
    assert diffusion.classes(result)[0].holds == YES
    assert findings.classes(result).startswith(
        "As printed yes, in 9 of 9 sizes (7 samples each); in less time in 9 of 9; they take no more iterations in 9 of 9"
    )
    entries[0]["printed"]["over_loop"] *= 2
    gain, few, *_ = diffusion.classes(result)
    assert (gain.holds, few.holds, few.ours[:14]) == (NO, "", "in 9 of 9 size")
    assert findings.classes(result).startswith("As printed not always, in 8 of 9 sizes")
    entries[0]["printed"]["iterations"] /= 2
    assert diffusion.classes(result)[1].ours.startswith("in 8 of 9")
    for entry in entries:
        del entry["printed"], entry["auto"]
    assert findings.classes(result) == "Not timed."
    assert len(headline._samples(result)) == 3


def test_diffusion_iterations_and_guesses():
    def entry(space, count, last):
        each = {"iterations": count, "last": last}
        return {"space": space, "w" if space == "latent" else "side": 16, "L": 1024, "printed": each, "auto": each}

    result = summed("diffusion-iterations", [entry("latent", 14, 1e-4), entry("pixel", None, 0.1)])
    assert diffusion.iterations("latent")(result)[0].holds == YES
    assert [check.holds for check in diffusion.iterations("pixel")(result)] == [NO, "", YES]
    late = summed("diffusion-iterations", [entry("latent", 15, 1e-4)])
    assert diffusion.iterations("latent")(late)[0].holds == NO
    assert diffusion.iterations("pixel")(late)[0].holds == OPEN
    starts = {"mean": 12.0, "class-mean": 10.0}
    guesses = [
        {
            "side": 4,
            "conditional": "yes",
            "L": 64,
            "guess": name,
            **{m: {"iterations": n, "samples": 3} for m in ("printed", "auto")},
        }
        for name, n in starts.items()
    ]
    assert diffusion.guesses(summed("diffusion-guess", guesses))[0].holds == YES
    guesses[0]["printed"]["iterations"] = 10.4
    near = diffusion.guesses(summed("diffusion-guess", guesses))[0]
    assert (near.holds, near.why[:22]) == (YES, "The two are closer tha")
    guesses[0]["printed"] |= {"iterations": 9.0, "samples": 2}
    guesses.append({**guesses[0], "side": 8, "auto": guesses[0]["auto"], "printed": guesses[0]["printed"]})
    assert diffusion.guesses(summed("diffusion-guess", guesses))[0].ours == (
        "9.0 from mean, 10.0 from class-mean (4×4, 8×8; 2 to 3 samples of each size and start)"
    )
    assert diffusion.guesses(summed("diffusion-guess", guesses))[0].holds == NO


# The README's table, and the command


def test_the_table_shows_the_strong_baselines():
    lines = headline.lines(Results([finished(made_up.mlp_timing_result()), trained()]))
    assert lines[0].count("|") == 7
    assert all(name in lines[0] for name in ("eager loop", "CUDA graph", "fused sequential kernel", "as printed"))
    (short,) = [line for line in lines if "MLP forward, L = 64," in line]
    assert "(0.025×)" in short, "where the loop wins stands in the table"
    assert any("ResNet forward in training, L = 128" in line for line in lines)
    slow = headline.lines(Results([finished(made_up.mlp_timing_result()), trained(dtype="float64")]))
    assert not any("ResNet" in line for line in slow), "float64 shows equality, not speed"
    with pytest.raises(ValueError, match="lacks the marks"):
        headline.put("no marks here", Results([]))


def test_the_command_writes_what_differs_and_takes_away_what_is_left_over(tmp_path, capsys):
    shutil.copy(ROOT / "README.md", tmp_path)
    assert main([str(tmp_path)]) == 2
    assert "is no checkout" in capsys.readouterr().err
    (tmp_path / "mkdocs.yml").write_text("")
    assert main([str(tmp_path)]) == 2
    assert "no such folder" in capsys.readouterr().err
    content = {**made_up.mlp_memory_result(), "end": "2026-01-02", "commit": "abc"}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "made.json").write_text(json.dumps(content))
    (tmp_path / "docs" / "paper").mkdir(parents=True)
    (tmp_path / "docs" / "paper" / "old.svg").write_text("")
    assert main([str(tmp_path)]) == 0
    changed = capsys.readouterr().out.split("\n")
    assert {"README.md", "docs/paper.md", "docs/report.html", "docs/paper/old.svg", "docs/paper/mlp-memory.svg"} <= set(
        changed
    )
    assert not (tmp_path / "docs" / "paper" / "old.svg").exists()
    assert write(tmp_path) == []
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "everything is as it was\n"
