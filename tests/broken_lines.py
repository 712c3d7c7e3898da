"""Breaks lines of the library on purpose, one at a time, and looks whether the tests notice.

    python tests/broken_lines.py [--seed 0] [--count 40] [--jobs 2] [--only src/deeppcr/sequence] [--skip kernels]

Lines are drawn by the seed, at most one a function: a comparison, sign, condition or number becomes another. Each broken copy
of the checkout runs the tests, those of the same room first, until one fails. What survives is printed, to be explained or tested.
"""

from __future__ import annotations

import argparse
import ast
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: An operator, as it stands in the text, and what takes its place.
COMPARED = {ast.Lt: ("<", ">="), ast.LtE: ("<=", "<"), ast.Gt: (">", "<="), ast.GtE: (">=", ">")}
COMPARED |= {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")}
COMPARED |= {ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")}
COMPUTED = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
}
COMPUTED |= {ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&")}
JOINED = {ast.And: ("and", "or"), ast.Or: ("or", "and")}


@dataclass(frozen=True)
class Break:
    """A place on one line of a file, from one byte to another, and what is written there instead."""

    path: Path
    line: int
    start: int
    stop: int
    before: str
    after: str
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before!r} -> {self.after!r} in {self.function}"

    def apply(self, checkout: Path) -> None:
        path = checkout / self.path
        lines = path.read_bytes().split(b"\n")
        text = lines[self.line - 1]
        place = text[self.start : self.stop]
        assert self.before.encode() in place, self
        changed = place.replace(self.before.encode(), self.after.encode(), 1)
        lines[self.line - 1] = text[: self.start] + changed + text[self.stop :]
        path.write_bytes(b"\n".join(lines))


def breaks_in(path: Path) -> Iterator[Break]:
    """Every place of a file that can be broken; not in annotations, doctests and messages."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                found = _change(node)
                if found is not None:
                    (first, last), (before, after) = found
                    if isinstance(node, ast.Constant):
                        where = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
                    else:
                        where = first.end_lineno, first.end_col_offset, last.lineno, last.col_offset
                    if where[0] == where[2]:
                        yield Break(path, where[0], where[1], where[3], before, after, function.name)


def _change(node: ast.AST) -> tuple[tuple[ast.expr, ast.expr], tuple[str, str]] | None:
    """The expressions to either side of an operator, and the operator before and after; of a number, itself twice."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        return (node.left, node.comparators[0]), COMPARED[type(node.ops[0])]
    if isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not _is_text(node.left):
        return (node.left, node.right), COMPUTED[type(node.op)]
    if isinstance(node, ast.BoolOp):
        return (node.values[0], node.values[1]), JOINED[type(node.op)]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return (node, node), (str(node.value), str(node.value + 1))
    return None


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def draw(seed: int, count: int, only: list[str], without: list[str]) -> list[Break]:
    """So many places, spread over functions: each function is drawn once at most."""
    named = [ROOT / each for each in only]
    files = sorted({path for each in named for path in ([each] if each.is_file() else each.rglob("*.py"))})
    places: dict[tuple[Path, str], list[Break]] = {}
    for path in (each for each in files if not any(word in str(each.relative_to(ROOT)) for word in without)):
        for each in breaks_in(path.relative_to(ROOT)):
            places.setdefault((each.path, each.function), []).append(each)
    source = random.Random(seed)
    chosen = source.sample(sorted(places, key=str), min(count, len(places)))
    return [source.choice(places[key]) for key in chosen]


def tests_for(path: Path, checkout: Path, skip: list[str]) -> list[str]:
    """All test files, those with names like the broken file or its folders first; without paths that hold a word of ``skip``."""
    words = {*path.with_suffix("").parts[2:]}
    folders = [folder for folder in ("tests", "experiments/tests") if (checkout / folder).exists()]
    found = sorted(each for folder in folders for each in (checkout / folder).rglob("test_*.py"))
    found = [each for each in found if not any(word in str(each.relative_to(checkout)) for word in skip)]
    near = {each: len(words & {*each.parts, each.stem.removeprefix("test_")}) for each in found}
    return [str(each.relative_to(checkout)) for each in sorted(found, key=lambda each: -near[each])]


def examine(each: Break | None, arguments: list[str], skip: list[str], seconds: float) -> str:
    """What the tests say to a copy of the checkout, broken or, to begin with, as it is."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "site"), symlinks=True)
        if each is not None:
            each.apply(copy)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *arguments]
        try:
            done = subprocess.run(
                [*command, *tests_for(each.path if each else Path(), copy, skip)],
                cwd=copy,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "no answer in time"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 0:
        return "SURVIVED"
    return (
        f"found: {failed[0]}"
        if done.returncode == 1 and failed
        else f"pytest ended with {done.returncode}: {done.stdout[-200:]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1200, help="for the tests of one broken line")
    parser.add_argument("--only", nargs="+", default=["src/deeppcr"], help="folders or files to draw from")
    parser.add_argument(
        "--skip", nargs="+", default=[], help="words: test files with one of them in their path are not run"
    )
    parser.add_argument(
        "--without", nargs="+", default=[], help="words: files with one of them in their path are not broken"
    )
    parser.add_argument("--pytest", default="", help="further arguments of pytest")
    parser.add_argument("--list", action="store_true", help="show what would be broken, and break nothing")
    given = parser.parse_args()
    drawn = draw(given.seed, given.count, given.only, given.without)
    if given.list:
        print(*drawn, sep="\n")
        return 0
    found, begun = 0, time.monotonic()
    with ThreadPoolExecutor(given.jobs) as pool:
        for each, verdict in pool.map(
            lambda one: examine(one, shlex.split(given.pytest), given.skip, given.seconds), drawn
        ):
            found += verdict.startswith("found")
            print(f"{each}\n    {verdict[:160]}", flush=True)
    print(f"{found} of {len(drawn)} found in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
