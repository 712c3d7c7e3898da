"""``check``: what is wrong with a step function, before or after a solve went wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .jacobian import DenseJacobian, Jacobian
from .newton.certificate import FALSE_DERIVATIVE, steps_have_derivative
from .runtime import random_state
from .sequence import Sequence
from .sequence.evaluate import TAKEN_APART, StepError
from .sequence.layout import not_finite_in, refuse_not_finite, starts_the_loop_alone
from .sequence.lengths import up_to
from .sequence.purity import close
from .sequence.rows import find_influence, rounding_of, shares
from .sequence.sequence import find_length
from .sequence.stack import LISTS
from .sequence.trace import coarser_products
from .solve import has_no_rows, refuse_given
from .tolerance import Tolerance, default_tolerance
from .warned import catching_warnings

#: Steps that are compared with themselves alone.
_MOST_COMPARED = 1000


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: "random", "side effect", "rows", "structure", "evaluation", "precision", "derivative", "slow", "fading",
            "not finite" or "error"
        message: what was seen, and what to do

    >>> import torch, deeppcr
    >>> deeppcr.check(torch.nn.Dropout(), torch.ones(2, 3), length=5)[0].kind
    'random'
    """

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def check(
    step: Callable[..., Any] | list[Callable[..., Any]] | nn.ModuleList,
    z0: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    batch_dims: int | None = None,
    lengths: Tensor | None = None,
    jacobian: Jacobian | None = None,
    steps: int = 4,
) -> list[Finding]:
    """Look for what a step must not do: random numbers, side effects, rows that influence each other, a wrong derivative.

    Args:
        step, z0, xs, length, batch_dims, lengths: as for ``deeppcr.solve``
        jacobian: a structure or Jacobian that is claimed and to be compared with the step's own
        steps: how many steps to look at, spread evenly over the sequence; whether steps give together what they give
            alone is compared at every step, or at 1,000 of them

    Returns:
        the findings; an empty list means that nothing was found

    >>> import torch, deeppcr
    >>> for finding in deeppcr.check(lambda z: z - z.mean(0), torch.randn(3, 2), length=10):
    ...     print(finding)
    rows: row 0 of the state changes row 1 of the result at step 1. Rows of a batch must not influence each other: ...
    """
    if jacobian is not None and not isinstance(jacobian, Jacobian):
        raise TypeError(f"jacobian: expected an instance such as DiagonalJacobian(), got {jacobian!r}")
    if steps < 1:
        raise ValueError(f"steps: at least one must be looked at, got {steps}")
    if has_no_rows(z0, batch_dims):
        find_length(step, xs, length)  # which says what is wrong with it
        return []
    if lengths is not None:
        if jacobian is not None:
            refuse_given(jacobian)
        step, xs = up_to(lengths, step, z0, xs, length, batch_dims)
    try:
        sequence = Sequence(step, z0, xs, length=length, batch_dims=batch_dims)
    except StepError as error:
        return [Finding(error.kind, str(error))]
    refuse_not_finite(z0, infinities=True)
    held = not_finite_in(z0)
    alone = () if held is None else (Finding("not finite", starts_the_loop_alone(held)),)
    odd = sequence.odd_one(step) if isinstance(step, LISTS) else None
    if odd is not None:
        return [*alone, Finding("evaluation", _ODD_ONE.format(odd))]
    return [*alone, *_inputs_are_numbers(sequence, xs), *_look_at(sequence, _spread(sequence, steps), jacobian)]


_ODD_ONE = (
    "entry {} of the list does something else than another of its kind does with its parameters and buffers, as where a module asks which "
    "one it is. A solve compares four of a kind, so that it may not notice: give that one a class or an attribute of its own, or use Loop()"
)


@torch.no_grad()
def _look_at(sequence: Sequence, looked_at: list[int], jacobian: Jacobian | None) -> list[Finding]:
    # Near the trajectory: from the initial state, each step once.
    states = [sequence.initial.detach()]
    try:
        for index in looked_at:
            states.append(sequence.step(index, states[-1]))
    except StepError as error:
        return [Finding(error.kind, str(error))]
    findings = list(_repeatability(sequence, looked_at, states))
    if findings:
        return findings  # nothing else can be compared with a step that gives another answer each time
    findings += _finiteness(sequence, looked_at, states)
    findings += _all_at_once(sequence)
    findings += _independence(sequence, looked_at, states)
    # Else derivatives are not row by row, or are coarse.
    if not any(finding.kind in ("rows", "precision") for finding in findings):
        findings += _derivatives(sequence, looked_at, states, needed=jacobian is None)
    if jacobian is not None and not findings:
        findings += _structure(sequence, looked_at, states, jacobian)
    if findings:
        return findings
    along = _trajectory(sequence)
    finite = list(_finite_derivatives(sequence, along))
    return [*(finite or _hidden_derivatives(sequence, along)), *_fading(sequence, along)]


