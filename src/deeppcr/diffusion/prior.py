"""The Jacobian of an ideal denoiser of Gaussian data: known in advance, diagonal in one basis for all steps.

For data of covariance S and a sample ``signal x0 + spread noise``, the best guess of noise or clean sample is affine in
the sample. In the eigenbasis of S it is diagonal: along a direction of variance v its slope is

    noise: n / (s^2 v + n^2),    clean sample: s v / (s^2 v + n^2),    with s, n signal and spread.

Shapes: L steps, D the flattened sample, K slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..jacobian import ScalarJacobian
from .samplers import Steps


@dataclass(frozen=True, eq=False)
class GaussianPrior:
    """Data as far as its mean and covariance tell.

    Args:
        variance: one number for all directions (1 for whitened data), or [D], along the columns of ``basis``
        basis: [D, D], orthonormal columns; None: the coordinates themselves
        mean: [*shape], of the data; None: 0. The Jacobian does not depend on it, the start of the iteration does

    >>> import torch
    >>> from deeppcr.diffusion import DDPM, GaussianPrior, Schedule
    >>> prior = GaussianPrior.from_data(torch.randn(500, 3, 4, 4))
    >>> prior.basis.shape, prior.mean.shape
    (torch.Size([48, 48]), torch.Size([3, 4, 4]))
    """

    variance: float | Tensor = 1.0
    basis: Tensor | None = None
    mean: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.variance, (int, float, Tensor)):
            raise TypeError(f"variance: expected a number or a tensor [D], got {self.variance!r}")
        if self.basis is not None and not isinstance(self.basis, Tensor):
            raise TypeError(f"basis: expected a tensor [D, D] or None, got {type(self.basis).__name__}")
        variance = torch.as_tensor(self.variance, dtype=torch.float64).detach().cpu()
        wrong = variance[~(torch.isfinite(variance) & (variance >= 0))].tolist()
        if variance.ndim > 1 or wrong:
            came = wrong[0] if wrong else f"shape {tuple(variance.shape)}"
            raise ValueError(f"variance: expected a number or [D], finite and from 0, got {came}")
        object.__setattr__(self, "variance", variance)
        if self.basis is not None and (variance.ndim != 1 or self.basis.shape != (len(variance), len(variance))):
            raise ValueError(
                f"basis: expected [D, D] for variances [D] = {tuple(variance.shape)}, got {tuple(self.basis.shape)}"
            )

    @staticmethod
    def from_data(data: Tensor) -> GaussianPrior:
        """From a data set [N, *shape] as the denoiser was trained on it.

        >>> import torch
        >>> GaussianPrior.from_data(torch.randn(100, 6)).variance.shape
        torch.Size([6])
        """
        if data.ndim < 2 or len(data) < 2:
            raise ValueError(f"data: expected at least 2 samples [N, *shape], got {tuple(data.shape)}")
        flat = data.detach().flatten(1).double()
        if not torch.isfinite(flat).all():
            raise ValueError("data: expected finite numbers, got some that are not")
        mean, dtype = flat.mean(0), data.dtype if data.dtype.is_floating_point else torch.get_default_dtype()
        prior = GaussianPrior.from_covariance(torch.cov(flat.T).reshape(flat.shape[1], flat.shape[1]))
        return GaussianPrior(prior.variance, prior.basis, mean.to(dtype).reshape(data.shape[1:]))

    @staticmethod
    def from_covariance(covariance: Tensor, mean: Tensor | None = None) -> GaussianPrior:
        """From the covariance [D, D] of the flattened data.

        >>> import torch
        >>> GaussianPrior.from_covariance(torch.diag(torch.tensor([1.0, 4.0]))).variance
        tensor([1., 4.], dtype=torch.float64)
        """
        if covariance.ndim != 2 or covariance.shape[0] != covariance.shape[1]:
            raise ValueError(f"covariance: expected [D, D], got {tuple(covariance.shape)}")
        if not torch.isfinite(covariance).all():
            raise ValueError("covariance: expected finite numbers, got some that are not")
        variance, basis = torch.linalg.eigh(covariance.detach().double())
        return GaussianPrior(variance.clamp(min=0), basis, mean)

    @property
    def in_words(self) -> str:
        variance = torch.as_tensor(self.variance)
        if variance.ndim == 0:
            return f"GaussianPrior of variance {float(variance):g} in all directions"
        where = "along the coordinates" if self.basis is None else "along the directions of a basis"
        return f"GaussianPrior of {len(variance)} variances {where}"

    @property
    def of_path(self) -> GaussianPrior:
        """Of the path through Gaussian data that an iteration may start from."""
        return self

    def check(self, shape: torch.Size) -> None:
        """Raise where it is not one of samples of this shape."""
        width = shape.numel()
        if self.variance.ndim and len(self.variance) != width:  # type: ignore[union-attr, arg-type]
            raise ValueError(
                f"jacobian: the prior is of {len(self.variance)} numbers, a sample {tuple(shape)} has {width}"  # type: ignore[arg-type]
            )
        if self.mean is not None and self.mean.shape != shape:
            raise ValueError(f"jacobian: the prior's mean is {tuple(self.mean.shape)}, a sample {tuple(shape)}")

    def slopes(self, steps: Steps) -> Tensor:
        """[L] or [L, D] float64: derivative of the network's output with respect to the sample (slot 0)."""
        variance = torch.as_tensor(self.variance)
        signal, spread, scale = steps.signal, steps.spread, steps.scale
        assert scale is not None
        if variance.ndim:
            signal, spread, scale = signal[:, None], spread[:, None], scale[:, None]
        total = signal**2 * variance + spread**2
        noise, clean = spread / total, signal * variance / total
        if steps.prediction == "epsilon":
            return noise
        if steps.prediction == "x0":
            return clean
        if steps.prediction == "flow":
            return noise - clean
        return scale * (signal * noise - spread * clean)

    def offsets(self, steps: Steps) -> Tensor:
        """[L] float64, or [L, D]: what of the mean (in the basis) is in the output beside ``slope * sample``."""
        slopes = self.slopes(steps)
        assert steps.scale is not None
        # At the sample signal * mean the best guess of the clean sample is the mean and that of the noise is 0.
        at_mean = {
            "epsilon": torch.zeros_like(steps.signal),
            "x0": torch.ones_like(steps.signal),
            "flow": -torch.ones_like(steps.signal),
            "v": -steps.scale * steps.spread,
        }[steps.prediction]
        if slopes.ndim > 1:
            return at_mean[:, None] - slopes * steps.signal[:, None]
        return at_mean - slopes * steps.signal

    def couplings(self, steps: Steps) -> Tensor:
        """Derivatives of every step in the basis: [L, 1 or D] for one slot, [L, 1 or D, K, K] for several.

        Clipping is left out: what is clipped does not depend on the sample, but which values are is not known ahead.
        """
        slopes = self.slopes(steps)
        slopes = slopes if slopes.ndim > 1 else slopes[:, None]
        keep, gain = steps.keep, steps.gain
        if steps.clip is not None:
            clip = steps.clip
            keep = keep + (clip.weight * clip.sample)[:, None, None]
            gain = gain + (clip.weight * clip.output)[:, None]
        into = torch.zeros(steps.slots, dtype=torch.float64)
        into[0] = 1
        blocks = keep[:, None] + slopes[:, :, None, None] * (gain[:, :, None] * into)[:, None]
        return blocks[..., 0, 0] if steps.slots == 1 else blocks


