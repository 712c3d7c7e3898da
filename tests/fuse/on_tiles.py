"""What the tests of tiles share: a graph is written as code on tiles, and the code is run by NumPy, on tiles of whole numbers of a device.

A tile of NumPy has exactly the size that the code says, so that one which is too small by a broadcast is found. Padding holds what is asked for.
"""

import operator

import numpy as np
import torch

from deeppcr.fuse import tile_rules
from deeppcr.fuse.derivatives import traced as trace
from deeppcr.fuse.expressions import FUNCTIONS, Code, Value
from deeppcr.fuse.tiles import Tile, Tiles, padded
from fuse.emitted import NumPyLanguage

#: Tangents at once.
LEAD = 3


class Integers(np.ndarray):
    """Which are divided as a GPU divides them: towards zero."""

    def __floordiv__(self, other):
        return np.trunc(np.divide(self, other)).astype(self.dtype)

    def __mod__(self, other):
        return np.fmod(self, other)


class TileLanguage(NumPyLanguage):
    """What lines on tiles use of ``triton.language``."""

    arange = staticmethod(lambda start, end: np.arange(start, end).view(Integers))
    reshape = staticmethod(np.reshape)
    maximum, minimum = staticmethod(np.maximum), staticmethod(np.minimum)
    sum, max, min = staticmethod(np.sum), staticmethod(np.max), staticmethod(np.min)
    permute, broadcast_to = staticmethod(np.transpose), staticmethod(np.broadcast_to)
    full = staticmethod(lambda shape, value, dtype: np.full(shape, value).astype(dtype))

    @staticmethod
    def dot(a, b, input_precision):
        assert a.ndim == b.ndim == 2
        return a @ b

    @staticmethod
    def gather(array, index, axis):
        assert index.dtype == np.int32
        for at in range(array.ndim):
            assert at == axis or array.shape[at] == index.shape[at]
        return np.take_along_axis(array, index, axis)


def run_on_tiles(graph, plain, tangents=(), *, padding=0.0):
    """What a graph of (plain, tangents) computes on tiles, cut to the tensors' sizes.

    Args:
        graph: of operations, traced on one tangent
        plain: tensors
        tangents: [LEAD, ...] each
        padding: of what is given; zero is told to the code, anything else is not

    Returns:
        tensors, [LEAD, ...] where they are of tangents
    """
    code = Code()
    tiles, names, inputs = (
        Tiles(code, LEAD),
        {**FUNCTIONS, "tl": TileLanguage, "REAL": np.float64, "LEAD": LEAD, "PRECISION": "ieee"},
        [],
    )
    for at, (tensor, lead) in enumerate([*((each, False) for each in plain), *((each, True) for each in tangents)]):
        kind = "real" if tensor.is_floating_point() else "bool" if tensor.dtype == torch.bool else "int"
        shape = tuple(tensor.shape[lead:])
        tile = Tile(code.input(f"x{at}", kind), shape, lead, clean=padding == 0)
        names[f"x{at}"] = _padded(tensor, tile, padding)
        inputs.append(tile)
    made: list[Tile] = []
    found = _recorded(graph, inputs, tiles, made)
    made += found
    wanted = [tile.value for tile in made]
    texts = [code.text(each) for each in wanted]
    lines = [line for level in (0, 1) for line in code.lines(level, wanted)]
    names.update({f"n{at}": np.float64(number) for at, number in enumerate(code.numbers)})
    with np.errstate(all="ignore"):
        exec("\n".join(lines), names)
        arrays = [eval(text, names) for text in texts]
    for tile, array in zip(made, arrays, strict=True):
        _check(tile, array)
    return [_cut(tile, array) for tile, array in zip(made[-len(found) :], arrays[-len(found) :], strict=True)]


def _recorded(graph, inputs, tiles, made):
    """Evaluate a graph; all tiles on the way are added to ``made``."""
    called = tile_rules._called

    def call(node, args, kwargs, tiles):
        result = called(node, args, kwargs, tiles)
        made.extend(each for each in (result if isinstance(result, list) else [result]) if isinstance(each, Tile))
        return result

    tile_rules._called = call
    try:
        return tile_rules.evaluate(graph, inputs, tiles)
    finally:
        tile_rules._called = called


def _sizes(tile):
    return [*([LEAD] if tile.lead else []), *map(padded, tile.sizes)]


def _inside(tile):
    return (*([slice(None)] if tile.lead else []), *map(slice, tile.sizes))


def _padded(tensor, tile, padding):
    array = (
        np.full(_sizes(tile), padding, dtype=np.float64)
        if tensor.is_floating_point()
        else np.zeros(_sizes(tile), tensor.numpy().dtype)
    )
    array[_inside(tile)] = tensor.numpy().reshape(array[_inside(tile)].shape)
    return array


def _check(tile, array):
    """A tile has its size, and zeros in its padding where it says so."""
    if not isinstance(tile.value, Value):
        return
    assert list(np.shape(array)) == _sizes(tile), (tile, np.shape(array))
    if tile.clean:
        rest = np.array(array, dtype=np.float64)
        rest[_inside(tile)] = 0
        assert not rest.any(), tile


def _cut(tile, array):
    array = np.broadcast_to(array, _sizes(tile))[_inside(tile)]
    return torch.from_numpy(np.array(array, dtype=np.float64)).reshape([*([LEAD] if tile.lead else []), *tile.shape])


def derivatives(function, *given):
    """Graphs of a function of tensors, all decomposed: itself, its tangents from (tensors, tangents), its cotangents from (tensors, cotangents)."""
    values = trace(function, *given)
    outputs = [torch.zeros_like(each) for each in _as_list(values(*given))]
    count = len(given)
    push = trace(
        lambda *both: torch.func.jvp(lambda *z: _as_list(values(*z)), both[:count], both[count:])[1], *given, *given
    )
    pull = trace(
        lambda *both: torch.func.vjp(lambda *z: _as_list(values(*z)), *both[:count])[1](list(both[count:])),
        *given,
        *outputs,
    )
    return values, push, pull


def _as_list(found):
    return list(found) if isinstance(found, list | tuple) else [found]


def names_in(graph):
    """Of a graph's operations."""
    return {
        tile_rules.name_of(node.target).split(".")[-1]
        for node in graph.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    }
