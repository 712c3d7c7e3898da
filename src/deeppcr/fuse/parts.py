"""A step on one row, taken apart: what kernels compute, what they read, what is computed before them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .expressions import NotCovered
from .hoisted import ancestors, compute, hoisted, reached
from .operations import is_pointwise
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
        holders = self.row.outside_nodes
        if all(base.node in holders for base in self.bases):
            return [holders.index(base.node) for base in self.bases]
        return None

    @cached_property
    def shown(self) -> list[tuple[bool, bool]]:
        """Of every base whether its leaves do not overlap, and whether each of its numbers belongs to one."""
        taken: list[list[int]] = [[] for _ in self.bases]
        for leaf in self.leaves:
            count = math.prod(leaf.shape)
            dims = [(count, leaf.spacing if self.elementwise else 1)]
            if self.tiled:
                dims = list(zip(leaf.shape, leaf.strides, strict=True))
            steps = [range(0, size * stride, stride) if stride else [0] * size for size, stride in dims]
            taken[leaf.base] += [leaf.offset + sum(each) for each in product(*steps)]
        return [
            (len(set(places)) == len(places), len(set(places)) == math.prod(base.shape))
            for places, base in zip(taken, self.bases, strict=True)
        ]

    @property
    def given_places(self) -> list[int] | None:
        """Which of the inputs and closures the bases are, as they are; None where something has to be done to some of them."""
        return self._places if self.row.batch_dims <= 1 else None

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
        return hoisted(row, [base.node for base in self.bases], outside, device)


def take_apart(row: OneRow, narrow: int, widest: int) -> Parts:
    """Find what depends on the state, and what of the rest is computed before the kernels.

    Args:
        narrow: up to this width, numbers of a step that mixes them are those of a lane
        widest: up to this one they are tiles
    """
    states = row.state_nodes
    width = sum(node.meta["val"].numel() for node in states)
    elementwise = _is_elementwise(states, reached(states, row.nodes))
    if not elementwise and width > widest:
        raise NotCovered(f"a step that mixes {width} numbers is not covered (up to {widest})")
    tiled = not elementwise and width > narrow
    return _taken_apart(pushed(row) if tiled else row, elementwise, tiled)


def _taken_apart(row: OneRow, elementwise: bool, tiled: bool) -> Parts:
    nodes, states = row.nodes, row.state_nodes
    depends = reached(states, nodes)
    by_step, by_row = (reached(sources, nodes) for sources in row.sources())
    shape = tuple(states[0].meta["val"].shape)

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
        return all(_is_few(each) for each in ancestors(node))

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
        whole = shape if elementwise else tuple(_values_of(node)[0].shape)
        if elementwise or tiled:
            source, offset, strides = _seen_through(node, whole, flat=elementwise)
        base = base_of(source)
        value = bases[base]
        how = (value.dtype, value.per_step, value.per_row, offset, strides[0] if strides else 0, strides)
        found.append(Leaf(base, node, whole, *how))
    given, order = [*states, *(leaf.node for leaf in found)], [node for node in nodes if node in inside]

    def core(*values: Tensor) -> list[Tensor]:
        return compute(row.graph, order, dict(zip(given, values, strict=True)), torch.device("cpu"))

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
            int(places.select(dim, 1).reshape(-1)[0]) - first if size > 1 else 1
            for dim, size in enumerate(places.shape)
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
    given = [ancestors(each) for node in picking for each in node.all_input_nodes]
    return {each for every in given if all(one.op != "placeholder" for one in every) for each in every}


_PICKING = {torch.ops.aten.index, torch.ops.aten.index_select, torch.ops.aten.index_put}


def _is_constant(node: fx.Node, graph: fx.GraphModule) -> bool:
    """Whether a node is known while the code is written: indices, or one number."""
    needed = ancestors(node)
    if any(each.op in ("placeholder", "get_attr") for each in needed):
        return False
    if not _values_of(node)[0].is_floating_point():
        return True
    known: dict[fx.Node, Any] = {}
    compute(graph, [each for each in graph.graph.nodes if each in needed], known, torch.device("cpu"))
    return len(set(known[node].reshape(-1).tolist())) <= 1


def _is_elementwise(states: list[fx.Node], depending: Iterable[fx.Node]) -> bool:
    shape = states[0].meta["val"].shape
    return all(
        node.op == "placeholder" or (is_pointwise(node) and all(value.shape == shape for value in _values_of(node)))
        for node in depending
    ) and all(node.meta["val"].shape == shape for node in states)  # fmt: skip
