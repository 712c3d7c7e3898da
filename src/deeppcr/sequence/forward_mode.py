"""PyTorch's forward mode, quicker where an operation meets what does not depend on the state.

For an operand without a tangent PyTorch's rules make one of zeros, and ask Python how large the result would be: up to a millisecond for
an operation that takes ten microseconds. Here such operations are done by parts, values and tangents, and come out the same to the last bit.
(But that what a Python number scales keeps its dtype: of a tensor without dimensions PyTorch makes a tangent in double precision.)
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import jvp
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_functorch = import_module("torch._C._functorch")  # which torch's type stubs leave out
_aten = torch.ops.aten


def pushed_forward(function: Callable[[Tensor], Tensor], z: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    """As ``torch.func.jvp``: what a function of one tensor gives, and its derivative along a tangent."""

    def by_parts(z: Tensor) -> Tensor:
        with _ByParts(_functorch.maybe_get_level(z)):
            return function(z)

    value, pushed, *_ = jvp(by_parts, (z,), (tangent,))
    return value, pushed


class _ByParts(TorchFunctionMode):
    """
    Args:
        level: of the transform; inside another one, of the function's own, nothing is done
    """

    def __init__(self, level: int):
        super().__init__()
        self.level: int = level

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        rule = None if named else _RULES.get(function)
        if rule is not None and _is_plain(arguments[0]) and _functorch.maybe_current_level() == self.level:
            found = rule(self.level, *arguments)
            if found is not None:
                return found
        return function(*arguments, **(named or {}))


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor or type(value) is nn.Parameter


def _unpacked(level: int, operand: Tensor) -> tuple[Tensor, Tensor | None]:
    """Value and tangent: what is not of this level has none, and what is may be made of nothing that has one."""
    return forward_ad.unpack_dual(operand) if _functorch.maybe_get_level(operand) == level else (operand, None)


def _halves(level: int, one: Tensor, other: Any) -> tuple[Tensor, Tensor, Any, Any] | None:
    """Both values and both tangents, where one of them has one and the other has none."""
    if not _is_plain(other):
        return None
    (a, along_a), (b, along_b) = _unpacked(level, one), _unpacked(level, other)
    return None if (along_a is None) == (along_b is None) else (a, b, along_a, along_b)


def _like(tangent: Tensor, value: Tensor) -> Tensor:
    """The tangent by itself, of the shape and dtype of a value that it was broadcast to."""
    return tangent.to(value.dtype).expand(value.shape).clone()


def _product(level: int, one: Tensor, other: Any) -> Tensor | None:
    if isinstance(other, (int, float)):
        return _aten.mul.Scalar(one, other)
    halves = _halves(level, one, other)
    if halves is None:
        return None
    a, b, along_a, along_b = halves
    return forward_ad.make_dual(a * b, a * along_b if along_a is None else along_a * b)


def _sum(level: int, one: Tensor, other: Any) -> Tensor | None:
    if isinstance(other, (int, float)):
        return _aten.add.Scalar(one, other)
    halves = _halves(level, one, other)
    if halves is None:
        return None
    a, b, along_a, along_b = halves
    value = a + b
    return forward_ad.make_dual(value, _like(along_b if along_a is None else along_a, value))


def _difference(level: int, one: Tensor, other: Any) -> Tensor | None:
    if isinstance(other, (int, float)):
        return _aten.sub.Scalar(one, other)
    halves = _halves(level, one, other)
    if halves is None:
        return None
    a, b, along_a, along_b = halves
    value = a - b
    return forward_ad.make_dual(value, _like(-along_b if along_a is None else along_a, value))


def _quotient(level: int, one: Tensor, other: Any) -> Tensor | None:
    if isinstance(other, (int, float)):
        return _aten.div.Scalar(one, other)
    halves = _halves(level, one, other)
    if halves is None or halves[2] is None:
        return None
    a, b, along_a, _ = halves
    return forward_ad.make_dual(a / b, along_a / b)


def _quotient_of_number(level: int, one: Tensor, number: Any) -> Tensor | None:
    """As ``Tensor.__rdiv__`` has it."""
    return _aten.mul.Scalar(one.reciprocal(), number) if isinstance(number, (int, float)) else None


def _linear(level: int, one: Tensor, weight: Any, bias: Any = None) -> Tensor | None:
    given = [each for each in (weight, bias) if each is not None]
    if not all(map(_is_plain, given)) or any(_unpacked(level, each)[1] is not None for each in given):
        return None
    value, along = _unpacked(level, one)
    if along is None:
        return None
    return forward_ad.make_dual(functional.linear(value, weight, bias), functional.linear(along, weight))


#: By the functions that operators and functions of PyTorch come to: what they give, or None where PyTorch is to do it.
_RULES: dict[Any, Callable[..., Tensor | None]] = {
    Tensor.mul: _product,
    torch.mul: _product,
    Tensor.add: _sum,
    torch.add: _sum,
    Tensor.sub: _difference,
    torch.sub: _difference,
    Tensor.div: _quotient,
    torch.div: _quotient,
    Tensor.__rdiv__: _quotient_of_number,
    functional.linear: _linear,
}
