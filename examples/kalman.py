"""A Kalman filter and smoother, in parallel over time, with observations that may be missing.

    z_t = A z_{t-1} + noise of covariance Q,    y_t = C z_t + noise of covariance R

Covariances do not depend on the observations: one ``deeppcr.scan`` finds them for all rows. Given the gains, the means
are linear in each other: ``deeppcr.linear.solve``, forward for the filter and in reverse for the smoother.
Parallel pays for long series of few dimensions. It does not for states of dozens of numbers (the covariance is a state
of D x D), nor one observation at a time as it arrives.

    python examples/kalman.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import deeppcr
from compare import DEVICE, compare


class Model(NamedTuple):
    """A and Q [D, D], C [M, D], R [M, M]; mean [D] and covariance P [D, D] of the state before the first step."""

    A: Tensor
    C: Tensor
    Q: Tensor
    R: Tensor
    mean: Tensor
    P: Tensor


def covariances(model: Model, seen: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of every step the covariance before its observation, the gain, and the covariance after it; seen [L]: is there one?"""
    A, C, Q, R, _, first = model
    identity = torch.eye(len(A), dtype=A.dtype, device=A.device)

    def combine(P: Tensor, seen: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        before = A @ P @ A.mT + Q
        gain = torch.linalg.solve(C @ before @ C.mT + R, C @ before).mT * seen
        kept = identity - gain @ C
        P = kept @ before @ kept.mT + gain @ R @ gain.mT  # Joseph's form: it stays symmetric and positive
        return P, (before, gain, P)

    return deeppcr.scan(combine, first, seen.to(A.dtype), **options)[1]


def smooth(model: Model, y: Tensor, seen: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Filtered and smoothed means [L, B, D] and smoothed covariances [L, D, D] of y [L, B, M], of which seen [L] are there."""
    A, C = model.A, model.C
    before, gain, P = covariances(model, seen, **options)
    pushed = torch.where(seen[:, None, None], y, 0) @ gain.mT
    blocks = deeppcr.linear.Dense(A - gain @ (C @ A))
    mean = deeppcr.linear.solve(blocks, pushed, model.mean.expand(y.shape[1], -1))
    # Backwards: s_l = m_l + G_l (s_{l+1} - A m_l), and likewise for covariances.
    back = torch.linalg.solve(before[1:], A @ P[:-1]).mT
    rhs = mean[:-1] - mean[:-1] @ (back @ A).mT
    if len(y) == 1:
        return mean, mean, P
    smoothed = deeppcr.linear.solve(deeppcr.linear.Dense(back), rhs, mean[-1], reverse=True)

    def combine(S: Tensor, x: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        P, back, before = x
        S = P + back @ (S - before) @ back.mT
        return S, S

    _, S = deeppcr.scan(combine, P[-1], (P[:-1], back, before[1:]), reverse=True, **options)
    return mean, torch.cat([smoothed, mean[-1:]]), torch.cat([S, P[-1:]])


def smooth_by_loop(model: Model, y: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the textbook's recursions, one step after the other."""
    A, C, Q, R, mean, P = model
    mean, found = mean.expand(y.shape[1], -1), []
    for now, there in zip(y, seen.tolist(), strict=True):
        mean, P = mean @ A.mT, A @ P @ A.mT + Q
        before = mean, P
        if there:
            gain = P @ C.mT @ torch.linalg.inv(C @ P @ C.mT + R)
            mean, P = mean + (now - mean @ C.mT) @ gain.mT, P - gain @ C @ P
        found.append((before, mean, P))
    smoothed = [(mean, P)]
    for (_, mean, P), ((predicted, before), _, _) in zip(found[-2::-1], found[:0:-1], strict=True):
        back = P @ A.mT @ torch.linalg.inv(before)
        s, S = smoothed[-1]
        smoothed.append((mean + (s - predicted) @ back.mT, P + back @ (S - before) @ back.mT))
    means, covariances = zip(*reversed(smoothed), strict=True)
    return torch.stack([mean for _, mean, _ in found]), torch.stack(means), torch.stack(covariances)


def tracker(dtype: torch.dtype = torch.float32) -> Model:
    """Place and speed of something that is pushed at random; its place is seen."""
    A = torch.tensor([[1.0, 0.1], [0.0, 0.95]])
    C, Q, R = torch.tensor([[1.0, 0.0]]), torch.tensor([[1e-4, 0.0], [0.0, 1e-2]]), torch.tensor([[0.1]])
    return Model(*(each.to(DEVICE, dtype) for each in (A, C, Q, R, torch.zeros(2), torch.eye(2))))


def main() -> None:
    model, y = tracker(), torch.randn(500, 8, 1, device=DEVICE).cumsum(0) / 10
    seen = torch.rand(len(y), device=DEVICE) < 0.9
    compare(
        "Kalman smoother, 500 steps",
        lambda: smooth(model, y, seen, solver=deeppcr.Newton())[1],
        lambda: smooth_by_loop(model, y, seen)[1],
        allowed=1e-3,
    )


if __name__ == "__main__":
    main()
