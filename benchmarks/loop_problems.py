"""What ``loops.py`` measures: loops of the table with their targets, those that the choice is judged by, and how each is checked.

Shapes: L steps, B rows, D the numbers of a row's state (or of a leaf of it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import deeppcr
import loop_steps as steps
from deeppcr_paper.timing import relative_error, single_thread

FORWARD, BOTH = "forward", "forward and backward"
#: What ``solve`` promises of every step, relative to the largest size of a component so far.
PROMISED = {torch.float32: 1e-5, torch.float64: 1e-10}
#: Numbers in a state from which on a GPU is faster than a CPU, step by step.
_LARGE = 1_024


@dataclass(frozen=True)
class Loop:
    """One loop.

    Attributes:
        limits: milliseconds that a call may take, by direction
        lab: milliseconds of the hand-written kernels, forward, where there are any
        chaotic: no two computations agree on its states: it is checked by the residual of every step, and has no gradients
        rounding: what the loop itself, in its own precision, is off by that in float64, where that is much: how far states may
            be off, each component relative to its largest size so far, is ten times that, or ten times what is promised
        projects: a step sums up many products, in an order that depends on how many steps are taken at once: one whose component begins near
            zero has no digits of its own there, whoever computes it. Residuals are held against the largest size at any step
    """

    name: str
    make: steps.Make
    L: int
    B: int
    D: int
    dtype: torch.dtype = torch.float32
    limits: dict[str, float] | None = None
    lab: float | None = None
    chaotic: bool = False
    rounding: float = 0.0
    projects: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        """For a file: which loop this is."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"loop": self.name, "L": self.L, "B": self.B, "D": self.D, "dtype": dtype}

    @property
    def error(self) -> float:
        """What states may be off by."""
        return 10 * max(PROMISED[self.dtype], self.rounding)

    @property
    def gradient_error(self) -> float:
        """What gradients may be off by, each tensor relative to its largest element."""
        return 10 * self.error

    @property
    def directions(self) -> tuple[str, ...]:
        return (FORWARD,) if self.chaotic else (FORWARD, BOTH)

    def limit(self, direction: str) -> float | None:
        """Seconds that a call may take."""
        return 1e-3 * self.limits[direction] if self.limits and direction in self.limits else None

    def captured_limit(self, direction: str) -> float | None:
        """Seconds in the caller's CUDA graph: 0.8 of a call's limit or 1.15 of the hand-written kernels, whichever is more."""
        limit = self.limit(direction)
        if limit is None:
            return None
        return max(0.8 * limit, 1.15e-3 * self.lab if self.lab and direction == FORWARD else 0.0)

    def small(self) -> Loop:
        return replace(self, L=min(self.L, 40), B=min(self.B, 3), D=min(self.D, 4))

    def build(self, device: torch.device) -> steps.Inputs:
        """Its tensors on a device, all of which require gradients."""
        inputs = self.make(steps.Draw(device, self.dtype), self.L, self.B, self.D)
        for tensor in (*steps.sources(inputs), *inputs.projection):
            tensor.requires_grad_()
        return inputs


@dataclass(frozen=True)
class Found:
    """What a method computed: leaves [L, ...] of the states, gradients of the sources, and the solution where there is one."""

    states: list[Tensor]
    gradients: Sequence[Tensor] = ()
    solution: deeppcr.Solution | None = None


def loss_weights(inputs: steps.Inputs, length: int) -> list[Tensor]:
    leaves, source = pytree.tree_leaves(inputs.z0), torch.Generator().manual_seed(1)
    drawn = (torch.randn(length, *leaf.shape, generator=source) for leaf in leaves)
    return [each.to(leaf.device, leaf.dtype) for each, leaf in zip(drawn, leaves, strict=True)]


#: Where other processes have left references; None where there are none.
REFERENCES: Path | None = None


