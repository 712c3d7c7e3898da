"""Recursive filters along time, in parallel over the samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..runtime import apply_directly, has_kernels, is_traced, is_transformed, launching
from .blocks import Dense
from .solve import solve

#: The kernels' coefficients beside a_0, and the dtypes they read.
_ORDER, _DTYPES = 2, (torch.float32, torch.float64)


def lfilter(b: Tensor, a: Tensor, x: Tensor) -> Tensor:
    """``scipy.signal.lfilter(b, a, x, axis=0)``: the filter with numerator b and denominator a along the first dimension of x, from rest.

    Differentiable in all three, as often as anybody likes. On a GPU filters of order one and two read the signals twice and write them once; others, and those elsewhere, are
    systems with one block for all samples. High orders are better given as a cascade of biquads, here as everywhere.

    Args:
        b, a: [M] and [N], real, of the dtype and on the device of x; a[0] is not 0
        x: [L, *batch]

    >>> import torch
    >>> from deeppcr import linear
    >>> impulse = torch.tensor([1.0, 0, 0, 0])
    >>> linear.lfilter(torch.tensor([1.0, 0.5]), torch.tensor([1.0, -0.5]), impulse)
    tensor([1.0000, 1.0000, 0.5000, 0.2500])
    """
    for name, given in (("b", b), ("a", a)):
        if not isinstance(given, Tensor) or given.ndim != 1 or not given.numel():
            came = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"{name}: expected coefficients, a tensor [N], got {came}")
    if not isinstance(x, Tensor) or x.ndim == 0 or not x.is_floating_point():
        came = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x: expected signals, a real tensor [L, ...], got {came}")
    for name, given in (("b", b), ("a", a)):
        if (given.dtype, given.device) != (x.dtype, x.device):
            raise TypeError(f"{name}: expected {x.dtype} on {x.device}, as x is, got {given.dtype} on {given.device}")
    if not (a.is_cuda or is_traced(a) or a[0]):  # on a GPU nobody waits to see
        raise ValueError("a: a[0] must not be 0: all coefficients are divided by it")
    b, a = b / a[0], a / a[0]
    if not x.numel() or max(len(a), len(b)) == 1:
        return b[0] * x
    return _filtered(b, a, x.reshape(len(x), -1)).view(x.shape)


def _filtered(b: Tensor, a: Tensor, x: Tensor, reverse: bool = False) -> Tensor:
    """Of x [L, K], with a[0] = 1; ``reverse``: from the last sample to the first."""
    covered = max(len(a), len(b)) - 1 <= _ORDER and x.dtype in _DTYPES and has_kernels(x.device)
    if not covered or is_traced(x) or is_transformed():
        return _by_blocks(b, a, x.flip(0)).flip(0) if reverse else _by_blocks(b, a, x)
    b, a = (pad(each, (0, _ORDER + 1 - len(each))) for each in (b, a))
    return apply_directly(_Biquad, b, a, x, reverse)


def _by_blocks(b: Tensor, a: Tensor, x: Tensor) -> Tensor:
    """The state is y_l, ..., y_{l-p+1}: the first row makes a new output, the others move the old ones on."""
    terms = [b[0] * x]
    terms += [pad((b[k] * x[:-k]).movedim(0, -1), (k, 0)).movedim(-1, 0) for k in range(1, min(len(b), len(x)))]
    driven, order = sum(terms[1:], terms[0]), len(a) - 1
    if order == 0:
        return driven
    block = torch.cat([-a[None, 1:], torch.eye(order, dtype=a.dtype, device=a.device)[:-1]])
    return solve(Dense(block.expand(len(x), order, order)), pad(driven.unsqueeze(-1), (0, order - 1)))[..., 0]


class _Biquad(torch.autograd.Function):
    """By kernels, of b [3], a [3] with a[0] = 1, and x [L, K]. Its derivatives are filters again, in the other direction."""

    @staticmethod
    def forward(ctx: Any, b: Tensor, a: Tensor, x: Tensor, reverse: bool) -> Tensor:
        y = _run(b, a, x, reverse)
        ctx.reverse = reverse
        ctx.save_for_backward(b, a, x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (gradient,), reverse = grad_outputs, ctx.reverse
        b, a, x, y = ctx.saved_tensors
        of_b, of_a, of_x, _ = ctx.needs_input_grad
        found: list[Tensor | None] = [None, None, _filtered(b, a, gradient, not reverse) if of_x else None, None]
        if of_b or of_a:
            only = torch.zeros_like(b)
            only[0] = 1
            back, length = _filtered(only, a, gradient, not reverse), len(x)

            def against(signal: Tensor) -> Tensor:
                """With the signal as it was k samples before, for every k, [3]."""
                later, earlier = (signal, back) if reverse else (back, signal)
                return torch.stack([(later[k:] * earlier[: max(0, length - k)]).sum() for k in range(_ORDER + 1)])

            found[:2] = against(x) if of_b else None, -against(y) if of_a else None
        return tuple(found)


def _run(b: Tensor, a: Tensor, x: Tensor, reverse: bool) -> Tensor:
    from .kernels import biquad  # which imports Triton

    coefficients = torch.cat([b, a[1:]]).double()
    x = x.detach().resolve_neg()
    with launching(x.device):
        return biquad.run(coefficients, x, reverse=reverse)
