"""What all emitted kernels call: whether a lane is settled, and numbers that are no use.

``found`` [passes, R] holds, of every pass and lane, the largest correction in units of the tolerance.
"""

# Triton's kernels are called in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from ..convergence import ENOUGH, NEGLIGIBLE
from ..tolerance import FAINT, GOES_ON, SMALL

#: A correction that leads so many times beyond the size of the states so far is not believed: its chunk goes on from the end of the
#: one before it. So where chunks contract they come near by themselves, and what grows is followed by as much a pass.
FAR = tl.constexpr(10.0)
#: Misses of so many units of rounding are nothing else, of a chunk of a few steps or many: see ``run.roughest`` for those that may be.
ROUGH = tl.constexpr(32.0)
#: A correction that is not below this part of the one before it has not shrunk.
SHRUNK = tl.constexpr(0.5)
#: A correction that is so many times the one before it is not the same again.
VARIED = tl.constexpr(1.05)
#: Misses of so many units of rounding are those of a start that cannot be represented any better.
SMOOTH = tl.constexpr(4.0)
_NEGLIGIBLE = tl.constexpr(NEGLIGIBLE)
_ENOUGH = tl.constexpr(ENOUGH)
_FAINT, _SMALL, _GOES_ON = tl.constexpr(FAINT), tl.constexpr(SMALL), tl.constexpr(GOES_ON)


@triton.jit
def is_enough(before, last):
    """Whether by its last two corrections the error left of a lane is small enough: see ``convergence.error_left``. Or both are within
    the tolerance, and what is expected to come is; or they are rounding, which is not the same twice. Corrections that go on and on by
    as much, however small, are those of a step whose derivatives are not what it does (a detached state, numbers on a grid)."""
    left = last * tl.maximum(last / (before - last), 1.0)
    noise = (last >= before * VARIED) | ((last < before) & (left <= 1))
    return (last <= _NEGLIGIBLE) | ((last < before) & (left <= _ENOUGH)) | ((last <= 1) & (before <= 1) & noise)


@triton.jit
def settled(found, passes, r, rows, inside):
    """Whether lanes ``r`` are, after so many passes. A pass that finds its lane settled leaves its number zero: it stays settled."""
    enough = inside & (r * 0 + passes >= 2)
    before = tl.load(found + tl.maximum(passes - 2, 0) * rows + r, mask=enough, other=0.0)
    last = tl.load(found + tl.maximum(passes - 1, 0) * rows + r, mask=enough, other=float("inf"))
    return enough & is_enough(before, last)


@triton.jit
def finite_or_zero(values):
    """Where an iterate has strayed beyond the numbers, the chain of corrections is cut, and the pass settles nothing."""
    return tl.where(tl.abs(values) < float("inf"), values, 0.0)


@triton.jit
def in_units(change, unit):
    """Of nothing, nothing, whatever the unit; what is not a number is infinite."""
    ratio = tl.where(change == 0, 0.0, change / unit)
    return tl.where(ratio == ratio, ratio, float("inf"))


@triton.jit
def lives_on(size, before, largest, rtol):
    """1 where two chunks of such sizes are faint (``Tolerance.faint``) beside the largest size so far, and the later one fell no further: a
    signal that was hidden by a transient, or noise. The host looks closer."""
    most = tl.maximum(largest * 0 + rtol, tl.minimum(largest * 0 + _FAINT * rtol, _SMALL)) * largest
    return tl.where((size > 0) & (size <= most) & (before <= most) & (size >= _GOES_ON * before), 1.0, 0.0)


@triton.jit
def note(
    largest, missed, rough, borne, hidden, found, unsettled, taken, residual,
    r, rows, inside, passes, limit, roughest, linear,
):  # fmt: skip
    """What a pass found of lanes ``r``.

    Args:
        largest: correction, in units of the tolerance
        missed, rough, borne: the largest miss, in units of its own rounding, and in those of what other numbers pass on to it
        hidden: above 0 where ``lives_on`` was
        roughest: misses of so many units may be rounding that has added up in a chunk
        linear: 1 where what does not settle is taken step by step, whatever is left: cotangents, which nobody is told of
    """
    alive = inside & ~settled(found, passes, r, rows, inside)
    later = inside & (r * 0 + passes > 0)
    before = tl.load(found + tl.maximum(passes - 1, 0) * rows + r, mask=later, other=0)
    enough = later & is_enough(before, largest)
    # Cotangents are linear: a correction is what they are off by.
    certain = later & (r * 0 + linear == 1) & (largest <= 1) & (before <= 1)
    # Where chunks join to the last digit, corrections are what rounding is amplified to. Within the tolerance that is all that was
    # asked for; beyond it nothing better can be had once corrections no longer shrink, or nobody may look again.
    joined = alive & later & ~enough & (largest < float("inf"))
    certain = certain | (joined & (rough <= SMOOTH) & (largest <= 1))
    stuck = (rough <= ROUGH) & ((largest > before * SHRUNK) | (r * 0 + passes + 1 >= limit))
    # What other numbers would round to may as well be a signal that converges: not where corrections no longer shrink at all.
    stuck = stuck | ((borne <= ROUGH) & (largest >= before))
    # What rounds in each of many steps by as much the same way (an increment far below its state) adds up to more. Then corrections go up
    # and down; those of a step whose derivatives are not what it does creep down.
    adds_up = (borne <= roughest) & (largest >= before * VARIED)
    floored = joined & (largest > 1) & (stuck | adds_up) & (r * 0 + linear == 0)
    tl.store(found + passes * rows + r, tl.where(floored | certain, 0.0, largest), mask=inside)
    enough = enough | certain
    passed = (r * 0 + passes + 1).to(tl.int32)
    tl.store(taken + r, tl.where(floored, -passed, passed), mask=alive)
    tl.store(residual + r, missed, mask=alive)
    tl.atomic_add(unsettled + limit, tl.sum(floored.to(tl.int32), 0))
    tl.atomic_add(unsettled + limit + 1, tl.sum((alive & (enough | floored) & (hidden > 0)).to(tl.int32), 0))
    left = inside & ~(enough | floored)
    tl.atomic_add(unsettled + passes, tl.sum(left.to(tl.int32), 0))


@triton.jit(do_not_specialize=["parts", "size"])
def sum_parts(written, total, parts, size, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """[parts, size] to [size]: some columns a program, so many parts of them at a time."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    found = tl.zeros((PARTS, COLUMNS), written.dtype.element_ty)
    for first in range(0, parts, PARTS):
        at = (first + tl.arange(0, PARTS)).to(tl.int64)
        there = (at < parts)[:, None] & inside[None, :]
        found += tl.load(written + at[:, None] * size + column[None, :], mask=there, other=0.0)
    tl.store(total + column, tl.sum(found, 0), mask=inside)
