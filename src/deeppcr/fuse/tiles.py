"""A graph of PyTorch's operations becomes code on tiles: the vectors and matrices of one row, in the registers of one program.

A tile has the dimensions of its tensor that are larger than one, each padded to a power of two. One of many tangents (or
cotangents) has one more in front, ``LEAD`` of them: so the graph of one tangent, read in this way, computes them all, and products with
weights are products of matrices. What goes number by number follows the rules of scalars; here is the rest.

What stands in the padding is anything, unless a tile is ``clean``: then zeros. Sums see to it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..launch import next_power_of_2
from .expressions import Code, Kind, NotCovered, Scalar, Value
from .operations import is_pointwise, name_of, pointwise
from .scalars import COPIES

Shape = tuple[int, ...]

#: Numbers of the largest tile that a product may be summed up in where the matrix units do not take it.
_MOST_SUMMED = 2**14
#: The matrix units take tiles from this size on.
_UNITS = 16
#: Numbers of the largest tile.
_MOST = 2**16
#: What leaves zeros zeros, of tiles only.
_KEEPS_ZEROS = {"add", "sub", "mul", "neg", "clone", "alias", "detach", "_to_copy", "convert_element_type", "tanh"}


@dataclass(frozen=True)
class Tile:
    """A tensor of one row as a tile.

    Attributes:
        value: what it is called; or a number, that all of its numbers are
        shape: of the tensor
        lead: one for each tangent
        clean: its padding is zeros
    """

    value: Scalar
    shape: Shape
    lead: bool = False
    clean: bool = False

    @property
    def axes(self) -> list[int]:
        """The dimensions that the tile has, beside the tangents'."""
        return [axis for axis, size in enumerate(self.shape) if size > 1]

    @property
    def sizes(self) -> list[int]:
        return [self.shape[axis] for axis in self.axes]

    def at(self, axis: int) -> int:
        """Where a dimension of the tensor stands in the tile."""
        return self.lead + self.axes.index(axis)


@dataclass(frozen=True)
class Combination:
    """A tensor of tangents as a sum, each term a tile of tangents times a tile that has none.

    Factors of rows meet here before tangents are touched, which are so many more.

    Attributes:
        shape: of the tensor
        terms: (factor, tangents)
    """

    shape: Shape
    terms: tuple[tuple[Tile, Tile], ...]


def padded(size: int) -> int:
    return next_power_of_2(size)


def has_padding(sizes: Sequence[int]) -> bool:
    return any(padded(size) != size for size in sizes)


