"""The report in a real browser: Chromium, headless.

Where Chromium or its driver is missing these tests are skipped, unless DEEPPCR_BROWSER=required.
"""

import base64
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from browser_support import REQUIRED, Page, contrast, seconds_of, start

if not REQUIRED:
    for name in ("rich", "matplotlib"):
        pytest.importorskip(name)
from deeppcr_paper import mlp_timing
from deeppcr_paper.catalogue import EXPERIMENTS
from deeppcr_paper.claims.results import collect
from deeppcr_paper.figures import Figure
from deeppcr_paper.mlp_summary import repeats_of
from deeppcr_paper.report.page import make_page
from small_results import timing_content, write

ROOT = Path(__file__).resolve().parents[2]
#: A machine that does not exist, with the paper's sizes: a large map, with cells that ran out of memory.
IMAGINARY = replace(mlp_timing.FULL, activations=("relu", "sigmoid"))
#: Another one, with few sizes and without a CUDA graph.
SMALL = replace(mlp_timing.QUICK, activations=("relu", "tanh"), depths=(2, 64), widths=(2, 4))
#: Of these there is no committed result yet.
NOT_RUN = {"mlp-printed"} - {path.name[:11] for path in (ROOT / "results").glob("mlp-printed-*.json")}
#: The page of the committed results: every figure is drawn in it, and another test holds it to those results.
COMMITTED = ROOT / "docs" / "report.html"


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A page of quick runs, beside which committed results stand: its path and its results."""
    folder = tmp_path_factory.mktemp("report")
    write(folder, timing_content(quick=True, like=IMAGINARY), "imaginary.json")
    small = {**timing_content(quick=True, like=SMALL, hardware="Small CPU"), "device": "cpu"}
    for record in small["records"]:
        for way in ("forward", "backward"):
            del record[way]["graph"]
    write(folder, small, "small.json")
    results = collect([folder], [ROOT / "results"])
    figure = Figure("flat", "A line", "fig. 3", "It is flat.", '<svg viewBox="0 0 2 1"><path d="M0 0H2"/></svg>')
    path = folder / "report.html"
    path.write_text(make_page(results, lambda result: [figure]), encoding="utf-8")
    return path, results


@pytest.fixture(scope="session")
def chromium():
    browser = start()
    yield browser
    browser.quit()


@pytest.fixture
def open_page(chromium):
    chromium.get_log("browser"), chromium.get_log("performance")  # what earlier tests left
    page = Page(chromium, COMMITTED)
    yield page
    assert page.severe() == []


@pytest.fixture
def page(open_page, made):
    """Of quick runs."""
    open_page.path = made[0]
    return open_page


@pytest.fixture
def committed(open_page):
    return open_page


@pytest.fixture
def imaginary(made):
    """The records of the map of the machine that does not exist, by activation, depth and width."""
    (result,) = [each for each in made[1] if each.hardware == "NVIDIA Imaginary"]
    return {(record["activation"], record["L"], record["w"]): record for record in result.records}


def ratio_of(record, way, method, baseline):
    return median(repeats_of(record[way][baseline])) / median(repeats_of(record[way][method]))


def test_opens_without_an_error_and_asks_for_nothing(committed):
    page = committed.open()
    assert page.find("h1").text == "DeepPCR: the paper's claims and our figures"
    events = [json.loads(entry["message"])["message"] for entry in page.browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert page.path.as_uri() in asked
    assert {url.partition(":")[0] for url in asked} <= {"file", "data"}
    assert {url for url in asked if url.startswith("file")} == {page.path.as_uri()}
    loads = page.run("return [...document.querySelectorAll('[src], link[href]')].map(e => e.src || e.href)")
    assert all(load.startswith("data:") for load in loads)
    assert "url(http" not in page.path.read_text(encoding="utf-8")


def test_every_figure_is_there_with_its_command_and_hardware(committed):
    every = collect([ROOT / "results"])  # of a training by both methods two
    results = {each.name: each for each in every}
    shown = committed.open().run("""return [...document.querySelectorAll('figure')].map(figure => {
        const size = figure.querySelector('svg').getBoundingClientRect();
        return {name: figure.dataset.figure, section: figure.closest('section').id, width: size.width,
                height: size.height, paths: figure.querySelectorAll('svg path').length,
                pictures: figure.querySelectorAll('svg image').length,
                command: figure.querySelector('.made code').textContent, made: figure.querySelector('.made').textContent,
                caption: figure.querySelector('figcaption').textContent};
    })""")
    assert (
        {each["section"] for each in shown}
        == set(results)
        == {each.name for each in EXPERIMENTS} - {"hardware"} - set(NOT_RUN)
    )
    for each in shown:
        result = results[each["section"]]
        assert each["width"] > 300
        assert each["height"] > 100
        # Samples are pictures, all else is drawn.
        assert each["pictures"] >= 2 if each["name"].endswith("-images") else each["paths"] > 10
        assert len(each["caption"]) > len(each["made"]) + 20
        assert result.hardware in each["made"]
        assert "torch" in each["made"]
        assert "commit" in each["made"]
        assert each["command"] in [one.command for one in every if one.name == result.name]


@pytest.mark.parametrize("which", ["page", "committed"])
def test_names_are_unique_and_references_lead_somewhere(which, request):
    page = request.getfixturevalue(which).open()
    names = page.run("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(names) == len(set(names))
    lost = page.run("""return [...document.querySelectorAll('[href^="#"]')].map(e => e.getAttribute('href').slice(1))
        .filter(name => !document.getElementById(name))""")
    assert lost == []


def test_every_item_has_its_verdict_and_what_was_not_run_here_is_committed(page):
    page.open()
    assert not page.find("table.summary").is_displayed()  # folded away: the summary is short
    page.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    items = page.run("""return [...document.querySelectorAll('table.summary > tbody')].map(item => ({
        name: item.id, verdict: item.querySelector('.item .badge').textContent,
        sources: [...item.querySelectorAll('.source')].map(each => each.innerText)}))""")
    assert len(items) == 26
    overview = page.run("return [...document.querySelectorAll('.overview .badge')].map(each => each.textContent)")
    assert overview == [each["verdict"] for each in items]
    sources = {each["name"]: each["sources"] for each in items}
    plain, first, second, third = sorted(sources["Figure-3"], key=lambda each: "in plain PyTorch" not in each)
    assert "committed result at full size" in plain
    assert "Imaginary" in first and "Small CPU" in second  # noqa: PT018
    assert "quick run: small sizes, at most L = 64" in second.replace("\u00a0", " ")
    assert "NVIDIA H200, 2026-" in third and "committed result at full size" in third  # noqa: PT018
    printed, training = sources["Figure-5"]
    assert "trained as printed" in printed and "agrees" in printed  # noqa: PT018
    assert "committed result at full size" in training
    (none,) = sources["Figure-12"]
    assert none.startswith("not measured yet")


@pytest.mark.parametrize(
    ("activation", "way", "method", "baseline"),
    [
        ("relu", "forward", "printed", "loop"),
        ("sigmoid", "forward", "auto", "graph"),
        ("relu", "backward", "printed", "graph"),
    ],
)
def test_cells_answer_with_their_numbers(page, imaginary, activation, way, method, baseline):
    page.open()
    page.choose(activation=activation, direction=way, method=method, baseline=baseline)
    for depth, width in ((2, 2), (1024, 16), (16384, 4), (128, 512)):
        page.click(depth, width)
        record, said = imaginary[activation, depth, width], page.readout()
        assert f"L = {depth:,}, w = {width:,}" in said["title"]
        assert way in said["title"]
        ratio = float(re.match(r"[\d.,]+", said["verdict"])[0].replace(",", ""))
        assert ratio == pytest.approx(ratio_of(record, way, method, baseline), rel=0.06)
        assert ("the loop is faster" in said["verdict"]) == (ratio_of(record, way, method, baseline) < 1)
        assert set(said["columns"]) == {"loop", "graph", "printed", "auto"}
        for name, (time, iterations, error) in said["columns"].items():
            entry = record[way][name]
            assert seconds_of(time) == pytest.approx(median(repeats_of(entry)), rel=6e-3)
            counted = way == "forward" and "iterations" in entry
            assert iterations == (str(entry["iterations"]) if counted else "–")
            assert float(error) == pytest.approx(entry["error"], rel=0.06)
        compared = [row.get_attribute("data-column") for row in page.all("#map-readout tr.compared")]
        assert set(compared) == {method, baseline}


def test_a_cell_that_ran_out_of_memory_says_so(page, imaginary):
    page.open()
    cell = page.click(16384, 1024)
    said = page.readout()
    assert imaginary["relu", 16384, 1024]["forward"]["printed"]["status"] == "out of memory"
    assert "out of memory" in said["verdict"]
    assert said["columns"]["printed"][0] == "out of memory"
    assert "untimed" in cell.get_attribute("class")
    assert "out of memory" in cell.get_attribute("aria-label")


def test_arrow_keys_go_from_cell_to_cell(page):
    from selenium.webdriver.common.keys import Keys

    page.open()
    page.click(64, 8)
    for key, sizes in (
        (Keys.ARROW_RIGHT, "L = 128, w = 8"),
        (Keys.ARROW_UP, "L = 128, w = 16"),
        (Keys.ARROW_LEFT, "L = 64, w = 16"),
        (Keys.ARROW_DOWN, "L = 64, w = 8"),
    ):
        page.browser.switch_to.active_element.send_keys(key)
        assert sizes in page.readout()["title"]
    assert len(page.all(".map-cell[tabindex='0']")) == 1
    page.click(16384, 2)
    page.browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)  # no further: it does not wrap around
    assert "L = 16,384, w = 2" in page.readout()["title"]
    assert page.find("#map-readout").get_attribute("aria-live") == "polite"


def test_what_is_linked_to_unfolds(committed):
    page = committed.open()
    assert not page.find("#Figure-14").is_displayed()
    page.find(".opening a[href='#Figure-14']").click()
    assert page.find("#Figure-14").is_displayed()


def test_the_page_opens_with_claims_and_verdicts_in_two_screens(committed):
    page = committed.open()
    assert len(page.all(".opening tbody tr")) == 10
    assert {badge.text for badge in page.all(".opening .badge")} <= {"yes", "no", "open"}
    assert page.run("return document.querySelector('#summary').getBoundingClientRect().height") < 2 * 900
    titles = [each.text for each in page.all("section h2")]
    assert not [title for title in titles if "quick" in title]


def test_a_map_has_no_rows_in_which_nothing_was_measured(committed):
    page = committed.open()
    for activation, rows in (("relu", 10), ("tanh", 4), ("sigmoid", 4)):
        page.choose(activation=activation)
        assert len(page.all(".map-side")) == rows
        assert not [cell for cell in page.all(".map-cell") if cell.get_attribute("aria-label").endswith("not measured")]


def test_every_selector_changes_the_map(page):
    page.open()

    def cells():
        return page.run("""return [...document.querySelectorAll('.map-cell')].map(
            cell => cell.ariaLabel + getComputedStyle(cell).backgroundColor)""")

    for name, value in (
        ("baseline", "graph"),
        ("method", "auto"),
        ("activation", "sigmoid"),
        ("direction", "backward"),
        ("map", 1),
    ):
        before = cells()
        page.choose(**{name: value})
        assert page.find(f"#map-{name}").get_attribute("value") == str(value)
        changed = sum(one != other for one, other in zip(before, cells(), strict=False))
        assert changed > len(cells()) / 2
    # The second map is of another machine, with other sizes and without a CUDA graph.
    assert len(page.all(".map-cell")) == 4
    assert [option.get_attribute("value") for option in page.all("#map-baseline option")] == ["loop"]
    assert page.find("#map-activation").get_attribute("value") == "relu"


def test_the_line_is_where_the_speedup_is_one(page, imaginary):
    page.open()
    path = page.find(".map-line path").get_attribute("d")
    points = [tuple(map(float, point)) for point in re.findall(r"([\d.]+),([\d.]+)", path)]
    depths, widths = IMAGINARY.depths, IMAGINARY.widths[::-1]
    expected = []
    for (row, width), (column, (depth, deeper)) in itertools.product(
        enumerate(widths), enumerate(itertools.pairwise(depths))
    ):
        entries = [imaginary["relu", each, width]["forward"]["printed"] for each in (depth, deeper)]
        if any("seconds" not in entry for entry in entries):
            continue
        low, high = (
            math.log(ratio_of(imaginary["relu", each, width], "forward", "printed", "loop")) for each in (depth, deeper)
        )
        if low < 0 <= high:
            expected.append((column + 0.5 - low / (high - low), row + 0.5))
    assert len(expected) >= 3
    for x, y in expected:
        assert any(abs(x - a) < 0.01 and abs(y - b) < 0.01 for a, b in points)
    # It is drawn over the cells, not beside them.
    inside = page.run("""const line = document.querySelector('.map-line').getBoundingClientRect();
        const cells = [...document.querySelectorAll('.map-cell')].map(cell => cell.getBoundingClientRect());
        return [line.left - cells[0].left, line.top - cells[0].top, line.right - cells.at(-1).right, line.bottom - cells.at(-1).bottom]""")
    assert all(abs(difference) < 1 for difference in inside)
    page.choose(direction="backward", method="auto", baseline="loop")
    assert page.find(".map-line path").get_attribute("d") != path


@pytest.mark.parametrize("which", ["page", "committed"])
def test_reads_well_on_a_phone(which, request):
    page = request.getfixturevalue(which).open(375)
    assert page.run("return document.documentElement.scrollWidth") <= 375
    page.run("window.scrollTo(200, 0)")
    assert page.run("return window.scrollX") == 0
    page.run("document.querySelectorAll('details').forEach(each => each.open = true)")  # a wide table scrolls by itself
    beyond = page.run("""return [...document.querySelectorAll('main *, header *, footer *')]
        .filter(e => !e.closest('svg') && !e.closest('.scroll table'))
        .filter(e => { const box = e.getBoundingClientRect(); return box.width > 1 && (box.right > 376 || box.left < -1); })
        .map(e => e.outerHTML.slice(0, 80))""")
    assert beyond == []
    sizes = page.run("""const size = selector => Math.min(...[...document.querySelectorAll(selector)].map(
        e => parseFloat(getComputedStyle(e).fontSize))); return {text: size('p:not(.kicker):not(.summary p)'),
        caption: size('figcaption'), made: size('.made, .made *'), checks: size('.summary > tbody > tr > *'), map: size('.map-cell')}""")
    assert sizes["text"] >= 16
    assert sizes["caption"] >= 15
    assert sizes["made"] >= 14
    assert sizes["checks"] >= 14
    assert sizes["map"] >= 11
    cells = page.run(
        "return [...document.querySelectorAll('.map-cell')].map(e => [e.offsetWidth, e.offsetHeight, e.scrollWidth])"
    )
    assert min(width for width, _, _ in cells) >= 24
    assert min(height for _, height, _ in cells) >= 24
    assert all(text <= width for width, _, text in cells)  # no number is cut off
    if which == "committed":
        smallest = page.run("""return Math.min(...[...document.querySelectorAll('figure svg text')].map(
            text => parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a))""")
        assert smallest >= 7


def test_the_map_answers_on_a_phone(page, imaginary):
    page.open(375)
    page.click(1024, 16)
    assert "L = 1,024, w = 16" in page.readout()["title"]
    ratio = float(re.match(r"[\d.,]+", page.readout()["verdict"])[0])
    assert ratio == pytest.approx(ratio_of(imaginary["relu", 1024, 16], "forward", "printed", "loop"), rel=0.06)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_can_be_read(page, scheme):
    page.open(scheme=scheme)
    page.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    colours = """const style = getComputedStyle(document.querySelector(arguments[0]));
        let behind = document.querySelector(arguments[0]);
        while (getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
        return [style.color, getComputedStyle(behind).backgroundColor]"""
    for selector in (
        "body",
        "figcaption",
        ".quiet",
        ".made",
        ".tag",
        ".note",
        "nav a",
        ".badge.yes",
        ".badge.no",
        ".badge.open",
        ".badge.agrees-in-part",
        ".why td",
        ".map-head",
        "select",
    ):
        assert contrast(*page.run(colours, selector)) >= 4.5, selector
    shown = page.run("""return [...document.querySelectorAll('.map-cell:not(.untimed)')].map(e => {
        const style = getComputedStyle(e); return [style.color, style.backgroundColor]; })""")
    assert min(contrast(*each) for each in shown) >= 4.5
    dark = contrast(page.run(colours, "body")[1], "rgb(0, 0, 0)") < 2
    assert dark == (scheme == "dark")


def test_prints_in_light_colours(page):
    page.open(scheme="dark")
    page.media("dark", "print")
    assert contrast(page.run("return getComputedStyle(document.body).backgroundColor"), "rgb(255, 255, 255)") < 1.2
    assert not page.find("nav").is_displayed()
    assert page.find("table.summary").is_displayed()
    pdf = base64.b64decode(page.browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert pdf.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 5
