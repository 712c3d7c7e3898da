"""Networks of equal layers as operators of a compiler's graph.

Shapes: B rows, w the width, L layers (steps of the solve), s layers inside a skip connection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..newton import Newton
from ..runtime import is_transformed, outside_of_graph
from . import operator
from .arguments import Mode
from .operator import in_words


class OperatedNetwork(nn.Module):
    """The part of a network that has a compiler see all of its layers as one operation (``operator.Operated``)."""

    weight: nn.Parameter
    bias: nn.Parameter
    activation: Any
    newton: Newton
    guess: Any
    warm_start: bool
    _kind: str
    _asked_for = 1
    _is_traced: Callable[[Tensor, Mode], bool]
    _loop: Callable[[Tensor], Tensor]
    _run_eagerly: Callable[..., Tensor]

    def _run_in_graph(self, hidden: Tensor, mode: Mode, last: bool) -> Tensor:
        """A loop without kernels is traced; else all layers are one operation, which chooses its way when it runs."""
        if self._is_traced(hidden, mode):
            with torch.autocast(hidden.device.type, enabled=False):
                states = self._loop(hidden)
            return states[-1] if last else states
        words = self._in_words(mode)
        if words is None or is_transformed():
            why = "a network with a warm start, settings or an activation of your own, or inside a transform, is no operator"
            return outside_of_graph(self._run_eagerly, f"{why}: it runs in parallel by looking at values")(
                hidden, mode, "", last
            )
        return operator.run_in_graph(words, [hidden, self.weight, self.bias], last=last)[0]

    def _in_words(self, mode: Mode) -> str | None:
        """The layers alone; None where there are no words for them: a warm start writes to the module."""
        told = [in_words(each) for each in (self.activation, self.newton, self.guess)]
        if self.warm_start or None in told:
            return None
        steps, width = self.weight.shape[:-2], self.weight.shape[-1]
        depth, skip = math.prod(steps), f", skip={steps[1]}" if len(steps) == 2 else ""
        options = f"activation={told[0]}, mode={mode!r}, newton={told[1]}, guess={told[2]}"
        return f"{self._kind}({width}, {width}, {depth}, {width}{skip}, {options})"

    def _like(self, tensors: list[Tensor], last: bool, gradients: bool) -> list[Tensor]:
        hidden, weight, _ = tensors
        states, one = hidden.new_empty((weight.shape[0], *hidden.shape)), hidden.new_empty(hidden.shape)
        return [states] if not last else [one, states] if gradients else [one]

    def _found(self, tensors: list[Tensor], last: bool, gradients: bool) -> list[Tensor]:
        hidden, module = self._with(tensors)
        states = module._run_eagerly(hidden, module.mode, "", last and not gradients)
        return [states[-1], states] if last and gradients else [states]

    def _attached(self, tensors: list[Tensor], found: list[Tensor], last: bool) -> list[Tensor]:
        (hidden, module), states = self._with(tensors), found[-1]
        return [module._run_again(hidden, states, last)]

    def _with(self, tensors: list[Tensor]) -> tuple[Tensor, Any]:
        """A network with these weights, and what it is run on."""
        hidden, weight, bias = tensors
        return hidden, operator.with_tensors(self, weight=weight, bias=bias)
