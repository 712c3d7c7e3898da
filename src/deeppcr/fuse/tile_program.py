"""A step as code on tiles: for states that are too wide for the registers of a lane.

A program holds the state of one row, and some of the tangents of all its numbers: the product of the Jacobians of a chunk, transposed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from ..launch import next_power_of_2
from ..sequence.layout import Layout
from .derivatives import adjoint_graph, cotangent_graph, tangent_graph, values_graph
from .expressions import Code, NotCovered, Value
from .operations import kind_of_dtype
from .parts import Leaf, Parts
from .tile_rules import evaluate
from .tiles import Tile, Tiles, padded

#: The widest state of a row, and the tangents that one program holds at most.
WIDEST, _MOST_LEAD = 128, 64
#: Numbers that a program reads for one step at most, tiles filled up to powers of two: shared memory and registers hold them. (Three
#: weights of 65 x 65 do not fit an H200.)
_MOST_READ = 40_960


@dataclass(frozen=True)
class Read:
    """A tile that a program reads: a leaf."""

    leaf: int
    tile: Tile

    @property
    def value(self) -> Value:
        assert isinstance(self.tile.value, Value)
        return self.tile.value


class TileProgram:
    """A step, its tangents, and its cotangents, as code for one program.

    Attributes:
        width: D
        numbers: that it reads at a step, counted in tiles of powers of two
        reads: what a program reads at a step
        states: the tiles of the state, and where in a row of D each begins
        values: those of the next state
    """

    elementwise: bool = False
    channels: int = 1

    def __init__(self, parts: Parts, layout: Layout):
        if layout.dtype == torch.float64:
            raise NotCovered(f"a step that mixes {layout.width} numbers is not covered in float64")
        self.parts: Parts = parts
        self.width: int = layout.width
        self.dtype: torch.dtype = torch.float32
        self.lead: int = max(16, min(_MOST_LEAD, next_power_of_2(self.width)))
        self.code: Code = Code()
        self.tiles: Tiles = Tiles(self.code, self.lead)
        self.shapes: list[tuple[int, ...]] = [tuple(shape) for shape in layout.shapes]
        self.begins: list[int] = [0, *accumulate(shape.numel() for shape in layout.shapes[:-1])]
        self.numbers: int = sum(math.prod(map(padded, leaf.shape)) for leaf in self.leaves)
        if self.numbers > _MOST_READ:
            raise NotCovered(
                f"a step that reads {self.numbers} numbers, counted in tiles of powers of two, is not covered (up to {_MOST_READ})"
            )
        self.reads: list[Read] = [self._read(at, leaf) for at, leaf in enumerate(self.leaves)]
        self.states: list[Tile] = self._of_state("z")
        self.values: list[Tile] = self._evaluate(values_graph(parts, self.dtype), [])
        if any(isinstance(tile.value, Value) and tile.value.kind != "real" for tile in self.values):
            raise NotCovered("a state that is not floating is not covered")

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.parts.leaves

    @property
    def blocks(self) -> int:
        """Programs of a chunk and row: each has some of the tangents."""
        return -(-self.width // self.lead)

    def _read(self, at: int, leaf: Leaf) -> Read:
        value = self.code.input(f"x{at}", kind_of_dtype(leaf.dtype), int(leaf.per_step))
        return Read(at, Tile(value, leaf.shape, clean=True))

    @property
    def _read_tiles(self) -> list[Tile]:
        return [read.tile for read in self.reads]

    def _of_state(self, name: str, lead: bool = False) -> list[Tile]:
        return [Tile(self.code.input(f"{name}{at}"), shape, lead, clean=True) for at, shape in enumerate(self.shapes)]

    def _with_rows(self, tiles: list[Tile]) -> list[Tile]:
        """As the graphs of one row have them, whose rows are a dimension."""
        ones = (1,) * self.parts.row.batch_dims
        return [Tile(tile.value, (*ones, *tile.shape), tile.lead, tile.clean) for tile in tiles]

    def _evaluate(self, graph, more: list[Tile]) -> list[Tile]:
        return evaluate(graph, [*self._with_rows(self.states), *self._with_rows(more), *self._read_tiles], self.tiles)

    @cached_property
    def tangents(self) -> list[Tile]:
        """Of the next state, from those of the state, ``t0``, ``t1``, ...: many at once."""
        return self._evaluate(tangent_graph(self.parts, self.dtype), self._of_state("t", lead=True))

    @cached_property
    def adjoints(self) -> list[Tile]:
        """Of the state, from those of the next state, ``t0``, ``t1``, ...: many at once."""
        return self._evaluate(adjoint_graph(self.parts, self.dtype), self._of_state("t", lead=True))

    @cached_property
    def adjoint(self) -> list[Tile]:
        """Of the state, from that of the next state, ``w0``, ``w1``, ..."""
        return self._evaluate(adjoint_graph(self.parts, self.dtype), self._of_state("w"))

    @cached_property
    def cotangents(self) -> list[tuple[Read, Tile]]:
        """Of every floating leaf, from that of the next state."""
        found = self._evaluate(cotangent_graph(self.parts, self.dtype), self._of_state("w"))
        real = [read for read in self.reads if self.leaves[read.leaf].dtype.is_floating_point]
        return [
            (read, Tile(tile.value, read.tile.shape, tile.lead, tile.clean))
            for read, tile in zip(real, found, strict=True)
        ]

    def strides(self, leaf: int) -> list[int]:
        """How far apart the numbers of a leaf's tile are."""
        found = self.leaves[leaf]
        return [stride for stride, size in zip(found.strides, found.shape, strict=True) if size > 1]


def state_strides(shape: tuple[int, ...]) -> list[int]:
    """How far apart the numbers of a state's tile are in a row of D."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return [stride for stride, size in zip(reversed(strides), shape, strict=True) if size > 1]
