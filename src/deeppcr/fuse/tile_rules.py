"""Rules of operations on tiles, and a graph of them as code: ``rule(tiles, node, *arguments, **options)`` gives a tile, or several."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .expressions import NotCovered, Value
from .operations import ONE_NUMBER, interpreted, is_pointwise, name_of, pointwise
from .tangents import Combination, combined, has_lead, solid
from .tiles import MOST_SUMMED, Shape, Tile, Tiles, has_padding, padded

#: Numbers of the largest tile.
_MOST = 2**16
#: What leaves zeros zeros, of tiles only.
_KEEPS_ZEROS = {"add", "sub", "mul", "neg", "clone", "alias", "detach", "_to_copy", "convert_element_type", "tanh"}


def _shape_of(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


def _dims(dim: Any) -> list[int]:
    return [] if dim is None else [dim] if isinstance(dim, int) else list(dim)


def _sum(tiles: Tiles, node: fx.Node, a: Tile, dim: Any = None, *_: Any, **__: Any) -> Tile:
    if isinstance(a.value, Value) and a.value.kind != "real":
        a = replace(a, value=tiles.code.cast(a.value, "real"))
    return tiles.reduced(a, _dims(dim), _shape_of(node))


def _mean(tiles: Tiles, node: fx.Node, a: Tile, dim: Any = None, *_: Any, **__: Any) -> Tile:
    return _divided(tiles, _sum(tiles, node, a, dim), _count(a, dim))


def _count(a: Tile, dim: Any) -> int:
    dims = _dims(dim)
    return math.prod(a.shape[axis] for axis in dims) if dims else math.prod(a.shape)


def _divided(tiles: Tiles, a: Tile, number: float) -> Tile:
    return replace(a, value=tiles.code.div(a.value, float(number)))


def _kept(a: Tile, dim: Any) -> Shape:
    dims = {axis % len(a.shape) for axis in _dims(dim)} if _dims(dim) else set(range(len(a.shape)))
    return tuple(1 if axis in dims else size for axis, size in enumerate(a.shape))


def _variance(tiles: Tiles, a: Tile, dim: Any, correction: float | None, shape: Shape) -> Tile:
    count = _count(a, dim)
    mean = _divided(tiles, tiles.reduced(a, _dims(dim), _kept(a, dim)), count)
    away = tiles.code.sub(a.value, tiles.spread(mean, a.shape, a.lead))
    squares = Tile(tiles.code.mul(away, away), a.shape, a.lead)
    freedom = max(count - (1 if correction is None else correction), 0)
    return _divided(tiles, tiles.reduced(squares, _dims(dim), shape), freedom)


def _var(
    tiles: Tiles, node: fx.Node, a: Tile, dim: Any = None, *_: Any, correction: float | None = 1, **__: Any
) -> Tile:
    return _variance(tiles, a, dim, correction, _shape_of(node))


def _var_mean(tiles: Tiles, node: fx.Node, a: Tile, dim: Any = None, *_: Any, correction: float | None = 1, **__: Any):
    variance, mean = (tuple(each.shape) for each in node.meta["val"])
    return [_variance(tiles, a, dim, correction, variance),
            _divided(tiles, tiles.reduced(a, _dims(dim), mean), _count(a, dim))]  # fmt: skip


def _extreme(function: str, neutral: float) -> Callable:
    def rule(tiles: Tiles, node: fx.Node, a: Tile, dim: Any = None, *_: Any) -> Tile:
        found = tiles.reduced(a, _dims(dim), _shape_of(node), function, neutral)
        if not isinstance(found.value, Value) or found.value.kind != "real":
            return found
        # Triton's skips what is not a number, as PyTorch's does not.
        code = tiles.code
        wrong = replace(a, value=code.cast(code.compare("!=", a.value, a.value), "real"), clean=False)
        any_wrong = tiles.reduced(wrong, _dims(dim), _shape_of(node), "max", 0.0)
        value = code.where(code.compare(">", any_wrong.value, 0.0), math.nan, found.value)
        return replace(found, value=value, clean=False)

    return rule


def _norm(tiles: Tiles, node: fx.Node, a: Tile, order: float = 2, dim: Any = None, *_: Any, **__: Any) -> Tile:
    if order != 2:
        raise NotCovered("aten.linalg_vector_norm but for the Euclidean one is not covered")
    squares = replace(a, value=tiles.code.mul(a.value, a.value), clean=a.clean)
    found = tiles.reduced(squares, _dims(dim), _shape_of(node))
    return replace(found, value=tiles.code.call("sqrt", found.value))


def _mm(tiles: Tiles, node: fx.Node, a: Tile, b: Tile) -> Tile:
    return tiles.product(a, b, _shape_of(node))


def _bmm(tiles: Tiles, node: fx.Node, a: Tile, b: Tile) -> Tile:
    if a.shape[0] == 1:
        return tiles.product(replace(a, shape=a.shape[1:]), replace(b, shape=b.shape[1:]), _shape_of(node))
    batch, i, k, j = *a.shape, b.shape[2]
    lead = a.lead or b.lead
    if math.prod(map(padded, (batch, i, k, j))) * (tiles.lead if lead else 1) > MOST_SUMMED:
        raise NotCovered(f"{batch} products of {i} x {k} and {k} x {j} numbers are not covered")
    if has_padding([k]):
        a, b = tiles.cleaned(a), tiles.cleaned(b)
    cube, a, b = (batch, i, k, j), tiles.full(a), tiles.full(b)
    left = tiles.spread(replace(a, shape=(batch, i, k, 1)), cube, lead)
    right = tiles.spread(replace(b, shape=(batch, 1, k, j)), cube, lead)
    terms = Tile(tiles.code.mul(left, right), cube, lead, clean=True)
    return replace(tiles.reduced(terms, [2], _shape_of(node)), clean=False)


def _mv(tiles: Tiles, node: fx.Node, a: Tile, b: Tile) -> Tile:
    return tiles.product(a, replace(b, shape=(*b.shape, 1)), _shape_of(node))


def _added(rule: Callable) -> Callable:
    def added(tiles: Tiles, node: fx.Node, start: Tile, a: Tile, b: Tile, *, beta: float = 1, alpha: float = 1) -> Tile:
        product, shape, code = rule(tiles, node, a, b), _shape_of(node), tiles.code
        lead = product.lead or start.lead
        terms = [code.mul(beta, tiles.spread(start, shape, lead)), code.mul(alpha, tiles.spread(product, shape, lead))]
        clean = start.clean and product.clean and start.shape == shape
        return replace(tiles.whole(code.add(*terms), shape, [start, product]), clean=clean)

    return added


def _slice(
    tiles: Tiles, node: fx.Node, a: Tile, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tile:
    return tiles.taken(a, dim, list(range(a.shape[dim])[slice(start, end, step)]))


def _split(tiles: Tiles, node: fx.Node, a: Tile, sizes: Any, dim: int = 0) -> list[Tile]:
    found, at = [], 0
    for each in node.meta["val"]:
        found.append(tiles.taken(a, dim, list(range(at, at + each.shape[dim]))))
        at += each.shape[dim]
    return found


def _index_select(tiles: Tiles, node: fx.Node, a: Tile, dim: int, index: Tensor) -> Tile:
    return tiles.taken(a, dim, _constant(index).reshape(-1).tolist())


def _index(tiles: Tiles, node: fx.Node, a: Tile, indices: list[Any]) -> Tile:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or _constant(given[0][1]).ndim != 1 or given[0][1].dtype == torch.bool:
        raise NotCovered("an index of several tensors is not covered")
    return tiles.taken(a, given[0][0], [i % a.shape[given[0][0]] for i in given[0][1].tolist()])


def _index_put(
    tiles: Tiles, node: fx.Node, a: Tile, indices: list[Any], values: Tile, accumulate: bool = False
) -> Tile:
    """The derivative of an index: of numbers that all went to other places, or side by side."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) == 1 and _constant(given[0][1]).ndim == 1 and given[0][1].dtype != torch.bool:
        dim, size = given[0][0], a.shape[given[0][0]]
        places = [i % size for i in given[0][1].tolist()]
        values = tiles.expanded(values, (*a.shape[:dim], len(places), *a.shape[dim + 1 :]))
        nothing = not isinstance(a.value, Value) and a.value == 0
        if nothing and sorted(places) == list(range(size)):
            return tiles.taken(values, dim, [places.index(i) for i in range(size)])
        if len(places) > 1 and places[1] < places[0]:
            values, places = tiles.taken(values, dim, list(range(len(places)))[::-1]), places[::-1]
        step = places[1] - places[0] if len(places) > 1 else 1
        if (nothing or not accumulate) and step > 0 and places == list(range(places[0], places[-1] + 1, step)):
            return tiles.replaced(a, values, dim, places[0], places[-1] + 1, step)
    raise NotCovered("aten.index_put without a pattern is not covered")


