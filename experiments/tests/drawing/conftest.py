"""Every experiment with a result, and what is drawn of it."""

import warnings

import pytest

pytest.importorskip("matplotlib")

from deeppcr_paper import (
    figures,
)
from drawing_support import small


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    return {result["experiment"]: result for result in small()}


@pytest.fixture(scope="module")
def drawings(results) -> dict[str, list[figures.Drawing]]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {name: figures.drawings(result) for name, result in results.items()}
