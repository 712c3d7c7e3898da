"""`make fuzz` by kernels, in small: where there are some they are right, and faults are found."""

import sys
from pathlib import Path

import pytest

from kernel_support import thorough

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
COVERED = (0, 1, 2, 4, 5, 6, 10, 11, 12, 13, 14, 17, 19, 21, 23)


@pytest.fixture
def report(device, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks.fuzz import runner

    def report(number, way, *more):
        given = runner.parse(["--way", way, "--device", device.type, "--longest", "24", *more])
        return runner.run_one(number, given)

    return report


@pytest.mark.parametrize(
    ("number", "way"),
    [
        (9, "fused"),
        (9, "fused-loop"),
        *thorough(*((number, way) for number in COVERED for way in ("fused", "fused-loop"))),
    ],
)
def test_covered_problems_end_well(number, way, report):
    found = report(number, way)
    assert found["verdict"] == "right", found
    assert found["details"]["result"] == {"fused": "CONVERGED", "fused-loop": "LOOP"}[way]


def test_what_is_not_covered_is_no_fault(report):
    found = report(8, "fused")
    assert found["verdict"] == "not covered"
    assert "mixes 29 numbers" in found["details"]["error"]


def test_faults_of_kernels_are_found(report, monkeypatch):
    assert report(9, "fused-loop", "--plant", "gradient")["verdict"] == "WRONG GRADIENT"
    problems = sys.modules["benchmarks.fuzz.problems"]
    monkeypatch.setattr(problems, "solve_fused", lambda *_, **__: "the kernels give another result")
    assert report(9, "fused-loop")["verdict"] == "refused"
