"""``solve``: by the solver that is given, or by the way that is expected to take least time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .across.solve import solve_over
from .distributed.ranks import Ranks
from .gradient import Gradient, Implicit, Unrolled
from .graphs.cache import forget_graphs
from .jacobian import Jacobian
from .newton import USUAL, Loop, Newton
from .newton.guess import RepeatInitial, as_guess
from .runtime import in_functorch, outside_of_graph, tensors_in
from .sequence.fingerprint import structure_of
from .sequence.lengths import up_to
from .sequence.sequence import find_length
from .sequence.words import what_does_not_fit
from .solution import ConvergenceError, Solution, check_on_failure, of_no_rows
from .ways import given as ways
from .ways.fused import Call, forget_kernels
from .ways.given import solve_by
from .ways.looped import Given
from .ways.plan import forget_records
from .ways.planned import Planned, can_be_planned

_FROM_INITIAL, _IMPLICIT = RepeatInitial(), Implicit()
_SETTINGS = frozenset(each.name for each in fields(Newton))
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _telling_of_settings(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function; arguments that belong elsewhere are told where."""
    known = inspect.signature(function).parameters.keys()

    @wraps(function)
    def told(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        # (As a list: torch.compile of PyTorch 2.11 knows no differences of keys.)
        settings = [name for name in kwargs if name not in known]
        if settings and all(name in _SETTINGS for name in settings):
            written = ", ".join(f"{name}=..." for name in sorted(settings))
            raise TypeError(f"solve: a setting of the solver is given to the solver: solver=deeppcr.Newton({written})")
        if len(args) > 3:
            raise TypeError(
                f"solve: takes step, z0 and xs by their places, got {len(args)} arguments. Several inputs of a step are one nest: "
                "solve(step, z0, (xs, ys)), and step(z, x) takes it apart: x, y = x"
            )
        return function(*args, **kwargs)

    return told


@_telling_of_settings
def solve(
    step: Callable[..., Any] | list[Callable[..., Any]] | nn.ModuleList,
    z0: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    batch_dims: int | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    keep: Literal["all", "last"] | int = "all",
    solver: Newton | Loop | None = None,
    guess: Any = RepeatInitial(),
    gradient: Implicit | Unrolled = Implicit(),
    on_failure: Literal["loop", "raise", "return"] = "loop",
    mesh: Any = None,
) -> Solution:
    """Run ``for x in xs: z = step(z, x)`` in parallel over its steps.

    Args:
        step: the body of the loop: ``step(z, x)``, or ``step(z)`` without xs; or a list of L such callables. It must be
            free of side effects and of random numbers, and treat the rows of a batch independently; what is seen to be
            otherwise raises StepError, and ``deeppcr.check`` looks for the rest
        z0: the initial state: a floating or complex tensor or a nest of them (tuples, lists, dicts), [*batch, ...]. A complex number is two real ones to the
            solver, so the step need not be holomorphic
        xs: what changes from step to step: a tensor or a nest of tensors, each [L, ...]; ``step`` sees ``leaf[l]``
        length: L, where there are no xs
        batch_dims: how many leading dimensions of the state are batch. Default: 0 if every tensor of z0 has at most
            one dimension, 1 if every one has more; else it must be given
        lengths: [*batch], integers, or a list of them: row b takes its first lengths[b] steps, and then its state stays what it was (z0 where that is 0).
            The step is still called for all rows at once, those that are done included, which stay as they are. So what pads xs behind
            them has to be something that the step can take (0 is; integers have to be valid indices), but for NaN and infinities in a leaf
            [L, *batch, ...], which are replaced; its gradient is 0. Numbers below 0 or above L are refused on the
            CPU; on a GPU, which would have to be waited for, they are taken for 0 and L
        keep: which states are returned: "all", the "last" alone ([1, ...]), or those after every so many steps (k: ``states[k - 1 :: k]``,
            [L // k, ...]). ``solution.final`` is the last state whatever is kept, and all that is said of the states (result, residual,
            known_steps) is said of all. A loop by Python without gradients holds what is kept and some hundred states, and kernels write
            no more from the second solve of a kind on (but every second, fourth, eighth ..., which the step itself has to bear out).
            With gradients, by Newton's method operation by operation, and by kernels on tiles (steps that mix more than 8 numbers), all are
            computed, and the others dropped
        solver: Newton(...), Picard(...), Jacobi(...) or Loop(...). Default: whichever way is expected to take least time, by what is
            known of solves of this kind; ``solution.plan`` says which, and why
        guess: where the iteration starts: RepeatInitial(), Zeros(), Random(), BatchMean(solution), a solution, states,
            or a function of ``(z0, xs)`` that returns states
        gradient: Implicit() or Unrolled(). Second derivatives need Unrolled() or Loop(): by default they are there as long as the way is a
            loop of PyTorch, which has them by itself, and refused by name where it is another
        on_failure: "loop" finishes the rest one step at a time and warns, "raise" raises ConvergenceError,
            "return" returns what there is, and a backward pass through it raises
        mesh: a one-dimensional DeviceMesh over whose ranks the steps are spread (docs/distributed.md): ``xs`` is this rank's part of them,
            contiguous, as many as it has or none; without xs ``length`` is this rank's. z0 is the same everywhere. Every rank makes the
            call, and the backward pass; ``states`` are this rank's, all else is said of the whole, ``final`` included. Gradients of
            what ranks share are this rank's part of the sum

    Returns:
        a Solution; ``states`` mirrors z0, each leaf [L, *leaf of z0] (fewer by ``keep``), differentiable in z0, xs and all that step closes over

    >>> import torch, deeppcr
    >>> weights = torch.randn(1000, 8, 8) / 8**0.5
    >>> z0, step = torch.randn(4, 8), lambda z, w: torch.tanh(z) @ w.mT
    >>> solution = deeppcr.solve(step, z0, weights, solver=deeppcr.Newton())
    >>> solution.states.shape, solution.result.name
    (torch.Size([1000, 4, 8]), 'CONVERGED')

    Rows of different lengths, filled up to the longest:

    >>> counted = deeppcr.solve(
    ...     lambda z, x: z + x, torch.zeros(2, 1), torch.ones(5, 2, 1), lengths=torch.tensor([2, 5])
    ... ).states
    >>> counted[:, :, 0].T.tolist()
    [[1.0, 2.0, 2.0, 2.0, 2.0], [1.0, 2.0, 3.0, 4.0, 5.0]]

    Of a long loop every hundredth state:

    >>> solution = deeppcr.solve(torch.cos, torch.ones(1), length=1050, keep=100)
    >>> solution.states.shape, solution.final.shape
    (torch.Size([10, 1]), torch.Size([1]))
    """
    run: Any = _explained
    if torch.compiler.is_compiling():
        run = outside_of_graph(run, "deeppcr.solve looks at values to decide when to stop")
    if isinstance(length, Tensor) and length.ndim == 0 and not length.is_floating_point():
        length = cast(int, length.item())  # which is read anyway; find_length refuses what is none
    return run((step, z0, xs, length, batch_dims), lengths, keep, solver, guess, gradient, on_failure, mesh)


def _explained(given: tuple[Any, ...], *others: Any) -> Solution:
    """``_solve``; what a step raises that does not fit its arguments says so."""
    loop = Given(*given)
    try:
        return _solve(loop, *others)
    except (ConvergenceError, torch.OutOfMemoryError):
        raise
    except (TypeError, RuntimeError) as error:
        for note in what_does_not_fit(loop.step, loop.z0, loop.xs, loop.batch_dims):
            error.add_note(note)
        raise


def _solve(
    loop: Given, lengths: Tensor | Sequence[int] | None, keep: str | int, solver: Newton | Loop | None,
    guess: Any, gradient: Gradient, on_failure: str, mesh: Any,
) -> Solution:  # fmt: skip
    _check_arguments(solver, gradient, on_failure)
    if mesh is not None:
        for name, given, only in (("keep", keep, "all"), ("lengths", lengths, None)):
            if given is not only and given != only:
                raise ValueError(f"{name}: with a mesh there is {only!r} alone, got {given!r}")
        return solve_over(Ranks.of(mesh), loop, USUAL if solver is None else solver, guess, gradient, on_failure)
    step, z0, xs, length, batch_dims = loop
    if has_no_rows(z0, batch_dims):
        steps = find_length(step, xs, length)
        wanted = (*structure_of(step)[1], *tensors_in(xs)) if torch.is_grad_enabled() else ()
        return of_no_rows(z0, batch_dims, steps, wanted).keeping(_every(keep, step, xs, length))
    if lengths is not None:
        if isinstance(solver, Newton):
            refuse_given(solver.jacobian)
        guess = as_guess(guess, z0, xs)  # which may be a function of xs as they are given
        step, xs = up_to(lengths, step, z0, xs, length, batch_dims)
        loop = Given(step, z0, xs, length, batch_dims)
    every = _every(keep, step, xs, length)
    if solver is not None:
        return solve_by(loop, solver, guess, gradient, on_failure, every).keeping(every)
    call = Call(*loop, every, planned=True)
    plain = isinstance(gradient, Implicit) and isinstance(guess, RepeatInitial) and on_failure == "loop"
    if plain:
        call.begin(USUAL)
    if not plain or not can_be_planned(call):
        # Who has wishes about the iteration wants one; and what is wrong is named there.
        return solve_by(loop, USUAL, guess, gradient, on_failure, every).keeping(every)
    return Planned(call).solve().keeping(every)


def solve_call(call: Call, solver: Newton | None) -> Solution:
    """``solve`` of a call that is known to be right, with all other settings as they are by default."""
    refuse_transforms("deeppcr.solve")
    if solver is None:
        call.begin(USUAL)
        if can_be_planned(call):
            return Planned(call).solve()
    return ways.solve_call(call, USUAL if solver is None else solver, _FROM_INITIAL, _IMPLICIT, "loop")


def _every(keep: Any, step: Any, xs: Any, length: int | None) -> int:
    """The states after every so many steps are kept."""
    if isinstance(keep, str) and keep == "all":
        return 1
    if keep != "last" and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ValueError(f'keep: expected "all", "last" or a whole number from 1, got {keep!r}')
    steps = find_length(step, xs, length)
    if keep == "last":
        return steps
    if keep > steps:
        raise ValueError(
            f"keep: there are {steps} steps, fewer than {keep}; solution.final is the last state, whatever is kept"
        )
    return keep


def _check_arguments(solver: Any, gradient: Any, on_failure: Any) -> None:
    if solver is not None and not isinstance(solver, (Newton, Loop)):
        hint = f"; {solver.__name__}() makes one" if solver in (Newton, Loop) else ""
        raise TypeError(f"solver: expected Newton(...), Picard(...), Jacobi(...), Loop() or None, got {solver!r}{hint}")
    if not isinstance(gradient, Gradient):
        raise TypeError(f"gradient: expected Implicit() or Unrolled(), got {gradient!r}")
    check_on_failure(on_failure)
    refuse_transforms("deeppcr.solve")


def refuse_transforms(name: str) -> None:
    """Raise where there are no values to look at."""
    if torch._C._get_tracing_state() is not None:
        raise RuntimeError(
            f"{name} cannot be traced by torch.jit.trace: it looks at values to decide when to stop. Use torch.compile; modules of "
            'deeppcr.nn can be exported, and traced with mode="sequential"'
        )
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise RuntimeError(
            f"{name} cannot run on fake tensors (torch.export, FakeTensorMode), which hold no values to decide by: export the step, or a "
            "module of deeppcr.nn"
        )
    if in_functorch():
        raise RuntimeError(
            f"{name} cannot run inside a torch.func transform (vmap, grad, jvp, ...): it looks at values to decide when "
            "to stop. Put what you would vmap over into the batch; for gradients use torch.autograd"
        )


def has_no_rows(z0: Any, batch_dims: int | None) -> bool:
    """Whether states are empty because their batch is: there is nothing to do then."""
    first = z0[0] if type(z0) is tuple and z0 else z0
    if isinstance(first, Tensor) and first.numel():  # as a rule, and a nest takes long to look at
        return False
    leaves = pytree.tree_leaves(z0)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.numel() == 0 for leaf in leaves):
        return False
    dims = batch_dims if batch_dims is not None else int(all(leaf.ndim > 1 for leaf in leaves))
    return isinstance(dims, int) and all(0 in leaf.shape[:dims] for leaf in leaves)


def refuse_given(jacobian: Jacobian) -> None:
    """Raise where blocks are given, which know nothing of rows that are done."""
    if jacobian.given:
        raise ValueError(
            "lengths: a GivenJacobian is that of the step alone, while rows that are done keep their state; use DenseJacobian() or "
            "DiagonalJacobian()"
        )


def clear_caches() -> None:
    """Forget all captured solves, those of ``deeppcr.diffusion`` too, and give back their memory (see ``Newton.capture``); the kernels
    of steps; and what solves took, by which ``solve`` chooses its way.

    What was compiled stays on disk.

    >>> import deeppcr
    >>> deeppcr.clear_caches()
    """
    forget_graphs()
    forget_kernels()
    forget_records()
