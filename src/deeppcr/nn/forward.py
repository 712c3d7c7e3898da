"""Networks of narrow layers by a handful of kernels: parallel over chunks of layers, or one layer after the other.

Shapes: T layers in blocks of ``skip``, N chunks, B rows, w the width; ``x`` [T + 1, B, w], the input of every layer and
the last output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ..launch import aligned, launch, repeat
from ..linear.kernels import dense
from ..runtime import apply_directly, full_precision, is_batched, is_capturing
from ..tolerance import Tolerance
from . import kernels
from .adjoint import HELD_WITHOUT_PRODUCT, WIDE_LOOP, adjoint, all_gradients
from .cost import chunks_in_group
from .layers import ACTIVATIONS, Layers
from .report import Report

#: Rounds, of two passes each, before the rest is taken one layer after the other. Inside a CUDA graph of the caller,
#: where the host cannot be asked whether another is needed, there are fewer.
_ROUNDS = 8


def apply(
    weight: Tensor,
    bias: Tensor,
    initial: Tensor,
    guess: Tensor | None,
    layers: Layers,
    left: list[Any],
    last: bool = False,
    average: Tensor | None = None,
) -> Tensor:
    """The states after every block, [blocks, B, w], or after the last one, [B, w]; ``Apply`` says of what. ``left``
    gets how it went (a ``Report``; None for a single chunk) and ``x``, and ``average`` [blocks, w] the rows' mean."""
    if initial.is_cuda and initial.device.index != torch.cuda.current_device():
        with torch.cuda.device(initial.device):
            return apply(weight, bias, initial, guess, layers, left, last, average)
    if torch.is_grad_enabled() and (weight.requires_grad or bias.requires_grad or initial.requires_grad):
        made = partial(_states, guess=guess, layers=layers, left=left, last=last, average=average)
        return apply_directly(Apply, weight, bias, initial, layers, made)
    return _states(weight, bias, initial, guess, layers, left, last, average)[0]


