"""Where the iteration starts: a guess of the sample after every step.

Shapes: L steps, B samples, D the flattened sample, K slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .coupling import Coupling
from .prior import GaussianPrior
from .problem import Problem
from .result import Samples

Network = Callable[[Tensor, Tensor, Tensor], Tensor]


class Start:
    """Strategy: a guess of the sample after every step.

    Attributes:
        may_be_good: whether it may be nearer to the solution than TF32 can tell: the caller had a part in it
        brings_tensors: whether it holds tensors, which lie somewhere else in every run
        asks_network: whether it evaluates the network
    """

    may_be_good = brings_tensors = asks_network = False

    def prepare(self, problem: Problem, prior: GaussianPrior) -> Start | Coarse:
        """What gives ``states``, found once for a kind of run.

        Args:
            prior: of the path through Gaussian data
        """
        return self

    def states(self, problem: Problem, coupling: Coupling, network: Network) -> tuple[Tensor, int]:
        """States [L, B, D, K], and how many rows of each sample the network saw for them.

        Args:
            coupling: of the prior that it was prepared for
        """
        raise NotImplementedError

    def in_words(self, prior: str) -> str:
        """For the plan; ``prior`` is what that of the path is called."""
        raise NotImplementedError


@dataclass(frozen=True)
class GaussianStart(Start):
    """The path that the ideal denoiser of the prior's Gaussian would take with this noise.

    The default but for windows of many steps. It costs no evaluation of the network. Where the Jacobian is no GaussianPrior, it is that of unit variance.

    >>> GaussianStart()
    GaussianStart()
    """

    def states(self, problem: Problem, coupling: Coupling, network: Network) -> tuple[Tensor, int]:
        return _path(problem, coupling, coupling.offsets), 0

    def in_words(self, prior: str) -> str:
        return f"start: the path that {prior} alone would take with this noise"


@dataclass(frozen=True, eq=False)
class MeanStart(Start):
    """One sample for all steps: the mean of the training set (the paper's), or per class.

    Args:
        mean: [*shape], or [classes, *shape] where each sample takes that of its label

    >>> import torch
    >>> MeanStart(torch.zeros(3, 8, 8)).mean.shape
    torch.Size([3, 8, 8])
    """

    mean: Tensor
    brings_tensors = True

    def states(self, problem: Problem, coupling: Coupling, network: Network) -> tuple[Tensor, int]:
        return _widen(problem, _mean(problem, self.mean)), 0

    def in_words(self, prior: str) -> str:
        return "start: MeanStart, one sample for all steps"


@dataclass(frozen=True, kw_only=True)
class CoarseStart(Start):
    """A coarse sampler: the network at every ``stride``-th step alone, its outputs interpolated between.

    Args:
        stride: in steps
        sweeps: how often

    >>> CoarseStart(stride=16).sweeps
    4
    """

    stride: int = 8
    sweeps: int = 4
    asks_network = True

    def __post_init__(self) -> None:
        whole = all(isinstance(each, int) for each in (self.stride, self.sweeps))
        if not whole or self.stride < 2 or self.sweeps < 1:
            raise ValueError(
                f"CoarseStart: expected whole numbers, stride from 2, sweeps from 1, got {self.stride!r} and {self.sweeps!r}"
            )

    def prepare(self, problem: Problem, prior: GaussianPrior) -> Coarse:
        return Coarse(self, problem, prior)

    def in_words(self, prior: str) -> str:
        return f"start: {self!r}, the network at every {self.stride}th step"


@dataclass(frozen=True, eq=False)
class GivenStart(Start):
    """States [L, B, *shape] from the caller; ``name`` is what they were given as."""

    given: Tensor
    name: str
    may_be_good = brings_tensors = True

    def states(self, problem: Problem, coupling: Coupling, network: Network) -> tuple[Tensor, int]:
        expected = (problem.length, problem.samples, *problem.shape)
        if self.given.shape != expected:
            raise ValueError(f"start: expected states [L, B, *shape] = {expected}, got {tuple(self.given.shape)}")
        if not torch.isfinite(self.given).all():
            raise ValueError("start: holds values that are not finite")
        return _widen(problem, self.given), 0

    def in_words(self, prior: str) -> str:
        return f"start: {self.name}"


def as_start(start: Any) -> Start:
    """What a user may pass as ``start``: a strategy, earlier samples, or states; None is the path through Gaussian data."""
    if start is None:
        return GaussianStart()
    if isinstance(start, Start):
        return start
    if isinstance(start, Samples):
        if start.states is None:
            raise ValueError("start: these samples hold no states; ask for them with keep_states=True")
        return GivenStart(start.states, "earlier Samples")
    if isinstance(start, Tensor):
        return GivenStart(start, "states that were given")
    raise TypeError(
        "start: expected GaussianStart(), MeanStart(mean), CoarseStart(), earlier Samples or states [L, B, *shape], "
        f"got {type(start).__name__}"
    )


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


class Coarse:
    """What the sweeps of a coarse sampler need, found once: between which of the picked steps each step lies, and where.

    Args:
        start: the stride and the sweeps
        problem: of which steps and device are used
        prior: on the Jacobian
    """

    picked: Tensor

    def __init__(self, start: CoarseStart, problem: Problem, prior: GaussianPrior):
        length, samples, device = problem.length, problem.samples, problem.device
        self.sweeps: int = start.sweeps
        picked = sorted({*range(0, length, start.stride), length - 1})
        self.rows: int = start.sweeps * len(picked) if len(picked) > 1 else 0
        self.picked = picked = torch.tensor(picked, device=device)
        every = torch.arange(length, device=device)
        self.left: Tensor = (torch.searchsorted(picked, every, right=True) - 1).clamp(0, max(len(picked) - 2, 0))
        right = (self.left + 1).clamp(max=len(picked) - 1)
        gap = (picked[right] - picked[self.left]).clamp(min=1)
        self.share: Tensor = ((every - picked[self.left]) / gap).to(problem.dtype)[:, None, None]
        self.slopes: Tensor = prior.slopes(problem.steps).to(device, problem.dtype).reshape(length, 1, -1)[picked]
        self.times: Tensor = problem.coefficients.timesteps[picked].repeat_interleave(samples)
        self.who: Tensor = torch.arange(samples, device=device).repeat(len(picked))
        self.scale: Tensor = problem.coefficients.scale[picked].reshape(-1, 1, 1)

    def states(self, problem: Problem, coupling: Coupling, network: Network) -> tuple[Tensor, int]:
        """As of a ``Start``: the prior's path through what the network says at the picked steps. The host looks at nothing."""
        states = _path(problem, coupling, coupling.offsets)
        for _ in range(self.sweeps if self.rows else 0):
            before = torch.cat([problem.initial.detach().unsqueeze(0), states[:-1]])[self.picked][..., 0]
            outputs = network((self.scale * before).flatten(0, 1), self.times, self.who).view_as(before)
            linear = self.slopes.unsqueeze(-1) * coupling.into(before.unsqueeze(-1))
            rest = (coupling.into(outputs.unsqueeze(-1)) - linear).squeeze(-1)
            states = _path(problem, coupling, torch.lerp(rest[self.left], rest[self.left + 1], self.share))
        return states, self.rows