@lru_cache(maxsize=16)  # the same loop comes in another precision, and in another part
def in_float64(make: steps.Make, L: int, B: int, D: int, device: torch.device) -> Found:
    """The bare loop in float64 with its gradients; where states are small on the CPU, whose operations begin sooner."""
    loop = Loop("", make, L, B, D, torch.float64)
    kept = None if REFERENCES is None else REFERENCES / f"{make.__name__}-{L}-{B}-{D}.pt"
    if kept is not None and kept.exists():
        return Found(*torch.load(kept))
    inputs = loop.build(device if B * D >= _LARGE else torch.device("cpu"))
    with single_thread(), torch.enable_grad():
        states = steps.bare_loop(inputs, L)
        gradients = torch.autograd.grad(states, steps.sources(inputs), loss_weights(inputs, L))
    found = Found([leaf.detach() for leaf in states], gradients)
    if kept is not None:
        torch.save((found.states, found.gradients), kept)
    return found


def make_ready(loop: Loop, device: torch.device, references: Path) -> None:
    """What takes long and can be done beside others: the reference, and kernels, which stay on the disk. What fails, fails again later."""
    global REFERENCES
    REFERENCES = references
    torch.set_num_threads(1)
    measured = loop.limits is not None  # the others are timed forward, and have no reference
    try:
        prepared = Prepared(loop, device)
        for direction in loop.directions if measured else (FORWARD,):
            with torch.set_grad_enabled(direction != FORWARD):
                for solver in (
                    (None, None, deeppcr.Loop(by="kernel"))
                    if measured
                    else (deeppcr.Loop(by="kernel"), deeppcr.Newton())
                ):
                    prepared.solve(direction, **({} if solver is None else {"solver": solver}))
        if measured and not loop.chaotic:
            in_float64(loop.make, loop.L, loop.B, loop.D, device)
    except Exception as error:
        print(f"{loop.name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")


class Prepared:
    """A loop on a device, and what its results are compared with."""

    def __init__(self, loop: Loop, device: torch.device):
        self.loop, self.device, self.inputs = loop, device, loop.build(device)

    @cached_property
    def weights(self) -> list[Tensor]:
        """[L, ...] a leaf: the loss is the sum of all states times these."""
        return loss_weights(self.inputs, self.loop.L)

    @cached_property
    def reference(self) -> Found:
        found = in_float64(self.loop.make, self.loop.L, self.loop.B, self.loop.D, self.device)
        states, gradients = ([each.to(self.device) for each in part] for part in (found.states, found.gradients))
        return Found(states, gradients)

    def call(self, **settings: Any) -> deeppcr.Solution:
        """The public call."""
        inputs = self.inputs
        if inputs.xs is None:
            settings["length"] = self.loop.L
        return deeppcr.solve(inputs.step, inputs.z0, inputs.xs, **settings)

    def solve(self, direction: str, **settings: Any) -> Found:
        """The same, and in both directions the gradients of all sources."""
        solution = self.call(**settings)
        return self.differentiated(direction, pytree.tree_leaves(solution.states), solution)

    def differentiated(self, direction: str, states: list[Tensor], solution: Any = None) -> Found:
        if direction == FORWARD:
            return Found(states, (), solution)
        return Found(states, torch.autograd.grad(states, steps.sources(self.inputs), self.weights), solution)

    def part(self, direction: str, length: int) -> Callable[[], Found]:
        """The first steps by a bare loop."""
        inputs, outer = self.inputs, [leaf[:length] for leaf in self.weights] if direction == BOTH else []
        if inputs.xs is not None:  # of which all would be differentiated
            inputs = replace(inputs, xs=pytree.tree_map(lambda x: x.detach()[:length].requires_grad_(), inputs.xs))

        def run() -> Found:
            states = steps.bare_loop(inputs, length)
            return Found(states, torch.autograd.grad(states, steps.sources(inputs), outer) if outer else ())

        return run

    # How far a result is off, in units of what is allowed: at most 1 is right.

    @torch.no_grad()
    def error(self, found: Found) -> float:
        """Against the bare loop in float64; of a chaotic loop, by the residual of every step."""
        if self.loop.chaotic:
            return self.residual(found)
        initial = pytree.tree_leaves(self.inputs.z0)
        worst = max(
            largest_so_far(one.double() - other, other, start.double())
            for one, other, start in zip(found.states, self.reference.states, initial, strict=True)
        )
        worst = worst / self.loop.error
        if not found.gradients:
            return worst
        return max(worst, relative_error(found.gradients, self.reference.gradients) / self.loop.gradient_error)

    @torch.no_grad()
    def residual(self, found: Found) -> float:
        """Of every step, by the user's own step for all of them at once."""
        inputs, initial = self.inputs, pytree.tree_leaves(self.inputs.z0)
        before = [
            torch.cat([start.detach().unsqueeze(0), states[:-1]])
            for start, states in zip(initial, found.states, strict=True)
        ]
        nest = pytree.tree_unflatten(before, pytree.tree_structure(inputs.z0))
        values = torch.vmap(inputs.step)(nest) if inputs.xs is None else torch.vmap(inputs.step)(nest, inputs.xs)
        initial = [
            leaf.abs().amax(0) if self.loop.projects else start
            for leaf, start in zip(found.states, initial, strict=True)
        ]
        worst = max(
            largest_so_far(one - other, other, start)
            for one, other, start in zip(found.states, pytree.tree_leaves(values), initial, strict=True)
        )
        return worst / PROMISED[self.loop.dtype]


