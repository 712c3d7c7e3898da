"""Rules of operations on whole arrays: ``rule(code, shape, *arguments, **options)``, tensors as arrays of scalars.

What only moves numbers costs nothing: it is done here, once, and leaves no line. Sums and products are written out.
``shape`` is that of the result, a list where there are several. What a dtype makes of the numbers is left to the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from .expressions import Code, NotCovered, Scalar, Value
from .scalars import POINTWISE

Shape = tuple[int, ...]
Axes = int | Sequence[int] | None


def each(function: Callable[..., Any], *arrays: Any) -> np.ndarray:
    """A function of scalars, on arrays that are broadcast."""
    return filled(np.frompyfunc(function, len(arrays), 1)(*arrays))


def filled(scalars: object) -> np.ndarray:
    """As an array of scalars, also where there is one."""
    return scalars if isinstance(scalars, np.ndarray) else np.array(scalars, dtype=object)


def constant_indices(indices: np.ndarray) -> np.ndarray:
    """Indices as integers, or masks as masks."""
    if any(isinstance(index, Value) for index in indices.flat):
        raise NotCovered("an index that is computed is not covered")
    masks = indices.size > 0 and all(isinstance(index, bool) for index in indices.flat)
    return indices.astype(bool if masks else int)


def _broadcast_in_dim(code: Code, shape: Shape, a: np.ndarray, _: Shape, dimensions: Sequence[int]) -> np.ndarray:
    sizes = [1] * len(shape)
    for dim, size in zip(dimensions, a.shape, strict=True):
        sizes[dim] = size
    return np.broadcast_to(a.reshape(sizes), shape)


def _cat(code: Code, shape: Shape, tensors: list[np.ndarray], dim: int = 0) -> np.ndarray:
    # PyTorch lets empty vectors pass beside anything.
    return np.concatenate([a for a in tensors if a.shape != (0,) or len(shape) == 1], dim)


def _at(ndim: int, dim: int, index: object) -> tuple:
    places: list = [slice(None)] * ndim
    places[dim] = index
    return tuple(places)


#: What shows a part of an array, which another array may take the place of.
_PARTS: dict[str, Callable[..., Any]] = {
    "diagonal": lambda a, offset=0, dim1=0, dim2=1: np.diagonal(a, offset, dim1, dim2),
    "select": lambda a, dim, index: a[_at(a.ndim, dim, index)],
    "slice": lambda a, dim=0, start=None, end=None, step=1: a[_at(a.ndim, dim, slice(start, end, step))],
}


def _shown(part: Callable[..., Any]) -> Callable:
    return lambda code, shape, a, *where, **named: filled(part(a, *where, **named))


def _replaced(part: Callable[..., Any]) -> Callable:
    def rule(code: Code, shape: Shape, a: np.ndarray, source: np.ndarray, *where: Any, **named: Any) -> np.ndarray:
        result = a.copy()
        result.flat[part(np.arange(a.size).reshape(a.shape), *where, **named)] = source
        return result

    return rule


def _split(
    code: Code, shapes: list[Shape], a: np.ndarray, sizes: int | Sequence[int], dim: int = 0
) -> list[np.ndarray]:
    length = a.shape[dim]
    ends = range(sizes, length, sizes) if isinstance(sizes, int) else np.cumsum(sizes)[:-1].tolist()
    return np.split(a, list(ends), dim)


def _chunk(code: Code, shapes: list[Shape], a: np.ndarray, chunks: int, dim: int = 0) -> list[np.ndarray]:
    return _split(code, shapes, a, -(-a.shape[dim] // chunks), dim)


def _places(indices: list[np.ndarray | None]) -> tuple:
    return tuple(slice(None) if index is None else constant_indices(index) for index in indices)


def _index_select(code: Code, shape: Shape, a: np.ndarray, dim: int, index: np.ndarray) -> np.ndarray:
    return np.take(a, constant_indices(index), dim if a.ndim else None).reshape(shape)


def _index_put(code: Code, shape: Shape, a: np.ndarray, indices, values: np.ndarray, accumulate: bool = False):
    result, places = a.copy(), np.arange(a.size).reshape(a.shape)[_places(indices)]
    for place, value in zip(places.flat, np.broadcast_to(values, places.shape).flat, strict=True):
        result.flat[place] = code.add(result.flat[place], value) if accumulate else value
    return result


def _gather(code: Code, shape: Shape, a: np.ndarray, dim: int, index: np.ndarray, **_: object) -> np.ndarray:
    a, index = np.atleast_1d(a), np.atleast_1d(index)
    within = a[tuple(slice(size) if axis != dim % a.ndim else slice(None) for axis, size in enumerate(index.shape))]
    return np.take_along_axis(within, constant_indices(index), dim).reshape(shape)


def _scatter(code: Code, shape: Shape, a: np.ndarray, dim: int, index: np.ndarray, source: Any, add: bool = False):
    result, index = np.atleast_1d(a).copy(), np.atleast_1d(constant_indices(index))
    source = np.broadcast_to(filled(source), index.shape) if np.ndim(source) == 0 else source
    for place in np.ndindex(index.shape):
        target = list(place)
        target[dim] = index[place]
        before: Any = result[tuple(target)]
        result[tuple(target)] = code.add(before, source[place]) if add else source[place]
    return result.reshape(shape)


def _pad(code: Code, shape: Shape, a: np.ndarray, pad: Sequence[int], value: Scalar = 0) -> np.ndarray:
    pairs = [(before, after) for before, after in zip(pad[::2], pad[1::2], strict=True)][::-1]
    pairs = [(0, 0)] * (a.ndim - len(pairs)) + pairs  # the last dimension comes first

    def inner(shape: Shape, sign: int) -> tuple[slice, ...]:
        sizes = zip(shape, pairs, strict=True)
        return tuple(slice(max(sign * before, 0), size - max(sign * after, 0)) for size, (before, after) in sizes)

    result = np.full(shape, value, dtype=object)
    result[inner(shape, 1)] = a[inner(a.shape, -1)]  # negative ones cut
    return result


def _triangle(keep: Callable) -> Callable:
    def rule(code: Code, shape: Shape, a: np.ndarray, diagonal: int = 0) -> np.ndarray:
        kept = np.broadcast_to(keep(np.ones(a.shape[-2:], dtype=bool), diagonal), a.shape)
        return np.where(kept, a, np.array(0, dtype=object))

    return rule


def _full(value: Scalar | None, at: int) -> Callable:
    """An array of one number: this one, or the argument at that place."""

    def rule(code: Code, shape: Shape, *arguments: object, **__: object) -> np.ndarray:
        return np.full(shape, filled(arguments[at]).item() if value is None else value, dtype=object)

    return rule


def _arange(code: Code, shape: Shape, *bounds: float, **_: object) -> np.ndarray:
    start, step = (0 if len(bounds) == 1 else bounds[0]), (bounds[2] if len(bounds) > 2 else 1)
    return filled([start + step * place for place in range(*shape)]).astype(object)


def _iota(code: Code, shape: Shape, length: int, *, start: int, step: int, **_: object) -> np.ndarray:
    return np.arange(start, start + step * length, step).astype(object)


def _product(code: Code, shape: Shape, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A product of matrices and vectors, or of batches of matrices."""
    rows = a.reshape(*a.shape[:-2], *((1,) * (2 - a.ndim)), *a.shape[-2:])
    columns = b.reshape(*b.shape, 1) if b.ndim == 1 else b
    result = np.empty((*rows.shape[:-1], columns.shape[-1]), dtype=object)
    for *batch, i, k in np.ndindex(result.shape):
        terms = zip(rows[(*batch, i)], columns[(*batch, slice(None), k)], strict=True)
        result[(*batch, i, k)] = reduce(code.add, (code.mul(x, y) for x, y in terms), 0)
    return result.reshape(shape)


