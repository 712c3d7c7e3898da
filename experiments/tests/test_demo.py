"""The demo: its table, its honesty, and its exit code."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import deeppcr

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
from deeppcr_paper import demo, store


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


def lines_of(output: str, word: str) -> list[str]:
    return [line for line in output.splitlines() if f" {word} " in line and " × " in line]


def test_prints_one_table_with_every_case_and_the_path_of_a_page(device, capsys, tmp_path):
    assert demo.main(["--quick", "--device", device.type]) == 0
    output = capsys.readouterr().out
    for heading in ("network", "device", "pass", "loop", "parallel", "speed-up", "Newton", "iterations", "error"):
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
        assert len(rows) == len(demo.QUICK)
        for row in rows:
            assert float(row.split()[-1]) <= demo.TOLERANCE
            assert float(row.split()[5].replace(",", "")) > 0


def test_the_setting_that_is_shown_is_the_one_that_runs():
    names = {"Newton": deeppcr.Newton, "GivenJacobian": deeppcr.GivenJacobian, "slope": demo.slope}
    assert eval(demo.SETTING.removeprefix("Parallel: solver="), names) == demo.SOLVER


def test_runs_as_a_module():
    command = [sys.executable, "-m", "deeppcr_paper.demo", "--quick", "--device", "cpu"]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, env={**os.environ, **paths})
    assert done.returncode == 0, done.stderr
    assert "speed-up" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("report.html")


@pytest.fixture
def runs(monkeypatch):
    """The names of the experiments that are run; the table before them is left out."""
    ran = []
    measure = demo.Experiment.run

    def run(self, *arguments, **settings):
        ran.append(self.name)
        return measure(self, *arguments, **settings)

    monkeypatch.setattr(demo.Experiment, "run", run)
    monkeypatch.setattr(demo, "QUICK", ())
    return ran


def test_a_demo_that_was_finished_starts_afresh(runs, tmp_path):
    for _ in range(2):
        assert demo.main(["--quick", "--device", "cpu"]) == 0
    assert runs == 2 * list(demo.TINY)


def test_a_demo_that_was_interrupted_goes_on(runs, tmp_path, monkeypatch, capsys):
    class Interrupting(demo.Bars):
        """Ctrl-C in the second experiment, after two of its cells."""

        def end(self, name):
            super().end(name)
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
    def interrupted(self, budget):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.Row, "examine", interrupted)
    assert demo.main(["--quick", "--device", "cpu"]) == 130
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
def test_a_failed_check_is_never_timed_and_sets_the_exit_code(broken, device, capsys, monkeypatch):
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


def test_gradients_are_checked_by_themselves(capsys, monkeypatch):
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


def test_the_closing_sentence_follows_from_the_rows():
    def row(**milliseconds):
        return demo.Row(1024, 64, torch.device("cpu"), "forward", milliseconds=milliseconds)

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
