"""Settings of an experiment changed by ``NAME=VALUE``, each value of the kind that the setting is declared to have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import field, fields, replace
from typing import Any, get_args, get_origin, get_type_hints

from .store import PaperError


def setting(default: Any, *, choices: Iterable[str] = (), least: int = 1) -> Any:
    """A field of a settings dataclass.

    Args:
        choices: the words that are understood, where it takes words
        least: the smallest whole number that makes sense; other numbers may be zero
    """
    return field(default=default, metadata={"choices": tuple(choices), "least": least})


def override(settings: Any, changes: Sequence[str], experiment: str) -> Any:
    """The settings with every ``NAME=VALUE`` of ``changes`` in place; a tuple is written as a comma list.

    >>> from deeppcr_paper.mlp_newton import Settings
    >>> override(Settings(), ["depths=8,64", "samples=1"], "mlp-newton").depths
    (8, 64)
    """
    usual, declared = settings, {each.name: each for each in fields(settings)}
    kinds = get_type_hints(type(settings))
    for change in changes:
        name, equals, text = change.partition("=")
        try:
            if name == "seed":
                raise ValueError("the seed is given by --seed")
            if not equals:
                raise ValueError("expected NAME=VALUE")
            if name not in declared:
                raise ValueError(f"there is no setting {name!r}")
            settings = replace(settings, **{name: _parse(text, kinds[name], declared[name].metadata)})
        except ValueError as error:
            known = " ".join(f"{key}={show(getattr(usual, key))}" for key in declared if key != "seed")
            raise PaperError(f"--set {change}: {error}. The settings of {experiment}: {known}") from None
    return settings


def _parse(text: str, kind: Any, about: Any) -> Any:
    if get_origin(kind) is tuple:
        found = tuple(_parse(part.strip(), get_args(kind)[0], about) for part in text.split(","))
        twice = [each for number, each in enumerate(found) if each in found[:number]]
        if twice:
            raise ValueError(f"{show(twice[0])} is there twice")
        return found
    options = get_args(kind) or (kind,)
    if type(None) in options and text == "none":
        return None
    number = next((each for each in (int, float) if each in options), None)
    if number is None or (str in options and not _is_number(text)):  # what is no number may be a word
        choices = about.get("choices", ())
        if choices and text not in choices:
            raise ValueError(f"expected {' or '.join(choices)}, got {text!r}")
        return text
    word = {int: "whole number", float: "number"}[number]
    try:
        value = number(text)
    except ValueError:
        raise ValueError(f"expected a {word}, got {text!r}") from None
    least = about.get("least", 1) if number is int else 0
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"expected a {word} of at least {least}, got {text}")
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def show(value: Any) -> str:
    """As it is written on the command line."""
    if isinstance(value, (tuple, list)):  # a list in a result file
        return ",".join(map(show, value))
    return "none" if value is None else str(value)