def _constant(index: Any) -> Tensor:
    if not isinstance(index, Tensor):
        raise NotCovered("an index that is computed is not covered")
    return index


def _flip(tiles: Tiles, node: fx.Node, a: Tile, dims: Sequence[int]) -> Tile:
    for dim in dims:
        a = tiles.taken(a, dim, list(range(a.shape[dim]))[::-1])
    return a


def _slice_scatter(
    tiles: Tiles, node: fx.Node, a: Tile, source: Tile, dim: int = 0, start=None, end=None, step: int = 1
) -> Tile:
    start, end, _ = slice(start, end).indices(a.shape[dim])
    return tiles.replaced(a, source, dim, start, end, step)


def _pad(tiles: Tiles, node: fx.Node, a: Tile, pad: Sequence[int], value: float = 0) -> Tile:
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = len(a.shape) - 1 - number
        if before < 0 or after < 0:  # which cuts
            a = tiles.taken(a, dim, list(range(a.shape[dim]))[max(0, -before) : a.shape[dim] - max(0, -after)])
            before, after = max(0, before), max(0, after)
        shape = (*a.shape[:dim], before + a.shape[dim] + after, *a.shape[dim + 1 :])
        a = tiles.replaced(Tile(float(value), shape), a, dim, before, before + a.shape[dim])
    return a


