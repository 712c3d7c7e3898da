"""A graph of PyTorch's operations, as ``make_fx`` traces it, becomes scalar code.

The graph is interpreted on arrays of scalars. Rules go by the name of an operation, whatever its overload: those of
``POINTWISE`` number by number, those of ``ARRAYS`` on whole arrays.

Everything floating is one kind, "real", computed in one dtype: float64 if the step's is, else float32, also where the step
rounds to fewer digits in between (autocast). A step that computes in float64 and in less is not covered: ``check_dtypes``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from .arrays import ARRAYS, SUMS, each, filled
from .decompositions import DECOMPOSITIONS
from .expressions import Code, Kind, NotCovered, Scalar, Value
from .scalars import COPIES, POINTWISE

__all__ = ["ARRAYS", "DECOMPOSITIONS", "POINTWISE", "check_dtypes", "evaluate", "is_pointwise", "pointwise"]

#: arguments that say how a tensor is stored, or that its own dtype says
_STORAGE = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}

#: What is a number, or as large as a tensor with one number in all places: which that is, by the arguments.
ONE_NUMBER: dict[str, Callable[..., Any]] = {
    "full": lambda arguments: arguments[1],
    "full_like": lambda arguments: arguments[1],
    "new_full": lambda arguments: arguments[2],
    "scalar_tensor": lambda arguments: arguments[0],
    **dict.fromkeys(
        ("zeros", "zeros_like", "new_zeros", "_efficientzerotensor", "empty_like", "_new_zeros_with_same_feature_meta"),
        lambda arguments: 0.0,
    ),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda arguments: 1.0),
    "_has_same_storage_numel": lambda arguments: True,
}


def name_of(target: Any) -> str:
    """ "aten.add" of any of its overloads."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return getattr(target, "__name__", str(target))


def _rule(rules: dict[str, Callable], node: torch.fx.Node) -> Callable | None:
    name, result = name_of(node.target), node.meta.get("val")
    if isinstance(result, torch.Tensor) and result.is_complex():
        raise NotCovered(f"{name} of complex numbers is not covered")
    return rules.get(name) or rules.get(name.split(".")[-1].removesuffix("_"))


def kind_of_dtype(dtype: torch.dtype) -> Kind:
    return "real" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"


def _options(node: torch.fx.Node) -> dict[str, Any]:
    return {name: value for name, value in node.kwargs.items() if name not in _STORAGE and value is not None}


def is_pointwise(node: torch.fx.Node) -> bool:
    """Whether an operation goes number by number, with broadcasting."""
    return node.op == "call_function" and _rule(POINTWISE, node) is not None


def pointwise(node: torch.fx.Node, arguments: list[Scalar | None], code: Code) -> Scalar:
    """One number of what such an operation gives.

    Args:
        node: one that ``is_pointwise``
        arguments: its positional arguments, scalars in place of tensors
        code: what gets its lines
    """
    rule = _rule(POINTWISE, node)
    assert rule is not None, node
    dtype = node.meta["val"].dtype
    return _wrapped(_cast(rule(code, *arguments, **_options(node)), dtype, code), dtype, code)


def _wrapped(scalar: Scalar, dtype: torch.dtype, code: Code) -> Scalar:
    """An integer as it is in fewer bits than the code's 64: 100 + 100 is -56 in eight."""
    if kind_of_dtype(dtype) != "int" or dtype == torch.int64:
        return scalar
    if not isinstance(scalar, Value):
        return torch.tensor(scalar).to(dtype).item()
    name = str(dtype).removeprefix("torch.")
    return code.emit(f"tl.cast(tl.cast({scalar.name}, tl.{name}), tl.int64)", "int", scalar)


def _cast(scalar: Scalar, dtype: torch.dtype, code: Code) -> Scalar:
    scalar = code.cast(scalar, kind_of_dtype(dtype))
    if isinstance(scalar, float) and dtype != torch.float64:
        with np.errstate(over="ignore"):
            return float(np.float32(scalar))  # the number that is in PyTorch's tensor
    return scalar


