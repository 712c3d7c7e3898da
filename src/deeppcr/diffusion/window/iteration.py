"""One iteration on all unfinished steps: tensors in, tensors out, nothing read by the host.

Shapes: L steps, B samples, D the flattened sample, K slots, N rows of one call of the network.

The unknowns are the states after all steps. In an iteration the network sees every unfinished pair of step and sample
as a row; what the steps make of its outputs differs from the states by the residuals; the prior's bidiagonal system
turns them into an update (``Coupling``). From the last three updates the next is extrapolated, with two coefficients for
every step and sample that know of the steps before it alone: so nothing that is exact is ever spoilt by what is not.
(Anderson's acceleration of depth two, made triangular as in Tang et al. 2024, "Accelerating parallel sampling of
diffusion models".)

A step leaves when its update is small, before it is known how the steps after it amplify what is left. So every step
is watched: how many times as far as its input did it move between two iterations? The product of these ratios over all
later steps says how much of an error there is in the final sample. Where a sample has finished with an update that was too
large for what was seen, it goes back to the first such step, with smaller thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..coupling import Coupling
from ..samplers import Coefficients

#: where an update is this small against the state, it is rounding: a step may leave with it
ROUNDING = 32.0
#: the same of a sample that had to go back: much smaller ones are not to be had
FLOOR = 4.0
#: where a step's value has changed by so many times its rounding, the change tells how the step amplifies errors: to a percent, up or
#: down, and so hundreds of steps may be multiplied
NOISE = 100.0
#: by how much more than the growth that was seen thresholds are lowered: it may have been seen in other directions
STRICTER = 10.0
#: where values are clipped, a first step jumps when it moves by more than this share of the clip
FAR = 0.05
#: of the extrapolation's least squares, relative: what keeps it solvable where two changes are parallel but for rounding
RIDGE = 1e-5


class Iteration:
    """The unknowns of one run and what an iteration does to them, in buffers that stay where they are.

    Args:
        coefficients: of the L steps
        coupling: of the L steps
        samples, width: B, D
        size: at most so many steps of a sample are evaluated in an iteration
        freeze: [L], a step leaves when its update is below this
        bound: a sample goes back to a step whose last update, times the growth that was seen since, is more
        settled: while the network is imprecise, it is counted how many steps have larger updates than this
        accelerate: extrapolate updates
        adds_noise: whether ``shift`` is used
        eps: relative precision of states and network; and of the network while it is imprecise
        rounded: [L], below this an update is what the network rounds: a step leaves with it, too
        outputs: [L], by how much its outputs differ where it rounds otherwise, on average; for iterations that look at them
    """

    noise: float
    rough_noise: float
    last_updates: Tensor
    last_plains: Tensor
    last_sizes: Tensor
    prefix: Tensor
    diverged: Tensor
    unsettled: Tensor
    uncertain: Tensor
    returned: Tensor
    iterations: Tensor
    evaluations: Tensor

    #: of what a network of half precision makes of the states, a step may leave with this many times as much
    margin: float = 2.0
    #: whether systems are solved by PyTorch's own operations (``Coupling``)
    plain: bool = False
    #: whether an imprecise network may be asked first: of that no step leaves
    may_be_rough: bool = True
    #: what the plan says of it
    in_words: str | None = None

    def __init__(
        self,
        coefficients: Coefficients,
        coupling: Coupling,
        samples: int,
        width: int,
        *,
        size: int,
        freeze: Tensor,
        bound: float,
        settled: float,
        accelerate: bool,
        adds_noise: bool,
        eps: tuple[float, float],
        rounded: Tensor | None = None,
        outputs: Tensor | None = None,
    ):
        self.coefficients: Coefficients = coefficients
        self.coupling: Coupling = coupling
        self.accelerate = accelerate
        length, slots = len(coefficients.timesteps), coefficients.slots
        self.length: int = length
        self.samples: int = samples
        self.size: int = min(size, length)
        like = coefficients.gain
        leaves = freeze if rounded is None else torch.maximum(freeze, rounded)
        self.freeze: Tensor = leaves.to(like).reshape(length, 1)
        self.bound: float = bound
        self.strict: float = float(freeze[-1]) / STRICTER
        self.settled: float = settled
        rounding = torch.finfo(like.dtype).eps
        self.rounding: float = ROUNDING * rounding
        self.floor: float = FLOOR * rounding
        self.noise, self.rough_noise = (NOISE * each for each in eps)
        # One row of padding: rows that only fill up a call read and write there.
        self.times: Tensor = torch.cat([coefficients.timesteps, coefficients.timesteps[-1:]])
        self.scale: Tensor | None = None
        if coefficients.scaled:
            self.scale = torch.cat([coefficients.scale, coefficients.scale[-1:]]).unsqueeze(-1)
        self.states: Tensor = like.new_zeros(length + 1, samples, width, slots)  # states[0] is the initial one
        self.shift: Tensor | None = like.new_zeros(length, samples, width) if adds_noise else None
        # How errors grow: what the steps made of their last inputs, and which of them (2: of the inputs before, too); how far the
        # states have moved since; how many times as far as its input each step has moved.
        self.values: Tensor = like.new_zeros(length, samples, width, slots)
        self.used: Tensor = torch.zeros(length, samples, dtype=torch.int8, device=like.device)
        self.moved: Tensor = like.new_zeros(length + 1, samples)
        self.growth: Tensor = like.new_zeros(length, samples)
        # By how much more than rounding the steps moved when they left; what they may move, and what counts as rounding.
        self.excess: Tensor = like.new_zeros(length, samples)
        self.thresholds: Tensor = like.new_zeros(length, samples)
        self.allowance: Tensor = like.new_zeros(samples)
        if accelerate:
            # Of the last iteration and the one before it: updates, the states they led to, the updates' sizes.
            self.last_updates = like.new_zeros(2, length, samples, width, slots)
            self.last_plains = torch.zeros_like(self.last_updates)
            self.last_sizes = like.new_zeros(2, length, samples)
        whole = {"dtype": torch.long, "device": like.device}
        self.index: Tensor = torch.arange(length, **whole).unsqueeze(1)  # [L, 1]
        self.numbers: Tensor = torch.arange(length * samples, **whole)
        self.rows: Tensor = torch.empty(length * samples + 1, **whole)
        self.nobody: Tensor = torch.zeros(length * samples + 1, **whole)
        # The host looks at the first five: how many steps are finished, where no value is finite, how many steps still move
        # in an imprecise network; in the end, of which samples rounding leaves more than is allowed, and which went back.
        self.counters: Tensor = torch.zeros(7, samples, **whole)
        self.prefix, self.diverged, self.unsettled, self.uncertain, self.returned = self.counters[:5]
        self.iterations, self.evaluations = self.counters[5:]
        self.jumps: Tensor = torch.zeros(samples, **whole)  # of first steps; counted where values are clipped
        self.shown: Tensor = self.counters[:5]
        if like.is_cuda:
            self.shown = torch.zeros(5, samples, dtype=torch.long, pin_memory=True)
        self.measured: Tensor = like.new_zeros(length, samples)

    @property
    def most_rows(self) -> int:
        return self.size * self.samples

    def hold(self, initial: Tensor, shift: Tensor | None) -> None:
        """The noise of a run: [B, D, K], and [L, B, D] or None."""
        self.states[0].copy_(initial)
        if self.shift is not None and shift is not None:
            self.shift.copy_(shift)

    def load(self, start: Tensor, known: bool = False) -> None:
        """Begin a run.

        Args:
            start: [L, B, D, K], a guess of the states
            known: it is one that was found before: a step may leave when it is evaluated for the first time
        """
        self.states[1:].copy_(start)
        self.counters.zero_()
        for buffer in (self.measured, self.moved, self.excess, self.jumps):
            buffer.zero_()
        self.growth.fill_(1)
        self.thresholds.copy_(self.freeze.expand_as(self.thresholds))
        self.allowance.fill_(self.rounding)
        self.forget()
        self.used.fill_(known)

    def forget(self) -> None:
        """There were no iterations before: those of an imprecise network would spoil the extrapolation of precise ones, and
        what it said is not to be compared with what they say."""
        self.used.zero_()
        if self.accelerate:
            self.last_sizes.zero_()

    def run(self, network: Callable[[Tensor, Tensor, Tensor], Tensor], count: int, leave: bool) -> None:
        """One iteration.

        Args:
            network: of rows [N, D], times [N] and samples [N]
            count: N, at least the number of unfinished pairs of step and sample
            leave: finished steps leave the window; False while the network is imprecise
        """
        self.advance(network(*self.gather(count)), leave)

    def gather(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the network is asked: inputs [N, D], times [N], samples [N]."""
        rows = self._rows(self._active(self.index - self.prefix), count)
        step, who = (rows, self.nobody[:count]) if self.samples == 1 else (rows // self.samples, rows % self.samples)
        inputs = self.states.flatten(0, 1)[rows, :, 0]
        if self.scale is not None:
            inputs = inputs * self.scale[step]
        return inputs, self.times[step], who

    def advance(self, outputs: Tensor, leave: bool) -> None:
        """What becomes of the states.

        Args:
            outputs: [N, D], of the network
            leave: finished steps leave the window
        """
        length, samples = self.length, self.samples
        states = self.states[1:]
        age = self.index - self.prefix  # [L, B]
        first, active = age == 0, self._active(age)
        self.iterations += self.prefix < length
        self.evaluations += active.sum(0)
        found = outputs.new_empty((length + 1) * samples, outputs.shape[1])  # of pairs that are not active, whatever
        found.index_copy_(0, self.rows[: len(outputs)], outputs)
        found = found[: length * samples].view(length, samples, -1)
        values = self.coefficients.advance(slice(None), self.states[:-1], found, self.shift)

        # Not finite: from an exact state it is the loop's own fate; elsewhere the iterate has strayed, and the chain is cut.
        finite = _size(values) < math.inf
        self.diverged.logical_or_((first > finite).any(0))
        used = active & finite
        values = torch.where(used[..., None, None], values, states)
        self._watch(values, used, self.noise if leave else self.rough_noise)
        residual = values - states
        torch.where(used, _size(residual).masked_fill_(first, 0), self.measured, out=self.measured)

        update = self.coupling.spread(residual)
        largest = _size(update)
        moved = states + update
        if self.accelerate:
            moved, largest = self._extrapolate(update, largest, moved, used)
        # A step from an exact state is exact as it stands; so is, for want of better, where the update overflowed.
        taken = (largest < math.inf) > first
        moved = torch.where(taken[..., None, None], moved, values)
        self.moved[1:].copy_(_distance(moved, states))
        states.copy_(moved)
        if leave:
            height = _size(states)
            # Of a step that was evaluated once it is not known how it amplifies errors: it must be right but for rounding.
            small = largest <= torch.where(self.used > 1, self.thresholds, 0) + self.allowance * height
            excess = torch.where(small > first, largest - self.floor * height, 0)
            torch.where(used, excess, self.excess, out=self.excess)
            # The first step takes what is exact, however far that is; the update of the step behind it was found before, and
            # knows of that no more than the prior does.
            jumped = first > small
            if self.coefficients.limit is not None:
                self.jumps += (jumped & (largest > max(self.bound, FAR * self.coefficients.limit))).any(0)
            small[1:] &= ~jumped[:-1]
            done = (small | first) & used | (age < 0)
            unfinished = self.prefix < length
            torch.amin(torch.where(done, length, self.index), 0, out=self.prefix)
            self._go_back(unfinished & (self.prefix == length))
        else:
            torch.sum(active > (largest < self.settled), 0, out=self.unsettled)

    @property
    def went_back(self) -> Tensor:
        """[B]"""
        return self.allowance < self.rounding

    def grown(self) -> Tensor:
        """[L, B]: how many times as large an error in the state after each step is in the last one, as far as was seen."""
        later = torch.cat([self.growth[1:].log(), torch.zeros_like(self.growth[:1])])
        return later.mT.flip(-1).cumsum(-1).flip(-1).mT.exp()

    def show(self) -> None:
        """Copy what the host looks at to where it does: a CUDA graph holds the copy too."""
        if self.shown.device != self.counters.device:
            self.shown.copy_(self.counters[:5], non_blocking=True)

    def look(self) -> list[list[int]]:
        """Of each sample, as last shown: the first five counters."""
        if self.counters.is_cuda:
            torch.cuda.current_stream(self.counters.device).synchronize()
        return self.shown.tolist()

    def _active(self, age: Tensor) -> Tensor:
        return (age >= 0) & (age < self.size)

    def _rows(self, active: Tensor, count: int) -> Tensor:
        """[N]: the numbers of the active pairs, in order, filled up with that of the padding."""
        chosen = active.flatten()
        total = chosen.numel()
        place = torch.where(chosen, chosen.cumsum(0) - 1, total)
        self.rows.fill_(total)
        self.rows.scatter_(0, place, self.numbers)
        return self.rows[:count]

    def _watch(self, values: Tensor, used: Tensor, noise: float) -> None:
        """How many times as far as their inputs those steps have moved that were evaluated twice in a row.

        Moves in other directions than the worst show less: so what was seen before is forgotten by halves (of its logarithm).
        """
        change = _distance(values, self.values)
        ratio = change / self.moved[:-1]
        known = used & (self.used > 0) & (change > noise * _distance(values)) & (ratio < math.inf)
        ratio = torch.maximum(ratio, ratio.sqrt() * self.growth.sqrt())
        torch.where(known, ratio, self.growth, out=self.growth)
        self.values.copy_(values)
        self.used.copy_(used * (1 + (self.used > 0)))

    def _go_back(self, finished: Tensor) -> None:
        """Of the samples that have just finished [B], those for which a step left too early: to the first such step."""
        grown = self.grown()
        early = finished & (self.excess * grown > self.bound)
        again = early.any(0)
        torch.where(again, torch.where(early, self.index, self.length).amin(0), self.prefix, out=self.prefix)
        stricter = torch.minimum(self.thresholds, self.strict / grown)
        torch.where(again, stricter, self.thresholds, out=self.thresholds)
        self.allowance.masked_fill_(again, self.floor)

    def _extrapolate(self, update: Tensor, largest: Tensor, plain: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
        """From this update and the last two: the states where their combination is smallest, over all steps up to each one.

        Where there was no update before, or it was the same, or not finite, nothing is added.

        Args:
            update, plain: [L, B, D, K], and the states that it leads to
            largest: [L, B], the size of the update
            used: [L, B], which steps were evaluated

        Returns:
            the states, and the size of what led to them or of the plain update, whichever is larger
        """
        changes, moves = [], []
        known, newer_update, newer_plain = used, update, plain
        for older_update, older_plain, size in zip(self.last_updates, self.last_plains, self.last_sizes, strict=True):
            known = known & (size > 0)
            changes.append(torch.where(known[..., None, None], newer_update - older_update, 0))
            moves.append(torch.where(known[..., None, None], newer_plain - older_plain, 0))
            newer_update, newer_plain = older_update, older_plain
        one, two = changes
        pairs = [(one, one), (one, two), (two, two), (one, update), (two, update)]
        products = torch.stack([(a * b).sum((-2, -1)) for a, b in pairs])
        # A GPU goes one by one along other dimensions than the last.
        weights = _least_squares(*products.mT.cumsum(-1).mT)
        states = plain
        for weight, moved in zip(weights, moves, strict=True):
            states = torch.addcmul(states, weight[..., None, None], moved, value=-1)
        for history, new in ((self.last_updates, update), (self.last_plains, plain)):
            history[1].copy_(history[0])
            history[0].copy_(new)
        self.last_sizes[1].copy_(self.last_sizes[0])
        torch.nan_to_num(largest, 0, 0, 0, out=self.last_sizes[0])
        return states, torch.maximum(largest, _size(states - self.states[1:]))


def _least_squares(
    one: Tensor, both: Tensor, two: Tensor, along_one: Tensor, along_two: Tensor
) -> tuple[Tensor, Tensor]:
    """The multiples of two vectors that are nearest to a third, from all their products; 0 of a vector that is 0."""
    tiny = torch.finfo(one.dtype).tiny
    one, two = one.clamp_min(tiny).sqrt(), two.clamp_min(tiny).sqrt()
    cosine, along_one, along_two = both / (one * two), along_one / one, along_two / two
    diagonal = 1 + RIDGE
    determinant = diagonal * diagonal - cosine * cosine
    return (
        (diagonal * along_one - cosine * along_two) / (determinant * one),
        (diagonal * along_two - cosine * along_one) / (determinant * two),
    )


def _size(states: Tensor) -> Tensor:
    """The largest number of each state: [L, B, D, K] to [L, B]; NaN where there is one."""
    if states.is_cuda:  # one launch
        return torch.linalg.vector_norm(states, math.inf, dim=(-2, -1))
    return states.abs().amax((-2, -1))  # on a CPU four times as fast


def _distance(states: Tensor, others: Tensor | None = None) -> Tensor:
    """Euclidean, between states or from 0: [L, B, D, K] to [L, B]."""
    return torch.linalg.vector_norm(states if others is None else states - others, dim=(-2, -1))
