"""Networks of narrow layers by a handful of kernels: parallel over chunks of layers, or one layer after the other.

Shapes: T layers in blocks of ``skip``, N chunks, B rows, w the width; ``x`` [T + 1, B, w], the input of every layer and
the last output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..linear.kernels import dense
from ..linear.kernels.launch import aligned, launch
from ..solution import Plan, Result, Solution
from . import kernels

#: Rounds, of two passes each, before the rest is taken one layer after the other: inside a CUDA graph of the caller,
#: where the host cannot be asked whether another is needed, and elsewhere.
_CAPTURED_ROUNDS = 3
_ROUNDS = 8


@dataclass(frozen=True)
class Layers:
    """What a network is made of.

    Attributes:
        skip: layers in a block
        residual: whether the input of a block is added to its output
        activation: a name
        atol, rtol: tolerance of a state
        chunk: layers that are rolled out one after the other; None: chosen by depth. All of them: sequential
    """

    skip: int
    residual: bool
    activation: str
    atol: float = 1e-5
    rtol: float = 1e-5
    chunk: int | None = None

    def chunk_blocks(self, blocks: int) -> int:
        """Blocks in a chunk. With about half a square root of the depth, roll-out and solve take equally long."""
        if self.chunk is not None:
            return min(blocks, max(1, self.chunk // self.skip))
        layers = 2 ** max(0, round(math.log2(math.sqrt(blocks * self.skip) / 2)))
        return min(blocks, max(1, layers // self.skip))


@dataclass
class Report:
    """How a parallel pass went; ``found`` [passes, 2, B] is read only when somebody asks."""

    layers: Layers
    blocks: int
    chunk: int
    found: Tensor
    rounds: int
    finished: bool = False

    def passes_taken(self) -> list[int]:
        """For each row the passes until it was settled, 0 where it was not: as ``kernels.settled`` sees it."""
        found = self.found[: 2 * self.rounds].tolist()
        taken = []
        for row in range(self.found.shape[-1]):
            done = 0
            for k in range(1, 2 * self.rounds):
                before, last = found[k - 1][0][row], found[k][0][row]
                close = last < before and last * max(last / (before - last), 1.0) <= 1.0
                if last <= 0.01 or close:
                    done = k + 1
                    break
            taken.append(done)
        return taken

    def solution(self) -> Solution:
        taken = self.passes_taken()
        results = tuple(Result.CONVERGED if passes else Result.FINISHED_BY_LOOP for passes in taken)
        device = self.found.device
        exact = [self.blocks if passes else min(self.blocks, 2 * self.rounds * self.chunk) for passes in taken]
        worst = max(results, key=lambda result: result.severity)
        last = torch.tensor([(passes or 1) - 1 for passes in taken], device=device)
        residual = self.found[:, 1].gather(0, last.unsqueeze(0))[0]
        plan = Plan(
            evaluation="fused kernels", derivative="analytic", linear="groups of chunks", chunk=self.chunk
        )  # fmt: skip
        return Solution(
            states=None,
            iterations=torch.tensor([-(-passes // 2) or self.rounds for passes in taken], device=device),
            residual=torch.where(torch.tensor([passes > 0 for passes in taken], device=device), residual, 0.0),
            result=worst,
            results=results,
            exact_steps=torch.tensor(exact, device=device),
            updates=self.found[: 2 * self.rounds : 2, 0],
            plan=plan,
            message=worst.value.format(step=min(exact)),
        )


def apply(
    weight: Tensor, bias: Tensor, initial: Tensor, guess: Tensor | None, layers: Layers, reports: list[Report | None]
) -> Tensor:
    """The states after every block, [blocks, B, w]; ``Apply`` says of what. How it went is added to ``reports``."""
    if initial.is_cuda and initial.device.index != torch.cuda.current_device():
        with torch.cuda.device(initial.device):
            return apply(weight, bias, initial, guess, layers, reports)
    if torch.is_grad_enabled() and (weight.requires_grad or bias.requires_grad or initial.requires_grad):
        return Apply.apply(weight, bias, initial, guess, layers, reports)
    weight, bias, initial = (aligned(each.contiguous()) for each in (weight, bias, initial))
    x, report = run(weight, bias, initial, guess, layers)
    reports.append(report)
    return x[layers.skip :: layers.skip]


class Apply(torch.autograd.Function):
    """The states after every block as a function of weights [blocks, skip, w, w], biases and the initial state [B, w]."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor, initial: Tensor, guess: Tensor | None, layers: Layers, box: list
    ):
        ctx.layers = layers
        weight, bias, initial = (aligned(each.contiguous()) for each in (weight, bias, initial))
        x, report = run(weight, bias, initial, guess, layers)
        box.append(report)
        ctx.save_for_backward(weight, x)
        return x[layers.skip :: layers.skip]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "second derivatives: the fused kernels have none; give the module an activation that is a function "
                "(such as torch.tanh), which takes the general path"
            )
        weight, x = ctx.saved_tensors
        layers: Layers = ctx.layers
        adjoints, initial = adjoint(weight, x, aligned(grad_outputs[0].contiguous()), layers)
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            values = _ACTIVATIONS[layers.activation](x[:-1])
            if x.shape[1] == 1:
                grad_weight = adjoints.mT * values
            else:
                grad_weight = torch.bmm(adjoints.mT, values)
            grad_weight = grad_weight.view_as(weight)
        if ctx.needs_input_grad[1]:
            grad_bias = adjoints.sum(1).view(weight.shape[:-1])
        return grad_weight, grad_bias, initial, None, None, None


_ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}


def run(
    weight: Tensor, bias: Tensor, initial: Tensor, guess: Tensor | None, layers: Layers
) -> tuple[Tensor, Report | None]:
    """``x``, and for a parallel pass how it went.

    Args:
        weight, bias: [blocks, (skip,) w, w] and [blocks, (skip,) w], contiguous
        initial: [B, w]
        guess: [blocks, w] or [blocks, B, w], states after every block; None: the initial state repeated
    """
    blocks, (rows, width) = weight.shape[0], initial.shape
    chunk = layers.chunk_blocks(blocks)
    chunks = -(-blocks // chunk)
    shape = dense.Shape(width)
    options = {"dtype": weight.dtype, "device": weight.device}
    x = torch.empty((blocks * layers.skip + 1, rows, width), **options)
    constants = (layers.skip, layers.residual, layers.activation, width, shape.padded)

    def whole(start: Tensor, first: int, found: Tensor, passes: int) -> None:
        arguments = (weight, bias, start, 0, x, x, found, rows, first, blocks, passes, blocks, 0, 0)
        warps, stages = shape.without
        launch(kernels.roll, rows, arguments, (*constants, False, "", True, stages), warps=warps)

    if chunks == 1:
        whole(initial, 0, x, 0)
        return x, None

    group = 2 ** math.ceil(math.log2(chunks) / 2)
    groups = -(-chunks // group)
    start, start_step = (initial, 0) if guess is None else (_starts(initial, guess, chunk, chunks), rows * width)
    size = (chunks + groups) * width * (width + 1) + (chunks + 1) * width
    workspace = torch.empty(size * rows, **options)
    captured = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    most = _CAPTURED_ROUNDS if captured else _ROUNDS
    found = torch.empty((2 * most, 2, rows), **options)

    def one_pass(passes: int) -> None:
        product = passes % 2 == 0
        how = (product, shape.precision)
        warps, stages = shape.with_products if product else shape.without
        arguments = (
            weight, bias, start, start_step, x, workspace, found,
            rows, 0, blocks, passes, chunk, chunks, groups,
        )  # fmt: skip
        launch(kernels.roll, chunks * rows, arguments, (*constants, *how, False, stages), warps=warps)
        arguments = (workspace, found, rows, passes, group, chunks, groups)
        launch(kernels.gather, (groups - 1) * rows, arguments, (width, shape.padded, *how, stages), warps=warps)
        warps, stages = shape.without
        arguments = (*arguments, layers.atol, layers.rtol)
        launch(kernels.spread, groups * rows, arguments, (width, shape.padded, stages), warps=warps)

    report = Report(layers, blocks, chunk, found, most)
    for rounds in range(1, most + 1):
        one_pass(2 * rounds - 2)
        one_pass(2 * rounds - 1)
        if not captured:
            report.rounds = rounds
            if all(report.passes_taken()):
                return x, report
    # As many chunks as there were passes are exact; the rows that are not settled go on from there.
    exact = min(chunks - 1, 2 * most - 1) * chunk
    whole(aligned(x[exact * layers.skip]), exact, found, 2 * most)
    report.finished = not captured
    return x, report


def _starts(initial: Tensor, guess: Tensor | None, chunk: int, chunks: int) -> Tensor:
    """The first states of all chunks, [N, B, w]."""
    if guess is None:
        return initial.repeat(chunks, 1, 1)
    picked = guess[chunk - 1 : (chunks - 1) * chunk : chunk]
    if picked.ndim == 2:
        picked = picked.unsqueeze(1).expand(-1, initial.shape[0], -1)
    return torch.cat([initial.unsqueeze(0), picked])


def adjoint(weight: Tensor, x: Tensor, gradients: Tensor, layers: Layers) -> tuple[Tensor, Tensor]:
    """The gradients of all layers' outputs [T, B, w] and of the initial state, from those of the blocks' outputs."""
    blocks, (rows, width) = weight.shape[0], x.shape[1:]
    chunk = layers.chunk_blocks(blocks)
    chunks = -(-blocks // chunk)
    shape = dense.Shape(width)
    adjoints, initial = torch.empty_like(x[1:]), torch.empty_like(x[0])
    constants = (layers.skip, layers.residual, layers.activation, width, shape.padded)
    if chunks == 1:
        starts = aligned(gradients[-1])
    else:
        starts = torch.empty((chunks, rows, width), dtype=x.dtype, device=x.device)
        products = torch.empty((chunks - 1, rows, width, width), dtype=x.dtype, device=x.device)
        arguments = (weight, x, gradients, products, starts, rows, blocks, chunk)
        warps, stages = shape.with_products
        how = (*constants, shape.precision, stages)
        launch(kernels.adjoint_reduce, (chunks - 1) * rows, arguments, how, warps=warps)
        dense.solve_in_place(products, starts)
    arguments = (weight, x, gradients, starts, adjoints, initial, rows, blocks, chunk)
    warps, stages = shape.without
    launch(kernels.adjoint_substitute, chunks * rows, arguments, (*constants, chunks == 1, stages), warps=warps)
    return adjoints, initial
