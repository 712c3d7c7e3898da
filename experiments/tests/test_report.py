"""The report without a browser: which results it takes, what its table says, and one clear line for whatever is wrong."""

import html
import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
from typer.testing import CliRunner

import made_up
import made_up_diffusion
from deeppcr_paper import cli, diffusion_iterations, latent_diffusion, mlp_memory, mlp_newton, mlp_timing, store
from deeppcr_paper.catalogue import EXPERIMENTS
from deeppcr_paper.experiment import Context
from deeppcr_paper.figures import Figure
from deeppcr_paper.report import claims, diffusion_claims, page, speedup_map
from deeppcr_paper.report.collect import Finished, collect
from deeppcr_paper.table import times
from small_results import timing_content, write

SVG = """<svg viewBox="0 0 2 1" role="img" aria-label="A line"><defs><path id="NAME-line" d="M0 0H2"/><clipPath id="NAME-clip">
<rect width="2" height="1"/></clipPath></defs><use href="#NAME-line" clip-path="url(#NAME-clip)"/></svg>"""


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """Figures that cost nothing: what is drawn is tested elsewhere, and on the page in a browser."""

    def draw(content):
        for record in content["records"]:
            if "part" not in record:  # of training
                int(record["L"])  # as the real ones do, it falls over what is damaged
            assert content["experiment"] != "mlp-timing" or record["forward"]
        names = [f"{content['experiment']}-{number}" for number in "12"]
        return [Figure(name, "A line", "fig. 3", "It is flat.", SVG.replace("NAME", name)) for name in names]

    monkeypatch.setattr(page, "draw", draw)


def finished(content, tmp_path):
    return Finished(tmp_path / "made.json", content)


def kept(*folders):
    return [(each.path.name, each.quick) for each in collect(folders)]


def test_numbers_from_some_of_the_cells_say_so(tmp_path):
    """Where the largest networks ran out of memory, a number over the grid is one over the rest of it."""
    newton, memory = made_up.mlp_newton_result(), made_up.mlp_memory_result()
    for activation in ("relu", "sigmoid"):
        mine = [r for r in newton["records"] if (r["activation"], r["guess"]) == (activation, "random")]
        left = f"{sum(r['status'] == 'ok' for r in mine)} of {len(mine)} cells"
        label = f"{claims.activation_name(activation)}, random guess; {left}"
        for ours in (claims.newton_iterations, claims.output_error):
            assert sum(each.where.startswith(label) for each in ours(finished(newton, tmp_path))) == 1, ours
        assert any(left.removesuffix(" cells") in line for line in mlp_newton.lines(mlp_newton.summarise(mine)))
    fits = sum(record["peaks"]["printed"]["status"] == "ok" for record in memory["records"])
    printed, *others = claims.memory_ratio(finished(memory, tmp_path))
    assert f"; {fits} of {len(memory['records'])} cells; median" in printed.where
    assert not any("cells" in each.where for each in others)
    assert any(
        f"{fits} of {len(memory['records'])}" in line
        for line in mlp_memory.lines(mlp_memory.summarise(memory["records"]))
    )

    for record in newton["records"]:
        if record["activation"] == "relu":
            record["status"] = "not measured: it took 9.0 s at L = 2"
    for record in memory["records"]:
        record["peaks"]["printed"] = {"status": "out of memory"}
    newton["records"][-1]["error"] = ["nan"]
    newton["records"][-1] |= {"status": "ok", "iterations": [15], "results": ["NON_FINITE"]}
    none, *_ = claims.newton_iterations(finished(newton, tmp_path))
    assert (none.value, none.where[:4]) == ("not measured", "ReLU")
    assert claims.output_error(finished(newton, tmp_path))[0].value == "not measured"
    assert "not finite in 1 of " in claims.output_error(finished(newton, tmp_path))[-1].where
    assert claims.memory_ratio(finished(memory, tmp_path))[0].value == "not measured"
    assert len(mlp_newton.lines(mlp_newton.summarise(newton["records"]))) == 5
    assert mlp_memory.lines(mlp_memory.summarise(memory["records"]))[1].split()[1:3] == ["–", "–"]


