"""What is drawn: the numbers of the result files, whole SVG elements, and something sensible where results have holes."""

import json
import math
import re
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest

pytest.importorskip("matplotlib")
import matplotlib

import made_up
import made_up_diffusion
from deeppcr_paper import (
    diffusion_guess,
    diffusion_iterations,
    figures,
    latent_diffusion,
    mlp_gain,
    mlp_memory,
    mlp_newton,
    mlp_timing,
    pixel_diffusion,
    resnet_ablations,
    resnet_training,
)
from deeppcr_paper.catalogue import EXPERIMENTS
from deeppcr_paper.figures.__main__ import main as figures_main
from deeppcr_paper.table import times

#: Experiments that have nothing to draw.
WITHOUT: set[str] = set()

DEPTHS, WIDTHS = (2, 64, 2**14), (2, 16, 2**10)  # with the cells that do not fit
TIMING = replace(mlp_timing.FULL, depths=DEPTHS, widths=WIDTHS, activations=("relu",))
MEMORY = replace(mlp_memory.FULL, depths=DEPTHS, widths=WIDTHS)
NEWTON = replace(mlp_newton.FULL, guesses=("random",), depths=DEPTHS, widths=WIDTHS)
GAIN = replace(mlp_gain.FULL, activations=("relu",), gains=(0.5, 1.0, 2.0, 4.0), depths=(64, 1024))
TRAINING = replace(resnet_training.FULL, depths=(64, 128), seeds=2, epochs=3)
COUNTS = replace(resnet_ablations.ITERATIONS, depths=(64, 128), iterations=(0, 1, 3))
GUESSES = replace(resnet_ablations.GUESS, depths=(64,), iterations=(0, 1, 3))
LATENT = replace(latent_diffusion.FULL, data=("mnist",), widths=(16, 128), steps=(256, 1024), runs=20)
PIXEL = replace(pixel_diffusion.FULL, sides=(4, 16), steps=(256, 1024), runs=20)
ERRORS = replace(diffusion_iterations.FULL, widths=(16, 128), steps=(256, 1024))
STARTS = replace(diffusion_guess.FULL, sides=(4, 16), steps=(256, 1024))


def small() -> list[dict]:
    return [
        made_up.mlp_timing_result(TIMING),
        {**made_up.mlp_timing_result(TIMING, ("loop", "printed")), "experiment": "mlp-printed"},
        made_up.mlp_memory_result(MEMORY),
        made_up.mlp_newton_result(NEWTON),
        made_up.mlp_gain_result(GAIN),
        made_up.hardware_result(TIMING, ("loop", "printed")),
        made_up.resnet_training_result(TRAINING, points=30),
        made_up.ablation_result("resnet-iterations", COUNTS, points=30),
        made_up.ablation_result("resnet-guess", GUESSES, points=30),
        made_up_diffusion.latent_result(LATENT),
        made_up_diffusion.pixel_result(PIXEL),
        made_up_diffusion.iterations_result(ERRORS),
        made_up_diffusion.guess_result(STARTS),
    ]


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    return {result["experiment"]: result for result in small()}


@pytest.fixture(scope="module")
def drawings(results) -> dict[str, list[figures.Drawing]]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {name: figures.drawings(result) for name, result in results.items()}


#: Figures that are made like others: to write one down takes up to a second.
ALIKE = re.compile(
    "-backward$|^hardware|^mlp-printed|training-(accuracy|seeds)$|-mnist-(speedup|distance)$|pixel-diffusion-(?!classes)"
    "|-unconditional$|iterations-pixel$"
)


def panel(drawing: figures.Drawing, title: str):
    found = [axes for axes in drawing.canvas.axes if axes.get_title(loc="left") == title]
    assert len(found) == 1, [axes.get_title(loc="left") for axes in drawing.canvas.axes]
    return found[0]


def line(axes, tag: str) -> tuple[list[float], list[float]]:
    """The vertices of a line; NaN, where it is broken, as None."""
    found = [each for each in axes.lines if each.get_gid() == tag]
    assert len(found) == 1, [each.get_gid() for each in axes.lines]
    x, y = found[0].get_data()
    return list(x), [None if math.isnan(value) else value for value in y]


