"""What all figures have: whole SVG elements, axes with labels, captions, and the same bytes every time."""

import json
import re
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
import matplotlib
from matplotlib.legend import Legend
from matplotlib.text import Text

import made_up
import made_up_diffusion
from deeppcr_paper import (
    figures,
)
from deeppcr_paper.catalogue import EXPERIMENTS
from deeppcr_paper.figures import style
from drawing_support import ERRORS, MEMORY, NEWTON, TIMING, silent

ROOT = Path(__file__).resolve().parents[3]
#: Experiments that have nothing to draw.
WITHOUT: set[str] = set()


#: Figures that are made like others: to write one down takes up to a second.
ALIKE = re.compile(
    "-backward$|^hardware|^mlp-printed|training-(accuracy|seeds)$|-mnist-(speedup|distance)$|pixel-diffusion-(?!classes)"
    "|-unconditional$|iterations-pixel$"
)


@pytest.mark.parametrize("experiment", [each.name for each in EXPERIMENTS])
def test_every_experiment_has_a_figure(experiment, drawings):
    assert (experiment in WITHOUT) != bool(drawings.get(experiment))


def test_an_unknown_experiment_has_none():
    assert figures.draw({"experiment": "network-timing", "records": []}) == []


def cut_off(drawing: figures.Drawing) -> list[Text]:
    """Matplotlib makes room for the labels of axes, not for the width of titles and legends."""
    canvas = drawing.canvas
    words = [each for axes in canvas.axes for each in axes.get_children() if isinstance(each, Text)]
    extents = [(each, each.get_window_extent()) for each in words + canvas.findobj(Legend)]
    return [each for each, place in extents if place.x0 < -1 or place.x1 > canvas.bbox.x1 + 1]


def test_no_title_or_legend_is_cut_off(drawings):
    """How wide a panel is depends on its numbers: the longest titles are looked at over the committed ones.

    Figures that are written are looked at below: that lays them out, too.
    """
    found = [path.read_text(encoding="utf-8") for path in (ROOT / "results").glob("mlp-printed-*.json")]
    looked_at = [figures.drawings(json.loads(text))[0] for text in found]
    looked_at += [drawing for each in drawings.values() for drawing in each if ALIKE.search(drawing.name)]
    for drawing in looked_at:
        with style.context():
            drawing.canvas.draw_without_rendering()
        assert cut_off(drawing) == []


def test_svg_stands_by_itself_in_a_page(drawings):
    every = [drawing for each in drawings.values() for drawing in each]
    assert len({drawing.name for drawing in every}) == len(every)
    written, ids = [drawing for drawing in every if not ALIKE.search(drawing.name)], []
    for drawing in written:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure = drawing.figure()
        assert cut_off(drawing) == []
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


def test_values_at_the_top_stay_clear_of_the_bar():
    """Also where all of them are nearly as large, so that a part of how far they are apart is nothing."""
    with figures.style.context():
        _, (axes,) = figures.panels.panels(1)
        axes.plot([9.9, 10.0])
        figures.panels.same_y([axes], zero=True)
        low, high = axes.get_ylim()
    assert low == 0
    assert high >= 10.7


def test_full_size_stays_small():
    """A page holds dozens of them: those of the documentation, from full runs."""
    committed = list((Path(__file__).resolve().parents[3] / "docs" / "paper").glob("*.svg"))
    assert committed
    assert max(path.stat().st_size for path in committed) < 250_000
