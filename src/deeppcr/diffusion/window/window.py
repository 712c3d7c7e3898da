"""Settings of the sliding window, and what follows from them for a problem."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...runtime import full_precision
from ..coupling import Coupling
from ..prior import UNIT
from ..problem import Problem
from ..start import CoarseStart, GaussianStart, Start, as_start
from .rounding import Rounding

#: rows that keep a device busy: up to these a call of the network costs about the same
_FILLING = {"cuda": 1024, "cpu": 64}
#: An error left at the first step may grow on its way to the final sample, one left at the last does not. By how much is the
#: network's and the sample's affair: 2 to 60 times in DDIM with networks trained well and badly, hundreds of times in a few
#: samples of DDPM. Where more was seen in the end, a sample goes back (``Iteration``).
_GROWTH = 100.0
#: A network of half precision rounds otherwise than in the loop, and a step leaves with as much.
_ROUNDS = 2.0
#: where one window holds all of so many steps or more, the network is first asked at some of them
_MANY = 512


@dataclass(frozen=True, kw_only=True)
class Window:
    """All unfinished steps at once: one call of the network an iteration, corrections spread by the prior's Jacobian.

    A step leaves the window when its update is far below the tolerance; every sample has a window of its own. The network
    works in the precision that it would have in the loop: as TF32 and autocast are set (see ``precision``). From the second call on with the same denoiser, sampler and shapes the iterations are replayed
    from CUDA graphs. Graphs read the denoiser's parameters where they lie: changes in place are seen; where they were
    replaced, or anything else that the denoiser reaches was, graphs are made anew: also global variables that its code names.
    Changes outside of Python, in global variables of libraries or in large arrays of NumPy are not seen: a denoiser whose
    result depends on them needs ``graphs=False``.

    Args:
        tolerance: of the final sample, absolute; default 1e-8 in float64, 1e-3 in float32, 4e-3 (half a shade of 8 bits) where the
            network multiplies in TF32, and in half precision what that leaves in this sampler, by an estimate
        size: at most so many steps of a sample are evaluated at a time, which bounds the network's memory. Fewer steps are
            less work in more iterations; None: enough to keep the device busy with this batch, at least L / 8. "auto": on a GPU
            what is expected to be fastest from what rows of this network cost, be it the loop in a CUDA graph, a short window that
            slides along the steps, or a long one; the loop, too, where far more is left of what was found in parallel than its own
            rounding leaves. Elsewhere as None
        freeze: the last step leaves the window when its update is below this share of the tolerance; earlier ones when it
            is below less, the first a hundredth of it, since what is left may grow on its way to the final sample. Where the
            iterates showed that it has grown to more than the square root of this share, the sample goes back
        accelerate: extrapolate from the last three updates
        max_iterations: the loop takes over after these; None: 200, or where that is more, eight times as many as there are
            windows of ``size`` in all steps: small windows that were tried took about four times as many
        tf32: where the network multiplies in float32 proper: until the updates of three quarters of the window's steps are below
            this, and only while their number grows, a GPU multiplies in TF32, and no step leaves: what has left was last seen in
            full precision. Not where the start is earlier samples or given states: these may be better than TF32 can tell. None: never
        precision: None: that of the loop, as PyTorch is set; "float32": the network's float32 products are float32 proper,
            whatever is set for TF32, at up to four times the cost
        graphs: replay iterations from CUDA graphs

    >>> import torch
    >>> from deeppcr.diffusion import DDIM, Noise, Schedule, Window, sample
    >>> window = Window(tolerance=1e-4, size=64)
    >>> denoiser = lambda z, t: torch.sin(z)
    >>> sample(denoiser, Schedule.linear(200), torch.randn(1, 5), step=DDIM(), solver=window).final.shape
    torch.Size([1, 5])
    """

    tolerance: float | None = None
    size: int | Literal["auto"] | None = None
    freeze: float = 0.05
    accelerate: bool = True
    max_iterations: int | None = None
    tf32: float | None = 0.01
    graphs: bool = True
    precision: Literal["float32"] | None = None

    def __post_init__(self) -> None:
        if self.precision not in (None, "float32"):
            raise ValueError(f'precision: expected None or "float32", got {self.precision!r}')
        for name in ("tolerance", "tf32"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"{name}: expected a positive number or None, got {value!r}")
        if not isinstance(self.freeze, (int, float)) or not 0 < self.freeze <= 1:
            raise ValueError(f"freeze: expected a share of the tolerance in (0, 1], got {self.freeze!r}")
        for name, others in (("size", (None, "auto")), ("max_iterations", (None,))):
            value = getattr(self, name)
            if value not in others and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}: expected a whole number from 1, got {value!r}")

    def tolerance_for(self, problem: Problem) -> float:
        if self.tolerance is not None:
            return self.tolerance
        with self.settings(problem.device):
            if problem.eps <= torch.finfo(torch.float32).eps:
                return 1e-8 if problem.dtype == torch.float64 else 1e-3
            if problem.in_tf32:
                return 4e-3
            coupling = Coupling(UNIT, problem.steps, problem.width, problem.device, problem.dtype, plain=True)
            left = Rounding(problem, coupling).of_network
            # A few small rows may not show all.
            left = left * (_ROUNDS * problem.eps / problem.rounding).clamp_min(1).to(left)
            return max(1e-3, _ROUNDS * float(torch.linalg.vector_norm(left)))

    def settings(self, device: torch.device) -> AbstractContextManager[None]:
        """Inside, PyTorch is set as the network is to multiply."""
        return full_precision(device) if self.precision else nullcontext()

    def size_for(self, problem: Problem) -> int:
        length, rows = problem.length, _FILLING.get(problem.device.type, 1024)
        rows *= 1 if problem.ranks is None else problem.ranks.count
        asked = self.size if isinstance(self.size, int) else None
        return min(length, asked or max(-(-rows // problem.samples), -(-length // 8)))

    def most_iterations(self, length: int, size: int) -> int:
        """After how many iterations the loop takes over, of so many steps in windows of this size."""
        return self.max_iterations or max(200, 8 * -(-length // size))

    def start_for(self, problem: Problem, start: Any) -> Start:
        """Where a run starts.

        A coarse sampler saves more evaluations than it takes where all its steps are in the window at once, and many: those
        of 1,024 steps fell from 5.9 to 4.9 rows a step for latents of MNIST, not at all in windows of an eighth.
        """
        if start is not None:
            return as_start(start)
        if self.size == "auto" and self.no_graphs(problem) is None:
            return GaussianStart()
        whole = self.size_for(problem) == problem.length >= _MANY
        return CoarseStart() if whole and problem.slots == 1 and problem.steps.clip is None else GaussianStart()

    def thresholds_for(self, problem: Problem) -> Tensor:
        """[L] float64: below which update each step leaves."""
        left = 1 - torch.arange(1, problem.length + 1, dtype=torch.float64) / problem.length
        return self.freeze * self.tolerance_for(problem) * _GROWTH**-left

    def no_graphs(self, problem: Problem) -> str | None:
        """Why iterations are not replayed, if they are not."""
        if problem.device.type != "cuda":
            return f"the noise is on the {problem.device.type}"
        return None if self.graphs else "graphs=False"
