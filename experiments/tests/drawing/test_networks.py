"""Figures of deep networks show the numbers of the result files, and something sensible where these have holes."""

import math
from copy import deepcopy
from dataclasses import replace
from statistics import median

import pytest

pytest.importorskip("matplotlib")

import made_up
from deeppcr_paper import (
    figures,
)
from deeppcr_paper.table import times
from drawing_support import (
    DEPTHS,
    GAIN,
    MEMORY,
    NEWTON,
    TIMING,
    TRAINING,
    WIDTHS,
    by_name,
    forward,
    line,
    panel,
    silent,
)


def test_timing_lines_are_the_medians_of_repeats(results, drawings):
    drawing = by_name(drawings["mlp-timing"], "mlp-timing-relu-forward")
    for title, column in (("eager loop", "loop"), ("DeepPCR as printed", "printed"), ("fused loop", "fused")):
        for width in WIDTHS:
            cells = [record for record in results["mlp-timing"]["records"] if record["w"] == width]
            expected = [median(cell["forward"][column].get("seconds", [math.inf])) for cell in cells]
            x, y = line(panel(drawing, title), f"w={width}")
            assert x == list(DEPTHS)
            assert y == [None if value == math.inf else value for value in expected]
    assert None in line(panel(drawing, "DeepPCR as printed"), f"w={2**10}")[1]


def test_speedups_over_the_eager_and_over_the_fastest_loop(results, drawings):
    drawing = by_name(drawings["mlp-timing"], "mlp-timing-relu-backward")
    cells = [record["backward"] for record in results["mlp-timing"]["records"] if record["w"] == 16]
    seconds = [{name: median(entry["seconds"]) for name, entry in cell.items() if "seconds" in entry} for cell in cells]
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
