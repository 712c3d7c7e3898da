"""The report without a browser: which results it takes, and what its table says."""

import html
import json
import re
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import deeppcr
import made_up
import made_up_diffusion
from deeppcr_paper import (
    compare_hardware,
    diffusion_guess,
    diffusion_iterations,
    latent_diffusion,
    mlp_gain,
    mlp_memory,
    mlp_newton,
    mlp_timing,
    pixel_diffusion,
    resnet_ablations,
    resnet_training,
    store,
)
from deeppcr_paper.catalogue import EXPERIMENTS
from deeppcr_paper.claims import trainings
from deeppcr_paper.claims.answers import answer, every_answer, verdict_of
from deeppcr_paper.claims.check import NO, OPEN, YES, Check, Verdict
from deeppcr_paper.claims.items import ITEMS, Part
from deeppcr_paper.claims.results import Finished, collect
from deeppcr_paper.experiment import Context
from deeppcr_paper.report import build, page, speedup_map
from small_results import TINY, timing_content, write

ROOT = Path(__file__).resolve().parents[3]


def finished(content, tmp_path):
    return Finished(tmp_path / "made.json", content)


def kept(*folders):
    return [(each.path.name, each.quick) for each in collect(folders)]


# Which results


def test_the_newest_of_each_machine(tmp_path):
    write(tmp_path, timing_content(end="2026-01-02T00:00:00+00:00"), "old.json")
    write(tmp_path, timing_content(end="2026-03-02T00:00:00+00:00"), "new.json")
    write(tmp_path, timing_content(end="2026-02-02T00:00:00+00:00"), "middle.json")
    write(tmp_path, timing_content(hardware="Another"), "another.json")
    assert kept(tmp_path) == [("another.json", False), ("new.json", False)]


def test_full_results_win_over_newer_quick_ones(tmp_path):
    write(tmp_path, timing_content(end="2026-01-02T00:00:00+00:00"), "full.json")
    write(tmp_path, timing_content(quick=True, end="2026-05-02T00:00:00+00:00"), "quick.json")
    write(tmp_path, timing_content(quick=True, hardware="Another"), "quick-elsewhere.json")
    assert kept(tmp_path) == [("full.json", False)]
    (tmp_path / "full.json").unlink()
    assert kept(tmp_path) == [("quick-elsewhere.json", True), ("quick.json", True)]


def test_several_folders_and_what_is_no_result(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    write(one, timing_content(), "one.json")
    write(other, timing_content(hardware="Another"), "other.json")
    (one / "core-benchmark.json").write_text('{"experiment": "core", "cases": []}')
    (one / "list.json").write_text("[1, 2]")
    (one / f"cut-off{store.PARTIAL}").write_text('{"schema": 1, "rec')
    write(one, {**timing_content(hardware="Third"), "complete": False}, "unfinished.json")
    assert kept(one, other) == [("other.json", False), ("one.json", False)]
    assert kept(one, one) == [("one.json", False)]


def test_a_full_run_with_other_settings_does_not_hide_one_as_in_the_paper(tmp_path):
    write(tmp_path, timing_content(end="2026-01-02T00:00:00+00:00"), "paper.json")
    smaller = timing_content(like=replace(mlp_timing.FULL, depths=(64,)), end="2026-05-02T00:00:00+00:00")
    write(tmp_path, smaller, "smaller.json")
    write(tmp_path, timing_content(quick=True, end="2026-06-02T00:00:00+00:00"), "quick.json")
    assert kept(tmp_path) == [("paper.json", False)]
    (tmp_path / "paper.json").unlink()
    assert kept(tmp_path) == [("smaller.json", False)]
    assert "changed settings: depths" in page.make_page(collect([tmp_path]))


def test_a_training_names_its_images(tmp_path):
    for data, name in (("digits", "scikit-learn's digits"), ("mnist", "MNIST")):
        content = {**timing_content(), **settings_of("resnet-training", quick=True, data=data)}
        result = finished(content, tmp_path)
        assert result.images == name
        assert ("on scikit-learn's digits" in result.remark) == (data == "digits")
        assert f"<span>images: {html.escape(name).replace('&#x27;', '&#39;')}</span>" in page.make_page([result])
    assert finished(timing_content(), tmp_path).images == ""


def test_the_page_explains_the_names_of_methods(tmp_path):
    made = page.make_page([finished(timing_content(), tmp_path)])
    for name, words in (
        ("as printed", "its stopping test"),
        ("defaults", "stricter test"),
        ("fused loop", "one kernel"),
    ):
        assert re.search(f"<li><strong>[^<]*{name}</strong>: [^<]*{words}", made)


def test_a_quick_run_says_what_was_changed(tmp_path):
    write(tmp_path, timing_content(quick=True, like=replace(mlp_timing.QUICK, depths=(64,))))
    made = page.make_page(collect([tmp_path])).replace("\u00a0", " ")
    assert made.count("quick run: small sizes, at most L = 64; changed settings: depths") >= 3
    assert "not measured yet:</span> <code>deeppcr-paper reproduce hardware FILE1 FILE2" in made


def settings_of(name, quick=False, **changes):
    (experiment,) = [each for each in EXPERIMENTS if each.name == name]
    made = replace(experiment.quick if quick else experiment.full, **changes)
    return {"experiment": name, "quick": quick, "settings": store.as_json(asdict(made))}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (settings_of("mlp-timing"), "mlp-timing --device cuda"),
        (settings_of("mlp-timing", quick=True), "mlp-timing --quick --device cuda"),
        (settings_of("mlp-newton", seed=3), "mlp-newton --device cuda --seed 3"),
        (settings_of("hardware", files=("a.json", "b c.json")), "hardware a.json 'b c.json'"),
        (
            settings_of("resnet-training", depths=(64, 256), train=None, test=10),
            "resnet-training --device cuda --set depths=64,256 --set test=10",
        ),
        (settings_of("resnet-guess", quick=True, data="mnist"), "resnet-guess --quick --device cuda --set data=mnist"),
    ],
)
def test_the_command_that_made_it(tmp_path, monkeypatch, content, expected):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, timing_content(), "a.json")
    write(tmp_path, timing_content(hardware="Another"), "b c.json")
    result = finished({**timing_content(), **content}, tmp_path)
    assert result.command == f"deeppcr-paper reproduce {expected}"
    # And it makes those settings.
    changes = [f"{name}={value}" for name, value in result.changes.items()]
    context = Context(torch.device("cpu"), files=tuple(map(Path, content["settings"].get("files", ()))))
    seed = content["settings"]["seed"]
    made = result.experiment.settings(context, quick=result.quick, seed=seed, changes=changes)
    assert store.as_json(asdict(made)) == content["settings"]