def by_name(drawings: list[figures.Drawing], name: str) -> figures.Drawing:
    return next(drawing for drawing in drawings if drawing.name == name)


@pytest.mark.parametrize("experiment", [each.name for each in EXPERIMENTS])
def test_every_experiment_has_a_figure(experiment, drawings):
    assert (experiment in WITHOUT) != bool(drawings.get(experiment))


def test_an_unknown_experiment_has_none():
    assert figures.draw({"experiment": "network-timing", "records": []}) == []


def test_svg_stands_by_itself_in_a_page(drawings):
    every = [drawing for each in drawings.values() for drawing in each]
    assert len({drawing.name for drawing in every}) == len(every)
    written, ids = [drawing for drawing in every if not ALIKE.search(drawing.name)], []
    for drawing in written:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure = drawing.figure()
        root = ElementTree.fromstring(figure.svg)
        texts = {element.text for element in root.iter() if element.text}
        assert all({axes.get_xlabel(), axes.get_ylabel()} - {""} <= texts for axes in shown_axes(drawing))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert figure.svg.startswith("<svg ")
        assert root.attrib["role"] == "img"
        assert figure.title in root.attrib["aria-label"]
        assert re.fullmatch(r"0 0 [\d.]+ [\d.]+", root.attrib["viewBox"])
        assert not {"width", "height"} & set(root.attrib)
        own = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
        used = set(re.findall(r"url\(#([^)]+)\)", figure.svg)) | set(re.findall(r'href="#([^"]+)"', figure.svg))
        assert set(own) == used
        assert re.findall(r'https?://[^"]*', figure.svg) == ["http://www.w3.org/2000/svg"]
        tags = {element.tag.rpartition("}")[2] for element in root.iter()}
        assert not tags & {"style", "metadata", "script"}
        # Pictures of samples stand in the figure itself.
        pictures = [element.attrib["href"] for element in root.iter() if element.tag.endswith("}image")]
        assert all(each.startswith("data:image/png;base64,") for each in pictures)
        assert bool(pictures) == figure.name.endswith("-images")
        assert "currentColor" in figure.svg
        assert figures.style.INK not in figure.svg
        ids += own
    assert len(ids) == len(set(ids))


def shown_axes(drawing: figures.Drawing):
    return [axes for axes in drawing.canvas.axes if axes.axison]


def test_axes_have_labels_with_units(drawings):
    for drawing in (drawing for each in drawings.values() for drawing in each):
        shown = shown_axes(drawing)
        assert bool(shown) != drawing.name.endswith("-images")
        for axes in shown:
            labels = [label for label in (axes.get_xlabel(), axes.get_ylabel()) if label]
            assert len(labels) == (1 if axes.get_label() == "<colorbar>" else 2)
            for label in labels:
                assert re.search(r"\([^)]+\)$", label), label
            for axis in (axes.xaxis, axes.yaxis):
                low, high = sorted(axis.get_view_interval())
                assert axes.get_label() == "<colorbar>" or any(low <= tick <= high for tick in axis.get_majorticklocs())


def test_same_result_same_bytes(results, monkeypatch):
    """Whatever settings matplotlib has, without changing them, and without the global state of pyplot."""
    drawn = figures.draw(results["resnet-iterations"])
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)
    monkeypatch.setitem(matplotlib.rcParams, "svg.hashsalt", None)
    before = {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}
    again = figures.draw(results["resnet-iterations"])
    assert again == drawn
    assert {key: matplotlib.rcParams[key] for key in before} == before


def test_timing_lines_are_the_shortest_repeats(results, drawings):
    drawing = by_name(drawings["mlp-timing"], "mlp-timing-relu-forward")
    for title, column in (("eager loop", "loop"), ("DeepPCR as printed", "printed"), ("fused loop", "fused")):
        for width in WIDTHS:
            cells = [record for record in results["mlp-timing"]["records"] if record["w"] == width]
            expected = [min(cell["forward"][column].get("seconds", [math.inf])) for cell in cells]
            x, y = line(panel(drawing, title), f"w={width}")
            assert x == list(DEPTHS)
            assert y == [None if value == math.inf else value for value in expected]
    assert None in line(panel(drawing, "DeepPCR as printed"), f"w={2**10}")[1]


