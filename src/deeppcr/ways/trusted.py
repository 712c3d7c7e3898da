"""Kernels are held against the step itself: in the first solve all states, in later ones, now and then, some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..sequence import Sequence
from ..sequence.evaluate import entry_of
from ..tolerance import Tolerance, bears_out

if TYPE_CHECKING:
    from ..fuse.found import Found
    from ..fuse.step import FusedStep


def is_due(solves: int) -> bool:
    """Whether a solve is held against the step itself: the first, the second, the fourth ..."""
    return not solves & (solves - 1)


def is_trusted(
    call: Any, fused: FusedStep, initial: Tensor, found: Found, tolerance: Tolerance, differentiated: bool
) -> bool:
    """Whether the step itself bears out the states of a solve that is due: all of the first one, some of the second, fourth, eighth ...

    Solves with gradients are counted by themselves: what a step does to gradients alone (hooks) shows in the first of them, which raises.

    Args:
        call: a ``fused.Call``
    """
    if fused.solves[differentiated]:
        return fused.is_borne_out(call.step, initial, call.xs, found.states, tolerance, found.chunk)
    return _bears_out(call, initial, found.states, tolerance) and (
        not differentiated or fused.has_gradients_of(call.step, call.z0, entry_of(call.xs, 0), call.reached)
    )


def _bears_out(call: Any, initial: Tensor, states: Tensor, tolerance: Tolerance) -> bool:
    """Whether the step itself gives all states, and may be differentiated in one backward pass through all of its steps."""
    sequence = Sequence(call.step, call.z0, call.xs, length=call.length, batch_dims=call.batch_dims)
    with torch.no_grad():
        values = sequence.values(torch.cat([initial.unsqueeze(0), states[:-1]]), range(len(states)))
        trusted = bool(bears_out(values, states, initial, tolerance).all())
    sequence.stop_watching()
    return trusted
