"""A step on one row, taken apart: what kernels compute, what they read, what is computed before them; and derivatives of the first."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from .expressions import NotCovered
from .operations import DECOMPOSITIONS, is_pointwise
from .slices import pushed
from .trace import OneRow

#: In a narrow step, tensors of so many numbers that do not depend on the state are computed in the kernel; larger ones before it.
_FEW = 64
#: The same for what goes number by number in tiles.
_FEW_IN_TILES = 512


@dataclass(frozen=True)
class Base:
    """A tensor that the kernels read from: an input, a closure, or what is computed before them.

    Attributes:
        node: of the graph of one row
        shape: of one row at one step, its rows' ones included
        per_step, per_row: whether it differs from step to step, and from row to row
    """

    node: fx.Node
    shape: tuple[int, ...]
    dtype: torch.dtype
    per_step: bool
    per_row: bool


@dataclass(frozen=True)
class Leaf:
    """What the rest of a step sees of a base: all of it; or, of an elementwise step, one number of it for each channel; or, in tiles, a
    part of it.

    Attributes:
        base: which
        node: of the graph of one row
        shape: of one row at one step; of an elementwise step that of its state
        offset, spacing: where the number of the first channel stands, and how far apart channels are
        strides: in tiles, how far apart the numbers of each dimension are
    """

    base: int
    node: fx.Node
    shape: tuple[int, ...]
    dtype: torch.dtype
    per_step: bool
    per_row: bool
    offset: int = 0
    spacing: int = 0
    strides: tuple[int, ...] = ()


@dataclass(frozen=True)
class Parts:
    """A step on one row, taken apart.

    Attributes:
        row: which it was
        elementwise: no operation mixes the numbers of the state's leaves, which have one shape
        tiled: it is too wide for the registers of a lane
        bases, leaves: what the rest reads
        core: (leaves of the state, leaves) to the next state
    """

    row: OneRow
    elementwise: bool
    tiled: bool
    bases: tuple[Base, ...]
    leaves: tuple[Leaf, ...]
    core: Callable[..., list[Tensor]]

    @cached_property
    def _places(self) -> list[int] | None:
        """Which of the inputs and closures the bases are; None where one has to be computed."""
        holders = [node for node in self.row.graph.graph.nodes if node.op == "placeholder"][self.row.states :]
        if all(base.node in holders for base in self.bases):
            return [holders.index(base.node) for base in self.bases]
        return None

    @property
    def are_given(self) -> bool:
        """Whether the bases are inputs and closures as they are."""
        return self._places is not None and self.row.batch_dims <= 1

    def values(self, inputs: list[Tensor], closures: list[Tensor], device: torch.device) -> list[Tensor]:
        """The bases: [L, rows, ...], without L or rows where they are the same for all.

        Args:
            inputs: the leaves of xs, [L, ...] each
            device: of what the step itself makes
        """
        row, outside = self.row, [*inputs, *closures]
        if row.batch_dims > 1:
            dims = [1] * row.inputs + [0] * len(closures)
            outside = [
                tensor.flatten(at, at + row.batch_dims - 1) if rows else tensor
                for tensor, rows, at in zip(outside, row.has_rows, dims, strict=True)
            ]
        if self._places is not None:
            return [outside[place] for place in self._places]
        nodes = [node for node in row.graph.graph.nodes if node.op == "placeholder"][row.states :]
        return _evaluate_hoisted(row, self.bases, nodes, outside, device)


def take_apart(row: OneRow, narrow: int, widest: int) -> Parts:
    """Find what depends on the state, and what of the rest is computed before the kernels.

    Args:
        narrow: up to this width, numbers of a step that mixes them are those of a lane
        widest: up to this one they are tiles
    """
    states = [node for node in row.graph.graph.nodes if node.op == "placeholder"][: row.states]
    width = sum(node.meta["val"].numel() for node in states)
    depending = _reached(states, list(row.graph.graph.nodes))
    elementwise = _is_elementwise(states, [node for node in row.graph.graph.nodes if node in depending])
    if not elementwise and width > widest:
        raise NotCovered(f"a step that mixes {width} numbers is not covered (up to {widest})")
    tiled = not elementwise and width > narrow
    return _taken_apart(pushed(row) if tiled else row, elementwise, tiled)


def _taken_apart(row: OneRow, elementwise: bool, tiled: bool) -> Parts:
    graph = row.graph.graph
    nodes = list(graph.nodes)
    holders = [node for node in nodes if node.op == "placeholder"]
    depends = _reached(holders[: row.states], nodes)
    by_step = _reached(holders[row.states : row.states + row.inputs], nodes)
    have_rows = [node for node, rows in zip(holders[row.states :], row.has_rows, strict=True) if rows]
    by_row = _reached(have_rows, nodes)
    shape = tuple(holders[0].meta["val"].shape)

    def inlined(node: fx.Node) -> bool:
        """Whether the kernels compute a node that does not depend on the state."""
        if node.op == "placeholder":
            return False
        if elementwise:
            return is_pointwise(node) or _is_number(node)
        if tiled:
            return (
                node in indices
                or _is_constant(node, row.graph)
                or (node in by_step and is_pointwise(node) and _is_few(node, _FEW_IN_TILES))
            )
        return all(_is_few(each) for each in _ancestors(node))

    indices = _indices(node for node in nodes if node in depends)
    leaves: dict[fx.Node, None] = {}
    inside: dict[fx.Node, None] = {}
    waiting = [node for node in nodes if node in depends or node.op == "output"]
    while waiting:
        node = waiting.pop()
        inside[node] = None
        for each in node.all_input_nodes:
            if each in depends or each in inside:
                continue
            if inlined(each) or (each.op == "get_attr" and not elementwise and not tiled):
                waiting.append(each)
            else:
                leaves[each] = None
    bases: list[Base] = []

    def base_of(node: fx.Node) -> int:
        for index, known in enumerate(bases):
            if known.node is node:
                return index
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            raise NotCovered(f"{node.target} is not covered")
        bases.append(Base(node, tuple(value.shape), value.dtype, node in by_step, node in by_row))
        return len(bases) - 1

    found = []
    for node in sorted(leaves, key=nodes.index):
        source, offset, strides = node, 0, (0,)
        if elementwise:
            source, offset, strides = _seen_through(node, shape, flat=True)
        elif tiled:
            source, offset, strides = _seen_through(node, tuple(_values_of(node)[0].shape), flat=False)
        base = base_of(source)
        value = bases[base]
        whole = shape if elementwise else tuple(_values_of(node)[0].shape)
        found.append(
            Leaf(
                base,
                node,
                whole,
                value.dtype,
                value.per_step,
                value.per_row,
                offset,
                strides[0] if strides else 0,
                strides,
            )
        )
    order = [node for node in nodes if node in inside]
    core = _Core(row.graph, holders[: row.states], [leaf.node for leaf in found], order)
    return Parts(row, elementwise, tiled, tuple(bases), tuple(found), core)


def _seen_through(node: fx.Node, shape: tuple[int, ...], *, flat: bool) -> tuple[fx.Node, int, tuple[int, ...]]:
    """Behind slices and the like, what a node shows: and of it, where the first number stands, and how far apart others are, along each
    dimension, or in their order."""
    chain = [node]
    while _is_view(chain[-1]):
        chain.append(chain[-1].all_input_nodes[0])
    for at in range(len(chain) - 1, -1, -1):
        source = chain[at]
        if not isinstance(source.meta["val"], Tensor):
            continue
        known: Any = torch.arange(source.meta["val"].numel()).reshape(source.meta["val"].shape)
        for each in reversed(chain[:at]):
            args, kwargs = fx.map_arg((each.args, each.kwargs), lambda _, known=known: known)
            known = each.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        places = known.expand(shape)
        places = places.reshape(-1) if flat else places
        if not flat and len(places.unique()) < places.numel():  # which a kernel cannot write the gradient of: nearer
            continue
        first = int(places.reshape(-1)[0])
        strides = tuple(
            [
                int(places.select(dim, 1).reshape(-1)[0]) - first if size > 1 else 1
                for dim, size in enumerate(places.shape)
            ]
        )
        regular = torch.full_like(places, first)
        for dim, (size, stride) in enumerate(zip(places.shape, strides, strict=True)):
            regular += (stride * torch.arange(size)).reshape(-1, *(1,) * (places.ndim - 1 - dim))
        if torch.equal(places, regular):
            return source, first, strides
    raise NotCovered(f"{node.target} of shape {tuple(node.meta['val'].shape)} in an elementwise step is not covered")


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function" or len(node.all_input_nodes) != 1:
        return False
    return node.target is operator.getitem or (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view)


class _Core:
    """Runs some nodes of a graph, given the others."""

    def __init__(self, graph: fx.GraphModule, states: list[fx.Node], leaves: list[fx.Node], order: list[fx.Node]):
        self._graph, self._given, self._order = graph, [*states, *leaves], order

    def __call__(self, *given: Tensor) -> list[Tensor]:
        known: dict[fx.Node, Any] = dict(zip(self._given, given, strict=True))
        return compute(self._graph, self._order, known, torch.device("cpu"))


def compute(graph: fx.GraphModule, nodes: Iterable[fx.Node], known: dict[fx.Node, Any], device: torch.device) -> Any:
    """Run nodes of a graph on a device, beside those that are known, to which they are added; returns what the graph's output is."""
    for node in nodes:
        if node in known:
            continue
        if node.op == "output":
            return [known[each] for each in pytree.tree_leaves(node.args[0])]
        if node.op == "get_attr":
            known[node] = getattr(graph, str(node.target)).to(device)
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: known[each])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": device}
        known[node] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    return None


