"""What a Jacobian of steps is, exact or approximate: how a Sequence becomes a bidiagonal system.

Shapes: N steps or chunks at a time, B rows, D the packed state, K tangents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..linear import Blocks
from ..sequence import Sequence


class Jacobian:
    """Strategy: Jacobians of the steps. Subclasses give ``evaluate``; collapsing steps into chunks comes with it.

    Attributes:
        exact: whether the blocks are the true Jacobians, so that Newton's iteration converges quadratically
        name: how derivatives are formed, for the plan; "" where the sequence knows
        repeatable: whether a recording of its operations may stand for it, given what ``trace`` and ``settings`` tell
        asks_nothing: whether nothing that it does looks at values, so that a CUDA graph of the caller's may hold it
    """

    exact: bool
    name: str = ""
    # A class says these for itself (``runtime.declares``): a subclass may do anything.
    repeatable = False
    asks_nothing = False
    #: Whether the blocks are what the caller says they are, rather than derivatives of the step.
    given = False

    def evaluate(self, sequence: Sequence, previous: Tensor, steps: range) -> tuple[Tensor, Blocks]:
        """Values [N, B, D] and N blocks, at the states ``previous`` [N, B, D] before ``steps``."""
        raise NotImplementedError

    def blocks_at(self, sequence: Sequence, previous: Tensor, steps: range) -> Blocks | None:
        """The blocks alone, where they do not need the values; None where both come together."""
        return None

    @property
    def settings(self) -> tuple[Any, ...]:
        """What a recording depends on besides what was traced."""
        return ()

    def trace(self, sequence: Sequence) -> None:
        """Add to the trace of a sequence what else the blocks depend on."""

    def for_recording(self, sequence: Sequence) -> Jacobian:
        """The same, less what it would ask the host at every use."""
        return self

    def verifier(self, sequence: Sequence) -> Callable[[Tensor, range], Tensor] | None:
        """A function of the states before steps that flags where a step is not as claimed; from then on the caller verifies."""
        return None

    def contradiction(self, sequence: Sequence, index: int, state: Tensor, true: Tensor, rounding: float) -> str | None:
        """What is wrong with what it claims of a step; None where nothing is.

        Args:
            state: [B, D], before step ``index``
            true: [1, B, D, D], the Jacobian of that step
            rounding: relative
        """
        return None

    def fit_chunk(self, sequence: Sequence, chunk: int) -> int:
        """The chunk, or the next larger one by doubling at which the blocks fit in memory."""
        return chunk

    def steps_at_once(self, sequence: Sequence) -> int:
        """Of how many steps the blocks fit in memory together, for the backward pass."""
        return sequence.length

    def linearise(
        self, sequence: Sequence, starts: Tensor, chunk: int, first: int = 0, ends: Tensor | None = None
    ) -> tuple[Tensor, Blocks]:
        """Roll all chunks out, each from its own start, with the product of their Jacobians.

        Args:
            starts: [chunks, B, D], the states before chunks ``first``, ``first + 1``, ...
            ends: the states after the chunks, where they are known

        Returns:
            the states after the chunks, [chunks, B, D], and one block a chunk. The block of a ragged last chunk is
            that of its own steps.
        """
        if chunk == 1 and ends is not None:
            blocks = self.blocks_at(sequence, starts, range(first, sequence.length))
            if blocks is not None:
                return ends, blocks
        current, product, ended = starts, None, []
        for steps in sequence.chunk_steps(chunk, first):
            if product is not None and len(steps) < len(current):
                ended.append((current[len(steps) :], product[len(steps) :]))
                product = product[: len(steps)]
            current, blocks = self.evaluate(sequence, current[: len(steps)], steps)
            product = blocks if product is None else blocks.compose(product)
        assert product is not None
        ends = joined([current, *(state for state, _ in ended)])
        return ends, type(product)(joined([product.data, *(blocks.data for _, blocks in ended)]))


def joined(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """One after the other; a single one as it is, for a copy of all blocks takes as much memory again."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
