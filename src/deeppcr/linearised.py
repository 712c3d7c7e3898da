"""All steps at the states of a solution, with a graph: their derivatives, and whether those are the loop's.

Shapes: L steps, B rows, D the packed state. With ``z_l = f_l(z_{l-1})`` and gradients ``g_l`` of the states, the adjoint is
``a_l = J_{l+1}^T a_{l+1} + g_l``, from the last step to the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from .jacobian import DenseJacobian, Jacobian
from .linear import Blocks
from .runtime import values_can_be_read
from .sequence import Sequence
from .sequence.evaluate import StepError
from .sequence.rows import rounding_of
from .sequence.trace import coarser_products
from .tolerance import Tolerance

#: Units of rounding that two ways to compute the same may differ by.
_UNITS = 16
#: So often every state is moved by as much, to see what products make of it.
_PROBES = 3
#: A state that is off what its step gives by more than this part of it may be wrong in its signs.
_LOST = 1e-4
#: And by more than this many units of rounding, there is more in it than rounding.
_LEFT = 4
#: What a step may raise that checks its numbers, where it is given some that it never sees in the loop.
_REFUSALS = (ValueError, ArithmeticError, LookupError, AssertionError)
#: Derivatives that differ by more than this part of them are not the same.
_OTHER = 0.01


class GradientOverflow(RuntimeError):
    """The gradient of the states is finite, and that of what they are made of is not."""


class Linearised:
    """All steps evaluated once, with a graph, each at the state before it.

    Attributes:
        states: [L, B, D], as given
        previous: [L, B, D], the states that steps start from
        inner: [L - 1, B, D], those of them that other steps end in
        values: [L, B, D], what the steps give
    """

    autocast: tuple[str, torch.dtype, bool]

    def __init__(self, sequence: Sequence, states: Tensor):
        self.sequence = sequence
        device = sequence.layout.device.type
        # The backward pass evaluates the step again: in the precision of the forward pass, wherever it is called from.
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self.states: Tensor = states.detach()
        self.inner: Tensor = self.states[:-1].requires_grad_()
        self.previous: Tensor = torch.cat([sequence.initial.unsqueeze(0), self.inner])
        self.values: Tensor = sequence.values(self.previous, range(sequence.length))

    @property
    def arithmetic(self) -> torch.dtype:
        """The precision in which the step computes, as far as it can be told without looking into it."""
        _, low, enabled = self.autocast
        return low if enabled else self.values.dtype

    def pull(self, adjoint: Tensor) -> Tensor:
        """``J_{l+1}^T a_{l+1}`` for l = 1 .. L - 1, by the true vector-Jacobian product: [L, B, D] to [L - 1, B, D]."""
        return pulled_to(self.values, (self.inner,), adjoint, retain_graph=True)[0]

    def _by(self, jacobian: Jacobian, adjoint: Tensor) -> Tensor:
        """``pull(adjoint)`` by Jacobians."""

        def product(part: slice, blocks: Blocks) -> Tensor:
            return blocks.apply(adjoint[part]).detach()

        # In a loop, the blocks of one part would be held until those of the next are there.
        return torch.cat([*starmap(product, Transposed(self, jacobian))])[1:]

    def walk(self, gradients: Tensor) -> Tensor:
        """The adjoint as the loop finds it, from the last step to the first, unchecked."""
        found = [gradients[-1]]
        for index in range(len(gradients) - 1, 0, -1):
            found.append(gradients[index - 1] + self._pull_one(index, found[-1]))
        return torch.stack(found[::-1])

    def _pull_one(self, index: int, adjoint: Tensor) -> Tensor:
        """[B, D] to [B, D], by one step as the loop takes it."""
        with torch.enable_grad():
            start = self.previous[index].detach().requires_grad_()
            value = self.sequence.step(index, start)
        if not value.requires_grad:  # all of it runs under torch.no_grad()
            return torch.zeros_like(start)
        return pulled_to(value, (start,), adjoint)[0]

    @torch.no_grad()
    def check(self) -> None:
        """Before any backward pass: raise where the Jacobians of all steps, by forward mode, are not what autograd goes by.

        One product with each tells; only where they differ are there as many as it takes to see why.
        """
        adjoint, steps = self.probe(), range(len(self.values))
        if len(steps) == 1:
            return
        tangents = adjoint.flip(0) * self._sizes() ** 2  # in the units of states
        _, pushed = self.sequence.push(self.previous.detach(), tangents.unsqueeze(1), steps)
        forward, reverse = adjoint[1:] * pushed[1:, 0], self.pull(adjoint) * tangents[1:]
        terms = forward.abs().sum(-1) + reverse.abs().sum(-1)
        if not ((forward.sum(-1) - reverse.sum(-1)).abs() <= 10 * rounding_of(self.sequence.layout) * terms).all():
            self.refuse(adjoint, None, DenseJacobian(), jacobians_count=True)

    def refuse(
        self, adjoint: Tensor, walked: Tensor | None, jacobian: Jacobian | None, *, jacobians_count: bool
    ) -> None:
        """Raise where products of the steps with an adjoint are not the same whichever way they are made, with the cause.

        They may differ by what they round. That shows when every state is moved by a few units of it: a derivative that is zero, but
        for rounding, agrees with itself in no digit.

        Args:
            adjoint: [L, B, D]
            walked: [L - 1, B, D], like ``pull(adjoint)``, by one step at a time
            jacobian: by which the same products are made, too
            jacobians_count: those must be right, even where it is PyTorch that has them wrong, and not the step
        """
        if len(adjoint) == 1:
            return
        finite = torch.isfinite(self.values.detach()).all(-1).all(0)  # rows; in others, the loop finds what it finds
        self._refuse_not_finite(adjoint, finite)
        first, sizes = self.sequence.initial.detach(), self._sizes()
        coarser = coarser_products(lambda: self.sequence.step(0, first), self.arithmetic)
        eps = torch.finfo(coarser or self.arithmetic).eps
        by_jacobians = self._by(jacobian, adjoint) if jacobian is not None else None
        pulled, after = self.pull(adjoint), (adjoint[1:].abs() * sizes).amax(-1)
        terms = after + (adjoint[:-1].abs() * sizes).amax(-1) + (pulled.abs() * sizes).amax(-1)  # [L - 1, B]
        info = torch.finfo(adjoint.dtype)
        numbers = (after > info.tiny / info.eps) & finite  # smaller ones have not all their digits

        def wrong(found: Tensor | None, rounding: Tensor | float) -> Tensor:
            off = (found - pulled).abs() if found is not None else torch.zeros_like(pulled)
            return ~((off * sizes).amax(-1) <= rounding * terms) & numbers

        few = _UNITS * eps
        suspect = wrong(walked, few) | wrong(by_jacobians, few)
        if not suspect.any():
            return
        off = (self._moved(torch.zeros_like(self.inner)).values - self.values).detach().abs()
        changed = ~(off <= few * sizes).all(-1) & finite
        if changed.any():
            raise _refusal(changed, _CHANGED)
        if self._mixes_rows(adjoint, few):
            raise _refusal(suspect, _ROWS)
        signs, noise = torch.Generator().manual_seed(0), torch.zeros_like(pulled)
        for _ in range(_PROBES):
            sign = torch.randint(0, 2, self.inner.shape, generator=signs).to(self.inner) * 2 - 1
            moved = self._moved(few * sign * self.inner.detach())
            noise = torch.maximum(noise, (moved.pull(adjoint) - pulled).abs())
            if jacobian is not None and by_jacobians is not None:  # forward mode rounds otherwise
                noise = torch.maximum(noise, (moved._by(jacobian, adjoint) - by_jacobians).abs())
        seen = torch.where(numbers, (noise * sizes).amax(-1) / terms, 0).nan_to_num(0).amax(0)  # [B]
        rounding = few + 2 * seen  # a few samples do not show the largest
        where = wrong(walked, rounding)
        if where.any():
            raise _refusal(where, _AT_ONCE)
        if jacobian is None or not jacobian.given:
            # Forward mode may lose half of the digits where reverse mode loses none.
            rounding = rounding + math.sqrt(eps)
        where = wrong(by_jacobians, rounding)
        if by_jacobians is not None and not torch.isfinite(by_jacobians[where]).all():
            raise _refusal(where & ~torch.isfinite(by_jacobians).all(-1), _NOT_FINITE)
        if where.any() and (jacobians_count or not self._is_right_alone(where, adjoint, rounding)):
            raise _refusal(where, _JACOBIAN)

    def determined(self, states: Tensor, tolerance: Tolerance, trusted: Tensor) -> Tensor:
        """How many leading states, [B], the derivatives of the loop can be taken at: mostly all L.

        A tolerance vouches for no digit of a state that is smaller than it, nor for a sign. Where the step has a kink, as a
        ReLU has, its derivative there may be another one than the loop's, and no residual shows it. So from where a state is
        not to four digits what its step gives, the small states are moved by what is unknown of them, to either side: the
        derivatives of a smooth step do not notice.

        Args:
            states: [L, B, D]
            tolerance: of a state
            trusted: [B], rows that claim to be right
        """
        length, rows = states.shape[:2]
        whole = torch.full((rows,), length, device=states.device)
        if not values_can_be_read(states):
            return whole
        allowed = tolerance.allowed(states, self.sequence.initial.detach())
        unit = self.values.detach().abs().amax(0)
        lost = self.lost(states, unit) & trusted
        if not lost.any():
            return whole
        other = self.kinked(states, unit, allowed, lost.cummax(0).values, tolerance.rtol)
        return torch.where(other, self.rounded(states, unit), whole)

    def _off(self, states: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
        """[L, B, leaves]: how large values are, and how far off states, in units [B, D] of the largest that each component is."""
        layout, values = self.sequence.layout, self.values.detach()
        unit = unit.clamp(min=torch.finfo(states.dtype).tiny)
        return layout.norms(values / unit), layout.norms((values - states) / unit)

    @property
    def _eps(self) -> float:
        return torch.finfo(self.arithmetic).eps

    @property
    def _digits(self) -> float:
        return max(_LOST, 100 * self._eps)  # of half precision there are not that many

    def lost(self, states: Tensor, unit: Tensor) -> Tensor:
        """[L, B]: which states are not to four digits what their steps give."""
        sizes, off = self._off(states, unit)
        return (off > self._digits * sizes).any(-1)

    def rounded(self, states: Tensor, unit: Tensor) -> Tensor:
        """How many leading states, [B], are off by rounding alone. From there the loop is to go on: what is off in the last digits may
        have grown since."""
        sizes, off = self._off(states, unit)
        fine = (off <= _LEFT * self._eps * sizes).all(-1)
        return torch.where(fine.all(0), len(fine), fine.long().argmin(0))

    def kinked(self, states: Tensor, unit: Tensor, allowed: Tensor, lost: Tensor, rtol: float) -> Tensor:
        """[B]: whether derivatives of steps depend on what is not known of their states.

        Args:
            unit: [B, D], the largest that each component is
            allowed: [L, B, D], how far states may be off
            lost: [L, B], from where on states are not to four digits what their steps give
        """
        layout, none = self.sequence.layout, torch.zeros(states.shape[1], dtype=torch.bool, device=states.device)
        sizes, _ = self._off(states, unit)
        tolerated = layout.norms(allowed / unit.clamp(min=torch.finfo(states.dtype).tiny))
        suspect = lost.unsqueeze(-1) & (self._digits * sizes <= tolerated)
        unknown = allowed * layout.spread(suspect)
        generator = torch.Generator().manual_seed(0)
        like: dict[str, Any] = {"generator": generator, "dtype": states.dtype}
        probe, one, two = (torch.randn(states.shape, **like).to(states.device) for _ in range(3))
        found = []
        for side in (one, -one.sign() * two.abs()):
            try:
                with torch.enable_grad():
                    moved = Linearised(self.sequence, states + unknown * side)
            except _REFUSALS:
                return none
            found.append(moved.pull(probe))  # [L - 1, B, D]
        here, there = found
        largest = torch.maximum(here.abs().amax(-1), there.abs().amax(-1))
        same = max(_OTHER, 10 * self._eps, 10 * rtol)  # a large move shows in smooth derivatives, too
        other = (here - there).abs().amax(-1) > same * largest  # what is no number there is not compared
        return (suspect.any(-1)[:-1] & other).any(0)

    def probe(self) -> Tensor:
        """[L, B, D]: an adjoint of no meaning, to look at products with."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.values.shape, generator=generator).to(self.inner) / self._sizes()

    def _sizes(self) -> Tensor:
        """[B, D]: gradients times these are the same in any units."""
        sizes = self.previous.detach().abs().amax(0).nan_to_num(0, posinf=0)
        sizes = torch.where(sizes > 0, sizes, sizes.amax(-1, keepdim=True))
        return torch.where(sizes > 0, sizes, 1.0)

    def _moved(self, by: Tensor) -> Linearised:
        with torch.enable_grad():
            states = torch.cat([self.inner.detach() + by, self.values.detach()[-1:]])
            return Linearised(self.sequence, states)

    def _mixes_rows(self, adjoint: Tensor, rounding: float) -> bool:
        """Whether the gradient of some rows reaches others. Any two rows differ in a bit of their numbers."""
        rows = torch.arange(adjoint.shape[1], device=adjoint.device)
        for bit in range((adjoint.shape[1] - 1).bit_length()):
            for half in (0, 1):
                some = (rows >> bit) & 1 == half
                pulled = self.pull(adjoint * some.unsqueeze(-1)).abs().amax(-1)  # [L - 1, B]
                if (pulled[:, ~some].amax(-1) > rounding * pulled[:, some].amax(-1)).any():
                    return True
        return False

    def _is_right_alone(self, where: Tensor, adjoint: Tensor, rounding: Tensor) -> bool:
        """Whether the last step ``where`` [L - 1, B], by itself, has one derivative, forward and reverse.

        PyTorch has it wrong for some operations where several steps are evaluated at once, such as torch.linalg.solve.
        """
        index = int(where.nonzero()[-1][0]) + 1
        tangent, after = self.probe()[index].sign() * self._sizes(), adjoint[index]
        try:
            pushed = self.sequence.push_alone(index, self.previous[index].detach(), tangent)
        except (RuntimeError, NotImplementedError):  # no forward mode: nothing speaks for the step
            return False
        forward, reverse = after * pushed, self._pull_one(index, after) * tangent
        terms = forward.abs().sum(-1) + reverse.abs().sum(-1)
        return bool(((forward.sum(-1) - reverse.sum(-1)).abs() <= rounding * terms)[where[index - 1]].all())

    def _refuse_not_finite(self, adjoint: Tensor, rows: Tensor) -> None:
        bad = ~torch.isfinite(adjoint).all(-1) & rows
        if not bad.any():
            return
        index, row = (int(i) for i in bad.nonzero()[-1])
        if index + 1 == len(adjoint):
            return  # so it came: from the caller, or from the ranks that have later steps
        after = adjoint[index + 1]
        if not torch.isfinite(self._pull_one(index + 1, after / after.abs().amax(-1, keepdim=True))[row]).all():
            raise RuntimeError(
                f"the derivative of step {index + 2} is not finite (row {row}), though its value is: as of a "
                "square root at 0, or of torch.where over a branch that is not taken; the loop's gradient would be NaN"
            )
        raise GradientOverflow(
            "the gradient overflows on its way back through the steps: the sequence amplifies small changes beyond the "
            f"range of {adjoint.dtype}"
        )