def attach(weight: Tensor, bias: Tensor, initial: Tensor, states: Tensor, layers: Layers, last: bool) -> Tensor:
    """``states`` [blocks, B, w] that ``apply`` has found before, or the last of them: differentiable, and nothing is solved."""
    if initial.is_cuda and initial.device.index != torch.cuda.current_device():
        with torch.cuda.device(initial.device):
            return attach(weight, bias, initial, states, layers, last)

    def known(weight: Tensor, bias: Tensor, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = inputs_of_layers(weight, bias, initial, states, layers)
        return (states[-1] if last else states).clone(), aligned(weight.contiguous()), x

    return apply_directly(Apply, weight, bias, initial, layers, known)


def inputs_of_layers(weight: Tensor, bias: Tensor, initial: Tensor, states: Tensor, layers: Layers) -> Tensor:
    """``x`` [T + 1, B, w] of the states after every block [blocks, B, w]: those inside blocks are computed again, all at once."""
    inside = [torch.cat([initial.unsqueeze(0), states[:-1]])]
    with full_precision(weight.device):
        for k in range(layers.skip - 1):
            value = ACTIVATIONS[layers.activation].function(inside[-1])
            inside.append(torch.baddbmm(bias[:, k].unsqueeze(1), value, weight[:, k].mT))
    return torch.cat([torch.stack(inside, 1).flatten(0, 1), states[-1:]])


def _states(
    weight: Tensor,
    bias: Tensor,
    initial: Tensor,
    guess: Tensor | None,
    layers: Layers,
    left: list,
    last: bool,
    average: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``apply`` returns; the weights as the kernels read them, and ``x``."""
    weight, bias, initial = (aligned(weight.contiguous()), aligned(bias.contiguous()), aligned(initial.contiguous()))
    x, report = run(weight, bias, initial, guess, layers, average)
    left.extend((report, x))
    return x[-1] if last else x[layers.skip :: layers.skip], weight, x


class Apply(torch.autograd.Function):
    """The states after every block as a function of weights [blocks, skip, w, w], biases and the initial state [B, w].

    Or that after the last block alone: where nobody asks for the others, none of their gradients is made up of zeros.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor, initial: Tensor, layers: Layers, made: Callable[..., Any]
    ) -> Any:
        """``made``: what gives, of the three tensors, the states, the weights as the kernels read them, and ``x``."""
        states, weight, x = made(weight, bias, initial)
        ctx.layers = layers
        ctx.save_for_backward(weight, x)
        return states

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
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
        gradient = aligned(grad_outputs[0].contiguous())
        of_weights, of_biases, _ = ctx.needs_input_grad[:3]
        if not (of_weights or of_biases):
            return None, None, adjoint(weight, x, gradient, ctx.layers)[1], None, None
        return *all_gradients(weight, x, gradient, ctx.layers), None, None


class Passes:
    """What is the same for all calls with tensors of the same shapes.

    Attributes:
        rounds: how many the last call took: before that many, nobody looks whether they were enough
        has_loop: whether the loop that finishes what the rounds leave was launched before
    """

    constants: tuple[int, bool, str, int, int]

    def __init__(self, blocks: int, rows: int, width: int, layers: Layers):
        self.chunk: int = layers.chunk_blocks(blocks)
        self.chunks: int = -(-blocks // self.chunk)
        self.group: int = chunks_in_group(self.chunks)
        self.groups: int = -(-self.chunks // self.group)
        self.workspace: int = rows * ((self.chunks + self.groups) * width * (width + 1) + self.chunks * width)
        self.shape: dense.Shape = dense.Shape(width)
        self.constants = (layers.skip, layers.residual, layers.activation, width, self.shape.padded)
        self.faint: float = Tolerance(*layers.tolerance[:2]).faint
        self.rounds: int = 1
        self.has_loop: bool = False


@lru_cache(maxsize=1024)
def plan_for(blocks: int, rows: int, width: int, layers: Layers, guessed: bool, device: torch.device) -> Passes:
    """One for all calls that are alike; with a guess they take fewer rounds."""
    return Passes(blocks, rows, width, layers)


class _Narrow:
    """The passes over a network whose layers fit the registers of one program."""

    idle_when_settled = True

    def __init__(self, weight: Tensor, bias: Tensor, x: Tensor, layers: Layers, plan: Passes):
        self.weight, self.bias, self.x, self.layers, self.plan = weight, bias, x, layers, plan
        self.blocks, (_, self.rows, self.width) = weight.shape[0], x.shape
        # Trained residual networks take four rounds as a rule: see docs/performance.md.
        self.captured_rounds = 4 if layers.residual else 3

    def one_round(self, first_pass: int) -> None:
        """Two passes: one with new Jacobians, one with the same."""

        def make() -> None:
            self._one_pass(first_pass, True)
            self._one_pass(first_pass + 1, False)

        given = () if self.guess is self.initial else (self.guess,)
        tensors = (self.weight, self.bias, self.initial, *given, self.workspace, self.found, self.x)
        repeat((self.plan, self.limit, first_pass, self.guess_step, self.guess_row, len(given)), tensors, make)

    def prepare(self, initial: Tensor, guess: Tensor | None, found: Tensor, passes: int) -> None:
        """Before the first pass: from where the chunks start (see ``kernels.roll``), and where to write what is found, ``passes`` at most."""
        self.initial, self.guess = initial, initial if guess is None else guess
        self.found, self.limit = found, passes
        self.guess_step = 0 if guess is None else guess.stride(0)
        self.guess_row = initial.shape[-1] if guess is None else guess.stride(1) if guess.ndim == 3 else 0
        self.workspace = self.x.new_empty(self.plan.workspace)

    def whole(self, start: Tensor, first: int, found: Tensor, passes: int) -> None:
        """One layer after the other from block ``first`` on, in the rows that so many passes have not settled."""
        arguments = (
            self.weight, self.bias, start, start, 0, 0, self.x, self.x, found, 0,
            self.rows, first, self.blocks, passes, self.blocks, 0, 0,
        )  # fmt: skip
        warps, stages = self.plan.shape.without
        launch(kernels.roll, self.rows, arguments, (*self.plan.constants, False, "", True, stages), warps=warps)

    def _one_pass(self, passes: int, product: bool) -> None:
        """Roll out and correct the starts."""
        plan, shape = self.plan, self.plan.shape
        how = (product, shape.precision)
        sizes = plan.constants[-2:]
        warps, stages = shape.with_products if product else shape.without
        arguments = (
            self.weight, self.bias, self.initial, self.guess, self.guess_step, self.guess_row,
            self.x, self.workspace, self.found, self.limit,
            self.rows, 0, self.blocks, passes, plan.chunk, plan.chunks, plan.groups,
        )  # fmt: skip
        constants = (*plan.constants, *how, False, stages)
        launch(kernels.roll, plan.chunks * self.rows, arguments, constants, warps=warps)
        arguments = (self.workspace, self.found, self.rows, passes, plan.group, plan.chunks, plan.groups)
        programs = (plan.groups - 1) * self.rows
        launch(kernels.gather, programs, arguments, (*sizes, *how, stages), warps=warps)
        warps, stages = shape.without
        arguments = (*arguments, self.limit, *self.layers.tolerance, plan.faint)
        launch(kernels.spread, plan.groups * self.rows, arguments, (*sizes, stages), warps=warps)


class _Wide(_Narrow):
    """The same for wider layers, of networks without skip connections."""

    idle_when_settled = False  # what a settled row does not need is done all the same, and costs as much

    def __init__(self, weight: Tensor, bias: Tensor, x: Tensor, layers: Layers, plan: Passes):
        super().__init__(weight, bias, x, layers, plan)
        self.captured_rounds = 1
        self.constants = (layers.activation, self.width, plan.shape.padded, 16)

    def one_round(self, first_pass: int) -> None:
        self._one_pass(first_pass, True)
        self._one_pass(first_pass + 1, False)

    def prepare(self, initial: Tensor, guess: Tensor | None, found: Tensor, passes: int) -> None:
        self.initial, self.initial_step, self.found, self.limit = initial, 0, found, passes
        if guess is not None:
            picked = guess[self.plan.chunk - 1 : (self.plan.chunks - 1) * self.plan.chunk : self.plan.chunk]
            if picked.ndim == 2:
                picked = picked.unsqueeze(1).expand(-1, self.rows, -1)
            self.initial, self.initial_step = torch.cat([initial.unsqueeze(0), picked]), self.rows * self.width
        self.starts = self.x.new_empty(self.plan.chunks, self.rows, self.width)
        self.ends = torch.empty_like(self.starts)

    def whole(self, start: Tensor, first: int, found: Tensor, passes: int) -> None:
        sizes = (self.rows, first, self.blocks, passes, self.blocks)
        if self.width <= HELD_WITHOUT_PRODUCT:
            warps, stages = WIDE_LOOP
            arguments = (self.weight, self.bias, start, start, 0, 0, self.x, self.x, found, 0, *sizes, 0, 0)
            constants = (1, False, *self.constants[:3], False, "", True, stages)
            launch(kernels.roll, self.rows, arguments, constants, warps=warps)
        else:
            arguments = (self.weight, self.bias, start, 0, self.x, self.x, self.x, found, 0, *sizes)
            launch(kernels.roll_wide, self.rows, arguments, (*self.constants[:3], 64, True), warps=16)

    def _one_pass(self, passes: int, product: bool) -> None:
        plan = self.plan
        arguments = (
            self.weight, self.bias, self.initial, self.initial_step, self.x, self.starts, self.ends, self.found, self.limit,
            self.rows, 0, self.blocks, passes, plan.chunk,
        )  # fmt: skip
        launch(kernels.roll_wide, plan.chunks * self.rows, arguments, (*self.constants, False), warps=8)
        if product:
            blocks = dense.Chain(self.weight, 0, False, 2)
            slopes = dense.Chain(ACTIVATIONS[self.layers.activation].slope(self.x[:-1]), 0, False)
            self.products = dense.multiply_wide(blocks, slopes, "columns", plan.chunks - 1, self.rows, plan.chunk)
        deltas = torch.zeros_like(self.starts)
        # What is not finite stays so in all corrections after it: those chunks start from where the ones before them end.
        deltas[1:] = self.ends[:-1] - self.starts[1:]
        # What the corrections lack of float32 proper the next pass sees, like all else that they miss.
        dense.solve_in_place(self.products, deltas, refined=False)
        arguments = (deltas, self.ends, self.starts, self.found, self.limit, self.rows, passes)
        arguments = (*arguments, *self.layers.tolerance, plan.faint)
        launch(kernels.correct_wide, plan.chunks * self.rows, arguments, self.constants[1:3], warps=4)


def network_of(weight: Tensor, bias: Tensor, x: Tensor, layers: Layers, plan: Passes) -> Any:
    """The passes over a network, by its width."""
    return (_Narrow if x.shape[-1] <= dense.NARROW else _Wide)(weight, bias, x, layers, plan)


def run(
    weight: Tensor,
    bias: Tensor,
    initial: Tensor,
    guess: Tensor | None,
    layers: Layers,
    average: Tensor | None = None,
) -> tuple[Tensor, Report | None]:
    """``x``, and for a parallel pass how it went.

    Args:
        weight, bias: [blocks, (skip,) w, w] and [blocks, (skip,) w], contiguous
        initial: [B, w]
        guess: [blocks, w] or [blocks, B, w], states after every block; None: the initial state repeated
        average: [blocks, w], gets the mean of the rows' states after every block; it may be the guess
    """
    blocks, (rows, width) = weight.shape[0], initial.shape
    if guess is not None:
        guess = aligned(guess.contiguous())
    plan = plan_for(blocks, rows, width, layers, guess is not None, weight.device)
    x = weight.new_empty(blocks * layers.skip + 1, rows, width)
    network = network_of(weight, bias, x, layers, plan)

    def done() -> None:
        if average is not None:
            torch.mean(x[layers.skip :: layers.skip], 1, out=average)

    if plan.chunks == 1:
        network.whole(initial, 0, x, 0)
        done()
        return x, None

    captured = is_capturing(weight.device)
    most = network.captured_rounds if captured else _ROUNDS
    found = weight.new_empty(2 * most + plan.chunks + 1, 2, rows)
    network.prepare(initial, guess, found, 2 * most)
    report = Report(blocks, plan.chunk, found, most, tolerance=layers.tolerance)
    for rounds in range(1, most + 1):
        network.one_round(2 * rounds - 2)
        if captured or rounds < min(plan.rounds, most):
            continue
        report.rounds = rounds
        done()  # as a rule they were enough: launched before the host waits for the answer (and the guess is read by then)
        taken = report.passes_taken()
        if all(taken):
            report.rounds = -(-max(taken) // 2)
            if network.idle_when_settled:
                plan.rounds = report.rounds
            _load_loop(network, initial, found, 2 * rounds)
            return x, report
    # Each pass but the last has made the start of one more chunk exact: the rows that are not settled go on from there.
    exact = min(plan.chunks - 1, 2 * most - 1) * plan.chunk
    network.whole(aligned(x[exact * layers.skip]), exact, found, 2 * most)
    done()
    report.finished = not captured
    return x, report


def _load_loop(network: _Narrow, initial: Tensor, found: Tensor, passes: int) -> None:
    """Run the kernel that finishes by the loop, which has nothing to do here, the first time.

    It is part of every CUDA graph of a caller who warmed up with passes that did not need it, and a capture is no place to
    compile and load it.
    """
    if not network.plan.has_loop:
        network.whole(initial, 0, found, passes)
        network.plan.has_loop = True