def _added_product(code: Code, shape: Shape, start, a, b, *, beta: float = 1, alpha: float = 1) -> np.ndarray:
    product = _product(code, (*a.shape[:-1], *b.shape[a.ndim - 1 :]), a, b)
    return each(lambda x, y: code.add(code.mul(beta, x), code.mul(alpha, y)), start, product)


def _groups(a: np.ndarray, dim: Axes) -> np.ndarray:
    """What is reduced to one number, as the last axis; before it the axes that stay."""
    axes = range(a.ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    reduced = {axis % a.ndim for axis in axes} if a.ndim else set()
    kept = [axis for axis in range(a.ndim) if axis not in reduced]
    return a.transpose(*kept, *sorted(reduced)).reshape(*(a.shape[axis] for axis in kept), -1)


def _reduction(function: Callable) -> Callable:
    """A rule from a function of the code, the scalars of a group, and options."""

    def rule(code: Code, shape: Shape, a: np.ndarray, dim: Axes = None, keepdim: bool = False, **options: object):
        groups = _groups(a, dim)
        result = np.empty(groups.shape[:-1], dtype=object)
        for place in np.ndindex(result.shape):
            result[place] = function(code, list(groups[place]), **options)
        return result.reshape(shape)

    return rule


def _sum(code: Code, terms: list[Scalar]) -> Scalar:
    # One by one from a number that is an integer: of bools it is how many are true.
    return reduce(code.add, terms, 0)


def _mean(code: Code, terms: list[Scalar]) -> Scalar:
    return code.div(_sum(code, terms), len(terms) or math.nan)


def _var(code: Code, terms: list[Scalar], *, correction: float | None = 1) -> Scalar:
    mean = _mean(code, terms)
    deviations = [code.sub(term, mean) for term in terms]
    squares = _sum(code, [code.mul(deviation, deviation) for deviation in deviations])
    return code.div(squares, max(len(terms) - (1 if correction is None else correction), 0))


def _std(code: Code, terms: list[Scalar], *, correction: float | None = 1) -> Scalar:
    return code.call("sqrt", _var(code, terms, correction=correction))


def _vector_norm(code: Code, shape: Shape, a: np.ndarray, ord: float = 2, dim: Axes = None, keepdim: bool = False):
    def norm(code: Code, terms: list[Scalar]) -> Scalar:
        sizes = [code.abs(term) for term in terms]
        if ord == 2:
            return code.call("sqrt", _sum(code, [code.mul(term, term) for term in terms]))
        if abs(ord) == math.inf:
            return reduce(lambda x, y: POINTWISE["maximum" if ord > 0 else "minimum"](code, x, y), sizes)
        if ord == 0:
            return _sum(code, [code.cast(code.compare("!=", term, 0), "real") for term in terms])
        powers = _sum(code, [POINTWISE["pow"](code, size, float(ord)) for size in sizes])
        return POINTWISE["pow"](code, powers, 1 / ord)

    return _reduction(norm)(code, shape, a, dim)


def _both_results(first: Callable, second: Callable) -> Callable:
    def rule(
        code: Code, shapes: list[Shape], a: np.ndarray, dim: Axes = None, keepdim: bool = False, **options: object
    ):
        return [_reduction(first)(code, shapes[0], a, dim, **options), _reduction(second)(code, shapes[1], a, dim)]

    return rule


def _running(combine: Callable) -> Callable:
    def rule(code: Code, shape: Shape, a: np.ndarray, dim: int) -> np.ndarray:
        result = np.moveaxis(np.atleast_1d(a).copy(), dim, 0)
        for place in range(1, len(result)):
            result[place, ...] = each(lambda x, y: combine(code, x, y), result[place - 1], result[place])
        return np.moveaxis(result, 0, dim).reshape(shape)

    return rule


def _by_pairs(name: str) -> Callable:
    return _reduction(lambda code, terms: reduce(lambda x, y: POINTWISE[name](code, x, y), terms))


def _of_all(name: str) -> Callable:
    """The largest or smallest of all numbers. Other overloads, with a dimension or another tensor, are decomposed."""

    def rule(code: Code, shape: Shape, a: np.ndarray, *others: object) -> np.ndarray:
        if others:
            raise NotCovered(f"{name} of more than one tensor is not covered")
        return _by_pairs(name)(code, shape, a)

    return rule


_PRODUCTS = ("mm", "bmm", "mv", "dot", "vdot")
_ADDED_PRODUCTS = ("addmm", "addmv", "baddbmm")
#: those that round: the others move numbers, or choose among them
SUMS = {
    *(*_PRODUCTS, *_ADDED_PRODUCTS, "cumprod", "cumsum", "linalg_vector_norm", "mean", "prod"),
    *("std", "std_mean", "sum", "var", "var_mean"),
}
_SAME_NUMBERS = ("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "collapse_view", "split_dim")

#: by the name of the operation, without its overload; of a name that has another meaning in prims, with "prims."
ARRAYS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_SAME_NUMBERS, lambda code, shape, a, *_, **__: a.reshape(shape)),
    **dict.fromkeys(("index", "_unsafe_index"), lambda code, shape, a, indices: a[_places(indices)].reshape(shape)),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), _index_put),
    **{name: _shown(part) for name, part in _PARTS.items()},
    **{f"{name}_scatter": _replaced(part) for name, part in _PARTS.items()},
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(_ADDED_PRODUCTS, _added_product),
    **dict.fromkeys(
        ("zeros", "zeros_like", "new_zeros", "_efficientzerotensor", "_new_zeros_with_same_feature_meta"), _full(0, 0)
    ),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _full(1, 0)),
    # To be written before it is read.
    **dict.fromkeys(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"), _full(math.nan, 0)),
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split"), _split),
    "all": _reduction(lambda code, terms: reduce(code.both, terms, True)),
    "amax": _by_pairs("maximum"),
    "amin": _by_pairs("minimum"),
    "any": _reduction(lambda code, terms: reduce(code.either, terms, False)),
    "arange": _arange,
    "broadcast_in_dim": _broadcast_in_dim,
    "cat": _cat,
    "chunk": _chunk,
    "constant_pad_nd": _pad,
    "cumprod": _running(Code.mul),
    "cumsum": _running(Code.add),
    "expand": lambda code, shape, a, *_, **__: np.broadcast_to(a, shape),
    "eye": lambda code, shape, *_, **__: np.eye(*shape, dtype=int).astype(object),
    "flip": lambda code, shape, a, dims: np.flip(a, dims),
    "full": _full(None, 1),
    "full_like": _full(None, 1),
    "gather": _gather,
    "index_select": _index_select,
    "iota": _iota,
    "linalg_vector_norm": _vector_norm,
    "max": _of_all("maximum"),
    "mean": _reduction(_mean),
    "min": _of_all("minimum"),
    "new_full": _full(None, 2),
    "permute": lambda code, shape, a, dims: a.transpose(dims),
    "prims.transpose": lambda code, shape, a, permutation: a.transpose(permutation),
    "prod": _reduction(lambda code, terms: reduce(code.mul, terms, 1)),
    "repeat": lambda code, shape, a, repeats: np.tile(a, repeats),
    "roll": lambda code, shape, a, shifts, dims=(): np.roll(a, shifts, dims or None),
    "scalar_tensor": lambda code, shape, value, **_: filled(value),
    "scatter": _scatter,
    "scatter_add": lambda code, shape, a, dim, index, source: _scatter(code, shape, a, dim, index, source, add=True),
    "stack": lambda code, shape, tensors, dim=0: np.stack(tensors, dim),
    "std": _reduction(_std),
    "std_mean": _both_results(_std, _mean),
    "sum": _reduction(_sum),
    "t": lambda code, shape, a: a.T,
    "transpose": lambda code, shape, a, dim0, dim1: a.swapaxes(dim0, dim1),
    "tril": _triangle(np.tril),
    "triu": _triangle(np.triu),
    "unbind": lambda code, shapes, a, dim=0: [filled(each) for each in np.moveaxis(a, dim, 0)],
    "var": _reduction(_var),
    "var_mean": _both_results(_var, _mean),
}