class Transposed:
    """The transposed Jacobians of all steps, in parts that fit in memory: their steps, and their blocks. A single part is formed once."""

    def __init__(self, steps: Linearised, jacobian: Jacobian):
        self._steps, self._jacobian = steps, jacobian
        length, at_once = len(steps.values), jacobian.steps_at_once(steps.sequence)
        self._parts = [slice(start, min(start + at_once, length)) for start in range(0, length, at_once)]
        self._kept = self._blocks(self._parts[0]) if len(self._parts) == 1 else None

    def _blocks(self, part: slice) -> Blocks:
        steps, previous = range(part.start, part.stop), self._steps.previous.detach()[part]
        return self._jacobian.evaluate(self._steps.sequence, previous, steps)[1].transpose()

    def __iter__(self) -> Iterator[tuple[slice, Blocks]]:
        return ((part, self._blocks(part) if self._kept is None else self._kept) for part in self._parts)

    def __reversed__(self) -> Iterator[tuple[slice, Blocks]]:
        return ((part, self._blocks(part) if self._kept is None else self._kept) for part in self._parts[::-1])


_CHANGED = (
    "the step gives another result there than in the forward pass. Either it is random or has side effects, or something it closes over "
    "was changed or rebound since the forward pass"
)
_ROWS = "rows of the batch influence each other (is the leading dimension really a batch? see batch_dims)"
_AT_ONCE = (
    "the step has another derivative where all steps are evaluated at once than one after the other. Either it is random or has side "
    "effects, or something it closes over was changed or rebound since the forward pass"
)
_JACOBIAN = (
    "the step's own vector-Jacobian product disagrees with its Jacobian. Either part of it runs under torch.no_grad(), or a derivative "
    "of its own is wrong, or a given Jacobian is wrong (in a network of deeppcr.nn: its activation is not elementwise)"
)
_NOT_FINITE = (
    "the Jacobian of the step is not finite there, though its vector-Jacobian product is: forward mode multiplies zero by an infinite "
    "derivative, as of torch.sqrt(torch.relu(z)) where relu gives 0, and the loop's backward pass does not. Keep that derivative finite "
    "(torch.sqrt(torch.relu(z) + 1e-12), say), or use solver=deeppcr.Loop()"
)


def _refusal(where: Tensor, cause: str) -> RuntimeError:
    """Of an adjoint that is wrong at some places [.., B]: the last of them is where it begins."""
    index, row = (int(i) for i in where.nonzero()[-1])
    return RuntimeError(
        f"the adjoint does not hold at step {index + 1} (row {row}): {cause}. deeppcr.check(step, z0, xs) finds all of these "
        "but a change since the forward pass"
    )


def pulled_to(
    values: Tensor, at: tuple[Tensor, ...], adjoint: Tensor, *, retain_graph: bool = False
) -> tuple[Tensor, ...]:
    """The products of an adjoint with the derivatives of ``values`` in other tensors."""
    try:
        return torch.autograd.grad(
            values, at, adjoint, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
        )
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        raise StepError(
            f"step: one of its operations has no derivative ({error}). PyTorch's attention takes such a shortcut in eval mode: "
            "torch.backends.mha.set_fastpath_enabled(False) turns it off"
        ) from error
