"""Source as text: modules, kernels, and lines for all numbers of a lane."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from .expressions import FUNCTIONS, Scalar
from .program import Program
from .tile_program import TileProgram

#: What a kernel may take from ``support``.
_SUPPORT = {"FAR", "SMOOTH", "finite_or_zero", "in_units", "lives_on", "note", "settled"}
_NAME = re.compile(r"[A-Za-z_]\w*")
#: The first program resets what a pass counts.
RESETS = (
    "if (tl.program_id(0) == 0) & (not WHOLE):",
    "    tl.store(unsettled + passes, 0)  # before anybody adds to it",
    "    tl.store(unsettled + limit + 2, 0)",
    "    if passes == 0:",
    "        tl.store(unsettled + limit, 0)",
    "        tl.store(unsettled + limit + 1, 0)",
)


class Lines:
    """The lines that some results need: of all steps, and of one, with what they read."""

    def __init__(self, program: Program | TileProgram, results: list[Scalar]):
        code = program.code
        self.results = results
        self.before: list[str] = code.lines(0, results)
        self.body: list[str] = code.lines(1, results)
        words = set(_NAME.findall("\n".join([*self.before, *self.body]))) | {code.text(each) for each in results}
        self.numbers: list[str] = sorted((w for w in words if re.fullmatch(r"n\d+", w)), key=lambda w: int(w[1:]))
        reads = [read for read in program.reads if read.value.name in words]
        self.fixed: list[Any] = [read for read in reads if read.value.level == 0]
        self.moving: list[Any] = [read for read in reads if read.value.level == 1]

    @property
    def leaves(self) -> list[int]:
        return sorted({read.leaf for read in (*self.fixed, *self.moving)})

    def numbers_loaded(self) -> list[str]:
        return [f"{name} = tl.load(numbers + {name[1:]})" for name in self.numbers]

    def advance(self, sign: str) -> list[str]:
        """To what is read at the next step."""
        return [f"a{i} {sign}= step{i}" for i in sorted({read.leaf for read in self.moving})]


#: By the kind of a value, how what is read becomes one.
CASTS = {"real": ".to(REAL)", "int": ".to(tl.int64)", "bool": " != 0"}


def leaf_arguments(program: Program | TileProgram, *, cotangents: bool = False) -> tuple[list[str], list[str]]:
    """Of every leaf where its base lies; how far apart steps, rows and channels are, and where the first channel stands. The same of what
    its cotangents are written to."""
    every, strides = range(len(program.leaves)), ("step", "row", "channel", "offset")
    pairs = [("p", ""), ("g", "to_")][: 1 + cotangents]
    pointers = [f"{name}{i}" for name, _ in pairs for i in every]
    return pointers, [f"{prefix}{what}{i}" for _, prefix in pairs for i in every for what in strides]


def module_text(dtype: torch.dtype, *kernels: str) -> str:
    names = {name for text in kernels for name in _NAME.findall(text)}
    functions, support = sorted(names & set(FUNCTIONS)), sorted(names & _SUPPORT)
    head = [
        '"""A step and what runs it: made by deeppcr.fuse."""',
        "",
        "import triton",
        "import triton.language as tl",
        "",
        *([f"from deeppcr.fuse.device import {', '.join(functions)}"] if functions else []),
        *([f"from deeppcr.fuse.support import {', '.join(support)}"] if support else []),
        "",
        f"REAL = tl.constexpr(tl.{str(dtype).removeprefix('torch.')})",
        *([f"EPS = tl.constexpr({torch.finfo(dtype).eps!r})"] if "EPS" in names else []),
    ]
    return "\n".join(head) + "".join("\n\n\n" + text for text in kernels) + "\n"


def indented(lines: Iterable[str], depth: int = 1) -> list[str]:
    return ["    " * depth + line for line in lines]


def for_each(width: int, *texts: str) -> list[str]:
    """Lines for k = 0 ... width - 1; of each k all texts."""
    return [text.format(k=k) for k in range(width) for text in texts]


def for_pairs(width: int, text: str) -> list[str]:
    return [text.format(i=i, j=j, at=i * width + j) for i in range(width) for j in range(width)]


def row_of(i: int, width: int, left: str, right: str) -> str:
    """Row i of a product of a matrix and a vector (or a column of a matrix), by names with {i} and {k}."""
    return " + ".join(f"{left.format(i=i, k=k)} * {right.format(k=k)}" for k in range(width))


#: Arguments that a kernel is not compiled for anew.
_SIZES = re.compile(
    r"(to_)?(step|row|channel|offset)\d+|guess_step|given_step|rows|channels|steps|every|first|chunk|chunks|turns|passes|limit|groups|group_chunks|local|linear|atol|rtol|roughest"
)


def kernel_text(name: str, arguments: list[str], constants: list[str], doc: str, lines: list[str]) -> str:
    sizes = ", ".join(f'"{each}"' for each in arguments if _SIZES.fullmatch(each))
    constant = ", ".join(f"{each}: tl.constexpr" for each in constants)
    return "\n".join([
        f"@triton.jit(do_not_specialize=[{sizes}])",
        f"def {name}({', '.join(arguments)}, {constant}):",
        "    " + doc,
        *indented(lines),
    ])  # fmt: skip
