"""Which way a solve goes where nobody says it: by what solves of its kind took.

A kind is known by its step, shapes and length. What was never seen starts as the loop of Python, and after a few steps it is known how
long that would take: most loops are short, and nothing beats them the first time. What is long is solved in parallel at once, and
what comes again gets kernels where its step can have them.

Where gradients are wanted, the time of a backward pass counts as well. It is estimated: it runs whenever the caller likes, among other
things, and to time it on a GPU would be to wait for it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch

from ..bounded import Bounded

Way = Literal["loop", "graph", "newton"]

#: Steps after which it is estimated how long a loop takes; the first ones warm up.
PROBED, _WARM = 6, 2
#: So many seconds a loop must take for a parallel solve without kernels to be tried, by type of device; or all loops of its kind so far, if
#: each takes so many. And the seconds that an operation takes in a loop, in a parallel solve, and for each number of it.
_WORTH_NEWTON, _WORTH_AGAIN = {"cuda": 0.05, "cpu": 0.1}, {"cuda": 0.005}
_OPERATION = {"cuda": (10e-6, 3e-6, 5e-12), "cpu": (5e-6, 50e-6, 1e-9)}
#: A backward pass takes so many times as long as the forward pass with a graph for gradients: of a loop, and of a parallel solve. On a CPU
#: that was 0.7 to 1.4 and 0.1 to 0.8 for recurrent cells and layers of 4 to 32 numbers; on an H200, of MLPs (README.md), 2.5 to 3.2 and
#: 0.4 to 0.8.
_BACKWARD = {"cuda": (2.5, 0.6), "cpu": (1.0, 0.4)}
#: Seconds that the first derivative in forward mode of all takes, until PyTorch's rules for it are loaded. (Few of them, as that of torch.minimum,
#: import a compiler for another 1.5 s. That is once a process, and not worth a loop.)
_COLD, _RULES = 0.2, "torch._decomp.decompositions_for_jvp"
#: What is so many times as quick as an estimate of the loop is quicker than the loop; else that has to be measured. (A few steps by
#: themselves took up to four times as long as many, on a CPU.)
_DOUBTED = 8.0
#: A parallel solve is tried where it is expected to take this part of the loop's time: it may not converge.
_PAYS = 0.7
#: Iterations that are expected, each of which takes up to so many dependent evaluations of a step, values and tangents.
_EXPECTED, _EVALUATIONS = 6, 32
#: Each takes so many times as long as that (1.2 to 2.8 on a CPU, over thirteen of the loops of ``benchmarks/loop_steps.py``; those that
#: converged took 2 to 5, so that the estimate of a whole solve holds).
_ITERATION = 2.0
#: So many for kernels to be made for a kind that comes again, and for one that comes for the first time: making them takes seconds.
_WORTH_KERNELS, _WORTH_KERNELS_AT_ONCE = 0.003, 5.0
#: A way is tried so often before it is judged by its time: the first time what it needs is imported, and on a GPU the first solves record
#: graphs. One that takes more than so many times as long as the loop is not tried again before ``_PATIENCE`` solves, then twice as many;
#: and one that is beyond hope never.
_TRIES, _LOST, _BEYOND_HOPE = 3, {"cuda": 10.0, "cpu": 2.0}, 10.0
#: A way that did not work is tried again after so many solves, then after twice as many: a step's parameters change.
_PATIENCE = 8
#: A kind that differs in numbers, rows or a few steps waits as long, and no longer than this: it may be the one for which it works.
_HANDED_ON = 4 * _PATIENCE
#: How many kinds are remembered.
_MOST_KINDS = 1024
_T = TypeVar("_T")


@dataclass
class Bar:
    """Of a way that did not work: why, how many solves it is left alone for, and until which one."""

    why: str
    wait: int
    until: int


@dataclass
class Record:
    """What solves of one kind took.

    Attributes:
        device: the type of their device
        sizes: L, B and D, the numbers of a row's state
        differentiated: a backward pass is to follow
        seconds: the least that each way took forward, or is expected to take
        estimated: the ways of which that is not measured
        tries: how often each way was taken
        last: after how many solves it was taken last
        solves: how many there were
        barred: ways that did not work the last time
        only_loop: why nothing but the loop of Python is right for such a step; None where others are
    """

    device: str
    sizes: tuple[int, int, int] = (1, 1, 1)
    differentiated: bool = False
    seconds: dict[Way, float] = field(default_factory=dict)
    estimated: set[Way] = field(default_factory=set)
    tries: dict[Way, int] = field(default_factory=dict)
    last: dict[Way, int] = field(default_factory=dict)
    solves: int = 0
    barred: dict[Way, Bar] = field(default_factory=dict)
    only_loop: str | None = None

    def choose(self) -> tuple[Way, str]:
        """The way to take, and why."""
        if self.only_loop is not None:
            return "loop", f"one step after the other: {self.only_loop}"
        if "loop" not in self.seconds:
            return "loop", "the first of its kind: one step after the other, until it is known how long that takes"
        for way in self.seconds if "loop" in self.estimated else ():
            if way != "loop" and _DOUBTED * self.total(way) > self.total("loop"):
                return "loop", f"the {self.told('loop')}; {self.told(way)}, so that it is measured"
        for way in self._candidates():
            if way not in self.seconds or self._is_worth_another_try(way):
                return way, f"the {self.told('loop')}; {way} is tried"
        if len(self.seconds) == 1:
            why = "; ".join(bar.why for bar in self.barred.values() if bar.until == sys.maxsize)
            if not why and self._pays() and not self._pays(self._cold):
                return (
                    "loop",
                    f"the {self.told('loop')}; in parallel it would be faster, but what that imports first takes longer",
                )
            return "loop", f"the {self.told('loop')}, and nothing else is worth a try{': ' if why else ''}{why}"
        return min(self.seconds, key=self.total), "of this kind " + ", ".join(map(self.told, self.seconds))

    def _is_worth_another_try(self, way: Way) -> bool:
        tries, times = self.tries[way], self.total(way) / self.total("loop")
        if tries >= _TRIES or times >= _BEYOND_HOPE:
            return False
        again = self.last[way] + _PATIENCE * 2 ** (tries - 1)
        return times <= _LOST.get(self.device, _LOST["cpu"]) or self.solves >= again

    def total(self, way: Way) -> float:
        """Seconds of a way, with the backward pass where one is to follow."""
        return self.seconds[way] + self._backward(way, self.seconds[way])

    def _backward(self, way: Way, forward: float) -> float:
        """Roughly the seconds of the backward pass behind a forward pass of so many."""
        if not self.differentiated:
            return 0.0
        of_loop, of_newton = _BACKWARD.get(self.device, _BACKWARD["cpu"])
        if way == "graph":  # whose gradients are those of a parallel solve
            way, forward = "newton", self.expected_newton(self.seconds["loop"])
        return forward * (of_newton if way == "newton" else of_loop)

    def told(self, way: Way) -> str:
        """What a way takes, in words."""
        taken, backward = self.seconds[way], self._backward(way, self.seconds[way])
        text = f"{way} {'would take about' if way in self.estimated else 'took'} {written(taken)}"
        return f"{text} and backward about {written(backward)}" if self.differentiated else text

    def _candidates(self) -> list[Way]:
        """The ways that are worth trying beside the loop."""
        if not self._is_worth_newton:
            return []
        ways: list[Way] = ["newton"] if self._pays(self._cold) or "newton" in self.seconds else []
        if self.device == "cuda" and ("newton" in self.barred or not ways):
            ways.append("graph")
        return [way for way in ways if way not in self.barred or self.solves >= self.barred[way].until]

    @property
    def _is_worth_newton(self) -> bool:
        """Whether loops of this kind take long enough to try anything else."""
        loop, worth = self.total("loop"), _WORTH_NEWTON.get(self.device, _WORTH_NEWTON["cpu"])
        return loop >= min(worth, _WORTH_AGAIN.get(self.device, worth)) and max(1, self.solves) * loop >= worth

    def _pays(self, cold: float = 0.0) -> bool:
        """Whether a parallel solve is expected to be faster, which so many seconds come before."""
        if not self._is_worth_newton:
            return False
        newton = self.expected_newton(self.seconds["loop"])
        return newton + self._backward("newton", newton) + cold < _PAYS * self.total("loop")

    @property
    def _cold(self) -> float:
        """Seconds to import what a parallel solve needs: that pays once the loops of a kind have taken as long."""
        return 0.0 if _RULES in sys.modules else max(0.0, _COLD - self.solves * self.total("loop"))

    def bar(self, way: Way, why: str, *, for_good: bool = False) -> None:
        """Leave a way alone that did not work; how long it took says nothing of what it takes where it does."""
        wait = sys.maxsize if for_good else 2 * self.barred[way].wait if way in self.barred else _PATIENCE
        self.barred[way] = Bar(why, wait, min(self.solves + wait, sys.maxsize))
        self.seconds.pop(way, None)

    def learn(self, before: Record) -> None:
        """Of a kind that has just come from a related one, which differs in numbers, rows or a few steps: where a parallel solve does not pay,
        not every new kind is to try one anew. What is hopeless each sees for itself: that takes a step or two, and may lie in other numbers."""
        bar = before.barred.get("newton")
        measured = {"newton", "loop"} <= before.seconds.keys()
        if bar is None and measured and before.total("newton") > before.total("loop"):
            bar = Bar(before.told("newton"), _PATIENCE, before.last["newton"] + _PATIENCE)
        if bar is not None and bar.until != sys.maxsize:
            wait = min(bar.wait, _HANDED_ON)
            self.barred["newton"] = Bar(bar.why, wait, min(wait, max(0, bar.until - before.solves)))

    def expected_newton(self, loop: float, iterations: int = _EXPECTED) -> float:
        """Roughly the seconds of a parallel solve without kernels, if it converges, where the loop takes so many; forward."""
        in_loop, at_once, each_number = _OPERATION.get(self.device, _OPERATION["cpu"])
        length, rows, width = self.sizes
        numbers = length * rows * width * (1 + width) / 16
        evaluations = min(_EVALUATIONS, length**0.5)  # chunks of short loops are shorter
        return loop * iterations * evaluations * (at_once + numbers * each_number) / (length * in_loop)

    def most_iterations(self, most: int) -> int:
        """Of a parallel solve that nobody asked for: as many as take as long as the loop, if no more than ``most``. What has not converged
        by then is left to the loop, so that a trial that was in vain takes about two loops and not ten.

        By sizes alone: what comes out does not depend on how busy a machine is.
        """
        one = _ITERATION * self.expected_newton(1.0, 1)
        one, loop = one + self._backward("newton", one), 1.0 + self._backward("loop", 1.0)
        return most if one * most <= loop else max(1, int(loop / one))

    def is_worth_kernels(self, again: bool) -> bool:
        """Whether to make kernels for a kind that has come ``again``, or for the first time."""
        if self.only_loop is not None:
            return False
        return "loop" in self.seconds and self.total("loop") >= (_WORTH_KERNELS if again else _WORTH_KERNELS_AT_ONCE)

    def took(self, way: Way, seconds: float) -> None:
        # What was measured is better than any estimate.
        if way in self.estimated or seconds <= self.seconds.get(way, seconds):
            self.seconds[way] = seconds
            self.estimated.discard(way)
        self.tries[way] = self.tries.get(way, 0) + 1
        self.solves += 1
        self.last[way] = self.solves

    def timed(self, way: Way, function: Callable[[], _T]) -> _T:
        """Take a way, and note how long it took."""
        begin = time.perf_counter()
        found = function()
        self.took(way, time.perf_counter() - begin)
        return found


class Probe:
    """Watches a loop: after some steps, whether it is too long to go on with.

    Args:
        is_too_long: by how many seconds all of it takes
    """

    def __init__(self, record: Record, length: int, device: torch.device, is_too_long: Callable[[float], bool]):
        self._record, self._length, self._device, self._is_too_long = record, length, device, is_too_long
        self._begin, self._least = 0.0, float("inf")

    def gives_up(self, index: int) -> bool:
        """After step ``index``."""
        last = index == PROBED - 1
        if index < _WARM - 1 or index >= PROBED:
            return False
        if index == _WARM - 1:
            self._begin = now(self._device)
        elif self._device.type == "cpu" or last:  # a GPU does many at a time
            before, self._begin = self._begin, now(self._device)
            steps = 1 if self._device.type == "cpu" else PROBED - _WARM
            self._least = min(self._least, (self._begin - before) / steps)
        if not last or self._length <= 2 * PROBED:
            return False
        expected = self._least * self._length
        self._record.seconds["loop"] = expected
        self._record.estimated.add("loop")
        return self._is_too_long(expected)


def now(device: torch.device) -> float:
    """The time, in seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


