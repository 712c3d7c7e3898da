"""``solve``: by the solver that is given, or by the way that is expected to take least time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, repeat
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import ways
from .across.solve import solve_over
from .distributed.ranks import Ranks
from .fused import Call, solve_fused
from .gradient import Gradient, Implicit, Unrolled
from .guess import RepeatInitial, as_guess
from .jacobian import Jacobian
from .newton import USUAL, Loop, Newton
from .plan import Probe, Record, record_of
from .runtime import has_tangent, in_functorch, is_capturing, outside_of_graph, random_state, version_of
from .sequence.emit import Emitting
from .sequence.evaluate import RandomStep, StepError
from .sequence.history import WithHistory
from .sequence.kept import KeptStates
from .sequence.layout import Layout, note_call
from .sequence.lengths import up_to
from .sequence.sequence import find_length
from .sequence.words import in_words, what_does_not_fit
from .solution import ConvergenceError, ConvergenceWarning, Plan, Result, Solution, check_on_failure, of_no_rows, warn
from .ways import solve_by

#: So many entries of xs are taken apart at a time.
_ENTRIES = 4096
_FROM_INITIAL, _IMPLICIT = RepeatInitial(), Implicit()


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
        z0: the initial state: a floating or complex tensor or a tuple of them, [*batch, ...]. A complex number is two real ones to the
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
    return run(step, z0, xs, length, batch_dims, lengths, keep, solver, guess, gradient, on_failure, mesh)


def _explained(step: Any, z0: Any, xs: Any, length: Any, batch_dims: int | None, *others: Any) -> Solution:
    """``_solve``; what a step raises that does not fit its arguments says so."""
    try:
        return _solve(step, z0, xs, length, batch_dims, *others)
    except (ConvergenceError, torch.OutOfMemoryError):
        raise
    except (TypeError, RuntimeError) as error:
        for note in what_does_not_fit(step, z0, xs, batch_dims):
            error.add_note(note)
        raise


def _solve(
    step: Any,
    z0: Any,
    xs: Any,
    length: int | None,
    batch_dims: int | None,
    lengths: Tensor | Sequence[int] | None,
    keep: str | int,
    solver: Newton | Loop | None,
    guess: Any,
    gradient: Gradient,
    on_failure: str,
    mesh: Any,
) -> Solution:
    _check_arguments(solver, gradient, on_failure)
    if mesh is not None:
        return _over_ranks(mesh, step, z0, xs, length, batch_dims, lengths, keep, solver, guess, gradient, on_failure)
    if _has_no_rows(z0, batch_dims):
        every = _every(keep, step, xs, length)
        steps = find_length(step if isinstance(step, (list, tuple, nn.ModuleList)) else None, xs, length)
        return of_no_rows(z0, batch_dims, steps).keeping(every)
    if lengths is not None:
        if isinstance(solver, Newton):
            refuse_given(solver.jacobian)
        guess = as_guess(guess, z0, xs)  # which may be a function of xs as they are given
        step, xs = up_to(lengths, step, z0, xs, length, batch_dims)
    every = _every(keep, step, xs, length)
    if solver is not None:
        return solve_by(step, z0, xs, length, batch_dims, solver, guess, gradient, on_failure, every).keeping(every)
    call = Call(step, z0, xs, length, batch_dims, every)
    plain = isinstance(gradient, Implicit) and isinstance(guess, RepeatInitial) and on_failure == "loop"
    if not plain or not can_be_planned(call):
        # Who has wishes about the iteration wants one; and what is wrong is named there.
        return solve_by(step, z0, xs, length, batch_dims, USUAL, guess, gradient, on_failure, every).keeping(every)
    return _Planned(call, length).solve().keeping(every)


def solve_call(call: Call, solver: Newton | None) -> Solution:
    """``solve`` of a call that is known to be right, with all other settings as they are by default."""
    refuse_transforms("deeppcr.solve")
    if solver is None and can_be_planned(call):
        return _Planned(call, None).solve()
    return ways.solve_call(call, USUAL if solver is None else solver, _FROM_INITIAL, _IMPLICIT, "loop")


def _over_ranks(
    mesh: Any,
    step: Any,
    z0: Any,
    xs: Any,
    length: int | None,
    batch_dims: int | None,
    lengths: Any,
    keep: str | int,
    solver: Newton | Loop | None,
    guess: Any,
    gradient: Gradient,
    on_failure: str,
) -> Solution:
    ranks = Ranks.of(mesh)
    for name, given, only in (("keep", keep, "all"), ("lengths", lengths, None)):
        if given is not only and given != only:
            raise ValueError(f"{name}: with a mesh there is {only!r} alone, got {given!r}")
    return solve_over(
        ranks, step, z0, xs, length, batch_dims, USUAL if solver is None else solver, guess, gradient, on_failure
    )


def _every(keep: Any, step: Any, xs: Any, length: int | None) -> int:
    """The states after every so many steps are kept."""
    if isinstance(keep, str) and keep == "all":
        return 1
    if keep != "last" and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ValueError(f'keep: expected "all", "last" or a whole number from 1, got {keep!r}')
    steps = find_length(step if isinstance(step, (list, tuple, nn.ModuleList)) else None, xs, length)
    if keep == "last":
        return steps
    if keep > steps:
        raise ValueError(
            f"keep: of {steps} steps none is the {keep}th; solution.final is the last state, whatever is kept"
        )
    return keep


def _check_arguments(solver: Any, gradient: Any, on_failure: Any) -> None:
    if solver is not None and not isinstance(solver, (Newton, Loop)):
        raise TypeError(f"solver: expected Newton(...), Picard(...), Jacobi(...), Loop() or None, got {solver!r}")
    if not isinstance(gradient, Gradient):
        raise TypeError(f"gradient: expected Implicit() or Unrolled(), got {gradient!r}")
    check_on_failure(on_failure)
    refuse_transforms("deeppcr.solve")


def refuse_transforms(name: str) -> None:
    """Raise where there are no values to look at."""
    if torch._C._get_tracing_state() is not None:
        raise RuntimeError(
            f"{name} cannot be traced by torch.jit.trace: it looks at values to decide when to stop. Use torch.export or torch.compile, "
            'or mode="sequential" of a module of deeppcr.nn'
        )
    if in_functorch():
        raise RuntimeError(
            f"{name} cannot run inside a torch.func transform (vmap, grad, jvp, ...): it looks at values to decide when "
            "to stop. Put what you would vmap over into the batch; for gradients use torch.autograd"
        )


def _has_no_rows(z0: Any, batch_dims: int | None) -> bool:
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


def can_be_planned(call: Call) -> bool:
    """Whether a solve has several ways, as far as can be said before the step is called."""
    first, step = call.states[0] if call.states else None, call.given[0]
    several = isinstance(step, (list, tuple, nn.ModuleList))
    if call.has_kernels:  # then the rest was looked at
        return not is_capturing(call.states[0].device)
    return (
        isinstance(first, Tensor)
        and type(call.length) is int
        and call.length > 0
        and call.given_length in (None, call.length)
        and (len(step) == call.length and all(map(callable, step)) if several else callable(step))
        and not isinstance(call.step, WithHistory)
        and all(isinstance(leaf, Tensor) for leaf in (*call.states, *call.inputs))
        and all(leaf.ndim > 0 and leaf.shape[0] == call.length for leaf in call.inputs)
        and not any(has_tangent(leaf) for leaf in (*call.states, *call.inputs))
        and not is_capturing(first.device)
    )


class _Planned:
    """A solve by the way that is expected to take least time."""

    def __init__(self, call: Call, length: int | None):
        self.call, self.length = call, length
        self._raised: Exception | None = None

    def solve(self) -> Solution:
        call = self.call
        if not call.has_kernels and call.fused is None and self.record.is_worth_kernels(again=True):
            call.make()
        if call.has_kernels:
            found = self._by_kernels()
            if found is not None:
                return found
        way, why = self.record.choose()
        if way == "loop":
            probe = None if "loop" in self.record.seconds else self._probe()
            found = self._by_loop(probe)
            if found is not None:
                found.plan.note(why)
                return found
            if call.fused is None and self.record.is_worth_kernels(again=False):
                call.make()
                found = self._by_kernels() if call.has_kernels else None
                if found is not None:
                    return found
            way, why = self.record.choose()
        found = self._by_graph() if way == "graph" else self._by_newton() if way == "newton" else self._by_python()
        found.plan.note(why)
        return found

    @cached_property
    def record(self) -> Record:
        call = self.call
        return record_of(call.key, call.sizes, call.states[0].device, call.differentiated)

    def _by_kernels(self) -> Solution | None:
        found = solve_fused(self.call, USUAL, None, every=self.call.every)
        if isinstance(found, str):
            return None
        if found.result is Result.LOOP:
            found.plan.note("one step after the other, by a kernel: the chunks of such a solve did not join")
        elif found.result is Result.NON_FINITE:
            warn(found.description)
        return found

    def _by(self, solver: Newton | Loop) -> Solution:
        call, (step, xs) = self.call, self.call.given
        return solve_by(
            step,
            call.z0,
            xs,
            self.length,
            call.batch_dims,
            solver,
            RepeatInitial(),
            Implicit(),
            "loop",
            call.every,
        )

    def _by_newton(self) -> Solution:
        with warnings.catch_warnings():
            # Who did not ask for a parallel solve is not to hear that there was none: the result says it.
            warnings.simplefilter("ignore", ConvergenceWarning)
            found = self.record.timed("newton", lambda: self._by(USUAL))
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
            return self._by_python()

    def _by_python(self) -> Solution:
        return self.record.timed("loop", lambda: self._by(Loop()))

    def _probe(self) -> Probe:
        """Gives up on a loop of Python where another way is expected to be faster."""

        def is_too_long(_: float) -> bool:
            return self.record.choose()[0] != "loop" or (
                self.call.fused is None and self.record.is_worth_kernels(again=False)
            )

        return Probe(self.record, self.call.length or 1, self.call.states[0].device, is_too_long)

    def _by_loop(self, probe: Probe | None) -> Solution | None:
        """The loop as a user would write it; None where the probe gives it up. What goes wrong goes wrong again in ``ways``, where it
        is said what it is; but for what the step itself raises after the first time, of which there is no more to say."""
        begin = time.perf_counter()
        try:
            layout = Layout.of(self.call.z0, self.call.batch_dims)
            kept = KeptStates(layout, self.call.length or 1, self.call.every)
            outputs = self._bare_loop(layout, kept, probe)
            if outputs is None:
                return None
            states = kept.states()
        except Exception as error:
            if isinstance(error, StepError) or error is self._raised:
                raise
        else:
            found = _of_loop(layout, self.call, kept, states)
            self.record.took("loop", time.perf_counter() - begin)
            return replace(found, outputs=outputs) if isinstance(self.call.given[0], Emitting) else found
        return self._by_python()  # out here, so that its error does not come with the first one

    def _bare_loop(self, layout: Layout, kept: KeptStates, probe: Probe | None) -> list[Any] | None:
        """What its steps gave beside their states; None where it did not come to its end."""
        call, (step, xs), outputs = self.call, self.call.given, []
        both = step.both if isinstance(step, Emitting) else None
        flat, inputs = _flattening(layout), call.inputs if xs is call.xs else pytree.tree_leaves(xs)
        steps = step if isinstance(step, (list, tuple, nn.ModuleList)) else repeat(step)
        # The caller's own tensors stay as they are, whatever the first step does.
        z = call.z0.clone() if isinstance(call.z0, Tensor) else pytree.tree_map(torch.clone, call.z0)
        first = [z] if isinstance(z, Tensor) else pytree.tree_leaves(z)
        before, given = ([version_of(leaf) for leaf in leaves] for leaves in (first, inputs))
        for index, (one, x) in enumerate(zip(steps, _inputs_of_steps(xs, inputs, call.length or 0), strict=False)):
            watched = (
                index == 1 and probe is not None
            )  # the first call of all may set what stays; and of a kind once is enough
            drawn = random_state(layout.device) if watched else None
            try:
                if both is None:
                    z = one(z, *x)
                else:
                    z, output = both(z, *x)
                    outputs.append(output)
            except Exception as error:
                if index > 0 and layout.complaint(z, layout.batch_shape) is None:
                    self._raised = error
                    note_call(error, index, z, *x)
                raise
            if drawn is not None and not torch.equal(drawn, random_state(layout.device)):
                raise RandomStep  # as by Newton's method: else a loop would be refused because it has become longer
            if index == 0 and layout.complaint(z, layout.batch_shape) is not None:
                raise ValueError("the step does not return a state")
            if index == 0 and given != [version_of(leaf) for leaf in inputs]:
                raise ValueError("the step changes its inputs in place")
            kept.add(flat(z))
            if probe is not None and probe.gives_up(index):
                return None
        if before != [version_of(leaf) for leaf in first]:
            raise ValueError("the step changes its state in place")
        return outputs


def _inputs_of_steps(xs: Any, leaves: list[Tensor], length: int) -> Iterable[tuple]:
    """Of each step what it takes beside its state."""
    if xs is None:
        return repeat((), length)
    inputs = zip(*[_entries(leaf) for leaf in leaves], strict=True)
    if isinstance(xs, Tensor):
        return inputs
    spec = pytree.tree_structure(xs)
    # Of one level, to put together a nest of PyTorch's takes as long as a step.
    if type(xs) is tuple and all(isinstance(each, Tensor) for each in xs):
        return zip(inputs, strict=True)
    if type(xs) is dict and all(isinstance(each, Tensor) for each in xs.values()):
        return ((dict(zip(spec.context, leaves, strict=True)),) for leaves in inputs)
    return ((pytree.tree_unflatten(leaves, spec),) for leaves in inputs)


def _entries(leaf: Tensor) -> Iterable[Tensor]:
    """The entries of a tensor, of a long one some at a time: each is an object of its own."""
    if len(leaf) <= _ENTRIES:
        return leaf.unbind()
    return chain.from_iterable(part.unbind() for part in leaf.split(_ENTRIES))


def _flattening(layout: Layout) -> Callable[[Any], Sequence[Tensor]]:
    """What gives the leaves of a state: for one tensor and for a tuple of them, in less time than a step takes."""
    if layout.spec.is_leaf():
        return lambda z: (z,)
    general = lambda z: pytree.tree_leaves(layout.in_order(z))  # noqa: E731
    return (lambda z: z if type(z) is tuple else general(z)) if layout.is_tuple else general


def _of_loop(layout: Layout, call: Call, kept: KeptStates, states: list[Tensor]) -> Solution:
    """What a loop found, and warned of where it is not finite."""
    rows, device, batch, at = layout.rows, layout.device, layout.batch_shape, kept.not_finite
    exact = torch.full((rows,), call.length or 1, device=device)
    result, results = Result.LOOP, (Result.LOOP,) * rows
    description = result.value
    if at is not None:
        places = at.tolist()
        result, results = Result.NON_FINITE, tuple(Result.LOOP if at < 0 else Result.NON_FINITE for at in places)
        exact = torch.where(at >= 0, at, exact)
        description = in_words(results, exact, call.given_inputs, layout)
        warn(description)
    exact = exact.reshape(batch)
    dropped = kept.dropped(exact)
    if dropped is not None:
        dropped = replace(dropped, final=layout.nest(dropped.final))
    return Solution(
        states=layout.nest(states),
        iterations=torch.zeros(rows, dtype=torch.long, device=device).reshape(batch),
        residual=torch.zeros(rows, dtype=layout.dtype, device=device).reshape(batch),
        result=result,
        results=results,
        exact_steps=exact,
        updates=torch.zeros(0, *batch, device=device),
        plan=Plan(),
        description=description,
        z0=call.z0.detach() if isinstance(call.z0, Tensor) else pytree.tree_map(torch.detach, call.z0),
        dropped=dropped,
    )