class Tiles:
    """Writes operations on tiles as lines of a code.

    Attributes:
        code: what gets the lines
        lead: tangents at once; all of a program's tiles have as many
    """

    def __init__(self, code: Code, lead: int):
        self.code, self.lead = code, lead

    # Places.

    def places(self, size: int) -> Value:
        """0, 1, ... of a padded dimension."""
        return self.code.emit(f"tl.arange(0, {padded(size)})", "int")

    def along(self, size: int, at: int, rank: int) -> Value:
        """The same along one of several dimensions."""
        places = self.places(size)
        return places if rank == 1 else self._indexed(places, [":" if i == at else "None" for i in range(rank)])

    def _indexed(self, value: Value, index: list[str]) -> Value:
        return self.code.emit(f"{value.name}[{', '.join(index)}]", value.kind, value)

    def inside(self, sizes: Sequence[int], lead: bool = False) -> Scalar:
        """Whether a number of a tile is one of its tensor's."""
        rank, found = len(sizes) + lead, True
        for at, size in enumerate(sizes):
            if padded(size) != size:
                found = self.code.both(found, self.code.compare("<", self.along(size, lead + at, rank), size))
        return found

    def offsets(self, sizes: Sequence[int], strides: Sequence[int], lead: bool = False) -> Scalar:
        """How far numbers of a tile lie behind its first."""
        rank, found = len(sizes) + lead, 0
        for at, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            found = self.code.add(found, self.code.mul(self.along(size, lead + at, rank), stride))
        return found

    # Shapes.

    def spread(self, tile: Tile, shape: Shape, lead: bool) -> Scalar:
        """A tile such that it meets others of a shape number by number."""
        if not isinstance(tile.value, Value) or (not tile.axes and not tile.lead):
            return tile.value
        behind = len(shape) - len(tile.shape)
        have = {axis + behind for axis in tile.axes}
        index = [":" if tile.lead else "None"] if lead else []
        index += [":" if axis in have else "None" for axis, size in enumerate(shape) if size > 1 or axis in have]
        return tile.value if set(index) <= {":"} else self._indexed(tile.value, index)

    def cleaned(self, tile: Tile) -> Tile:
        if tile.clean or not has_padding(tile.sizes):
            return tile
        if not isinstance(tile.value, Value):
            return self.full(tile)
        value = self.code.where(self.inside(tile.sizes, tile.lead), tile.value, 0)
        return replace(tile, value=value, clean=True)

    def full(self, tile: Tile) -> Tile:
        """A number as a tile, zero in its padding."""
        if isinstance(tile.value, Value) and (tile.axes or tile.lead):
            return tile
        dims = self.dims(tile)
        text = f"tl.full(({', '.join(dims)},), {self.code.text(tile.value)}, REAL)"
        operands = (tile.value,) if isinstance(tile.value, Value) else ()
        return self.cleaned(replace(tile, value=self.code.emit(text, "real", *operands), clean=False))

    def dims(self, tile: Tile) -> list[str]:
        return [*(["LEAD"] if tile.lead else []), *(str(padded(size)) for size in tile.sizes)]

    def reshaped(self, tile: Tile, shape: Shape) -> Tile:
        result = replace(tile, shape=shape)
        if result.sizes == tile.sizes or not isinstance(tile.value, Value):
            return result
        if has_padding(tile.sizes) or has_padding(result.sizes):
            raise NotCovered(f"a view of {tile.shape} as {shape} is not covered")
        return replace(result, value=self._emit(f"tl.reshape({{}}, ({', '.join(self.dims(result))},))", tile))

    def permuted(self, tile: Tile, dims: Sequence[int]) -> Tile:
        dims = [dim % len(tile.shape) for dim in dims]
        result = replace(tile, shape=tuple(tile.shape[dim] for dim in dims))
        order = [tile.at(dim) for dim in dims if tile.shape[dim] > 1]
        order = [*range(tile.lead), *order]
        if order == sorted(order) or not isinstance(tile.value, Value):
            return result
        return replace(result, value=self._emit(f"tl.permute({{}}, ({', '.join(map(str, order))},))", tile))

    def _emit(self, text: str, *tiles: Tile, kind: Kind | None = None) -> Value:
        values = [tile.value for tile in tiles]
        assert isinstance(values[0], Value)
        return self.code.emit(text.format(*map(self.code.text, values)), kind or values[0].kind, *values)

    # Tangents.

    def solid(self, each: Any) -> Any:
        """A combination as one tile."""
        if not isinstance(each, Combination):
            return each
        total: Scalar = 0.0
        for factor, tangents in each.terms:
            value = self.code.mul(self.spread(tangents, each.shape, True), self.spread(factor, each.shape, True))
            total = self.code.add(total, value)
        clean = len(each.terms) == 1 and each.terms[0][0].value == 1 and each.terms[0][1].clean
        return Tile(total, each.shape, lead=True, clean=clean)

    def combined(self, name: str, shape: Shape, args: list[Any]) -> Combination | None:
        """What an operation that is linear in tangents makes of them; None where it is not."""
        tangents = [isinstance(each, Combination) or (isinstance(each, Tile) and each.lead) for each in args]
        if name in ("neg", *COPIES) and len(args) == 1:
            return self._scaled(args[0], Tile(-1.0 if name == "neg" else 1.0, ()), shape)
        if name == "mul" and sum(tangents) == 1:
            one, other = args if tangents[0] else args[::-1]
            return self._scaled(one, _as_tile(other), shape)
        if name == "div" and tangents == [True, False]:
            other = _as_tile(args[1])
            if isinstance(other.value, Value):
                return self._scaled(args[0], replace(other, value=self.code.div(1.0, other.value), clean=False), shape)
            return self._scaled(args[0], Tile(1.0 / other.value, ()), shape)
        if name in ("add", "sub") and len(args) == 2:
            return self._summed(args, [1.0, -1.0 if name == "sub" else 1.0], shape)
        if name == "where" and not tangents[0]:
            condition = _as_tile(args[0])
            chosen = self._chosen(condition, 1.0, 0.0), self._chosen(condition, 0.0, 1.0)
            parts = [self._scaled(each, factor, shape) if self._is_zero(each) or isinstance(each, Combination | Tile) and _has_lead(each) else None
                     for each, factor in zip(args[1:], chosen, strict=True)]  # fmt: skip
            return None if None in parts else self._summed(parts, [1.0, 1.0], shape)
        return None

    def _chosen(self, condition: Tile, yes: float, no: float) -> Tile:
        return replace(condition, value=self.code.where(condition.value, yes, no), clean=False)

    @staticmethod
    def _is_zero(each: Any) -> bool:
        value = each.value if isinstance(each, Tile) else each
        return isinstance(value, int | float) and value == 0

    def _terms(self, each: Any) -> tuple[tuple[Tile, Tile], ...]:
        if isinstance(each, Combination):
            return each.terms
        return () if self._is_zero(each) else ((Tile(1.0, ()), each),)

    def _scaled(self, each: Any, factor: Tile, shape: Shape) -> Combination:
        return Combination(shape, tuple((self._times(own, factor), tangents) for own, tangents in self._terms(each)))

    def _times(self, a: Tile, b: Tile) -> Tile:
        shape = tuple(torch.broadcast_shapes(a.shape, b.shape))
        return Tile(self.code.mul(self.spread(a, shape, False), self.spread(b, shape, False)), shape)

    def _summed(self, parts: list[Any], signs: list[float], shape: Shape) -> Combination | None:
        if not all(_has_lead(each) or self._is_zero(each) for each in parts):
            return None
        found: dict[Tile, Tile] = {}
        for each, sign in zip(parts, signs, strict=True):
            for factor, tangents in self._scaled(each, Tile(sign, ()), shape).terms:
                known = found.get(tangents)
                if known is not None:
                    common = tuple(torch.broadcast_shapes(known.shape, factor.shape))
                    values = [self.spread(one, common, False) for one in (known, factor)]
                    factor = Tile(self.code.add(*values), common)
                found[tangents] = factor
        return Combination(shape, tuple((factor, tangents) for tangents, factor in found.items()))

    # Sums.

    def reduced(self, tile: Tile, dims: Sequence[int], shape: Shape, function: str = "sum", neutral: float = 0) -> Tile:
        """Over some dimensions: what is in the padding does not count."""
        axes = [dim % len(tile.shape) for dim in dims if tile.shape] if dims else list(range(len(tile.shape)))
        axes = [axis for axis in axes if tile.shape[axis] > 1]
        if not isinstance(tile.value, Value):
            count = math.prod(tile.shape[axis] for axis in axes)
            return Tile(tile.value * count if function == "sum" else tile.value, shape, tile.lead)
        if not axes:
            return replace(tile, shape=shape)
        if neutral != 0 or not tile.clean:
            needed = [tile.shape[axis] if axis in axes else padded(tile.shape[axis]) for axis in tile.axes]
            mask = self.inside(needed, tile.lead) if has_padding(needed) else True
            tile = replace(tile, value=self.code.where(mask, tile.value, self.code.cast(neutral, tile.value.kind)))  # pyright: ignore[reportAttributeAccessIssue]
        for at in sorted((tile.at(axis) for axis in axes), reverse=True):
            tile = replace(tile, value=self._emit(f"tl.{function}({{}}, {at})", tile))
        return Tile(tile.value, shape, tile.lead, clean=tile.clean and function == "sum")

    def product(self, a: Tile, b: Tile, shape: Shape) -> Tile:
        """Of matrices [i, k] and [k, j]; of tangents with something that has none."""
        if a.lead and b.lead:
            raise NotCovered("a product of tangents is not covered")
        (i, k), j = a.shape, b.shape[1]
        lead = a.lead or b.lead
        if not isinstance(a.value, Value) or not isinstance(b.value, Value):
            if any(not isinstance(each.value, Value) and each.value == 0 for each in (a, b)):
                return Tile(0.0, shape, lead)
            a, b = self.full(a), self.full(b)
        if k == 1:
            value = self.code.mul(self.spread(a, (i, j), lead), self.spread(b, (i, j), lead))
            return Tile(value, shape, lead, a.clean and b.clean)
        if has_padding([k]):
            a, b = self.cleaned(a), self.cleaned(b)
        elif b.lead and j == 1 or (b.lead and i > 1):
            pass
        clean = a.clean and b.clean
        if lead and min(map(padded, (k, j if a.lead else i))) >= _UNITS and (j if a.lead else i) > 1:
            return Tile(self._by_units(a, b), shape, lead, clean)
        if not lead and min(map(padded, (i, k, j))) >= _UNITS:
            return Tile(self._emit("tl.dot({}, {}, input_precision=PRECISION)", a, b), shape, lead, clean)
        numbers = math.prod(map(padded, (i, k, j))) * (self.lead if lead else 1)
        if numbers > _MOST_SUMMED:
            raise NotCovered(f"a product of {i} x {k} and {k} x {j} numbers is not covered")
        # Number by number, with k between i and j.
        cube = (i, k, j)
        left = self.spread(replace(a, shape=(i, k, 1)), cube, lead)
        right = self.spread(replace(b, shape=(1, k, j)), cube, lead)
        terms = Tile(self.code.mul(left, right), cube, lead, clean)
        if terms.lead and not isinstance(terms.value, Value):
            return Tile(terms.value, shape, lead)
        return replace(self.reduced(replace(terms, clean=True), [1], (i, j)), shape=shape, clean=clean)

    def _by_units(self, a: Tile, b: Tile) -> Scalar:
        """A product with tangents on the matrix units: those of all rows of a matrix at once."""
        if b.lead:  # as the transpose of the product of the transposes
            turned = Tile(self._by_units(self.permuted(b, [1, 0]), self.permuted(a, [1, 0])), (b.shape[1], a.shape[0]), lead=True)
            return self.permuted(turned, [1, 0]).value
        (i, k), j = a.shape, b.shape[1]
        if i == 1:
            return self._emit("tl.dot({}, {}, input_precision=PRECISION)", a, b)
        flat = replace(a, value=self._emit(f"tl.reshape({{}}, (LEAD * {padded(i)}, {padded(k)}))", a))
        found = replace(flat, value=self._emit("tl.dot({}, {}, input_precision=PRECISION)", flat, b))
        return self._emit(f"tl.reshape({{}}, (LEAD, {padded(i)}, {padded(j)}))", found)

    # Numbers that change their places.

    def taken(self, tile: Tile, axis: int, index: list[int]) -> Tile:
        """Those at some places along a dimension."""
        axis %= len(tile.shape)
        shape = (*tile.shape[:axis], len(index), *tile.shape[axis + 1 :])
        if index == list(range(tile.shape[axis])) or not isinstance(tile.value, Value):
            return replace(tile, shape=shape, clean=tile.clean and isinstance(tile.value, Value))
        if tile.shape[axis] == 1:
            return self.expanded(tile, shape)
        if len(index) == 1:
            return self.picked(tile, axis, index[0], shape)
        return self._gathered(tile, axis, self._formula(index, tile.shape[axis]), len(index))

    def _formula(self, index: list[int], size: int) -> Scalar:
        """Places as a formula of 0, 1, ...: in steps, and around where they go beyond the end."""
        first, step, count = index[0], index[1] - index[0], len(index)
        for around in (step, step + size, step - size):
            if all((first + around * j) % size == index[j] for j in range(count)):
                places, code = self.places(count), self.code
                formula = code.add(code.mul(places, around), first)
                straight = all(0 <= first + around * j < size for j in range(count))
                if not straight:
                    turns = 1 + abs(around) * padded(count) // size
                    formula = code.emit(f"({code.text(formula)} + {turns * size}) % {size}", "int", formula)
                return formula
        raise NotCovered("an index without a pattern is not covered")

    def _gathered(self, tile: Tile, axis: int, index: Scalar, count: int) -> Tile:
        at, size, code = tile.at(axis), tile.shape[axis], self.code
        shape = (*tile.shape[:axis], count, *tile.shape[axis + 1 :])
        assert isinstance(index, Value)
        index = code.emit(f"tl.minimum(tl.maximum({index.name}, 0), {padded(size) - 1})", "int", index)
        dims = [*(["LEAD"] if tile.lead else []), *(str(padded(n)) for n in tile.sizes)]
        dims[at] = str(padded(count))
        spots = [":" if i == at else "None" for i in range(len(dims))]
        places = index if len(dims) == 1 else self._indexed(index, spots)
        wide = places if len(dims) == 1 else code.emit(f"tl.broadcast_to({places.name}, ({', '.join(dims)},))", "int", places)
        assert isinstance(tile.value, Value)
        value = code.emit(f"tl.gather({tile.value.name}, {wide.name}.to(tl.int32), {at})", tile.value.kind, tile.value, wide)
        return Tile(value, shape, tile.lead)

    def picked(self, tile: Tile, axis: int, place: int, shape: Shape) -> Tile:
        """The number at one place along a dimension."""
        axis %= len(tile.shape)
        if tile.shape[axis] == 1 or not isinstance(tile.value, Value):
            return replace(tile, shape=shape)
        at, rank = tile.at(axis), len(tile.axes) + tile.lead
        here = self.code.compare("==", self.along(tile.shape[axis], at, rank), place % tile.shape[axis])
        chosen = replace(tile, value=self.code.where(here, tile.value, self.code.cast(0, tile.value.kind)))
        return Tile(self._emit(f"tl.sum({{}}, {at})", chosen, kind=tile.value.kind), shape, tile.lead, tile.clean)

    def expanded(self, tile: Tile, shape: Shape) -> Tile:
        """Repeated along dimensions of one."""
        target = Tile(tile.value, shape, tile.lead)
        if target.sizes == tile.sizes or not isinstance(tile.value, Value):
            return target
        value = self.spread(tile, shape, tile.lead)
        dims = self.dims(target)
        if not tile.axes and not tile.lead:
            return replace(target, value=self.code.emit(f"tl.full(({', '.join(dims)},), 0, REAL) + {self.code.text(value)}", "real", value))
        return replace(target, value=self.code.emit(f"tl.broadcast_to({self.code.text(value)}, ({', '.join(dims)},))", tile.value.kind, value))

    def replaced(self, tile: Tile, source: Tile, axis: int, start: int, end: int) -> Tile:
        """With ``source`` from one place along a dimension to another."""
        axis %= len(tile.shape)
        size, lead, shape = tile.shape[axis], tile.lead or source.lead, tile.shape
        if start == 0 and end == size:
            return replace(source, shape=shape)
        if isinstance(source.value, Value) and end - start > 1:
            index = self.code.sub(self.places(size), start)
            source = self._gathered(source, axis, index, size) if isinstance(index, Value) else source
        target = Tile(0.0, shape, lead)
        rank = len(target.axes) + lead
        places = self.along(size, target.at(axis), rank)
        here = self.code.both(self.code.compare(">=", places, start), self.code.compare("<", places, end))
        value = self.code.where(here, self.spread(source, shape, lead), self.spread(tile, shape, lead))
        return replace(target, value=value)

    def joined(self, tiles: list[Tile], axis: int, shape: Shape) -> Tile:
        """One after the other along a dimension."""
        axis %= len(shape)
        found, at = Tile(0.0, shape, any(tile.lead for tile in tiles)), 0
        for tile in tiles:
            found = self.replaced(found, tile, axis, at, at + tile.shape[axis])
            at += tile.shape[axis]
        return found


