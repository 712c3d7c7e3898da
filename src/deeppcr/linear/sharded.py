"""A block bidiagonal system whose steps are spread over ranks.

Each rank reduces its part to one affine map ``z -> A z + b``, of what the rank before hands over to what it hands on. The maps of the ranks
before this one tell what it starts from, and the rest it solves by itself. What ranks say to each other does not depend on L.

Shapes: L steps on this rank, which may be none, ``*batch``, D the width of a state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed.ranks import FEW, Ranks
from .blocks import STRUCTURES, BlockDiagonal, Blocks, Dense
from .refine import DIGIT, ROUNDINGS
from .solver import LinearSolver
from .system import solve_system, with_initial


@dataclass(frozen=True, eq=False)
class Map:
    """What a part of a system makes of what comes before it: ``z -> A z + b``.

    Args:
        block: one block, ``A``, its batch broadcasting to that of the term
        term: [*batch, D], ``b``
    """

    block: Blocks
    term: Tensor

    @staticmethod
    def of(blocks: Blocks, rhs: Tensor, *, reverse: bool = False) -> Map:
        """Of a system's steps, pair by pair in log2 L rounds."""
        if not len(blocks):
            return Map(_identity(blocks, rhs), torch.zeros_like(rhs.sum(0)))
        while len(blocks) > 1:
            even = len(blocks) // 2 * 2
            first, then = (blocks[1:even:2], blocks[:even:2]) if reverse else (blocks[:even:2], blocks[1:even:2])
            begun, added = (rhs[1:even:2], rhs[:even:2]) if reverse else (rhs[:even:2], rhs[1:even:2])
            left = blocks[even:], rhs[even:]
            blocks, rhs = then.compose(first), then.apply(begun) + added
            if len(left[0]):
                blocks = type(blocks)(torch.cat([blocks.data, left[0].data]))
                rhs = torch.cat([rhs, left[1]])
        return Map(blocks, rhs[0])

    def __call__(self, state: Tensor) -> Tensor:
        return self.block.apply(state.unsqueeze(0))[0] + self.term

    def packed(self) -> Tensor:
        return torch.cat([self.block.data.reshape(-1), self.term.reshape(-1)])

    def unpacked(self, numbers: Tensor) -> Map:
        """A map like this one."""
        data, term = numbers.split([self.block.data.numel(), self.term.numel()])
        return Map(type(self.block)(data.view(self.block.data.shape)), term.view(self.term.shape))

    def after(self, first: Map) -> Map:
        """Both as one; ``first`` acts first."""
        return Map(self.block.compose(first.block), self(first.term))


def _identity(like: Blocks, rhs: Tensor) -> Blocks:
    """One block that leaves all as it is, of the structure of others, of which there may be none."""
    data, eye = like.data, torch.eye(like.data.shape[-1] if like.core_dims >= 2 else 1, dtype=rhs.dtype)
    core = eye.to(data.device) if isinstance(like, (Dense, BlockDiagonal)) else eye.to(data.device)[0, 0]
    return type(like)(core.expand(1, *data.shape[1:]))


def entry_of(ranks: Ranks, own: Map, initial: Tensor) -> Tensor:
    """What this rank starts from, given the maps of all: those before it, applied to the initial state [*batch, D]."""
    if ranks.count == 1:
        return initial
    numbers = own.packed()
    if ranks.count <= FEW:  # vectors alone: a product of the maps of several ranks is never formed
        for each in ranks.gather(numbers)[: ranks.rank]:
            initial = own.unpacked(each)(initial)
        return initial

    def combined(first: Tensor, then: Tensor) -> Tensor:
        return own.unpacked(then).after(own.unpacked(first)).packed()

    before = ranks.before(numbers, combined)
    return initial if before is None else own.unpacked(before)(initial)


def solve_local(
    blocks: Blocks, rhs: Tensor, entry: Tensor, solver: LinearSolver, reverse: bool, refined: bool
) -> Tensor:
    """The states of this rank [L, *batch, D], from what it starts from [*batch, D]."""
    if not len(blocks):
        return rhs.clone()
    couplings, rhs = with_initial(blocks, rhs, entry, reverse)
    return solve_system(couplings, rhs, solver, reverse, refined) if len(couplings) else rhs


