"""What every recipe ends with: its result held against the plain loop, and one line with the times of both."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

#: Where the recipes run.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def relative_error(found: Tensor, right: Tensor) -> float:
    """The largest difference, in units of the largest value.

    >>> relative_error(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    0.25
    """
    return float((found - right).abs().max() / right.abs().max())


def seconds(run: Callable[[], Tensor], repeats: int) -> float:
    """The least of so many calls; what runs on a GPU is waited for."""
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def compare(name: str, parallel: Callable[[], Tensor], plain: Callable[[], Tensor], allowed: float) -> None:
    """Print how far apart the two are and what they take; raise where they differ by more than is allowed."""
    error = relative_error(parallel(), plain())
    if DEVICE.type == "cuda":  # a solve that comes again gets kernels there: the first calls are slower
        seconds(parallel, 3)
        error = max(error, relative_error(parallel(), plain()))
    times = f"in parallel {1e3 * seconds(parallel, 1):.2f} ms, one by one {1e3 * seconds(plain, 1):.2f} ms"
    print(f"{name}: relative error {error:.1e}; {times} on {DEVICE.type}")
    if not error <= allowed:
        raise SystemExit(f"{name}: differs by {error:.1e}, where {allowed:.0e} is allowed")
