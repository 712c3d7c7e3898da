"""The work-efficient solver: reduce chunks to one equation each, solve for their ends, substitute back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .blocks import Blocks
from .solver import ForwardSubstitution, LinearSolver


@dataclass(frozen=True, kw_only=True)
class Hierarchical(LinearSolver):
    """O(L) block products in about 2 (chunk - 1) log L / log chunk rounds.

    Args:
        chunk: how many steps are merged into one at each level, at least 2

    >>> import torch
    >>> from deeppcr import linear
    >>> halves, ones = linear.Scalar(torch.full((3,), 0.5)), torch.ones(3, 1)
    >>> linear.solve(halves, ones, solver=Hierarchical(chunk=2)).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """

    chunk: int = 4
    repeatable = True
    # Its steps come from states, not from products: random blocks that contract, turn or grow a little miss by 1 over 16,384 steps, where
    # PCR misses by up to 40. (Of a resonance in float32 that misses by 10, the error is 19 times that of forward substitution.)
    roundings: ClassVar[float] = 4.0

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, int) or self.chunk < 2:
            raise ValueError(f"chunk: at least 2 steps are merged at a level, got {self.chunk!r}")

    def solve_coupled(self, couplings: Blocks, rhs: Tensor, *, reverse: bool = False) -> Tensor:
        # Of the L unknowns one is known; the other `steps` are reached in chunks that start from it. Step k of all
        # chunks together is a strided slice, so nothing is padded or copied: a ragged last chunk makes the later
        # slices one shorter. `towards` takes the chunks nearest to the known end.
        steps, chunk = rhs.shape[0] - 1, self.chunk
        chunks = -(-steps // chunk)
        if chunks <= 1:
            return ForwardSubstitution().solve_coupled(couplings, rhs, reverse=reverse)

        if reverse:
            known, terms = rhs[-1:], rhs[:-1]
            slices = [slice((steps - 1 - k) % chunk, None, chunk) for k in range(chunk)]
        else:
            known, terms = rhs[:1], rhs[1:]
            slices = [slice(k, None, chunk) for k in range(chunk)]

        def towards(sliced, count):
            return sliced[len(sliced) - count :] if reverse else sliced[:count]

        # Reduce: nobody waits for the end of the last chunk, so only the full chunks before it are merged.
        product, term = towards(couplings[slices[0]], chunks - 1), towards(terms[slices[0]], chunks - 1)
        for picked in slices[1:]:
            block = towards(couplings[picked], chunks - 1)
            product, term = block.compose(product), block.apply(term) + towards(terms[picked], chunks - 1)
        ends = torch.cat([term, known]) if reverse else torch.cat([known, term])
        starts = self.solve_coupled(product, ends, reverse=reverse)

        # Substitute back, all chunks at once.
        states, current = [], starts
        for picked in slices:
            block = couplings[picked]
            current = block.apply(towards(current, len(block))) + terms[picked]
            states.append(current)

        found = interleave(states, reverse=reverse)
        return torch.cat([found, known] if reverse else [known, found])


def interleave(steps: list[Tensor], *, reverse: bool = False) -> Tensor:
    """Put the steps of all chunks in order: ``steps[k]`` holds step k of every chunk that has one.

    Args:
        steps: [chunks, ...] each; where the last chunk is ragged, the later entries are one shorter
        reverse: steps were counted from the end, so the ragged chunk is the first one
    """
    full = len(steps[-1])
    shape = (full * len(steps), *steps[-1].shape[1:])  # reshape, since flatten fails under is_grads_batched=True
    if reverse:
        ragged = [step[:1] for step in steps[::-1] if len(step) > full]
        whole = [step[len(step) - full :] for step in steps[::-1]]
        return torch.cat([*ragged, torch.stack(whole, 1).reshape(shape)])
    ragged = [step[full:] for step in steps if len(step) > full]
    return torch.cat([torch.stack([step[:full] for step in steps], 1).reshape(shape), *ragged])
