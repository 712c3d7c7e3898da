"""Solves by kernels, through the public call."""

import torch

import deeppcr
from deeppcr import Newton

#: Chunks that keep the interpreter's time short.
NEWTON = Newton(chunk=4)


def normal(*shape, device):
    return torch.randn(*shape, dtype=torch.float64, device=device)


def solve(*arguments, solver=NEWTON, again=True, **options):
    """A solve by kernels, which come with the second solve of a kind."""
    found = deeppcr.solve(*arguments, solver=solver, **options)
    return deeppcr.solve(*arguments, solver=solver, **options) if again and not by_kernels(found) else found


def by_kernels(solution):
    return solution.plan.evaluation.startswith("fused kernels")
