"""How numbers and columns are called."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..figures.style import LABELS, PARALLEL, SEQUENTIAL, superscript

#: Ways to run the loop, strongest last: what a parallel solve is compared with.
BASELINES = {name: LABELS[name] for name in SEQUENTIAL}
#: Ways to run it in parallel, with their labels and in a sentence.
METHODS = {name: LABELS[name] for name in PARALLEL}
SHORT = {"printed": "printed", "auto": "defaults"}


def timed_columns(records: Iterable[dict[str, Any]], names: dict[str, str]) -> dict[str, str]:
    """Those of the names that were timed in a forward pass, with their labels."""
    found = {column for record in records for column in record["forward"]}
    return {name: label for name, label in names.items() if name in found}


def finite(value: Any) -> bool:
    """A number; files hold the names of those that are not finite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def error_size(value: float) -> str:
    """
    >>> error_size(0.0000143), error_size(0)
    ('1.4·10⁻⁵', '0')
    """
    if not value:
        return "0"
    lead, exponent = f"{value:.1e}".split("e")
    return f"{lead}·10{superscript(int(exponent))}"


def listed(words: Sequence[str]) -> str:
    """
    >>> listed(["one", "two", "three"])
    'one, two and three'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def depths_in_words(values: Iterable[float]) -> str:
    """From the least to the most, to two digits: depths between measured ones are not known better.

    >>> depths_in_words([1234.0, 88.0]), depths_in_words([16.0])
    ('88 to 1,200', '16')
    """
    found = sorted(float(f"{value:.2g}") for value in values)
    low, high = f"{found[0]:,.0f}", f"{found[-1]:,.0f}"
    return low if low == high else f"{low} to {high}"
