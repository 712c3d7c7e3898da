"""docs/troubleshooting.md goes by what users see: its headlines are messages of the library, and no message of a kind is left out."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import deeppcr

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "deeppcr"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HEADLINES = re.findall(r"^### `(.*)`$", PAGE, re.MULTILINE)
#: Messages that share the entry of another one.
BESIDE = re.findall(r"`((?:step|solver|denoiser): [^`]*)`", re.sub(r"^### .*$", "", PAGE, flags=re.MULTILINE))
_ANY = "…"


def words(node: ast.AST) -> str | None:
    """A string of the source as a page writes it: what is filled in is ``…``."""
    if isinstance(node, ast.Constant):
        return re.sub(r"\{\w+\}", _ANY, node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) or "" if isinstance(part, ast.Constant) else _ANY for part in node.values)
    return None


@cache
def messages() -> list[str]:
    """Every string of the library; complaints about what a step returns, with what stands before them."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    found = {path: [text for node in ast.walk(tree) if (text := words(node))] for path, tree in trees.items()}
    complaints = [f"step: {text}" for text in found[SOURCE / "sequence" / "layout.py"] if not re.match(r"\w+: ", text)]
    return [text for texts in found.values() for text in texts] + complaints


def raised(*kinds: str) -> set[str]:
    """The messages that are raised as one of these, as far as they stand where they are raised."""
    found = set()
    # Every process that collects asks, so files that name none of them are not read.
    texts = [
        text
        for path in SOURCE.rglob("*.py")
        if any(kind in (text := path.read_text(encoding="utf-8")) for kind in kinds)
    ]
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds and node.args:
                found.add(words(node.args[0]) or "")
    return found - {""}


def begins(message: str, headline: str) -> bool:
    """Whether a message, as it is printed, begins as a headline does; what is filled in may be anything.

    >>> begins("step: changes … in place, which", "step: changes … in place")
    True
    """
    pattern = "".join(".+?" if part == _ANY else re.escape(part) for part in re.split(f"({_ANY})", headline))
    return re.match(pattern, message) is not None


def test_the_page_has_headlines():
    assert len(HEADLINES) > 40
    assert len(set(HEADLINES)) == len(HEADLINES)


@pytest.mark.parametrize("headline", [*HEADLINES, *BESIDE])
def test_every_headline_is_a_message_of_the_library(headline):
    assert any(begins(message, headline) for message in messages()), "no string of src/deeppcr begins like this"


def test_a_headline_that_no_message_begins_with_is_found():
    assert not any(begins(message, "step: is too slow") for message in messages())


#: What begins with a name that stands before the message in the source.
_PREFIXED = re.compile(rf"^{_ANY}(it multiplies|it is random)")


@pytest.mark.parametrize("message", sorted(raised("StepError", "SideEffect", "RandomStep", "GradientOverflow")))
def test_no_refusal_of_a_step_is_left_out(message):
    if message.startswith(f"step: {_ANY}{_ANY}") or _PREFIXED.match(message):
        return  # put together elsewhere: "changes the state's shape", "gives another result when"
    assert any(begins(message, headline) for headline in [*HEADLINES, *BESIDE]), message


@pytest.mark.parametrize("result", [each for each in deeppcr.Result if each.severity >= 3], ids=lambda each: each.name)
def test_every_result_that_is_not_what_was_asked_for_has_an_entry(result):
    text = re.sub(r"\{\w+\}", _ANY, result.value)
    assert any(begins(text, headline) for headline in HEADLINES)
