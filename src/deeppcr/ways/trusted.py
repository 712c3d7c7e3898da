"""Kernels are held against the step itself: in the first solve all states, in later ones, now and then, some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..newton import USUAL
from ..newton.certificate import FALSE_DERIVATIVE, steps_have_derivative
from ..sequence import Sequence
from ..sequence.evaluate import entry_of
from ..sequence.stack import LISTS
from ..tolerance import Tolerance, bears_out, measure

if TYPE_CHECKING:
    from ..fuse.found import Found
    from ..fuse.step import FusedStep

#: The first of a solve's steps tell whether the step hides a derivative that does no harm yet.
_LOOKED_AT = 256
#: In half precision a change that stands out of rounding is so large that kinks may look like that.
_FINE = (torch.float32, torch.float64)
OTHER_RESULT = "the kernels give another result than the step itself"


def is_due(solves: int) -> bool:
    """Whether a solve is held against the step itself: the first, the second, the fourth ..."""
    return not solves & (solves - 1)


def doubt_of(
    call: Any, fused: FusedStep, initial: Tensor, found: Found, tolerance: Tolerance, differentiated: bool
) -> str | None:
    """Why the step itself does not bear out the states of a solve that is due; None where it does: all of the first one, some of the
    second, fourth, eighth ... And all of every one by a step that hides a derivative: whether that matters is up to the numbers of the call.

    Solves with gradients are counted by themselves: what a step does to gradients alone (hooks) shows in the first of them, which raises.
    And what adds up unseen does so in long solves: all states of one that is much longer than any before it are looked at, too.

    Args:
        call: a ``fused.Call``
    """
    if fused.solves[differentiated] and not (found.passes and may_drift(fused, found.length)):
        borne_out = fused.is_borne_out(call.step, initial, call.xs, found.states, tolerance, found.chunk)
        return None if borne_out else OTHER_RESULT
    doubt = _doubt_of_all(call, fused, initial, found, tolerance)
    if doubt is None and differentiated and not fused.solves[differentiated]:
        same = fused.has_gradients_of(call.step, call.z0, entry_of(call.xs, 0), call.reached)
        doubt = None if same else OTHER_RESULT
    if found.passes:
        fused.longest = max(fused.longest, found.length)
    return doubt


def may_drift(fused: FusedStep, length: int) -> bool:
    """Whether a solve in parallel is to be looked at in all of its states: it is much longer than those that were, or its step hides a derivative."""
    return fused.hides or length > 2 * fused.longest


def _doubt_of_all(call: Any, fused: FusedStep, initial: Tensor, found: Found, tolerance: Tolerance) -> str | None:
    """Whether the step itself gives all states, and may be differentiated in one backward pass through all of its steps; where chunks
    were joined by its derivatives, whether these are its own."""
    # With gradients as the caller has them: hooks on gradients, which kernels never call, are refused here.
    step, xs = call.given if isinstance(call.given[0], LISTS) else (call.step, call.xs)
    sequence = Sequence(step, call.z0, xs, length=call.length, batch_dims=call.batch_dims)
    with torch.no_grad():
        doubt = _doubt_of_states(sequence, fused, initial, found, tolerance)
    sequence.stop_watching()
    return doubt


def _doubt_of_states(
    sequence: Sequence, fused: FusedStep, initial: Tensor, found: Found, tolerance: Tolerance
) -> str | None:
    states = found.states
    values = sequence.values(torch.cat([initial.unsqueeze(0), states[:-1]]), range(len(states)))
    if not bears_out(values, states, initial, tolerance).all():
        return OTHER_RESULT
    if not found.passes:
        return None
    finite = torch.isfinite(states).all(-1).all(0)

    def are_hidden(rows: Tensor, count: int, *, either_side: bool = False) -> bool:
        given = initial, states[:count], values[:count], tolerance.rtol
        true = steps_have_derivative(sequence, USUAL.jacobian, *given, either_side=either_side)
        return bool((rows & ~true).any())

    if states.dtype in _FINE:
        fused.hides = fused.hides or are_hidden(finite, _LOOKED_AT, either_side=True)
    drifts = (measure(values, states, initial, tolerance).drift > 1) & finite
    return FALSE_DERIVATIVE if drifts.any() and are_hidden(drifts, len(states)) else None
