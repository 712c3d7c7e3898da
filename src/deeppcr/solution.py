"""What a solve returns: states, how they were found, whether they can be trusted; and what is done where it fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from .runtime import is_capturing
from .tolerance import Tolerance
from .warned import warn


class ConvergenceError(RuntimeError):
    """The parallel solve failed and ``on_failure="raise"`` was asked for."""


class Result(Enum):
    """How a solve ended. The value of each member is its advice; members are ordered from best to worst.

    >>> import deeppcr
    >>> deeppcr.Result.CONVERGED.severity < deeppcr.Result.NOT_CONVERGED.severity
    True
    """

    CONVERGED = "every step met the stopping test"
    ITERATIONS_DONE = "the fixed number of iterations was run, or as many as leave rounding alone; nothing was tested"
    LOOP = "computed one step after the other"
    PRECISION_FLOOR = (
        "every step holds within the tolerance, but the update stopped shrinking above it: this is as exact as the "
        "dtype gets. Loosen atol and rtol, or use float64"
    )
    UNCERTIFIED = (
        "every step holds and updates fell as far as was asked, but with approximate Jacobians that proves nothing, and only the "
        "states up to step {step} are known to be exact. Try DenseJacobian() or DiagonalJacobian(), or compare with Loop()"
    )
    FINISHED_BY_LOOP = (
        "Newton stopped with the states up to step {step} exact; the rest was computed one step at a time. "
        "Try a better guess or another chunk; if the sequence amplifies errors, solver=deeppcr.Loop() is faster"
    )
    NOT_CONVERGED = (
        "Newton stopped with only the states up to step {step} exact. Try a larger chunk, a better guess, more "
        'iterations, or on_failure="loop"'
    )
    NON_FINITE = (
        "step {step} produced a value that is not finite although its input is: the loop does so too. "
        "Look at the step function there"
    )

    # Which one it is: by their names, as of any enum, a thousand rows take a while.
    __hash__: Callable[[Result], int] = object.__hash__

    def __repr__(self) -> str:
        return f"Result.{self.name}"

    @property
    def severity(self) -> int:
        return _SEVERITIES[self]

    @property
    def failed(self) -> bool:
        """Whether states past the exact ones are not to be trusted, nor differentiated."""
        return self in (Result.NOT_CONVERGED, Result.NON_FINITE)

    @property
    def trusted(self) -> bool:
        """Whether it claims that all states are right."""
        return self in (Result.CONVERGED, Result.PRECISION_FLOOR, Result.FINISHED_BY_LOOP)


_SEVERITIES = {result: place for place, result in enumerate(Result)}


@dataclass
class Plan:
    """What was chosen, and why.

    Attributes:
        evaluation: how all steps were evaluated at once: "vmap", "rowwise", "loop", or a mixture
        derivative: how Jacobians were formed: "forward", "reverse", "given", ...
        linear: the solver of the linear systems
        chunk: steps collapsed into one
        notes: further choices and their reasons

    >>> import torch, deeppcr
    >>> deeppcr.solve(torch.cos, torch.ones(1), length=64, solver=deeppcr.Newton()).plan.chunk
    4
    """

    evaluation: str = "loop"
    derivative: str = "none"
    linear: str = "none"
    chunk: int = 1
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def __str__(self) -> str:
        head = (
            f"evaluation: {self.evaluation}; derivative: {self.derivative}; linear: {self.linear}; chunk: {self.chunk}"
        )
        return "\n".join([head, *(f"- {note}" for note in self.notes)])


@dataclass(frozen=True, eq=False)
class Dropped:
    """What is known of a trajectory of which not all states were kept.

    Attributes:
        every: the states after every so many steps were kept
        length: L
        final: the last state
        known_steps: [*batch], as of all states
    """

    every: int
    length: int
    final: Any
    known_steps: Tensor


@dataclass(frozen=True, eq=False)
class Solution:
    """The trajectory and its certificate.

    Attributes:
        states: ``z_1 ... z_L``, each leaf [L, *leaf of z0]; those that were kept, [L // k, *leaf of z0], where ``keep`` was given
        iterations: [*batch], Newton iterations each row took (0 for the plain loop)
        residual: [*batch], the largest ``|z_l - step(z_{l-1})|`` of the returned states, as measured (0 for the plain loop)
        result: how it ended; the worst of the rows
        results: one entry a row, in the order of the flattened batch
        exact_steps: [*batch], how many leading states were known to be exact when Newton stopped
        updates: [iterations, *batch], the largest update of each iteration, in units of the tolerance
        plan: what was chosen, and why
        description: the result in words, with the step and row it is about; ``message`` tells of states that died out, too
        z0: the initial state
        tolerance: of the states; None: they are those of the loop
        local: [*batch], rows in which something large hid what came after it, so that digits of every state were asked for; None where
            there were none
        dropped: what is known of those that were not kept; None where all were
        outputs: what each step of a loop gave beside its state, for ``scan``, which makes ys of it; else None

    >>> import torch, deeppcr
    >>> solution = deeppcr.solve(torch.cos, torch.tensor([1.0]), length=50, solver=deeppcr.Newton())
    >>> print(solution.result.name, solution.states.shape)
    CONVERGED torch.Size([50, 1])
    """

    states: Any
    iterations: Tensor
    residual: Tensor
    result: Result
    results: tuple[Result, ...]
    exact_steps: Tensor
    updates: Tensor
    plan: Plan
    description: str
    z0: Any = None
    tolerance: Tolerance | None = None
    local: Tensor | None = None
    dropped: Dropped | None = None
    outputs: list[Any] | None = None

    @property
    def final(self) -> Any:
        """``z_L``, like z0, whatever was kept; None where states are not (the solutions of modules)."""
        if self.dropped is not None:
            return self.dropped.final
        if self.states is None:
            return None
        return pytree.tree_map(lambda leaf: leaf[-1], self.states)

    def keeping(self, every: int) -> Solution:
        """The same, with the states after every so many steps alone; where that has been done, as it is."""
        if every == 1 or self.dropped is not None:
            return self
        length = len(pytree.tree_leaves(self.states)[0])
        # Copies, so that nobody holds the rest.
        dropped = Dropped(every, length, pytree.tree_map(torch.clone, self.final), self.known_steps)
        kept = pytree.tree_map(lambda leaf: leaf[every - 1 :: every].clone(), self.states)
        return replace(self, states=kept, dropped=dropped)

    def without_states(self, dropped: Dropped | None = None) -> Solution:
        """What is told of a solve, for who keeps that longer than the states and what they are differentiated by."""
        return replace(self, states=None, z0=None, dropped=dropped or self.dropped)

    def in_short(self) -> Solution:
        """The same, with what is known of the digits of states, which is looked at here."""
        if self.tolerance is None or self.dropped is not None:
            return self.without_states()
        length = len(pytree.tree_leaves(self.states)[0])
        return self.without_states(Dropped(length, length, None, self.known_steps))

    @cached_property
    def known_steps(self) -> Tensor:
        """[*batch], after how many steps the states have digits that the tolerance vouches for.

        Those after them are far below their largest size, as they died out or live on after something large, and are known up to the tolerance
        only. All L where none are; never more than the exact steps where no tolerance is promised, and in rows that ended without one: after
        a value that is not finite nothing is known.
        """
        known = self.dropped.known_steps if self.dropped is not None else self._with_digits()
        without = [result.failed or result is Result.UNCERTIFIED for result in self.results]
        if not any(without):
            return known
        rows = torch.tensor(without, device=known.device).reshape(known.shape)
        return torch.where(rows, known.minimum(self.exact_steps), known)

    def _with_digits(self) -> Tensor:
        """[*batch], after how many steps states are as large as the tolerance asks for."""
        if self.tolerance is None or self.states is None:
            return self.exact_steps
        batch, leaves, known = self._batch_shape, pytree.tree_leaves(self.states), None
        length = len(leaves[0])
        for states, initial in zip(leaves, pytree.tree_leaves(self.z0), strict=True):
            if states.is_complex():
                states, initial = (torch.view_as_real(each.resolve_conj()) for each in (states, initial))
            rows = states.detach().reshape(length, batch.numel(), -1)
            if not rows.numel():
                continue
            scale = self._scale(rows, initial.detach().reshape(batch.numel(), -1))
            # As a rule the last state has some, and then none after it lacks any.
            last = scale[-1] if self.tolerance.local else scale
            if not is_capturing(rows.device) and self.tolerance.has_digits(rows[-1], last).all():
                continue
            numbers = torch.arange(1, length + 1, device=rows.device)
            of_leaf = self.tolerance.known_steps(rows, scale, numbers)
            known = of_leaf if known is None else torch.minimum(known, of_leaf)
        if known is None:
            return torch.full(batch, length, device=leaves[0].device)
        known = known.reshape(batch)
        return known if self.local is None else torch.where(self.local, length, known)

    @property
    def _batch_shape(self) -> torch.Size:
        return self.iterations.shape

    def _scale(self, states: Tensor, initial: Tensor) -> Tensor:
        """As of ``Tolerance.scale``, of the last states that died out: after a state that has not, nothing is larger than what came before."""
        assert self.tolerance is not None
        if self.tolerance.local:
            return self.tolerance.scale(states, initial)
        return torch.maximum(torch.linalg.vector_norm(states, math.inf, 0), initial.abs())

    @cached_property
    def message(self) -> str:
        """The result in words, with the step and row it is about."""
        told = self.states is not None or self.dropped is not None
        if self.tolerance is None or not told or not self.result.trusted or not self.known_steps.numel():
            return self.description
        fewest = int(self.known_steps.min())
        if fewest == (len(pytree.tree_leaves(self.states)[0]) if self.dropped is None else self.dropped.length):
            return self.description
        return (
            f"{self.description}; after step {fewest} states are so far below their largest size that the tolerance leaves their digits "
            'open (they died out, or live on after something large): Newton(scale="local") asks for them'
        )

    def __repr__(self) -> str:
        most = int(self.iterations.max()) if self.iterations.numel() else 0
        worst = float(self.residual.max()) if self.residual.numel() else 0.0
        return f"Solution({self.result.name}, iterations={most}, residual={worst:.1e}: {self.message})"


def without_iterations(
    states: Any,
    results: Sequence[Result],
    exact_steps: Tensor,
    plan: Plan,
    description: str,
    *,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Solution:
    """Of states that no iteration has found, as those of a loop: nothing is off, and nothing was corrected.

    Args:
        results: of the rows; where there are none, it was the loop
        exact_steps: [*batch]
        dtype: of the states
        more: other attributes of a Solution
    """
    none = torch.zeros_like(exact_steps)
    return Solution(
        states=states,
        iterations=none,
        residual=none.to(dtype),
        result=worst_of(results) if results else Result.LOOP,
        results=tuple(results),
        exact_steps=exact_steps,
        updates=torch.zeros(0, *none.shape, device=none.device),
        plan=plan,
        description=description,
        **more,
    )


def of_no_rows(z0: Any, batch_dims: int | None, length: int, depends_on: Iterable[Tensor]) -> Solution:
    """Of a batch without rows, of which no step is taken. ``depends_on``: what has gradients all the same, which are zeros."""
    first, said = pytree.tree_leaves(z0)[0], "there is no row"
    none = first.new_zeros(first.shape[: 1 if batch_dims is None else batch_dims], dtype=torch.long)
    wanted = [each for each in depends_on if each.requires_grad and each.layout is torch.strided and not is_lazy(each)]
    nothing = sum(each.reshape(-1)[:0].sum().real.to(first.device) for each in wanted)
    states = pytree.tree_map(lambda leaf: (leaf + nothing).to(leaf.dtype).expand(length, *leaf.shape), z0)
    about: dict[str, Any] = {"dtype": first.dtype.to_real(), "z0": pytree.tree_map(torch.detach, z0)}
    return without_iterations(states, (), none, Plan(notes=[said]), said, **about)


# The one policy on failure, of ``solve`` and of ``diffusion.sample``.


class _HasResults(Protocol):
    @property
    def results(self) -> Sequence[Result]: ...


_Outcome = TypeVar("_Outcome", bound=_HasResults)


def check_on_failure(on_failure: Any) -> None:
    if on_failure not in ("loop", "raise", "return"):
        raise ValueError(f'on_failure: expected "loop", "raise" or "return", got {on_failure!r}')


def settle(
    outcome: _Outcome,
    on_failure: str,
    finish: Callable[[_Outcome], _Outcome],
    describe: Callable[[_Outcome], str],
) -> _Outcome:
    """What becomes of an outcome that is not what was asked for: the loop finishes the rows that failed, or it is raised, or
    returned as it is. Whoever is not raised to is warned.

    Args:
        finish: the outcome with its failed rows finished by the loop
        describe: it in words
    """
    if on_failure == "raise":
        raise ConvergenceError(describe(outcome))
    if on_failure == "loop" and any(result.failed for result in outcome.results):
        outcome = finish(outcome)
    warn(describe(outcome))
    return outcome


@torch.no_grad()
def loop_on(
    step: Callable[[int, Tensor], Tensor], initial: Tensor, states: Tensor, exact_steps: Tensor, stop: int
) -> Tensor:
    """Keep the exact states of every row, and compute the others one step at a time, up to step ``stop``.

    Every step sees all rows, as in the loop; only those that need it take its result.

    Args:
        step: ``step(index, state)``, on states [B, ...]
        initial: [B, ...]
        states: [L, B, ...], of which the first ``exact_steps`` [B] are right
    """
    first = min(int(exact_steps.min()), stop)
    found = list(states[:first])
    state = found[-1] if found else initial
    for index in range(first, stop):
        unknown = (exact_steps <= index).view(-1, *(1,) * (state.ndim - 1))
        state = torch.where(unknown, step(index, state), states[index])
        found.append(state)
    return torch.stack(found)


def first_not_finite(states: Tensor, *, infinities: bool = False) -> Tensor:
    """[B]: the first step after which states [L, B, ...] are not finite; -1 where all are.

    They are looked at all at once: a look at every step would stop an accelerator every time.

    Args:
        infinities: are values as others are, as in a loop that begins with one
    """
    wrong = torch.isnan(states.detach()) if infinities else ~torch.isfinite(states.detach())
    bad = wrong.unsqueeze(-1).flatten(2).any(-1)
    return torch.where(bad.any(0), bad.long().argmax(0), -1)


def worst_of(results: Sequence[Result]) -> Result:
    return max(set(results), key=lambda result: result.severity)


def worst_rows(results: Sequence[Result], exact_steps: Tensor) -> tuple[int, int, int]:
    """Of the rows that ended worst, the one with the fewest exact steps; how many these are; and how many rows ended so."""
    rows, exact = [row for row, result in enumerate(results) if result is worst_of(results)], exact_steps.tolist()
    row = min(rows, key=lambda each: exact[each])
    return row, exact[row], len(rows)
