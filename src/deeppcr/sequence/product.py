"""Inputs of all steps that are one product, as those of a recurrent layer are.

A gradient that comes to it takes four nodes of PyTorch's own, each of which asks the host for more than a kernel takes. Here it is one; and who
has the gradient of the product in hand (``origin_of``) needs none.

Shapes: T steps, B rows, F features, G gates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..runtime import apply_directly, has_hooks_of_saved_tensors


class _Product(torch.autograd.Function):
    """x [..., F] by the rows of a weight [G, F]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return pulled_back(grad_outputs[0], x, weight, ctx.needs_input_grad)


_Node: Any = _Product._backward_cls  # type: ignore[attr-defined]


def product(x: Tensor, weight: Tensor) -> Tensor:
    """``linear(x, weight)``, outside of transforms."""
    if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
        return linear(x, weight)
    if has_hooks_of_saved_tensors():  # these would be asked for what is saved by ``origin_of``, and compute it again
        return linear(x, weight)
    return apply_directly(_Product, x, weight)


def origin_of(value: Tensor) -> tuple[Tensor, Tensor] | None:
    """What a value is the product of; None where it is none, or nobody wants its gradients."""
    node: Any = value.grad_fn
    return node.saved_tensors if type(node) is _Node else None


def pulled_back(
    given: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, ...] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of both factors, as far as they are wanted, from that of their product."""
    of_x = given.matmul(weight) if wanted[0] else None
    if not wanted[1]:
        return of_x, None
    return of_x, given.reshape(-1, weight.shape[0]).t().mm(x.reshape(-1, weight.shape[1]))