def test_speedups_over_the_eager_and_over_the_fastest_loop(results, drawings):
    drawing = by_name(drawings["mlp-timing"], "mlp-timing-relu-backward")
    cells = [record["backward"] for record in results["mlp-timing"]["records"] if record["w"] == 16]
    seconds = [{name: min(entry["seconds"]) for name, entry in cell.items() if "seconds" in entry} for cell in cells]
    _, eager = line(panel(drawing, "as printed over eager loop"), "w=16")
    assert eager == [each["loop"] / each["printed"] for each in seconds]
    _, fastest = line(panel(drawing, "defaults over fastest loop"), "w=16")
    assert fastest[:2] == [min(each["loop"], each["graph"], each["fused"]) / each["auto"] for each in seconds[:2]]
    assert fastest[2] is None, "the graph was not timed: nobody knows the fastest loop"
    _, even = line(panel(drawing, "defaults over fastest loop"), "guide")
    assert even == [1, 1]
    best = [value for width in WIDTHS for value in line(panel(drawing, "as printed over eager loop"), f"w={width}")[1]]
    assert f"at best {times(max(value for value in best if value))} as printed" in drawing.caption
    assert "loop in a CUDA graph in 3 cells" in drawing.caption


def test_slopes_follow_their_laws(drawings):
    drawing = by_name(drawings["mlp-timing"], "mlp-timing-relu-forward")
    x, y = line(panel(drawing, "eager loop"), "guide")
    assert y[-1] / y[0] == pytest.approx(x[-1] / x[0])
    x, y = line(panel(drawing, "DeepPCR, defaults"), "guide")
    assert y[-1] / y[0] == pytest.approx(math.log2(x[-1]) / math.log2(x[0]))


def test_width_figure_has_the_line_that_the_program_reads_off(results, drawings):
    from deeppcr_paper.mlp_summary import threshold

    drawing = by_name(drawings["mlp-timing"], "mlp-timing-relu-forward-width")
    limit = threshold(results["mlp-timing"]["records"], "forward", "printed")["w2L"]
    axes = panel(drawing, "slow-down, printed")
    x, y = line(axes, "isoline")
    assert [a**2 * b for a, b in zip(x, y, strict=True)] == pytest.approx([limit] * 2)
    (cells,) = axes.collections
    slow = cells.get_array().reshape(len(DEPTHS), len(WIDTHS))
    by_cell = {(record["L"], record["w"]): record["forward"]["printed"] for record in results["mlp-timing"]["records"]}
    assert slow[1, 2] == pytest.approx(by_cell[64, 2**10]["seconds"][1] / by_cell[64, 2]["seconds"][1])
    assert slow.mask.tolist() == [[False] * 3, [False] * 3, [False, False, True]]


def test_isoline_is_read_off_between_widths():
    from deeppcr_paper.figures.mlp_width import isoline

    found = isoline({4: {2: 8.0, 8: 2.0}, 16: {2: 5.0, 4: 1.0}, 2**10: {2: 1.0}}, 64)
    assert found == [(2.0, 5.0), (4.0, pytest.approx(4.0))]


def test_memory_counts_the_network(results, drawings):
    (drawing,) = drawings["mlp-memory"]
    cells = [record for record in results["mlp-memory"]["records"] if record["w"] == 2**10]
    totals = [
        [cell["network_bytes"] + cell["peaks"][name].get("bytes", math.nan) for cell in cells]
        for name in ("loop", "printed")
    ]
    assert line(panel(drawing, "loop, memory"), f"w={2**10}")[1] == [value / 2**20 for value in totals[0]]
    _, ratios = line(panel(drawing, "loop over printed"), f"w={2**10}")
    assert ratios == [*(a / b for a, b in zip(totals[0][:2], totals[1][:2], strict=True)), None]
    assert "Out of memory: as printed in 1 cell." in drawing.caption
    impatient = deepcopy(results["mlp-memory"])
    for record in impatient["records"]:
        if "bytes" not in record["peaks"]["printed"]:
            record["peaks"]["printed"]["status"] = "not measured: it took 3 s at L = 8"
    (drawing,) = figures.drawings(impatient)
    assert "Out of memory" not in drawing.caption
    assert "Not tried, after smaller ones took too long: as printed in 1 cell." in drawing.caption


