"""Langevin and MALA chains, in parallel over their steps.

All random numbers are drawn before, so the chain is the very one that the loop gives. ``log_density`` maps [B, D] to [B],
a number a chain. Parallel pays where chains forget their start (log-concave targets, moderate steps), for long chains of
few rows; Langevin chains have gradients, too. It does not where there are as many short chains as the device can take at
once. A MALA chain jumps where a proposal is refused: Newton's method has to find out which ones are, and where it does
not the loop finishes the chain, with a warning. No gradient goes through the decisions.

    python examples/langevin.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import deeppcr
from compare import DEVICE, compare

Density = Callable[[Tensor], Tensor]
Step = Callable[[Tensor, Any], Tensor]


def langevin_step(log_density: Density, rate: float) -> Step:
    """``step(z, noise)`` of the unadjusted Langevin algorithm."""
    score = torch.func.grad(lambda z: log_density(z).sum())  # rows do not influence each other: their own gradients
    return lambda z, noise: z + rate * score(z) + math.sqrt(2 * rate) * noise


def mala_step(log_density: Density, rate: float) -> Step:
    """``step(z, (noise, log_uniform))``: a Langevin step that is taken or refused (Metropolis)."""
    both = torch.func.grad_and_value(lambda z: (lambda each: (each.sum(), each))(log_density(z)), has_aux=True)

    def step(z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        noise, log_uniform = x
        score, (_, here) = both(z)
        proposal = z + rate * score + math.sqrt(2 * rate) * noise
        score_there, (_, there) = both(proposal)
        forward = -0.5 * noise.square().sum(-1)
        backward = -(z - proposal - rate * score_there).square().sum(-1) / (4 * rate)
        accepted = log_uniform < there + backward - here - forward
        return torch.where(accepted.unsqueeze(-1), proposal, z)

    return step


def chain(step: Step, z0: Tensor, xs: Any, **options: Any) -> Tensor:
    """All states [L, B, D]. Options are those of ``deeppcr.solve``."""
    return deeppcr.solve(step, z0, xs, **options).states


def chain_by_loop(step: Step, z0: Tensor, xs: Any) -> Tensor:
    states = [z0]
    for x in zip(*xs, strict=True) if isinstance(xs, tuple) else xs:
        states.append(step(states[-1], x))
    return torch.stack(states[1:])


def ridge(z: Tensor) -> Tensor:
    """A log density [B] of [B, D]: a Gaussian with heavier shoulders, each number pulled towards the one before it."""
    return -0.5 * z.square().sum(-1) - torch.log(torch.cosh(z[..., 1:] - z[..., :-1])).sum(-1)


def main() -> None:
    z0, noise = torch.zeros(4, 3, device=DEVICE), torch.randn(300, 4, 3, device=DEVICE)
    log_uniform = torch.rand(300, 4, device=DEVICE).log()
    chains = {
        "Langevin": (langevin_step(ridge, 0.05), noise),
        "MALA": (mala_step(ridge, 0.3), (noise, log_uniform)),
    }
    for name, (step, xs) in chains.items():
        compare(
            f"{name} chain, 300 steps",
            partial(chain, step, z0, xs, solver=deeppcr.Newton()),
            partial(chain_by_loop, step, z0, xs),
            allowed=1e-3,
        )


if __name__ == "__main__":
    main()