def test_diffusion_says_where_cells_or_samples_are_missing(tmp_path):
    latent, iterations = made_up_diffusion.latent_result(), made_up_diffusion.iterations_result()
    timed = [record for record in latent["records"] if "loop" in record]
    fits = sum(record["printed"]["status"] == "ok" for record in timed)
    printed, auto = diffusion_claims.sampling_error(finished(latent, tmp_path))
    assert printed.where.endswith(f"; {fits} of {len(timed)} cells")
    assert fits < len(timed)
    assert "cells" not in auto.where
    assert not any(
        "samples" in each.where for each in diffusion_claims.small_error_after(finished(iterations, tmp_path))
    )
    wanted = iterations["settings"]["samples"]
    mine = [record for record in iterations["records"] if record["space"] == "pixel"]
    mine[0]["errors"]["printed"] = mine[0]["errors"]["printed"][: wanted - 1]
    few = [
        each.where
        for each in diffusion_claims.small_error_after(finished(iterations, tmp_path))
        if "samples" in each.where
    ]
    assert len(few) == 1
    assert few[0].endswith(f"; fewer than {wanted} samples in 1 of {len(mine)} cells")


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


def test_the_committed_results_can_be_read(tmp_path):
    """Whatever else lies in results/: none of it breaks the report."""
    folder = os.path.join(os.path.dirname(__file__), "..", "..", "results")
    write(tmp_path, timing_content())
    out = tmp_path / "report.html"
    done = CliRunner().invoke(cli.app, ["report", "--results", folder, "--results", str(tmp_path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "core-" not in out.read_text()


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
        assert f"<span>images: {html.escape(name)}</span>" in page._made(result)
    assert finished(timing_content(), tmp_path).images == ""


def test_a_step_of_training_inside_a_graph(tmp_path):
    content = made_up.resnet_training_result(points=8)
    assert "whole step" not in str(claims.training_speedup(finished(content, tmp_path)))
    for record in content["records"]:
        for mode, run in record.get("runs", {}).items():
            run["method"] = "fused"
            taken = 4e-4 if mode == "sequential" else (1e-4, 1.5e-4, 2e-4, 5e-4, 9e-4)[record["seed"]]
            run["curves"]["replayed_seconds"] = [taken] * 7 + [1.0]
    *_, last = claims.training_speedup(finished(content, tmp_path))
    assert last.value == "2×"
    assert last.where.endswith("over the fused loop; L = 1,024: 200 µs instead of 400 µs")


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
    made = page.make_page(collect([tmp_path]))
    assert made.count("quick run, small sizes: shows that it works; changed settings: depths") >= 2
    assert "<span class='tag'>quick run; changed settings: depths</span>" in made
    assert "deeppcr-paper reproduce hardware FILE1 FILE2" in made


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


# The table


def row_of(content, tmp_path, words):
    (row,) = [row for row in claims.rows([finished(content, tmp_path)]) if words in row.claim.what]
    return row


def test_best_speedups_come_from_the_records(tmp_path):
    content = timing_content()
    row = row_of(content, tmp_path, "Fastest forward pass")
    assert row.claim.paper == "more than 30×"
    assert len(row.ours) == 4  # two methods, each over two loops
    best = max(
        min(record["forward"]["loop"]["seconds"]) / min(record["forward"]["printed"]["seconds"])
        for record in content["records"]
        if record["activation"] == "relu" and "seconds" in record["forward"]["printed"]
    )
    assert row.ours[0].value == f"{best:.0f}×"
    assert "eager loop" in row.ours[0].where
    assert "L = 16,384, w = 2" in row.ours[0].where
    assert "CUDA graph" in row.ours[1].where
    twice = row_of(timing_content(scale=2.0), tmp_path, "Fastest forward pass")
    assert twice.ours[0].value == f"{2 * best:.0f}×"
    assert twice.ours[1] == row.ours[1]  # the loop in a graph is as fast as before


def test_a_fused_kernel_is_one_more_loop(tmp_path):
    content = timing_content()
    for record in content["records"]:
        for way in ("forward", "backward"):
            record[way]["fused"] = {"status": "ok", "error": 0.0, "seconds": [1e-6 * record["L"]]}
    row = row_of(content, tmp_path, "Fastest backward pass")
    assert [("fused" in ours.where) for ours in row.ours] == [False, False, True, False, False, True]
    (data,) = speedup_map.map_data([finished(content, tmp_path)])
    assert list(data["baselines"]) == ["loop", "graph", "fused"]
    assert list(data["methods"]) == ["printed", "auto"]


def test_break_even_and_where_there_is_none(tmp_path):
    def depths(scale):
        return [
            ours.value for ours in row_of(timing_content(scale=scale), tmp_path, "the forward pass gains, ReLU").ours
        ]

    first, *_ = depths(1.0)
    assert re.fullmatch(r"L ≈ [\d,]+ to [\d,]+", first)
    assert depths(1e-6)[0] == "not reached"
    assert depths(1e6)[0] == "every depth"


def test_diffusion_has_a_line_for_every_method_not_for_every_size(tmp_path):
    settings = replace(latent_diffusion.FULL, data=("mnist",), widths=(16, 64), steps=(256, 1024), runs=3)
    content = made_up_diffusion.latent_result(settings)
    row = row_of(content, tmp_path, "One sample of latent diffusion on MNIST")
    assert len(row.ours) == 3  # as printed over the eager loop, the defaults over both loops
    cells = [record for record in content["records"] if record.get("L") == 1024]
    expected = [median(cell["loop"]["seconds"]) / median(cell["printed"]["seconds"]) for cell in cells]
    assert row.ours[0].value == ", ".join(map(times, expected))
    assert "MNIST, w = 16, 64, L = 1,024: " in row.ours[0].where
    assert row.ours[0].where.endswith(", medians")
    counts = row_of(content, tmp_path, "Newton iterations of a latent sample").ours
    assert [ours.value for ours in counts] == [", ".join(f"{fmean(c['printed']['iterations']):.1f}" for c in cells)]


def test_an_error_that_never_becomes_small_is_not_passed_over(tmp_path):
    settings = replace(diffusion_iterations.FULL, widths=(16,), sides=(16,), steps=(256,))
    row = row_of(made_up_diffusion.iterations_result(settings), tmp_path, "below 0.1")
    assert [ours.value.split()[0] for ours in row.ours] == ["at", "at", "not", "at"]  # of pixels, as printed


def test_claims_that_nobody_measured_say_how(tmp_path):
    result = finished(timing_content(), tmp_path)
    missing = [row for row in claims.rows([result]) if row.result is None]
    assert {row.claim.experiment for row in missing} == {claim.experiment for claim in claims.CLAIMS} - {"mlp-timing"}
    html = page.make_page([result])
    for row in missing:
        command = row.claim.experiment + (" FILE1 FILE2" if row.claim.experiment == "hardware" else "")
        assert f"not measured yet: <code>deeppcr-paper reproduce {command}</code>" in html
    assert {claim.experiment for claim in claims.CLAIMS} <= {each.name for each in EXPERIMENTS}


@pytest.mark.parametrize("quick", [False, True])
def test_quick_runs_are_called_that(tmp_path, quick):
    html = page.make_page([finished(timing_content(quick=quick), tmp_path)])
    assert ("quick run, small sizes: shows that it works" in html) == quick


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
                    assert cell[name]["seconds"] == pytest.approx(min(entry["seconds"]), rel=1e-3)
                else:
                    assert "seconds" not in cell[name]


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


# The command


@pytest.fixture
def run(tmp_path):
    def run(*arguments):
        return CliRunner().invoke(cli.app, ["report", *map(str, arguments)])

    return run


def fails_clearly(result, *parts):
    assert result.exit_code == cli.BAD, result.output
    (line,) = [line for line in result.output.splitlines() if line.strip()]
    assert line.startswith("deeppcr-paper: ")
    assert "Traceback" not in result.output
    for part in parts:
        assert part in line


def test_writes_the_page_and_says_where(run, tmp_path, monkeypatch):
    write(tmp_path / "results", timing_content(quick=True))
    monkeypatch.chdir(tmp_path)
    done = run()
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "written to report.html"
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert not list(tmp_path.glob(".*"))


def test_no_results(run, tmp_path):
    fails_clearly(run("--results", tmp_path / "none"), str(tmp_path / "none"), "no such folder")
    fails_clearly(run("--results", tmp_path), str(tmp_path), "no finished results", "deeppcr-paper reproduce")
    (tmp_path / "mlp-timing-a-b.partial.json").write_text("{}")
    fails_clearly(run("--results", tmp_path), "mlp-timing-a-b.partial.json is unfinished")
    (tmp_path / "file").write_text("")
    fails_clearly(run("--results", tmp_path / "file"), "not a folder")


def drop(content):
    del content["records"][0]["forward"]


def misname(content):
    content["records"][0]["L"] = "deep"


def empty(content):
    content["records"] = []


def untype(content):
    content["settings"] = 3


@pytest.mark.parametrize("text", ["{}", "[1, 2]", '{"schema": 1, "rec'])
def test_a_file_with_the_name_of_an_experiment_and_not_its_content_is_named(run, tmp_path, text):
    write(tmp_path, timing_content(quick=True))
    path = tmp_path / "mlp-timing-other.json"
    path.write_text(text)
    fails_clearly(run("--results", tmp_path, "--out", tmp_path / "report.html"), str(path), "move it away")
    path.rename(tmp_path / "notes.json")
    if text.endswith(("}", "]")):  # another program's
        assert run("--results", tmp_path, "--out", tmp_path / "report.html").exit_code == 0


@pytest.mark.parametrize("damage", [drop, misname, empty, untype])
def test_a_damaged_file_is_named_and_the_old_page_stays(run, tmp_path, damage):
    content, out = timing_content(quick=True), tmp_path / "report.html"
    damage(content)
    path = write(tmp_path, content)
    out.write_text("the old page")
    fails_clearly(run("--results", tmp_path, "--out", out), str(path), "move it away")
    assert out.read_text() == "the old page"


@pytest.mark.parametrize("text", ['{"schema": 1, "rec', '{"schema": 0}', "\xff"])
def test_a_file_that_is_cut_off_or_old(run, tmp_path, text):
    path = tmp_path / "mlp-timing-old.json"
    path.write_text(text, encoding="latin-1")
    fails_clearly(run("--results", tmp_path, "--out", tmp_path / "report.html"), str(path))


def test_a_page_that_cannot_be_written(run, tmp_path, monkeypatch):
    write(tmp_path / "results", timing_content(quick=True))
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for out in (folder, "."):
        fails_clearly(run("--results", tmp_path / "results", "--out", out), f"{out}: is a folder", "report.html")
    (tmp_path / "file").write_text("")
    below = run("--results", tmp_path / "results", "--out", tmp_path / "file" / "page.html")
    fails_clearly(below, f"{tmp_path / 'file'}: is a file")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    out = tmp_path / "report.html"
    out.write_text("the old page")
    monkeypatch.setattr(os, "fsync", full_disk)
    fails_clearly(run("--results", tmp_path / "results", "--out", out), "no space left")
    assert out.read_text() == "the old page"
    assert not list(tmp_path.glob(".*"))
