"""``scan``: a loop that hands a carry on and gives an output at every step, as PyTorch's scan has it.

Shapes: L steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .newton import Loop, Newton
from .runtime import is_out_of_memory, outside_of_graph, tensors_in
from .sequence.evaluate import StepError
from .sequence.history import Emitting
from .sequence.kept import writes_of
from .sequence.layout import describe
from .sequence.purity import changes_in_place
from .sequence.riders import DependsOnState, courses
from .sequence.sequence import find_length
from .sequence.vmapped import vmap_over_steps
from .sequence.words import read_backwards
from .solution import Plan, Result, Solution, first_not_finite, without_iterations
from .solve import refuse_transforms, solve


def scan(
    combine_fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    *,
    dim: int = 0,
    reverse: bool = False,
    batch_dims: int = 0,
    solver: Newton | Loop | None = None,
    return_solution: bool = False,
) -> Any:
    """Run ``for x in xs: carry, y = combine_fn(carry, x)`` in parallel over its steps: the last carry, and all y.

    What it takes and gives is what PyTorch's scan takes and gives. The floating tensors of the carry are the state of ``deeppcr.solve``,
    which chooses the way. Integers and truths in it (counters, masks) are found before, and ride along; where they depend on the state,
    the step reads values (``.item()``, ``.numpy()``) or changes them in place, or the carry has floating tensors of several dtypes, values
    that are not finite or none at all, the loop is run as it stands. A carry of counters and masks alone needs no solve. The outputs are computed for all steps at once when the carries are known.

    A parallel solve calls ``combine_fn`` for what the carry becomes, several times, and each call computes the output as well: what is
    large in it and needs no loop (the last layer of a network) is better applied to ``ys``.

    Args:
        combine_fn: ``combine_fn(carry, x)`` gives the next carry, which has the structure, shapes and dtypes of ``init``, and an output: a
            tensor or a nest of them (or None)
        init: the first carry: a tensor or a nest of tensors
        xs: a tensor or a nest of tensors, each with L entries along ``dim``; ``combine_fn`` sees one of them at a time, without that
            dimension. Without any tensor in it there is no step: ``init`` and [] are returned
        dim: along which dimension of xs the steps lie, and of ys
        reverse: from the last entry to the first; ys lie as xs do
        batch_dims: so many leading dimensions of the carry's floating tensors are rows that do not influence each other. Default: 0, all
            of the carry is one state, since PyTorch's scan knows of no rows (the default of ``deeppcr.solve`` is 1 where a state has more than
            one dimension). Give ``batch_dims=1`` where the carry is a batch: it makes a parallel solve much cheaper
        solver: as for ``deeppcr.solve``
        return_solution: return the Solution, too: its ``states`` are the floating tensors of the carry after every step, a tuple, each
            [L, ...], in the order of the steps; and its ``plan`` says which way was taken

    Returns:
        the last carry, like ``init``, and ys: each tensor of the output with a dimension ``dim`` more (the last, where it has too few),
        of size L. Differentiable in init, xs and all that ``combine_fn`` closes over

    >>> import torch, deeppcr
    >>> def combine(carry, x):  # a filter that counts how often it was surprised
    ...     mean, count = carry
    ...     mean = torch.lerp(mean, torch.sin(mean) + x, 0.1)
    ...     return (mean, count + (x.abs().amax() > 2)), x - mean
    >>> xs = torch.randn(1000, 3)
    >>> (mean, count), residuals = deeppcr.scan(combine, (torch.zeros(3), torch.tensor(0)), xs)
    >>> mean.shape, residuals.shape, count.item() == (xs.abs().amax(1) > 2).sum().item()
    (torch.Size([3]), torch.Size([1000, 3]), True)
    """
    # As for ``solve``: its control flow depends on values.
    run: Any = _scan
    if torch.compiler.is_compiling():
        run = outside_of_graph(run, "deeppcr.scan looks at values to decide when to stop")
    return run(combine_fn, init, xs, dim, reverse, batch_dims, solver, return_solution)


def _scan(
    combine_fn: Any,
    init: Any,
    xs: Any,
    dim: int,
    reverse: bool,
    batch_dims: int,
    solver: Newton | Loop | None,
    return_solution: bool,
) -> Any:
    refuse_transforms("deeppcr.scan")
    inputs, xs_spec = pytree.tree_flatten(xs)
    if not inputs:
        if return_solution:
            raise ValueError("return_solution: xs has no tensor in it, so there is no step, and no solution")
        return init, []
    dim = _check(combine_fn, init, inputs, dim, reverse)
    inputs = [leaf.movedim(dim, 0) for leaf in inputs]
    find_length(None, pytree.tree_unflatten(inputs, xs_spec), None)  # which raises where they differ
    if reverse:
        inputs = [leaf.flip(0) for leaf in inputs]
    body = _Body(combine_fn, init, xs)
    with read_backwards(len(inputs[0]) if reverse else None):
        carry, ys, solution = _run(body, pytree.tree_leaves(init), inputs, batch_dims, solver, return_solution)
    if reverse:
        ys = _map(lambda leaf: leaf.flip(0), ys)
    if dim != 0:
        ys = _map(lambda leaf: leaf.movedim(0, dim) if dim < leaf.ndim else leaf, ys)
    return (carry, ys, solution) if return_solution else (carry, ys)


def _check(combine_fn: Any, init: Any, inputs: list[Any], dim: Any, reverse: Any) -> int:
    """The dimension, from 0 on; raises what PyTorch's scan raises, in its words."""
    if not callable(combine_fn):
        raise RuntimeError(f"Combine_fn must be a callable, but got {combine_fn}")
    if not isinstance(dim, int):
        raise RuntimeError(f"Dim must be an int, but got {type(dim)}")
    if not isinstance(reverse, bool):
        raise RuntimeError(f"Reverse must be a bool, but got {type(reverse)}")
    leaves = pytree.tree_leaves(init)
    if not leaves:
        raise RuntimeError("scan() operator requires init leaves.")
    for name, each in (("init", leaves), ("xs", inputs)):
        for leaf in each:
            if not isinstance(leaf, Tensor):
                raise RuntimeError(f"All {name} leaves must be a Tensor but got {leaf}")
    most = max(inputs[0].ndim, 1)
    if not -most <= dim < most:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got {dim})")
    dim %= most
    if any(leaf.ndim <= dim or leaf.shape[dim] == 0 for leaf in inputs):
        raise RuntimeError("All xs leaves must at least have 'dim' number of dimensions and scan dimension > 0")
    return dim


