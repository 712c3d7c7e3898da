"""A drop-in for ``torch.nn.Sequential`` of blocks that keep the shape of their input."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..newton import Newton
from ..solution import Solution
from ..solve import solve
from .arguments import Mode, check_mode, check_newton
from .rows import solve_finite_rows


class Sequential(nn.Sequential):
    """``torch.nn.Sequential`` of shape-preserving layers of any kind, run in parallel over the layers.

    Layers of equal structure are stacked and evaluated together; Jacobians come from automatic differentiation. Its
    parameters, names and ``state_dict`` are those of ``torch.nn.Sequential``. Layers must treat the rows of the batch
    independently and draw no random numbers: dropout and batch normalisation in train mode do not qualify.

    Under autocast, the parallel mode runs the layers in the precision of their parameters all the same, for Newton's
    method compares small differences, and returns the dtype of its input. A row that is not finite stays so and leaves
    the others right. Second derivatives: ``mode="sequential"``.

    Args:
        layers: modules that return the shape they are given
        mode: "parallel", "sequential" or "auto": in parallel from 64 layers on an accelerator, otherwise in sequence
        newton: settings of the parallel mode

    >>> import torch, deeppcr.nn
    >>> layers = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(50)]
    >>> net = deeppcr.nn.Sequential(*layers, mode="parallel")
    >>> x = torch.randn(4, 6)
    >>> torch.allclose(net(x), torch.nn.Sequential(*layers)(x), atol=1e-5)
    True
    """

    def __init__(self, *layers: nn.Module, mode: Mode = "auto", newton: Newton | None = None):
        super().__init__(*layers)
        self.mode: Mode = check_mode(mode)
        self.newton = check_newton(newton)
        self.solution: Solution | None = None

    def forward(self, input: Tensor, mode: Mode | None = None) -> Tensor:
        """[B, ...] to [B, ...]"""
        chosen = check_mode(self.mode if mode is None else mode)
        if chosen == "auto":
            chosen = "parallel" if len(self) >= 64 and input.device.type != "cpu" else "sequential"
        if chosen == "sequential" or len(self) == 0 or input.numel() == 0:
            return super().forward(input)
        return self._solve(input)

    def _solve(self, input: Tensor) -> Tensor:
        device, state = input.device.type, input
        if torch.is_autocast_enabled(device):
            state = input.to(next((p.dtype for p in self.parameters() if p.is_floating_point()), input.dtype))
        with torch.autocast(device, enabled=False):
            solution = solve_finite_rows(lambda start: solve(list(self), start, solver=self.newton), self._loop, state)
        self.solution = replace(solution, states=None)
        return solution.states[-1].to(input.dtype)

    def _loop(self, state: Tensor) -> Tensor:
        states = []
        for layer in self:
            state = layer(state)
            states.append(state)
        return torch.stack(states)

    def extra_repr(self) -> str:
        return f"mode={self.mode}"

    @classmethod
    def from_torch(cls, layers: nn.Sequential, *, mode: Mode = "auto", newton: Newton | None = None) -> Sequential:
        """The same layers (shared, not copied), run in parallel."""
        if not isinstance(layers, nn.Sequential):
            raise TypeError(f"layers: expected a torch.nn.Sequential, got {type(layers).__name__}")
        return cls(*layers, mode=mode, newton=newton)

    def to_torch(self) -> nn.Sequential:
        """The same layers (shared, not copied) as a plain ``torch.nn.Sequential``."""
        return nn.Sequential(*self)
