"""How far states may be off, whatever their units are.

Shapes: L steps (or n chunks), B rows, D the packed state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: A state is kept for good, or handed to the loop as exact, only when its update is this many units of rounding:
#: whatever is frozen with a larger error may be amplified by the steps that follow, and no test sees it again.
_SETTLED = 4
#: So many units of rounding no update is asked to be smaller than.
ROUNDED = 8
#: Over a sequence, so many units of rounding may add up in a state.
_ADDED_UP = 100
#: What steps miss by more than so many units of rounding adds up whatever its sign.
_TURNING = 16
#: A state that is no larger than so many tolerances has died out, and smaller than this part of its largest size: its leading digits
#: are not known.
FAINT, SMALL = 100, 0.1
#: A signal dies out that goes on falling: in as much time as it took to become faint, to less than this part.
GOES_ON = 0.1
#: In none of so many such times after it was faint a signal that lives on falls: one that dies may rest for one.
_TIMES = 6
#: It may be fewer where it became fainter: at that rate it would have fallen to less than this part by then.
_PROOF = 1e-9
#: So many states at least such a time has.
_SHORTEST = 4
#: Sizes of so many chunks are looked at: of the first ones more than of the last ones.
LOOKS = 16
#: What became faint, and in the chunks that are left would fall at least to this part at the same rate, should have fallen.
STILL_TO_FALL = 3e-3
#: Of what is smaller in float32, a tolerance is no number that is to be divided by.
VISIBLE = 2.0**-103


def default_tolerance(dtype: torch.dtype) -> float:
    """1e-10 for float64, 1e-5 for float32, 1e-2 for half precision; relative."""
    return {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 1e-2)


@dataclass(frozen=True)
class Tolerance:
    """How far states may be off. Units do not matter: it is relative to the size that a component has in its row.

    Args:
        atol, rtol: absolute, and relative to that size
        local: which is the largest around a step; else the largest up to it
    """

    atol: float
    rtol: float
    local: bool = False

    def allowed(self, states: Tensor, initial: Tensor) -> Tensor:
        """Of states [n, B, D] that follow each other, after the initial one [B, D]: [n, B, D]."""
        return self.atol + self.rtol * self.scale(states, initial)

    def scale(self, states: Tensor, initial: Tensor) -> Tensor:
        """The size of every component of every row at every step: [n, B, D], as ``states``."""
        sizes = torch.cat([initial.unsqueeze(0), states]).abs_()
        if not self.local:
            # The largest so far, by doubling: PyTorch's cummax takes three times the memory, for places that nobody asks for.
            reach = 1
            while reach < len(sizes):
                sizes[reach:] = torch.maximum(sizes[reach:], sizes[:-reach])
                reach *= 2
            return sizes[1:]
        around = torch.maximum(sizes[:-1], sizes[1:])  # and, but for the last, the one after it
        return torch.cat([torch.maximum(around[:-1], around[1:]), around[-1:]])

    def known_steps(self, states: Tensor, scale: Tensor, numbers: Tensor) -> Tensor:
        """[B]: the number of the last state that has digits, or of the last one of all where none after it lacks any: see ``last_of``."""
        known, lost = self.last_of(states, scale, numbers)
        return torch.where(lost > known, known, numbers[-1])

    def last_of(self, states: Tensor, scale: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """[B] each: the numbers [n] of the last of the states [n, B, D] of such a scale of which anything has digits that the tolerance
        vouches for, and of the last one of which nothing has. What is zero needs none; 0 where there is no such state."""
        size = self._part_of(states, scale)
        known, lost = size > self.faint, (size > 0) & (size <= self.faint)
        of_known, of_lost = (torch.where(each, numbers.unsqueeze(1), 0).amax(0) for each in (known, lost))
        return of_known, of_lost

    def has_digits(self, states: Tensor, scale: Tensor) -> Tensor:
        """[..., B]: whether any number of states [..., B, D] of such a scale has digits that the tolerance vouches for."""
        return self._part_of(states, scale) > self.faint

    def _part_of(self, states: Tensor, scale: Tensor) -> Tensor:
        """Of their scale, the largest: [..., B, D] to [..., B]."""
        return (states.abs() / (self.atol / self.faint + scale)).nan_to_num(0.0).amax(-1)

    @property
    def faint(self) -> float:
        """A number that is no larger than this part of its largest size so far is faint: of its digits not much is known."""
        return max(self.rtol, min(FAINT * self.rtol, SMALL))

    def is_faint(self, states: Tensor, scale: Tensor) -> Tensor:
        """[B]: whether any number of states [n, B, D] of such a scale is."""
        return (states.abs() <= self.faint * scale).any(-1).any(0)

    def hides(self, states: Tensor, initial: Tensor, errors: Tensor, closer: Tensor | None = None) -> Tensor:
        """[B]: whether what was large once hides that a signal, which became faint and lives on, is not known.

        A signal that dies out goes on falling as it fell, and nobody asks for digits of what is left of it. One that became faint in a
        time, and in up to six times as much after that did not fall on, was hidden by a transient; so was one that became faint after it
        was larger than ever before. Where errors are of its own size, by the square root of the tolerance, next to nothing is known of
        it. That is asked of each number of a row, of times of every length.

        Args:
            states: [n, B, D], that follow each other, after the initial one [B, D]
            errors: [n, B, D], of the states
            closer: [n, B, D], states that are nearer to the true ones: those, too, have to live on where ``states`` became faint
        """
        sizes = torch.cat([initial.unsqueeze(0), states]).abs_()
        so_far = torch.cat([sizes[:1], self.scale(states, initial)])
        # From each state on the largest of so many as ``time`` says: of sizes, of errors, and of the sizes that are nearer to the true ones.
        nearer = sizes if closer is None else torch.cat([sizes[:1], closer]).abs_()
        first = torch.stack([sizes, torch.cat([torch.zeros_like(sizes[:1]), errors]).abs_(), nearer])
        steps = len(sizes)
        time, hidden = 1, torch.zeros(sizes.shape[1:], dtype=torch.bool, device=sizes.device)
        shortest, times, lives_on, known, proof = Signal.of(self, steps)
        # What it fell to: as much in each of the times that it lived on, and it would be as small as the proof.
        falls = [min(self.faint, proof ** (1 / lived)) for lived in range(1, times + 1)]
        while steps - 1 - time > 0:
            largest, error, nearer = first
            most = min(times, (steps - 2) // time) if time >= shortest else 0
            count = steps - 1 - time
            before, after = torch.cat([so_far[:time], largest[1 : steps - time]])[:count], largest[1 : 1 + count]
            visible, lived_on, off = after > torch.finfo(after.dtype).tiny, lives_on * after, error[1:]
            then = nearer[1 + time :][:count]
            for lived in range(1, most + 1):
                count = steps - 1 - lived * time
                later = slice(1 + lived * time, 1 + lived * time + count)
                then, off = torch.minimum(then[:count], nearer[later]), torch.maximum(off[:count], error[later])
                became_faint = (after[:count] <= falls[lived - 1] * before[:count]) & visible[:count]
                unknown = off > self.atol + known * after[:count]
                hidden |= (became_faint & (then >= lived_on[:count]) & unknown).any(0)
            if time >= shortest and steps > 2 * time:
                # After a burst so near to the end that nothing can be seen to live on. What dies out was never larger than at first.
                earlier, burst, after = so_far[-2 * time - 1 : -time - 1], largest[-2 * time : -time], largest[-time:]
                fell = (after <= self.faint * burst) & (after > torch.finfo(after.dtype).tiny)
                hidden |= (fell & (earlier <= lives_on * burst) & (error[-time:] > self.atol + known * after)).any(0)
            first = torch.cat([torch.maximum(first[:, :-time], first[:, time:]), first[:, -time:]], 1)
            time *= 2
        return hidden.any(-1)


class Signal(NamedTuple):
    """What tells a signal that lives on from one that dies out, in ``Tolerance.hides`` and in the kernel that asks the same.

    Attributes:
        shortest: so many states at least a time has: for a moment a number is small whenever its sign changes
        times: in so many at most it is seen to live on; of few states, as of chunks, not more are to be had
        lives_on: to less than this part it does not fall
        known: errors of this part of its size leave digits of it
        proof: what it would have fallen to
    """

    shortest: int
    times: int
    lives_on: float
    known: float
    proof: float

    @staticmethod
    def of(tolerance: Tolerance, states: int) -> Signal:
        times = max(1, min(_TIMES, states // (2 * _SHORTEST)))
        lives_on, known = max(GOES_ON, math.sqrt(tolerance.faint)), math.sqrt(tolerance.rtol)
        return Signal(min(_SHORTEST, states // 2), times, lives_on, known, max(_PROOF, tolerance.faint**times))


@dataclass(frozen=True)
class Bounds:
    """What differences of states are held against.

    Attributes:
        scale: [n, B, D], the size of every component
        rounding: [n, B, D], a unit of rounding of what the step computes there
    """

    tolerance: Tolerance
    scale: Tensor
    rounding: Tensor

    @property
    def allowed(self) -> Tensor:
        return self.tolerance.atol + self.tolerance.rtol * self.scale

    def ratio(self, difference: Tensor) -> Tensor:
        """The size of a difference in units of the tolerance, worst component: [n, B]; infinite where it is not a number."""
        return _in_units(difference, torch.maximum(self.allowed, ROUNDED * self.rounding)).amax(-1).double()

    def relative(self, difference: Tensor) -> Tensor:
        """[B]: the size of a difference in units of the states, worst step and component."""
        return _in_units(difference, self.scale).amax((0, -1))

    def is_rounding(self, difference: Tensor) -> Tensor:
        """[B]: whether a difference is of the size that rounding may add up to."""
        return (difference.abs() <= _ADDED_UP * self.rounding).all(-1).all(0)

    def settles(self, difference: Tensor) -> Tensor:
        """[n, B]: whether nothing but rounding is left: of what the step computes, and no more of it than is tolerated."""
        most = torch.maximum(self.allowed, _SETTLED * torch.finfo(self.scale.dtype).eps * self.scale)
        return (difference.abs() <= torch.minimum(_SETTLED * self.rounding, most)).all(-1)


def _in_units(difference: Tensor, unit: Tensor) -> Tensor:
    """The size of a difference in a unit, [..., D] each: nothing is nothing in any, and what is no number is infinite."""
    ratios = torch.where(difference == 0, 0, difference.abs() / unit)
    return torch.where(torch.isnan(ratios), math.inf, ratios)


class Measured(NamedTuple):
    """What steps say of states, by the values that they give from one state after the other.

    Attributes:
        residual: [B], by how much they miss, at most
        held: [B], whether that bears out the tolerance
        drift: [B], what it adds up to at most, in units of the tolerance: the error where states keep what is added to them, and
            derivatives do not know of it
    """

    residual: Tensor
    held: Tensor
    drift: Tensor


def measure(values: Tensor, states: Tensor, initial: Tensor, tolerance: Tolerance) -> Measured:
    """Of states [L, B, D] whose steps give ``values``, after the initial one [B, D]."""
    off, allowed = misses(values, states, initial, tolerance)
    residual, held = off.amax((0, -1)), (off <= allowed).all(-1).all(0)
    allowed.sub_(10 * tolerance.atol).mul_(tolerance.rtol / _missed_part(tolerance, states.dtype)).add_(tolerance.atol)
    # Where states turn, or change their signs, sizes add up. Those of roundings do so in every solve: of these only what has a direction.
    rounding = min(1.0, _TURNING * torch.finfo(states.dtype).eps / tolerance.rtol) if tolerance.rtol else 0.0
    # All in the memory that is there, which is as large as the states.
    in_units = off.div_(allowed).nan_to_num_(0.0, posinf=math.inf)
    sizes = torch.threshold_(in_units, rounding, 0.0).sum(0)
    added_up = torch.sub(values, states, out=off).cumsum_(0).abs_().div_(allowed).nan_to_num_(0.0, posinf=math.inf)
    drift = torch.maximum(added_up.amax(0), sizes).nan_to_num_(0.0, posinf=math.inf)  # of what is no number others tell
    return Measured(residual, held, drift.amax(-1))


def bears_out(values: Tensor, states: Tensor, initial: Tensor, tolerance: Tolerance) -> Tensor:
    """[B]: whether steps that give ``values`` bear out states [n, B, D] that were found otherwise.

    A row may stop being finite where its step says so too, and nothing is asked of it from there on.

    Args:
        initial: [B, D], the size of what came before; rows of it that are not finite stopped there
    """
    off, allowed = misses(values, states, initial, tolerance)
    finite, given = torch.isfinite(torch.cat([initial.unsqueeze(0), states])).all(-1), torch.isfinite(values).all(-1)
    begun = finite[:-1].cummin(0).values
    # Beside an infinite state any miss would be allowed.
    held = torch.where(finite[1:] & given, (off <= allowed).all(-1), finite[1:] == given)
    return (held | ~begun).all(0)


def misses(values: Tensor, states: Tensor, initial: Tensor, tolerance: Tolerance) -> tuple[Tensor, Tensor]:
    """By how much steps that give ``values`` miss states, and what is allowed: [n, B, D] each."""
    allowed = tolerance.scale(states, initial)
    torch.maximum(allowed, values.abs(), out=allowed)
    allowed.mul_(_missed_part(tolerance, states.dtype)).add_(10 * tolerance.atol)
    return (values - states).abs_(), allowed


def _missed_part(tolerance: Tolerance, dtype: torch.dtype) -> float:
    """By this part of its size steps may miss a state: by ten tolerances, and rounding."""
    return 10 * tolerance.rtol + 1000 * torch.finfo(dtype).eps


def size_at_first(sizes: Tensor, before: Tensor | None, rtol: float) -> Tensor:
    """[B]: by what size of the initial state the tolerance of all later ones is measured: in ``nn.kernels``, the same of a row.

    By its own, but where what comes after it became faint, and lives on to the end: then by the size of that. Else a large initial state
    would hide all that comes after it (``Tolerance.hides``, which looks everywhere).

    A signal that dies out goes on falling as it fell. So what became faint must have had the time to fall much further at that rate, and
    have not done so. That is said of sizes that are known. Those that fell since the pass before are not: they may be what the guess left,
    and hide a signal as well as none. So they are asked for, too, until they stay, or nothing is left of them.

    Args:
        sizes: [N + 1, B], of the initial state and of the ends of chunks
        before: the same in the pass before; None in the first one
    """
    first, chunks = sizes[0], len(sizes) - 1
    there = [-(-((k + 1) ** 2) * chunks // LOOKS**2) for k in range(LOOKS)]
    size, past = sizes[there], torch.tensor(there, device=sizes.device).unsqueeze(1)
    least = size.flip(0).cummin(0).values.flip(0)
    lives = least >= GOES_ON * size
    lives &= torch.log(size / first) * (chunks - past) <= past * math.log(STILL_TO_FALL)
    if before is not None:
        lives |= size < GOES_ON * before[there]
    hidden = (size > VISIBLE) & (size <= Tolerance(0.0, rtol).faint * first) & lives
    return torch.where(hidden, size, first).amin(0)
