"""Newton's method on the whole trajectory: its settings, and the solvers made of it.

Shapes: L steps in N chunks of C, B rows, D the packed state. The unknowns are the states after the chunks,
[N, B, D]; with C = 1 (the paper's method) they are all the states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..jacobian import DenseJacobian, Jacobian, ScalarJacobian
from ..linear import Auto, LinearSolver
from ..sequence import Sequence
from ..solution import Plan
from ..stopping import StoppingTest, UpdateTest
from ..tolerance import Tolerance, default_tolerance

#: The steps of a chunk follow each other: beyond this, on CPU and GPU alike, they cost more than they save.
_LARGEST_CHUNK = 16


@dataclass(frozen=True, kw_only=True)
class Newton:
    """Newton's method on all steps at once, each linear system solved in parallel over steps.

    Args:
        rtol: tolerance on the update of a state, relative to the size of its component in its row: the largest up to that
            step. Default: 1e-10 in float64, 1e-5 in float32, 1e-2 in half precision
        atol: absolute tolerance beside it, 0 by default
        scale: "local" for digits of every state, also where a signal dies out: relative to the size around each step
        max_iterations: the loop takes over after these, or sooner when they cannot suffice
        jacobian: DenseJacobian(), DiagonalJacobian(), HutchinsonJacobian(), ScalarJacobian(s), GivenJacobian(...)
        linear: Auto(), Fused(), PCR(), Hierarchical(), ForwardSubstitution()
        chunk: steps collapsed into one (multiple shooting); 1 is the paper's method. "auto" takes the power of two
            nearest to sqrt(L) / 2, at most 16, more where the blocks would not fit in memory, 1 for approximate
            Jacobians; where Newton is hopeless from the guess it rolls the chunks out from there first, and leaves to the
            loop what takes about as many dependent steps as the loop
        stop: UpdateTest(), PaperTest(), FixedIterations(n)
        shrink: factor on the blocks; below 1 it damps the spread of errors along an unstable sequence, at the price
            of linear convergence
        capture: on a GPU, a solve that is repeated becomes a CUDA graph, and is then replayed; so do passes of recurrent layers

    >>> import torch, deeppcr
    >>> solution = deeppcr.solve(torch.cos, torch.ones(1), length=64, solver=deeppcr.Newton(chunk=8))
    >>> solution.plan.chunk
    8
    """

    atol: float | None = None
    rtol: float | None = None
    max_iterations: int = 100
    jacobian: Jacobian = DenseJacobian()
    linear: LinearSolver = Auto()
    chunk: int | Literal["auto"] = "auto"
    stop: StoppingTest = UpdateTest()
    scale: Literal["largest", "local"] = "largest"
    shrink: float = 1.0
    capture: bool = True

    def __post_init__(self) -> None:
        whole = isinstance(self.chunk, int) and not isinstance(self.chunk, bool)
        if self.chunk != "auto" and (not whole or self.chunk < 1):
            raise ValueError(f'chunk: expected "auto" or a whole number from 1, got {self.chunk!r}')
        if not isinstance(self.max_iterations, int) or self.max_iterations < 1:
            raise ValueError(f"max_iterations: expected a whole number from 1, got {self.max_iterations!r}")
        for name, value in (("atol", self.atol), ("rtol", self.rtol)):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 <= value < math.inf):
                raise ValueError(f"{name}: expected a number from 0, got {value!r}")
        if self.rtol is not None and self.rtol >= 1:
            raise ValueError(f"rtol: expected a part of the states' size, below 1, got {self.rtol!r}")
        if not self.atol and self.rtol == 0:
            raise ValueError("atol, rtol: not both 0: no update is smaller than nothing")
        if self.scale not in ("largest", "local"):
            raise ValueError(f'scale: expected "largest" or "local", got {self.scale!r}')
        if not isinstance(self.shrink, (int, float)) or not 0 <= self.shrink <= 1:
            raise ValueError(f"shrink: expected a factor from 0 to 1, got {self.shrink!r}")
        jacobians = (
            "DenseJacobian(), DiagonalJacobian(), HutchinsonJacobian(), ScalarJacobian(...) or GivenJacobian(...)"
        )
        solvers = "Auto(), Fused(), PCR(), Hierarchical() or ForwardSubstitution()"
        for name, value, kind, known in (
            ("jacobian", self.jacobian, Jacobian, jacobians),
            ("stop", self.stop, StoppingTest, "UpdateTest(), PaperTest() or FixedIterations(n)"),
            ("linear", self.linear, LinearSolver, solvers),
        ):
            if not isinstance(value, kind):
                raise TypeError(f"{name}: expected {known}, got {value!r}")

    @property
    def quadratic(self) -> bool:
        """Whether the iteration is Newton's own, with true Jacobians."""
        return self.jacobian.exact and self.shrink == 1.0

    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        rtol = default_tolerance(dtype) if self.rtol is None else self.rtol
        return Tolerance(self.atol or 0.0, rtol, self.scale == "local")

    def promised(self, dtype: torch.dtype) -> Tolerance | None:
        """The tolerance where the stopping test promises it."""
        return self.tolerance(dtype) if self.stop.promises else None

    def of_progress(self, dtype: torch.dtype) -> dict[str, Any]:
        """What ``Progress`` goes by."""
        return {
            "tolerance": self.tolerance(dtype),
            "quadratic": self.quadratic,
            "stop": self.stop,
            "max_iterations": self.max_iterations,
            "compare_with_loop": self.chunk == "auto" and self.quadratic,
        }

    def choose_chunk(self, sequence: Sequence, plan: Plan) -> int:
        chunk = self.usual_chunk(sequence.length, sequence.history, plan)
        if self.chunk != "auto" or not self.quadratic:
            return chunk
        fitting = self.jacobian.fit_chunk(sequence, chunk)
        if fitting > chunk:
            plan.note("chunk enlarged until the blocks fit the memory budget")
        return fitting

    def usual_chunk(self, length: int, history: int, plan: Plan) -> int:
        """Of so many steps, each of which looks back on so many states; memory not considered."""
        if self.chunk != "auto":
            return min(self.chunk, length)
        if not self.quadratic:
            plan.note("chunk 1: collapsing steps pays with true Jacobians only")
            return 1
        chunk = min(_LARGEST_CHUNK, 2 ** max(0, round(math.log2(math.sqrt(length) / 2))))
        chunk = max(1, min(max(chunk, history), length))
        # What the step itself costs nobody knows: dependent steps are counted instead.
        plan.note(f"chunk {chunk}: about half a square root of {length} steps, {_LARGEST_CHUNK} at most")
        return chunk


