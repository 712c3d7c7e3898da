"""Gradients of a solution over ranks: the adjoint is found from the last rank to the first, as the states were from the first to the last.

Shapes: L steps on this rank, which may be none; B rows, D the packed state. With gradients ``g_l`` of the states, the adjoint is
``a_l = g_l + u_{l+1}``, where ``u_l = J_l^T a_l`` is what a step, and a rank, hands back to the one before it.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from ..gradient import DENSE_WIDTH, MAX_SWEEPS, Adjoint
from ..jacobian import Jacobian
from ..linear import Blocks, LinearSolver
from ..linear.sharded import Map, entry_of
from ..linear.system import in_full
from ..linearised import Transposed, pulled_to
from ..runtime import check_backward
from .part import Part

#: With true Jacobians one correction is enough, but for digits that products of many of them lost.
_CORRECTIONS = 4


class AdjointOver:
    """What a rank needs for its part of the backward pass.

    Args:
        states: [L, B, D], of this rank
        entry: [B, D], what it starts from

    Attributes:
        values: [L, B, D], what the steps give, with a graph; of a rank without steps nothing, to be differentiated all the same
    """

    entry: Tensor
    values: Tensor

    def __init__(self, part: Part, states: Tensor, entry: Tensor, jacobian: Jacobian, linear: LinearSolver):
        self.part: Part = part
        self.jacobian: Jacobian = jacobian
        self.linear: LinearSolver = linear
        self.local: Adjoint | None = None
        if part.sequence is None:
            # Whoever asks for gradients on a rank without steps has to come by here as on the others, which wait for it.
            self.values = part.empty().requires_grad_() + sum(leaf.sum().real.to(states) for leaf in part.inputs)
        else:
            self.values = part.empty()
            with part.trouble.kept():
                sequence = copy.copy(part.sequence)
                sequence.initial = part.initial if part.is_first else entry.detach().requires_grad_()
                self.entry = sequence.initial
                self.local = Adjoint(sequence, states, jacobian, linear)
                self.values = self.local.values
        self.true: bool = jacobian.exact or part.layout.width <= DENSE_WIDTH
        self.matters: Tensor | None = None  # of the last sweep: see Adjoint.warn_of_lost_digits

    def promise(self, rtol: float) -> None:
        """The states are said to be within this relative tolerance."""
        if self.local is not None:
            self.local.promised = rtol

    def attach(self, states: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """The states of this rank, and the last of all, differentiable."""
        return _Attach.apply(self.values, self.part.initial, states, final, self)  # type: ignore[return-value]

    def solve(self, gradients: Tensor, of_final: Tensor) -> Tensor:
        """The adjoint [L, B, D] of the gradients of this rank's states, and of what this rank says of the last of all, [B, D]."""
        part = self.part
        broken = (~torch.isfinite(gradients)).any(-1).any(0) if len(gradients) else torch.zeros_like(of_final[:, 0])
        broken = (broken > 0) | ~torch.isfinite(of_final).all(-1)
        told = part.ranks.total(torch.cat([of_final, broken.unsqueeze(-1)], -1).double())
        finite = (told[:, -1:] == 0) & torch.isfinite(told[:, :-1]).all(-1, keepdim=True)
        if part.ranks.rank == part.last:
            gradients = torch.cat([gradients[:-1], gradients[-1:] + told[:, :-1].to(gradients.dtype)])
        device, dtype, enabled = self.local.autocast if self.local else (gradients.device.type, None, False)
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            good = gradients.where(finite, 0)
            adjoint, held = self._by_sweeps(good) if finite.any() else (good, True)
            if not held:
                adjoint = self._checked(self._walk(good), good)
            elif self.local is not None and self.matters is not None:
                self.local.warn_of_lost_digits(adjoint, self.matters, part.offset)
            return adjoint if finite.all() else adjoint.where(finite, self._walk(gradients))

    # All steps at once.

    def _by_sweeps(self, gradients: Tensor) -> tuple[Tensor, bool]:
        """By systems of Jacobians, corrected by true vector-Jacobian products until they say the same; and whether they do."""
        part, local = self.part, self.local
        transposed = structure = None
        with part.trouble.kept():
            if local is not None:
                transposed = Transposed(local, local._true_jacobian() if self.true else self.jacobian)
                structure = next(iter(transposed))[1][:0]
        none = part.agree_on(structure)
        adjoint, missing, size_before = torch.zeros_like(gradients), gradients, None
        for sweep in range(1 + _CORRECTIONS if self.true else MAX_SWEEPS):
            change = missing
            with part.trouble.kept():
                change = self._substituted(missing, transposed, none)
            adjoint = adjoint + change
            missing, found = self._defect(adjoint, gradients, change)
            excess, size, scale, self.matters = found
            if self.true and sweep:
                if (excess <= 1).all():
                    return adjoint, True
                if not torch.isfinite(excess).all():
                    break
            if not self.true:
                if not torch.isfinite(size).all():
                    break
                rate = size / size_before if size_before is not None else torch.ones_like(size)
                enough = 10 * torch.finfo(gradients.dtype).eps * scale * (1 - rate).clamp(min=0)
                if ((size <= enough) | (size == 0)).all():
                    return adjoint, True
            size_before = size
        return adjoint, False

    def _substituted(self, missing: Tensor, transposed: Transposed | None, none: Blocks) -> Tensor:
        """What a right-hand side [L, B, D] makes of the adjoint, part by part of the steps that fit in memory together."""
        local, own, error = self.local, Map.of(*in_full(none, missing[:0])), None
        try:
            for part, blocks in reversed(transposed) if transposed is not None else ():
                own = Map.of(*in_full(blocks, blocks.apply(missing[part])), reverse=True).after(own)
        except Exception as raised:  # the other ranks wait for this one's map
            error = raised
        handed = entry_of(self.part.ranks.reversed(), own, torch.zeros_like(own.term))
        if error is not None:
            raise error
        if local is None or transposed is None:
            return missing
        return local._substitute(missing, transposed, handed.unsqueeze(0).to(missing.dtype))

    def _defect(self, adjoint: Tensor, gradients: Tensor, change: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What is missing in ``a_l = J_{l+1}^T a_{l+1} + g_l`` by the steps' own products; of each row, on all ranks: by how much more than
        rounding can explain the last change went, how large it was, how large the adjoint is, and what matters to the loss."""
        part, local = self.part, self.local
        pulled, handed = adjoint[:0], torch.zeros_like(part.initial)
        if local is not None:
            with part.trouble.kept():
                pulled, handed = self._pulled(adjoint)
        excess = size = scale = matters = torch.zeros_like(adjoint[:0].sum((0, 2)))
        if local is not None:
            step = change.abs().amax(-1)
            excess = (step / local.explained(adjoint, gradients)).nan_to_num(math.inf, math.inf).amax(0)
            size, scale = step.nan_to_num(math.inf, math.inf).amax(0), adjoint.abs().amax((0, -1)).nan_to_num(math.inf)
            matters = local.matters(adjoint).nan_to_num(math.inf)
        arriving, found = part.hand_back(handed, excess, size, scale, matters)
        if not len(adjoint):
            return gradients, found
        return gradients - adjoint + torch.cat([pulled, arriving.unsqueeze(0)]), found

    def _pulled(self, adjoint: Tensor) -> tuple[Tensor, Tensor]:
        """``J_l^T a_l`` of all steps but the first, [L - 1, B, D], and of that, [B, D], which the rank before is told."""
        local = self.local
        assert local is not None
        if self.part.is_first:
            return local.pull(adjoint), torch.zeros_like(self.part.initial)
        pulled, handed = pulled_to(local.values, (local.inner, self.entry), adjoint, retain_graph=True)
        return pulled, handed

    # One step after the other.

    def _walk(self, gradients: Tensor) -> Tensor:
        """The adjoint as the loop finds it, from the last step of the last rank to the first of the first."""
        part, local, found = self.part, self.local, gradients

        def work(told: Tensor) -> Tensor:
            nonlocal found
            handed, failed = told[:, :-1].to(gradients.dtype), told[:, -1:]
            if local is not None and not failed.any():
                with part.trouble.kept():
                    found = local.walk(torch.cat([gradients[:-1], gradients[-1:] + handed]))
                    handed = local._pull_one(0, found[0])
            failed = failed + (part.trouble.error is not None)
            return torch.cat([handed.to(told.dtype), failed], -1)

        start = torch.zeros(*part.initial.shape[:1], part.initial.shape[1] + 1, device=gradients.device)
        part.ranks.reversed().relay(start.double(), work)
        part.ranks.agree(part.trouble.take())
        return found

    def _checked(self, adjoint: Tensor, gradients: Tensor) -> Tensor:
        """The same adjoint; raises on all ranks where a step is the reason that it had to be found one step after the other."""
        part, local = self.part, self.local
        if local is not None:
            with part.trouble.kept():
                handed = adjoint[:-1] - gradients[:-1]
                jacobian = local._true_jacobian() if self.true else None
                local.refuse(adjoint, handed, jacobian, jacobians_count=self.jacobian.given)
        part.ranks.agree(part.trouble.take())
        return adjoint


class _Attach(torch.autograd.Function):
    """The states of this rank and the last of all: one node, which a backward pass reaches if it reaches either."""

    @staticmethod
    def forward(ctx, values, initial, states, final, adjoint):
        ctx.adjoint = adjoint
        return states.clone(), final.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        gradients, of_final = grad_outputs
        check_backward(gradients)
        adjoint = ctx.adjoint.solve(gradients, of_final)
        # Of the initial state the first rank knows by its values; others have nothing to say of it, but say so.
        return adjoint, torch.zeros_like(of_final), None, None, None