#: Why a loop, where riders turn out to be others than they seemed.
_OTHER_RIDERS = "what the carry holds beside floating tensors is not what operations say of it: the step reads values, or changes them in place"


class _Body(Emitting):
    """``combine_fn`` as a step: the state is the floating tensors of the carry, a tuple; what rides along comes before the inputs."""

    def __init__(self, combine_fn: Callable, init: Any, xs: Any):
        leaves = pytree.tree_leaves(init)
        self.combine_fn, self.carries, self.inputs = combine_fn, _Nest(init), _Nest(xs)
        self.kinds = [_kind(leaf) for leaf in leaves]
        self.floating = [at for at, leaf in enumerate(leaves) if leaf.is_floating_point() or leaf.is_complex()]
        self.riding = [at for at in range(len(leaves)) if at not in self.floating]

    def both(self, z: Sequence[Tensor], x: Sequence[Tensor]) -> tuple[Any, tuple[Any, list[Tensor]]]:
        """The next state, and beside it the output and what rides along after the step."""
        count = len(self.riding)
        leaves, y = self.step(self.carry(z, x[:count]), x[count:])
        return tuple([leaves[at] for at in self.floating]), (y, [leaves[at] for at in self.riding])

    def carry(self, state: Sequence[Tensor], riders: Sequence[Tensor]) -> list[Tensor]:
        """The leaves of a carry."""
        if not self.riding:
            return list(state)
        leaves = dict(zip((*self.floating, *self.riding), (*state, *riders), strict=True))
        return [leaves[at] for at in range(len(leaves))]

    def step(self, carry: Sequence[Tensor], x: Sequence[Tensor]) -> tuple[Sequence[Tensor], Any]:
        """The leaves of the next carry, and the output."""
        found = self.combine_fn(self.carries.of(carry), self.inputs.of(x))
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            got = f"{type(found).__name__} of {len(found)}" if isinstance(found, (tuple, list)) else describe(found)
            raise RuntimeError(f"Expect combine_fn to return a tuple (next_carry, y) but got {got}.")
        following, y = found
        leaves = self.carries.leaves(following)
        self._check(leaves)
        return leaves, y

    def _check(self, leaves: Sequence[Any]) -> None:
        if [_kind(leaf) for leaf in leaves] == self.kinds:
            return
        differences = []
        for at, (kind, leaf) in enumerate(zip(self.kinds, leaves, strict=True)):
            pairs = zip(("shape", "dtype", "device"), kind, _kind(leaf), strict=True)
            told = ", ".join(f"'{name}: {had} vs {has}'" for name, had, has in pairs if had != has)
            if told:
                differences.append(f"pair[{at}] differ in {told}")
        raise RuntimeError("Expected init and carry to have same metadata but found:\n" + "\n".join(differences))


