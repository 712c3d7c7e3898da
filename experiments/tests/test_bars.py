"""Progress where there is no screen: lines, neither too many nor none."""

import io

import pytest
from rich.console import Console

from deeppcr_paper import bars


@pytest.mark.parametrize("terminal", [False, True])
def test_lines_stand_in_for_bars_where_there_is_no_screen(terminal, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(bars.time, "monotonic", lambda: now[0])
    written = io.StringIO()
    with bars.Bars(Console(file=written, force_terminal=terminal, width=100)) as shown:
        shown.begin(3, 1)
        for name in ("L=8", "L=16 [x]"):
            shown.cell(name)
            for share in range(5):
                now[0] += 10
                shown.part(share / 4)
            shown.end()
    lines = [
        "30 s: 1 of 3 cells, now L=8 50%",
        "60 s: 2 of 3 cells, now L=16 [x]",
        "90 s: 2 of 3 cells, now L=16 [x] 75%",
    ]
    assert [line for line in lines if line in written.getvalue()] == ([] if terminal else lines)
    if not terminal:
        assert written.getvalue().rstrip().splitlines() == ["going on: 1 of 3 cells are there already", *lines]
