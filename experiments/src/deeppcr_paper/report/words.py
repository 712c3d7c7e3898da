"""How numbers and columns are called on the page."""

from __future__ import annotations

import math
from typing import Any

from ..figures.style import LABELS, PARALLEL, SEQUENTIAL, superscript

#: Ways to run the loop, strongest last: what a parallel solve is compared with.
BASELINES = {name: LABELS[name] for name in SEQUENTIAL}
#: Ways to run it in parallel.
METHODS = {name: LABELS[name] for name in PARALLEL}


def columns(records: list[dict[str, Any]], way: str = "forward") -> tuple[dict[str, str], dict[str, str]]:
    """The baselines and the methods that were measured, with their labels.

    A column that has no label here goes by its own name; it is a method if it counts Newton iterations.
    """
    baselines, methods = {}, {}
    for record in records:
        for name, entry in record.get(way, {}).items():
            if name in METHODS or (name not in BASELINES and "iterations" in entry):
                methods[name] = METHODS.get(name, name)
            else:
                baselines.setdefault(name, BASELINES.get(name, name))
    # A column first seen where it ran out of memory counted no iterations there.
    baselines = {name: label for name, label in baselines.items() if name not in methods}
    return _in_order(baselines, BASELINES), _in_order(methods, METHODS)


def _in_order(found: dict[str, str], known: dict[str, str]) -> dict[str, str]:
    names = [name for name in known if name in found] + [name for name in found if name not in known]
    return {name: found[name] for name in names}


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


def activation_name(name: str) -> str:
    return {"relu": "ReLU"}.get(name, name)
