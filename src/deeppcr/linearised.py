"""All steps at the states of a solution, with a graph: their derivatives, and whether those are the loop's.

Shapes: L steps, B rows, D the packed state. With ``z_l = f_l(z_{l-1})`` and gradients ``g_l`` of the states, the adjoint is
``a_l = J_{l+1}^T a_{l+1} + g_l``, from the last step to the first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .jacobian import Jacobian
from .sequence import Sequence
from .sequence.evaluate import StepError
from .sequence.trace import coarser_products

#: Units of rounding that two ways to compute the same may differ by.
_UNITS = 16
#: So often every state is moved by as much, to see what products make of it.
_PROBES = 3


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
        return _pulled(self.values, self.inner, adjoint, retain_graph=True)

    def _by(self, jacobian: Jacobian, adjoint: Tensor) -> Tensor:
        """``pull(adjoint)`` by Jacobians, of as many steps at a time as fit in memory."""
        products, at_once = [], jacobian.steps_at_once(self.sequence)
        for start in range(0, len(adjoint), at_once):
            part = slice(start, min(start + at_once, len(adjoint)))
            steps = range(part.start, part.stop)
            _, blocks = jacobian.evaluate(self.sequence, self.previous.detach()[part], steps)
            products.append(type(blocks)(blocks.data.detach()).transpose().apply(adjoint[part]))
        return torch.cat(products)[1:]

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
        return _pulled(value, start, adjoint)

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
        eps = torch.finfo(
            coarser_products(lambda: self.sequence.step(0, first), self.arithmetic) or self.arithmetic
        ).eps
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
            rounding = rounding + math.sqrt(
                eps
            )  # forward mode may lose half of the digits where reverse mode loses none
        where = wrong(by_jacobians, rounding)
        if where.any() and (jacobians_count or not self._is_right_alone(where, adjoint, rounding)):
            raise _refusal(where, _JACOBIAN)

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


def _refusal(where: Tensor, cause: str) -> RuntimeError:
    """Of an adjoint that is wrong at some places [.., B]: the last of them is where it begins."""
    index, row = (int(i) for i in where.nonzero()[-1])
    return RuntimeError(
        f"the adjoint does not hold at step {index + 1} (row {row}): {cause}; deeppcr.check looks for all but a change, given the step "
        "and what solve was given"
    )


def _pulled(values: Tensor, at: Tensor, adjoint: Tensor, *, retain_graph: bool = False) -> Tensor:
    try:
        (pulled,) = torch.autograd.grad(
            values, at, adjoint, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
        )
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        raise StepError(
            f"step: one of its operations has no derivative ({error}). PyTorch's attention takes such a shortcut in eval mode: "
            "torch.backends.mha.set_fastpath_enabled(False) turns it off"
        ) from error
    return pulled