def values_graph(parts: Parts, dtype: torch.dtype) -> fx.GraphModule:
    """(state, leaves) to the next state."""
    return _made(parts.core, *_examples(parts, dtype))


def tangent_graph(parts: Parts, dtype: torch.dtype) -> fx.GraphModule:
    """(state, tangents of the state, leaves) to the next state's tangents."""
    count = parts.row.states

    def push(*given: Tensor) -> Any:
        state, tangents, leaves = given[:count], given[count : 2 * count], given[2 * count :]
        return torch.func.jvp(lambda *z: parts.core(*z, *leaves), state, tangents)[1]

    given = _examples(parts, dtype)
    return _made(push, *given[:count], *given)


def adjoint_graph(parts: Parts, dtype: torch.dtype) -> fx.GraphModule:
    """(state, cotangents of the next state, leaves) to the cotangents of the state."""
    count = parts.row.states

    def pull(*given: Tensor) -> Any:
        state, cotangents, leaves = given[:count], given[count : 2 * count], given[2 * count :]
        return torch.func.vjp(lambda *z: parts.core(*z, *leaves), *state)[1](list(cotangents))

    given = _examples(parts, dtype)
    return _made(pull, *given[:count], *map(torch.clone, given[:count]), *given[count:])


def cotangent_graph(parts: Parts, dtype: torch.dtype) -> fx.GraphModule:
    """(state, cotangents of the next state, leaves) to the cotangents of the leaves that are floating."""
    count = parts.row.states

    def pull(*given: Tensor) -> Any:
        state, cotangents, leaves = given[:count], given[count : 2 * count], given[2 * count :]
        real = [i for i, leaf in enumerate(leaves) if leaf.is_floating_point()]

        def of_leaves(*some: Tensor) -> list[Tensor]:
            every = list(leaves)
            for i, leaf in zip(real, some, strict=True):
                every[i] = leaf
            return parts.core(*state, *every)

        return torch.func.vjp(of_leaves, *[leaves[i] for i in real])[1](list(cotangents))

    given = _examples(parts, dtype)
    return _made(pull, *given[:count], *given)


