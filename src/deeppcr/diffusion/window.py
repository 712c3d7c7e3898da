"""The sliding window: a quasi-Newton iteration on the steps that are not finished yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Window:
    """All unfinished steps at once: one call of the network an iteration, corrections spread by the prior's Jacobian.

    Args:
        tolerance: of the final sample, absolute; default 1e-3 in float32, 1e-8 in float64, 3e-2 in half precision
        size: at most so many steps of a sample are evaluated at a time; None: all of them
        freeze: a step leaves the window when its update is below this share of the tolerance
        max_iterations: the loop takes over after these
        tf32: until the largest update is below this, a GPU multiplies in TF32; None: never. No step leaves the window
            meanwhile
    """

    tolerance: float | None = None
    size: int | None = None
    freeze: float = 0.1
    max_iterations: int = 200
    tf32: float | None = None
