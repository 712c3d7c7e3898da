"""A solve by the kernels of its step.

Which steps have kernels is remembered by what they reach, so that the next solve of a kind asks for little more than to launch them.
The first solve by kernels is held against the step itself in all of its steps; of later ones, now and then, some.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .bounded import Bounded
from .fuse.step import Apply, Found, FusedStep, NotCovered, Run, has_kernels, solve
from .newton import Newton
from .runtime import apply_directly, in_functorch
from .sequence import Rowwise, Sequence
from .sequence.fingerprint import structure_of
from .sequence.history import WithHistory
from .sequence.layout import Layout
from .solution import Plan, Result, Solution, first_not_finite
from .tolerance import Tolerance, measure

#: Steps that are remembered: their kernels, or why there are none.
_MOST_STEPS = 256
_steps = Bounded(_MOST_STEPS)
#: Kinds of solves that have come, by hash: kernels are made for those that come again.
_MOST_SEEN = 4096
_seen = Bounded(_MOST_SEEN)


class Call:
    """One call of ``solve``, as far as kernels have to know it.

    Attributes:
        length: L; None where it cannot be told
        reached: the tensors that the step reaches
        refusal: why there can be no kernels, as far as can be said before the step is looked at
    """

    def __init__(self, step: Any, z0: Any, xs: Any, length: int | None, batch_dims: int | None):
        self.step = step.step if isinstance(step, Rowwise) else step
        self.z0, self.xs, self.batch_dims = z0, xs, batch_dims
        self.states, self.spec = pytree.tree_flatten(z0)
        self.inputs, inputs_spec = ([], None) if xs is None else pytree.tree_flatten(xs)
        self.reached: list[Tensor] = []
        self.length = length if not self.inputs else len(self.inputs[0]) if _has_length(self.inputs[0]) else None
        self.refusal = self._find_refusal(step)
        self._key: Any = None
        self._inputs_spec = inputs_spec

    @property
    def key(self) -> Any:
        """What a kind of solve is known by, but for its length."""
        if self._key is None:
            structure, self.reached = structure_of(self.step)
            self._key = (
                structure, self.spec, self._inputs_spec, self.batch_dims, torch.get_default_dtype(),
                *((leaf.shape, leaf.dtype, leaf.device) for leaf in self.states),
                *((leaf.shape[1:], leaf.dtype, leaf.device) for leaf in self.inputs),
            )  # fmt: skip
        return self._key

    def _find_refusal(self, step: Any) -> str | None:
        """Why there can be no kernels, as far as can be said before the step is looked at."""
        first = self.states[0] if self.states else None
        if (
            isinstance(step, (list, tuple, nn.ModuleList))
            or isinstance(self.step, WithHistory)
            or not callable(self.step)
        ):
            return "a list of steps, or one that looks further back, is not covered"
        if not isinstance(first, Tensor) or not has_kernels(first.device):
            return "kernels need a CUDA device and Triton"
        if not all(isinstance(leaf, Tensor) and leaf.layout is torch.strided for leaf in (*self.states, *self.inputs)):
            return "what is not a dense tensor is not covered"
        if not self.length or any(not leaf.ndim or len(leaf) != self.length for leaf in self.inputs):
            return "its length is not known"
        if any(leaf.device != first.device for leaf in (*self.states, *self.inputs)):
            return "tensors on several devices are not covered"
        if torch.is_autocast_enabled(first.device.type) or in_functorch() or torch._C._len_torch_dispatch_stack():
            return "autocast, transforms and observers of operations are not covered"
        return None

    @property
    def fused(self) -> FusedStep | str | None:
        """The step's kernels, or why there are none; None where nobody has tried yet."""
        return self.refusal or _steps.get(self.key)

    def comes_again(self) -> bool:
        """Whether a solve of this kind was seen before; from now on it was."""
        number = hash((self.key, self.length))
        again = _seen.get(number, False)
        _seen.put(number, True)
        return again

    def make(self) -> FusedStep | str:
        """The same, tried now."""
        found = self.fused
        if found is None:
            inputs = None if self.xs is None else pytree.tree_map(lambda leaf: leaf[0], self.xs)
            try:
                found = FusedStep.of(self.step, Layout.of(self.z0, self.batch_dims), inputs, self.reached)
            except NotCovered as reason:
                found = str(reason)
            _steps.put(self.key, found)
        return found

    def refuse(self, reason: str) -> None:
        """Have such steps be solved otherwise from now on."""
        _steps.put(self.key, reason)


