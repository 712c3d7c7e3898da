"""`make fuzz` in small: 88 of its problems; that it is reproducible and goes on where it was; that it finds faults."""

import json
import sys
from pathlib import Path

import pytest

from kernel_support import thorough

#: Problems of these that end badly today.
LONGEST = ["--longest", "40", "--workers", "1"]
FAMILIES = 22  # after so many problems they come again


@pytest.fixture(scope="module")
def fuzz():
    root = str(Path(__file__).parents[1])
    sys.path.insert(0, root)
    from benchmarks.fuzz import runner

    yield runner
    sys.path.remove(root)


@pytest.fixture
def report(fuzz, device):
    def report(number: int, *more: str) -> dict:
        found = fuzz.run_one(number, fuzz.parse([*LONGEST, "--way", "newton", "--device", device.type, *more]))
        found["details"].pop("seconds", None)
        return found

    return report


def reports_in(folder: Path) -> dict[int, dict]:
    (path,) = (folder / "tmp").iterdir()
    found = map(json.loads, path.read_text().splitlines()[1:])
    return {each["number"]: each for each in found}


@pytest.mark.parametrize("batch", [0, 1, *thorough(2, 3)])
def test_problems_end_well(fuzz, report, batch):
    for number in range(batch * FAMILIES, (batch + 1) * FAMILIES):
        found = report(number)
        assert found["verdict"] not in fuzz.BAD, found


@pytest.mark.parametrize("fault", ["state", "gradient"])
def test_finds_planted_faults(report, fault):
    # A network, a tuple, a map, an oscillator, a filter, a large number beside small ones; in units of their own or not.
    for number in (1, 3, 9, 12, 19, 20):
        assert report(number, "--plant", fault)["verdict"] == f"WRONG {fault.upper()}"


def test_finds_a_solver_that_stops_too_early(report):
    for number in (0, 13, 47):
        assert report(number)["verdict"] == "right"
        assert report(number, "--plant", "tolerance")["verdict"] == "WRONG STATE"


def test_rounding_is_no_fault(report):
    for number in (0, 9, 14, 19, 63):
        assert report(number, "--longest", "300", "--plant", "rounding")["verdict"] == "right"


def test_what_dies_out_without_a_bias_does_not_contract_relative_to_itself(report, device):
    found = report(4011, "--longest", "300")
    if device.type != "cpu" and found["verdict"] == "right":  # by kernels
        return
    assert found["verdict"] == "loop", found
    assert abs(found["details"]["exponent"]) < 0.02


@pytest.mark.thorough
def test_on_several_cores(fuzz, device, tmp_path):
    fuzz.main(["--count", "4", *LONGEST, "--workers", "2", "--device", device.type, "--out", str(tmp_path)])
    assert sorted(reports_in(tmp_path)) == [*range(4)]


def test_problem_depends_on_its_number_and_the_seed(report):
    first = report(29)
    report(7)
    assert report(29) == first
    assert report(29, "--seed", "1")["problem"] != first["problem"]


def test_goes_on_where_it_was(fuzz, device, tmp_path, monkeypatch, capsys):
    asked = ["--count", "6", *LONGEST, "--device", device.type, "--out", str(tmp_path)]
    assert fuzz.main(asked) == 0
    before, written = reports_in(tmp_path), (tmp_path / f"fuzz-{device.type}.json").read_text()
    assert sorted(before) == [*range(6)]
    (path,) = (tmp_path / "tmp").iterdir()
    path.write_text(path.read_text()[:-50])  # broken off in the middle of the last line

    examined, examine = [], fuzz.examine
    monkeypatch.setattr(
        fuzz, "examine", lambda problem, *more: examined.append(problem.number) or examine(problem, *more)
    )
    capsys.readouterr()
    assert fuzz.main(asked) == 0
    assert examined == [5]
    assert "5 of 6 are done already" in capsys.readouterr().out
    assert (tmp_path / f"fuzz-{device.type}.json").read_text() == written
    assert json.loads(written)["verdicts"] == {"right": 6}

    examined.clear()  # another seed: nothing is taken over
    fuzz.main(["--seed", "1", "--count", "2", *asked[2:]])
    assert examined == [0, 1]


def test_shows_one_problem(fuzz, device, capsys):
    assert fuzz.main(["--only", "12", *LONGEST, "--device", device.type]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("problem 12: right (as the loop, and nothing was said)\n  ode L=")
    assert "of what is allowed" in shown


def test_too_slow_is_a_verdict(report):
    assert report(76, "--limit", "0.001", "--longest", "1000")["verdict"] == "slow"


def test_an_error_of_the_library_is_on_purpose_and_others_are_not(fuzz):
    from benchmarks.fuzz.verdicts import on_purpose

    import deeppcr

    for act, expected in (
        (lambda: deeppcr.Newton(chunk=0), True),
        (lambda: deeppcr.solve(lambda z: z.nonsense, deeppcr, length=3, solver=deeppcr.Newton()), True),
        (lambda: {}["nothing"], False),
    ):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            act()
        assert on_purpose(caught.value) is expected