#: The settings where nobody has others: most calls come with these, which tell themselves by being the same.
USUAL = Newton()


def Picard(**settings: Any) -> Newton:
    """Picard's iteration: Newton's with the identity for a Jacobian. Takes the arguments of ``Newton``.

    >>> import torch, deeppcr
    >>> step = lambda z: z - 0.01 * torch.sin(z)
    >>> deeppcr.solve(step, torch.ones(2), length=64, solver=deeppcr.Picard()).result.name
    'CONVERGED'
    """
    return Newton(jacobian=ScalarJacobian(1.0), **settings)


def Jacobi(**settings: Any) -> Newton:
    """Jacobi's iteration: Newton's with a zero Jacobian. Takes the arguments of ``Newton``.

    >>> import torch, deeppcr
    >>> step = lambda z: 0.3 * torch.cos(z)
    >>> deeppcr.solve(step, torch.ones(2), length=64, solver=deeppcr.Jacobi()).result.name
    'CONVERGED'
    """
    return Newton(jacobian=ScalarJacobian(0.0), **settings)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One step after the other, behind the same signature.

    Args:
        by: "python", the plain loop, in which a step may do what it likes; "graph", on a GPU: some hundred steps recorded as a
            CUDA graph, and replayed until all are done; "kernel", on a GPU: all steps in one kernel, made from the step. A graph
            and a kernel take one step function without side effects, and gradients are those of ``gradient``, as in a parallel
            solve. Where there is none for a step, it is said why

    >>> import torch, deeppcr
    >>> deeppcr.solve(torch.cos, torch.ones(1), length=64, solver=deeppcr.Loop()).result.name
    'LOOP'
    """

    by: Literal["python", "graph", "kernel"] = "python"

    def __post_init__(self) -> None:
        if self.by not in ("python", "graph", "kernel"):
            raise ValueError(f'by: expected "python", "graph" or "kernel", got {self.by!r}')
