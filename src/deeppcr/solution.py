"""What a solve returns: states, how they were found, and whether they can be trusted."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor


class ConvergenceWarning(UserWarning):
    """The parallel solve did not get there by itself; the message says what was done instead."""


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
    LOOP = "computed one step after the other, as asked"
    PRECISION_FLOOR = (
        "every step holds within the tolerance, but the update stopped shrinking above it: this is as exact as the "
        "dtype gets. Loosen atol and rtol, or use float64"
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

    def __repr__(self) -> str:
        return f"Result.{self.name}"

    @property
    def severity(self) -> int:
        return list(Result).index(self)


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
    >>> deeppcr.solve(torch.cos, torch.ones(1), length=64).plan.chunk
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
class Solution:
    """The trajectory and its certificate.

    Attributes:
        states: ``z_1 ... z_L``, each leaf [L, *leaf of z0]
        iterations: [*batch], Newton iterations each row took (0 for the plain loop)
        residual: [*batch], the largest ``|z_l - step(z_{l-1})|`` of the returned states, as measured (0 for the plain loop)
        result: how it ended; the worst of the rows
        results: one entry a row, in the order of the flattened batch
        exact_steps: [*batch], how many leading states were known to be exact when Newton stopped
        updates: [iterations, *batch], the largest update of each iteration, in units of the tolerance
        plan: what was chosen, and why
        message: the result in words, with the step and row it is about

    >>> import torch, deeppcr
    >>> solution = deeppcr.solve(lambda z: torch.cos(z), torch.tensor([1.0]), length=50)
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
    message: str

    def __repr__(self) -> str:
        most = int(self.iterations.max()) if self.iterations.numel() else 0
        worst = float(self.residual.max()) if self.residual.numel() else 0.0
        return f"Solution({self.result.name}, iterations={most}, residual={worst:.1e}: {self.message})"
