"""The fit of what recurrent layers cost: constants that were put into times come out of them."""

import json
from pathlib import Path

import pytest

from scripts import script

ROOT = Path(__file__).parents[1]
#: Seconds: launches, a step of one row by kind and width; PyTorch's launches, a step, and a row of it.
LAUNCHES, STEPS = 1e-3, {("GRU", 8): 4e-9, ("GRU", 32): 20e-9, ("LSTM", 64): 50e-9, ("RNN", 32): 0.0}
TORCH_LAUNCHES, TORCH_STEPS = 0.25e-3, {"GRU": (0.5e-6, 0.01e-6), "LSTM": (0.6e-6, 0.02e-6), "RNN": (0.4e-6, 0.0)}


fit = script("benchmarks", "recurrent_fit")


def case(method, seconds, kind, T, B, H, direction, result=None):
    parameters = {"kind": kind, "T": T, "B": B, "H": H, "direction": direction}
    return {"parameters": parameters, "method": method, "seconds": seconds, "passed": True, "result": result}


def record(fit):
    cases = []
    for kind, width in STEPS:
        H = width // 2 if kind == "LSTM" else width
        for T in (64, 8192, 32768):
            for B in (1, 8):
                for way in ("forward", fit.BOTH):
                    twice = 1 + (way == fit.BOTH)
                    ours = twice * (LAUNCHES + STEPS[kind, width] * T * B)
                    one, more = TORCH_STEPS[kind]
                    theirs = twice * max(TORCH_LAUNCHES, T * (one + more * B))
                    layer = kind, T, B, H, way
                    cases.append(case("torch.nn", [9.0, theirs, 0.0], *layer))
                    cases.append(case("auto", [theirs], *layer, result="LOOP"))
                    cases.append(case("parallel", [ours], *layer, result="CONVERGED"))
    return {"cases": cases}


def test_constants_come_back(fit):
    layers = fit.measured([record(fit)])
    assert len(layers) == 4 * 3 * 2 * 2
    for backward, factor in ((False, 1), (True, 2)):
        mine = [each for each in layers if each.backward == backward]
        launches, steps = fit.fit_parallel(mine)
        assert launches == pytest.approx(factor * LAUNCHES)
        assert steps == {cell: pytest.approx(factor * value, abs=1e-13) for cell, value in STEPS.items()}
        launches, steps = fit.fit_torch(mine)
        assert launches == pytest.approx(factor * TORCH_LAUNCHES)
        for kind, values in TORCH_STEPS.items():
            assert steps[kind] == pytest.approx([factor * value for value in values], abs=1e-12)


def test_what_auto_did_in_parallel_counts_as_such(fit):
    layer = ("GRU", 64, 1, 8, "forward")
    cases = [
        case("torch.nn", [1.0], *layer),
        case("auto", [3.0], *layer, result="CONVERGED"),
        case("parallel", [2.0], *layer),
    ]
    (found,) = fit.measured([{"cases": cases}])
    assert sorted(found.parallel) == [2.0, 3.0]
    assert fit.measured([{"cases": cases[:1]}]) == []


def test_no_constant_is_negative(fit):
    assert fit.fitted([[1, 1], [1, 2]], [2.0, 1.0])[1] == 0
    assert fit.fitted([[1, 1], [1, 2]], [1.0, 2.0]) == pytest.approx([0, 1])


def test_tables_are_printed_as_they_stand_in_the_library(fit, tmp_path, capsys):
    path = tmp_path / "recurrent.json"
    path.write_text(json.dumps(record(fit)))
    assert fit.main([str(path)]) == 0
    tables, layers = capsys.readouterr().out.split("\n\n")
    found = {}
    exec(tables, found)
    from deeppcr.nn import recurrent_cost

    for name in ("_LAUNCHES", "_STEPS", "_TORCH_LAUNCHES", "_TORCH_STEPS"):
        assert type(found[name]) is type(getattr(recurrent_cost, name))
    assert found["_LAUNCHES"] == (0.001, 0.002)
    kept = recurrent_cost._STEPS["GRU"]
    assert found["_STEPS"]["GRU"] == kept | {8: (4e-9, 8e-9), 32: (2e-8, 4e-8)}
    assert list(found["_STEPS"]["GRU"]) == sorted(found["_STEPS"]["GRU"])
    assert found["_TORCH_STEPS"]["LSTM"][1] == (1.2e-6, 0.04e-6)
    assert len(layers.splitlines()) == 48
    assert "of the faster way" in layers


def test_what_was_not_measured_stays(fit, monkeypatch):
    layers = fit.measured([record(fit)])
    before = {"RNN_TANH": {}, "GRU": {64: (7e-9, 9e-9)}, "LSTM": {}}
    monkeypatch.setattr(fit.recurrent_cost, "_STEPS", before)
    forward = [each for each in layers if each.backward or (each.size.kind, each.size.H) != ("GRU", 32)]
    found = fit.constants(forward)["_STEPS"]
    assert '"GRU": {8: (4e-09, 8e-09), 32: (4e-08, 4e-08), 64: (7e-09, 9e-09)}' in found  # forward it is no slower
    backward = [each for each in layers if not each.backward or (each.size.kind, each.size.H) != ("GRU", 32)]
    assert '"GRU": {8: (4e-09, 8e-09), 64: (7e-09, 9e-09)}' in fit.constants(backward)["_STEPS"]
    gru = [each for each in layers if each.size.kind == "GRU"]
    assert f'"LSTM": {fit.recurrent_cost._TORCH_STEPS["LSTM"]}' in fit.constants(gru)["_TORCH_STEPS"]


def test_constants_are_put_in_their_place(fit, tmp_path):
    """All else of the module stays, its comments too."""
    from deeppcr.nn import recurrent_cost

    results, module = tmp_path / "recurrent.json", tmp_path / "recurrent_cost.py"
    results.write_text(json.dumps(record(fit)))
    module.write_text(Path(recurrent_cost.__file__).read_text())
    before = module.read_text()
    assert fit.main([str(results), "--write", str(module)]) == 0
    found = {"__name__": "recurrent_cost"}
    exec(module.read_text(), found)
    assert found["_LAUNCHES"] == (0.001, 0.002)
    assert found["_TORCH_STEPS"]["LSTM"][1] == (1.2e-6, 0.04e-6)
    assert found["_STEPS"]["GRU"][32] == (2e-8, 4e-8)
    comments = [line for line in before.splitlines() if line.startswith(("#", "def", "    "))]
    kept = module.read_text().splitlines()
    # Entries may take lines of their own, which begin with a quote, a number or the end of a table.
    assert all(line in kept for line in comments if line.strip()[0] not in '"0123456789}')
    assert module.read_text() != before