def _has_lead(each: Any) -> bool:
    return isinstance(each, Combination) or (isinstance(each, Tile) and each.lead)


# Rules: (tiles, node, arguments, options) to a tile, or several.


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
    return _divided(tiles, tiles.reduced(squares, _dims(dim), shape), max(count - (1 if correction is None else correction), 0))


def _var(tiles: Tiles, node: fx.Node, a: Tile, dim: Any = None, *_: Any, correction: float | None = 1, **__: Any) -> Tile:
    return _variance(tiles, a, dim, correction, _shape_of(node))


def _var_mean(tiles: Tiles, node: fx.Node, a: Tile, dim: Any = None, *_: Any, correction: float | None = 1, **__: Any):
    variance, mean = (tuple(each.shape) for each in node.meta["val"])
    return [_variance(tiles, a, dim, correction, variance),
            _divided(tiles, tiles.reduced(a, _dims(dim), mean), _count(a, dim))]  # fmt: skip


def _extreme(function: str, neutral: float) -> Callable:
    def rule(tiles: Tiles, node: fx.Node, a: Tile, dim: Any = None, *_: Any) -> Tile:
        return tiles.reduced(a, _dims(dim), _shape_of(node), function, neutral)

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
    if math.prod(map(padded, (batch, i, k, j))) * (tiles.lead if lead else 1) > _MOST_SUMMED:
        raise NotCovered(f"{batch} products of {i} x {k} and {k} x {j} numbers are not covered")
    if has_padding([k]):
        a, b = tiles.cleaned(a), tiles.cleaned(b)
    cube = (batch, i, k, j)
    left = tiles.spread(replace(a, shape=(batch, i, k, 1)), cube, lead)
    right = tiles.spread(replace(b, shape=(batch, 1, k, j)), cube, lead)
    terms = Tile(tiles.code.mul(left, right), cube, lead, clean=True)
    return replace(tiles.reduced(terms, [2], _shape_of(node)), clean=a.clean and b.clean)


