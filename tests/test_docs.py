"""The pages are tests: every Python block of the README and of docs/ runs, page by page, in one namespace a page.

A comment before a block says what is expected of it; a block of text after it is what it prints:

    <!-- raises: StepError -->          the block ends with this exception
    <!-- warns: ConvergenceWarning -->  the block gives this warning; without the comment, none of the library's may come
    ```text                             right after a Python block: what it prints, ``...`` standing for anything
    <!-- measured -->                   before such a text: its numbers are measurements and may be off by a quarter, or by 2
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import inspect
import io
import os
import re
import subprocess
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

import deeppcr

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
API = ROOT / "docs" / "api.md"

#: Pages that need more than the library, and the extra with it.
NEEDS = {"diffusers.md": "diffusers"}

#: Public names that need no example: what cannot be made by a user, only caught or subclassed.
NO_EXAMPLE = {
    "deeppcr.ConvergenceError",
    "deeppcr.ConvergenceWarning",
    "deeppcr.StepError",
    "deeppcr.linear.Blocks",  # abstract
    "deeppcr.linear.LinearSolver",  # a protocol
}


@dataclass
class Block:
    """One Python block: where its first line of code stands, and what is expected of it."""

    line: int
    source: str
    raises: str | None = None
    warns: str | None = None
    prints: str | None = None
    measured: bool = False


def blocks_of(page: Path) -> list[Block]:
    """The Python blocks of a page, in order."""
    found: list[Block] = []
    comments: dict[str, str] = {}
    after_python = False  # nothing but blank lines and comments since the last Python block
    lines = page.read_text(encoding="utf-8").split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        fence = re.match(r"^(\s*)(```+|~~~+)\s*(\S*)", line)
        comment = re.match(r"^<!-- (\w+)(?:: (\w+))? -->$", line)
        if fence:
            end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == fence[2]), None)
            assert end is not None, f"{page.name}:{at + 1}: the block is never closed"
            source, language = "\n".join(lines[at + 1 : end]), fence[3]
            where = f"{page.relative_to(ROOT)}:{at + 1}"
            assert language in ("python", "text", "sh"), f"{where}: a block of {language!r} is not covered by the tests"
            assert language != "python" or not fence[1], (
                f"{where}: an indented Python block is not covered by the tests"
            )
            if language == "python":
                found.append(Block(at + 2, source, comments.pop("raises", None), comments.pop("warns", None)))
            elif language == "text" and after_python:
                found[-1].prints, found[-1].measured = source, comments.pop("measured", None) is not None
            assert not comments, f"{where}: nothing is to be done with the comments {sorted(comments)}"
            after_python = language == "python"
            at = end
        elif comment:
            assert comment[1] in ("raises", "warns", "measured"), f"{page.name}:{at + 1}: unknown comment {line}"
            comments[comment[1]] = comment[2] or ""
        elif line.strip():
            assert not comments, f"{page.name}:{at + 1}: a comment must stand right before its block"
            after_python = False
        at += 1
    return found


def run(block: Block, page: Path, namespace: dict) -> str | None:
    """What is wrong with the block, or None."""
    printed, error = io.StringIO(), None
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        try:
            # Blank lines before it give the code the line numbers of the page.
            exec(compile("\n" * (block.line - 1) + block.source, str(page), "exec"), namespace)
        except Exception as raised:
            error = raised
    names = [kind.__name__ for kind in type(error).__mro__] if error is not None else []
    if error is not None and block.raises not in names:
        line = next(
            (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(page)), 0
        )
        return f"line {line}: {type(error).__name__}: {error}"
    if error is None and block.raises:
        return f"{block.raises} was to be raised"
    given = {w.category.__name__ for w in caught if issubclass(w.category, deeppcr.ConvergenceWarning)}
    if given != ({block.warns} if block.warns else set()):
        return f"warnings: expected {block.warns}, got {given or None}"
    if block.prints is not None and not same_text(block.prints, printed.getvalue(), measured=block.measured):
        return f"prints\n{printed.getvalue()}\nand not\n{block.prints}"
    return None


def same_text(expected: str, got: str, *, measured: bool) -> bool:
    if not measured:
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        return doctest.OutputChecker().check_output(expected.strip() + "\n", got.strip() + "\n", flags)
    number = re.compile(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?")
    if number.sub("#", expected).split() != number.sub("#", got).split():
        return False
    pairs = zip(map(float, number.findall(expected)), map(float, number.findall(got)), strict=True)
    return all(abs(a - b) <= max(2.0 if min(a, b) >= 1 else 0.0, 0.25 * abs(a)) for a, b in pairs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_runs(page):
    needed = NEEDS.get(page.name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: pip install deeppcr[{needed}]")
    namespace = {"__name__": "__page__"}
    for block in blocks_of(page):
        wrong = run(block, page, namespace)
        if wrong is not None:
            pytest.fail(f"{page.relative_to(ROOT)}:{block.line}: {wrong}", pytrace=False)


def test_pages_agree_on_how_it_is_installed():
    """From a clone, with the versions that are tested: it is on no package index."""
    lines = [line for page in PAGES for line in page.read_text().splitlines() if line.startswith("pip install")]
    assert len(lines) >= 5
    for line in lines:
        assert re.match(r"pip install -e (\.|'\.\[[a-z,]+\]'|\. -e experiments) -c constraints\.txt( |$)", line), line


def test_pages_have_blocks():
    """A change in how pages are written must not leave their examples untested in silence."""
    counts = {page.name: len(blocks_of(page)) for page in PAGES}
    pages = (
        "README index choose steps networks solution recipes recurrent kernels convergence mathematics markov diffusers"
    )
    for name in (f"{page}.md" for page in pages.split()):
        assert counts[name] >= 1, name


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("x = 1\n1 / 0", "line 4: ZeroDivisionError"),
        ("assert False, 'no'", "line 3: AssertionError: no"),
        ("import warnings, deeppcr\nwarnings.warn('w', deeppcr.ConvergenceWarning)", "warnings: expected None"),
    ],
)
def test_a_broken_block_is_found(tmp_path, block, complaint):
    page = tmp_path / "page.md"
    page.write_text(f"text\n```python\n{block}\n```\n")
    (only,) = [Block(3, block)]
    assert complaint in (run(only, page, {}) or "")


def test_expected_output_and_exceptions_are_compared():
    page = Path("page.md")
    assert run(Block(1, "print(1)", prints="1"), page, {}) is None
    assert run(Block(1, "print(1)", prints="2"), page, {}) is not None
    assert run(Block(1, "print('a b')", prints="a ..."), page, {}) is None
    assert run(Block(1, "print('rate 0.5 in 10')", prints="rate 0.6 in 12", measured=True), page, {}) is None
    assert run(Block(1, "print('rate 0.5 in 10')", prints="rate 0.7 in 10", measured=True), page, {}) is not None
    assert run(Block(1, "print('rate 0.5 in 10')", prints="rate 0.5 in 14", measured=True), page, {}) is not None
    assert run(Block(1, "1 / 0", raises="ZeroDivisionError"), page, {}) is None
    assert run(Block(1, "1 / 0", raises="KeyError"), page, {}) is not None
    assert run(Block(1, "pass", raises="KeyError"), page, {}) is not None
    assert run(Block(1, "pass", warns="ConvergenceWarning"), page, {}) is not None


# The reference.


def public() -> dict[str, object]:
    names = {f"deeppcr.{name}": getattr(deeppcr, name) for name in deeppcr.__all__}
    for module in (deeppcr.fuse, deeppcr.linear, deeppcr.nn, deeppcr.diffusion, deeppcr.distributed):
        names |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    return names


def documented() -> set[int]:
    """The objects that api.md has an entry for, by identity: some names are reachable in two ways."""
    entries = re.findall(r"^::: (\S+)$", API.read_text(encoding="utf-8"), re.MULTILINE)
    everything = public()
    objects = set()
    for entry in entries:
        owner, _, name = entry.rpartition(".")
        # `deeppcr.solve` is the function for Python and the module for the page's tool, which wants `deeppcr.solve.solve`.
        key = owner if owner.endswith(f".{name}") else entry
        assert key in everything, f"api.md: {entry} is not public"
        objects.add(id(everything[key]))
    return objects


@pytest.mark.parametrize("name", sorted(public()))
def test_public_names_are_on_the_api_page(name):
    thing = public()[name]
    if inspect.ismodule(thing):
        assert f"`{name}`" in API.read_text(encoding="utf-8")
    else:
        assert id(thing) in documented(), f"docs/api.md has no entry `::: {name}`"


@pytest.mark.parametrize("name", sorted(set(public()) - NO_EXAMPLE))
def test_public_names_have_an_example(name):
    thing = public()[name]
    text = inspect.getdoc(thing) or ""
    assert text, f"{name} has no docstring"
    assert inspect.ismodule(thing) or ">>> " in text, f"the docstring of {name} has no example"


def test_exempt_names_are_public_and_have_a_docstring():
    assert set(public()) >= NO_EXAMPLE
    assert all(inspect.getdoc(public()[name]) for name in NO_EXAMPLE)


def test_the_layers_that_contributing_names_are_those_that_are_checked():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    checked = re.findall(r'"([\w |]+)"', re.search(r"^layers = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)[1])
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.search(r"```\n(diffusion →.*?)```", page, re.DOTALL)[1]
    assert [name.strip() for name in named.split("→")] == checked


def test_install_lines_agree():
    """It is on no package index: a page that says otherwise sends newcomers to an error."""
    commands = [
        re.findall(r"^pip install .*?(?=\s+#|$)", page.read_text(encoding="utf-8"), re.MULTILINE)
        for page in (ROOT / "README.md", ROOT / "docs" / "index.md")
    ]
    assert commands[0] == commands[1] != []
    assert all(" -e " in command and command.endswith("-c constraints.txt") for command in commands[0])


def test_site_builds_without_a_warning(tmp_path):
    for needed in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install deeppcr[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "markov" / "index.html").exists()
