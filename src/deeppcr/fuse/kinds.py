"""How solves of a kind are cut into chunks, by what is known of earlier ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ..launch import next_power_of_2
from . import tiled
from .program import Program
from .tile_program import TileProgram

#: Passes that chunks of a size are given at least.
FEWEST_PASSES = 4
#: So many times chunks are rolled out from the ends of those before them, where corrections from the guess lead astray.
_ROLLS = (2, 4, 8)
#: By so much chunks grow where the passes did not suffice.
_GROWTH = 4
#: Where only the loop sufficed, chunks are tried again after so many solves, then after twice as many: a step's parameters change.
_PATIENCE = 8
#: Passes that a solve takes as a rule: of elementwise steps, and of narrow ones. To be launched and joined takes each as long as so many steps.
_USUAL_PASSES, _JOIN = {True: 2, False: 4}, 16
#: The same of steps on tiles, of which so many tangents take as long as the step.
_PASSES_ON_TILES, _TANGENTS = 2, 32
#: So many lanes keep the device busy.
_BUSY = 2**18


class Stage(NamedTuple):
    """Passes of chunks that are too small to settle every lane, and come close: larger chunks go on from their states."""

    chunk: int
    rolls: int
    passes: int


@dataclass
class Kind:
    """What is known of solves that differ in nothing but numbers.

    Attributes:
        chunk: steps of a chunk that sufficed the last time, or are to be tried next; the whole length where only the loop did
        before: what chunks start from, if not from the guess
        rolls: how often chunks are rolled out before they are corrected
        passes: that sufficed the last time
        first: steps of a chunk at first
        gave_up: only the loop sufficed
        looped, patience: solves since then, and after how many of them chunks are tried again
        joined: corrections settled all lanes the last time
        looks: something that was large was suspected to hide what came after it the last time
    """

    length: int
    chunk: int
    rolls: int = 0
    passes: int = 3
    first: int = 0
    gave_up: bool = False
    looped: int = 0
    patience: int = _PATIENCE
    joined: bool = False
    before: tuple[Stage, ...] = ()
    looks: bool = False

    def __post_init__(self) -> None:
        self.first = self.first or self.chunk

    def begin(self) -> None:
        """Before a solve: what is to be tried."""
        if self.gave_up and self.looped == self.patience:
            self.chunk, self.rolls, self.before, self.gave_up = self.first, 0, (), False
            self.looped, self.patience = 0, 2 * self.patience
        self.looped += self.gave_up

    def sufficed(self, passes: int) -> None:
        """After a solve that did not need the loop."""
        self.passes = max(2, passes)
        if not self.gave_up:
            self.patience = _PATIENCE

    def copy(self) -> Kind:
        made = object.__new__(Kind)  # by ``replace`` it takes as long as a launch
        made.__dict__.update(self.__dict__)
        return made

    @property
    def goes_on_from_ends(self) -> bool:
        """Whether a solve of this kind is expected to need no states but those before and after chunks, which are noted in any case."""
        return self.chunk >= self.length or (self.joined and not self.rolls and not self.before)

    def try_harder(self, width: int, before: tuple[Stage, ...] = ()) -> bool:
        """Where the passes did not suffice: what to try next, if it is not to be the loop.

        Args:
            before: what larger chunks may start from
        """
        larger, tried_again = _GROWTH * self.chunk, self.patience > _PATIENCE
        if self.rolls < _ROLLS[-1] and not tried_again:
            self.rolls, self.before = next(each for each in _ROLLS if each > self.rolls), ()
        elif FEWEST_PASSES * larger * (1 + width) <= self.length and not tried_again:
            self.chunk, self.rolls, self.before = larger, 0, before
        else:
            self.chunk, self.before, self.gave_up = self.length, (), True
        self.passes = 3
        return not self.gave_up


def is_shorter_in_one(length: int, chunk: int, program: Program | TileProgram) -> bool:
    """Whether the loop in one kernel is expected to be done before chunks have joined: each pass takes the steps of a chunk with all tangents."""
    if isinstance(program, TileProgram):  # whose tangents are side by side
        return length <= _PASSES_ON_TILES * (chunk * (1 + max(1, program.width / _TANGENTS)) + _JOIN)
    return length <= _USUAL_PASSES[program.elementwise] * (chunk * (1 + program.width) + _JOIN)


def first_chunk(length: int, rows: int, program: Program | TileProgram, local: bool = True) -> int:
    """How many steps a chunk has, before anything is known of how a step converges.

    ``local``: digits of every state are asked for, as gradients need them, or it is a matter of these.

    Of an elementwise step memory is what counts: enough lanes to keep it busy. A narrow one is bound by the time of one step after
    the other, those inside a chunk and chunks at a join; and large chunks make marginal loops converge.
    """
    if isinstance(program, TileProgram):
        return tiled.first_chunk(length, rows, program, local)
    busy = next_power_of_2(max(1, length * rows // _BUSY))
    least = 64 if program.elementwise else min(256, next_power_of_2(max(1, math.isqrt(length))))
    return min(length, max(least, busy))
