"""How ``loops.py`` runs a loop: by the public call, by every way it may choose from, bare, and by a peer.

Shapes: L steps, B rows, D the numbers of a row's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils import _pytree as pytree

import deeppcr
import loop_steps as steps
from deeppcr_paper.timing import relative_error
from kernel_methods import Method, can_capture, captured
from loop_problems import FORWARD, Found, Prepared

HAS_PARARNN = find_spec("pararnn") is not None
SOLVE, CAPTURED, BARE, GRAPH = "solve", "solve, captured", "bare loop", "bare loop in a CUDA graph"
CUDNN = "cuDNN"
#: Of a bare loop so many steps are run, and their time is scaled.
PART = 256
#: And of a loop in a CUDA graph, which is made of graphs of many steps each.
GRAPH_PART = 2_048
#: Calls of ``solve`` after the first, before it is timed: what comes again is compiled, checked and recorded first.
WARM_UP = 3
#: The ways that ``solve`` has, each asked for by name.
WAYS: dict[str, Callable[[], Any]] = {
    "Newton()": deeppcr.Newton,
    'Loop(by="graph")': lambda: deeppcr.Loop(by="graph"),
    'Loop(by="kernel")': lambda: deeppcr.Loop(by="kernel"),
}


def solved(
    prepared: Prepared,
    direction: str,
    error: Callable[[Found], float],
    solver: Callable[[], Any] | None = None,
    optional: bool = False,
) -> Method:
    """The public call, as a user makes it: by default with nothing but the loop."""
    last: list[Any] = []

    def run() -> Found:
        found = prepared.solve(direction, **({} if solver is None else {"solver": solver()}))
        last[:] = [found.solution]
        return found

    return Method(run, error, solution=lambda: last[0] if last else None, optional=optional, warm_up=WARM_UP)


def ways(prepared: Prepared, direction: str, error: Callable[[Found], float]) -> dict[str, Method]:
    """Every way that ``solve`` may choose, but for the loop in Python, which is the bare one.

    The loop in a graph takes seconds: of it a part is run, forward.
    """
    found = {}
    for name, solver in WAYS.items():
        if "graph" not in name:
            found[name] = solved(prepared, direction, error, solver, optional=True)
        elif direction == FORWARD:
            length = min(GRAPH_PART, prepared.loop.L)
            part = Prepared(replace(prepared.loop, L=length), prepared.device)
            method = solved(part, direction, part.residual, solver, optional=True)
            found[name] = replace(method, scale=prepared.loop.L / length)
    return found


def bare(prepared: Prepared, direction: str) -> dict[str, Method]:
    """The loop as it stands, and in a CUDA graph: the first steps of it, scaled. It is what all others are checked by."""
    length = min(PART, prepared.loop.L)
    run = prepared.part(direction, length)
    method = partial(Method, run, lambda found: 0.0, optional=True, scale=prepared.loop.L / length)
    found = {BARE: method()}
    if can_capture(prepared.device):
        found[GRAPH] = method(prepare=captured)
    return found


def by_cudnn(prepared: Prepared, direction: str) -> dict[str, Method]:
    """A dense GRU or LSTM by PyTorch's own kernel, whose projection of the inputs is the identity here: in float32 without TF32."""
    inputs, loop, device = prepared.inputs, prepared.loop, prepared.device
    cells = {steps.dense_gru: nn.GRU, steps.dense_lstm: nn.LSTM}
    if loop.make not in cells or device.type != "cuda":
        return {}
    D, (weight, *bias) = loop.D, inputs.parameters
    gates = weight.shape[0] // D
    # PyTorch's order is write, forget, new, read.
    order = torch.cat([torch.arange(D, device=device) + D * at for at in ((1, 0, 3, 2) if gates == 4 else (0, 1, 2))])
    layer = cells[loop.make](gates * D, D, bias=bool(bias), device=device, dtype=loop.dtype)
    with torch.no_grad():
        layer.weight_ih_l0.copy_(torch.eye(gates * D, device=device)[order])
        layer.weight_hh_l0.copy_(weight[order])
        if bias:
            layer.bias_ih_l0.zero_()
            layer.bias_hh_l0.copy_(bias[0][order])
    sources = (*pytree.tree_leaves(inputs.z0), inputs.xs, layer.weight_hh_l0, *([layer.bias_hh_l0] if bias else []))

    def run() -> Found:
        start = pytree.tree_map(lambda leaf: leaf.unsqueeze(0), inputs.z0)
        states, _ = layer(inputs.xs, start)
        if direction == FORWARD:
            return Found([states])
        return Found([states], torch.autograd.grad(states, sources, prepared.weights[0]))

    @torch.no_grad()
    def error(found: Found) -> float:
        """The hidden states, all that the layer gives."""
        right = prepared.reference.states[0]
        return (
            float(((found.states[0].double() - right).abs() / right.abs().amax(0)).nan_to_num(math.inf).max())
            / loop.error
        )

    return {CUDNN: Method(run, error, optional=True, warm_up=WARM_UP)}