def test_newton_iterations_and_errors(results, drawings):
    (drawing,) = drawings["mlp-newton"]
    keys = {"activation": "sigmoid", "guess": "random", "w": 16}
    cells = [r for r in results["mlp-newton"]["records"] if all(r[key] == value for key, value in keys.items())]
    _, counts = line(panel(drawing, "sigmoid, iterations"), "w=16")
    assert counts == pytest.approx([sum(cell["iterations"]) / 3 for cell in cells])
    _, errors = line(panel(drawing, "sigmoid, error of the output"), "w=16")
    assert errors == [None, *(max(cell["error"]) for cell in cells[1:])], "zero has no place on a log axis"


def test_a_cell_that_did_not_converge_is_crossed_out():
    result = made_up.mlp_newton_result(replace(NEWTON, depths=(8, 16), activations=("relu",)))
    result["records"][1]["results"] = ["CONVERGED", "FINISHED_BY_LOOP", "CONVERGED"]
    (drawing,) = figures.drawings(result)
    x, y = line(panel(drawing, "ReLU, iterations"), "not converged")
    assert (x, y) == ([16], [pytest.approx(sum(result["records"][1]["iterations"]) / 3)])
    assert "not converged in 1 cell (crosses)" in drawing.caption


def test_figures_become_files(tmp_path, results, capsys):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(results["mlp-gain"]))
    assert figures_main([str(path), str(tmp_path / "drawn")]) == 0
    written = sorted((tmp_path / "drawn").iterdir())
    assert [str(each) for each in written] == sorted(capsys.readouterr().out.split())
    for each in written:
        assert "color:" in ElementTree.parse(each).getroot().attrib["style"]
    path.write_text(json.dumps({**results["mlp-gain"], "complete": False}))
    assert figures_main([str(path), str(tmp_path)]) == 2
    assert "not finished" in capsys.readouterr().err
    assert figures_main([]) == 2


def test_gain(results, drawings):
    (drawing,) = drawings["mlp-gain"]
    cells = [record for record in results["mlp-gain"]["records"] if record["L"] == 1024]
    counts = [record["paper"]["iterations"][0] for record in cells]
    x, y = line(panel(drawing, "DeepPCR as printed"), "L=1024")
    assert (x, y) == ([0.5, 1.0, 2.0, 4.0], [*counts[:3], None]), "at the largest gain the states overflow"
    assert line(panel(drawing, "DeepPCR as printed"), "not converged L=1024")[0] == [4.0]
    _, exponents = line(panel(drawing, "Lyapunov exponent"), "L=1024")
    assert exponents == [None, *(pytest.approx(record["exponents"][0]) for record in cells[1:])]
    assert line(panel(drawing, "iterations by exponent"), "L=1024") == (exponents[1:3], counts[1:3])
    assert "from gain 4 on" in drawing.caption
    assert "at most 4 iterations at every depth" in drawing.caption
    assert len(silent(made_up.mlp_gain_result(replace(GAIN, gains=(1.0,), depths=(64,), samples=1)))) == 1
    assert len(silent(made_up.mlp_gain_result(replace(GAIN, gains=(4.0,), depths=(1024,))))) == 1


def test_machines_side_by_side(results, drawings):
    drawing = by_name(drawings["hardware"], "hardware-relu-forward")
    cells = [record["forward"]["printed"] for record in results["hardware"]["records"] if record["w"] == 16]
    for number, machine in enumerate(("NVIDIA A100-SXM4-80GB", "NVIDIA H200")):
        assert line(panel(drawing, machine), "w=16")[1] == [cell["seconds"][number] for cell in cells]
    assert line(panel(drawing, "ratio, DeepPCR as printed"), "w=16")[1] == [cell["ratio"] for cell in cells]


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


def silent(result: dict) -> list[figures.Figure]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return figures.draw(result)


def forward(settings: mlp_timing.Settings, columns: tuple[str, ...]) -> dict:
    """Timings of forward passes only: the figures of both directions are the same."""
    result = made_up.mlp_timing_result(settings, columns)
    for record in result["records"]:
        record["backward"] = {}
    return result


