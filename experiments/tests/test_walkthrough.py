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
from claims_support import TIMING, TRAINING, finished, trained
from deeppcr import FixedIterations, PaperTest
from deeppcr_paper import (
    figures,
    mlp_memory,
    mlp_timing,
    resnet_ablations,
    resnet_training,
)
from deeppcr_paper.catalogue import EXPERIMENTS
from deeppcr_paper.claims import answers, networks
from deeppcr_paper.claims.check import Check, Verdict
from deeppcr_paper.claims.items import ITEMS, OPENING
from deeppcr_paper.claims.results import Finished, best, command, second
from deeppcr_paper.claims.rules import RULES
from deeppcr_paper.figures import Figure, drawings
from deeppcr_paper.mlp import Network
from deeppcr_paper.store import PaperError
from deeppcr_paper.walkthrough import build, headline
from deeppcr_paper.walkthrough.__main__ import main
from deeppcr_paper.walkthrough.page import make_page, repeats, show, slug

ROOT = Path(__file__).resolve().parents[2]
MEMORY = replace(mlp_memory.FULL, depths=(16, 1024), widths=(2, 16))
#: What is drawn to the last point even where not all is: the axes of a map, curves, pictures.
DRAWN = ("mlp-memory", "resnet-guess", "diffusion-guess")


# What is committed


def sketched(content):
    """Captions and all words of the pages come from the results; writing down the points of a figure takes most of the time."""
    if content["experiment"] in DRAWN:
        return figures.draw(content)
    return [Figure(each.name, each.title, each.paper, each.caption, "<svg ></svg>") for each in drawings(content)]


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


def assert_committed(built, *, every_figure):
    """Another version of matplotlib puts things elsewhere by a hair: then the words of the figures are compared."""
    figures_of_the_page = {name for name in built if name.startswith("docs/paper/")}
    shown = re.findall(r"\]\((paper/[^)]+)\)", built["docs/paper.md"])
    assert {f"docs/{name}" for name in shown} == figures_of_the_page
    assert {f"docs/paper/{path.name}" for path in (ROOT / "docs" / "paper").iterdir()} == figures_of_the_page
    files = {name: (ROOT / name).read_text(encoding="utf-8") for name in built}
    versions = {each for text in files.values() for each in re.findall(r"drawn by matplotlib (\S+)", text)}
    same_version = versions == {matplotlib.__version__}
    for name, built_now in built.items():
        if name.endswith(".svg") and "</svg>" in built_now[:80]:  # only sketched
            continue
        committed, content = pixels(files[name]), pixels(built_now)
        if name.endswith(".svg") and not same_version:
            committed, content = texts(committed), texts(content)
        elif name.endswith(".html") and not (every_figure and same_version):
            committed, content = without_figures(committed), without_figures(content)
        assert committed == content, f"{name} is not what results/ give: run make paper"


def test_what_is_committed_is_what_is_built():
    """So other tests may look at what is committed, which takes no time."""
    assert_committed(build(ROOT, sketched), every_figure=False)


@pytest.mark.thorough
def test_every_committed_figure_is_what_is_drawn():
    assert_committed(build(ROOT), every_figure=True)


def test_pictures_are_compared_by_their_pixels():
    def svg(picture, level):
        buffer = io.BytesIO()
        imsave(buffer, picture, format="png", cmap="gray", vmin=0, vmax=1, pil_kwargs={"compress_level": level})
        return f'<image href="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"/>'

    one, other = [[0.0, 1.0]] * 9, [[0.0, 0.9]] * 9
    assert svg(one, 0) != svg(one, 9)
    assert pixels(svg(one, 0)) == pixels(svg(one, 9))
    assert pixels(svg(one, 0)) != pixels(svg(other, 0))


