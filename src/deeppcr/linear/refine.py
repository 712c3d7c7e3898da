"""What products of blocks lose is found by the residual, and given back.

A step loses a rounding of its own terms. A product of blocks that are far from normal (a companion matrix of a filter)
can lose all digits: it is large, the solution is small beside it. The residual ``r_l = A_l z_{l-1} + b_l - z_l`` tells: it
takes one product with vectors, where the solution took many with blocks. The system with r on the right has the error as
its solution, up to the same relative loss, so each such correction brings digits until none are missing, or shows that
products are no use here.

Shapes: L steps, ``*batch``, D the width of a state.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..runtime import values_can_be_read
from .blocks import Blocks
from .solver import ForwardSubstitution, LinearSolver

#: Where steps miss by so many roundings and no correction helps, they are taken one after the other: the error is about ten times that of
#: forward substitution. Random blocks that contract, turn or grow a little stay below over 16,384 steps; a turn that is always the same may not.
ROUNDINGS = 40
_MORE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
#: A correction that brings less than a digit will bring no more.
DIGIT = 0.1


def refine(couplings: Blocks, rhs: Tensor, states: Tensor, solver: LinearSolver, reverse: bool) -> Tensor:
    """``states`` as exact as forward substitution has them: by corrections while they help, in float64, else one step after the other.

    Where values cannot be read there is one correction, needed or not.

    Args:
        couplings, rhs, reverse: the system, as for ``LinearSolver.solve_coupled``
        states: [L, *batch, D], its solution by ``solver``
    """
    if not values_can_be_read(states):
        starts, ends, given = _equations(rhs, states, reverse)
        corrected = _corrected(couplings, states, couplings.apply(starts) + given - ends, solver, reverse)
        return torch.where(torch.isfinite(corrected), corrected, states)
    if states.numel() == 0:
        return states
    before = float("inf")
    while True:
        starts, ends, given = _equations(rhs, states, reverse)
        missed = couplings.apply(starts).add_(given).sub_(ends)
        found = _roundings(missed, ends)
        if not found <= solver.roundings:
            # Larger terms that cancel allow more, but to see them takes another look at all blocks.
            terms = type(couplings)(couplings.data.abs()).apply(starts.abs()) + given.abs() + ends.abs()
            unit = terms.amax(0).clamp_min(torch.finfo(terms.dtype).tiny)  # else squares may leave the range of float64
            found = _roundings(missed / unit, terms / unit)
        if found <= solver.roundings:
            return states
        if not found < DIGIT * before and found <= ROUNDINGS:
            return states
        if not found < DIGIT * before:  # nor where something is not finite
            return _otherwise(couplings, rhs, solver, reverse)
        states, before = _corrected(couplings, states, missed, solver, reverse), found


def _otherwise(couplings: Blocks, rhs: Tensor, solver: LinearSolver, reverse: bool) -> Tensor:
    """Where the solver's products are no use: in twice as many digits, and where those are not enough, one step after the other."""
    if rhs.dtype in _MORE:
        more = _MORE[rhs.dtype]
        full, terms = type(couplings)(couplings.data.to(more)), rhs.to(more)
        states = solver.solve_coupled(full, terms, reverse=reverse)
        # What leaves the range stays outside of it, as in the loop, and more digits are no use.
        if torch.isfinite(states.to(rhs.dtype)).all():
            states = refine(full, terms, states, solver, reverse).to(rhs.dtype)
            if torch.isfinite(states).all():
                return states
    return ForwardSubstitution().solve_coupled(couplings, rhs, reverse=reverse)


def _equations(rhs: Tensor, states: Tensor, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[L - 1, *batch, D] each: the states that steps start from, those where they end, and what is added on the way."""
    return (states[1:], states[:-1], rhs[:-1]) if reverse else (states[:-1], states[1:], rhs[1:])


def _roundings(missed: Tensor, terms: Tensor) -> float:
    """How many roundings of their terms all steps together miss, in the worst component of the worst row.

    Together, by squares, as roundings add up: steps from which a state comes out small by chance, beside larger ones that
    its error comes from, are no reason to worry.
    """
    if missed.is_complex():
        missed, terms = missed.abs(), terms.abs()
    # In PyTorch, norms along the first dimension take twice as long as this.
    missed, size = missed.double(), terms.double()
    squares = torch.linalg.vecdot(missed, missed, dim=0)
    squares /= torch.linalg.vecdot(size, size, dim=0).clamp_min_(torch.finfo(size.dtype).tiny)
    return math.sqrt(squares.max().item()) / torch.finfo(terms.dtype).eps


def _corrected(couplings: Blocks, states: Tensor, missed: Tensor, solver: LinearSolver, reverse: bool) -> Tensor:
    nothing = torch.zeros_like(states[:1])  # is missed where the state is known
    missed = torch.cat([missed, nothing] if reverse else [nothing, missed])
    return states + solver.solve_coupled(couplings, missed, reverse=reverse)