def test_one_depth():
    timing = forward(replace(TIMING, depths=(64,)), ("loop", "printed", "auto"))
    for record in timing["records"]:
        record["forward"]["auto"] = {"status": "failed: RuntimeError: no kernel"}
    assert len(silent(timing)) == 2
    assert len(silent(made_up.mlp_newton_result(replace(NEWTON, depths=(64,))))) == 1


def test_one_width_and_one_cell():
    """Nothing to see over widths; and neither the depth nor the width need be a power of two."""
    timing = made_up.mlp_timing_result(replace(TIMING, widths=(16,)), ("loop", "printed", "auto"))
    assert [drawing.name for drawing in figures.drawings(timing)] == [
        "mlp-timing-relu-forward",
        "mlp-timing-relu-backward",
    ]
    sizes = {"depths": (100,), "widths": (24,)}
    assert len(silent(forward(replace(TIMING, **sizes), ("loop", "auto")))) == 1
    assert len(silent(made_up.mlp_memory_result(replace(MEMORY, **sizes)))) == 1


def test_cpu_columns_and_columns_that_failed():
    result = forward(replace(TIMING, depths=(8, 64), widths=(2, 4)), ("loop", "printed", "auto"))
    for record in result["records"]:
        record["forward"]["auto"] = {"status": "failed: RuntimeError: no kernel"}
    depth, width = figures.drawings(result)
    assert "not timed: failed" in " ".join(text.get_text() for text in panel(depth, "DeepPCR, defaults").texts)
    assert not any("fastest" in axes.get_title(loc="left") for axes in depth.canvas.axes), "there is one loop only"
    assert "DeepPCR, defaults in 4 cells" in depth.caption
    assert not any("defaults" in axes.get_title(loc="left") for axes in width.canvas.axes)


def test_nothing_was_timed():
    timing = made_up.mlp_timing_result(replace(TIMING, depths=(8,), widths=(2,)))
    for record in timing["records"]:
        for way in ("forward", "backward"):
            record[way] = {column: {"status": "out of memory"} for column in record[way]}
    memory = made_up.mlp_memory_result(replace(MEMORY, depths=(8,), widths=(2,)))
    for record in memory["records"]:
        record["peaks"] = {name: {"status": "out of memory"} for name in record["peaks"]}
    newton = made_up.mlp_newton_result(replace(NEWTON, depths=(8,), widths=(2,)))
    newton["records"] = [
        {k: r[k] for k in ("activation", "guess", "L", "w")} | {"status": "out of memory"} for r in newton["records"]
    ]
    hardware = made_up.hardware_result(replace(TIMING, depths=(8,), widths=(2,)))
    for record in hardware["records"]:
        for way in ("forward", "backward"):
            record[way] = {column: {"seconds": [None, None], "ratio": None} for column in record[way]}
    assert [silent(each) for each in (timing, memory, newton, hardware)] == [[]] * 4
    for result in (timing, memory, newton, hardware):
        assert silent({**result, "records": []}) == []


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


def test_captions_say_how_much_there_is():
    result = made_up.mlp_newton_result(NEWTON)
    ok = [record for record in result["records"] if record["guess"] == "random" and record["status"] == "ok"]
    ok[0]["iterations"], ok[0]["error"], ok[0]["results"] = ok[0]["iterations"][:1], [1e-8], ["CONVERGED"]
    ok[1] |= {"status": "not measured: it took 5 s at L = 8"}
    result["sessions"] = [{"start": "2026-01-01T00:00:00", "end": "2026-01-01T00:09:00"}] * 2
    (caption,) = (each.caption for each in figures.drawings(result) if each.name == "mlp-newton-random")
    for part in ("mean of the 1 to 3 networks", "Not tried in 1 cell, after", "Several processes shared the device."):
        assert part in caption
    # Beside others only what went well: the failure was seen by a process that had the device to itself.
    result["sessions"].append({"start": "2026-01-01T00:09:00", "end": None})
    for record in result["records"]:
        record["session"] = 0 if record["status"] == "ok" else 2
    assert not [each for each in figures.drawings(result) if "shared" in each.caption]
    result["sessions"].append({"start": "2026-01-01T00:20:00", "end": None})
    assert [each for each in figures.drawings(result) if "shared" in each.caption], (
        "one that was killed may have gone on"
    )
    result["sessions"] = result["sessions"][:1]
    assert not [each for each in figures.drawings(result) if "shared" in each.caption]

    result = made_up_diffusion.iterations_result(ERRORS)
    for record in result["records"]:
        record["errors"] = {name: curves[:1] for name, curves in record["errors"].items()}
    assert all("the largest of 1 sample of each" in each.caption for each in figures.drawings(result))


