"""The demo: its table, its honesty, and its exit code."""

import runpy
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import deeppcr
from deeppcr_paper import demo, experiment, report, store
from deeppcr_paper.experiment import Experiment
from deeppcr_paper.figures import Drawing


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """The demo writes to where it is called."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def torch_settings():
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def contracting(monkeypatch):
    """Without the network on which Newton gives up, which takes seconds."""
    monkeypatch.setattr(demo, "QUICK", demo.QUICK[:-1])


@pytest.fixture
def page(monkeypatch):
    """The page is not drawn; the folders it would be made from."""
    folders = []

    def build(found, out, fallback=()):
        folders.extend([*found, *fallback])
        store.write_text(out, "a page")
        return out

    monkeypatch.setattr(report, "build", build)
    return folders


def lines_of(output: str, word: str) -> list[str]:
    return [line for line in output.splitlines() if f" {word} " in line and " × " in line]


def test_prints_one_table_with_every_case_and_the_path_of_a_page(device, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "committed", tuple)  # to draw the repository's results takes as long as all the rest
    monkeypatch.setattr(Drawing, "_svg", lambda drawing: "<svg ></svg>")  # as do the points of the figures
    assert demo.main(["--quick", "--device", device.type]) == 0
    output, said = capsys.readouterr()
    for heading in ("network", "pass", "loop", "parallel", "speed-up", "Newton", "iterations", "error"):
        assert heading in output
    assert "FAILED" not in output
    assert demo.SETTING in output
    assert "The loop wins" in output
    assert torch.__version__ in output
    assert max(map(len, output.splitlines()[:-1])) <= 100
    assert output.splitlines()[-1] == str(tmp_path / "demo-results" / "report.html")
    page = (tmp_path / "demo-results" / "report.html").read_text()
    assert all(name in page for name in demo.TINY)
    table, _, _ = output.partition("Parallel: ")
    for direction in ("forward", "backward"):
        rows = lines_of(table, direction)
        assert len(rows) == sum(direction == "forward" or gain == 1 for _, _, gain in demo.QUICK)
        for row in rows:
            assert float(row.split()[-1]) <= demo.TOLERANCE
            assert float(row.split()[4 if device.type == "cpu" else 5].replace(",", "")) > 0
    # One network is there because the parallel solve does not pay on it, and says so.
    assert "no contraction" in table
    assert f"weights × {demo.EXPANDING}" in table
    if device.type == "cpu":
        assert "FINISHED_BY_LOOP" in table
        assert "2,048 × 16 with weights × 2.6 forward on cpu (0." in " ".join(output.split())
    for part in ("a table of 5 cases", "experiment 1 of 2: mlp-timing", "drawing the figures", "done after"):
        assert part in said  # nobody waits without knowing for what


def test_the_setting_that_is_shown_is_the_one_that_runs():
    names = {"Newton": deeppcr.Newton, "GivenJacobian": deeppcr.GivenJacobian, "slope": demo.slope}
    assert eval(demo.SETTING.removeprefix("Parallel: solver="), names) == demo.SOLVER


@pytest.fixture
def runs(monkeypatch, page):
    """The names of the experiments that are run; the table before them and the page after them are left out."""
    ran = []
    measure = Experiment.run

    def run(self, *arguments, **settings):
        ran.append(self.name)
        return measure(self, *arguments, **settings)

    monkeypatch.setattr(Experiment, "run", run)
    monkeypatch.setattr(demo, "QUICK", ())
    monkeypatch.setattr(experiment, "_frozen_garbage", nullcontext)  # it takes longer than these experiments
    return ran


def test_a_demo_that_was_finished_starts_afresh(runs, tmp_path):
    for _ in range(2):
        assert demo.main(["--quick", "--device", "cpu"]) == 0
    assert runs == 2 * list(demo.TINY)


def test_what_was_not_run_is_shown_as_the_repository_has_it(runs, page, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "TINY", {})
    assert demo.main(["--quick", "--device", "cpu"]) == 0
    assert page == [Path("demo-results"), Path(__file__).resolve().parents[2] / "results"]
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "a" / "b" / "c" / "demo.py"))  # installed, without a clone
    assert demo.committed() == ()


def test_a_demo_that_was_interrupted_goes_on(runs, tmp_path, monkeypatch, capsys):
    class Interrupting(demo.Bars):
        """Ctrl-C in the second experiment, after two of its cells."""

        def end(self):
            super().end()
            if len(runs) == 2 and self.finished == 2:
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(demo, "Bars", Interrupting)
        assert demo.main(["--quick", "--device", "cpu"]) == 130
    assert "goes on from there" in capsys.readouterr().err
    assert not (tmp_path / "demo-results" / "report.html").exists()
    assert demo.main(["--quick", "--device", "cpu"]) == 0
    first, second = demo.TINY
    assert runs == [first, second, second]
    assert "2 of 16 cells are there already" in capsys.readouterr().err
    assert (tmp_path / "demo-results" / "report.html").exists()


def test_a_demo_that_was_interrupted_while_it_measured(tmp_path, monkeypatch, capsys):
    """As a module, as ``make demo`` runs it: what becomes of it is the exit code."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.Network, "make", interrupted)
    monkeypatch.setattr(sys, "argv", ["demo", "--quick", "--device", "cpu"])
    monkeypatch.delitem(sys.modules, "deeppcr_paper.demo")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("deeppcr_paper.demo", run_name="__main__")
    assert ended.value.code == 130
    assert "nothing of it is kept" in capsys.readouterr().err
    assert not (tmp_path / "demo-results").exists()