def _kind(leaf: Any) -> tuple:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (None, type(leaf), None)


class _Nest:
    """The structure of a nest. PyTorch takes longer for one than many a step does: but for a tensor, and a tuple of them."""

    def __init__(self, nest: Any):
        self.spec = pytree.tree_structure(nest)
        self._is_tuple = type(nest) is tuple and all(isinstance(each, Tensor) for each in nest)

    def of(self, leaves: Sequence[Tensor]) -> Any:
        if self.spec.is_leaf():
            return leaves[0]
        return tuple(leaves) if self._is_tuple else pytree.tree_unflatten(list(leaves), self.spec)

    def leaves(self, nest: Any) -> Sequence[Any]:
        """Of a carry, whose dictionaries may have their keys in another order."""
        if self.spec.is_leaf():
            return (nest,)
        if self._is_tuple and type(nest) is tuple and len(nest) == self.spec.num_children:
            return nest
        try:
            return self.spec.flatten_up_to(nest)
        except ValueError as error:
            raise RuntimeError(f"Expected init and carry to have same tree structure: {error}") from None


def _map(function: Callable[[Tensor], Tensor], ys: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf if leaf is None else function(leaf), ys)


def _run(
    body: _Body,
    init: list[Tensor],
    inputs: list[Tensor],
    batch_dims: int,
    solver: Newton | Loop | None,
    return_solution: bool,
) -> tuple[Any, Any, Solution | None]:
    """The last carry, ys [L, ...], and the solution where it is asked for."""
    state, riders = ([init[at] for at in each] for each in (body.floating, body.riding))
    reason = "" if isinstance(solver, Loop) and solver.by == "python" else _reason_for_loop(state)
    paths: list[Tensor] = []
    if reason is None and riders:
        try:
            paths = courses(lambda z, r, x: body.both(z, [*r, *x])[1][1], state, riders, inputs)
        except DependsOnState as why:
            reason = f"what the carry holds beside floating tensors {why}"
    if reason is not None:
        return _by_loop(body, init, inputs, reason, return_solution)
    xs = (*(path[:-1] for path in paths), *inputs)
    if state:
        solution = solve(body, tuple(state), xs, batch_dims=batch_dims, solver=solver)
    else:
        note = "no floating tensor in the carry: there is nothing to solve for"
        solution = _solution([], len(inputs[0]), note, init[0].device)
    if solution.outputs is not None:
        (ys, after), solution = _stacked_pairs(solution.outputs), replace(solution, outputs=None)
    else:
        pairs = zip(state, solution.states, strict=True)
        ys, after = _all_at_once(body, tuple([torch.cat([z.unsqueeze(0), path[:-1]]) for z, path in pairs]), xs)
    # The step may read values where no operation is seen. That it leads from every entry of the paths to the next says all.
    if not all(torch.equal(each, path[1:]) for each, path in zip(after, paths, strict=True)):
        return _by_loop(body, init, inputs, _OTHER_RIDERS, return_solution)
    last = body.carry([leaf[-1] for leaf in solution.states], [path[-1] for path in paths])
    return body.carries.of(last), ys, solution


def _reason_for_loop(state: list[Tensor]) -> str | None:
    """Why ``solve`` would not take this state, though a loop does; None where it would."""
    if len({(leaf.dtype.to_real(), leaf.device) for leaf in state}) > 1:
        return f"the floating tensors of the carry have several dtypes or devices: {describe(tuple(state))}"
    for leaf in state:
        if leaf.numel() == 0:
            return "a floating tensor of the carry is empty"
        if not torch.isfinite(leaf).all():
            return "a floating tensor of init holds values that are not finite"
    return None