def test_trainings_that_all_diverged():
    """Steps, as nobody knows how many make an epoch."""
    settings = replace(COUNTS, depths=(64,), iterations=(1,))
    (figure,) = figures.drawings(made_up.ablation_result("resnet-iterations", settings, points=12))
    assert panel(figure, "loss curves, L = 64").get_xlabel() == "training (steps)"
    assert silent(made_up.ablation_result("resnet-guess", replace(GUESSES, iterations=(1,)), points=12))


def test_trainings_of_which_none_diverged():
    assert silent(made_up.ablation_result("resnet-iterations", replace(COUNTS, iterations=(0, 3)), points=12))


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize(
    "values", [[2.058, 2.0601], [0.0, 15.0], [-2e-6, 5e-6], [0.3], [88.0, 94.2], [0.0, 0.0], [0.41, 0.93], [3e-8, 2e4]]
)
def test_ticks_are_told_apart(values, scale):
    """Also where values are nearly equal: no two ticks with one number."""
    with figures.style.context():
        _, (axes,) = figures.panels.panels(1)
        axes.plot(values)
        figures.panels.same_y([axes], log=scale == "log")
        low, high = axes.get_ylim()
        ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
        texts = axes.yaxis.get_major_formatter().format_ticks(ticks)
    assert 2 <= len(set(texts)) == len(ticks) <= 8, texts


def test_full_size_stays_small():
    """A page holds dozens of them: those of the documentation, from full runs."""
    committed = list((Path(__file__).resolve().parents[2] / "docs" / "paper").glob("*.svg"))
    assert committed
    assert max(path.stat().st_size for path in committed) < 250_000


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


def test_errors_of_zero_are_told():
    """They have no place on a log axis."""
    newton = made_up.mlp_newton_result(NEWTON)
    done = [record for record in newton["records"] if record["status"] == "ok"]
    for record in done:
        record["error"] = [1e-6] * len(record["error"])
    assert "The error is 0" not in figures.drawings(newton)[0].caption
    for record in done[:2]:
        record["error"] = [0.0] * len(record["error"])
    assert "The error is 0 in 2 cells" in figures.drawings(newton)[0].caption
    training = made_up.resnet_training_result(replace(TRAINING, seeds=1), points=5)
    training["records"][1]["parameter_distance"][:3] = [0.0] * 3
    assert "Equal at 3 points" in by_name(figures.drawings(training), "resnet-training-newton").caption


def test_each_method_says_for_itself_from_where_it_is_ahead():
    result = forward(replace(TIMING, depths=(2, 64)), ("loop", "printed", "auto"))
    for record in result["records"]:
        if "seconds" in record["forward"]["printed"]:
            record["forward"]["printed"]["seconds"] = [1e3]
    caption = by_name(figures.drawings(result), "mlp-timing-relu-forward").caption
    assert "; as printed nowhere ahead, defaults " in caption


def test_ahead_means_ahead_at_every_width():
    result = forward(replace(TIMING, depths=(16, 64), widths=(4, 16)), ("loop", "auto"))

    def ended(behind):
        """The caption's last words, where the loop takes a second, and so less than ours in these cells."""
        for record in result["records"]:
            ours = 2.0 if (record["L"], record["w"]) in behind else 0.5
            record["forward"] = {"loop": {"seconds": [1.0]}, "auto": {"seconds": [ours]}}
        caption = by_name(figures.drawings(result), "mlp-timing-relu-forward").caption
        return caption.partition("; defaults ")[2]

    assert ended([]) == "ahead at every depth."
    assert ended([(16, 4)]) == "ahead from L ≈ 16 to 32."
    assert ended([(16, 4), (64, 4)]) == "ahead at every depth at 1 of 2 widths."
    assert ended([(64, 4), (64, 16)]) == "nowhere ahead."