def largest_so_far(difference: Tensor, states: Tensor, initial: Tensor) -> float:
    """The largest difference [L, ...] relative to what its component was at most up to that step; NaN counts as infinite.

    >>> largest_so_far(torch.tensor([0.1, 0.1]), torch.tensor([0.5, 2.0]), torch.tensor(1.0))  # 0.1 of 1, 0.1 of 2
    0.10000000149011612
    """
    size = torch.cat([initial.unsqueeze(0), states]).abs_().cummax(0).values[1:]
    ratio = torch.where(difference == 0, 0, difference.abs() / size)
    worst = float(ratio.max())
    return worst if worst == worst else float("inf")


def _limits(forward: float, both: float | None = None) -> dict[str, float]:
    return {FORWARD: forward} | ({BOTH: both} if both is not None else {})


TABLE = (
    Loop("gru", steps.elementwise_gru, 2_048, 8, 256, limits=_limits(0.30, 0.9), lab=0.128),
    Loop("gru-long", steps.elementwise_gru, 16_384, 8, 256, limits=_limits(0.9, 2.7), lab=0.617),
    Loop("gru-wide", steps.elementwise_gru, 4_096, 4, 2_048, limits=_limits(0.9, 2.7), lab=0.612),
    Loop("lstm", steps.elementwise_lstm, 2_048, 8, 256, limits=_limits(0.45, 1.4)),
    Loop("pendulum", steps.pendulum, 20_000, 64, 2, limits=_limits(1.5, 4)),
    Loop("pendulum-float64", steps.pendulum, 20_000, 64, 2, torch.float64, limits=_limits(4.5, 12)),
    Loop("van-der-pol", steps.van_der_pol, 10_000, 16, 2, limits=_limits(4, 12), rounding=2e-5),
    Loop("lorenz", steps.lorenz, 20_000, 64, 3, limits=_limits(8), chaotic=True),
    Loop("predator-prey", steps.predator_prey, 5_000, 1_000, 2, limits=_limits(1.5, 4)),
    Loop("langevin", steps.langevin, 10_000, 100, 6, limits=_limits(1.5, 4)),
    Loop("kalman", steps.kalman, 5_000, 1, 2, limits=_limits(0.8, 2.5)),
    Loop("mlp", steps.mlp, 16_384, 1, 16, limits=_limits(0.40, 1.2)),
    Loop("dense-gru-16", steps.dense_gru, 16_384, 1, 16, limits=_limits(0.35, 1.1), lab=0.091),
    Loop("dense-gru-32", steps.dense_gru, 16_384, 1, 32, limits=_limits(0.50, 1.6), lab=0.220),
    Loop("dense-gru-64", steps.dense_gru, 16_384, 1, 64, limits=_limits(3.5, 9)),
    Loop("dense-gru-rows", steps.dense_gru, 2_048, 8, 16, limits=_limits(0.35, 1.1), lab=0.073),
    Loop("dense-gru-long", steps.dense_gru, 32_768, 8, 32, limits=_limits(3.5, 10), lab=2.31),
    Loop("dense-lstm", steps.dense_lstm, 16_384, 1, 16, limits=_limits(0.7, 2.0)),
    Loop("langevin-10", steps.langevin, 10_000, 100, 10, limits=_limits(2.0, 6)),
    Loop("descent", steps.descent, 5_000, 1, 20, limits=_limits(2.0)),
    Loop("kalman-4", steps.filter_of_four, 5_000, 1, 4, limits=_limits(2.5, 8)),
    Loop("lorenz-96", steps.calm_lorenz_96, 4_000, 4, 40, limits=_limits(4)),
)


