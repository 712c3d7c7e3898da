"""Tangents as sums: each term tangents times a factor that has none. Factors meet before tangents are touched, which are so many more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .expressions import Scalar, Value
from .scalars import COPIES
from .tiles import Shape, Tile, Tiles


@dataclass(frozen=True)
class Combination:
    """A tensor of tangents as a sum, each term a tile of tangents times a tile that has none.

    Attributes:
        shape: of the tensor
        terms: (factor, tangents)
    """

    shape: Shape
    terms: tuple[tuple[Tile, Tile], ...]


def has_lead(each: Any) -> bool:
    return isinstance(each, Combination) or (isinstance(each, Tile) and each.lead)


def solid(tiles: Tiles, each: Any) -> Any:
    """A combination as one tile."""
    if not isinstance(each, Combination):
        return each
    total: Scalar = 0.0
    for factor, tangents in each.terms:
        value = tiles.code.mul(tiles.spread(tangents, each.shape, True), tiles.spread(factor, each.shape, True))
        total = tiles.code.add(total, value)
    found = replace(tiles.whole(total, each.shape, [tile for term in each.terms for tile in term]), lead=True)
    only = each.terms[0] if len(each.terms) == 1 else None
    clean = only is not None and only[0].value == 1 and only[1].clean and only[1].shape == each.shape
    return replace(found, clean=clean)


def combined(tiles: Tiles, name: str, shape: Shape, args: list[Any]) -> Combination | None:
    """What an operation that is linear in tangents makes of them; None where it is not."""
    tangents = [has_lead(each) for each in args]
    if name in ("neg", *COPIES) and len(args) == 1:
        return _scaled(tiles, args[0], Tile(-1.0 if name == "neg" else 1.0, ()), shape)
    if name == "mul" and sum(tangents) == 1:
        one, other = args if tangents[0] else args[::-1]
        return _scaled(tiles, one, tiles.tile(other), shape)
    if name == "div" and tangents == [True, False]:
        other = tiles.tile(args[1])
        if isinstance(other.value, Value):
            return _scaled(tiles, args[0], replace(other, value=tiles.code.div(1.0, other.value), clean=False), shape)
        return _scaled(tiles, args[0], Tile(1.0 / other.value, ()), shape)
    if name in ("add", "sub") and len(args) == 2:
        return _summed(tiles, args, [1.0, -1.0 if name == "sub" else 1.0], shape)
    if name == "where" and not tangents[0]:
        if not all(has_lead(each) or _is_zero(each) for each in args[1:]):
            return None
        condition, choices = tiles.tile(args[0]), zip(args[1:], (True, False), strict=True)
        parts = [_chosen(tiles, condition, each, shape, yes) for each, yes in choices]
        return _summed(tiles, parts, [1.0, 1.0], shape)
    return None


def _chosen(tiles: Tiles, condition: Tile, each: Any, shape: Shape, yes: bool) -> Combination:
    """Tangents where a condition holds (or does not), else zero: also where their factors are infinite."""
    terms = []
    for factor, tangents in _terms(each):
        common = tuple(torch.broadcast_shapes(condition.shape, factor.shape))
        own = tiles.spread(factor, common, False)
        choices = (own, 0.0) if yes else (0.0, own)
        value = tiles.code.where(tiles.spread(condition, common, False), *choices)
        terms.append((tiles.whole(value, common, [condition, factor]), tangents))
    return Combination(shape, tuple(terms))


def _is_zero(each: Any) -> bool:
    value = each.value if isinstance(each, Tile) else each
    return isinstance(value, int | float) and value == 0


def _terms(each: Any) -> tuple[tuple[Tile, Tile], ...]:
    if isinstance(each, Combination):
        return each.terms
    return () if _is_zero(each) else ((Tile(1.0, ()), each),)


def _scaled(tiles: Tiles, each: Any, factor: Tile, shape: Shape) -> Combination:
    return Combination(shape, tuple((_times(tiles, own, factor), tangents) for own, tangents in _terms(each)))


def _times(tiles: Tiles, a: Tile, b: Tile) -> Tile:
    shape = tuple(torch.broadcast_shapes(a.shape, b.shape))
    value = tiles.code.mul(tiles.spread(a, shape, False), tiles.spread(b, shape, False))
    return tiles.whole(value, shape, [a, b])


def _summed(tiles: Tiles, parts: list[Any], signs: list[float], shape: Shape) -> Combination | None:
    if not all(has_lead(each) or _is_zero(each) for each in parts):
        return None
    found: dict[Tile, Tile] = {}
    for each, sign in zip(parts, signs, strict=True):
        for factor, tangents in _scaled(tiles, each, Tile(sign, ()), shape).terms:
            known = found.get(tangents)
            if known is not None:
                common = tuple(torch.broadcast_shapes(known.shape, factor.shape))
                values = [tiles.spread(one, common, False) for one in (known, factor)]
                factor = tiles.whole(tiles.code.add(*values), common, [known, factor])
            found[tangents] = factor
    return Combination(shape, tuple((factor, tangents) for tangents, factor in found.items()))
