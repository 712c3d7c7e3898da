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
from ..linear.solve import is_batched
from ..solution import Plan, Result, Solution
from . import kernels

#: Rounds, of two passes each, before the rest is taken one layer after the other. Inside a CUDA graph of the caller,
#: where the host cannot be asked whether another is needed, there are fewer.
_ROUNDS = 8
#: A program without a product holds wider layers in its registers.
_HELD_WITHOUT_PRODUCT = 128


@dataclass(frozen=True)
class Layers:
    """What a network is made of.

    Attributes:
        skip: layers in a block
        residual: whether the input of a block is added to its output
        activation: a name
        atol, rtol: tolerance of a state
        chunk: blocks that are rolled out one after the other; None: chosen by depth. All of them: sequential
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
            return min(blocks, self.chunk)
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
    note: str = ""  # for the plan

    def passes_taken(self) -> list[int]:
        """For each row the passes until it was settled, 0 where it was not: as ``kernels.settled`` sees it."""
        found = self.found[: 2 * self.rounds].tolist()
        taken = []
        for row in range(self.found.shape[-1]):
            done = 0
            for k in range(1, 2 * self.rounds):
                before, last = found[k - 1][0][row], found[k][0][row]
                close = last < before and last * max(last / (before - last), 1.0) <= 0.1
                if last <= 0.01 or close:
                    done = k + 1
                    break
            taken.append(done)
        return taken

    def solution(self) -> Solution:
        taken = self.passes_taken()
        results = tuple(Result.CONVERGED if passes else Result.FINISHED_BY_LOOP for passes in taken)
        device = self.found.device
        exact = [self.blocks if passes else min(self.blocks, (2 * self.rounds - 1) * self.chunk) for passes in taken]
        worst = max(results, key=lambda result: result.severity)
        last = torch.tensor([(passes or 1) - 1 for passes in taken], device=device)
        residual = self.found[:, 1].gather(0, last.unsqueeze(0))[0]
        plan = Plan(
            evaluation="fused kernels", derivative="analytic", linear="groups of chunks", chunk=self.chunk,
            notes=[self.note] if self.note else [],
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


def one_chunk(blocks: int, rows: int, device: torch.device) -> Solution:
    """How a pass over a single chunk went: there was nothing to solve."""
    return Solution(
        states=None,
        iterations=torch.ones(rows, dtype=torch.long, device=device),
        residual=torch.zeros(rows, device=device),
        result=Result.CONVERGED,
        results=(Result.CONVERGED,) * rows,
        exact_steps=torch.full((rows,), blocks, device=device),
        updates=torch.zeros(1, rows, device=device),
        plan=Plan(evaluation="fused kernels", derivative="analytic", linear="none", chunk=blocks),
        message=Result.CONVERGED.value,
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
        if is_batched(grad_outputs[0]):
            raise RuntimeError(
                "is_grads_batched=True: the fused kernels take one gradient at a time; call backward for each"
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "second derivatives: the fused kernels have none. An activation that is a function (such as torch.tanh) "
                'takes the general path; with it, mode="sequential" can be differentiated any number of times'
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


class _Narrow:
    """The passes over a network whose layers fit the registers of one program."""

    captured_rounds = 3

    def __init__(self, weight: Tensor, bias: Tensor, x: Tensor, layers: Layers, chunk: int):
        self.weight, self.bias, self.x, self.layers, self.chunk = weight, bias, x, layers, chunk
        self.rows, self.width = x.shape[1:]
        self.blocks = weight.shape[0]
        self.chunks = -(-self.blocks // chunk)
        self.shape = dense.Shape(self.width)
        self.constants = (layers.skip, layers.residual, layers.activation, self.width, self.shape.padded)

    def prepare(self, initial: Tensor, initial_step: int, found: Tensor) -> None:
        """Before the first pass: from where the chunks start (see ``kernels.roll``), and where to write what is found."""
        self.initial, self.initial_step, self.found = initial, initial_step, found
        self.group = 2 ** math.ceil(math.log2(self.chunks) / 2)
        self.groups = -(-self.chunks // self.group)
        size = (self.chunks + self.groups) * self.width * (self.width + 1) + self.chunks * self.width
        self.workspace = torch.empty(size * self.rows, dtype=self.x.dtype, device=self.x.device)

    def whole(self, start: Tensor, first: int, found: Tensor, passes: int) -> None:
        """One layer after the other from block ``first`` on, in the rows that so many passes have not settled."""
        arguments = (
            self.weight, self.bias, start, 0, self.x, self.x, found,
            self.rows, first, self.blocks, passes, self.blocks, 0, 0,
        )  # fmt: skip
        warps, stages = self.shape.without
        launch(kernels.roll, self.rows, arguments, (*self.constants, False, "", True, stages), warps=warps)

    def one_pass(self, passes: int) -> None:
        """Roll out and correct the starts; every other pass with new Jacobians, the others with the last ones."""
        product = passes % 2 == 0
        how = (product, self.shape.precision)
        sizes = (self.width, self.shape.padded)
        warps, stages = self.shape.with_products if product else self.shape.without
        arguments = (
            self.weight, self.bias, self.initial, self.initial_step, self.x, self.workspace, self.found,
            self.rows, 0, self.blocks, passes, self.chunk, self.chunks, self.groups,
        )  # fmt: skip
        launch(kernels.roll, self.chunks * self.rows, arguments, (*self.constants, *how, False, stages), warps=warps)
        arguments = (self.workspace, self.found, self.rows, passes, self.group, self.chunks, self.groups)
        launch(kernels.gather, (self.groups - 1) * self.rows, arguments, (*sizes, *how, stages), warps=warps)
        warps, stages = self.shape.without
        arguments = (*arguments, self.layers.atol, self.layers.rtol)
        launch(kernels.spread, self.groups * self.rows, arguments, (*sizes, stages), warps=warps)


class _Wide:
    """The same for wider layers, of networks without skip connections."""

    captured_rounds = 1  # what a settled row does not need is done all the same, and costs as much

    def __init__(self, weight: Tensor, bias: Tensor, x: Tensor, layers: Layers, chunk: int):
        self.weight, self.bias, self.x, self.layers, self.chunk = weight, bias, x, layers, chunk
        self.rows, self.width = x.shape[1:]
        self.blocks = weight.shape[0]
        self.chunks = -(-self.blocks // chunk)
        self.constants = (layers.activation, self.width, dense.Shape(self.width).padded, 16)

    def prepare(self, initial: Tensor, initial_step: int, found: Tensor) -> None:
        self.initial, self.initial_step, self.found = initial, initial_step, found
        self.starts = self.x.new_empty(self.chunks, self.rows, self.width)
        self.ends = torch.empty_like(self.starts)

    def whole(self, start: Tensor, first: int, found: Tensor, passes: int) -> None:
        sizes = (self.rows, first, self.blocks, passes, self.blocks)
        if self.width <= _HELD_WITHOUT_PRODUCT:
            arguments = (self.weight, self.bias, start, 0, self.x, self.x, found, *sizes, 0, 0)
            constants = (1, False, *self.constants[:3], False, "", True, 3)
            launch(kernels.roll, self.rows, arguments, constants, warps=8)
        else:
            arguments = (self.weight, self.bias, start, 0, self.x, self.x, self.x, found, *sizes)
            launch(kernels.roll_wide, self.rows, arguments, (*self.constants[:3], 64, True), warps=16)

    def one_pass(self, passes: int) -> None:
        arguments = (
            self.weight, self.bias, self.initial, self.initial_step, self.x, self.starts, self.ends, self.found,
            self.rows, 0, self.blocks, passes, self.chunk,
        )  # fmt: skip
        launch(kernels.roll_wide, self.chunks * self.rows, arguments, (*self.constants, False), warps=8)
        if passes % 2 == 0:
            blocks = dense.Chain(self.weight.unsqueeze(1).expand(-1, self.rows, -1, -1), 0, False)
            slopes = dense.Chain(_slopes(self.x[:-1], self.layers), 0, False)
            self.products = dense.multiply_wide(blocks, slopes, "columns", self.chunks - 1, self.chunk)
        deltas = torch.zeros_like(self.starts)
        # What is not finite stays so in all corrections after it: those chunks start from where the ones before them end.
        deltas[1:] = self.ends[:-1] - self.starts[1:]
        dense.solve_in_place(self.products, deltas)
        arguments = (deltas, self.ends, self.starts, self.found, self.rows, passes)
        arguments = (*arguments, self.layers.atol, self.layers.rtol)
        launch(kernels.correct_wide, self.chunks * self.rows, arguments, self.constants[1:3], warps=4)


def network_of(weight: Tensor, bias: Tensor, x: Tensor, layers: Layers, chunk: int) -> _Narrow | _Wide:
    return (_Narrow if x.shape[-1] <= dense.NARROW else _Wide)(weight, bias, x, layers, chunk)


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
    x = torch.empty((blocks * layers.skip + 1, rows, width), dtype=weight.dtype, device=weight.device)
    network = network_of(weight, bias, x, layers, chunk)
    if network.chunks == 1:
        network.whole(initial, 0, x, 0)
        return x, None

    captured = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    most = network.captured_rounds if captured else _ROUNDS
    found = torch.empty((2 * most, 2, rows), dtype=weight.dtype, device=weight.device)
    if guess is None:
        network.prepare(initial, 0, found)
    else:
        network.prepare(_starts(initial, guess, chunk, network.chunks), rows * width, found)
    report = Report(layers, blocks, chunk, found, most)
    for rounds in range(1, most + 1):
        network.one_pass(2 * rounds - 2)
        network.one_pass(2 * rounds - 1)
        if not captured:
            report.rounds = rounds
            if all(report.passes_taken()):
                _load_loop(network, initial, found, 2 * rounds)
                return x, report
    # Each pass but the last has made the start of one more chunk exact: the rows that are not settled go on from there.
    exact = min(network.chunks - 1, 2 * most - 1) * chunk
    network.whole(aligned(x[exact * layers.skip]), exact, found, 2 * most)
    report.finished = not captured
    return x, report


_loaded: set[tuple] = set()


def _load_loop(network: _Narrow | _Wide, initial: Tensor, found: Tensor, passes: int) -> None:
    """Run the kernel that finishes by the loop, which has nothing to do here, the first time.

    It is part of every CUDA graph of a caller who warmed up with passes that did not need it, and a capture is no place to
    compile and load it.
    """
    key = (type(network), network.constants, initial.device)
    if key not in _loaded:
        network.whole(initial, 0, found, passes)
        _loaded.add(key)


def _starts(initial: Tensor, guess: Tensor, chunk: int, chunks: int) -> Tensor:
    """The first states of all chunks, [N, B, w]."""
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
    if width > dense.NARROW:
        return _adjoint_wide(weight, x, gradients, layers)
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


def _adjoint_wide(weight: Tensor, x: Tensor, gradients: Tensor, layers: Layers) -> tuple[Tensor, Tensor]:
    """The adjoint of layer l - 1 is ``diag(f'(x_l)) W_l^T`` times that of layer l, plus its own gradient."""
    rows, blocks = x.shape[1], weight.shape[0]
    slopes, adjoints = _slopes(x[:-1], layers), torch.empty_like(gradients)
    transposed = dense.Chain(weight[1:].mT.unsqueeze(1).expand(-1, rows, -1, -1), 0, True)
    scales = dense.Chain(slopes[1:], 0, True)
    chunk = min(layers.chunk_blocks(blocks), max(1, blocks - 1))
    dense.solve_chain(transposed, dense.Chain(gradients, 1, True), dense.Chain(adjoints, 1, True), chunk, scales)
    return adjoints, slopes[0] * (adjoints[0] @ weight[0])


def _slopes(z: Tensor, layers: Layers) -> Tensor:
    """The derivative of the activation."""
    value = _ACTIVATIONS[layers.activation](z)
    if layers.activation == "relu":
        return (value > 0).to(z.dtype)
    return 1 - value * value if layers.activation == "tanh" else value * (1 - value)
