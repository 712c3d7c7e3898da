"""An ODE on a fixed grid: the values of ``torchdiffeq.odeint(func, y0, t, method="rk4")``, in parallel over time.

The step is that of torchdiffeq, the 3/8 rule. Parallel pays for long grids (thousands of times) of few, narrow states
that neighbouring trajectories do not leave exponentially fast: damped, driven or nearly linear systems. It does not pay
for chaotic ones over many Lyapunov times, for wide states (each Jacobian has D x D numbers) or for a few dozen times.

    python examples/ode.py
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import deeppcr
from compare import DEVICE, compare

Func = Callable[[Tensor, Tensor], Tensor]


def rk4(func: Func, t0: Tensor, t1: Tensor, y: Tensor) -> Tensor:
    """y at t1 from y at t0, by the 3/8 rule."""
    dt = t1 - t0
    k1 = func(t0, y)
    k2 = func(t0 + dt / 3, y + dt * k1 / 3)
    k3 = func(t0 + dt * 2 / 3, y + dt * (k2 - k1 / 3))
    k4 = func(t1, y + dt * (k1 - k2 + k3))
    return y + dt * (k1 + 3 * (k2 + k3) + k4) / 8


def odeint(func: Func, y0: Tensor, t: Tensor, **options: Any) -> Tensor:
    """y at the times t [T]: [T, *y0.shape], y0 first. Options are those of ``deeppcr.solve``."""
    solution = deeppcr.solve(lambda y, ends: rk4(func, *ends, y), y0, (t[:-1], t[1:]), **options)
    return torch.cat([y0.unsqueeze(0), solution.states])


def odeint_by_loop(func: Func, y0: Tensor, t: Tensor) -> Tensor:
    states = [y0]
    for t0, t1 in pairwise(t):
        states.append(rk4(func, t0, t1, states[-1]))
    return torch.stack(states)


def pendulum(damping: Tensor | float, drive: Tensor | float) -> Func:
    """Angle and speed [..., 2] of a damped pendulum that is pushed to and fro."""

    def func(t: Tensor, y: Tensor) -> Tensor:
        angle, speed = y.unbind(-1)
        return torch.stack([speed, drive * torch.cos(t) - damping * speed - torch.sin(angle)], -1)

    return func


def main() -> None:
    func, y0 = pendulum(damping=0.5, drive=0.3), torch.rand(8, 2, device=DEVICE)
    t = torch.linspace(0, 20, 501, device=DEVICE)
    compare(
        "ODE by RK4, 500 steps",
        lambda: odeint(func, y0, t, solver=deeppcr.Newton()),  # without a solver, the quickest way is taken: the loop?
        lambda: odeint_by_loop(func, y0, t),
        allowed=1e-3,
    )


if __name__ == "__main__":
    main()
