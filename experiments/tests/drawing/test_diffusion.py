"""The figures of diffusion show the numbers of the result files, whatever is missing in them."""

import warnings
from dataclasses import replace
from statistics import median

import pytest

pytest.importorskip("matplotlib")
import numpy as np

import made_up_diffusion
from deeppcr_paper import diffusion_guess, diffusion_iterations, figures, latent_diffusion, pixel_diffusion
from deeppcr_paper.sampling import unpack
from drawing_support import line, panel

LATENT = replace(latent_diffusion.FULL, widths=(16, 128), steps=(256, 1024), runs=20)
PIXEL = replace(pixel_diffusion.FULL, sides=(4, 16), steps=(256, 1024), runs=20)


def draw(result):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {each.name: each for each in figures.drawings(result)}


@pytest.fixture(scope="module")
def latent():
    return made_up_diffusion.latent_result(LATENT)


@pytest.fixture(scope="module")
def drawn(latent):
    return draw(latent)


def cell(result, **identity):
    (found,) = [
        record
        for record in result["records"]
        if "loop" in record and all(record[name] == value for name, value in identity.items())
    ]
    return found


def test_times_are_medians(latent, drawn):
    axes = panel(drawn["latent-diffusion-mnist-time"], "L = 1,024 steps")
    for column in ("loop", "graph", "auto"):
        expected = [median(cell(latent, data="mnist", w=w, L=1024)[column]["seconds"]) for w in (16, 128)]
        assert line(axes, column) == ([16, 128], expected)
    colour = panel(drawn["latent-diffusion-cifar10-time"], "L = 1,024 steps")
    assert line(colour, "printed")[1][1] is None, "out of memory"
    assert "As printed, out of memory in 1 cell." in drawn["latent-diffusion-cifar10-time"].caption


def test_a_violin_for_every_cell(latent, drawn):
    drawing = drawn["latent-diffusion-mnist-speedup"]
    for title, baseline in (("over eager loop", "loop"), ("over CUDA graph", "graph")):
        axes = panel(drawing, title)
        bodies = [each for each in axes.collections if each.get_gid() == "violin"]
        assert len(bodies) == 4
        record = cell(latent, data="mnist", w=16, L=256)
        slow = record[baseline]["seconds"]
        ratios = [slow[k % len(slow)] / fast for k, fast in enumerate(record["auto"]["seconds"])]
        heights = bodies[0].get_paths()[0].vertices[:, 1]
        assert heights.min() == pytest.approx(min(ratios))
        assert heights.max() == pytest.approx(max(ratios))
    assert "64 samples at a time" in drawing.caption
    assert "0.8×" in drawing.caption


def test_distances_and_their_intervals(latent, drawn):
    axes = panel(drawn["latent-diffusion-mnist-distance"], "parallel − loop")
    points = sorted(float(each.get_ydata()[0]) for each in axes.lines if each.get_gid() == "difference")
    records = [cell(latent, data="mnist", w=w, L=length) for w in (16, 128) for length in (256, 1024)]
    assert points == sorted(record["frechet"]["difference"] for record in records)


def test_shares_add_up(drawn):
    drawing = drawn["latent-diffusion-mnist-phases"]
    for title, phases in (
        ("DeepPCR as printed", ("jacobian", "linear", "rest")),
        ("DeepPCR, defaults", ("network", "rest")),
    ):
        bars = panel(drawing, title).patches
        assert [bar.get_gid() for bar in bars] == 2 * list(phases)
        for number in range(2):
            mine = bars[number * len(phases) : (number + 1) * len(phases)]
            assert sum(bar.get_height() for bar in mine) == pytest.approx(100)
    assert "Jacobians and values 70%" in drawing.caption


def test_pictures_are_those_of_the_file(latent, drawn):
    drawing = drawn["latent-diffusion-mnist-images"]
    record = cell(latent, data="mnist", w=128, L=1024)
    for axes, way in zip(drawing.canvas.axes[-2:], ("sequential", "parallel"), strict=True):
        (image,) = axes.images
        pixels = np.asarray(image.get_array())
        expected = unpack(record["pictures"][way])[3, 0].numpy()
        place = pixels[:, 3 * 36 : 3 * 36 + 32]
        assert (place[..., :3] == expected[..., None]).all()
        assert (place[..., 3] == 255).all()
        assert (pixels[:, 32:36, 3] == 0).all(), "room between pictures is transparent"
    assert "pixels differ by at most 3 of 255 shades" in drawing.caption
    assert drawing.figure().svg.count("data:image/png;base64,") == 4


def test_with_and_without_classes():
    result = made_up_diffusion.pixel_result(PIXEL)
    drawn = draw(result)
    axes = panel(drawn["pixel-diffusion-classes"], "L = 256 steps")
    record = cell(result, side=16, conditional="yes", L=256)
    expected = median(record["loop"]["seconds"]) / median(record["auto"]["seconds"])
    assert line(axes, "yes auto")[1][1] == pytest.approx(expected)
    only = draw(made_up_diffusion.pixel_result(replace(PIXEL, conditional=("no",))))
    assert "pixel-diffusion-classes" not in only
    assert not any("conditional" in name for name in only)


def test_errors_after_every_iteration():
    settings = replace(diffusion_iterations.FULL, widths=(16,), sides=(4, 16), steps=(256,))
    result = made_up_diffusion.iterations_result(settings)
    drawn = draw(result)
    record = result["records"][0]
    x, y = line(panel(drawn["diffusion-iterations-latent"], "w = 16"), "printed L=256")
    assert x == list(range(31))
    assert y == record["errors"]["printed"][0]
    assert "not reached in 1 of 2 cells" in drawn["diffusion-iterations-pixel"].caption


def test_starts():
    settings = replace(diffusion_guess.FULL, sides=(4, 8), steps=(256,))
    result = made_up_diffusion.guess_result(settings)
    drawn = draw(result)
    axes = panel(drawn["diffusion-guess-conditional"], "DeepPCR, defaults")
    assert {each.get_gid() for each in axes.lines} == set(diffusion_guess.GUESSES)
    (record,) = [
        each
        for each in result["records"]
        if (each["side"], each["conditional"], each["guess"]) == (8, "yes", "class-mean")
    ]
    counts = record["auto"]["iterations"]
    assert line(axes, "class-mean")[1][1] == pytest.approx(sum(counts) / len(counts))
    without = panel(drawn["diffusion-guess-unconditional"], "DeepPCR, defaults")
    assert "class-mean" not in {each.get_gid() for each in without.lines}


@pytest.mark.parametrize("printed", [True, False])
def test_a_cpu_one_size_one_length(printed):
    """No graph, one cell, one run; as printed it may not have fit."""
    settings = replace(latent_diffusion.QUICK, widths=(8,), steps=(64,), runs=1)
    result = made_up_diffusion.latent_result(settings, device="cpu")
    if not printed:
        result["records"][1]["printed"] = {"status": "out of memory"}
    drawn = draw(result)
    titles = [axes.get_title(loc="left") for axes in drawn["latent-diffusion-digits-speedup"].canvas.axes]
    assert titles == ["over eager loop"]
    shown = panel(drawn["latent-diffusion-digits-phases"], "DeepPCR as printed")
    assert bool(shown.texts) != printed
    if not printed:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert all(drawn[f"latent-diffusion-digits-{name}"].figure() for name in ("speedup", "newton", "phases"))


def test_nothing_but_training():
    result = made_up_diffusion.latent_result(LATENT)
    result["records"] = [record for record in result["records"] if "part" in record]
    assert figures.drawings(result) == []
