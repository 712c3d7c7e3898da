"""How a Sequence becomes a bidiagonal system: the Jacobians of its steps, exact or approximate."""

from .base import Jacobian
from .dense import DenseJacobian, block_bytes
from .diagonal import DiagonalJacobian, HutchinsonJacobian
from .given import GivenJacobian, ScalarJacobian

__all__ = [
    "DenseJacobian",
    "DiagonalJacobian",
    "GivenJacobian",
    "HutchinsonJacobian",
    "Jacobian",
    "ScalarJacobian",
    "block_bytes",
]
