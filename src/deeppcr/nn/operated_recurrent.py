"""Recurrent modules as operators of a compiler's graph: one for each layer and direction.

Shapes: T steps, B rows, F features of the input, H the hidden size (P where outputs are projected), K layers times directions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..newton import Newton
from ..runtime import is_transformed
from ..solution import Solution
from ..warned import catching_warnings
from ..ways.fused_solution import FusedSolution
from ..ways.judged import attach
from . import operator
from .arguments import Mode
from .operator import in_words
from .steps import solve_steps


class OperatedRecurrent(nn.Module):
    """The part of a recurrent module that has a compiler see its layers as operations (``operator.operated``)."""

    hidden_size: int
    newton: Newton
    _all_weights: list[list[str]]
    _kind: str
    _widths: Callable[[], tuple[int, ...]]
    _nested: Callable[[tuple[Tensor, ...]], Any]
    _by_layers: Callable[..., Any]
    #: What solves; of a module that an operator runs, one that keeps the states, or knows them already.
    _solve_steps: Callable[..., Any] = staticmethod(solve_steps)

    def _ends_graph(self, input: Any, hx: Any, cu_seqlens: Tensor | None) -> str:
        """Why a call is left out of a compiler's graph; empty where it is not."""
        if cu_seqlens is not None or isinstance(input, PackedSequence):
            return "how sequences of different lengths lie depends on values; give a tensor, with reset"
        if is_transformed():
            return "a recurrent module looks at values, and inside a transform there are none"
        if in_words(self.newton) is None:
            return "newton: there are no words for settings of your own, by which an operator would know them"
        return "" if self._is_proper(input, hx) else "input, hx: what is wrong with them is said outside of a graph"

    def _is_proper(self, input: Any, hx: Any) -> bool:
        """Whether arguments are such that a pass can begin."""
        raise NotImplementedError

    def _dtype_of_autocast(self, device: torch.device) -> torch.dtype | None:
        """What is computed in under autocast; None without it."""
        return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None

    def _run_in_graph(self, input: Any, hx: Any, reset: Tensor | None, mode: Mode) -> Any:
        """Each layer in each direction is one operation, which chooses its way when it runs."""
        mixed = self._dtype_of_autocast(input.device)
        autocast = "" if mixed is None else str(mixed).removeprefix("torch.")

        def run(at: int, x: Tensor, start: tuple[Tensor, ...], reset: Tensor | None, lengths: None) -> Any:
            weights = [getattr(self, name) for name in self._all_weights[at]]
            begins = [] if reset is None else [reset]
            tensors = [x, *weights, *(() if hx is None else start), *begins]
            found = operator.run_in_graph(self._in_words(x.shape[-1], mode), tensors, autocast)
            return tuple(found[: self._asked_for]), None

        return self._by_layers(input, hx, reset, run)

    def _in_words(self, features: int, mode: Mode) -> str:
        """A layer in one direction."""
        options = f"bias={'bias_ih_l0' in self._all_weights[0]}, {self._options_in_words()}"
        return f"{self._kind}({features}, {self.hidden_size}, {options}mode={mode!r}, newton={in_words(self.newton)})"

    def _options_in_words(self) -> str:
        """Those that not all kinds have."""
        return ""

    @property
    def _asked_for(self) -> int:
        return len(self._widths())

    def _like(self, tensors: list[Tensor], last: bool, gradients: bool) -> list[Tensor]:
        (steps, rows), weight = tensors[0].shape[:2], tensors[1]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        states = [weight.new_empty((steps, rows, width), dtype=dtype) for width in self._widths()]
        return [*states, torch.empty((), dtype=torch.bool, device="cpu")]

    def _found(self, tensors: list[Tensor], last: bool, gradients: bool) -> list[Tensor]:
        """The states, and whether they are those of a parallel solve: PyTorch's own kernel, or a loop, is run again for a backward pass."""
        module, x, hx, reset = self._with(tensors)
        found: list[Solution] = []

        def noted(*arguments: Any, **options: Any) -> Solution:
            found.append(solve_steps(*arguments, **options))
            return found[-1]

        module._solve_steps = noted
        # What a loop does is seen by autograd when a backward pass runs it again.
        with torch.set_grad_enabled(gradients and module.run_mode != "sequential"), _as_they_lie(x):
            passed = module._run(x, hx, reset, module.run_mode)
        if "_known" in module.__dict__:
            self.__dict__["_known"] = module._known
        like = self._like(tensors, last, gradients)
        if not found:
            return [*_by_step(passed, like), torch.tensor(False)]
        (solution,) = found
        states = (solution.states,) if isinstance(solution.states, Tensor) else solution.states
        solved = isinstance(solution, FusedSolution) or bool(solution.iterations.any())
        return [*states, torch.tensor(solved)]

    def _attached(self, tensors: list[Tensor], found: list[Tensor], last: bool) -> list[Tensor]:
        *states, solved = found
        module, x, hx, reset = self._with(tensors)
        if not solved:
            with _as_they_lie(x):
                return _by_step(module._run(x, hx, reset, "sequential"), states)

        def known(step: Any, z0: Any, xs: Any, *, solver: Newton, **_: Any) -> list[Tensor]:
            return attach(step, z0, xs, tuple(states), solver, batch_dims=1)

        module._solve_steps = known
        start = tuple(leaf[0] for leaf in module._starts(hx, x.shape[1], x))
        return module._solve(0, x, start, reset, solver=module.newton)

    def _with(self, tensors: list[Tensor]) -> tuple[Any, Tensor, Any, Tensor | None]:
        """A module with these weights, and what to call it with."""
        names = self._all_weights[0]
        x, *others = tensors
        weights, others = others[: len(names)], others[len(names) :]
        reset = others.pop() if others and others[-1].dtype is torch.bool else None
        hx = self._nested(tuple(leaf.unsqueeze(0) for leaf in others)) if others else None
        # Of PyTorch's, which else looks whether its weights were replaced, and lays them out anew.
        theirs = {"_flat_weights": weights, "_flat_weight_refs": [None] * len(weights), "_cells": None}
        return operator.with_tensors(self, **dict(zip(names, weights, strict=True)), **theirs), x, hx, reset


@contextmanager
def _as_they_lie(x: Tensor) -> Iterator[None]:
    """Without cuDNN's warning that weights do not lie one after the other: those of one layer of several never do."""
    if not x.is_cuda:
        yield
        return
    with catching_warnings():
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        yield


def _by_step(passed: tuple[Tensor, Any], like: list[Tensor]) -> list[Tensor]:
    """The states of a pass by PyTorch's own kernel, as far as it tells them: of an LSTM's memory that is the last."""
    output, ends = passed
    states = [output.to(like[0].dtype)]
    if not isinstance(ends, Tensor):
        memory = ends[1].to(like[1].dtype)
        states.append(torch.cat([memory.new_zeros(len(output) - 1, *memory.shape[1:]), memory]))
    return states
