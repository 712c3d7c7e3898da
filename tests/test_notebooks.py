"""The notebooks run from the first cell to the last, and the documentation links to them.

Their code cells are plain Python and run in one namespace, one after the other, as a kernel would: no package of Jupyter's is needed.
"""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def read(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    return content, ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]


def run(cells, name):
    """What they print; an error names the cell."""
    namespace = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for number, code in enumerate(cells):
            exec(compile(code, f"{name}, code cell {number}", "exec"), namespace)
    return printed.getvalue()


def test_there_is_one_for_each_audience_and_the_pages_link_to_them():
    assert [path.stem for path in NOTEBOOKS] == ["diffusion", "network_depth", "ode", "rnn_training"]
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert all(f"(notebooks/{path.name})" in index for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_are_notebooks_as_jupyter_writes_them_without_outputs(path):
    content, cells = read(path)
    assert (content["nbformat"], content["nbformat_minor"] >= 5) == (4, True)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    assert all(cell["outputs"] == [] for cell in content["cells"] if cell["cell_type"] == "code")
    assert any("assert " in code for code in cells), "what is shown is checked"


@pytest.mark.thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_run(path):
    torch.manual_seed(0)
    assert run(read(path)[1], path.name)


def test_a_cell_that_fails_is_named():
    with pytest.raises(ZeroDivisionError) as failure:
        run(["x = 1", "x / 0"], "broken.ipynb")
    assert str(failure.traceback[-1].path).endswith("broken.ipynb, code cell 1")