def test_the_page_opens_with_ten_claims_and_prints_every_rule():
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    headings = {slug(heading) for heading in re.findall(r"^### (.*)$", page, re.MULTILINE)}
    assert len(headings) == len(ITEMS)
    first = page.split("\n\n")[2].splitlines()
    assert [re.findall(r"\[(.*)\]\(#", row)[0] for row in first[2:]] == [each.claim for each in OPENING]
    assert len(OPENING) == 10
    assert {re.findall(r"\(#([^)]+)\)", row)[0] for row in first[2:]} <= headings
    rules = page.partition("Rules:\n\n")[2].partition("\n\n")[0]
    printed = dict(re.findall(r"^- \*\*(.+)\*\*: (.+)$", rules, re.MULTILINE))
    assert {name: rule.words for name, rule in RULES.items()}.items() <= printed.items()
    used = set(re.findall(r"(?:yes|no|open) \(([^()|]+)\) \|$", page, re.MULTILINE))
    assert used <= RULES.keys()
    assert len(used) > 20
    assert len(page.split()) <= 3850, "it is to be read"


def test_figures_of_one_item_are_told_apart():
    """A forward and a backward pass look alike: each has its title above it, which is not said again in its place."""
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    of_items = [re.findall(r"(.*)\n\n!\[(.+)\]\(.*\.svg\)", item) for item in page.split("\n### ")]
    assert sum(len(found) > 1 for found in of_items) > 5
    for found in of_items:
        assert len(found) < 2 or all(re.fullmatch(r"\*.+\*", above) and said == "picture" for above, said in found), (
            found
        )
        assert len(found) < 2 or len({above for above, _ in found}) == len(found), found


def test_parts_that_tell_of_the_same_claim_are_one_row():
    """As printed is what decides; the other part has the defaults and the loop, and not its own way to print."""
    item = next(item for item in ITEMS if item.label == "Figure 3")
    decides = Check(what="pass", paper="30×", printed="40×", holds="yes", rule="speed-up")
    beside = Check(what="pass", printed="20×", defaults="90×", loop="printed 0.5×; defaults 2×")
    only = Check(what="cells", loop="printed 3 of 9; defaults 1 of 9")
    nothing = Check(what="gradients", printed="off")
    parts = [
        answers.Answer(part, None, checks, None)
        for part, checks in zip(item.parts, ([decides], [beside, only, nothing]), strict=True)
    ]
    one, two = answers.merged(parts)
    assert (one.printed, one.defaults, one.loop, one.holds) == ("40×", "90×", "defaults 2×", "yes")
    assert (two.what, two.loop) == ("cells", "defaults 1 of 9")
    with_loop = replace(decides, loop="fused loop 2 ms: printed 0.1×")
    (joined, _) = answers.merged([replace(parts[0], checks=[with_loop]), parts[1]])
    assert joined.loop == "fused loop 2 ms: printed 0.1×; defaults 2×"
    assert len(answers.merged(parts[1:])) == 3  # alone it shows all that it has


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
            "mlp-timing": made_up.mlp_timing_result(replace(TIMING, widths=(2, 16))),
            "mlp-memory": made_up.mlp_memory_result(MEMORY),
            "mlp-newton": made_up.mlp_newton_result(),
            "hardware": made_up.hardware_result(replace(TIMING, activations=("relu",), widths=(2, 16))),
            "resnet-training": made_up.resnet_training_result(TRAINING, points=8),
            "resnet-iterations": made_up.ablation_result("resnet-iterations", resnet_ablations.ITERATIONS, points=8),
            "resnet-guess": made_up.ablation_result("resnet-guess", resnet_ablations.GUESS, points=8),
        }.items()
    }
    for item in ITEMS:
        for part in item.parts:
            assert part.experiment in known, item.label
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


def test_numbers_from_some_of_the_cells_say_so(tmp_path):
    newton, memory = made_up.mlp_newton_result(), made_up.mlp_memory_result()
    mine = [record for record in newton["records"] if record["activation"] == "relu"]
    first = [record for record in mine if record["guess"] == "repeat-initial"]
    measured = f"{sum(record['status'] == 'ok' for record in first)} of {len(first)} cells"
    iterations, *_ = networks.newton(Finished(tmp_path, newton))
    assert f"({measured})" in iterations.printed
    fits = sum(record["peaks"]["printed"]["status"] == "ok" for record in memory["records"])
    (check,) = networks.memory(Finished(tmp_path, memory))
    assert f"; {fits} of {len(memory['records'])} cells)" in check.printed
    assert "cells" not in check.defaults

    for record in newton["records"]:
        record["status"] = "out of memory"
        record.pop("iterations", None)
    for record in memory["records"]:
        record["peaks"]["loop"] = {"status": "out of memory"}
    assert [check.printed for check in networks.newton(Finished(tmp_path, newton))] == ["not measured"]
    assert {check.printed for check in networks.memory(Finished(tmp_path, memory))} == {"not measured"}


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
        assert best(every, "mlp-timing") is expected
        every.remove(expected)
    assert best(every, "mlp-timing") is None
    assert best([new], "mlp-timing", lambda result: False) is None
    other = named("other", copy.deepcopy(full), "2025")
    for record in other.records:
        record["hardware"] = "Another GPU"
    assert second([old, new], "mlp-timing") is None
    assert second([old, new, other], "mlp-timing") is other