def _repeatability(sequence: Sequence, looked_at: list[int], states: list[Tensor]) -> Iterator[Finding]:
    for index, state in zip(looked_at, states, strict=False):
        random_before = random_state(state.device)
        first = sequence.step(index, state)
        drew = not torch.equal(random_before, random_state(state.device))
        second = sequence.step(index, state)
        if drew and sequence.draws(index):  # else another thread did
            yield Finding(
                "random",
                f"step {index + 1} draws random numbers (dropout in train mode?). Draw them before the solve and pass them in xs, or "
                "call .eval()",
            )
            return
        try:
            sequence.check_purity()
        except StepError as error:
            yield Finding(error.kind, str(error))
            return
        if not torch.allclose(first, second, rtol=0, atol=0, equal_nan=True):
            yield Finding(
                "side effect",
                f"step {index + 1} gives another result when it is called again with the same state: it keeps a state of its own",
            )
            return


def _inputs_are_numbers(sequence: Sequence, xs: Any) -> Iterator[Finding]:
    """NaN that comes out of a step; infinities may be masks, and NaN what is missing."""
    for leaf in pytree.tree_leaves(xs):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            bad = torch.isnan(leaf.detach()).reshape(len(leaf), -1).any(1)
            first = int(bad.long().argmax())
            if bad.any() and torch.isnan(sequence.step(first, sequence.initial)).any():
                yield Finding("not finite", f"xs holds NaN at step {first + 1}, and so does what the step gives")
                return


def _finiteness(sequence: Sequence, looked_at: list[int], states: list[Tensor]) -> Iterator[Finding]:
    for index, before, after in zip(looked_at, states, states[1:], strict=False):
        if torch.isfinite(before).all() and not torch.isfinite(after).all():
            yield Finding("not finite", f"step {index + 1} gives values that are not finite from a finite state")
            return


def _spread(sequence: Sequence, steps: int) -> list[int]:
    """So many steps, spread evenly over the sequence."""
    count = min(steps, sequence.length)
    return sorted({round(i * (sequence.length - 1) / max(1, count - 1)) for i in range(count)})


def _all_at_once(sequence: Sequence) -> Iterator[Finding]:
    """Every step evaluated together with others must give what it gives alone."""
    previous = sequence.initial.detach().expand(sequence.length, -1, -1)
    together = sequence.values(previous, range(sequence.length))
    for note in sequence.all_notes:
        if note.startswith(TAKEN_APART):
            yield Finding("slow", note)
    if sequence.evaluation == "loop":
        yield Finding("slow", sequence.all_notes[-1])
        return
    for index in _spread(sequence, _MOST_COMPARED):
        alone = sequence.step(index, sequence.initial.detach())
        if not close(together[index], alone):
            coarse = coarser_products(lambda: sequence.step(0, sequence.initial.detach()), sequence.layout.dtype)
            if coarse is not None:
                yield Finding(
                    "precision",
                    f"the step multiplies in {coarse}, while its state is {sequence.layout.dtype}: evaluated together, steps round "
                    "otherwise than alone, by more than a default tolerance. Loosen it, or have the step compute in the state's precision",
                )
                return
            yield Finding(
                "evaluation", f"step {index + 1} evaluated together with the others differs from the step alone"
            )
            return


def _trajectory(sequence: Sequence) -> Tensor:
    """[N + 1, B, D]: the initial state, and those of the first steps as the loop finds them."""
    states = [sequence.initial.detach()]
    for index in range(min(sequence.length, _MOST_COMPARED)):
        states.append(sequence.step(index, states[-1]))
    return torch.stack(states)


def _finite_derivatives(sequence: Sequence, states: Tensor) -> Iterator[Finding]:
    """A state on the way [N + 1, B, D] where the step has a value and forward mode gives no derivative that is a number."""
    tangent = 1 + 0.1 * shares(states[0])
    try:
        values, pushed = sequence.push(states[:-1], tangent[None, None], range(len(states) - 1))
    except StepError:
        return  # no derivative, which the solve says where it needs one
    bad = torch.isfinite(values).all(-1) & ~torch.isfinite(pushed[:, 0]).all(-1)
    if bad.any():
        index, row = bad.nonzero()[0].tolist()
        yield Finding(
            "derivative",
            f"the derivative of step {index + 1} by forward mode is not finite (row {row}), though its value is: as of a square root at 0, or "
            "of torch.sqrt(torch.relu(z)) where relu gives 0. A parallel solve has no gradient there; solver=Loop() has that of autograd",
        )


