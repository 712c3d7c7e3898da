"""A step as scalar code for one lane of a GPU.

A lane holds K numbers of the state. Of an *elementwise* step these are one number of each of K leaves, and every channel of
every row is a lane; of a *narrow* one they are the whole state of a row. So the Jacobian of a lane is K x K in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx

from ..sequence.layout import Layout
from .derivatives import cotangent_graph, tangent_graph, values_graph
from .expressions import Code, NotCovered, Scalar, Value, covering
from .operations import ONE_NUMBER, evaluate, interpreted, is_pointwise, kind_of_dtype, pointwise
from .parts import Leaf, Parts, take_apart
from .tile_program import WIDEST, TileProgram
from .trace import OneRow

#: The widest state of a row that lies in the registers of a lane.
NARROW = 8


def program_of(row: OneRow, layout: Layout, narrow: int = NARROW) -> Program | TileProgram:
    """A step on one row as code: for lanes, or on tiles.

    Args:
        narrow: up to this width, numbers of a step that mixes them are those of a lane

    Raises:
        NotCovered: there are no kernels for it, and why
    """
    with covering():
        parts = take_apart(row, narrow, WIDEST)
        return TileProgram(parts, layout) if parts.tiled else Program(parts, layout)


@dataclass(frozen=True)
class Read:
    """One number that a lane reads: of a leaf, so many numbers behind the beginning of its row; or, of an elementwise step, its channel's."""

    leaf: int
    offset: int
    value: Value


class Program:
    """A step, its Jacobian, and its cotangents of what it reads, as code for one lane.

    Attributes:
        width: K
        channels: lanes of a row
        reads: what a lane reads at a step
        state, adjoint: the names of a lane's state and of its cotangent
        values: the next state, K scalars
        jacobian: K x K, derivatives of ``values[i]`` by ``state[j]``
    """

    def __init__(self, parts: Parts, layout: Layout):
        self.parts = parts
        self.elementwise: bool = self.parts.elementwise
        self.width: int = len(layout.shapes) if self.elementwise else layout.width
        self.channels: int = layout.shapes[0].numel() if self.elementwise else 1
        if self.width > NARROW:
            raise NotCovered(f"a state of {self.width} tensors is not covered (up to {NARROW})")
        self.dtype: torch.dtype = torch.float64 if layout.dtype == torch.float64 else torch.float32
        self.code: Code = Code()
        self.state: list[Value] = [self.code.input(f"z{i}") for i in range(self.width)]
        self.adjoint: list[Value] = [self.code.input(f"w{i}") for i in range(self.width)]
        self.reads: list[Read] = []
        self._state_arrays = self._arrays_of_state(self.state)
        self._leaf_arrays = [self._array_of_leaf(i, leaf) for i, leaf in enumerate(self.parts.leaves)]
        self.values: list[Scalar] = self._run(values_graph(self.parts, self.dtype), self._state_arrays)
        if any(isinstance(each, Value) and each.kind != "real" for each in self.values):
            raise NotCovered("a state that is not floating is not covered")

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.parts.leaves

    @cached_property
    def jacobian(self) -> list[list[Scalar]]:
        graph = tangent_graph(self.parts, self.dtype)
        columns = []
        for j in range(self.width):
            unit: list[Scalar] = [1.0 if i == j else 0.0 for i in range(self.width)]
            columns.append(self._run(graph, [*self._state_arrays, *self._arrays_of_state(unit)]))
        return [[columns[j][i] for j in range(self.width)] for i in range(self.width)]

    @cached_property
    def cotangents(self) -> list[tuple[Read, Scalar]]:
        """Of every floating number that is read, for the cotangent ``adjoint`` of the next state."""
        graph = cotangent_graph(self.parts, self.dtype)
        found = self._evaluate(graph, [*self._state_arrays, *self._arrays_of_state(self.adjoint)])
        real = [i for i, leaf in enumerate(self.leaves) if leaf.dtype.is_floating_point]
        of_leaf = dict(zip(real, found, strict=True))
        return [
            (read, np.asarray(of_leaf[read.leaf], dtype=object).reshape(-1)[read.offset])
            for read in self.reads
            if read.leaf in of_leaf
        ]

    def _arrays_of_state(self, scalars: list[Any]) -> list[np.ndarray]:
        """One array for each leaf of the state."""
        arrays, at = [], 0
        for node in self.parts.row.state_nodes:
            shape = () if self.elementwise else tuple(node.meta["val"].shape)
            count = int(np.prod(shape, dtype=int))
            array = np.empty(count, dtype=object)
            array[:] = scalars[at : at + count]
            arrays.append(array.reshape(shape))
            at += count
        return arrays

    def _array_of_leaf(self, index: int, leaf: Leaf) -> np.ndarray:
        shape = () if self.elementwise else leaf.shape
        array = np.empty(int(np.prod(shape, dtype=int)), dtype=object)
        kind, level = kind_of_dtype(leaf.dtype), int(leaf.per_step)
        for offset in range(array.size):
            array[offset] = self.code.input(f"x{index}_{offset}", kind, level)
            self.reads.append(Read(index, offset, array[offset]))
        return array.reshape(shape)

    def _run(self, graph: fx.GraphModule, state: list[np.ndarray]) -> list[Scalar]:
        """The numbers of the state that a graph of (state, leaves) gives."""
        arrays = self._evaluate(graph, state)
        return [scalar for array in arrays for scalar in np.asarray(array, dtype=object).reshape(-1)]

    def _evaluate(self, graph: fx.GraphModule, state: list[np.ndarray]) -> list[np.ndarray]:
        def constants(name: str) -> np.ndarray:
            return np.array(getattr(graph, name).tolist(), dtype=object)

        if not self.elementwise:
            return evaluate(graph.graph, [*state, *self._leaf_arrays], constants, self.code)
        # One channel of an elementwise graph: all tensors are one number.
        inputs = (array.item() for array in (*state, *self._leaf_arrays))
        found = interpreted(graph.graph, inputs, lambda name: _only(getattr(graph, name)), self._channel_of)
        return [np.array(each, dtype=object) for each in found]

    def _channel_of(self, node: fx.Node, arguments: Any, _: Any) -> Scalar:
        name = node.name if not isinstance(node.target, torch._ops.OpOverload) else node.target.overloadpacket.__name__
        if is_pointwise(node):
            return pointwise(node, list(arguments), self.code)
        if name in _SHAPES:
            return arguments[0]
        if name in ONE_NUMBER:
            return ONE_NUMBER[name](arguments)
        raise NotCovered(f"{node.target} in an elementwise step is not covered")


#: What only changes the shape of a tensor, all of whose numbers are those of one channel.
_SHAPES = {"expand", "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "broadcast_in_dim", "is_same_size"}


def _only(tensor: torch.Tensor) -> Scalar:
    values = set(tensor.reshape(-1).tolist())
    if len(values) != 1:
        raise NotCovered("numbers of each channel that are made in the step are not covered: make them before it")
    return values.pop()