def _made(function: Callable, *examples: Tensor) -> fx.GraphModule:
    """Traced on real numbers: forward mode has tensors of zeros that stand-ins know nothing of."""
    # In inference mode, or on tensors that were made there, some versions of PyTorch differentiate nothing.
    with torch.inference_mode(False), torch.enable_grad():
        made = make_fx(torch.func.functionalize(function, remove="mutations"), decomposition_table=DECOMPOSITIONS,
                       tracing_mode="real")(*map(torch.clone, examples))  # fmt: skip
    made.graph.eliminate_dead_code()
    return made


def _examples(parts: Parts, dtype: torch.dtype) -> list[Tensor]:
    """Small tensors with the shapes of one row, on the CPU. Their values matter to nobody."""
    holders = [node for node in parts.row.graph.graph.nodes if node.op == "placeholder"][: parts.row.states]
    state = [torch.full(tuple(node.meta["val"].shape), 0.5, dtype=dtype) for node in holders]
    return [*state, *(torch.full(leaf.shape, 0.5, dtype=dtype) if leaf.dtype.is_floating_point
                      else torch.ones(leaf.shape, dtype=leaf.dtype) for leaf in parts.leaves)]  # fmt: skip


def _reached(sources: Iterable[fx.Node], nodes: list[fx.Node]) -> set[fx.Node]:
    found = set(sources)
    for node in nodes:
        if node.op != "output" and any(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def _ancestors(node: fx.Node) -> list[fx.Node]:
    found: dict[fx.Node, None] = {node: None}
    waiting = [node]
    while waiting:
        for each in waiting.pop().all_input_nodes:
            if each not in found:
                found[each] = None
                waiting.append(each)
    return list(found)


def _values_of(node: fx.Node) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(node.meta.get("val")) if isinstance(each, Tensor)]


