"""PyTorch's forward mode, quicker where an operation meets what does not depend on the state.

For an operand without a tangent PyTorch's rules make one of zeros, and ask Python how large the result would be: up to a millisecond for
an operation that takes ten microseconds. Here such operations are done by parts, values and tangents, and come out the same to the last bit.
(But that what a Python number scales keeps its dtype: of a tensor without dimensions PyTorch makes a tangent in double precision.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import jvp
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_functorch = import_module("torch._C._functorch")  # which torch's type stubs leave out
_aten = torch.ops.aten
_NUMBERS = (int, float)  # and no bool, which PyTorch does not subtract


def pushed_forward(function: Callable[[Tensor], Tensor], z: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    """As ``torch.func.jvp``: what a function of one tensor gives, and its derivative along a tangent."""

    def by_parts(z: Tensor) -> Tensor:
        with _ByParts(_functorch.maybe_get_level(z)):
            return function(z)

    if not torch.is_inference_mode_enabled() and not _is_watched():
        try:
            value, pushed, *_ = jvp(by_parts, (z,), (tangent,))
            return value, pushed
        except (
            Exception
        ):  # such as detach_ of what was put together of parts. What fails in the function itself does so again
            pass
    value, pushed, *_ = jvp(function, (z,), (tangent,))
    return value, pushed


def _is_watched() -> bool:
    """Whether a caller's own mode would see parts, and perhaps change them. That of ``with torch.device(...)`` looks at what makes tensors."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


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
        if rule is not None and _functorch.maybe_current_level() == self.level:
            found = rule(self.level, *arguments)
            if found is not None:
                return found
        return function(*arguments, **(named or {}))


def _is_plain(value: Any) -> bool:
    return (type(value) is Tensor or type(value) is nn.Parameter) and not value.is_inference()


def _unpacked(level: int, operand: Tensor) -> tuple[Tensor, Tensor | None]:
    """Value and tangent, which not all have that are of this level."""
    if _functorch.maybe_get_level(operand) != level:  # quicker than to look
        return operand, None
    return forward_ad.unpack_dual(operand)


def _dual(value: Tensor, tangent: Tensor) -> Tensor:
    return forward_ad.make_dual(value, tangent.to(value))  # which a broadcast, or autocast, may have changed


@dataclass(frozen=True)
class _Elementwise:
    """An operation of two operands, one of which depends on the state.

    Attributes:
        by_number: with a Python number for the second
        whole: its value
        along_first, along_second: its derivative, by the tangent of that operand, the other operand, and the value; None: left to PyTorch
    """

    by_number: Callable[[Tensor, Any], Tensor]
    whole: Callable[[Tensor, Tensor], Tensor]
    along_first: Callable[[Tensor, Tensor, Tensor], Tensor]
    along_second: Callable[[Tensor, Tensor, Tensor], Tensor] | None

    def __call__(self, level: int, one: Any, other: Any, *more: Any) -> Tensor | None:
        if more or not _is_plain(one):
            return None
        a, along_a = _unpacked(level, one)
        if type(other) in _NUMBERS:
            return None if along_a is None else self.by_number(one, other)
        if not _is_plain(other):
            return None
        b, along_b = _unpacked(level, other)
        if along_a is not None and along_b is None:
            value = self.whole(a, b)
            return _dual(value, self.along_first(along_a, b, value))
        if along_a is None and along_b is not None and self.along_second is not None:
            value = self.whole(a, b)
            return _dual(value, self.along_second(along_b, a, value))
        return None


def _as_large(tangent: Tensor, other: Tensor, value: Tensor) -> Tensor:
    """The tangent itself, broadcast as the value was; nobody else's memory."""
    return tangent.expand(value.shape).clone()


_product = _Elementwise(_aten.mul.Scalar, torch.mul, lambda t, b, _: t * b, lambda t, a, _: t * a)
_sum = _Elementwise(_aten.add.Scalar, torch.add, _as_large, _as_large)
#: Of "sub.Scalar" PyTorch hands on the tangent itself: what is then written in place would change that of the state.
_difference = _Elementwise(
    lambda one, other: _aten.add.Scalar(one, -float(other)),
    torch.sub,
    _as_large,
    lambda t, a, value: _as_large(-t, a, value),
)
_quotient = _Elementwise(_aten.div.Scalar, torch.div, lambda t, b, _: t / b, None)


def _quotient_of_number(level: int, one: Any, number: Any, *more: Any) -> Tensor | None:
    """As ``Tensor.__rdiv__`` has it."""
    if more or type(number) not in _NUMBERS or not _is_plain(one) or _unpacked(level, one)[1] is None:
        return None
    return _aten.mul.Scalar(one.reciprocal(), number)


@dataclass(frozen=True)
class _HandedOn:
    """An operation on a tensor, and numbers, of which PyTorch hands on the tangent itself: what is then written in place would change that of
    the state, too."""

    whole: Callable[..., Tensor]

    def __call__(self, level: int, one: Any, *numbers: Any) -> Tensor | None:
        if not _is_plain(one) or any(type(each) not in _NUMBERS for each in numbers):
            return None
        value, along = _unpacked(level, one)
        return None if along is None else _dual(self.whole(value, *numbers), along.clone())


def _linear(level: int, one: Any, weight: Any, bias: Any = None) -> Tensor | None:
    given = [each for each in (one, weight, bias) if each is not None]
    if not all(map(_is_plain, given)) or any(_unpacked(level, each)[1] is not None for each in given[1:]):
        return None
    value, along = _unpacked(level, one)
    if along is None:
        return None
    return _dual(functional.linear(value, weight, bias), functional.linear(along, weight))


#: By the functions that operators and functions of PyTorch come to: what they give, or None where PyTorch is to do it.
_RULES: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((Tensor.mul, torch.mul, Tensor.multiply, torch.multiply), _product),
    **dict.fromkeys((Tensor.add, torch.add), _sum),
    **dict.fromkeys((Tensor.sub, torch.sub, Tensor.subtract, torch.subtract), _difference),
    **dict.fromkeys((Tensor.div, torch.div, Tensor.divide, torch.divide), _quotient),
    **dict.fromkeys((Tensor.true_divide, torch.true_divide), _quotient),
    Tensor.__rdiv__: _quotient_of_number,
    **dict.fromkeys((Tensor.frac, torch.frac), _HandedOn(torch.frac)),
    **dict.fromkeys((Tensor.fmod, torch.fmod), _HandedOn(torch.fmod)),
    **dict.fromkeys((Tensor.remainder, torch.remainder, Tensor.__mod__), _HandedOn(torch.remainder)),
    functional.linear: _linear,
}