#: One object for all calls: a solver knows by it what it has prepared.
UNIT = GaussianPrior()


@dataclass(frozen=True)
class ScalarPrior:
    """``deeppcr.ScalarJacobian`` where a GaussianPrior may stand: the same for all coordinates."""

    jacobian: ScalarJacobian
    basis = None
    in_words = "ScalarJacobian, the same for all coordinates"
    of_path = UNIT

    def check(self, shape: torch.Size) -> None:
        """It is one of samples of any shape."""

    def couplings(self, steps: Steps) -> Tensor:
        """[L, 1]; see ``GaussianPrior.couplings``."""
        if steps.slots > 1:
            raise ValueError("jacobian: ScalarJacobian knows one slot; this sampler keeps several: use GaussianPrior")
        value = torch.as_tensor(self.jacobian.value)
        if value.ndim > 1 or (value.ndim and len(value) != len(steps)):
            raise ValueError(f"jacobian: expected a number or [L] with L = {len(steps)}, got {tuple(value.shape)}")
        return value.expand(len(steps))[:, None]


Prior = GaussianPrior | ScalarPrior


def as_prior(jacobian: Any) -> Prior:
    """What a Window takes as ``jacobian``; None is unit variance."""
    if jacobian is None:
        return UNIT
    if isinstance(jacobian, GaussianPrior):
        return jacobian
    if isinstance(jacobian, ScalarJacobian):
        return ScalarPrior(jacobian)
    raise TypeError(
        "jacobian: Window takes GaussianPrior(...) or deeppcr.ScalarJacobian(...), which cost nothing to form; for others use "
        f"solver=deeppcr.Newton(); got {jacobian!r}"
    )
