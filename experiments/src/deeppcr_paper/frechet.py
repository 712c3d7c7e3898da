"""How far samples are from a data set: the Wasserstein-2 distance of the normal distributions with their moments.

The Fréchet distance of generated images, taken between latents. Shapes: N samples, D numbers each.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from .timing import single_thread


class Reference:
    """The data set that samples are compared with, [N, D]."""

    def __init__(self, data: Tensor):
        self.mean, self.covariance = moments(data)
        values, vectors = torch.linalg.eigh(self.covariance)
        self.root = (vectors * values.clamp(min=0).sqrt()) @ vectors.mT

    def distance(self, samples: Tensor) -> float:
        """To samples [N, D].

        >>> data = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
        >>> round(Reference(data).distance(data + torch.tensor([3.0, 0.0, 4.0])), 6)
        5.0
        """
        mean, covariance = moments(samples)
        middle = torch.linalg.eigvalsh(self.root @ covariance @ self.root).clamp(min=0)
        spread = self.covariance.trace() + covariance.trace() - 2 * middle.sqrt().sum()
        return float(((mean - self.mean).square().sum() + spread).clamp(min=0).sqrt())


def moments(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance, on the CPU in float64: small matrices, and differences of large numbers."""
    flat = samples.flatten(1).double().cpu()
    return flat.mean(0), torch.cov(flat.mT).reshape(flat.shape[1], flat.shape[1])


def compare(data: Tensor, sequential: Tensor, parallel: Tensor, *, draws: int, seed: int) -> dict[str, Any]:
    """The distances of two sets of samples that were made from the same noise, and how sure their difference is.

    Args:
        data: [N, D]
        sequential, parallel: [M, D], row by row of the same noise
        draws: of the bootstrap; the same rows of both sets are drawn each time

    Returns:
        the distances, and an interval for each and for the difference: 95 % of the bootstrap, moved so that its mean is what was
        found. (Samples that are drawn twice have a smaller spread, so all of the bootstrap lies too far from the data.)
    """
    reference, generator = Reference(data), torch.Generator().manual_seed(seed)
    both = {"sequential": sequential.cpu(), "parallel": parallel.cpu()}
    count = len(sequential)
    rows = [torch.randint(count, (count,), generator=generator) for _ in range(draws)]
    with single_thread(), ThreadPoolExecutor(os.cpu_count()) as pool:
        drawn = {
            name: list(pool.map(lambda picked, of=samples: reference.distance(of[picked]), rows))
            for name, samples in both.items()
        }
    apart = [b - a for a, b in zip(*drawn.values(), strict=True)]
    distances = {name: reference.distance(samples) for name, samples in both.items()}
    difference = distances["parallel"] - distances["sequential"]
    return {
        "samples": count,
        **distances,
        "difference": difference,
        **{f"{name}_interval": _interval(values, distances[name]) for name, values in drawn.items()},
        "difference_interval": _interval(apart, difference),
    }


def _interval(values: list[float], found: float) -> list[float]:
    drawn = torch.tensor(values, dtype=torch.float64)
    return (torch.quantile(drawn - drawn.mean(), drawn.new_tensor([0.025, 0.975])) + found).tolist()
