"""Where the step has kernels, they roll out the chunks of each rank."""

from __future__ import annotations

import pytest

from distributed import more_cases
from distributed.test_solve import assert_same

triton = pytest.importorskip("triton")


# The ranks are on CPUs, wherever the other tests run.
@pytest.mark.skipif(triton.__version__ < "3.7", reason="Triton interprets them from 3.7 on")
@pytest.mark.parametrize("kind", ["elementwise", pytest.param("narrow", marks=pytest.mark.thorough), "tile"])
def test_chunks_by_kernels(team, kind):
    lengths = [9, 0, 6]
    found = team.results(3, "distributed.more_cases", "fused", kind=kind, lengths=lengths)
    assert_same(found, more_cases.fused(None, kind, lengths), tolerance=2e-5)
    for each in found:
        assert each["result"] == "CONVERGED"
        assert "chunks are rolled out by kernels, and joined over ranks" in each["notes"]


def test_sources_are_written_by_several_processes_at_once(team, tmp_path):
    folder = tmp_path / "fresh"
    size = max(team.sizes)
    assert team.results(size, "distributed.more_cases", "written_at_once", folder=str(folder)) == [(True, True)] * size
    assert len(list(folder.glob("*.py"))) == 1  # nothing half written is left
