"""Slices of what a step computes are pushed back to what it reads, since tiles cannot be sliced.

``(h @ W).chunk(3)`` becomes three products with slices of W, which are read where they lie. A product with ``cat((h, x))`` becomes the
sum of two. What stays is left to the tiles, which move numbers at some cost.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode

from .hoisted import reached
from .operations import is_pointwise
from .trace import OneRow

_aten = torch.ops.aten


def pushed(row: OneRow) -> OneRow:
    """The same step, with slices as far back as they go."""
    graph = fx.Graph()
    found = graph.graph_copy(row.graph.graph, {})
    graph.output(found)
    moved = replace(row, graph=fx.GraphModule(row.graph, graph))
    rewriter = _Rewriter(graph)
    changed = True
    while changed:
        depends = reached(moved.state_nodes, graph.nodes)
        rewritten = [_rewritten(node, rewriter) for node in list(graph.nodes) if node in depends and node.users]
        changed = any(rewritten)
        graph.eliminate_dead_code()
    graph.lint()
    moved.graph.recompile()
    return moved


class _Rewriter:
    """Makes nodes with what they would compute."""

    def __init__(self, graph: fx.Graph):
        self._graph = graph
        self._mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])

    def make(self, before: fx.Node, target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        with self._graph.inserting_before(before):
            node = self._graph.call_function(target, args, kwargs)
        values, options = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
        with self._mode or torch.no_grad():
            node.meta["val"] = target(*values, **options)
        return node

    def slice(self, before: fx.Node, node: fx.Node, dim: int, start: int, end: int, ndim: int = 0) -> fx.Node:
        """Of a tensor that is broadcast to ``ndim`` dimensions, what meets a slice."""
        dim -= max(0, ndim - _value(node).ndim)
        if dim < 0 or (start, end) == (0, _value(node).shape[dim]) or (ndim and _value(node).shape[dim] == 1):
            return node
        return self.make(before, _aten.slice.Tensor, node, dim, start, end)


def _value(node: fx.Node) -> Tensor:
    return node.meta["val"]


def _nodes(node: fx.Node) -> list[fx.Node]:
    """Those that it is given."""
    return [each for each in node.args if isinstance(each, fx.Node)]


def _rewritten(node: fx.Node, rewriter: _Rewriter) -> bool:
    """Whether a node was replaced by others."""
    replacement = _without_split(node, rewriter) or _without_slice(node, rewriter) or _without_cat(node, rewriter)
    if replacement is None:
        return False
    node.replace_all_uses_with(replacement)
    return True


def _without_split(node: fx.Node, rewriter: _Rewriter) -> fx.Node | None:
    """A part of ``split`` or ``unbind`` as a slice of its own."""
    if node.target is not operator.getitem:
        return None
    source, place = node.args
    if not isinstance(source, fx.Node) or source.target not in _SPLITS:
        return None
    assert isinstance(place, int)
    whole, dim = source.args[0], source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", 0)
    assert isinstance(whole, fx.Node)
    dim = int(dim) % _value(whole).ndim  # pyright: ignore[reportArgumentType]
    start = sum(each.shape[dim] for each in source.meta["val"][:place])
    return rewriter.slice(node, whole, dim, start, start + _value(node).shape[dim])


_SPLITS = {_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unsafe_split.Tensor}


def _without_slice(node: fx.Node, rewriter: _Rewriter) -> fx.Node | None:
    """A slice of what is computed, as computed from slices."""
    if node.target is not _aten.slice.Tensor or len(node.args) > 4 or "step" in node.kwargs:
        return None
    source, dim, start, end = _bounds(node)
    if source.op != "call_function":
        return None

    def cut(each: fx.Node, at: int, broadcast: bool = False) -> fx.Node:
        return rewriter.slice(node, each, at, start, end, _value(source).ndim if broadcast else 0)

    if source.target in (_aten.mm.default, _aten.addmm.default):
        *added, a, b = _nodes(source)
        more = [cut(each, dim, broadcast=True) for each in added]
        factors = (cut(a, 0), b) if dim == 0 else (a, cut(b, 1))
        return rewriter.make(node, source.target, *more, *factors, **source.kwargs)
    if source.target is _aten.permute.default:
        (inner,), dims = _nodes(source), source.args[1]
        return rewriter.make(node, _aten.permute.default, cut(inner, dims[dim] % _value(inner).ndim), dims)  # pyright: ignore
    if source.target is _aten.cat.default:
        return _part_of_cat(source, dim, start, end)
    if is_pointwise(source):
        tensors = {each for each in _nodes(source) if isinstance(each.meta.get("val"), Tensor)}
        args = [cut(each, dim, broadcast=True) if each in tensors else each for each in source.args]
        return rewriter.make(node, source.target, *args, **source.kwargs)  # pyright: ignore[reportArgumentType]
    return None


def _bounds(node: fx.Node) -> tuple[fx.Node, int, int, int]:
    source, dim, start, end = (*node.args, *(0, None, None)[len(node.args) - 1 :])
    assert isinstance(source, fx.Node)
    dim = int(dim) % _value(source).ndim  # pyright: ignore[reportArgumentType]
    first, last, _ = slice(start, end).indices(_value(source).shape[dim])  # pyright: ignore[reportArgumentType]
    return source, dim, first, last


def _part_of_cat(source: fx.Node, dim: int, start: int, end: int) -> fx.Node | None:
    parts: Any = source.args[0]
    along = int(source.args[1]) if len(source.args) > 1 else int(source.kwargs.get("dim", 0))  # pyright: ignore
    if along % _value(source).ndim != dim:
        return None
    at = 0
    for part in parts:
        size = _value(part).shape[dim]
        if (at, at + size) == (start, end):
            return part
        at += size
    return None


def _without_cat(node: fx.Node, rewriter: _Rewriter) -> fx.Node | None:
    """A product with tensors one beside the other, as a sum of products."""
    if node.target is not _aten.mm.default:
        return None
    a, b = _nodes(node)
    for wide, dim in ((a, 1), (b, 0)):
        args: Any = wide.args
        if wide.target is not _aten.cat.default or (args[1] if len(args) > 1 else 0) % 2 != dim:
            continue
        total, at = None, 0
        for part in args[0]:
            size = _value(part).shape[dim]
            beside = rewriter.slice(node, b if dim else a, 1 - dim, at, at + size)
            pair = (part, beside) if dim else (beside, part)
            term = rewriter.make(node, _aten.mm.default, *pair)
            total = term if total is None else rewriter.make(node, _aten.add.Tensor, total, term)
            at += size
        return total
    return None
