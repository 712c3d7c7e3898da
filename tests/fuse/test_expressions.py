"""Scalar code: what is folded, what stands once, which lines are needed."""

import math

import numpy as np
import pytest

from deeppcr.fuse.expressions import FUNCTIONS, Code, Value, is_number

inf, nan = math.inf, math.nan


@pytest.fixture
def code():
    return Code()


@pytest.fixture
def x(code):
    return code.input("x")


def test_zeros_and_ones_are_folded(code, x):
    for folded in (
        *(code.add(x, 0), code.add(0.0, x), code.sub(x, 0), code.mul(x, 1), code.mul(1.0, x), code.div(x, 1)),
        *(code.neg(code.neg(x)), code.mul(-1, code.neg(x)), code.sub(0, code.neg(x)), code.div(code.neg(x), -1.0)),
        *(code.where(True, x, 2.0), code.where(code.compare(">", x, 1), x, x), code.cast(x, "real")),
    ):
        assert folded == x
    for folded in (code.mul(x, 0), code.mul(0.0, x), code.div(0, x)):
        assert folded == 0
        assert is_number(folded)
    condition = code.compare(">", x, 2)
    assert (
        code.both(condition, True) == code.either(False, condition) == code.invert(code.invert(condition)) == condition
    )
    assert code.both(condition, False) is False
    assert code.either(True, condition) is True


def test_numbers_are_folded_in_float64(code):
    assert code.add(0.1, 0.2) == 0.1 + 0.2
    assert code.add(2**60, 1) == 2**60 + 1
    assert code.call("tanh", 0.3) == float(np.tanh(0.3))
    assert code.div(1.0, 0.0) == inf
    assert math.isnan(code.mul(0.0, inf))
    assert math.isnan(code.call("sqrt", -1.0))
    assert code.compare("<", nan, 1.0) is False
    assert code.where(code.compare(">", 2, 1.5), 3, 0.5) == 3.0
    assert len(code) == 0


def test_an_operation_stands_once(code, x):
    y = code.input("y")
    assert code.mul(x, y) == code.mul(y, x)
    assert code.add(x, y) == code.add(y, x)
    assert code.sub(x, y) != code.sub(y, x)
    assert code.call("sin", x) == code.call("sin", x)
    assert len(code) == 5


def test_numbers_are_arguments(code, x):
    """A changed number is no other kernel; those that say how a formula is built stand in it."""
    texts = [code.text(number) for number in (0.1, 0.5, 3.0, -1.0, 1024.0, 17.0, 0.1, 1e-3, inf, -inf, 3, True)]
    assert texts == [
        "n0",
        "0.5",
        "3.0",
        "-1.0",
        "1024.0",
        "n1",
        "n0",
        "n2",
        'float("inf")',
        'float("-inf")',
        "3",
        "True",
    ]
    assert code.numbers == [0.1, 17.0, 1e-3]
    assert code.text(nan) == 'float("nan")'

    def lines(h):
        other = Code()
        result = other.add(other.input("z"), other.mul(h, other.input("f")))
        return other.lines(1, [result]), other.numbers

    assert lines(0.1)[0] == lines(0.2)[0]
    assert (lines(0.1)[1], lines(0.2)[1]) == ([0.1], [0.2])


def test_levels(code, x):
    """What is the same for all steps stands before the loop over them."""
    weight = code.input("w", level=0)
    scaled = code.mul(weight, 0.5)
    result = code.add(code.mul(scaled, x), code.call("exp", scaled))
    assert (scaled.level, result.level) == (0, 1)
    assert code.lines(0, [result]) == ["v0 = w * 0.5", "v2 = exp(v0)"]
    assert code.lines(1, [result]) == ["v1 = v0 * x", "v3 = v1 + v2"]


def test_dead_lines_are_left_out(code, x):
    used = code.call("sin", x)
    code.call("cos", used)
    assert code.lines(1, [used, 1.0, x]) == ["v0 = sin(x)"]
    assert code.lines(1, [x]) == []


def test_kinds(code, x):
    count, mask = code.input("k", "int"), code.compare("<", x, 0)
    assert code.add(count, 1).kind == "int"
    assert code.add(count, 0.5).kind == "real"
    assert code.add(mask, mask).kind == "bool"
    assert code.div(count, 2).kind == "real"
    assert code.mul(mask, x).kind == "real"
    assert code.cast(count, "bool").kind == "bool"
    assert code.cast(2.7, "int") == 2
    # Of two numbers Triton would make float32.
    assert code.lines(1, [code.where(mask, 1.0, 0.0)])[-1].endswith("= tl.cast(tl.where(v0, 1.0, 0.0), REAL)")


def test_functions_are_those_of_libdevice():
    libdevice = pytest.importorskip("triton.language.extra.libdevice")
    assert [name for name in FUNCTIONS if not hasattr(libdevice, name)] == []


def test_a_value_is_its_name():
    assert Value("v1", "real", 0) == Value("v1", "real", 0)
    assert Code().text(Value("v1", "real", 0)) == "v1"