@torch.no_grad()
def solve_over(
    ranks: Ranks,
    blocks: Blocks,
    rhs: Tensor,
    initial: Tensor,
    extra: Tensor,
    solver: LinearSolver,
    *,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve this rank's part of the system.

    Args:
        ranks: in the order in which states follow each other: with ``reverse``, the last part first
        blocks, rhs: of this rank's steps; aligned, in float32 or better
        initial: [*batch, D], what the first rank starts from; the same on all
        extra: [*batch, D], is added to what this rank hands on

    Returns:
        the states [L, *batch, D], what this rank started from and what it hands on [*batch, D]
    """

    def found(entry: Tensor) -> tuple[Tensor, Tensor]:
        states = solve_local(blocks, rhs, entry, solver, reverse, refined=True)
        return states, ((states[0] if reverse else states[-1]) if len(states) else entry) + extra

    own = Map.of(blocks, rhs, reverse=reverse)
    entry = entry_of(ranks, Map(own.block, own.term + extra), initial)
    states, handed = found(entry)
    before = math.inf
    for _ in range(ranks.count + 1 if ranks.count > 1 else 0):
        # Products of blocks lose digits, or overflow, which steps do not: then the next rank began elsewhere than it was handed.
        begun = ranks.reversed().shifted(entry)
        missed = torch.zeros_like(entry) if begun is None else handed - begun
        roundings = float(ranks.maximum(_roundings(missed, handed)))
        if roundings <= ROUNDINGS or (roundings < math.inf and not roundings < DIGIT * before):
            break  # no more than steps round, or what further corrections would bring
        if roundings < math.inf:
            entry, before = entry + entry_of(ranks, Map(own.block, missed), torch.zeros_like(entry)), roundings
        else:  # nothing but what a rank is handed is left to begin with; each time one more of them is exact
            told = ranks.shifted(handed)
            entry = entry if told is None else told
        states, handed = found(entry)
    return states, entry, handed


def _roundings(missed: Tensor, handed: Tensor) -> Tensor:
    """By how many roundings of what a rank hands on the next one missed it, in the worst row; infinite where that is no number."""
    size = handed.abs().amax(-1, keepdim=True) if handed.shape[-1] else handed.abs()
    found = torch.where(missed == 0, 0, missed.abs() / (torch.finfo(size.dtype).eps * size)).double()
    return found.nan_to_num(math.inf, math.inf).flatten().amax(0) if found.numel() else found.new_zeros(())


class SolveOver(torch.autograd.Function):
    """This rank's states, and what it starts from, as functions of its blocks, right-hand side and of what it adds to what it hands on.

    The derivative is such a system again, in the other direction: with ``u_l = A_l^H (g_l + u_{l+1})`` handed from step to step and rank to
    rank, the adjoint is ``g_l + u_{l+1}``. So it can be differentiated as often as anybody likes.
    """

    @staticmethod
    def forward(
        data: Tensor,
        rhs: Tensor,
        initial: Tensor,
        extra: Tensor,
        structure: type[Blocks],
        solver: LinearSolver,
        reverse: bool,
        ranks: Ranks,
    ) -> tuple[Tensor, Tensor]:
        states, entry, _ = solve_over(ranks, structure(data), rhs, initial, extra, solver, reverse=reverse)
        return states, entry.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        data, _, initial, _, ctx.structure, ctx.solver, ctx.reverse, ctx.ranks = inputs
        ctx.initial_shape = initial.shape
        ctx.save_for_backward(data, *output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad, grad_entry = grad_outputs
        data, states, entry = ctx.saved_tensors
        blocks, ranks, reverse = ctx.structure(data), ctx.ranks, ctx.reverse
        transposed = blocks.adjoint()
        terms = transposed.apply(grad) if len(grad) else grad
        system = transposed.data, terms, torch.zeros_like(grad_entry), grad_entry
        pulled, handed = SolveOver.apply(*system, ctx.structure, ctx.solver, not reverse, ranks.reversed())  # type: ignore[misc]
        if reverse:
            adjoint = grad + torch.cat([handed.unsqueeze(0), pulled])[:-1]
            starts = torch.cat([states, entry.unsqueeze(0)])[1:]
            first = pulled[-1] if len(pulled) else handed
        else:
            adjoint = grad + torch.cat([pulled, handed.unsqueeze(0)])[1:]
            starts = torch.cat([entry.unsqueeze(0), states])[:-1]
            first = pulled[0] if len(pulled) else handed
        of_data = None
        if ctx.needs_input_grad[0]:
            of_data = blocks.outer(adjoint, starts.conj()).sum_to_size(data.shape)
        of_initial = first + grad_entry
        if ranks.rank:  # only the first rank starts from it
            of_initial = torch.zeros_like(of_initial)
        return of_data, adjoint, of_initial.sum_to_size(ctx.initial_shape), handed, None, None, None, None


def facts_of(blocks: Blocks, rhs: Tensor, batch: torch.Size, initial: Tensor | None) -> tuple[int, ...]:
    """What must be the same on all ranks, as numbers."""
    structure = STRUCTURES.index(type(blocks)) if type(blocks) in STRUCTURES else -1
    sizes = [*blocks.data.shape[1:], -1, *rhs.shape[-1:], *batch]
    mixed = 0
    for each in (structure, rhs.dtype.itemsize, rhs.is_complex(), initial is None, *sizes):
        mixed = (mixed * 1_000_003 + int(each) + 2) % (2**61 - 1)
    return (mixed,)
