"""Running the kernels of a step: all chunks at once until they join, or one step after the other; and backwards.

Shapes: L steps in N chunks of C, B rows of D numbers, R lanes of K numbers (R * K = B * D).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..launch import compiles_ahead, launch
from ..tolerance import Tolerance
from . import tiled
from .bound import BoundKernels, Notes, aligned_size
from .cuts import Cut, groups_of
from .digits import note_known_steps
from .found import Found, Others
from .joints import parts_of
from .kinds import Kind, Stage
from .transients import look

#: Where no more than this part of all lanes is left, larger chunks go on from their states.
_CLOSE = 1 / 4


class Run(BoundKernels):
    """One solve: the launches that it takes.

    Attributes:
        leaves: numbers of each tensor of a state, where it is to be noted after how many steps these have digits; else empty
    """

    leaves: tuple[int, ...] = ()

    def new_states(self, every: int = 1) -> Tensor:
        return self.initial.new_empty(self.length // every, *self.initial.shape)

    def others(self, every: int, ends: Tensor, sizes: Tensor) -> Others:
        """From what kernels note of chunks, [N * K * R] each: copies in the order of states."""
        ends, sizes = self.of_states(ends), self.of_states(sizes)
        return Others(every, ends[-1].to(self.initial, copy=True), sizes.clone())

    def of_states(self, noted: Tensor) -> Tensor:
        """What lanes note of chunks, [N * K * R], in the order of states: [N, B, D]."""
        program, (rows, width) = self.program, self.initial.shape
        if self.shape.tiled:
            return noted.view(-1, rows, width)
        return noted.view(-1, program.width, rows, program.channels).transpose(1, 2).reshape(-1, rows, width)

    def loop(
        self, states: Tensor, found: Found | None = None, *, every: int = 1, noted: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """One step after the other; of a run that was found, the lanes that are not settled, from what is exact on.

        Args:
            every: the states after every so many steps are written
            noted: [K * R] each, where the last states go and the largest sizes of all, if not all states are written
        """
        nothing = self.kernels.numbers(self.device)
        first = 0 if found is None else min(found.passes * found.chunk, self.length - 1)
        start = states[first - 1] if first else self.initial
        corrections = nothing if found is None else found.notes.corrections
        ends, sizes = (nothing, nothing) if noted is None else noted
        memory = (nothing, ends, nothing, sizes, corrections, *[nothing] * (1 + self.shape.tiled))
        passes = 0 if found is None else found.passes
        numbers = (0, first, self.length, 1, self.length - first, passes, 0)
        self._launch_roll(start, start, states, memory, numbers, False, True, every)

    def roll(
        self, guess: Tensor | None, states: Tensor, memory: tuple[Tensor, ...], chunk: int, chunks: int, passes: int, limit: int, *,
        product: bool, every: int,
    ) -> None:  # fmt: skip
        step = 0 if guess is None else self.initial.numel()
        sizes = (step, 0, chunk, chunks, chunk, passes, limit)
        start = self.initial if guess is None else guess
        self._launch_roll(self.initial, start, states, memory, sizes, product, False, every)

    def _launch_roll(
        self, initial: Tensor, guess: Tensor, states: Tensor, memory: tuple[Tensor, ...], sizes: tuple[int, ...],
        product: bool, whole: bool, every: int,
    ) -> None:  # fmt: skip
        step, first, chunk, chunks, _, passes, limit = sizes
        if self.shape.tiled:
            assert every == 1, "kernels on tiles write all states"
            sizes = (step, self.rows, self.length, first, chunk, chunks, passes, limit)
            programs, constants, warps = tiled.programs_of(self, chunks, product, whole)
        else:
            sizes = (step, self.rows, self.program.channels, self.length, every, *sizes[1:])
            programs, warps = -(-chunks * self.rows // self.block), self.warps
            constants = (product, whole, every == 1, self.block, self.stages)
        arguments = (
            initial, self.kernels.numbers(self.device), guess, states, *memory, *self.pointers, *self.strides, *sizes,
        )  # fmt: skip
        integers = (*self.kinds(*sizes), initial.data_ptr() % 16, guess.dtype, guess.data_ptr() % 16, memory[4].dtype)
        launch(self.kernels.roll, programs, arguments, constants, warps=warps, integers=integers)

    def in_parallel(
        self,
        kind: Kind,
        tolerance: Tolerance,
        guess: Tensor | None = None,
        most: int | None = None,
        every: int = 1,
        *,
        closer: bool = False,
    ) -> Found:
        """Passes until all lanes are settled, as many as are worth it.

        Args:
            kind: how large chunks are, and how many passes may be made before anybody looks
            guess: states to start from, [L, B, D]; None: the initial one everywhere
            most: so many passes and no look, as inside a CUDA graph
            every: the states after every so many steps are written; others than 1 for kinds that need no more
            closer: the sizes of chunks are asked for, whatever is suspected
        """
        return Passes(self, kind, tolerance, guess, most, every).found(closer=closer)

    def from_smaller_chunks(self, kind: Kind, tolerance: Tolerance, guess: Tensor | None) -> Tensor | None:
        """The states that the chunks of a kind start from: the guess, or what smaller ones make of it. Nobody looks."""
        for chunk, rolls, passes in kind.before:
            guess = self.in_parallel(Kind(self.length, chunk, rolls), tolerance, guess, most=passes).states
        return guess

    def roll_out(self, starts: Tensor, chunk: int, first: int = 0, *, product: bool = True) -> tuple[Tensor, Tensor]:
        """Chunks of steps from ``first`` on, each from a start of its own, with the products of their Jacobians, or with all of their states.

        Args:
            starts: [N, B, D]
            product: whether it is the products that are wanted

        Returns:
            the states after the chunks, [N, B, D], and the products, [N, B, D, D], of an elementwise step their diagonals, [N, B, D]; or
            all states of these chunks, [steps, B, D]
        """
        assert self.has_one_matrix, "of elementwise steps on several tensors a product is several matrices"
        chunks, (rows, width) = len(starts), self.initial.shape
        across, channels = self.program.width, self.program.channels
        like = starts.to(self.program.dtype)
        if not self.shape.tiled:
            like = like.view(chunks, rows, across, channels).transpose(1, 2)
        began = torch.empty(aligned_size(starts.numel()), dtype=like.dtype, device=self.device)
        began[: starts.numel()] = like.reshape(-1)
        ended, sizes = torch.empty_like(began), torch.empty_like(began)
        products = began.new_empty(aligned_size(starts.numel() * across if product else 1))
        notes = Notes(2, self.rows, self.device)
        worst = [began.new_empty(tiled.WORST * self.rows)] if self.shape.tiled else []
        every = 1 if self.shape.tiled or not product else self.length + 1  # then no state is written
        states = self.new_states() if every == 1 else self.initial
        memory = (began, ended, products, sizes, notes.corrections, notes.unsettled, *worst)
        # In a second pass, as this claims to be, chunks start from where they were told to.
        numbers = (0, first, chunk, chunks, chunk, 1, 2)
        self._launch_roll(self.initial, self.initial, states, memory, numbers, product, False, every)

        def in_order(noted: Tensor, *lead: int) -> Tensor:
            if self.shape.tiled:
                return noted.view(chunks, rows, *lead, width)
            return noted.view(chunks, *lead, across, rows, channels).movedim(-2, 1).flatten(-2)

        ends = in_order(ended[: starts.numel()]).to(starts.dtype)
        if not product:
            return ends, states[first:]
        blocks = products[: starts.numel() * across]
        if self.shape.tiled:  # the products with one tangent after the other
            return ends, in_order(blocks, width).mT
        return ends, in_order(blocks) if across == 1 else in_order(blocks, across)

    @property
    def has_one_matrix(self) -> bool:
        """Whether the Jacobian of a row is one matrix, or a diagonal: not several small ones."""
        return self.shape.tiled or self.program.width == 1 or self.program.channels == 1

    def in_one(self, states: Tensor, notes: Notes, every: int) -> Found:
        """All steps as one chunk: the loop in one kernel."""
        others, unsettled = None, self.rows
        if every == 1:
            self.repeat(("loop",), (states,), partial(self.loop, states))
        else:
            size = self.program.width * self.rows
            noted = torch.empty(2, aligned_size(size), dtype=self.program.dtype, device=self.device)
            ends, sizes = noted[0, :size], noted[1, :size]
            self.loop(states, every=every, noted=(ends, sizes))
            others = self.others(every, ends, sizes)
            unsettled = int((~torch.isfinite(sizes.view(-1, self.rows))).any(0).sum())
        notes.memory.zero_()
        return Found(self.length, states, notes, 0, self.length, 0, 0, unsettled, others)


class Passes:
    """Passes of all chunks of a run at once: the first of them are launched when this is made, and waited for by ``found``.

    Attributes:
        states: [L, B, D], or fewer, where they are being written
        chunk: steps of a chunk
        notes: where they note how it went
        done: passes that were launched
    """

    def __init__(
        self, run: Run, kind: Kind, tolerance: Tolerance, guess: Tensor | None = None, most: int | None = None, every: int = 1
    ):  # fmt: skip
        """See ``Run.in_parallel``."""
        self._run, self._kind, self._tolerance, self._guess = run, kind, tolerance, guess
        self._cut = cut = Cut.of(run, kind, tolerance, most, every)
        self.chunk: int = cut.chunk
        self.done: int = 0
        # Where nothing is launched, nothing is written.
        ahead = compiles_ahead()
        self.states: Tensor = run.initial if ahead else run.new_states(every)
        self.notes: Notes = Notes(cut.limit, run.rows, run.device, len(run.initial) if cut.digits else 0)
        self._in_one: Found | None = None
        if cut.chunks == 1:
            self._in_one = run.in_one(self.states, self.notes, every)
            return
        assert every == 1 or not cut.rolls, "chunks are rolled out from states, all of which have to be there"
        self._workspace = torch.empty(cut.size, dtype=run.program.dtype, device=run.device)
        self._other = self.states if ahead or not cut.rolls else run.new_states()
        self._launch(cut.limit if most is not None else min(cut.limit, kind.passes))

    def _launch(self, wanted: int) -> None:
        """Passes from those that were made up to so many."""
        guess, done = self._guess, self.done
        given, guessed_from = [self._workspace, self.notes.memory], None
        if guess is not None:
            given.append(guess)
            guessed_from = guess.dtype, guess.data_ptr() % 16 == 0
        if self._cut.rolls:
            given.append(self._other)
        self._run.repeat(
            (self._cut, done, wanted, guessed_from), (*given, self.states), partial(self._make, done, wanted)
        )
        self.done = wanted

    def _make(self, first: int, last: int) -> None:
        run, cut, notes = self._run, self._cut, self.notes
        chunk, chunks, limit = cut.chunk, cut.chunks, cut.limit
        starts, ends, sizes, products, *maps = self._workspace.split(cut.parts)
        worst = maps[-1:] if run.shape.tiled else ()
        memory = (starts, ends, products, sizes, notes.corrections, notes.unsettled, *worst)
        guessed = self._guess
        for left in range(cut.rolls if first == 0 else 0, 0, -1):  # the last of them is not where the passes write
            into = self._other if left % 2 else self.states
            run.roll(guessed, into, memory, chunk, chunks, 0, limit, product=False, every=1)
            guessed = into
        for passes in range(first, last):
            run.roll(guessed, self.states, memory, chunk, chunks, passes, limit, product=True, every=cut.every)
            join = tiled.join if run.shape.tiled else join_lanes
            join(run, (starts, ends, sizes, products, *maps), notes, chunks, passes, limit, cut.how)
        if cut.looks:
            used = chunks * run.initial.numel()
            look(sizes[:used], starts, notes.unsettled[limit + 2 :], chunks, self._tolerance)
        if notes.known is not None:
            note_known_steps(run, self.states, sizes, notes.known, chunks, self._tolerance)

    def found(self, *, closer: bool = False) -> Found:
        """What they came to, once all lanes are settled, or as many passes were made as are worth it: see ``Run.in_parallel``."""
        if self._in_one is not None:
            return self._in_one
        while True:
            found = self.judged((0, 0, closer, 0) if self._cut.most is not None else self.notes.counts(), self.notes)
            if found is not None:
                return found
            self._launch(min(self._cut.limit, self.done + 2))

    def judged(self, counts: Sequence[int], notes: Notes) -> Found | None:
        """What the passes that were made came to, by what they noted; None where more of them are worth it.

        Args:
            counts: ``notes.unsettled``
            notes: where the passes note it; or another run did that repeats their launches
        """
        cut, done, blind = self._cut, self.done, self._cut.most is not None
        *left, floored, suspected, hidden = counts
        left = left[:done]
        settled = 0 in left
        # After as many passes as there are chunks, each has started from where the one before it ended.
        over = settled or done >= cut.chunks
        if not over and done < cut.limit:
            return None
        passes = left.index(0) + 1 if settled and not blind else done
        unsettled = 0 if settled else left[-1]
        others = of_chunks = None
        self._kind.looks = bool(suspected)
        unseen = bool(suspected and (hidden or not cut.looks))
        if unseen or cut.every > 1:
            others, of_chunks = self._of_chunks(unseen)
        return Found(
            self._run.length, self.states, notes, passes, cut.chunk, 0 if over else unsettled, floored, unsettled, others,
            of_chunks,
        )  # fmt: skip

    def _of_chunks(self, suspected: bool) -> tuple[Others | None, Tensor | None]:
        """What is known of states that were not written; and the sizes of chunks, where something is suspected."""
        run, every = self._run, self._cut.every
        _, ends, sizes, *_ = self._workspace.split(self._cut.parts)
        ends, sizes = (each[: self._cut.chunks * run.initial.numel()] for each in (ends, sizes))
        others = run.others(every, ends, sizes) if every > 1 else None
        return others, run.of_states(sizes).clone() if suspected else None


def join_lanes(
    run: Run, memory: tuple[Tensor, ...], notes: Notes, chunks: int, passes: int, limit: int, tolerance: tuple[Any, ...]
) -> None:
    """``memory``: starts, ends, sizes, products, maps."""
    starts, ends, sizes, products, maps = memory
    rows, width, real = run.rows, run.program.width, run.program.dtype
    groups, lanes = groups_of(chunks, rows)
    sizes_of_join = (rows, chunks, groups, -(-chunks // groups))
    arguments = (
        starts, ends, products, sizes, maps, notes.corrections, notes.unsettled, notes.taken, notes.residual,
        *sizes_of_join, passes, limit, *tolerance,
    )  # fmt: skip
    for part in parts_of(width, real):
        launch(
            run.kernels.join, -(-rows // lanes), arguments, (part, groups, lanes),
            warps=max(1, groups * lanes // 32), integers=(real, *(size >= 2**31 for size in sizes_of_join)),
        )  # fmt: skip


def begin(run: Run, kind: Kind, tolerance: Tolerance, guess: Tensor | None = None, every: int = 1) -> Passes:
    """The first passes of ``solve``, launched and not waited for.

    No more than the states after ``every`` so many steps are written where that is known to do.
    """
    kind.begin()
    if every > 1 and kind.goes_on_from_ends:
        return Passes(run, kind, tolerance, guess, every=every)
    return Passes(run, kind, tolerance, run.from_smaller_chunks(kind, tolerance, guess))


def solve(
    run: Run, kind: Kind, tolerance: Tolerance, guess: Tensor | None = None, every: int = 1, begun: Passes | None = None
) -> Found:
    """In parallel, with chunks as large as it takes; where even large ones do not join, the loop finishes the rest.

    Where it did not do to write some of the states (lanes are left, or not finite), all of them are, in a run from the start.

    What worked is noted in ``kind``, for the next time.

    Args:
        begun: what ``begin`` gave for the same
    """
    found = (begin(run, kind, tolerance, guess, every) if begun is None else begun).found()
    if found.others is not None:
        if not found.unsettled:
            kind.sufficed(found.passes)
            return found
        found = run.in_parallel(kind, tolerance, run.from_smaller_chunks(kind, tolerance, guess))
    best: tuple[int, int, tuple[Stage, ...]] | None = None
    while True:
        kind.joined = not found.unsettled
        if not found.left:
            kind.sufficed(found.passes)
            return found
        attempt = _worth_of(run, kind, found)
        best = min(attempt, best or attempt)
        chunk, close = kind.chunk, best[0] <= _CLOSE * run.rows
        harder = kind.try_harder(run.program.width, best[-1] if close else ())
        best = best if kind.chunk == chunk else None
        if not harder:
            run.loop(found.states, found)
            return found
        found = run.in_parallel(kind, tolerance, run.from_smaller_chunks(kind, tolerance, guess))


def _worth_of(run: Run, kind: Kind, found: Found) -> tuple[int, int, tuple[Stage, ...]]:
    """Of passes that did not suffice: how many lanes they left, how many steps they took, and what is worth repeating of them."""
    corrections = found.notes.on_host().corrections[: found.passes].nan_to_num(torch.inf)
    # As many passes as brought those that are left as near as they came. (What drifts may be left by small corrections, too.)
    left = corrections[-1] > 1
    worst = corrections[:, left if left.any() else slice(None)].amax(1)
    passes = int((worst <= 2 * worst.min()).nonzero()[0]) + 1
    steps = kind.chunk * (kind.rolls + passes * (1 + run.program.width))
    return found.left, steps, (*kind.before, Stage(kind.chunk, kind.rolls, passes))
