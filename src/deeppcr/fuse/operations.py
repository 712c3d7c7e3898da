"""A graph of PyTorch's operations, as ``make_fx`` traces it, becomes scalar code.

The graph is interpreted on arrays of scalars. Rules go by the name of an operation, whatever its overload: those of
``POINTWISE`` number by number, those of ``ARRAYS`` on whole arrays. Everything floating is one kind, "real": the dtype in which the
kernel computes, so that conversions between floating dtypes do nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.utils import _pytree as pytree

from .arrays import ARRAYS, each, filled
from .expressions import Code, Kind, NotCovered, Scalar
from .scalars import POINTWISE

__all__ = ["ARRAYS", "DECOMPOSITIONS", "POINTWISE", "evaluate", "is_pointwise", "pointwise"]

_aten = torch.ops.aten
#: what to trace with: what is taken apart here needs no rule
DECOMPOSITIONS: dict[Any, Callable] = {
    **core_aten_decompositions(),
    **get_decompositions([_aten.native_layer_norm, _aten._softmax, _aten._log_softmax]),
}
#: arguments that say how a tensor is stored, or that its own dtype says
_STORAGE = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}


def name_of(target: Any) -> str:
    """ "aten.add" of any of its overloads."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return getattr(target, "__name__", str(target))


def _rule(rules: dict[str, Callable], name: str) -> Callable | None:
    return rules.get(name) or rules.get(name.split(".")[-1])


def kind_of_dtype(dtype: torch.dtype) -> Kind:
    if dtype.is_complex:
        raise NotCovered("complex numbers are not covered")
    return "real" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"


def _options(node: torch.fx.Node) -> dict[str, Any]:
    return {name: value for name, value in node.kwargs.items() if name not in _STORAGE and value is not None}


def is_pointwise(node: torch.fx.Node) -> bool:
    """Whether an operation goes number by number, with broadcasting."""
    return node.op == "call_function" and _rule(POINTWISE, name_of(node.target)) is not None


def pointwise(node: torch.fx.Node, arguments: list[Scalar | None], code: Code) -> Scalar:
    """One number of what such an operation gives.

    Args:
        node: one that ``is_pointwise``
        arguments: its positional arguments, scalars in place of tensors
        code: what gets its lines
    """
    rule = _rule(POINTWISE, name_of(node.target))
    assert rule is not None, node
    return code.cast(rule(code, *arguments, **_options(node)), kind_of_dtype(node.meta["val"].dtype))


def evaluate(
    graph: torch.fx.Graph, inputs: list[np.ndarray], constants: Callable[[str], np.ndarray], code: Code
) -> list[np.ndarray]:
    """Write a graph as scalar code.

    Args:
        graph: of operations of aten and prims, with fake tensors in ``meta["val"]``
        inputs: an array of scalars for each placeholder, of its shape
        constants: of an attribute's name, the array of its scalars
        code: what gets the lines

    Returns:
        an array of scalars for each output

    Raises:
        NotCovered: an operation has no rule
    """
    known: dict[torch.fx.Node, Any] = {}
    remaining, needed = iter(inputs), _needed(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(remaining)
        elif node.op == "output":
            return [filled(known[each]) for each in pytree.tree_leaves(node.args)]
        elif node in needed:
            known[node] = constants(str(node.target)) if node.op == "get_attr" else _call(node, known, code)
    raise ValueError("the graph has no output")


def _needed(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """What the outputs depend on. What changes a tensor is needed by whoever reads it, which is not written in the graph."""
    needed: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            raise NotCovered(f"{name_of(node.target)}, which changes a tensor in place, is not covered")
        if node.op == "output" or node in needed:
            needed.update(node.all_input_nodes)
    return needed


def _call(node: torch.fx.Node, known: dict[torch.fx.Node, Any], code: Code) -> Any:
    arguments = torch.fx.node.map_arg(node.args, lambda argument: known[argument])
    if node.target is operator.getitem:
        return arguments[0][arguments[1]]
    name, result = name_of(node.target), node.meta["val"]
    if is_pointwise(node):
        return each(lambda *scalars: pointwise(node, list(scalars), code), *arguments)
    rule = _rule(ARRAYS, name)
    if rule is None:
        raise NotCovered(f"{name} is not covered")
    options = torch.fx.node.map_arg(_options(node), lambda argument: known[argument])
    if isinstance(result, torch.Tensor):
        return _cast(rule(code, tuple(result.shape), *arguments, **options), result.dtype, code)
    parts = rule(code, None, *arguments, **options)
    return [_cast(part, fake.dtype, code) for part, fake in zip(parts, result, strict=True)]


def _cast(array: np.ndarray, dtype: torch.dtype, code: Code) -> np.ndarray:
    kind = kind_of_dtype(dtype)
    return each(lambda scalar: code.cast(scalar, kind), array)
