"""Reports whose figures cost nothing."""

import pytest

pytest.importorskip("matplotlib")
from deeppcr_paper.figures import Figure
from deeppcr_paper.report import page

SVG = """<svg viewBox="0 0 2 1" role="img" aria-label="A line"><defs><path id="NAME-line" d="M0 0H2"/><clipPath id="NAME-clip">
<rect width="2" height="1"/></clipPath></defs><use href="#NAME-line" clip-path="url(#NAME-clip)"/></svg>"""


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """Figures that cost nothing: what is drawn is tested elsewhere, and on the page in a browser."""

    def draw(content):
        for record in content["records"]:
            if "part" not in record:  # of training
                int(record["L"])  # as the real ones do, it falls over what is damaged
            assert content["experiment"] != "mlp-timing" or record["forward"]
        names = [f"{content['experiment']}-{number}" for number in "12"]
        return [Figure(name, "A line", "fig. 3", "It is flat.", SVG.replace("NAME", name)) for name in names]

    monkeypatch.setattr(page, "draw", draw)
