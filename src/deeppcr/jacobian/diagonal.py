"""Jacobians by their diagonals: of steps without mixing exact, of others estimated.

Shapes: N steps or chunks at a time, B rows, D the packed state, K tangents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..linear import BlockDiagonal, Blocks, Diagonal
from ..sequence import Sequence
from ..sequence.evaluate import StepError
from ..sequence.layout import Layout
from .base import Jacobian
from .dense import DenseJacobian


@dataclass(frozen=True, kw_only=True)
class DiagonalJacobian(Jacobian):
    """The exact diagonal, for steps that treat every element of the state by itself.

    One Jacobian-vector product gives it; of complex elements, each of which has a derivative of 2 x 2 real numbers, two do. Another, along random signs, is compared at the first iteration of a
    solve: where the step is not elementwise, an error says so (a row sum is not a diagonal). There,
    use ``HutchinsonJacobian`` or ``DenseJacobian``.

    >>> import torch, deeppcr
    >>> newton = deeppcr.Newton(jacobian=deeppcr.DiagonalJacobian())
    >>> deeppcr.solve(torch.sin, torch.ones(1000), length=100, solver=newton).result.name
    'CONVERGED'
    """

    exact = repeatable = True

    def evaluate(self, sequence: Sequence, previous: Tensor, steps: range) -> tuple[Tensor, Blocks]:
        layout = sequence.layout
        parts = self._parts(layout)
        if not sequence.verify_once():
            values, pushed = sequence.push(previous, self._tangents(layout), steps)
            return values, self._blocks(pushed, parts)
        values, blocks, wrong = self._compare(sequence, previous, steps, _signs(layout))
        if wrong.any():
            element = int(wrong.any(0).any(0).nonzero()[0]) // parts
            raise StepError(
                "jacobian: DiagonalJacobian was claimed, but the step is not elementwise: element "
                f"{element} of its output depends on other elements of the state. Use HutchinsonJacobian() or DenseJacobian()"
            )
        return values, blocks

    @staticmethod
    def _parts(layout: Layout) -> int:
        """How many real numbers an element of the state is."""
        if len(set(layout.parts)) > 1:
            raise ValueError(
                "jacobian: DiagonalJacobian is for elements that are all real or all complex, and the state has both; use DenseJacobian()"
            )
        return layout.parts[0]

    @classmethod
    def _tangents(cls, layout: Layout) -> Tensor:
        """[1, parts, 1, D] for all rows: along all elements at once, part by part."""
        parts = cls._parts(layout)
        eye = torch.eye(parts, dtype=layout.dtype, device=layout.device).repeat(1, layout.width // parts)
        return eye[None, :, None].expand(1, parts, layout.rows, layout.width)

    @staticmethod
    def _blocks(pushed: Tensor, parts: int) -> Blocks:
        """Of products [N, parts, B, D] with these tangents."""
        if parts == 1:
            return Diagonal(pushed[:, 0])
        return BlockDiagonal(pushed.unflatten(-1, (-1, parts)).permute(0, 2, 3, 4, 1).contiguous())

    def verifier(self, sequence: Sequence) -> Callable[[Tensor, range], Tensor]:
        sequence.verify_once()
        signs = _signs(sequence.layout)
        return lambda previous, steps: self._compare(sequence, previous, steps, signs)[2]

    def contradiction(self, sequence: Sequence, index: int, state: Tensor, true: Tensor, rounding: float) -> str | None:
        element = torch.arange(true.shape[-1], device=true.device) // self._parts(sequence.layout)
        off = true.abs().where(element != element.unsqueeze(-1), 0)
        if off.max() <= rounding * (1 + true.abs().max()):
            return None
        _, _, row, column = (int(i) for i in (off == off.max()).nonzero()[0])
        return (
            f"DiagonalJacobian is claimed, but at step {index + 1} element {row} of the result depends on element {column} of the "
            f"state (derivative {float(off.max()):.2g}). Use HutchinsonJacobian() or DenseJacobian()"
        )

    @classmethod
    def _compare(
        cls, sequence: Sequence, previous: Tensor, steps: range, signs: Tensor
    ) -> tuple[Tensor, Blocks, Tensor]:
        """Values, blocks, and which elements of the product with ``signs`` [1, 1, B, D] are not theirs, [N, B, D]."""
        parts = cls._parts(sequence.layout)
        values, pushed = sequence.push(previous, torch.cat([cls._tangents(sequence.layout), signs], 1), steps)
        blocks, mixed = cls._blocks(pushed[:, :-1], parts), pushed[:, -1]
        allowed = 100 * torch.finfo(mixed.dtype).eps * (1 + pushed[:, :-1].abs().sum(1))
        return values, blocks, (mixed - blocks.apply(signs[:, 0])).abs() > allowed


@dataclass(frozen=True, kw_only=True)
class HutchinsonJacobian(Jacobian):
    """An unbiased estimate of the diagonal: the mean of ``v * (J v)`` over random signs v.

    An approximate Jacobian: the iteration converges linearly, and only where the diagonal dominates.

    Args:
        samples: random vectors a step
        seed: of the random signs; the same in every iteration

    >>> import torch, deeppcr
    >>> step = lambda z: torch.tanh(0.5 * z + 0.1 * z.roll(1, -1))
    >>> newton = deeppcr.Newton(jacobian=deeppcr.HutchinsonJacobian(samples=4))
    >>> deeppcr.solve(step, torch.ones(8), length=100, solver=newton).result.name
    'CONVERGED'
    """

    samples: int = 1
    seed: int = 0
    exact = False

    def __post_init__(self) -> None:
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"samples: expected a whole number from 1, got {self.samples!r}")

    def evaluate(self, sequence: Sequence, previous: Tensor, steps: range) -> tuple[Tensor, Diagonal]:
        signs = _signs(sequence.layout, self.samples, self.seed)
        values, pushed = sequence.push(previous, signs, steps)
        return values, Diagonal((signs * pushed).mean(1))


@dataclass(frozen=True, kw_only=True)
class DiagonalPart(Jacobian):
    """The diagonal of every step's full Jacobian, for ``deeppcr.Newton``; the rest is left out.

    It costs what the full Jacobian costs to form, and its systems what diagonal ones cost to solve.

    Args:
        memory_budget: see ``deeppcr.DenseJacobian``

    >>> import torch, deeppcr
    >>> from deeppcr.diffusion import Noise, Schedule, sample
    >>> mix = torch.eye(4) + 0.1
    >>> noise = Noise.draw((1, 4), steps=30)
    >>> sample(
    ...     lambda z, t: torch.sin(z @ mix),
    ...     Schedule.linear(30),
    ...     noise,
    ...     solver=deeppcr.Newton(),
    ...     jacobian=DiagonalPart(),
    ... ).result.name
    'CONVERGED'
    """

    memory_budget: int | None = None
    exact = False

    def evaluate(self, sequence: Sequence, previous: Tensor, steps: range) -> tuple[Tensor, Diagonal]:
        dense = DenseJacobian(memory_budget=self.memory_budget)
        values, diagonals = [], []
        for part in dense.slices(sequence, len(steps)):
            value, blocks = dense.evaluate(sequence, previous[part], steps[part])
            values.append(value)
            diagonals.append(blocks.data.diagonal(dim1=-2, dim2=-1).clone())
        return torch.cat(values), Diagonal(torch.cat(diagonals))


def _signs(layout: Layout, count: int = 1, seed: int = 0) -> Tensor:
    """[1, count, B, D], random."""
    shape = 1, count, layout.rows, layout.width
    generator = torch.Generator("cpu").manual_seed(seed)  # on the CPU, so that every device sees the same signs
    signs = torch.randint(0, 2, shape, generator=generator, device="cpu").mul_(2).sub_(1)
    return signs.to(layout.device, layout.dtype)
