"""The walk-through of the paper: what is committed is what it builds, and what it is built from."""

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
from deeppcr_paper import mlp_timing, resnet_ablations, resnet_training
from deeppcr_paper.catalogue import EXPERIMENTS
from deeppcr_paper.figures import drawings
from deeppcr_paper.mlp import Network
from deeppcr_paper.report.collect import Finished
from deeppcr_paper.store import PaperError
from deeppcr_paper.walkthrough import build, findings, headline, networks, write
from deeppcr_paper.walkthrough.__main__ import main
from deeppcr_paper.walkthrough.choice import Results, again, command, fewer, smaller
from deeppcr_paper.walkthrough.items import ITEMS
from deeppcr_paper.walkthrough.page import show, slug
from deeppcr_paper.walkthrough.reading import Verdict
from walkthrough_support import TIMING, TRAINING, finished, trained

ROOT = Path(__file__).resolve().parents[2]
DIFFUSION = {"latent-diffusion", "pixel-diffusion", "diffusion-iterations", "diffusion-guess"}


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
    assert command("mlp-newton") == "deeppcr-paper reproduce mlp-newton --device cuda"


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
    assert all("Not run yet at full size: `deeppcr-paper reproduce" in line for line in findings.lines(nothing))
    assert headline.lines(nothing) == ["Not run yet: `deeppcr-paper reproduce mlp-timing --device cuda`."]


def test_a_damaged_result_is_named():
    damaged = finished({**made_up.mlp_memory_result(), "records": [{"L": 2}]}, "damaged.json")
    (item,) = [item for item in ITEMS if item.label == "Figure 14"]
    with pytest.raises(PaperError, match=r"damaged\.json: damaged"):
        show(item, Results([damaged]), lambda result: [])


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