def _others() -> list[Loop]:
    """Wider, shorter, more rows, other steps: (L, B, D) of each, and those in float64."""
    float32: dict[steps.Make, Sequence[tuple[int, int, int]]] = {
        steps.elementwise_gru: ((64, 8, 256), (512, 1, 16), (2_048, 64, 64), (256, 256, 256)),
        steps.projecting_gru: ((2_048, 8, 256), (512, 8, 64)),
        steps.elementwise_lstm: ((128, 8, 64), (8_192, 2, 32)),
        steps.pendulum: ((100, 1, 2), (1_000, 1, 2), (1_000, 1_000, 2), (50_000, 1, 2), (200, 10_000, 2)),
        steps.van_der_pol: ((300, 16, 2), (2_000, 1, 2)),
        steps.lorenz: ((50, 1, 3), (1_000, 16, 3)),
        steps.lorenz_96: ((500, 16, 8), (500, 16, 40)),
        steps.predator_prey: ((100, 10, 2), (5_000, 1, 2)),
        steps.langevin: ((200, 10, 3), (2_000, 1_000, 4), (5_000, 10, 16), (5_000, 1, 32)),
        steps.kalman: ((100, 1, 2), (1_000, 100, 2)),
        steps.mlp: ((20, 1, 8), (1_000, 1, 4), (16_384, 1, 16), (1_000, 16, 32), (1_000, 1, 64), (100, 64, 64)),
        steps.dense_gru: ((128, 8, 8), (2_048, 8, 16), (2_048, 8, 64), (784, 64, 32), (16_384, 1, 32)),
        steps.dense_lstm: ((2_048, 8, 32), (200, 1, 16)),
        steps.descent: ((5_000, 1, 20), (500, 10, 8)),
        steps.filter_of_a_signal: ((3, 1, 1), (30, 1, 1), (1_000, 1, 1), (100_000, 1, 1), (10_000, 32, 8), (100, 512, 64)),
    }  # fmt: skip
    float64: dict[steps.Make, Sequence[tuple[int, int, int]]] = {
        steps.elementwise_gru: ((1_000, 4, 64),),
        steps.pendulum: ((2_000, 1, 2),),
        steps.lorenz: ((2_000, 1, 3),),
        steps.langevin: ((2_000, 10, 6),),
        steps.kalman: ((2_000, 1, 2),),
        steps.mlp: ((500, 1, 16),),
        steps.dense_gru: ((500, 4, 8),),
        steps.filter_of_a_signal: ((2_000, 1, 1),),
    }
    chaotic, projecting = (steps.lorenz, steps.lorenz_96), (steps.projecting_gru,)
    return [
        Loop(_name(make, size, dtype), make, *size, dtype, chaotic=make in chaotic, projects=make in projecting)
        for dtype, families in ((torch.float32, float32), (torch.float64, float64))
        for make, sizes in families.items()
        for size in sizes
    ]


def _name(make: steps.Make, size: tuple[int, int, int], dtype: torch.dtype) -> str:
    name = make.__name__.replace("_", "-") + "-" + "x".join(map(str, size))
    return name + ("-float64" if dtype == torch.float64 else "")


CHOICE = (*TABLE, *_others())
