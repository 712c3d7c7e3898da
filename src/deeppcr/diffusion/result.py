"""What sampling returns: the samples, and what they cost and are worth."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..solution import Plan, Result, worst_of


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples and their certificate, sample by sample.

    Attributes:
        final: [B, *shape], the samples
        states: [L, B, *shape], the sample after every step; None where it was not asked for
        iterations: [B], of the parallel solve (0 for the plain loop)
        evaluations: [B], how often the network was evaluated on a row of this sample; guidance counts twice
        residual: [B], the largest ``|z_l - step(z_{l-1})|`` as last measured, before the last update, by ``Window`` relative to
            ``|z_l|`` where that is larger than 1 (0 for the loop)
        exact_steps: [B], how many leading steps were finished when the parallel solve ended; L where it did it all
        results: how each sample ended
        result: the worst of them
        plan: what was chosen, and why
        message: the result in words

    >>> import torch
    >>> from deeppcr.diffusion import DDIM, Noise, Schedule, sample
    >>> samples = sample(lambda z, t: 0.9 * z, Schedule.linear(20), Noise.draw((2, 3)), step=DDIM())
    >>> samples.final.shape, samples.result.name
    (torch.Size([2, 3]), 'CONVERGED')
    """

    final: Tensor
    states: Tensor | None
    iterations: Tensor
    evaluations: Tensor
    residual: Tensor
    exact_steps: Tensor
    results: tuple[Result, ...]
    plan: Plan
    message: str

    @property
    def result(self) -> Result:
        return worst_of(self.results)

    def __repr__(self) -> str:
        return (
            f"Samples({self.result.name}, {tuple(self.final.shape)}, iterations={int(self.iterations.max())}, "
            f"evaluations={int(self.evaluations.sum())}: {self.message})"
        )
