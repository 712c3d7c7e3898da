"""The steps of one layer in one direction: what solves them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..distributed.ranks import Ranks
from ..newton import Loop, Newton
from ..sequence.lengths import up_to
from ..solution import Solution
from ..solve import refuse_given, solve, solve_call
from ..ways.fused import Call


class NoKernels(Exception):
    """A cell has none, and the message says why.

    Attributes:
        passing: it may have some in another call: somebody observes this one, say
    """

    def __init__(self, reason: str, *, passing: bool = False):
        super().__init__(reason)
        self.passing = passing


def solve_steps(
    step: Any,
    z0: Any,
    xs: Any,
    *,
    lengths: Tensor | None,
    solver: Newton | Loop | None,
    mesh: Ranks | None,
    kernels: bool,
) -> Solution:
    """``solve``, of a batch of rows.

    Args:
        kernels: raise NoKernels where the step has none; they are made where that was not done before
    """
    first = z0 if isinstance(z0, Tensor) else z0[0]
    if mesh is not None or isinstance(solver, Loop) or not first.numel():
        return solve(step, z0, xs, batch_dims=1, lengths=lengths, solver=solver, mesh=mesh)
    if lengths is not None:
        if isinstance(solver, Newton):
            refuse_given(solver.jacobian)
        step, xs = up_to(lengths, step, z0, xs, None, 1)
    call = Call(step, z0, xs, None, 1, planned=solver is None, short=True)
    if kernels:
        require_kernels(call)
    return solve_call(call, solver)


def require_kernels(call: Call) -> None:
    """Make them, where that was not done before."""
    found = call.make()
    if isinstance(found, str):
        raise NoKernels(found, passing=call.refusal is not None)
