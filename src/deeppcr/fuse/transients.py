"""Whether what was large once hides that later states are not known: ``Tolerance.hides`` of what lanes noted, by one kernel.

Operation by operation it takes the host longer than the kernels of a solve. Which chunks are suspected, these say themselves (``lives_on``).
"""

# Triton's kernels are called in ways that its annotations do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import cdiv, launch, next_power_of_2
from ..tolerance import Signal, Tolerance

#: Numbers that a program looks at, and chunks of a lane at most: more are left to PyTorch.
_NUMBERS, _MOST_CHUNKS = 1024, 4095


def hides_any(sizes: Tensor, initial: Tensor, tolerance: Tolerance, closer: Tensor | None = None) -> bool:
    """Whether ``tolerance.hides(sizes, initial, tolerance.allowed(sizes, initial), closer)`` in any row: sizes up to each chunk's end count.

    Args:
        sizes: [N, B, D], of every number the largest in each chunk
        initial: [B, D]
        closer: [N, B, D], sizes that are nearer to the true ones
    """
    if not can_look(len(sizes)):
        errors = tolerance.allowed(sizes, initial)
        return bool(tolerance.hides(sizes, initial, errors, closer).any())
    hidden = torch.zeros(1, dtype=torch.int32, device=sizes.device)
    look(sizes, initial, hidden, len(sizes), tolerance, closer)
    return bool(hidden)


def can_look(chunks: int) -> bool:
    """Whether so many chunks are not too many for the kernel."""
    return chunks <= _MOST_CHUNKS


def look(
    sizes: Tensor, initial: Tensor, hidden: Tensor, chunks: int, tolerance: Tolerance, closer: Tensor | None = None
) -> None:
    """Launch the kernel.

    Args:
        sizes, closer: as above, or the numbers of a chunk in another order
        initial: in the same order
        hidden: begins with what becomes 1 where anything is hidden
    """
    assert not tolerance.local, "where digits of every state are asked for, nothing hides any"
    lanes, signal = sizes.numel() // chunks, Signal.of(tolerance, chunks + 1)
    positions = next_power_of_2(chunks + 1)
    beside = max(1, min(_NUMBERS // positions, next_power_of_2(lanes)))
    scratch = torch.empty(3, chunks + 1, lanes, dtype=sizes.dtype, device=sizes.device)
    tensors = (sizes, initial, sizes if closer is None else closer, *scratch.unbind(), hidden)
    arguments = (
        *tensors, chunks + 1, lanes, signal.shortest, signal.times,
        float(tolerance.atol), float(tolerance.rtol), tolerance.faint, signal.lives_on, signal.known, math.log2(signal.proof),
    )  # fmt: skip
    constants = (closer is not None, torch.finfo(sizes.dtype).tiny, positions, beside)
    aligned = tuple([each.data_ptr() % 16 == 0 for each in tensors])
    integers = (sizes.dtype, initial.dtype, aligned, sizes.numel() >= 2**31)
    launch(_look, cdiv(lanes, beside), arguments, constants, warps=4, integers=integers)


_COUNTS = ["steps", "lanes", "shortest", "times"]


@triton.jit(do_not_specialize=_COUNTS)
def _look(
    sizes, initial, closer, largest, so_far, nearer, hidden, steps, lanes, shortest, times, atol, rtol, faint, lives_on, known, log_proof,
    CLOSER: tl.constexpr, TINY: tl.constexpr, POSITIONS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """``Tolerance.hides``, of as many numbers as there are LANES: names and formulas are the same there. Memory for what others of a lane
    read: ``largest`` from each state on, in a time; ``so_far``; and the same of what is ``nearer``. Errors are what is allowed, which never
    falls: the largest of a time is its last."""
    i = tl.arange(0, POSITIONS)[:, None].to(tl.int64)
    lane = (tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES))[None, :]
    inside = (i < steps) & (lane < lanes)
    own = i * lanes + lane
    size = tl.abs(tl.load(sizes + own - lanes, mask=inside & (i > 0), other=0.0))
    first = tl.abs(tl.load(initial + lane + i * 0, mask=inside & (i == 0), other=0.0)).to(size.dtype)
    size = tl.where(i == 0, first, size)
    tl.store(largest + own, size, mask=inside)
    tl.store(so_far + own, size, mask=inside)
    if CLOSER:
        near = tl.abs(tl.load(closer + own - lanes, mask=inside & (i > 0), other=0.0))
        tl.store(nearer + own, tl.where(i == 0, first, near), mask=inside)
    reach = 1
    while reach < steps:
        tl.debug_barrier()
        before = tl.load(so_far + own - reach * lanes, mask=inside & (i >= reach), other=0.0)
        tl.debug_barrier()
        size = tl.maximum(size, before)
        tl.store(so_far + own, size, mask=inside)
        reach *= 2
    tl.debug_barrier()
    seen = tl.zeros((POSITIONS, LANES), tl.int32)
    time = 1
    while steps - 1 - time > 0:
        if time >= shortest:
            some = inside & (i < steps - 1 - time)
            after = tl.load(largest + own + lanes, mask=some, other=0.0)
            before = tl.load(so_far + own, mask=some & (i < time), other=0.0)
            before = tl.maximum(before, tl.load(largest + own + (1 - time) * lanes, mask=some & (i >= time), other=0.0))
            then = after * 0 + float("inf")
            for lived in range(1, tl.minimum(times, (steps - 2) // time) + 1):
                some = inside & (i < steps - 1 - lived * time)
                at = own + (1 + lived * time) * lanes
                then = tl.minimum(then, tl.load((nearer if CLOSER else largest) + at, mask=some, other=0.0))
                last = tl.minimum((lived + 1) * time + i, steps - 1)
                off = atol + rtol * tl.load(so_far + last * lanes + lane, mask=some, other=0.0)
                falls = tl.minimum(faint, tl.exp2(log_proof / lived))
                became_faint = (after <= falls * before) & (after > TINY)
                found = some & became_faint & (then >= lives_on * after) & (off > atol + known * after)
                seen = seen | found.to(tl.int32)
            # After a burst so near to the end that nothing can be seen to live on.
            ends = inside & (i < time) & (i * 0 + steps > 2 * time)
            at = own + (steps - time) * lanes
            after = tl.load(largest + at, mask=ends, other=0.0)
            burst = tl.load(largest + at - time * lanes, mask=ends, other=0.0)
            earlier = tl.load(so_far + at - (time + 1) * lanes, mask=ends, other=0.0)
            off = atol + rtol * tl.load(so_far + (steps - 1) * lanes + lane + i * 0, mask=ends, other=0.0)
            fell = (after <= faint * burst) & (after > TINY) & (earlier <= lives_on * burst)
            seen = seen | (ends & fell & (off > atol + known * after)).to(tl.int32)
        later = inside & (i + time < steps)
        size = tl.load(largest + own, mask=inside, other=0.0)
        size = tl.maximum(size, tl.load(largest + own + time * lanes, mask=later, other=0.0))
        near = size
        if CLOSER:
            near = tl.load(nearer + own, mask=inside, other=0.0)
            near = tl.maximum(near, tl.load(nearer + own + time * lanes, mask=later, other=0.0))
        tl.debug_barrier()
        tl.store(largest + own, size, mask=inside)
        if CLOSER:
            tl.store(nearer + own, near, mask=inside)
        tl.debug_barrier()
        time *= 2
    tl.atomic_max(hidden, tl.max(tl.max(seen, 0), 0))