_records = Bounded(_MOST_KINDS)
#: Of related kinds the one that came last.
_latest = Bounded(_MOST_KINDS)


def record_of(
    key: Hashable,
    sizes: tuple[int, int, int],
    device: torch.device,
    differentiated: bool,
    relation: Callable[[], Hashable] | None = None,
) -> Record:
    """What is known of a kind: of solves of so many steps that differ in numbers only, with gradients or without.

    Args:
        sizes: L, B and D
        relation: what related kinds have in common; where that is given, a new kind begins with what the last of them, of about as many
            steps, knows of ways that do not pay
    """
    kind = (key, sizes[0], differentiated)
    found = _records.get(kind)
    if found is None:
        found = Record(device.type, sizes, differentiated)
        if relation is not None:
            related = (relation(), round(math.log2(sizes[0])), device, differentiated)
            if (before := _latest.get(related)) is not None:
                found.learn(before)
            _latest.put(related, found)
        _records.put(kind, found)
    return found


def forget_records() -> None:
    """Let go of what solves took."""
    _records.clear()
    _latest.clear()


def written(seconds: float) -> str:
    """In seconds, milliseconds or microseconds."""
    for size, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:,.0f} {unit}" if seconds >= 100 * size else f"{seconds / size:.2g} {unit}"
    return f"{1e6 * seconds:.3g} us"