def _is_few(node: fx.Node, few: int = _FEW) -> bool:
    return all(value.numel() <= few for value in _values_of(node))


def _is_number(node: fx.Node) -> bool:
    """One number that is known when tracing."""
    return not node.all_input_nodes and node.op == "call_function" and all(v.numel() == 1 for v in _values_of(node))


def _indices(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What gives the places of numbers that are picked, where a step holds these itself."""
    picking = [node for node in nodes if getattr(node.target, "overloadpacket", None) in _PICKING]
    given = [_ancestors(each) for node in picking for each in node.all_input_nodes]
    return {each for every in given if all(one.op != "placeholder" for one in every) for each in every}


_PICKING = {torch.ops.aten.index, torch.ops.aten.index_select, torch.ops.aten.index_put}


def _is_constant(node: fx.Node, graph: fx.GraphModule) -> bool:
    """Whether a node is known while the code is written: indices, or one number."""
    if any(each.op in ("placeholder", "get_attr") for each in _ancestors(node)):
        return False
    if not _values_of(node)[0].is_floating_point():
        return True
    known: dict[fx.Node, Any] = {}
    for each in graph.graph.nodes:
        if each in _ancestors(node):
            args, kwargs = fx.map_arg((each.args, each.kwargs), lambda one: known[one])
            known[each] = each.target(*args, **kwargs)
    return len(set(known[node].reshape(-1).tolist())) <= 1


def _is_elementwise(states: list[fx.Node], depending: list[fx.Node]) -> bool:
    shape = states[0].meta["val"].shape
    return all(
        node.op == "placeholder" or (is_pointwise(node) and all(value.shape == shape for value in _values_of(node)))
        for node in depending
    ) and all(node.meta["val"].shape == shape for node in states)  # fmt: skip


def _evaluate_hoisted(
    row: OneRow, bases: tuple[Base, ...], nodes: list[fx.Node], outside: list[Tensor], device: torch.device
) -> list[Tensor]:
    """By vmap over steps and rows; what depends on neither is computed once."""
    wanted = [base.node for base in bases]
    needed = {each for node in wanted for each in _ancestors(node)}
    order = [node for node in row.graph.graph.nodes if node in needed]
    steps = set(nodes[: row.inputs])

    have = dict(zip(nodes, outside, strict=True))
    rows = {node for node, has in zip(nodes, row.has_rows, strict=True) if has}
    changing = _reached([*steps, *rows], order)
    fixed = {node: have[node] for node in order if node in have and node not in changing}
    compute(row.graph, [node for node in order if node not in changing], fixed, device)
    moving = [node for node in order if node in changing and node in have]
    late = [node for node in wanted if node in changing and node not in have]

    def of_one(*values: Tensor) -> list[Tensor]:
        known = {**fixed, **dict(zip(moving, values, strict=True))}
        compute(row.graph, order, known, device)
        return [known[node] for node in late]

    found = {**fixed, **{node: have[node] for node in moving}}
    if late:
        found.update(zip(late, _over_steps_and_rows(of_one, [have[n] for n in moving], [n in steps for n in moving],
                                                    [n in rows for n in moving],
                                                    [(n in _reached(steps, order), n in _reached(rows, order)) for n in late],
                                                    row.batch_dims), strict=True))  # fmt: skip
    return [found[base.node] for base in bases]


def _over_steps_and_rows(
    function: Callable,
    tensors: list[Tensor],
    by_step: list[bool],
    by_row: list[bool],
    wanted: list[tuple[bool, bool]],
    ones: int,
) -> list[Tensor]:
    """``function`` of one row at one step, for all; results [L, rows, ...], without either where they do not depend on it."""
    prepared = [
        tensor.reshape(*tensor.shape[: step + 1], *(1,) * ones, *tensor.shape[step + 1 :]) if row else tensor
        for tensor, step, row in zip(tensors, by_step, by_row, strict=True)  # one row has dimensions of its own
    ]
    results: list[Tensor | None] = [None] * len(wanted)
    for steps, rows in dict.fromkeys(wanted):
        at = [i for i, each in enumerate(wanted) if each == (steps, rows)]

        def some(*values: Tensor, at: list[int] = at) -> list[Tensor]:
            found = function(*values)
            return [found[i] for i in at]

        mapped, inner = some, prepared
        if rows:
            mapped = torch.vmap(mapped, tuple(0 if row else None for row in by_row))
        if steps:
            mapped = torch.vmap(mapped, tuple(0 if step else None for step in by_step))
        for i, value in zip(at, mapped(*inner), strict=True):
            results[i] = value
    return [each for each in results if each is not None]
