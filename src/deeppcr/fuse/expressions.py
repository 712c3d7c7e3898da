"""Straight-line scalar code, from which the source of a kernel is made: one line an operation.

A ``Scalar`` is a number that is known while the code is written, or a ``Value``: a name in the code. The methods of
``Code`` are the operations: of numbers they give a number, folded in float64, and of values a value, whose line they
add unless there is one that computes the same.

**What is folded.** ``x + 0``, ``x * 1``, ``x * 0``, ``0 / x``, ``where(True, a, b)`` and the like: tangents are full of zeros
and ones. Zeros of the user's own cannot be told from those, so where a step multiplies infinity by a zero that it wrote
as a number, or adds one to -0.0, the code gives 0 and -0.0 for PyTorch's NaN and 0. Numbers that are read from tensors are values and never folded.

**What the lines name** beside each other: ``tl``; ``REAL``, the dtype of the kernel's arithmetic; the functions of ``device``;
and ``n0``, ``n1``, ...: numbers, arguments of the kernel in the dtype ``REAL``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np

Kind = Literal["real", "int", "bool"]
_KINDS: tuple[Kind, ...] = ("bool", "int", "real")  # of two, the later is that of their sum

_SAME_NAME = (
    *("ceil", "cos", "cosh", "exp", "exp2", "expm1", "floor", "fmod", "hypot", "log", "log10", "log1p", "log2"),
    *("rint", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
#: Functions of real numbers, by the names that they have in libdevice, and how NumPy computes them. Codes call them, numbers
#: are folded by them, and so are kernels interpreted.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _SAME_NAME},
    **{f"a{name}": getattr(np, f"arc{name}") for name in ("cos", "cosh", "sin", "sinh", "tan", "tan2", "tanh")},
    "erf": np.vectorize(math.erf, otypes=[float]),
    "erfc": np.vectorize(math.erfc, otypes=[float]),
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}

_ARITHMETIC: dict[str, Callable[..., Any]] = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}


class NotCovered(Exception):
    """An operation, or a size, for which there is no source: "aten.sort is not covered"."""


@contextmanager
def covering() -> Iterator[None]:
    """Whatever a rule did not foresee, inside, is not covered."""
    try:
        yield
    except NotCovered:
        raise
    except Exception as error:
        raise NotCovered(f"the step cannot be written as a kernel ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class Value:
    """A name in the code.

    Args:
        name: "v12", or that of an input
        kind: "real" is the dtype of the kernel's arithmetic
        level: 0, the same for all steps, or 1, of one step
    """

    name: str
    kind: Kind
    level: int


Scalar = Value | float | int | bool


class _Line(NamedTuple):
    text: str
    operands: tuple[Scalar, ...]


def kind_of(scalar: Scalar) -> Kind:
    if isinstance(scalar, Value):
        return scalar.kind
    return "bool" if isinstance(scalar, bool) else "int" if isinstance(scalar, int) else "real"


def is_number(scalar: Scalar, number: float | None = None) -> TypeGuard[float]:
    """Whether a scalar is known: as this number, if one is given."""
    return not isinstance(scalar, Value) and (number is None or scalar == number)


def _fold(function: Callable, *numbers: float) -> float:
    with np.errstate(all="ignore"):
        return float(function(*(np.float64(number) for number in numbers)))


def _is_exact(number: float) -> bool:
    """Whether a number may stand in the source: one that says how a formula is built rather than what its parameters are,
    and is exact in float32, as which Triton takes it."""
    if not math.isfinite(number) or (number == int(number) and abs(number) <= 16):
        return True
    mantissa, exponent = math.frexp(number)
    return abs(mantissa) == 0.5 and abs(exponent) <= 64


@dataclass
class Code:
    """Operations in the order of their lines. Numbers are folded, equal operations are done once."""

    #: what the arguments ``n0``, ``n1``, ... of the kernel are: a changed number does not make another kernel
    numbers: list[float] = field(default_factory=list)
    _lines: dict[Value, _Line] = field(default_factory=dict)
    _known: dict[tuple[str, Kind], Value] = field(default_factory=dict)  # by what they compute

    def __len__(self) -> int:
        return len(self._lines)

    def input(self, name: str, kind: Kind = "real", level: int = 1) -> Value:
        return Value(name, kind, level)

    def emit(self, text: str, kind: Kind, *operands: Scalar) -> Value:
        """The value that ``text``, an expression of ``operands``, computes."""
        known = self._known.get((text, kind))
        if known is None:
            level = max((each.level for each in operands if isinstance(each, Value)), default=0)
            known = self._known[text, kind] = Value(f"v{len(self._lines)}", kind, level)
            self._lines[known] = _Line(text, operands)
        return known

    def text(self, scalar: Scalar) -> str:
        """How a scalar stands in the source."""
        if isinstance(scalar, Value):
            return scalar.name
        if isinstance(scalar, int):  # bools, too
            return str(scalar)
        if not _is_exact(scalar):
            if scalar not in self.numbers:
                self.numbers.append(scalar)
            return f"n{self.numbers.index(scalar)}"
        return repr(scalar) if math.isfinite(scalar) else f'float("{scalar}")'

    def lines(self, level: int, results: Iterable[Scalar]) -> list[str]:
        """The lines of one level that ``results`` need."""
        needed = {each for each in results if isinstance(each, Value)}
        for value, line in reversed(self._lines.items()):
            if value in needed:
                needed.update(each for each in line.operands if isinstance(each, Value))
        return [
            f"{value.name} = {line.text}"
            for value, line in self._lines.items()
            if value in needed and value.level == level
        ]

    def cast(self, scalar: Scalar, kind: Kind) -> Scalar:
        if kind_of(scalar) == kind:
            return scalar
        if not isinstance(scalar, Value):
            return {"real": float, "int": int, "bool": bool}[kind](scalar)
        if kind == "bool":
            return self.compare("!=", scalar, 0)
        return self.emit(f"tl.cast({scalar.name}, {'REAL' if kind == 'real' else 'tl.int64'})", kind, scalar)

    def promote(self, *scalars: Scalar) -> tuple[Scalar, ...]:
        """All of one kind, that of their sum."""
        kind = _KINDS[max(_KINDS.index(kind_of(each)) for each in scalars)]
        return tuple(self.cast(each, kind) for each in scalars)

    def add(self, a: Scalar, b: Scalar) -> Scalar:
        a, b = self.promote(a, b)
        if kind_of(a) == "bool":
            return self.either(a, b)
        if is_number(a, 0):
            return b
        return a if is_number(b, 0) else self._arithmetic("+", a, b)

    def sub(self, a: Scalar, b: Scalar) -> Scalar:
        a, b = self.promote(a, b)
        if is_number(a, 0):
            return self.neg(b)
        return a if is_number(b, 0) else self._arithmetic("-", a, b)

    def mul(self, a: Scalar, b: Scalar) -> Scalar:
        a, b = self.promote(a, b)
        if kind_of(a) == "bool":
            return self.both(a, b)
        for one, other in ((a, b), (b, a)):
            if is_number(one, 0) and not is_number(other):
                return one
            if is_number(one, 1):
                return other
            if is_number(one, -1):
                return self.neg(other)
        return self._arithmetic("*", a, b)

    def div(self, a: Scalar, b: Scalar) -> Scalar:
        """The quotient of real numbers."""
        a, b = self.cast(a, "real"), self.cast(b, "real")
        if is_number(b, 1) or (is_number(a, 0) and not is_number(b)):
            return a
        return self.neg(a) if is_number(b, -1) else self._arithmetic("/", a, b)

    def neg(self, a: Scalar) -> Scalar:
        if not isinstance(a, Value):
            return -a
        line = self._lines.get(a)
        if line is not None and line.operands and line.text == f"-{self.text(line.operands[0])}":
            return line.operands[0]
        return self.emit(f"-{a.name}", a.kind, a)

    def _arithmetic(self, sign: str, a: Scalar, b: Scalar) -> Scalar:
        kind = kind_of(a)
        if is_number(a) and is_number(b):
            # Integers as Python has them, which lose no digit.
            return _fold(_ARITHMETIC[sign], a, b) if kind == "real" else {"+": a + b, "-": a - b, "*": a * b}[sign]
        swapped = f"{self.text(b)} {sign} {self.text(a)}"
        if sign in "+*" and (swapped, kind) in self._known:
            return self._known[swapped, kind]
        return self.emit(f"{self.text(a)} {sign} {self.text(b)}", kind, a, b)

    def call(self, function: str, *arguments: Scalar) -> Scalar:
        """A function of ``FUNCTIONS``."""
        arguments = tuple(self.cast(each, "real") for each in arguments)
        numbers = [each for each in arguments if is_number(each)]
        if len(numbers) == len(arguments):
            return _fold(FUNCTIONS[function], *numbers)
        # Functions are found by the types of their arguments, and a number by itself is float32.
        texts = [
            self.text(each) if isinstance(each, Value) else f"tl.cast({self.text(each)}, REAL)" for each in arguments
        ]
        return self.emit(f"{function}({', '.join(texts)})", "real", *arguments)

    def abs(self, a: Scalar) -> Scalar:
        if not isinstance(a, Value):
            return abs(a)
        return a if a.kind == "bool" else self.emit(f"tl.abs({a.name})", a.kind, a)

    def compare(self, sign: str, a: Scalar, b: Scalar) -> Scalar:
        a, b = self.promote(a, b)
        if is_number(a) and is_number(b):
            return bool(_COMPARISONS[sign](a, b))
        return self.emit(f"{self.text(a)} {sign} {self.text(b)}", "bool", a, b)

    def both(self, a: Scalar, b: Scalar) -> Scalar:
        """And."""
        return self._logic("&", a, b, neutral=True)

    def either(self, a: Scalar, b: Scalar) -> Scalar:
        """Or."""
        return self._logic("|", a, b, neutral=False)

    def _logic(self, sign: str, a: Scalar, b: Scalar, *, neutral: bool) -> Scalar:
        a, b = self.cast(a, "bool"), self.cast(b, "bool")
        for one, other in ((a, b), (b, a)):
            if not isinstance(one, Value):
                return other if one == neutral else one
        return self.emit(f"{self.text(a)} {sign} {self.text(b)}", "bool", a, b)

    def invert(self, a: Scalar) -> Scalar:
        """Not."""
        a = self.cast(a, "bool")
        if not isinstance(a, Value):
            return not a
        line = self._lines.get(a)
        if line is not None and line.text.startswith("~"):
            return line.operands[0]
        return self.emit(f"~{a.name}", "bool", a)

    def where(self, condition: Scalar, a: Scalar, b: Scalar) -> Scalar:
        condition = self.cast(condition, "bool")
        a, b = self.promote(a, b)
        if not isinstance(condition, Value):
            return a if condition else b
        if a == b:
            return a
        kind = kind_of(a)
        text = f"tl.where({condition.name}, {self.text(a)}, {self.text(b)})"
        if is_number(a) and is_number(b) and kind != "bool":  # of which Triton would make float32 or int32
            text = f"tl.cast({text}, {'REAL' if kind == 'real' else 'tl.int64'})"
        return self.emit(text, kind, condition, a, b)
