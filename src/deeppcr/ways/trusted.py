"""Kernels are held against the step itself: in the first solve all states, in later ones, now and then, some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..newton import USUAL
from ..newton.certificate import FALSE_DERIVATIVE, steps_have_derivative
from ..sequence import Sequence
from ..sequence.evaluate import entry_of
from ..tolerance import Tolerance, bears_out, measure

if TYPE_CHECKING:
    from ..fuse.found import Found
    from ..fuse.step import FusedStep

OTHER_RESULT = "the kernels give another result than the step itself"


def is_due(solves: int) -> bool:
    """Whether a solve is held against the step itself: the first, the second, the fourth ..."""
    return not solves & (solves - 1)


def doubt_of(
    call: Any, fused: FusedStep, initial: Tensor, found: Found, tolerance: Tolerance, differentiated: bool
) -> str | None:
    """Why the step itself does not bear out the states of a solve that is due; None where it does: all of the first one, some of the
    second, fourth, eighth ...

    Solves with gradients are counted by themselves: what a step does to gradients alone (hooks) shows in the first of them, which raises.
    And what adds up unseen does so in long solves: all states of one that is much longer than any before it are looked at, too.

    Args:
        call: a ``fused.Call``
    """
    if fused.solves[differentiated] and not (found.passes and is_longer(fused, found.length)):
        borne_out = fused.is_borne_out(call.step, initial, call.xs, found.states, tolerance, found.chunk)
        return None if borne_out else OTHER_RESULT
    doubt = _doubt_of_all(call, initial, found, tolerance)
    if doubt is None and differentiated and not fused.solves[differentiated]:
        same = fused.has_gradients_of(call.step, call.z0, entry_of(call.xs, 0), call.reached)
        doubt = None if same else OTHER_RESULT
    if found.passes:
        fused.longest = max(fused.longest, found.length)
    return doubt


def is_longer(fused: FusedStep, length: int) -> bool:
    """Whether a solve is that much longer than those that were looked at in all of their states that it is to be, too."""
    return length > 2 * fused.longest


def _doubt_of_all(call: Any, initial: Tensor, found: Found, tolerance: Tolerance) -> str | None:
    """Whether the step itself gives all states, and may be differentiated in one backward pass through all of its steps; where chunks
    were joined by its derivatives, whether these are its own."""
    # With gradients as the caller has them: hooks on gradients, which kernels never call, are refused here.
    sequence = Sequence(call.step, call.z0, call.xs, length=call.length, batch_dims=call.batch_dims)
    with torch.no_grad():
        doubt = _doubt_of_states(sequence, initial, found, tolerance)
    sequence.stop_watching()
    return doubt


def _doubt_of_states(sequence: Sequence, initial: Tensor, found: Found, tolerance: Tolerance) -> str | None:
    states = found.states
    values = sequence.values(torch.cat([initial.unsqueeze(0), states[:-1]]), range(len(states)))
    if not bears_out(values, states, initial, tolerance).all():
        return OTHER_RESULT
    if not found.passes:
        return None
    drifts = (measure(values, states, initial, tolerance).drift > 1) & torch.isfinite(states).all(-1).all(0)
    if not drifts.any():
        return None
    true = steps_have_derivative(sequence, USUAL.jacobian, initial, states, values, tolerance.rtol)
    return FALSE_DERIVATIVE if (drifts & ~true).any() else None
