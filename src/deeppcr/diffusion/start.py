"""Where the iteration starts: a guess of the sample after every step.

Shapes: L steps, B samples, D the flattened sample, K slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .coupling import Coupling
from .prior import GaussianPrior
from .problem import Problem
from .samples import Samples


@dataclass(frozen=True)
class GaussianStart:
    """The path that the ideal denoiser of the prior's Gaussian would take with this noise: the default.

    It costs no evaluation of the network. Where the Jacobian is no GaussianPrior, it is that of unit variance.

    >>> GaussianStart()
    GaussianStart()
    """


@dataclass(frozen=True, eq=False)
class MeanStart:
    """One sample for all steps: the mean of the training set (the paper's), or per class.

    Args:
        mean: [*shape], or [classes, *shape] where each sample takes that of its label

    >>> import torch
    >>> MeanStart(torch.zeros(3, 8, 8)).mean.shape
    torch.Size([3, 8, 8])
    """

    mean: Tensor


@dataclass(frozen=True, kw_only=True)
class CoarseStart:
    """A coarse sampler: the network at every ``stride``-th step alone, its outputs interpolated between.

    Args:
        stride: in steps
        sweeps: how often

    >>> CoarseStart(stride=16).sweeps
    4
    """

    stride: int = 8
    sweeps: int = 4

    def __post_init__(self):
        if self.stride < 2 or self.sweeps < 1:
            raise ValueError(f"CoarseStart: stride from 2, sweeps from 1, got {self.stride} and {self.sweeps}")


Start = GaussianStart | MeanStart | CoarseStart | Samples | Tensor


def knows_the_network(start: Any) -> bool:
    """Whether a start may be near the solution already: the network, or the caller, had a part in it."""
    return not (start is None or isinstance(start, (GaussianStart, MeanStart)))


def start_states(start: Any, problem: Problem, prior: GaussianPrior, coupling: Coupling) -> tuple[Tensor, int]:
    """States [L, B, D, K], and how many rows of each sample the network saw for them.

    Args:
        start: one of ``Start``, or None
        prior: of the path through Gaussian data
        coupling: of that prior
    """
    if start is None or isinstance(start, GaussianStart):
        return _path(problem, coupling, coupling.offsets), 0
    if isinstance(start, CoarseStart):
        return _coarse(problem, prior, coupling, start)
    if isinstance(start, MeanStart):
        return _widen(problem, _mean(problem, start.mean)), 0
    if isinstance(start, Samples):
        if start.states is None:
            raise ValueError("start: these samples hold no states; ask for them with keep_states=True")
        start = start.states
    if not isinstance(start, Tensor):
        raise TypeError(
            "start: expected GaussianStart(), MeanStart(mean), CoarseStart(), earlier Samples or states [L, B, *shape], "
            f"got {type(start).__name__}"
        )
    expected = (problem.length, problem.samples, *problem.shape)
    if start.shape != expected:
        raise ValueError(f"start: expected states [L, B, *shape] = {expected}, got {tuple(start.shape)}")
    if not torch.isfinite(start).all():
        raise ValueError("start: holds values that are not finite")
    return _widen(problem, start), 0


def _mean(problem: Problem, mean: Tensor) -> Tensor:
    if mean.shape == problem.shape:
        return mean.expand(problem.length, problem.samples, *problem.shape)
    labels = problem.denoiser.classes
    per_class = mean.shape[1:] == problem.shape
    if per_class and isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point():
        return mean.to(problem.device)[labels].expand(problem.length, problem.samples, *problem.shape)
    raise ValueError(
        f"start: MeanStart takes one mean {tuple(problem.shape)}, or [classes, ...] with labels; got {tuple(mean.shape)}"
    )


def _widen(problem: Problem, states: Tensor) -> Tensor:
    """Samples [L, B, *shape] as states; what else a sampler keeps starts from 0."""
    flat = states.detach().to(problem.device, problem.dtype).flatten(2).unsqueeze(-1)
    return torch.nn.functional.pad(flat, (0, problem.slots - 1))


def _path(problem: Problem, coupling: Coupling, offsets: Tensor | None) -> Tensor:
    """All states of the affine recurrence with outputs ``slope * sample + offsets``; nothing is clipped on it.

    Args:
        offsets: [L, B or 1, D], in the basis; None: 0
    """
    shape = (problem.length, problem.samples, problem.width, problem.slots)
    if offsets is None:
        terms = problem.initial.new_zeros(shape)
    else:
        terms = (problem.coefficients.slope * offsets.unsqueeze(-1)).expand(shape).clone()
    if problem.shift is not None:
        terms[..., 0] += coupling.into(problem.shift.detach().unsqueeze(-1)).squeeze(-1)
    initial = coupling.into(problem.initial.detach())
    terms[0] += coupling.blocks[:1].apply(initial.flatten(1).unsqueeze(0)).view_as(terms[0])
    return coupling.out_of(coupling.solve(terms))


def _coarse(problem: Problem, prior: GaussianPrior, coupling: Coupling, start: CoarseStart) -> tuple[Tensor, int]:
    length, samples, device = problem.length, problem.samples, problem.device
    states = _path(problem, coupling, coupling.offsets)
    picked = torch.tensor(sorted({*range(0, length, start.stride), length - 1}), device=device)
    if len(picked) < 2:
        return states, 0
    every = torch.arange(length, device=device)
    left = (torch.searchsorted(picked, every, right=True) - 1).clamp(max=len(picked) - 2)
    share = ((every - picked[left]) / (picked[left + 1] - picked[left])).to(problem.dtype)[:, None, None]
    slopes = prior.slopes(problem.steps).to(device, problem.dtype).reshape(length, 1, -1)[picked]
    times = problem.coefficients.timesteps[picked].repeat_interleave(samples)
    who = torch.arange(samples, device=device).repeat(len(picked))
    scale = problem.coefficients.scale[picked].reshape(-1, 1, 1)
    for _ in range(start.sweeps):
        before = torch.cat([problem.initial.detach().unsqueeze(0), states[:-1]])[picked][..., 0]
        outputs = problem.network((scale * before).flatten(0, 1), times, who).view_as(before)
        difference = coupling.into(outputs.unsqueeze(-1)) - slopes.unsqueeze(-1) * coupling.into(before.unsqueeze(-1))
        difference = difference.squeeze(-1)
        states = _path(problem, coupling, torch.lerp(difference[left], difference[left + 1], share))
    return states, start.sweeps * len(picked)
