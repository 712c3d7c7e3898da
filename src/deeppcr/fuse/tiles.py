"""A graph of PyTorch's operations becomes code on tiles: the vectors and matrices of one row, in the registers of one program.

A tile has the dimensions of its tensor that are larger than one, each padded to a power of two. One of many tangents (or
cotangents) has one more in front, ``LEAD`` of them: so the graph of one tangent, read in this way, computes them all, and products with
weights are products of matrices. What goes number by number follows the rules of scalars; here is the rest.

What stands in the padding is anything, unless a tile is ``clean``: then zeros. Sums see to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..launch import next_power_of_2
from .expressions import Code, NotCovered, Scalar, Value

Shape = tuple[int, ...]

#: Numbers of the largest tile that a product may be summed up in where the matrix units do not take it.
MOST_SUMMED = 2**14
#: The matrix units take tiles from this size on.
_UNITS = 16


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


padded = next_power_of_2


def has_padding(sizes: Sequence[int]) -> bool:
    return any(padded(size) != size for size in sizes)


class Tiles:
    """Writes operations on tiles as lines of a code.

    Attributes:
        code: what gets the lines
        lead: tangents at once; all of a program's tiles have as many
    """

    def __init__(self, code: Code, lead: int):
        self.code: Code = code
        self.lead: int = lead

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

    # Numbers that are known while the code is written.

    def tile(self, value: Any) -> Tile:
        """What an operation is given."""
        if isinstance(value, Tile):
            return value
        if not isinstance(value, Tensor):
            return Tile(value, ())
        shape, numbers = tuple(value.shape), value.reshape(-1).tolist()
        if len(set(numbers)) == 1:
            return Tile(numbers[0], shape)
        varying = [axis for axis, size in enumerate(shape) if size > 1 and not value.eq(value.narrow(axis, 0, 1)).all()]
        if len(varying) == 1:
            row = value.movedim(varying[0], -1).reshape(-1, shape[varying[0]])[0].tolist()
            pattern = self._pattern(row)
            if pattern is not None:
                one = tuple(size if axis in varying else 1 for axis, size in enumerate(shape))
                return self.expanded(Tile(pattern, one), shape)
        raise NotCovered("different numbers that are made in a step are not covered: make them before it")

    def _pattern(self, row: list[Any]) -> Scalar | None:
        """Numbers in steps, or what is true from one place to another, as a formula."""
        places = self.places(len(row))
        if isinstance(row[0], bool):
            start, end = row.index(True), len(row) - row[::-1].index(True)
            if not all(row[start:end]):
                return None
            return self.code.both(self.code.compare(">=", places, start), self.code.compare("<", places, end))
        step = row[1] - row[0]
        if any(number != row[0] + step * at for at, number in enumerate(row)):
            return None
        kind = "real" if isinstance(row[0], float) else "int"
        return self.code.add(self.code.mul(self.code.cast(places, kind), step), row[0])

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
        dims = self.dims(tile)
        if isinstance(tile.value, Value) or not dims:
            return tile
        text = f"tl.full(({', '.join(dims)},), {self.code.text(tile.value)}, REAL)"
        return self.cleaned(replace(tile, value=self.code.emit(text, "real"), clean=False))

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

    def _emit(self, text: str, *tiles: Tile) -> Value:
        values = [tile.value for tile in tiles]
        assert isinstance(values[0], Value)
        return self.code.emit(text.format(*map(self.code.text, values)), values[0].kind, *values)

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
            return Tile(value, shape, lead)  # of infinity times zero, the padding is NaN
        if has_padding([k]):
            a, b = self.cleaned(a), self.cleaned(b)
        if lead and min(map(padded, (k, j if a.lead else i))) >= _UNITS and (j if a.lead else i) > 1:
            return Tile(self._by_units(a, b), shape, lead)
        if not lead and min(map(padded, (i, k, j))) >= _UNITS:
            # Values, whose digits nobody mends.
            return Tile(self._emit('tl.dot({}, {}, input_precision="tf32x3")', a, b), shape, lead)
        numbers = math.prod(map(padded, (i, k, j))) * (self.lead if lead else 1)
        if numbers > MOST_SUMMED:
            raise NotCovered(f"a product of {i} x {k} and {k} x {j} numbers is not covered")
        # Number by number, with k between i and j.
        cube = (i, k, j)
        left = self.spread(replace(a, shape=(i, k, 1)), cube, lead)
        right = self.spread(replace(b, shape=(1, k, j)), cube, lead)
        terms = Tile(self.code.mul(left, right), cube, lead)
        if terms.lead and not isinstance(terms.value, Value):
            return Tile(terms.value, shape, lead)
        return replace(self.reduced(replace(terms, clean=True), [1], (i, j)), shape=shape, clean=False)

    def _by_units(self, a: Tile, b: Tile) -> Scalar:
        """A product with tangents on the matrix units: those of all rows of a matrix at once."""
        if b.lead:  # as the transpose of the product of the transposes
            turned = Tile(
                self._by_units(self.permuted(b, [1, 0]), self.permuted(a, [1, 0])), (b.shape[1], a.shape[0]), lead=True
            )
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
        dims = self.dims(tile)
        dims[at] = str(padded(count))
        wide = index
        if len(dims) > 1:
            places = self._indexed(index, [":" if i == at else "None" for i in range(len(dims))])
            wide = code.emit(f"tl.broadcast_to({places.name}, ({', '.join(dims)},))", "int", places)
        assert isinstance(tile.value, Value)
        value = code.emit(
            f"tl.gather({tile.value.name}, tl.cast({wide.name}, tl.int32), {at})", tile.value.kind, tile.value, wide
        )
        return Tile(value, shape, tile.lead)

    def picked(self, tile: Tile, axis: int, place: int, shape: Shape) -> Tile:
        """The number at one place along a dimension."""
        axis %= len(tile.shape)
        if tile.shape[axis] == 1 or not isinstance(tile.value, Value):
            return replace(tile, shape=shape)
        if tile.value.kind == "bool":  # of which sums are integers
            found = self.picked(replace(tile, value=self.code.cast(tile.value, "int")), axis, place, shape)
            return replace(found, value=self.code.cast(found.value, "bool"))
        at, rank = tile.at(axis), len(tile.axes) + tile.lead
        here = self.code.compare("==", self.along(tile.shape[axis], at, rank), place % tile.shape[axis])
        chosen = replace(tile, value=self.code.where(here, tile.value, self.code.cast(0, tile.value.kind)))
        return Tile(self._emit(f"tl.sum({{}}, {at})", chosen), shape, tile.lead, tile.clean)

    def expanded(self, tile: Tile, shape: Shape) -> Tile:
        """Repeated along dimensions of one."""
        target = Tile(tile.value, shape, tile.lead)
        if target.sizes == tile.sizes or not isinstance(tile.value, Value):
            return target
        value = self.spread(tile, shape, tile.lead)
        assert isinstance(value, Value)
        return replace(target, value=self._stretched(value, target))

    def _stretched(self, value: Value, target: Tile) -> Value:
        """With dimensions of one, or none at all, as large as a tile."""
        return self.code.emit(f"tl.broadcast_to({value.name}, ({', '.join(self.dims(target))},))", value.kind, value)

    def whole(self, value: Scalar, shape: Shape, operands: Sequence[Tile]) -> Tile:
        """What was computed number by number, as a tile of a shape: also where no operand is as large, but for numbers that all are the same."""
        target = Tile(value, shape, any(each.lead for each in operands))
        varying = [each for each in operands if isinstance(each.value, Value)]
        have = {axis + len(shape) - len(each.shape) for each in varying for axis in each.axes}
        if not isinstance(value, Value) or (
            have >= set(target.axes) and target.lead == any(each.lead for each in varying)
        ):
            return target
        return replace(target, value=self._stretched(value, target))

    def replaced(self, tile: Tile, source: Tile, axis: int, start: int, end: int, step: int = 1) -> Tile:
        """With ``source`` from one place along a dimension to another."""
        axis %= len(tile.shape)
        size, shape, code = tile.shape[axis], tile.shape, self.code
        if range(start, end, step) == range(size):
            return replace(source, shape=shape)
        places = self.places(size)
        if isinstance(source.value, Value) and source.shape[axis] > 1:
            index = code.sub(places, start)
            assert isinstance(index, Value)
            index = index if step == 1 else code.emit(f"{index.name} // {step}", "int", index)
            source = self._gathered(source, axis, index, size)
        target = Tile(0.0, shape, tile.lead or source.lead)
        rank = len(target.axes) + target.lead
        along = self.along(size, target.at(axis), rank)
        here = code.both(code.compare(">=", along, start), code.compare("<", along, end))
        if step != 1:
            away = code.sub(along, start)
            assert isinstance(away, Value)
            here = code.both(here, code.compare("==", code.emit(f"{away.name} % {step}", "int", away), 0))
        value = code.where(here, self.spread(source, shape, target.lead), self.spread(tile, shape, target.lead))
        return self.whole(value, shape, [tile, source, Tile(here, (size, *(1,) * (len(shape) - axis - 1)))])

    def joined(self, tiles: list[Tile], axis: int, shape: Shape) -> Tile:
        """One after the other along a dimension."""
        axis %= len(shape)
        found, at = Tile(0.0, shape, any(tile.lead for tile in tiles)), 0
        for tile in tiles:
            found = self.replaced(found, tile, axis, at, at + tile.shape[axis])
            at += tile.shape[axis]
        return found
