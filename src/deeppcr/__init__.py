"""Run a computation that is written as a loop in parallel over its steps.

>>> import torch, deeppcr
>>> def step(z, x):  # the body of the loop, exactly as it stands in the loop
...     weight, bias = x
...     return torch.tanh(z) @ weight.mT + bias
>>> z0, xs = torch.randn(16), (torch.randn(1000, 16, 16) / 4, torch.randn(1000, 16))
>>> deeppcr.solve(step, z0, xs).states.shape
torch.Size([1000, 16])
"""

from . import diffusion, distributed, fuse, linear, nn
from .check import Finding, check
from .gradient import Implicit, Unrolled
from .jacobian import DenseJacobian, DiagonalJacobian, GivenJacobian, HutchinsonJacobian, ScalarJacobian
from .linear import PCR, Auto, ForwardSubstitution, Fused, Hierarchical
from .newton import Jacobi, Loop, Newton, Picard
from .newton.guess import BatchMean, Random, RepeatInitial, Zeros
from .predict import Prediction, predict
from .scan import scan
from .sequence import rowwise
from .sequence.evaluate import StepError
from .sequence.history import collapse, with_history
from .solution import ConvergenceError, Plan, Result, Solution
from .solve import clear_caches, solve
from .stopping import FixedIterations, PaperTest, UpdateTest
from .version import __version__ as __version__
from .warned import ConvergenceWarning

__all__ = [
    "PCR",
    "Auto",
    "BatchMean",
    "ConvergenceError",
    "ConvergenceWarning",
    "DenseJacobian",
    "DiagonalJacobian",
    "Finding",
    "FixedIterations",
    "ForwardSubstitution",
    "Fused",
    "GivenJacobian",
    "Hierarchical",
    "HutchinsonJacobian",
    "Implicit",
    "Jacobi",
    "Loop",
    "Newton",
    "PaperTest",
    "Picard",
    "Plan",
    "Prediction",
    "Random",
    "RepeatInitial",
    "Result",
    "ScalarJacobian",
    "Solution",
    "StepError",
    "Unrolled",
    "UpdateTest",
    "Zeros",
    "check",
    "clear_caches",
    "collapse",
    "diffusion",
    "distributed",
    "fuse",
    "linear",
    "nn",
    "predict",
    "rowwise",
    "scan",
    "solve",
    "with_history",
]