def _by_loop(
    body: _Body, init: list[Tensor], inputs: list[Tensor], reason: str, return_solution: bool
) -> tuple[Any, Any, Solution | None]:
    carry, outputs, carries = [leaf.clone() for leaf in init], [], []  # the caller's own stay as they are
    for x in zip(*(leaf.unbind() for leaf in inputs), strict=True):
        given, before = carry, _writes(carry)
        carry, y = body.step(given, x)
        if before != _writes(given) and outputs and _share_memory(outputs[-1], given):
            raise StepError(changes_in_place("the carry, and with it an output of the step before,"))
        outputs.append(y)
        if return_solution:  # copies, since the next step may change them in place
            carries.append([carry[at].clone() for at in body.floating])
    solution = None
    if return_solution:
        states = [torch.stack(each) for each in zip(*carries, strict=True)]
        solution = _solution(
            states, len(outputs), f"one step after the other: {reason}" if reason else "", init[0].device
        )
    return body.carries.of(carry), _stacked(outputs), solution


def _writes(leaves: Sequence[Tensor]) -> list[int] | None:
    """How often each was written to; None in inference mode, where that is not counted."""
    try:
        return list(map(writes_of, leaves))
    except RuntimeError:
        return None


def _share_memory(*nests: Any) -> bool:
    addresses = ({leaf.untyped_storage().data_ptr() for leaf in tensors_in(nest)} for nest in nests)
    return not set.isdisjoint(*addresses)


def _solution(states: list[Tensor], length: int, note: str, device: torch.device) -> Solution:
    """Of a loop: all of it is one row."""
    at = min((int(first_not_finite(leaf.unsqueeze(1))) % (length + 1) for leaf in states), default=length)
    result = Result.LOOP if at == length else Result.NON_FINITE
    exact, plan = torch.tensor(at, device=device), Plan(notes=[note] if note else [])
    return without_iterations(tuple(states), (result,), exact, plan, result.value.format(step=at + 1))


def _all_at_once(body: _Body, previous: tuple[Tensor, ...], xs: tuple[Tensor, ...]) -> tuple[Any, list[Tensor]]:
    """The outputs of all steps [L, ...] and what rides along after them, from the states [L, ...] before them and their inputs."""
    nests: list[tuple[pytree.TreeSpec, list[bool]]] = []

    def outputs(z: tuple[Tensor, ...], x: tuple[Tensor, ...]) -> list[Tensor]:
        leaves, spec = pytree.tree_flatten(body.both(z, x)[1])
        _refuse_others(leaves)
        nests.append((spec, [leaf is not None for leaf in leaves]))
        return [leaf for leaf in leaves if leaf is not None]

    try:
        found = iter(vmap_over_steps(lambda x, z: outputs(z, x), xs, previous))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # not every operation has a vmap rule
        if is_out_of_memory(error):
            raise
        steps = range(len(xs[0]))
        return _stacked_pairs([body.both([z[l] for z in previous], [x[l] for x in xs])[1] for l in steps])
    spec, there = nests[-1]
    return pytree.tree_unflatten([next(found) if each else None for each in there], spec)


def _stacked_pairs(outputs: list[tuple[Any, list[Tensor]]]) -> tuple[Any, list[Tensor]]:
    ys, after = zip(*outputs, strict=True)
    return _stacked(ys), _stacked(after) if after[0] else []


def _stacked(outputs: Sequence[Any]) -> Any:
    """The outputs of all steps, one after the other, as one nest [L, ...]."""
    flat, specs = zip(*map(pytree.tree_flatten, outputs), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise RuntimeError(f"Expected outputs of combine_fn of one tree structure, but got {set(map(str, specs))}")
    columns = list(zip(*flat, strict=True))
    for leaves in columns:
        _refuse_others(leaves)
    return pytree.tree_unflatten([None if each[0] is None else torch.stack(each) for each in columns], specs[0])


def _refuse_others(leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise RuntimeError(
                f"Expected outputs of combine_fn that are tensors or None, but got {type(leaf).__name__}"
            )