def test_what_a_figure_is_read_with(tmp_path):
    content = timing_content()
    result = finished(content, tmp_path)
    (line,) = result.conditions
    for part in ("NVIDIA Imaginary", "CUDA 13.0", "torch 2.13.0", "deeppcr 0.1.0", "2026-01-01", "abc1234"):
        assert part in line
    content["sessions"].append({**content["sessions"][0], "commit": "fff9999"})
    assert len(result.conditions) == 2
    assert all(line in page.make_page([result]) for line in result.conditions)


def test_a_result_of_an_experiment_that_is_no_more(tmp_path):
    content = {**timing_content(), "experiment": "of-yesterday", "settings": {"seed": 1}}
    html = page.make_page([finished(content, tmp_path)])
    assert "deeppcr-paper reproduce of-yesterday --device cuda --seed 1" in re.sub("</?b>", "", html)


# The claims


def quick_results():
    """Of every experiment a small one."""
    made = [
        made_up.mlp_timing_result(mlp_timing.QUICK),
        {**made_up.mlp_timing_result(mlp_timing.QUICK, ("loop", "printed")), "experiment": "mlp-printed"},
        made_up.mlp_memory_result(mlp_memory.QUICK),
        made_up.mlp_newton_result(mlp_newton.QUICK),
        made_up.mlp_gain_result(mlp_gain.QUICK),
        made_up.hardware_result(mlp_timing.QUICK),
        made_up.resnet_training_result(resnet_training.QUICK, points=4),
        made_up.ablation_result("resnet-iterations", resnet_ablations.ITERATIONS_QUICK, points=4),
        made_up.ablation_result("resnet-guess", resnet_ablations.GUESS_QUICK, points=4),
        made_up_diffusion.latent_result(latent_diffusion.QUICK),
        made_up_diffusion.pixel_result(pixel_diffusion.QUICK),
        made_up_diffusion.iterations_result(diffusion_iterations.QUICK),
        made_up_diffusion.guess_result(diffusion_guess.QUICK),
    ]
    return [Finished(Path(f"{each['experiment']}.json"), {**each, "quick": True}) for each in made]


def test_quick_runs_answer_every_item():
    results = quick_results()
    assert {each.name for each in results} == {each.name for each in EXPERIMENTS}
    missing = {
        "Figure 7": ["latent-diffusion"],
        "Figure 13": ["mlp-timing"],
    }  # of images in colour, of a second machine
    for row in page.rows(results):
        assert [part.experiment for part in row.missing if part.needs is not trainings.as_printed] == missing.get(
            row.item.label, []
        )
        assert all(each.checks for each in row.answers), row.item.label
    assert "not measured yet" in page.make_page(results)


