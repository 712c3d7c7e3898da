"""A solve by the way that is expected to take least time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..gradient import Adjoint, Implicit
from ..newton import USUAL, Loop, Newton
from ..newton.guess import RepeatInitial
from ..runtime import (
    has_hooks_of_saved_tensors,
    has_tangent,
    is_capturing,
    is_out_of_memory,
    random_state,
    version_of,
)
from ..sequence import Sequence
from ..sequence.bare import BareLoop
from ..sequence.evaluate import TRANSFORM_ERRORS, RandomStep, StepError, first_line
from ..sequence.history import Emitting, WithHistory
from ..sequence.kept import KeptStates
from ..sequence.layout import Layout, not_finite_in, refuse_not_finite
from ..sequence.purity import SideEffect, watch
from ..sequence.rows import find_influence
from ..sequence.stack import LISTS
from ..solution import Result, Solution
from ..warned import muted, warn
from .fused import Call, solve_fused
from .given import solve_by
from .looped import Given, of_loop
from .plan import Probe, Record, Way, record_of

_FROM_INITIAL = RepeatInitial()
_COMPUTED_AGAIN = (
    "one step after the other: hooks around the solve see what is saved for the backward pass (torch.utils.checkpoint, save_on_cpu), and may "
    "compute it again. solver=Newton(), which saves no more than the states, goes with them"
)


def can_be_planned(call: Call) -> bool:
    """Whether a solve has several ways, as far as can be said before the step is called."""
    first, step = call.states[0] if call.states else None, call.given[0]
    several = isinstance(step, LISTS)
    if call.has_kernels:  # then the rest was looked at
        return not is_capturing(call.states[0].device)
    return (
        isinstance(first, Tensor)
        and type(call.length) is int
        and (call.batch_dims is None or type(call.batch_dims) is int)
        and call.length > 0
        and call.given_length in (None, call.length)
        and (len(step) == call.length and all(map(callable, step)) if several else callable(step))
        and not isinstance(call.step, WithHistory)
        and all(isinstance(leaf, Tensor) for leaf in (*call.states, *call.inputs))
        and all(leaf.ndim > 0 and leaf.shape[0] == call.length for leaf in call.inputs)
        and not any(has_tangent(leaf) for leaf in (*call.states, *call.inputs))
        and not is_capturing(first.device)
    )


def is_refused(call: Call, record: Record) -> bool:
    """Whether a parallel solve would be refused or hopeless, where that can be seen in a step or two and nobody knows yet.

    Where rows influence each other, its gradients are refused, which those of a loop need not be. And where steps can only be called
    one by one, as where they branch on values, an iteration takes longer than the loop. What is found is noted in the record.
    """
    if "newton" in record.tries or "graph" in record.tries:
        return False
    (step, xs), of_rows = call.given, call.differentiated and record.sizes[1] > 1
    try:
        sequence = Sequence(step, call.z0, xs, length=call.given_length, batch_dims=call.batch_dims)
    except StepError as error:  # the loop takes hooks on gradients, and raises what is wrong with a step there, too
        record.only_loop = str(error)
        return True
    with torch.no_grad():
        initial = sequence.initial.detach()
        if of_rows and find_influence(partial(sequence.step, 0), initial, sequence.layout) is not None:
            record.only_loop = "rows of the batch influence each other"
            return True
        few = range(min(2, sequence.length))
        try:
            start = initial.expand(len(few), -1, -1)
            sequence.values(start, few)
            sequence.push(start, torch.ones_like(initial)[None, None], few)
        except Exception as error:  # the loop takes such steps, and raises what is wrong with them there, too
            why = f"steps cannot be differentiated at once ({first_line(error)})"
            record.bar("newton", why, for_good=not is_out_of_memory(error))  # there may be room another time
            return True
        if sequence.evaluation == "loop":
            record.bar("newton", "steps can only be called one by one", for_good=True)
            return True
    return False


class NoGradient(RuntimeError):
    """The gradients of a parallel solve would not be the loop's, or there would be none."""


