"""What a step computes of its inputs alone, before the kernels: for all steps and rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .trace import OneRow


def compute(graph: fx.GraphModule, nodes: Iterable[fx.Node], known: dict[fx.Node, Any], device: torch.device) -> Any:
    """Run nodes of a graph on a device, beside those that are known, to which they are added; returns what the graph's output is."""
    for node in nodes:
        if node in known:
            continue
        if node.op == "output":
            return [known[each] for each in pytree.tree_leaves(node.args[0])]
        if node.op == "get_attr":
            known[node] = getattr(graph, str(node.target)).to(device)
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: known[each])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": device}
        known[node] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    return None


def reached(sources: Iterable[fx.Node], nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What depends on some nodes, these included."""
    found = set(sources)
    for node in nodes:
        if node.op != "output" and any(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def ancestors(node: fx.Node) -> list[fx.Node]:
    """What a node depends on, itself included."""
    found: dict[fx.Node, None] = {node: None}
    waiting = [node]
    while waiting:
        for each in waiting.pop().all_input_nodes:
            if each not in found:
                found[each] = None
                waiting.append(each)
    return list(found)


def hoisted(row: OneRow, wanted: list[fx.Node], outside: list[Tensor], device: torch.device) -> list[Tensor]:
    """By vmap over steps and rows; what depends on neither is computed once.

    Args:
        wanted: which nodes
        outside: the inputs and closures, for all steps and rows
    """
    needed = {each for node in wanted for each in ancestors(node)}
    order = [node for node in row.nodes if node in needed]
    have = dict(zip(row.outside_nodes, outside, strict=True))
    steps, rows = row.sources()
    by_step, by_row = reached(steps, order), reached(rows, order)
    changing = by_step | by_row
    fixed = {node: have[node] for node in order if node in have and node not in changing}
    compute(row.graph, [node for node in order if node not in changing], fixed, device)
    moving = [node for node in order if node in changing and node in have]
    late = [node for node in wanted if node in changing and node not in have]

    def of_one(*values: Tensor) -> list[Tensor]:
        known = {**fixed, **dict(zip(moving, values, strict=True))}
        compute(row.graph, order, known, device)
        return [known[node] for node in late]

    found = {**fixed, **{node: have[node] for node in moving}}
    if late:
        depend = [(node in by_step, node in by_row) for node in late]
        given = [(have[node], node in steps, node in rows) for node in moving]
        found.update(zip(late, _over_steps_and_rows(of_one, given, depend, row.batch_dims), strict=True))
    return [found[node] for node in wanted]


def _over_steps_and_rows(
    function: Callable, given: list[tuple[Tensor, bool, bool]], wanted: list[tuple[bool, bool]], ones: int
) -> list[Tensor]:
    """``function`` of one row at one step, for all; results [L, rows, ...], without either where they do not depend on it.

    Args:
        given: each with whether it differs from step to step, and from row to row
        wanted: the same of each result
        ones: dimensions that one row has of its own
    """
    prepared = [
        tensor.reshape(*tensor.shape[: step + 1], *(1,) * ones, *tensor.shape[step + 1 :]) if row else tensor
        for tensor, step, row in given
    ]
    results: list[Tensor | None] = [None] * len(wanted)
    for steps, rows in dict.fromkeys(wanted):
        at = [i for i, each in enumerate(wanted) if each == (steps, rows)]

        def some(*values: Tensor, at: list[int] = at) -> list[Tensor]:
            found = function(*values)
            return [found[i] for i in at]

        mapped = some
        if rows:
            mapped = torch.vmap(mapped, tuple(0 if row else None for _, _, row in given))
        if steps:
            mapped = torch.vmap(mapped, tuple(0 if step else None for _, step, _ in given))
        for i, value in zip(at, mapped(*prepared), strict=True):
            results[i] = value
    return [each for each in results if each is not None]
