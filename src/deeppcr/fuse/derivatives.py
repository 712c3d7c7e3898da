"""What kernels compute of a step, as graphs: its values, and by PyTorch's own rules what carries tangents on and cotangents back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from .operations import DECOMPOSITIONS
from .parts import Parts


def values_graph(parts: Parts, dtype: torch.dtype) -> fx.GraphModule:
    """(state, leaves) to the next state."""
    return traced(parts.core, *_examples(parts, dtype))


def tangent_graph(parts: Parts, dtype: torch.dtype) -> fx.GraphModule:
    """(state, tangents of the state, leaves) to the next state's tangents."""

    def push(state: Sequence[Tensor], tangents: Sequence[Tensor], leaves: Sequence[Tensor]) -> Any:
        return torch.func.jvp(lambda *z: parts.core(*z, *leaves), tuple(state), tuple(tangents))[1]

    return _beside(parts, dtype, push)


def adjoint_graph(parts: Parts, dtype: torch.dtype) -> fx.GraphModule:
    """(state, cotangents of the next state, leaves) to the cotangents of the state."""

    def pull(state: Sequence[Tensor], cotangents: Sequence[Tensor], leaves: Sequence[Tensor]) -> Any:
        return torch.func.vjp(lambda *z: parts.core(*z, *leaves), *state)[1](list(cotangents))

    return _beside(parts, dtype, pull)


def cotangent_graph(parts: Parts, dtype: torch.dtype) -> fx.GraphModule:
    """(state, cotangents of the next state, leaves) to the cotangents of the leaves that are floating."""

    def pull(state: Sequence[Tensor], cotangents: Sequence[Tensor], leaves: Sequence[Tensor]) -> Any:
        real = [i for i, leaf in enumerate(leaves) if leaf.is_floating_point()]

        def of_leaves(*some: Tensor) -> list[Tensor]:
            every = list(leaves)
            for i, leaf in zip(real, some, strict=True):
                every[i] = leaf
            return parts.core(*state, *every)

        return torch.func.vjp(of_leaves, *[leaves[i] for i in real])[1](list(cotangents))

    return _beside(parts, dtype, pull)


def _beside(parts: Parts, dtype: torch.dtype, function: Callable[..., Any]) -> fx.GraphModule:
    """A function of the state, of what goes beside it in the same shapes, and of the leaves."""
    count, given = parts.row.states, _examples(parts, dtype)

    def flat(*every: Tensor) -> Any:
        return function(every[:count], every[count : 2 * count], every[2 * count :])

    return traced(flat, *given[:count], *given)


def traced(function: Callable[..., Any], *examples: Tensor) -> fx.GraphModule:
    """Traced on real numbers: forward mode has tensors of zeros that stand-ins know nothing of."""
    # In inference mode, or on tensors that were made there, some versions of PyTorch differentiate nothing.
    with torch.inference_mode(False), torch.enable_grad():
        made = make_fx(torch.func.functionalize(function, remove="mutations"), decomposition_table=DECOMPOSITIONS,
                       tracing_mode="real")(*map(torch.clone, examples))  # fmt: skip
    made.graph.eliminate_dead_code()
    return made


def _examples(parts: Parts, dtype: torch.dtype) -> list[Tensor]:
    """Small tensors with the shapes of one row, on the CPU. Their values matter to nobody."""
    state = [torch.full(tuple(node.meta["val"].shape), 0.5, dtype=dtype) for node in parts.row.state_nodes]
    return [*state, *(torch.full(leaf.shape, 0.5, dtype=dtype) if leaf.dtype.is_floating_point
                      else torch.ones(leaf.shape, dtype=leaf.dtype) for leaf in parts.leaves)]  # fmt: skip