def check_dtypes(graph: torch.fx.Graph) -> None:
    """Refuse a step that computes in float64 and in less: its code has one dtype.

    It is for the step's own graph: in those of derivatives, numbers have tangents in float64 whatever the step's dtype.

    Raises:
        NotCovered: there is such an operation
    """
    varying: set[torch.fx.Node] = set()  # what else there is, is numbers, which are folded
    dtypes: set[torch.dtype] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") or not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
            dtypes |= _rounded_to(node)
    if torch.float64 in dtypes and len(dtypes) > 1:
        raise NotCovered("float64 beside other floating dtypes is not covered")


def _rounded_to(node: torch.fx.Node) -> set[torch.dtype]:
    """The floating dtypes between which an operation rounds: none if it only moves numbers, or has none."""
    fakes = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    dtypes = [fake.dtype for fake in fakes if isinstance(fake, torch.Tensor) and fake.dtype.is_floating_point]
    name = name_of(node.target).split(".")[-1]
    if node.op != "call_function" or not dtypes:
        return set()
    if name in COPIES:
        return set(dtypes) if dtypes[0] != torch.float64 else set()
    return {dtypes[0]} if name in SUMS or (name in POINTWISE and name not in ("where", "masked_fill")) else set()


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
    needed = _needed(graph)

    def call(node: torch.fx.Node, arguments: Any, options: dict[str, Any]) -> Any:
        return _call(node, arguments, options, code) if node in needed else None

    return [filled(each) for each in interpreted(graph, inputs, constants, call)]


def interpreted(
    graph: torch.fx.Graph,
    inputs: Iterable[Any],
    constants: Callable[[str], Any],
    call: Callable[[torch.fx.Node, Any, dict[str, Any]], Any],
) -> list[Any]:
    """The outputs of a graph, where an operation with its arguments, positional and by name, means what ``call`` says."""
    known: dict[torch.fx.Node, Any] = {}
    remaining = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(remaining)
        elif node.op == "output":
            return [known[each] if isinstance(each, torch.fx.Node) else each for each in pytree.tree_leaves(node.args)]
        elif node.op == "get_attr":
            known[node] = constants(str(node.target))
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda each: known[each])
            known[node] = call(node, args, kwargs)
    raise ValueError("the graph has no output")


def _needed(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """What the outputs depend on."""
    needed: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if _changes_what_others_see(node):
            raise NotCovered(f"{name_of(node.target)}, which changes a tensor in place, is not covered")
        if node.op == "output" or node in needed:
            needed.update(node.all_input_nodes)
    return needed


def is_mutation(node: torch.fx.Node) -> bool:
    """Whether an operation works in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _changes_what_others_see(node: torch.fx.Node) -> bool:
    """Whether an operation works in place, other than on a new tensor that nobody else uses, as some of PyTorch's own formulas do."""
    if not is_mutation(node):
        return False
    changed = node.args[0]
    if not (isinstance(changed, torch.fx.Node) and isinstance(changed.target, torch._ops.OpOverload)):
        return True
    is_view = any(result.alias_info is not None for result in changed.target._schema.returns)
    return is_view or len(changed.users) > 1


def _call(node: torch.fx.Node, arguments: Any, named: dict[str, Any], code: Code) -> Any:
    if node.target is operator.getitem:
        return arguments[0][arguments[1]]
    name, result = name_of(node.target), node.meta["val"]
    if is_pointwise(node):
        return each(lambda *scalars: pointwise(node, list(scalars), code), *arguments)
    rule = _rule(ARRAYS, node)
    if rule is None:
        raise NotCovered(f"{name} is not covered")
    options = {name: named[name] for name in _options(node)}
    if isinstance(result, torch.Tensor):
        array = rule(code, tuple(result.shape), *arguments, **options)
        return each(lambda scalar: _cast(scalar, result.dtype, code), array)
    parts = rule(code, [tuple(fake.shape) for fake in result], *arguments, **options)
    return [
        each(lambda scalar, dtype=fake.dtype: _cast(scalar, dtype, code), part)
        for part, fake in zip(parts, result, strict=True)
    ]
