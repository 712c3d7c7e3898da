"""States that an earlier solve has found, attached to autograd: a backward pass that is called with them needs no solve."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..gradient import Adjoint, Implicit
from ..newton import Newton
from ..sequence import Sequence
from .fused import Call, attach_fused


def attach(step: Any, z0: Any, xs: Any, states: tuple[Tensor, ...], newton: Newton, *, batch_dims: int) -> list[Tensor]:
    """The leaves of the states, differentiable by the implicit function theorem in z0, xs and all that the step closes over.

    Args:
        step, z0, xs, batch_dims: as ``solve`` was given them
        states: the leaves of what it found, [L, *batch, *state] each
        newton: its solver; of a loop the usual one
    """
    call = Call(step, z0, xs, None, batch_dims)
    if call.has_kernels and not call.known[0].kernels.no_gradients:
        return attach_fused(call, call.known[0].layout.pack_leaves(states, 1))
    sequence = Sequence(step, z0, xs, length=None, batch_dims=batch_dims, watched=False)
    packed = sequence.layout.pack_leaves(states, 1)
    adjoint = Adjoint(sequence, packed, newton.jacobian, newton.linear)
    promised = newton.promised(packed.dtype)
    adjoint.promised = None if promised is None else promised.rtol
    return sequence.layout.leaves(Implicit().attach(adjoint, packed))