@dataclass(frozen=True)
class Tried(Implicit):
    """Gradients of a solve that nobody asked to be parallel: tried before it is returned, so that the loop can still be taken.

    Attributes:
        failed: is told why, where a backward pass raises all the same
    """

    failed: Callable[[str], None]

    def attach(self, adjoint: Adjoint, states: Tensor) -> Tensor:
        try:
            adjoint.check()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise NoGradient(str(error)) from error
        adjoint.failed = self.failed
        return super().attach(adjoint, states)


class Planned:
    """A solve by the way that is expected to take least time."""

    def __init__(self, call: Call):
        self.call = call

    def solve(self) -> Solution:
        call = self.call
        unmade = not call.has_kernels and call.fused is None and not self._is_computed_again
        if unmade and self.record.is_worth_kernels(again=True):
            call.make()
        if call.has_kernels:
            found = self._by_kernels()
            if found is not None:
                return found
        layout = Layout.of(call.z0, call.batch_dims)  # which says what is wrong with it
        held = not_finite_in(call.z0)
        if held is not None:  # which says nothing of other solves of the kind
            refuse_not_finite(call.z0, infinities=True)
            found = self._by(Loop())
            found.plan.note(f"one step after the other: z0 holds {held}")
            return found
        if self._is_computed_again:  # by the same way, whatever was learned of the kind meanwhile
            found = self._by_python()
            found.plan.note(_COMPUTED_AGAIN)
            return found
        way, why = self.record.choose()
        if way in ("newton", "graph") and is_refused(call, self.record):
            way, why = self.record.choose()
        if way == "loop":
            probe = None if "loop" in self.record.seconds else self._probe()
            found = self._by_loop(layout, probe)
            if found is not None:
                found.plan.note(self.record.choose()[1] if self.record.only_loop else why)
                return found
            if call.fused is None and self.record.is_worth_kernels(again=False):
                call.make()
                found = self._by_kernels() if call.has_kernels else None
                if found is not None:
                    return found
            is_refused(call, self.record)
            way, why = self.record.choose()
        found = self._by_graph() if way == "graph" else self._by_newton() if way == "newton" else self._by_python()
        found.plan.note(why)
        return found

    @cached_property
    def record(self) -> Record:
        call = self.call
        return record_of(call.key, call.sizes, call.states[0].device, call.differentiated, lambda: call.relation)

    @cached_property
    def _is_computed_again(self) -> bool:
        return self.call.differentiated and has_hooks_of_saved_tensors()

    def _by_kernels(self) -> Solution | None:
        found = solve_fused(self.call, USUAL, None, every=self.call.every)
        if isinstance(found, str):
            return None
        if found.result is Result.NON_FINITE:
            warn(found.description)
        return found

    def _by(self, solver: Newton | Loop) -> Solution:
        call, (step, xs) = self.call, self.call.given
        loop = Given(step, call.z0, xs, call.given_length, call.batch_dims)
        return solve_by(loop, solver, _FROM_INITIAL, Tried(self._has_no_gradient), "loop", call.every)

    def _has_no_gradient(self, why: str) -> None:
        self.record.only_loop = why  # a graph has the same backward pass as a parallel solve

    def _by_newton(self) -> Solution:
        with muted():  # who did not ask for a parallel solve is not to hear that there was none: the result says it
            try:
                most = self.record.most_iterations(USUAL.max_iterations)
                newton = USUAL if most == USUAL.max_iterations else replace(USUAL, max_iterations=most)
                found = self.record.timed("newton", lambda: self._by(newton))
            except SideEffect as error:  # of a later module of a list: it is not put back, and has to be heard of
                self.record.only_loop = str(error)
                raise
            except TRANSFORM_ERRORS as error:  # if it is not of states where no loop comes, the loop will raise it
                why = str(error).partition("\n")[0]
                self.record.bar("newton", why)
                if isinstance(error, NoGradient):
                    self.record.bar("graph", why)  # which has the same
                found = None
        if found is None:  # out here, where what did not work takes no memory any more
            return self._by_python(instead_of="newton")
        if found.result is Result.NON_FINITE:  # as the loop would have told
            warn(found.description)
        elif found.result not in (Result.CONVERGED, Result.PRECISION_FLOOR):
            self.record.bar("newton", found.description)
        else:
            self.record.barred.pop("newton", None)
        return found

    def _by_graph(self) -> Solution:
        try:
            return self.record.timed("graph", lambda: self._by(Loop(by="graph")))
        except (RuntimeError, ValueError) as error:
            self.record.bar("graph", str(error))
            return self._by_python(instead_of="graph")

    def _by_python(self, instead_of: Way | None = None) -> Solution:
        found = self.record.timed("loop", lambda: self._by(Loop()))
        if instead_of is not None:
            found.plan.note(f"{instead_of} did not work: {self.record.barred[instead_of].why}")
        return found

    def _probe(self) -> Probe:
        """Gives up on a loop of Python where another way is expected to be faster."""

        def is_too_long(_: float) -> bool:
            kernels = self.call.fused is None and self.record.is_worth_kernels(again=False)
            return kernels or self.record.choose()[0] != "loop"

        return Probe(self.record, self.call.length or 1, self.call.states[0].device, is_too_long)

    def _by_loop(self, layout: Layout, probe: Probe | None) -> Solution | None:
        """The loop as a user would write it; None where the probe gives it up. What goes wrong goes wrong again in ``ways``, where it
        is said what it is; but for what the step itself raises after the first time, of which there is no more to say."""
        begin, call, loop = time.perf_counter(), self.call, None
        try:
            kept = KeptStates(layout, call.length or 1, call.every)
            loop = BareLoop(layout, *call.given, call.length or 1, kept)
            if not self._goes_through(loop, layout, probe):
                return None
            states = kept.states()
        except Exception as error:
            if isinstance(error, StepError) or (loop is not None and error is loop.raised):
                raise
        else:
            found = of_loop(layout, kept, states, call.z0, call.given_inputs)
            self.record.took("loop", time.perf_counter() - begin)
            return replace(found, outputs=loop.outputs) if isinstance(call.given[0], Emitting) else found
        return self._by_python()  # out here, so that its error does not come with the first one

    def _draws(self) -> bool:
        """Whether it is the step that draws random numbers, and no other thread."""
        call, (step, xs) = self.call, self.call.given
        try:
            return Sequence(step, call.z0, xs, length=call.given_length, batch_dims=call.batch_dims).draws(1)
        except StepError as error:
            return isinstance(error, RandomStep)

    def _goes_through(self, loop: BareLoop, layout: Layout, probe: Probe | None) -> bool:
        """Whether the loop came to its end."""
        call, step = self.call, self.call.given[0]
        inputs = call.inputs if call.given[1] is call.xs else pytree.tree_leaves(call.given[1])
        # The caller's own tensors stay as they are, whatever the first step does.
        z = call.z0.clone() if isinstance(call.z0, Tensor) else pytree.tree_map(torch.clone, call.z0)
        first = [z] if isinstance(z, Tensor) else pytree.tree_leaves(z)
        before, given = ([version_of(leaf) for leaf in leaves] for leaves in (first, inputs))
        z = loop.advance(z, 1)
        if given != [version_of(leaf) for leaf in inputs]:
            raise ValueError("the step changes its inputs in place")
        if probe is not None and (call.length or 1) > 1:
            # The first call of all may set what stays; and of a kind once is enough.
            drawn = random_state(layout.device)
            changed = None if isinstance(step, LISTS) else watch(step)
            z = loop.advance(z, 1, probe.gives_up)
            if not torch.equal(drawn, random_state(layout.device)) and self._draws():
                raise RandomStep  # as by Newton's method: else a loop would be refused because it has become longer
            if changed is not None and (left := changed()) is not None:
                # It would be left otherwise than by the loop, if steps were not taken once each.
                self.record.only_loop, probe = left, None
        if loop.advance(z, gives_up=None if probe is None else probe.gives_up) is None:
            return False
        if before != [version_of(leaf) for leaf in first]:
            raise ValueError("the step changes its state in place")
        return True