def _mv(tiles: Tiles, node: fx.Node, a: Tile, b: Tile) -> Tile:
    return tiles.product(a, replace(b, shape=(*b.shape, 1)), _shape_of(node))


def _dot(tiles: Tiles, node: fx.Node, a: Tile, b: Tile) -> Tile:
    return tiles.product(replace(a, shape=(1, *a.shape)), replace(b, shape=(*b.shape, 1)), _shape_of(node))


def _added(rule: Callable) -> Callable:
    def added(tiles: Tiles, node: fx.Node, start: Tile, a: Tile, b: Tile, *, beta: float = 1, alpha: float = 1) -> Tile:
        product, shape, code = rule(tiles, node, a, b), _shape_of(node), tiles.code
        lead = product.lead or start.lead
        terms = [code.mul(beta, tiles.spread(start, shape, lead)), code.mul(alpha, tiles.spread(product, shape, lead))]
        return Tile(code.add(*terms), shape, lead, start.clean and product.clean)

    return added


def _view(tiles: Tiles, node: fx.Node, a: Tile, *_: Any, **__: Any) -> Tile:
    return tiles.reshaped(a, _shape_of(node))


def _permute(tiles: Tiles, node: fx.Node, a: Tile, dims: Sequence[int]) -> Tile:
    return tiles.permuted(a, dims)