def _has_length(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def covers(newton: Newton) -> bool:
    """Whether kernels do what these settings ask for."""
    plain = Newton(atol=newton.atol, rtol=newton.rtol, scale=newton.scale, capture=newton.capture)
    return replace(newton, chunk="auto", max_iterations=plain.max_iterations) == plain and newton.chunk != 1


def solve_fused(
    call: Call, newton: Newton, guess: Tensor | None, *, loop: bool = False, fixed: int | None = None
) -> Solution | str:
    """By the kernels of the step; or why that cannot be.

    Args:
        guess: states to start from, [L, B, D]; None: the initial one everywhere
        loop: one step after the other, whatever is known of the kind
        fixed: so many passes, and nobody looks: as inside a CUDA graph of the caller
    """
    fused, length = call.fused, call.length
    assert isinstance(fused, FusedStep) and length is not None
    layout = fused.layout
    initial, bases = layout.pack(call.z0), fused.bases(call.inputs, call.reached)
    differentiated = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in (initial, *bases))
    tolerance = newton.tolerance(layout.dtype)
    # A gradient asks for the digits of every state, also of one that dies out.
    wanted = replace(tolerance, local=True) if differentiated else tolerance
    run = Run(fused.kernels, initial, bases, length)
    kind = fused.kind(length, (wanted, newton.chunk, guess is None))
    if newton.chunk != "auto" and not fused.solves:
        kind.chunk = min(length, newton.chunk)
    if loop:
        found = run.in_parallel(replace(kind, chunk=length), wanted)
    elif fixed is not None:
        found = run.in_parallel(kind, wanted, guess, most=fixed)
    else:
        found = solve(run, kind, wanted, guess)
    if fixed is None and not _is_trusted(call, fused, run.initial, found.states, tolerance):
        reason = "the kernels give another result than the step itself"
        call.refuse(reason)
        return reason
    states = found.states
    if differentiated:
        states = apply_directly(Apply, found, run, initial, *bases)
    return _solution(call, fused, found, states, newton, differentiated, fixed)


def _is_trusted(call: Call, fused: FusedStep, initial: Tensor, states: Tensor, tolerance: Tolerance) -> bool:
    """Whether the step itself bears out the states: in all steps of the first solve, in some of the second, fourth, eighth ..."""
    fused.solves += 1
    if fused.solves & (fused.solves - 1):
        return True
    if fused.solves > 1:
        return fused.is_borne_out(call.step, initial, call.xs, states, tolerance)
    sequence = Sequence(call.step, call.z0, call.xs, length=call.length, batch_dims=call.batch_dims)
    with torch.no_grad():
        values = sequence.values(torch.cat([initial.unsqueeze(0), states[:-1]]), range(len(states)))
        held = measure(values, states, initial, tolerance)[1]
        trusted = bool((held | ~torch.isfinite(values).all(-1).all(0)).all())
    sequence.stop_watching()
    return trusted


def _solution(
    call: Call, fused: FusedStep, found: Found, states: Tensor, newton: Newton, differentiated: bool, fixed: int | None
) -> Solution:
    layout, program = fused.layout, fused.kernels.program
    batch, rows, channels = layout.batch_shape, layout.rows, program.channels
    length = len(states)
    way = "elementwise" if program.elementwise else "narrow"
    plan = Plan(
        evaluation=f"fused kernels ({way})", derivative="forward, in the kernels" if found.passes else "none",
        linear="groups of chunks" if found.passes else "none", chunk=found.chunk,
    )  # fmt: skip
    corrections, taken, residual = found.corrections[: found.passes], found.taken, found.residual
    if channels > 1:
        corrections, taken, residual = (
            each.unflatten(-1, (rows, channels)).amax(-1) for each in (corrections, taken, residual)
        )
    exact = length
    if fixed is not None:
        result = Result.ITERATIONS_DONE
    elif not found.passes:
        result = Result.LOOP
    elif found.left:
        result, exact = Result.FINISHED_BY_LOOP, min(length, found.passes * found.chunk)
    else:
        result = Result.CONVERGED
    results = (result,) * rows
    steps = torch.full(batch, length, device=layout.device)
    if found.left and found.passes and fixed is None:
        results, steps = _of_rows(found, rows, channels, length)
        steps = steps.reshape(batch)
    if result in (Result.LOOP, Result.FINISHED_BY_LOOP):
        results, steps, exact = _not_finite(results, steps, states.detach(), exact)
        result = max(results, key=lambda each: each.severity)
    return Solution(
        states=layout.unpack(states),
        iterations=taken.reshape(batch).long(),
        residual=residual.reshape(batch).to(states.dtype),
        result=result,
        results=results,
        exact_steps=steps,
        updates=corrections.reshape(-1, *batch),
        plan=plan,
        description=result.value.format(step=exact),
        z0=pytree.tree_unflatten([leaf.detach() for leaf in call.states], call.spec),
        tolerance=newton.promised(layout.dtype) if found.passes and not differentiated else None,
    )


def _of_rows(found: Found, rows: int, channels: int, length: int) -> tuple[tuple[Result, ...], Tensor]:
    """Where lanes were left to the loop: how each row ended, and its exact steps."""
    from .convergence import ENOUGH, error_left

    last, before = found.corrections[found.passes - 1].double(), found.corrections[found.passes - 2].double()
    left = ~(error_left(last, last, before) <= ENOUGH).unflatten(0, (rows, channels)).all(-1)
    exact = torch.where(left, min(length, found.passes * found.chunk), length)
    return tuple(Result.FINISHED_BY_LOOP if each else Result.CONVERGED for each in left.tolist()), exact


def _not_finite(
    results: tuple[Result, ...], steps: Tensor, states: Tensor, exact: int
) -> tuple[tuple[Result, ...], Tensor, int]:
    """Rows whose states are not finite somewhere."""
    at = first_not_finite(states)
    places = at.tolist()
    if max(places, default=-1) < 0:
        return results, steps, exact
    found = tuple(Result.NON_FINITE if place >= 0 else result for place, result in zip(places, results, strict=True))
    exact = min(place for place in places if place >= 0)
    return found, torch.where(at.reshape(steps.shape) >= 0, at.reshape(steps.shape), steps), exact + 1


def forget_kernels() -> None:
    """Let go of everything that is remembered of steps."""
    _steps.clear()
    _seen.clear()