#: What tracing leaves of PyTorch's operations, beside those that go number by number.
_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("view", "squeeze", "unsqueeze"), lambda tiles, node, a, *_, **__: tiles.reshaped(a, _shape_of(node))
    ),
    "addmm": _added(_mm),
    "addmv": _added(_mv),
    "amax": _extreme("max", -math.inf),
    "amin": _extreme("min", math.inf),
    "bmm": _bmm,
    "cat": lambda tiles, node, parts, dim=0: tiles.joined(parts, dim, _shape_of(node)),
    "constant_pad_nd": _pad,
    "expand": lambda tiles, node, a, *_, **__: tiles.expanded(a, _shape_of(node)),
    "flip": _flip,
    "index": _index,
    "index_put": _index_put,
    "index_select": _index_select,
    "linalg_vector_norm": _norm,
    "mean": _mean,
    "mm": _mm,
    "permute": lambda tiles, node, a, dims: tiles.permuted(a, dims),
    "select": lambda tiles, node, a, dim, index: tiles.picked(a, dim, index, _shape_of(node)),
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "split_with_sizes": _split,
    "sum": _sum,
    "var": _var,
    "var_mean": _var_mean,
}


def evaluate(graph: fx.GraphModule, inputs: list[Tile], tiles: Tiles) -> list[Tile]:
    """Write a graph as code on tiles.

    Args:
        graph: of operations of aten and prims, with tensors in ``meta["val"]``
        inputs: a tile for each placeholder

    Returns:
        a tile for each output

    Raises:
        NotCovered: an operation has no rule, or a tile is too large
    """

    def called(node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Any:
        return _called(node, args, kwargs, tiles)

    found = interpreted(graph.graph, inputs, partial(getattr, graph), called)
    return [tiles.tile(solid(tiles, each)) for each in found]


def _called(node: fx.Node, args: Any, kwargs: dict[str, Any], tiles: Tiles) -> Any:
    if node.target is operator.getitem:
        return args[0][args[1]]
    if not any(isinstance(each, Tile | Combination) for each in pytree.tree_leaves((args, kwargs))):
        return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    name = name_of(node.target).split(".")[-1]
    result = node.meta.get("val")
    if isinstance(result, Tensor) and math.prod(map(padded, result.shape)) > _MOST:
        raise NotCovered(f"a tensor of {result.numel()} numbers inside a step is not covered")
    if name in ("expand", "view") and isinstance(args[0], Combination) and args[0].shape == _shape_of(node):
        return args[0]
    if is_pointwise(node):
        return _pointwise(node, args, name, tiles)
    if name in ONE_NUMBER:
        number = ONE_NUMBER[name](args)
        return Tile(float(number), tuple(result.shape))  # pyright: ignore[reportOptionalMemberAccess]
    rule = _RULES.get(name)
    if rule is None:
        raise NotCovered(f"{name_of(node.target)} is not covered")
    args = pytree.tree_map(partial(solid, tiles), args)
    options = {key: value for key, value in kwargs.items() if key in ("alpha", "beta", "correction", "step")}
    converted = pytree.tree_map_only(Tensor, lambda each: tiles.tile(each) if each.is_floating_point() else each, args)
    return rule(tiles, node, *converted, **options)


def _pointwise(node: fx.Node, args: Any, name: str, tiles: Tiles) -> Tile | Combination:
    shape = _shape_of(node)
    if any(map(has_lead, args)) and "alpha" not in node.kwargs:
        together = combined(tiles, name, shape, list(args))
        if together is not None:
            return together
    given = [tiles.tile(each) if isinstance(each, Tile | Tensor) else each for each in map(partial(solid, tiles), args)]
    found = [each for each in given if isinstance(each, Tile)]
    lead = any(each.lead for each in found)
    values = [tiles.spread(each, shape, lead) if isinstance(each, Tile) else each for each in given]
    numbers = [each for each in given if not isinstance(each, Tile) or not isinstance(each.value, Value)]
    keeps = name in _KEEPS_ZEROS and (not numbers or name == "mul" or len(given) == 1)
    varying = [each for each in found if isinstance(each.value, Value)]
    clean = keeps and bool(varying) and all(each.clean and each.shape == shape for each in varying)
    return replace(tiles.whole(pointwise(node, values, tiles.code), shape, found), clean=clean)
