"""Rules of operations that go number by number: ``rule(code, *scalars, **options)`` gives the scalar that comes out.

Each is written as PyTorch computes it on a GPU, so that what is rounded, and what becomes of NaN, is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from .expressions import Code, NotCovered, Scalar, Value, is_number, kind_of


def _add(code: Code, a: Scalar, b: Scalar, *, alpha: float = 1) -> Scalar:
    return code.add(a, code.mul(alpha, b))


def _sub(code: Code, a: Scalar, b: Scalar, *, alpha: float = 1) -> Scalar:
    return code.sub(a, code.mul(alpha, b))


def _div(code: Code, a: Scalar, b: Scalar, *, rounding_mode: str | None = None) -> Scalar:
    if rounding_mode is None:
        return code.div(a, b)
    a, b = code.promote(a, b)
    if kind_of(a) != "real":
        # What is left after the remainder is taken away has no other quotient, however it is rounded.
        rest = _remainder(code, a, b) if rounding_mode == "floor" else _fmod(code, a, b)
        multiple = code.sub(a, rest)
        if is_number(multiple) and is_number(b):
            return multiple // b
        return code.emit(f"{code.text(multiple)} // {code.text(b)}", "int", multiple, b)
    if rounding_mode == "trunc":
        return code.call("trunc", code.div(a, b))
    rest = code.call("fmod", a, b)
    quotient = code.div(code.sub(a, rest), b)
    quotient = code.where(_signs_differ(code, rest, b), code.sub(quotient, 1.0), quotient)
    floor = code.call("floor", quotient)
    floor = code.where(code.compare(">", code.sub(quotient, floor), 0.5), code.add(floor, 1.0), floor)
    return code.where(code.compare("==", b, 0.0), code.div(a, b), floor)


def _signs_differ(code: Code, rest: Scalar, b: Scalar) -> Scalar:
    """Whether a remainder is not 0, and has not the sign of the divisor."""
    negative, divisor_negative = code.compare("<", rest, 0), code.compare("<", b, 0)
    return code.both(code.compare("!=", rest, 0), _exclusive(code, negative, divisor_negative))


def _remainder(code: Code, a: Scalar, b: Scalar) -> Scalar:
    """With the sign of the divisor."""
    a, b = code.promote(a, b)
    if kind_of(a) != "real" and is_number(a) and is_number(b):
        return a % b
    rest = code.call("fmod", a, b) if kind_of(a) == "real" else _integer_rest(code, a, b)
    return code.where(_signs_differ(code, rest, b), code.add(rest, b), rest)


def _fmod(code: Code, a: Scalar, b: Scalar) -> Scalar:
    """With the sign of the dividend."""
    a, b = code.promote(a, b)
    if kind_of(a) == "real":
        return code.call("fmod", a, b)
    if is_number(a) and is_number(b):
        return int(math.fmod(a, b))
    rest = _remainder(code, a, b)
    other = code.invert(code.compare("==", code.compare("<", a, 0), code.compare("<", b, 0)))
    return code.where(code.both(code.compare("!=", rest, 0), other), code.sub(rest, b), rest)


def _integer_rest(code: Code, a: Scalar, b: Scalar) -> Scalar:
    """Rounded to zero by a GPU and down by Python: use it where that is mended."""
    return code.emit(f"{code.text(a)} % {code.text(b)}", "int", a, b)


def _pow(code: Code, a: Scalar, b: Scalar) -> Scalar:
    if kind_of(a) != "real" and kind_of(b) != "real":
        if not isinstance(b, int) or b < 0:
            raise NotCovered("aten.pow of integers is not covered")
        result: Scalar = 1
        for _ in range(b):
            result = code.mul(result, a)
        return result
    if is_number(a) or not is_number(b):
        return code.call("pow", a, b)
    if b == 0:
        return 1.0
    if b in (1, 2, 3, 4):
        square = code.mul(a, a)
        return {1: a, 2: square, 3: code.mul(square, a), 4: code.mul(square, square)}[int(b)]
    if b in (-1, -2):
        return code.div(1.0, _pow(code, a, -b))
    if abs(b) == 0.5:
        return code.call("sqrt" if b > 0 else "rsqrt", a)
    return code.call("pow", a, b)


def _extreme(sign: str, code: Code, a: Scalar, b: Scalar) -> Scalar:
    """The one of two that is larger or smaller; NaN if one is NaN."""
    a, b = code.promote(a, b)
    if is_number(a):
        a, b = b, a
    if is_number(b) and b == b:  # only ``a`` may be NaN
        return code.where(code.compare(sign, b, a), b, a)
    return code.where(code.either(code.compare(sign, a, b), _isnan(code, a)), a, b)


_maximum, _minimum = partial(_extreme, ">"), partial(_extreme, "<")


def _clamp(code: Code, a: Scalar, min: Scalar | None = None, max: Scalar | None = None) -> Scalar:
    if min is not None:
        a = _maximum(code, a, min)
    return a if max is None else _minimum(code, a, max)


def _isnan(code: Code, a: Scalar) -> Scalar:
    return code.compare("!=", a, a) if kind_of(a) == "real" else False


def _isinf(code: Code, a: Scalar) -> Scalar:
    return code.compare("==", code.abs(a), math.inf) if kind_of(a) == "real" else False


def _sign(code: Code, a: Scalar) -> Scalar:
    one, zero = code.promote(code.promote(1, a)[0], 0)
    return code.where(code.compare(">", a, 0), one, code.where(code.compare("<", a, 0), code.neg(one), zero))


def _elu(code: Code, a: Scalar, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Scalar:
    negative = code.mul(code.call("expm1", code.mul(a, input_scale)), alpha * scale)
    return code.where(code.compare(">", a, 0), code.mul(a, scale), negative)


def _gelu(code: Code, a: Scalar, *, approximate: str = "none") -> Scalar:
    if approximate == "tanh":
        inner = code.add(a, code.mul(0.044715, code.mul(code.mul(a, a), a)))
        bend = code.call("tanh", code.mul(math.sqrt(2 / math.pi), inner))
    else:
        bend = code.call("erf", code.mul(a, math.sqrt(0.5)))
    return code.mul(code.mul(0.5, a), code.add(1.0, bend))


def _softplus(code: Code, a: Scalar, beta: float = 1, threshold: float = 20) -> Scalar:
    scaled = code.mul(a, beta)
    bend = code.div(code.call("log1p", code.call("exp", scaled)), beta)
    return code.where(code.compare(">", scaled, threshold), a, bend)


def _logaddexp(code: Code, a: Scalar, b: Scalar) -> Scalar:
    smaller = code.call("exp", code.neg(code.abs(code.sub(a, b))))
    total = code.add(_maximum(code, a, b), code.call("log1p", smaller))
    return code.where(code.both(code.compare("==", a, b), _isinf(code, a)), a, total)


def _xlogy(code: Code, a: Scalar, b: Scalar) -> Scalar:
    hidden = code.both(code.compare("==", a, 0), code.compare("==", b, b))
    return code.where(hidden, 0.0, code.mul(a, code.call("log", b)))


def _sinc(code: Code, a: Scalar) -> Scalar:
    angle = code.mul(a, math.pi)
    return code.where(code.compare("==", a, 0), 1.0, code.div(code.call("sin", angle), angle))


def _round(code: Code, a: Scalar, *, decimals: int = 0) -> Scalar:
    if kind_of(a) != "real":
        return a
    if decimals < 0:
        power = 10.0**-decimals
        return code.mul(code.call("rint", code.div(a, power)), power)
    power = 10.0**decimals
    return code.div(code.call("rint", code.mul(a, power)), power)


def _whole(function: str) -> Callable:
    """A function that rounds."""
    return lambda code, a: code.call(function, a) if kind_of(a) == "real" else a


def _bitwise(sign: str, of_bools: Callable) -> Callable:
    def rule(code: Code, a: Scalar, b: Scalar) -> Scalar:
        a, b = code.promote(a, b)
        if kind_of(a) == "bool":
            return of_bools(code, a, b)
        if isinstance(a, int) and isinstance(b, int):
            return {"&": a & b, "|": a | b, "^": a ^ b}[sign]
        return code.emit(f"{code.text(a)} {sign} {code.text(b)}", "int", a, b)

    return rule


def _exclusive(code: Code, a: Scalar, b: Scalar) -> Scalar:
    a, b = code.cast(a, "bool"), code.cast(b, "bool")
    return code.either(code.both(a, code.invert(b)), code.both(code.invert(a), b))


def _bitwise_not(code: Code, a: Scalar) -> Scalar:
    if kind_of(a) == "bool":
        return code.invert(a)
    return code.emit(f"~{a.name}", "int", a) if isinstance(a, Value) else ~int(a)


#: which do nothing but, perhaps, change the dtype
COPIES = (
    "alias",
    "clone",
    "contiguous",
    "detach",
    "lift_fresh",
    "lift_fresh_copy",
    "_to_copy",
    "convert_element_type",
)
_SAME_NAME = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1"),
    *("hypot", "log", "log10", "log1p", "log2", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh"),
)
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

#: by the name of the operation, without its overload
POINTWISE: dict[str, Callable[..., Scalar]] = {
    **dict.fromkeys(COPIES, lambda code, a, *_, **__: a),
    **{name: lambda code, *arguments, name=name: code.call(name, *arguments) for name in _SAME_NAME},
    **{name: lambda code, a, b, sign=sign: code.compare(sign, a, b) for name, sign in _COMPARISONS.items()},
    **{name: _whole(name) for name in ("ceil", "floor", "trunc")},
    "abs": lambda code, a: code.abs(a),
    "add": _add,
    "bitwise_and": _bitwise("&", Code.both),
    "bitwise_not": _bitwise_not,
    "bitwise_or": _bitwise("|", Code.either),
    "bitwise_xor": _bitwise("^", _exclusive),
    "celu": lambda code, a, alpha=1: _elu(code, a, alpha, 1, 1 / alpha),
    "clamp": _clamp,
    "clamp_max": lambda code, a, max: _minimum(code, a, max),
    "clamp_min": lambda code, a, min: _maximum(code, a, min),
    "div": _div,
    "elu": _elu,
    "fmod": _fmod,
    "gelu": _gelu,
    "hardtanh": lambda code, a, min_val=-1, max_val=1: _clamp(code, a, min_val, max_val),
    "isfinite": lambda code, a: code.compare("<", code.abs(a), math.inf) if kind_of(a) == "real" else True,
    "isinf": _isinf,
    "isnan": _isnan,
    "leaky_relu": lambda code, a, negative_slope=0.01: code.where(
        code.compare(">", a, 0), a, code.mul(a, negative_slope)
    ),
    "logaddexp": _logaddexp,
    "logical_and": lambda code, a, b: code.both(a, b),
    "logical_not": lambda code, a: code.invert(a),
    "logical_or": lambda code, a, b: code.either(a, b),
    "logical_xor": _exclusive,
    "masked_fill": lambda code, a, mask, value: code.where(mask, value, a),
    "maximum": _maximum,
    "minimum": _minimum,
    "mish": lambda code, a: code.mul(a, code.call("tanh", code.call("log1p", code.call("exp", a)))),
    "mul": lambda code, a, b: code.mul(a, b),
    "neg": lambda code, a: code.neg(a),
    "pow": _pow,
    "reciprocal": lambda code, a: code.div(1.0, a),
    "relu": lambda code, a: _maximum(code, a, 0),
    "remainder": _remainder,
    "round": _round,
    "rsub": lambda code, a, b, alpha=1: _sub(code, b, a, alpha=alpha),
    "sgn": _sign,
    "sigmoid": lambda code, a: code.div(1.0, code.add(1.0, code.call("exp", code.neg(code.cast(a, "real"))))),
    "sign": _sign,
    "sinc": _sinc,
    "softplus": _softplus,
    "square": lambda code, a: code.mul(a, a),
    "sub": _sub,
    "where": lambda code, condition, a, b: code.where(condition, a, b),
    "xlogy": _xlogy,
}
