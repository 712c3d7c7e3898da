"""Deep networks of equal layers, in parallel over the layers.

Shapes: B rows, w the width, L layers (steps of the solve), s layers inside a skip connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..linear import Dense
from ..newton import Newton
from ..newton.guess import RepeatInitial
from .arguments import Mode, check_size
from .base import Network
from .operator import operated


@operated
class MLP(Network):
    """A multi-layer perceptron of constant width: ``z_0 = W x + b``, ``z_l = W_l f(z_{l-1}) + b_l``, output ``W f(z_L) + b``.

    Args:
        in_features, width, out_features: sizes
        depth: L, layers between the input and the output layer; their parameters are stacked
        activation: "relu", "tanh", "sigmoid", or any elementwise function
        mode: "parallel" (Newton forward, one linear solve backward), "sequential" (layer by layer), or "auto": what takes
            the least time by measured times, where there are fused kernels (a GPU, float32, a named activation); else in
            parallel on a GPU from 64 steps of the solve up to width 64, and on a CPU, where the loop usually wins unless the
            network is very deep and narrow, from 4096 steps up to width 16 and 4 rows; ``solution.plan`` says why
        newton: settings of the parallel mode; its Jacobian is the analytic one whatever they say
        guess: where the parallel mode starts: ``RepeatInitial()``, ``Zeros()``, or anything else that ``deeppcr.solve`` takes
        warm_start: after the first training step, start instead from the batch mean of the activations of the previous training step
        save_warm_start: keep those activations in the checkpoint; one with them loads into a network without, and the reverse

    The layers run in the precision of their weights, also under autocast. A row that is not finite stays so and leaves
    the others right. Second derivatives: ``mode="sequential"``.

    >>> import torch, deeppcr.nn
    >>> net = deeppcr.nn.MLP(8, 16, 200, 3, mode="parallel")
    >>> x = torch.randn(5, 8)
    >>> torch.allclose(net(x), net(x, mode="sequential"), atol=1e-5)
    True
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        depth: int,
        out_features: int,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        *,
        mode: Mode = "auto",
        newton: Newton | None = None,
        guess: Any = RepeatInitial(),
        warm_start: bool = False,
        save_warm_start: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        how = (mode, newton, guess, warm_start, save_warm_start, device, dtype)
        super().__init__(in_features, width, (check_size("depth", depth),), out_features, activation, *how)

    def _step(self, z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        return self._layer(z, *x)

    def _jacobian(self, z: Tensor, x: tuple[Tensor, Tensor]) -> Dense:
        return Dense(x[0] * self._slope(z).unsqueeze(-2))


@operated
class ResNet(Network):
    """A residual network of fully connected layers: every ``skip`` layers, the state before them is added.

    Args:
        in_features, width, out_features: sizes
        depth: layers between the input and the output layer, a multiple of ``skip``
        skip: layers inside a skip connection; they are collapsed into one step of the solve
        activation, newton, guess, warm_start, save_warm_start: as for ``MLP``
        mode: as for ``MLP``; "auto" counts depth / skip steps, and on a CPU the loop usually wins unless they are thousands

    >>> import torch, deeppcr.nn
    >>> net = deeppcr.nn.ResNet(8, 16, 64, 3, skip=4, mode="parallel")
    >>> x = torch.randn(5, 8)
    >>> torch.allclose(net(x), net(x, mode="sequential"), atol=1e-4)
    True
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        depth: int,
        out_features: int,
        skip: int = 4,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        *,
        mode: Mode = "auto",
        newton: Newton | None = None,
        guess: Any = RepeatInitial(),
        warm_start: bool = False,
        save_warm_start: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        depth, skip = check_size("depth", depth), check_size("skip", skip)
        if depth % skip:
            raise ValueError(f"depth: expected a multiple of skip = {skip}, got {depth}")
        how = (mode, newton, guess, warm_start, save_warm_start, device, dtype)
        super().__init__(in_features, width, (depth // skip, skip), out_features, activation, *how)

    def _step(self, z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        inner = z
        for weight, bias in zip(*(each.unbind() for each in x), strict=True):
            inner = self._layer(inner, weight, bias)
        return inner + z

    def _jacobian(self, z: Tensor, x: tuple[Tensor, Tensor]) -> Dense:
        product = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
        inner = z
        for weight, bias in zip(*(each.unbind() for each in x), strict=True):
            product = (weight * self._slope(inner).unsqueeze(-2)) @ product
            inner = self._layer(inner, weight, bias)
        return Dense(product + torch.eye(z.shape[-1], dtype=z.dtype, device=z.device))
