"""What was chosen for a run, in words: the notes of ``Samples.plan``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..jacobian import ScalarJacobian
from .prior import GaussianPrior
from .result import Samples
from .start import CoarseStart, MeanStart


def jacobian_in_words(jacobian: Any) -> str:
    if isinstance(jacobian, GaussianPrior):
        if not isinstance(jacobian.variance, Tensor) or jacobian.variance.ndim == 0:
            return f"jacobian: GaussianPrior of variance {float(jacobian.variance):g} in all directions"
        where = "along the coordinates" if jacobian.basis is None else "along the directions of a basis"
        return f"jacobian: GaussianPrior of {len(jacobian.variance)} variances {where}"
    if isinstance(jacobian, ScalarJacobian):
        return "jacobian: ScalarJacobian, the same for all coordinates"
    return f"jacobian: {jacobian!r}"


def start_in_words(start: Any, jacobian: Any) -> str:
    if isinstance(start, CoarseStart):
        return f"start: {start!r}, the network at every {start.stride}th step"
    if isinstance(start, MeanStart):
        return "start: MeanStart, one sample for all steps"
    if isinstance(start, Samples):
        return "start: earlier Samples"
    if isinstance(start, Tensor):
        return "start: states that were given"
    whose = "the prior" if isinstance(jacobian, GaussianPrior) else "a prior of unit variance"
    return f"start: the path that {whose} alone would take with this noise"