@pytest.mark.thorough
def test_runs_of_a_few_steps_answer_every_item(tmp_path, monkeypatch):
    """As they come, with what did not converge."""
    pytest.importorskip("sklearn")
    monkeypatch.setattr(
        compare_hardware, "GRID", replace(compare_hardware.GRID, depths=(16,), widths=(2,), budget=0.01)
    )
    for each in EXPERIMENTS:
        small = replace(each, quick=replace(each.quick, **TINY[each.name]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
            small.run(Context(torch.device("cpu")), tmp_path, quick=True)
    for row in page.rows(collect([tmp_path])):
        assert all(each.checks for each in row.answers), row.item.label
        assert row.answers or not row.item.parts or row.item.label in ("Figure 7", "Figure 10", "Figure 13")


def test_some_of_the_records_are_enough():
    """An experiment with other settings may have one size, one data set, one guess."""
    for result in quick_results():
        for record in result.records:
            one = replace(result, content={**result.content, "records": [record]})
            for item in ITEMS:
                assert verdict_of(item, every_answer(item, [one])) in Verdict


def test_small_sizes_refute_no_claim_about_large_ones(tmp_path):
    claimed = [
        Check(what="fast", holds=NO, rule="speed-up", why="slow"),
        Check(what="right", holds=NO, rule="bounded"),
        Check(what="few", holds=YES, rule="at most 6"),
    ]
    part = Part("mlp-timing", read=lambda result: claimed)
    full = answer(part, finished(timing_content(), tmp_path))
    assert full.checks == claimed
    quick = answer(part, finished(timing_content(quick=True), tmp_path))
    assert [check.holds for check in quick.checks] == [OPEN, NO, YES]
    assert "larger sizes" in quick.checks[0].why
    (item,) = [item for item in ITEMS if item.label == "Figure 3"]
    right = replace(quick, checks=[check for check in quick.checks if check.holds != NO])
    assert [verdict_of(item, [each]) for each in (full, quick, right)] == [Verdict.PARTLY, Verdict.PARTLY, Verdict.OPEN]
    assert verdict_of(item, [right, replace(full, checks=claimed[:1])]) is Verdict.DIFFERS  # by what is of full size


def test_the_table_has_the_checks_of_every_machine(tmp_path):
    one, other = timing_content(), timing_content(hardware="Another", scale=1e-3)
    write(tmp_path, one, "one.json")
    write(tmp_path, other, "other.json")
    (row,) = [row for row in page.rows(collect([tmp_path])) if row.item.label == "Figure 3"]
    assert [each.result.hardware for each in row.answers] == ["Another", "NVIDIA Imaginary"]
    slow, fast = (each.checks[2] for each in row.answers)
    best = max(
        median(record["forward"]["loop"]["seconds"]) / median(record["forward"]["printed"]["seconds"])
        for record in one["records"]
        if record["activation"] == "relu" and "seconds" in record["forward"]["printed"]
    )
    assert (slow.holds, fast.holds, row.verdict) == (NO, OPEN, Verdict.PARTLY)  # 33 times, for 30
    assert fast.printed.startswith(f"{best:.0f}× (L = 16,384, w = 2: ")
    html = page.make_page(collect([tmp_path]))
    table = html.partition('<tbody id="Figure-3">')[2].partition("</tbody>\n<tbody id")[0]
    assert table.count('class="badge no"') >= 1
    assert table.count('class="badge agrees-in-part"') >= 1
    assert re.search(
        r'data-label="Fastest loop">printed [\d.]+×; defaults', table
    )  # the stronger loops are not left out


def test_claims_that_nobody_measured_say_how(tmp_path):
    result = finished(timing_content(), tmp_path)
    missing = {part.experiment for row in page.rows([result]) for part in row.missing}
    assert missing == {part.experiment for item in ITEMS for part in item.parts}  # mlp-timing of a second machine
    assert {row.verdict for row in page.rows([result])} >= {Verdict.NOT_RUN, Verdict.NOTHING_MEASURED}


# Committed results stand in


def test_what_was_not_run_here_is_shown_from_the_committed_results(tmp_path):
    write(tmp_path / "mine", timing_content(quick=True))
    write(tmp_path / "mine", {**made_up.mlp_memory_result(mlp_memory.QUICK), "end": "2026-02-01"}, "full.json")
    mine, committed = tmp_path / "mine", tmp_path / "committed"
    write(committed, timing_content(hardware="Large GPU", end="2026-01-05T00:00:00+00:00"), "timing.json")
    write(committed, {**made_up.mlp_memory_result(), "end": "2026-02-02"}, "memory.json")
    write(committed, {**made_up.mlp_newton_result(), "end": "2026-02-03"}, "newton.json")
    write(committed, timing_content(quick=True, hardware="Third"), "quick.json")
    build([mine], tmp_path / "report.html", fallback=[committed])
    html = (tmp_path / "report.html").read_text().replace("\u00a0", " ")
    found = {(each.name, each.hardware, each.committed) for each in collect([mine], [committed])}
    assert found == {
        ("mlp-timing", "NVIDIA Imaginary", False),
        ("mlp-timing", "Large GPU", True),  # beside a quick one
        ("mlp-memory", "unknown hardware", False),  # a full one needs no other
        ("mlp-newton", "unknown hardware", True),
    }
    assert "mlp-timing on Large GPU, 2026-01-05 " in html
    assert '<span class="tag">committed result at full size, 2026-01-05</span>' in html
    assert "The full-size numbers stand beside them, marked as committed results" in html
    assert "Committed results:</strong>" in html
    assert "Large GPU, 2026-01-05" in html
    assert {each["label"] for each in speedup_map.map_data(collect([mine], [committed]))} == {
        "NVIDIA Imaginary (quick run)",
        "Large GPU (committed)",
    }
    drawn = set(re.findall(r'data-figure="([\w-]+)-\d"', html))
    assert drawn == {"mlp-timing", "mlp-memory"}  # what is committed has its figures elsewhere


@pytest.mark.parametrize("quick", [False, True])
def test_quick_runs_are_called_that_and_say_what_small_sizes_imply(tmp_path, quick):
    html = page.make_page([finished(timing_content(quick=quick), tmp_path)]).replace("\u00a0", " ")
    for words in ("Quick runs, small sizes", "mlp-timing up to L = 1,024.", "grows with L", "docs/paper.md"):
        assert (words in html) == quick
    assert ("quick run: small sizes, at most L = 1,024" in html) == quick


# The page


def test_data_cannot_end_its_element(tmp_path):
    content = timing_content(quick=True, hardware="</script><script>alert(1)</script>")
    html = page.make_page([finished(content, tmp_path)])
    assert "<script>alert" not in html
    inside = re.search(r'<script type="application/json" id="map-data">(.*?)</script>', html)
    assert inside is not None
    assert json.loads(inside[1])[0]["label"].startswith("</script><script>")


def test_the_map_has_every_time(tmp_path):
    content = timing_content()
    (data,) = speedup_map.map_data([finished(content, tmp_path)])
    assert len(data["cells"]) == 2 * len(content["records"])
    for record in content["records"]:
        for way in ("forward", "backward"):
            cell = data["cells"][f"{record['activation']} {way} {record['L']} {record['w']}"]
            for name, entry in record[way].items():
                assert cell[name]["status"] == entry["status"]
                if "seconds" in entry:
                    assert cell[name]["seconds"] == pytest.approx(median(entry["seconds"]), rel=1e-3)
                else:
                    assert "seconds" not in cell[name]


def test_results_of_one_machine_have_headings_of_their_own(tmp_path):
    """Trainings by both methods stand side by side: what differs is in the heading."""
    one, other = made_up.resnet_training_result(), made_up.resnet_training_result()
    one["settings"]["solver"], other["settings"]["solver"] = "paper", "default"
    both = [Finished(tmp_path / "one.json", one), Finished(tmp_path / "other.json", other)]
    headings = re.findall(r'<h3 class="machine">([^<]+)', page.make_page(both))
    assert headings == [f"{both[0].hardware}: {way}" for way in ("DeepPCR as printed", "DeepPCR, defaults")]
    elsewhere = finished(timing_content(quick=True, hardware="Another"), tmp_path)
    assert page.heading(elsewhere, [elsewhere, both[0]]) == "Another"


def test_names_inside_figures_are_unique(tmp_path):
    one = finished(timing_content(quick=True), tmp_path)
    other = Finished(tmp_path / "other.json", timing_content(quick=True, hardware="Another"))
    html = page.make_page([one, other])
    names = re.findall(r'\bid=["\']([^"\']+)', html)
    assert len(names) == len(set(names))
    assert sum(name.endswith("-clip") for name in names) == 4  # two figures of two machines
    targets = set(re.findall(r"url\(#([^)]+)\)", html)) | set(re.findall(r'href="#([^"]+)"', html))
    assert targets
    assert targets <= set(names)