def _transpose(tiles: Tiles, node: fx.Node, a: Tile, one: int, other: int) -> Tile:
    dims = list(range(len(a.shape)))
    dims[one], dims[other] = dims[other], dims[one]
    return tiles.permuted(a, dims)


def _turned(tiles: Tiles, node: fx.Node, a: Tile) -> Tile:
    return tiles.permuted(a, list(range(len(a.shape)))[::-1])


def _expand(tiles: Tiles, node: fx.Node, a: Tile, *_: Any, **__: Any) -> Tile:
    return tiles.expanded(a, _shape_of(node))


def _select(tiles: Tiles, node: fx.Node, a: Tile, dim: int, index: int) -> Tile:
    return tiles.picked(a, dim, index, _shape_of(node))


def _slice(tiles: Tiles, node: fx.Node, a: Tile, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tile:
    return tiles.taken(a, dim, list(range(a.shape[dim])[slice(start, end, step)]))


def _unbind(tiles: Tiles, node: fx.Node, a: Tile, dim: int = 0) -> list[Tile]:
    shapes = [tuple(each.shape) for each in node.meta["val"]]
    return [tiles.picked(a, dim, index, shape) for index, shape in enumerate(shapes)]


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


def _index_put(tiles: Tiles, node: fx.Node, a: Tile, indices: list[Any], values: Tile, accumulate: bool = False) -> Tile:
    """The derivative of an index: of numbers that all went to other places, or side by side."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) == 1 and _constant(given[0][1]).ndim == 1 and given[0][1].dtype != torch.bool:
        dim, size = given[0][0], a.shape[given[0][0]]
        places = [i % size for i in given[0][1].tolist()]
        nothing = not isinstance(a.value, Value) and a.value == 0
        if nothing and sorted(places) == list(range(size)):
            return tiles.taken(values, dim, [places.index(i) for i in range(size)])
        if (nothing or not accumulate) and places == list(range(places[0], places[0] + len(places))):
            return tiles.replaced(a, values, dim, places[0], places[0] + len(places))
    raise NotCovered("aten.index_put without a pattern is not covered")


def _constant(index: Any) -> Tensor:
    if not isinstance(index, Tensor):
        raise NotCovered("an index that is computed is not covered")
    return index


def _flip(tiles: Tiles, node: fx.Node, a: Tile, dims: Sequence[int]) -> Tile:
    for dim in dims:
        a = tiles.taken(a, dim, list(range(a.shape[dim]))[::-1])
    return a


def _roll(tiles: Tiles, node: fx.Node, a: Tile, shifts: Any, dims: Any = ()) -> Tile:
    for shift, dim in zip(_dims(shifts), _dims(dims) or [0], strict=True):
        size = a.shape[dim]
        a = tiles.taken(a, dim, [(i - shift) % size for i in range(size)])
    return a


def _cat(tiles: Tiles, node: fx.Node, parts: list[Tile], dim: int = 0) -> Tile:
    return tiles.joined(parts, dim, _shape_of(node))


def _slice_scatter(tiles: Tiles, node: fx.Node, a: Tile, source: Tile, dim: int = 0, start=None, end=None, step: int = 1) -> Tile:
    if step != 1:
        raise NotCovered("aten.slice_scatter in steps is not covered")
    start, end, _ = slice(start, end).indices(a.shape[dim])
    return tiles.replaced(a, source, dim, start, end)


def _select_scatter(tiles: Tiles, node: fx.Node, a: Tile, source: Tile, dim: int, index: int) -> Tile:
    dim, index = dim % len(a.shape), index % a.shape[dim]
    source = replace(source, shape=(*a.shape[:dim], 1, *a.shape[dim + 1 :]))
    return tiles.replaced(a, source, dim, index, index + 1)


def _pad(tiles: Tiles, node: fx.Node, a: Tile, pad: Sequence[int], value: float = 0) -> Tile:
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = len(a.shape) - 1 - number
        if before < 0 or after < 0:
            raise NotCovered("aten.constant_pad_nd that cuts is not covered")
        shape = (*a.shape[:dim], before + a.shape[dim] + after, *a.shape[dim + 1 :])
        a = tiles.replaced(Tile(float(value), shape), a, dim, before, before + a.shape[dim])
    return a


_RULES: dict[str, Callable] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "collapse_view", "split_dim"), _view),
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "chunk"), _split),
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    "addmm": _added(_mm),
    "addmv": _added(_mv),
    "amax": _extreme("max", -math.inf),
    "amin": _extreme("min", math.inf),
    "baddbmm": _added(_bmm),
    "bmm": _bmm,
    "broadcast_in_dim": None,  # pyright: ignore[reportAssignmentType]
    "cat": _cat,
    "constant_pad_nd": _pad,
    "dot": _dot,
    "expand": _expand,
    "flip": _flip,
    **dict.fromkeys(("index_put", "_unsafe_index_put"), _index_put),
    "index_select": _index_select,
    "linalg_vector_norm": _norm,
    "mean": _mean,
    "mm": _mm,
    "mv": _mv,
    "permute": _permute,
    "roll": _roll,
    "select": _select,
    "select_scatter": _select_scatter,
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "sum": _sum,
    "t": _turned,
    "transpose": _transpose,
    "unbind": _unbind,
    "var": _var,
    "var_mean": _var_mean,
}


def _broadcast_in_dim(tiles: Tiles, node: fx.Node, a: Tile, _: Any, dimensions: Sequence[int]) -> Tile:
    shape = _shape_of(node)
    sizes = [1] * len(shape)
    for dim, size in zip(dimensions, a.shape, strict=True):
        sizes[dim] = size
    return tiles.expanded(replace(a, shape=tuple(sizes)), shape)


_RULES["broadcast_in_dim"] = _broadcast_in_dim


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
    known: dict[fx.Node, Any] = {}
    remaining = iter(inputs)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(remaining)
        elif node.op == "output":
            return [_as_tile(tiles.solid(known[each])) for each in pytree.tree_leaves(node.args)]
        elif node.op == "get_attr":
            known[node] = getattr(graph, str(node.target))
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: known[each])
            known[node] = _called(node, args, kwargs, tiles)
    raise ValueError("the graph has no output")


def _called(node: fx.Node, args: Any, kwargs: dict[str, Any], tiles: Tiles) -> Any:
    if node.target is operator.getitem:
        return args[0][args[1]]
    if not any(isinstance(each, Tile | Combination) for each in pytree.tree_leaves((args, kwargs))):
        return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    name = name_of(node.target).split(".")[-1]
    result = node.meta.get("val")
    if isinstance(result, Tensor) and math.prod(map(padded, result.shape)) > _MOST:
        raise NotCovered(f"a tensor of {result.numel()} numbers inside a step is not covered")
    if name in ("expand", "view", "reshape") and isinstance(args[0], Combination) and args[0].shape == _shape_of(node):
        return args[0]
    if is_pointwise(node):
        return _pointwise(node, args, name, tiles)
    if name in _LIKE:
        number = _LIKE[name](args)
        return Tile(float(number), tuple(result.shape))  # pyright: ignore[reportOptionalMemberAccess]
    rule = _RULES.get(name)
    if rule is None:
        raise NotCovered(f"{name_of(node.target)} is not covered")
    args = pytree.tree_map(tiles.solid, args)
    options = {key: value for key, value in kwargs.items() if key in ("alpha", "beta", "correction", "step")}
    converted = [_as_tile(each) if isinstance(each, Tensor) and each.is_floating_point() else each for each in args]
    return rule(tiles, node, *converted, **options)


#: What is as large as a tensor, and has one number.
_LIKE: dict[str, Callable] = {
    **dict.fromkeys(("zeros_like", "new_zeros", "empty_like", "_new_zeros_with_same_feature_meta"), lambda args: 0.0),
    **dict.fromkeys(("ones_like", "new_ones"), lambda args: 1.0),
    "full_like": lambda args: args[1],
    "new_full": lambda args: args[2],
}


def _as_tile(value: Any) -> Tile:
    """A tensor that is known while the code is written."""
    if isinstance(value, Tile):
        return value
    if not isinstance(value, Tensor):
        return Tile(value, ())
    numbers = set(value.reshape(-1).tolist())
    if len(numbers) != 1:
        raise NotCovered("different numbers that are made in a step are not covered: make them before it")
    return Tile(numbers.pop(), tuple(value.shape))


def _pointwise(node: fx.Node, args: Any, name: str, tiles: Tiles) -> Tile | Combination:
    shape = _shape_of(node)
    if any(map(_has_lead, args)) and "alpha" not in node.kwargs:
        combined = tiles.combined(name, shape, list(args))
        if combined is not None:
            return combined
    given = [_as_tile(each) if isinstance(each, Tile | Tensor) else each for each in map(tiles.solid, args)]
    found = [each for each in given if isinstance(each, Tile)]
    lead = any(each.lead for each in found)
    values = [tiles.spread(each, shape, lead) if isinstance(each, Tile) else each for each in given]
    value = pointwise(node, values, tiles.code)
    numbers = [each for each in given if not isinstance(each, Tile) or not isinstance(each.value, Value)]
    keeps = name in _KEEPS_ZEROS and (not numbers or name == "mul" or len(given) == 1)
    whole = all(each.shape == shape or not isinstance(each.value, Value) for each in found)
    clean = keeps and whole and all(each.clean for each in found if isinstance(each.value, Value))
    return Tile(value, shape, lead, clean)
