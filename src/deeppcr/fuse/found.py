"""What a run of the kernels came to.

Shapes: L steps in N chunks, B rows of D numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .bound import Notes


@dataclass(eq=False)
class Found:
    """What a run came to.

    Attributes:
        length: L
        states: [L, B, D]; fewer where not all were written
        notes: what the kernels wrote of each lane
        passes: how many there were; 0 where all was one loop
        chunk: steps of a chunk
        left: lanes that had to be taken one step after the other
        floored: lanes of which rounding is all that is left
        unsettled: lanes that no correction has settled: those that are left, and those all of whose chunks came one after the
            other in the end. What is not finite is among them
        others: what is known of states that were not written; None where all were
        suspected: [N, B, D], the largest size of each number in each chunk, where something large may hide what came after it; else None
    """

    length: int
    states: Tensor
    notes: Notes
    passes: int
    chunk: int
    left: int
    floored: int
    unsettled: int
    others: Others | None = None
    suspected: Tensor | None = None

    def without_states(self) -> Found:
        made = object.__new__(Found)  # by ``replace`` it takes as long as a launch
        made.__dict__.update(self.__dict__, states=self.states.new_empty(0))
        return made


@dataclass(frozen=True)
class Others:
    """What is known where the states after every so many steps alone were written.

    Attributes:
        every: so many
        final: [B, D], the last state
        sizes: [N, B, D], the largest size of each number in each chunk
    """

    every: int
    final: Tensor
    sizes: Tensor
