"""The part of a sequence that a rank holds, and what it has to know of the others.

Shapes: L steps on this rank, which may be none, in N chunks; B rows, D the packed state.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from ..distributed.ranks import Ranks, Trouble
from ..linear import Blocks, LinearSolver
from ..linear.blocks import STRUCTURES
from ..linear.sharded import Map, entry_of, solve_local
from ..linear.system import in_full
from ..runtime import tensors_in
from ..sequence import Sequence
from ..sequence.layout import Layout, refuse_not_finite
from ..sequence.sequence import find_length


class Part:
    """What a rank holds.

    Attributes:
        ranks: who shares the sequence
        sequence: of this rank's steps; None where it has none
        layout, initial: of a state; ``z_0`` [B, D], still attached to the caller's graph
        lengths: how many steps each rank has
        offset: how many steps come before this rank's
        total: L of the whole
        needs_gradients: whether anything that the states of any rank depend on requires a gradient
    """

    layout: Layout
    initial: Tensor

    def __init__(self, ranks: Ranks, step: Any, z0: Any, xs: Any, length: int | None, batch_dims: int | None):
        self.ranks: Ranks = ranks
        self.trouble: Trouble = Trouble()
        self.sequence: Sequence | None = None
        own, facts = 0, (0, 0)
        with self.trouble.kept():
            own = find_length(step, xs, length, least=0)
            self.layout = Layout.of(z0, batch_dims)
            refuse_not_finite(z0)
            self.initial = self.layout.pack(z0)
            if own:
                self.sequence = Sequence(cast(Any, step), z0, xs, length=length, batch_dims=batch_dims)
            facts = _facts_of(self.layout, self.initial)
        # Of inputs of no step, too, who asks for their gradient has to come by here: see AdjointOver.
        self.inputs: list[Tensor] = [leaf for leaf in tensors_in(xs) if leaf.requires_grad]
        sequence = self.sequence
        needs = torch.is_grad_enabled() and sequence is not None and sequence.needs_gradients
        history = 1 if sequence is None else sequence.history
        told = ranks.agree(self.trouble.take(), own, needs, history, *facts)
        lengths, needing, histories, kinds, sums = zip(*told, strict=True)
        if len(set(kinds)) > 1:
            raise ValueError("z0: must be the same on every rank, and its structure, shapes or dtypes differ")
        if len(set(sums)) > 1:
            raise ValueError("z0: must be the same on every rank, and its values differ")
        if not any(lengths):
            raise ValueError("xs: at least one step is needed, and no rank has any")
        self.lengths: list[int] = list(lengths)
        self.length: int = own
        self.total: int = sum(lengths)
        self.offset: int = sum(lengths[: ranks.rank])
        self.history: int = max(histories)
        self.needs_gradients: bool = any(needing)
        #: Of the ranks that have steps, the first and the last.
        self.first: int = next(rank for rank, each in enumerate(lengths) if each)
        self.last: int = max(rank for rank, each in enumerate(lengths) if each)

    @property
    def is_first(self) -> bool:
        """Whether the initial state is what this rank starts from."""
        return self.ranks.rank <= self.first

    def empty(self) -> Tensor:
        """The states of no step, [0, B, D]."""
        return self.initial.detach().new_zeros(0, *self.initial.shape)

    def cut(self, chunk: int) -> tuple[list[int], list[int]]:
        """How many chunks each rank has, and how many there are before it: [ranks], [ranks + 1]."""
        counts = [-(-each // chunk) for each in self.lengths]
        return counts, [0, *accumulate(counts)]

    def steps_before(self, chunks: Tensor, chunk: int) -> Tensor:
        """After how many steps of the whole so many chunks of the whole end."""
        counts, before = self.cut(chunk)
        found, steps = torch.zeros_like(chunks), 0
        for rank, length in enumerate(self.lengths):
            if counts[rank]:
                inside = ((chunks - before[rank]).clamp(min=0) * chunk).clamp(max=length)
                found = torch.where(chunks > before[rank], steps + inside, found)
            steps += length
        return found

    def holder(self, step: int) -> int:
        """Which rank holds a step, from 0."""
        return next(rank for rank, end in enumerate(accumulate(self.lengths)) if step < end)

    # Systems of which every rank has a part.

    def agree_on(self, blocks: Blocks | None) -> Blocks:
        """Blocks of no step of the structure that the blocks of other ranks have; ``blocks``: this rank's, where it has some."""
        facts = [-1, 0, 0, 0]
        if blocks is not None and self.trouble.error is None:
            core = [*blocks.data.shape[2:], 0, 0, 0][:3]
            facts = [STRUCTURES.index(type(blocks)), *core]
        told = {each for each in self.ranks.agree(self.trouble.take(), *facts) if each[0] >= 0}
        if len(told) > 1:
            raise ValueError("jacobian: the blocks have another structure or width on some ranks than on others")
        kind, *core = told.pop()
        structure = STRUCTURES[kind]
        return structure(self.empty().new_zeros(0, self.layout.rows, *core[: structure.core_dims]))

    def solve(
        self,
        blocks: Blocks,
        rhs: Tensor,
        solver: LinearSolver,
        *,
        choose: Callable[[Blocks], LinearSolver] | None = None,
    ) -> Tensor:
        """``z_l = A_l z_{l-1} + b_l`` from nothing: [N, B, D], of this rank's part.

        Args:
            choose: who solves for couplings, where it is more than the solver's own choice
        """
        dtype = rhs.dtype
        blocks, rhs = in_full(blocks, rhs)
        entry = entry_of(self.ranks, Map.of(blocks, rhs), torch.zeros_like(self.initial, dtype=rhs.dtype))
        if choose is not None and len(blocks):
            solver = choose(blocks[1:])
        return solve_local(blocks, rhs, entry, solver, reverse=False, refined=False).to(dtype)

    # What the ranks before this one hold.

    def meet(self, states: Tensor, *measures: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """All ranks tell where they end, and their measures: one packed message.

        Args:
            states: [N, B, D], of this rank, which follow each other
            measures: of which the largest of all ranks is wanted; no NaN

        Returns:
            the state [B, D] that this rank starts from, how large each number of a state was before [B, D], and the largest measures
        """
        initial = self.initial.detach()
        held = states if len(states) else torch.zeros_like(initial).unsqueeze(0)
        largest = held.abs().amax(0)
        there = torch.full_like(initial[:1, :1], bool(len(states)))
        told = torch.cat([each.reshape(-1) for each in (held[-1], largest, there)])
        before, found = self.say(self.ranks, told, _joined, measures)
        if before is None:
            return initial, initial.abs(), found
        state, size = (each.view(initial.shape).to(initial.dtype) for each in before[:-1].chunk(2))
        return torch.where(before[-1] > 0, state, initial), torch.maximum(size, initial.abs()), found

    def hand_back(self, handed: Tensor, *measures: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What the next rank that has steps hands back to this one, [B, D], zero to the last; and the largest measures of all ranks."""
        there = torch.full_like(handed[:1, 0], bool(self.length))
        after, found = self.say(self.ranks.reversed(), torch.cat([handed.reshape(-1), there]), nearest, measures)
        return torch.zeros_like(handed) if after is None else after[:-1].view_as(handed).to(handed.dtype), found

    def say(
        self, ranks: Ranks, told: Tensor, combine: Callable[[Tensor, Tensor], Tensor], measures: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, list[Tensor]]:
        """``Ranks.exchange``, in float64; raises on all ranks where one is in trouble."""
        error = self.trouble.take()
        said = [torch.full((1,), float(error is not None), device=told.device), *measures]
        flat = torch.cat([each.detach().reshape(-1).double() for each in said])
        before, heard = ranks.exchange(told.detach().double(), combine, flat)
        sizes = [each.numel() for each in said]
        failed, *found = (part.view(each.shape) for part, each in zip(heard.split(sizes), said, strict=True))
        if failed.item():
            self.ranks.fail(error)
        return before, found


def nearest(first: Tensor, then: Tensor) -> Tensor:
    """Of two neighbours what the later one says, unless it has no steps, which is the last that is said."""
    return torch.where(then[-1:] > 0, then, first)


def _joined(first: Tensor, then: Tensor) -> Tensor:
    """Of two neighbours: where the later one ends, if it has steps; the largest of both; whether one has steps."""
    count = (len(then) - 1) // 2
    end = torch.where(then[-1:] > 0, then[:count], first[:count])
    return torch.cat([end, torch.maximum(first[count:], then[count:])])


def _facts_of(layout: Layout, initial: Tensor) -> tuple[int, int]:
    """What must be the same everywhere: what the initial state is made of, and its values bit by bit, in a number each."""
    about = (str(layout.spec), layout.shapes, [str(each) for each in layout.dtypes], tuple(layout.batch_shape))
    values = torch.view_as_real(initial.detach()) if initial.is_complex() else initial.detach()
    values = values.double() + 0.0  # of which a zero has no sign
    bits = values.contiguous().view(torch.int64).flatten()
    # Every number by an odd one of its place: wherever one differs, or two change places, so does the sum (modulo 2^64).
    places = 2 * torch.arange(len(bits), device=bits.device) + 1
    return zlib.crc32(repr(about).encode()), int((bits * (places * 0x9E3779B97F4A7C1 + 2)).sum())
