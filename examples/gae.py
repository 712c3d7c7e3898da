"""Generalised advantage estimates and lambda-returns with episode masks, in parallel over time.

Both are linear recursions from the last step to the first, one number a sequence: ``deeppcr.linear.solve`` with diagonal
blocks and ``reverse=True``. On a GPU that is one pass over the data at any length, where the usual loop launches a few
kernels a step; it pays from some dozens of steps on. On a CPU it pays less, and for rollouts of a few steps not at all.

    python examples/gae.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from compare import DEVICE, compare
from deeppcr import linear


def gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, gamma: float, lam: float
) -> Tensor:
    """Advantages [T, B]; all tensors are [T, B].

    Args:
        next_values: values of the observations that followed, the last of an episode included
        terminated: the episode ended there, and nothing follows: its next value counts as 0, even if it is NaN
        done: it ended there or was cut off: no later advantage counts
    """
    delta = torch.add(rewards, next_values.masked_fill(terminated, 0), alpha=gamma) - values
    decay = torch.full_like(delta, gamma * lam).masked_fill_(done, 0)
    return linear.solve(linear.Diagonal(decay), delta, reverse=True)


def gae_by_loop(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, gamma: float, lam: float
) -> Tensor:
    advantages, after = torch.empty_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * torch.where(terminated[t], 0, next_values[t]) - values[t]
        after = delta + gamma * lam * torch.where(done[t], 0, after)
        advantages[t] = after
    return advantages


def lambda_returns(rewards: Tensor, next_values: Tensor, terminated: Tensor, gamma: float, lam: float) -> Tensor:
    """Returns [T, B] as world models are trained by, with gradients; the last one starts from its next value."""
    follows = gamma * (~terminated).to(rewards.dtype)
    rhs = rewards + follows * (1 - lam) * next_values
    return linear.solve(linear.Diagonal(lam * follows), rhs, next_values[-1], reverse=True)


def lambda_returns_by_loop(
    rewards: Tensor, next_values: Tensor, terminated: Tensor, gamma: float, lam: float
) -> Tensor:
    returns = [next_values[-1]]
    for reward, value, ended in zip(rewards.flip(0), next_values.flip(0), terminated.flip(0), strict=True):
        mixed = (1 - lam) * value + lam * returns[-1]
        returns.append(reward + gamma * torch.where(ended, 0, mixed))
    return torch.stack(returns[:0:-1])


def rollout(length: int, rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Rewards, values, next values, and episodes that end or are cut off, at random."""
    rewards, values, next_values = torch.randn(3, length, rows, device=DEVICE, dtype=dtype)
    terminated, cut_off = torch.rand(2, length, rows, device=DEVICE) < 0.01
    return rewards, values, next_values, terminated, terminated | cut_off


def main() -> None:
    given = rollout(2048, 64)
    compare(
        "GAE, 2,048 steps",
        lambda: gae(*given, gamma=0.99, lam=0.95),
        lambda: gae_by_loop(*given, gamma=0.99, lam=0.95),
        allowed=1e-5,
    )


if __name__ == "__main__":
    main()
