"""A solve by kernels from its first launch to what is told of it: with a look whether it is done, or without one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..newton.certificate import FALSE_DERIVATIVE
from ..runtime import has_hooks_of_saved_tensors
from ..sequence.layout import refuse_not_finite
from ..solution import Result
from ..tolerance import Tolerance
from .begun import Ready, fuse
from .fused_solution import LATE, FusedSolution, dropped_from, plan_of, spoil_failed
from .trusted import doubt_of, is_due, may_drift

if TYPE_CHECKING:
    from ..fuse.found import Found
    from ..fuse.run import Passes
    from ..fuse.step import FusedStep

_FEW_STEPS = "so few steps take less than chunks that join"
_HIDDEN = 'something large hid what came after it: digits of every state were asked for, as by Newton(scale="local")'


def why_not_joined(fused: FusedStep) -> str:
    """Why only the loop gives the states of a kind of solve."""
    return FALSE_DERIVATIVE if fused.only_loop else "the chunks of such a solve did not join"


def by_fixed_corrections(call: Any, ready: Ready, guess: Tensor | None, fixed: int) -> FusedSolution:
    """So many corrections, and nobody looks."""
    run, kind, wanted = ready.run, ready.kind, ready.settled.wanted
    # The states of a pass are those before its corrections.
    found = run.in_parallel(kind, wanted, run.from_smaller_chunks(kind, wanted, guess), most=fixed + 1)
    exact_steps = spoil_failed(found, ready.fused.layout)
    found.passes = min(found.passes, fixed)
    found.notes.taken.clamp_(-fixed, fixed)
    solution = _with_states(call, ready, found)
    solution.tell(call, ready.fused, found, Result.ITERATIONS_DONE, exact_steps, tolerance=_promised(ready, found))
    for name in LATE:  # which a graph of the caller is to write anew each time
        getattr(solution, name)
    return solution


def by_passes(call: Any, ready: Ready, guess: Tensor | None, loop: bool, every: int) -> FusedSolution | str:
    """As many passes as it takes, or one step after the other: see ``solve_fused``."""
    back, fuse_run = fuse().back, fuse().run
    fused, run, kind, (_, differentiated, tolerance, wanted, _) = ready.fused, ready.run, ready.kind, ready.settled
    in_parallel = kind.chunk < run.length
    checked = is_due(fused.solves[differentiated] + 1) or (in_parallel and may_drift(fused, run.length))
    if differentiated or checked or wanted.local or run.shape.tiled:
        every = 1  # that needs all states, or writes them
    if not loop:
        back.compile_ahead(run, kind, wanted, gradients=differentiated)
    passes, solution, hidden = ready.begin(guess, every), None, False
    if not differentiated or not has_hooks_of_saved_tensors():  # to which unfinished states would be shown
        solution = _with_states(call, ready, passes)  # while the device is at work
    found = fuse_run.solve(run, kind, wanted, guess, every, passes)
    if found.suspected is not None:
        found, hidden = _looked_closer(ready, found, guess)
    if solution is None or found.states is not passes.states:
        solution = _with_states(call, ready, found)
    if differentiated and not run.shape.fits and (reason := _misfit_of_gradients(ready, found)):
        return reason
    if checked or found.left:
        if not torch.isfinite(run.initial).all():  # which says nothing of other solves of the kind
            refuse_not_finite(call.z0, infinities=True)
            return "z0 holds an infinity, from which they cannot be held against the step"
        doubt = doubt_of(call, fused, run.initial, found, tolerance, differentiated) if checked else None
        if doubt is FALSE_DERIVATIVE:
            fused.leave_to_loop()
            ready.know_kind()
            return by_passes(call, ready, None, loop, every)
        if doubt is not None:
            call.refuse(doubt)
            return doubt
    fused.solves[differentiated] += 1  # who raised has to be asked again
    kind, known = ready.kind, ready.known
    looped = loop or ((kind.gave_up or call.planned) and not found.passes)
    result, promised = Result.LOOP if looped else Result.CONVERGED, _promised(ready, found)
    solution.tell(call, fused, found, result, tolerance=promised, dropped=dropped_from(found, fused.layout, promised))
    if looped and call.planned:
        solution.plan.note(
            f"one step after the other, by a kernel: {why_not_joined(fused) if kind.gave_up else _FEW_STEPS}"
        )
    if hidden:
        solution.plan.note(_HIDDEN)
    # Of numbers that are none, nothing is to be learned.
    if not loop and vars(kind) != vars(known) and solution.result is not Result.NON_FINITE:
        fused.kinds.put(ready.settled.key, kind)
    return solution


def _with_states(call: Any, ready: Ready, found: Passes | Found) -> FusedSolution:
    """All that is known of a solution before anybody looks whether it is one."""
    fused, layout, leaves = ready.fused, ready.fused.layout, None
    if ready.settled.differentiated:
        back = fuse().back
        attached = found.states, back.chunk_of(ready.run, found.chunk)
        leaves = back.Apply.of(ready.run, layout, attached, call.states, ready.bases)
    states, start = layout.nest(leaves or layout.leaves(found.states)), layout.nest(ready.starts(call))
    return FusedSolution(states=states, z0=start, plan=plan_of(fused, found.chunk, ready.run.length))


def _promised(ready: Ready, found: Found) -> Tolerance | None:
    """What states were found within; None where it is asked of none."""
    differentiated, promises = ready.settled.differentiated, ready.newton.stop.promises
    return ready.settled.wanted if found.passes and not differentiated and promises else None


def _looked_closer(ready: Ready, found: Found, guess: Tensor | None) -> tuple[Found, bool]:
    """Where something large may hide what came after it, what a closer look finds; and whether it did hide something."""
    run, settled, length = ready.run, ready.settled, ready.run.length
    if not fuse().closer.hides(run, found, settled.wanted):
        return found, False
    # What is known by now is a guess: of all states, if they were written.
    wanted, guess = replace(settled.wanted, local=True), found.states if len(found.states) == length else guess
    key = ready.fused.key_of_kind(length, ready.newton.chunk, wanted, guess is None)
    ready.settled = settled._replace(wanted=wanted, key=key)
    ready.know_kind()
    return fuse().run.solve(run, ready.kind, wanted, guess), True


def _misfit_of_gradients(ready: Ready, found: Found) -> str | None:
    """Why there can be none, as long as there is another way; None where their kernels fit the device."""
    back, fused, run = fuse().back, ready.fused, ready.run
    compiled_for = run.block, run.warps, run.stages, run.shape.kinds, run.shape.copied
    if compiled_for not in fused.gradients_fit:
        try:
            back.pull_back(run, found.states, torch.zeros_like(found.states), back.chunk_of(run, found.chunk))
        except fuse().too_large as error:
            fused.kernels.no_gradients = f"the kernels of its gradients do not fit the device ({error})"
            return fused.kernels.no_gradients
        fused.gradients_fit.add(compiled_for)
    run.shape.fits = True
    return None