def with_projection(prepared: Prepared, direction: str) -> dict[str, Method]:
    """Of a layer, its projection included: ours and pararnn-torch's; and the latter without, forward, which is all it can."""
    inputs, loop = prepared.inputs, prepared.loop
    if not inputs.projection:
        return {}
    x, weight, bias = inputs.projection
    sources = (*inputs.parameters, x, weight, bias)

    @torch.no_grad()
    def error(found: Found) -> float:
        """Gradients are compared as far as the reference has them.

        The projection rounds otherwise on every device, so states are held against the largest size of their component at any step:
        one that begins near zero has no digits of its own there, whoever computes it.
        """
        (states,), (right,), count = found.states, prepared.reference.states, len(inputs.parameters)
        worst = float(((states.double() - right).abs() / right.abs().amax(0)).nan_to_num(math.inf).max()) / loop.error
        expected = prepared.reference.gradients[-count:]
        return max(
            worst, relative_error(found.gradients[:count], expected[: len(found.gradients)]) / loop.gradient_error
        )

    def ours() -> Found:
        solution = deeppcr.solve(inputs.step, inputs.z0, linear(x, weight, bias))
        gradients = () if direction == FORWARD else torch.autograd.grad(solution.states, sources, prepared.weights[0])
        return Found([solution.states], gradients, solution)

    found = {f"{SOLVE}, with projections": Method(ours, error, optional=True, warm_up=WARM_UP)}
    if HAS_PARARNN:
        found |= _pararnn(prepared, direction, error)
    return found


def _pararnn(prepared: Prepared, direction: str, error: Callable[[Found], float]) -> dict[str, Method]:
    from pararnn import ParaGRU, newton_apply  # pyright: ignore[reportMissingImports]

    inputs, loop = prepared.inputs, prepared.loop
    x, weight, bias = inputs.projection

    def cell() -> Any:
        made = ParaGRU(loop.D, loop.D, max_recurrent_norm=None, device=prepared.device, dtype=loop.dtype)
        for name, value in zip(("a_z", "a_r", "a_n"), inputs.parameters, strict=True):
            setattr(made, name, nn.Parameter(value.detach().clone()))
        made.W_x.weight, made.W_x.bias = (nn.Parameter(each.detach().clone()) for each in (weight, bias))
        return made

    def rows_first(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().transpose(0, 1).contiguous()

    projecting, theirs = cell(), rows_first(x).requires_grad_()
    sources = (projecting.a_z, projecting.a_r, projecting.a_n, theirs, projecting.W_x.weight, projecting.W_x.bias)
    outer = rows_first(prepared.weights[0]) if direction != FORWARD else None

    def run() -> Found:
        states = newton_apply(projecting, theirs)
        gradients = () if outer is None else torch.autograd.grad(states, sources, outer)
        return Found([states.transpose(0, 1)], gradients)

    found = {"pararnn-torch, with projections": Method(run, error, optional=True, warm_up=WARM_UP)}
    if direction == FORWARD:
        plain, gates = cell(), rows_first(inputs.xs)
        plain.W_x = nn.Identity()
        found["pararnn-torch"] = Method(
            lambda: Found([newton_apply(plain, gates).transpose(0, 1)]), error, optional=True, warm_up=WARM_UP
        )
    return found
