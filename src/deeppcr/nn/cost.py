"""What a pass over a network takes by the kernels, from times that were measured; and the choice that follows.

Shapes: ``blocks`` blocks of ``skip`` layers, cut into N chunks of C blocks; B rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal

#: Layers in a chunk from which on one round sufficed, at PyTorch's initialisation, ReLU up to width 256. Four times fewer
#: took one round more, and so on.
_LAYERS_FOR_ONE_ROUND = {"relu": 32, "tanh": 32, "sigmoid": 8}
#: Residual networks do not contract: what a step takes in training, from the states of the step before.
_RESIDUAL_ROUNDS = 4
#: The share of the host's time in a call that the device does not hide: before the first kernel runs and after the last.
#: Picked out of six on the times of one run (docs/performance.md), not measured by itself.
_BEFORE = 0.6
#: The share of the host's time in a parallel call that the further launches of a backward pass in chunks take: a guess.
_LAUNCHES = 0.25
#: What takes at most so many times as long takes about as long.
_AS_LONG = 1.05


#: So many chunks are one group, and their starts are corrected without a kernel for the groups: a launch less, and as fast.
ONE_GROUP = 8


def chunks_in_group(chunks: int) -> int:
    """Into how many the chunks are gathered: about their square root.

    >>> [chunks_in_group(chunks) for chunks in (2, 8, 9, 256)]
    [2, 8, 4, 16]
    """
    return chunks if chunks <= ONE_GROUP else 2 ** math.ceil(math.log2(chunks) / 2)


@dataclass(frozen=True)
class Times:
    """Seconds on one device, for one kind of network. Points in between are interpolated.

    A round is two passes over all chunks: each chunk is walked, all at a time, then the starts are corrected.

    Attributes:
        host_loop: what the host takes for a call that walks all layers in one kernel
        host_parallel: the same for a parallel call
        rows, block: with rows[i] rows, one block takes block[i] in the loop
        programs, step: with programs[i] chunks under way (those of all rows), one block of each takes step[i] in a round
        chunks, solve: with chunks[i] chunks, all the rest of a round takes solve[i]

    >>> times = Times(1e-5, 5e-5, (1.0,), (1e-6,), (1.0, 100.0), (2e-6, 2e-6), (1.0, 100.0), (1e-5, 1e-5))
    >>> f"{1e3 * times.loop(1000, 1):.2f} ms, {1e3 * times.parallel(1000, 10, 1, 1):.2f} ms"
    '1.01 ms, 0.06 ms'
    """

    host_loop: float
    host_parallel: float
    rows: tuple[float, ...]
    block: tuple[float, ...]
    programs: tuple[float, ...]
    step: tuple[float, ...]
    chunks: tuple[float, ...]
    solve: tuple[float, ...]

    def __post_init__(self) -> None:
        for at, values in ((self.rows, self.block), (self.programs, self.step), (self.chunks, self.solve)):
            if not at or len(at) != len(values) or any(one >= other for one, other in pairwise(at)):
                raise ValueError("times: expected as many values as places, and these in order")
        for each in (self.host_loop, self.host_parallel, *self.block, *self.step, *self.solve):
            if not 0 <= each < math.inf:
                raise ValueError(f"times: expected seconds, got {each!r}")

    @staticmethod
    def from_json(found: Any) -> Times:
        """From what ``dataclasses.asdict`` made of them; anything else is a ValueError."""
        try:
            given = {each.name: found[each.name] for each in fields(Times)}
            values: dict[str, Any] = {
                name: tuple(map(float, each)) if isinstance(each, (list, tuple)) else float(each)
                for name, each in given.items()
            }
            return Times(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"times: {error!r}") from None

    def walk(self, blocks: int, rows: int) -> float:
        """One layer after the other, on the device."""
        return blocks * interpolate(self.rows, self.block, rows)

    def loop(self, blocks: int, rows: int) -> float:
        """A call that takes one layer after the other."""
        return self.host_loop + self.walk(blocks, rows)

    def round(self, blocks: int, chunk: int, rows: int) -> float:
        """One round in chunks of so many blocks, on the device. A backward pass, which is linear, is about as long."""
        chunks = -(-blocks // chunk)
        # Programs that solve for the starts, in each row: as many as groups, whose powers of two are smoothed out.
        walkers = 1 if chunks <= ONE_GROUP else math.sqrt(chunks)
        crowd = self.step_of(rows * walkers) / self.step_of(walkers)
        solve = crowd * interpolate(self.chunks, self.solve, chunks)
        return chunk * self.step_of(rows * chunks) + solve

    def parallel(self, blocks: int, chunk: int, rows: int, rounds: int) -> float:
        """A call in chunks of so many blocks."""
        device = rounds * self.round(blocks, chunk, rows)
        return max(self.host_parallel, _BEFORE * self.host_parallel + device)

    def step_of(self, programs: float) -> float:
        return interpolate(self.programs, self.step, programs)

    def scaled(self, processors: float, clock: float) -> Times:
        """On a device with so many times the multiprocessors, and so many times the clock rate."""
        return replace(
            self,
            rows=tuple(processors * each for each in self.rows),
            block=tuple(each / clock for each in self.block),
            programs=tuple(processors * each for each in self.programs),
            step=tuple(each / clock for each in self.step),
            solve=tuple(each / clock for each in self.solve),
        )

    def of_blocks(self, skip: int) -> Times:
        """From those of single layers to those of blocks of ``skip`` layers."""
        return replace(
            self, block=tuple(skip * each for each in self.block), step=tuple(skip * each for each in self.step)
        )


def interpolate(at: Sequence[float], values: Sequence[float], x: float) -> float:
    """Straight lines on logarithmic axes; constant before the first point, in proportion after the last: a full device.

    >>> interpolate((1, 100), (2, 8), 10), interpolate((1, 100), (2, 8), 200), interpolate((1, 100), (2, 8), 0.5)
    (4.0, 16.0, 2)
    """
    if x <= at[0]:
        return values[0]
    for k in range(1, len(at)):
        if x <= at[k]:
            part = math.log(x / at[k - 1]) / math.log(at[k] / at[k - 1])
            low, high = values[k - 1], values[k]
            if min(low, high) <= 0:
                return low + part * (high - low)
            return low * (high / low) ** part
    return values[-1] * x / at[-1]


@dataclass(frozen=True)
class Choice:
    """What takes the least time.

    Attributes:
        mode: whether in parallel, forward
        chunk: blocks in a chunk of the parallel passes, also where the loop is faster
        backward, backward_chunk: the same for the backward pass. It is linear, so one round: in a residual network, which
            takes several forward, chunks pay at lesser depths. Other networks go back as they went forward
        why: in words, of the forward pass
    """

    mode: Literal["parallel", "sequential"]
    chunk: int
    backward: Literal["parallel", "sequential"]
    backward_chunk: int
    why: str


def expected_rounds(blocks: int, chunk: int, skip: int, activation: str, residual: bool) -> int:
    """Rounds of two passes. Each pass makes the start of one more chunk exact, so half the chunks always suffice."""
    most = (-(-blocks // chunk) + 1) // 2
    short = math.log2(max(1.0, _LAYERS_FOR_ONE_ROUND[activation] / (chunk * skip)))
    usual = _RESIDUAL_ROUNDS if residual else 1 + math.ceil(short / 2)
    return max(1, min(most, usual))


def candidates(blocks: int, most_chunks: int) -> Iterator[int]:
    """Chunks that are powers of two, at least two of them and no more than there is room for."""
    chunk = 1
    while chunk == 1 or chunk < blocks:
        if -(-blocks // chunk) <= most_chunks or 2 * chunk >= blocks:
            yield chunk
        chunk *= 2


def choose(
    times: Times,
    source: str,
    *,
    blocks: int,
    rows: int,
    skip: int,
    activation: str,
    residual: bool,
    most_chunks: int,
    chunk: int | None = None,
) -> Choice:
    """The chunk that takes the least time, and whether the loop takes less; the same for the backward pass.

    Args:
        source: where ``times`` come from, in words
        most_chunks: that there is room for
        chunk: the one to take, where it is not to be chosen
    """

    def rounds(chunk: int) -> int:
        return expected_rounds(blocks, chunk, skip, activation, residual)

    def seconds(chunk: int) -> float:
        return times.parallel(blocks, chunk, rows, rounds(chunk))

    backward = chunk
    if chunk is None:
        round_of = {each: times.round(blocks, each, rows) for each in candidates(blocks, most_chunks)}
        # On the device: what the host hides it does not hide in a CUDA graph, nor once it is less busy than when it was timed.
        chunk = backward = max(_as_long({each: rounds(each) * round_of[each] for each in round_of}))
        if residual:  # few large chunks may save rounds, of which a backward pass has one anyway
            backward = max(_as_long(round_of))
    assert backward is not None
    loop, parallel = times.loop(blocks, rows), seconds(chunk)
    mode = back = _faster(parallel, loop, blocks)
    if residual:
        in_chunks = _LAUNCHES * times.host_parallel + times.round(blocks, backward, rows)
        back = _faster(in_chunks, times.walk(blocks, rows), blocks)
    what = "block" if skip > 1 else "layer"
    why = f"expected: {1e3 * parallel:.2g} ms in chunks of {chunk}, {1e3 * loop:.2g} ms one {what} after the other ({source})"
    return Choice(mode, chunk, back, backward, why)


def _faster(parallel: float, loop: float, blocks: int) -> Literal["parallel", "sequential"]:
    return "parallel" if parallel < loop and blocks > 1 else "sequential"


def _as_long(taken: dict[int, float]) -> list[int]:
    """The chunks that take about as long as the fastest, from the seconds of each.

    The largest of them is best: it needs the fewest rounds where a network hardly contracts.
    """
    return [each for each in taken if taken[each] <= _AS_LONG * min(taken.values())]
