"""What is kept from solve to solve, let go of at once."""

from __future__ import annotations

from .graphs.cache import forget_graphs
from .ways.fused import forget_kernels
from .ways.plan import forget_records


def clear_caches() -> None:
    """Forget all captured solves, those of ``deeppcr.diffusion`` too, and give back their memory (see ``Newton.capture``); the kernels
    of steps; and what solves took, by which ``solve`` chooses its way.

    What was compiled stays on disk.

    >>> import deeppcr
    >>> deeppcr.clear_caches()
    """
    forget_graphs()
    forget_kernels()
    forget_records()