def test_results_of_other_settings_are_not_taken_for_finished(runs, tmp_path):
    assert demo.main(["--quick", "--device", "cpu"]) == 0
    (tmp_path / "demo-results" / "report.html").unlink()
    for path in (tmp_path / "demo-results").glob("mlp-newton-*.json"):
        store.write(path, {**store.read(path), "settings": {}})
    assert demo.main(["--quick", "--device", "cpu"]) == 0
    assert runs == [*demo.TINY, "mlp-newton"]


def test_a_folder_that_cannot_be_written_is_named(runs, tmp_path, capsys):
    (tmp_path / "demo-results").write_text("a file")
    assert demo.main(["--quick", "--device", "cpu"]) == 1
    assert "no report: demo-results" in capsys.readouterr().err


def wrong_states(solution):
    return replace(solution, states=solution.states * 1.01)


def finished_by_loop(solution):
    return replace(solution, result=deeppcr.Result.FINISHED_BY_LOOP)


def raises(solution):
    raise RuntimeError("the adjoint does not hold")


@pytest.mark.parametrize("broken", [wrong_states, finished_by_loop, raises])
def test_a_failed_check_is_never_timed_and_sets_the_exit_code(broken, device, capsys, monkeypatch, contracting):
    right = deeppcr.solve
    monkeypatch.setattr(deeppcr, "solve", lambda *a, **k: broken(right(*a, **k)))
    monkeypatch.setattr(demo, "measure", lambda *a, **k: pytest.fail("timed a case that failed"))
    assert demo.main(["--quick", "--device", device.type]) == 1
    output = capsys.readouterr().out
    table, _, rest = output.partition("Parallel: ")
    assert table.count("FAILED") == 2 * len(demo.QUICK)
    assert "none of the 0 cases" in rest
    assert rest.count("FAILED") == 2 * len(demo.QUICK)
    assert "report.html" not in rest


def test_gradients_are_checked_by_themselves(capsys, monkeypatch, contracting):
    """States that are right with gradients that are not fail the backward pass only."""
    right = deeppcr.solve

    def wrong_gradients(*arguments, **settings):
        solution = right(*arguments, **settings)
        if not solution.states.requires_grad:
            return solution
        return replace(solution, states=solution.states.detach() + 1.01 * (solution.states - solution.states.detach()))

    monkeypatch.setattr(deeppcr, "solve", wrong_gradients)
    assert demo.main(["--quick", "--device", "cpu"]) == 1
    table, _, _ = capsys.readouterr().out.partition("Parallel: ")
    assert all("FAILED" in row for row in lines_of(table, "backward"))
    assert not any("FAILED" in row for row in lines_of(table, "forward"))


def test_the_table_fits_a_terminal():
    """Of 80 columns, and of 100 where there is a GPU."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    known = {"loop": 1234.5, "parallel": 1234.5}
    rows = [
        demo.Row(16_384, 16, gain, cpu, "backward", deeppcr.Result.FINISHED_BY_LOOP, 100, 1e-6, milliseconds=known)
        for gain in (1, demo.EXPANDING)
    ]
    assert Console().measure(demo.as_table(rows)).maximum <= 80
    rows += [replace(row, device=gpu, milliseconds=known | {"graph": 123.4}) for row in rows]
    assert Console(width=200).measure(demo.as_table(rows)).maximum <= 100


def test_the_closing_sentence_follows_from_the_rows():
    def row(**milliseconds):
        return demo.Row(1024, 64, 1, torch.device("cpu"), "forward", milliseconds=milliseconds)

    fast, slow = row(loop=10.0, parallel=5.0), row(loop=10.0, parallel=20.0)
    assert demo.verdict([fast, fast]) == "The loop wins none of the 2 cases that were timed."
    assert demo.verdict([fast, slow]) == (
        "The loop wins 1 of the 2 cases that were timed: 1,024 × 64 forward on cpu (0.5x)."
    )
    # The stronger loop decides.
    graph = row(loop=100.0, graph=10.0, parallel=20.0)
    assert graph.speedup("loop") == 5
    assert graph.speedup("graph") == graph.speedup() == 0.5
    assert "1 of the 1 cases" in demo.verdict([graph])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        demo.main(["--quick", "--device", "cuda"])
    assert ended.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_no_threads_at_all(capsys):
    with pytest.raises(SystemExit) as ended:
        demo.main(["--quick", "--threads", "0"])
    assert ended.value.code == 2
    assert "--threads: at least 1, got 0" in capsys.readouterr().err