def test_fewer_repeats_are_no_smaller_run():
    full = finished(made_up.mlp_timing_result())
    repeats = finished(made_up.mlp_timing_result(replace(mlp_timing.FULL, budget=1.0)))
    small = finished(made_up.mlp_timing_result(TIMING))
    assert (full.smaller, full.fewer) == ("", "")
    assert (repeats.smaller, repeats.fewer) == ("", "budget=1.0")
    untimed = finished(made_up.resnet_training_result(replace(resnet_training.FULL, timed_seeds=0), points=8))
    assert untimed.smaller == ""
    assert "timed_seeds=0" in untimed.fewer
    assert small.smaller == "depths=16,64,1024,16384, widths=2,16,256"
    assert small.fewer == ""
    trained = finished(made_up.resnet_training_result(TRAINING, points=4))
    assert trained.command.endswith("--set depths=64,128 --set seeds=2")
    assert command("mlp-newton") == "deeppcr-paper reproduce mlp-newton --device cuda"


def test_what_was_not_run_says_so_and_nothing_else():
    page, shown = make_page([], lambda result: [])
    assert shown == []
    for item, text in zip(ITEMS, re.split("^### ", page, flags=re.MULTILINE)[1:], strict=True):
        verdict = Verdict.NOT_RUN if item.parts else Verdict.NOTHING_MEASURED
        assert text.startswith(f"{item.label}: {item.title}\n\n**{verdict.value.capitalize()}**. {item.claim}")
        assert "\n|" not in text
    sources = page.partition("| experiment |")[2].partition("\n\n")[0]
    names = {part.experiment for item in ITEMS for part in item.parts}
    assert all(f"| {name} | not run yet |" in sources for name in names)
    (nothing,) = headline.lines([], {})
    assert nothing.startswith("Not run yet: `deeppcr-paper reproduce mlp-timing --device cuda`, `")
    assert nothing.endswith(
        "`python benchmarks/loops.py`, `python benchmarks/recurrent.py`, `python benchmarks/real_diffusion.py`."
    )


def test_a_smaller_run_says_so():
    page, _ = make_page([trained()], lambda result: [])
    assert "| resnet-training | `made.json`; smaller: `depths=64,128, seeds=2` |" in page
    assert "(in part not run yet; smaller run)." in page


def test_repeats_and_their_spread_are_told():
    result = finished(
        {**made_up.mlp_timing_result(), "records": [{"forward": {"loop": {"seconds": [1.0, 2.0, 3.0, 4.0, 5.0]}}}]}
    )
    assert repeats(result) == {"loop": "5; 67%", "printed": ""}


def test_a_damaged_result_is_named():
    damaged = finished({**made_up.mlp_memory_result(), "records": [{"L": 2}]}, "damaged.json")
    (item,) = [item for item in ITEMS if item.label == "Figure 14"]
    with pytest.raises(PaperError, match=r"damaged\.json: damaged"):
        show(item, [damaged], lambda result: [])


def test_the_command_writes_what_differs_and_takes_away_what_is_left_over(tmp_path, capsys):
    shutil.copy(ROOT / "README.md", tmp_path)
    assert main([str(tmp_path)]) == 2
    assert "is no checkout" in capsys.readouterr().err
    (tmp_path / "mkdocs.yml").write_text("")
    assert main([str(tmp_path)]) == 2
    assert "no such folder" in capsys.readouterr().err
    content = {**made_up.mlp_memory_result(MEMORY), "end": "2026-01-02", "commit": "abc"}
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
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "everything is as it was\n"
