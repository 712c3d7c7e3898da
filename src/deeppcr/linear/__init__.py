"""Block bidiagonal linear systems ``z_l = A_l z_{l-1} + b_l``, solved in parallel over l."""

from .auto import Auto
from .blocks import BlockDiagonal, Blocks, Dense, Diagonal, Scalar
from .filters import lfilter
from .fused import Fused
from .hierarchical import Hierarchical
from .pcr import PCR
from .solve import solve, solve_coupled
from .solver import ForwardSubstitution, LinearSolver

__all__ = [
    "PCR",
    "Auto",
    "BlockDiagonal",
    "Blocks",
    "Dense",
    "Diagonal",
    "ForwardSubstitution",
    "Fused",
    "Hierarchical",
    "LinearSolver",
    "Scalar",
    "lfilter",
    "solve",
    "solve_coupled",
]