def _hidden_derivatives(sequence: Sequence, states: Tensor) -> Iterator[Finding]:
    """Steps from states on the way [N + 1, B, D] that change otherwise than their derivative says."""
    initial, steps = states[0], range(len(states) - 1)
    finite = torch.isfinite(states).all(-1).all(0)
    rtol = default_tolerance(states.dtype)
    try:
        # Which are not the states after them where a step overwrites its own.
        values = sequence.values(states[:-1], steps)
        true = steps_have_derivative(sequence, DenseJacobian(), initial, states[1:], values, rtol)
    except StepError:
        return  # no derivative, which the solve says where it needs one
    if (finite & ~true).any():
        row = int((finite & ~true).nonzero()[0])
        yield Finding(
            "derivative",
            f"in row {row} {FALSE_DERIVATIVE}, or does part of it run under torch.no_grad()? Where what is hidden adds up, or updates that know "
            "nothing of it do not come to an end, a parallel solve leaves the steps to the loop",
        )


def _fading(sequence: Sequence, states: Tensor) -> Iterator[Finding]:
    """A signal that dies out below a default tolerance, in the first states [N + 1, B, D]."""
    layout = sequence.layout
    tolerance = Tolerance(0.0, default_tolerance(layout.dtype))
    parts, first = layout.split(states[1:]), layout.split(states[0])
    for leaf, start in zip(parts, first, strict=True):
        if not leaf.numel():
            continue
        numbers = torch.arange(1, len(leaf) + 1, device=leaf.device)
        known = tolerance.known_steps(leaf, tolerance.scale(leaf, start), numbers)
        if (known < len(leaf)).any():
            row = int(known.argmin())
            yield Finding(
                "fading",
                f"from step {int(known[row]) + 1} on (row {row}) the state is so far below its largest size that the default tolerance leaves its "
                'digits open: where they matter (it is normalised afterwards, say), Newton(scale="local") asks for them',
            )
            return


def _independence(sequence: Sequence, looked_at: list[int], states: list[Tensor]) -> Iterator[Finding]:
    for index, state in zip(looked_at, states, strict=False):
        found = find_influence(partial(sequence.step, index), state, sequence.layout)
        if found is not None:
            yield Finding(
                "rows",
                f"row {found[0]} of the state changes row {found[1]} of the result at step {index + 1}. Rows of a batch must not influence each "
                "other: is the leading dimension a batch? batch_dims says how many are (0: none)",
            )
            return


def _derivatives(sequence: Sequence, looked_at: list[int], states: list[Tensor], *, needed: bool) -> Iterator[Finding]:
    """Jacobians come by forward mode, of several steps at once, gradients by reverse mode: both must be of the same function."""
    for index, state in zip(looked_at, states, strict=False):
        tangent, cotangent = 1 + 0.1 * shares(state), 0.1 + 0.1 * shares(state)
        first = max(0, min(index, sequence.length - 2))
        together = range(first, min(first + 2, sequence.length))
        tangents = torch.stack([tangent, cotangent]).unsqueeze(0)
        try:
            _, every = sequence.push(state.expand(len(together), *state.shape), tangents, together)
        except StepError as error:
            if needed:
                yield Finding("derivative", str(error))
            return
        pushed = every[index - first, 0]
        with torch.enable_grad(), catching_warnings():
            warnings.simplefilter("ignore")  # of steps that look at values
            start = state.clone().requires_grad_()
            value = sequence.step(index, start.clone())
        if not value.requires_grad:
            pulled = torch.zeros_like(state)
        else:
            (pulled,) = torch.autograd.grad(value, start, cotangent, allow_unused=True, materialize_grads=True)
        forward, reverse = (cotangent * pushed).sum(-1), (pulled * tangent).sum(-1)
        scale = (cotangent * pushed).abs().sum(-1) + (pulled * tangent).abs().sum(-1)
        wrong = (forward - reverse).abs() > 10 * rounding_of(sequence.layout) * scale
        if wrong.any():
            row = int(wrong.nonzero()[0])
            yield Finding(
                "derivative",
                f"at step {index + 1} the derivatives by forward mode and by reverse mode differ (row {row}): does part of the step run under "
                "torch.no_grad(), has a custom function a wrong derivative, or one of PyTorch's where several steps are evaluated at "
                "once (such as torch.linalg.solve)? The states are right; a backward pass raises unless it is PyTorch's",
            )
            return


def _structure(sequence: Sequence, looked_at: list[int], states: list[Tensor], jacobian: Jacobian) -> Iterator[Finding]:
    if not jacobian.exact:
        return  # an approximation claims nothing
    for index, state in zip(looked_at, states, strict=False):
        true = DenseJacobian().evaluate(sequence, state.unsqueeze(0), range(index, index + 1))[1].to_dense()
        wrong = jacobian.contradiction(sequence, index, state, true, rounding_of(sequence.layout))
        if wrong is not None:
            yield Finding("structure", wrong)
            return
