"""A drop-in for ``torch.nn.Sequential`` of blocks that keep the shape of their input."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from ..newton import Newton
from ..runtime import outside_of_graph
from ..solution import Solution
from ..solve import solve
from .arguments import ASKED, EMPTY, Mode, check_mode, check_newton
from .report import looped, solve_finite_rows

#: So many layers are run in parallel on an accelerator, where it is to be chosen.
DEEP = 64


class Sequential(nn.Sequential):
    """``torch.nn.Sequential`` of shape-preserving layers of any kind, run in parallel over the layers.

    Layers of equal structure are stacked and evaluated together; Jacobians come from automatic differentiation. Its
    parameters, names and ``state_dict`` are those of ``torch.nn.Sequential``. Layers must treat the rows of the batch
    independently and draw no random numbers: dropout and batch normalisation in train mode do not qualify.

    Under autocast, the parallel mode runs the first and the last layer as the loop does, so that the result has the
    dtype that it has there, and those between them in the precision of their parameters all the same: Newton's method
    compares small differences. A row that is not finite stays so and leaves the others right. Second derivatives:
    ``mode="sequential"``.

    Args:
        layers: modules that return the shape they are given; or one ``OrderedDict`` of names and modules
        mode: "parallel", "sequential" or "auto": in parallel from 64 layers on an accelerator, otherwise in sequence
        newton: settings of the parallel mode

    >>> import torch, deeppcr.nn
    >>> layers = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(50)]
    >>> net = deeppcr.nn.Sequential(*layers, mode="parallel")
    >>> x = torch.randn(4, 6)
    >>> torch.allclose(net(x), torch.nn.Sequential(*layers)(x), atol=1e-5)
    True
    """

    def __init__(
        self, *layers: nn.Module | OrderedDict[str, nn.Module], mode: Mode = "auto", newton: Newton | None = None
    ):
        super().__init__(*layers)  # pyright: ignore[reportArgumentType, reportCallIssue]
        self.mode: Mode = check_mode(mode)
        self.newton: Newton = check_newton(newton)
        #: A Solution, or of a pass by the loop its rows, their device and why.
        self._passed: Solution | tuple[int, torch.device, str] | None = None

    def forward(self, input: Tensor, mode: Mode | None = None) -> Tensor:
        """[B, ...] to [B, ...]"""
        chosen, why = check_mode(self.mode if mode is None else mode), ASKED
        if chosen == "auto":
            deep = len(self) >= DEEP and input.device.type != "cpu"
            chosen = "parallel" if deep else "sequential"
            why = f"on a CPU, or with fewer than {DEEP} layers, the loop wins"
        low = torch.is_autocast_enabled(input.device.type)
        if input.numel() == 0:
            chosen, why = "sequential", EMPTY
        elif len(self) < (3 if low else 1):
            chosen, why = "sequential", "there is nothing between the first layer and the last"
        if torch.compiler.is_compiling():
            if chosen == "sequential":
                return super().forward(input)
            eagerly = outside_of_graph(self.forward, "layers of your own are solved for by looking at values")
            return eagerly(input, chosen)
        if chosen == "sequential":
            out = super().forward(input)
            self._passed = input.shape[0] if input.ndim > 1 else 1, input.device, why
            return out
        return self._solve_under_autocast(input) if low else self._solve(list(self), input)

    def _solve_under_autocast(self, input: Tensor) -> Tensor:
        first, *layers, last = self
        state = first(input)
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), state.dtype)
        with torch.autocast(input.device.type, enabled=False):
            out = self._solve(layers, state.to(dtype))
        return last(out.to(state.dtype))

    def _solve(self, layers: list[nn.Module], state: Tensor) -> Tensor:
        def loop(state: Tensor) -> Tensor:
            states = []
            for layer in layers:
                state = layer(state)
                states.append(state)
            return torch.stack(states)

        solution = solve_finite_rows(lambda start: solve(layers, start, solver=self.newton), loop, state)
        self._passed = solution.in_short()
        return solution.states[-1]

    @property
    def solution(self) -> Solution | None:
        """How the last pass went that was not compiled, in parallel or by the loop; its states are not kept. None before the first one."""
        if isinstance(self._passed, tuple):
            return looped(len(self), *self._passed)
        return self._passed

    def __getitem__(self, idx: Any) -> Any:
        """A layer; of a slice a network that runs as this one does."""
        found: Any = super().__getitem__(idx)
        if isinstance(idx, slice):
            found.mode, found.newton = self.mode, self.newton
        return found

    def __add__(self, other: nn.Sequential) -> Sequential:
        """These layers and then those of ``other``, run as this network is."""
        return type(self)(*super().__add__(other), mode=self.mode, newton=self.newton)

    def __mul__(self, other: int) -> Sequential:
        """These layers so many times one after the other, run as this network is."""
        return type(self)(*super().__mul__(other), mode=self.mode, newton=self.newton)

    def extra_repr(self) -> str:
        return f"mode={self.mode}"

    @classmethod
    def from_torch(cls, layers: nn.Sequential, *, mode: Mode = "auto", newton: Newton | None = None) -> Sequential:
        """The same layers (shared, not copied) under the same names, run in parallel."""
        if not isinstance(layers, nn.Sequential):
            raise TypeError(f"layers: expected a torch.nn.Sequential, got {type(layers).__name__}")
        return cls(OrderedDict(layers._modules), mode=mode, newton=newton)  # pyright: ignore[reportArgumentType]

    def to_torch(self) -> nn.Sequential:
        """The same layers (shared, not copied) as a plain ``torch.nn.Sequential``."""
        return nn.Sequential(OrderedDict(self._modules))  # pyright: ignore[reportArgumentType]
