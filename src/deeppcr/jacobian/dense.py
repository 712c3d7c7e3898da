"""Jacobians as they are: a matrix a step, by forward mode.

Shapes: N steps or chunks at a time, B rows, D the packed state, K tangents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..linear import Dense
from ..runtime import is_capturing
from ..sequence import Sequence
from .base import Jacobian, joined

#: A Jacobian by forward mode holds about this many tensors of its own size while it is formed (primal and tangent
#: of the largest intermediates).
_WORKSPACE = 6


@dataclass(frozen=True, kw_only=True)
class DenseJacobian(Jacobian):
    """The full Jacobian of every step, by automatic differentiation: the paper's method.

    Args:
        memory_budget: bytes that forming the blocks may take at a time, beyond the blocks themselves; more is done
            in slices. Default: a quarter of the free memory of a GPU (while a CUDA graph is captured: an eighth of
            all of it), 1 GiB on a CPU

    >>> import torch, deeppcr
    >>> newton = deeppcr.Newton(jacobian=deeppcr.DenseJacobian(memory_budget=2**20))
    >>> deeppcr.solve(torch.tanh, torch.ones(4), length=100, solver=newton).result.name
    'CONVERGED'
    """

    memory_budget: int | None = None
    exact = repeatable = asks_nothing = True

    def __post_init__(self) -> None:
        if self.memory_budget is not None and (not isinstance(self.memory_budget, int) or self.memory_budget < 1):
            raise ValueError(f"memory_budget: expected a number of bytes, got {self.memory_budget!r}")

    def evaluate(self, sequence: Sequence, previous: Tensor, steps: range) -> tuple[Tensor, Dense]:
        parts = [
            sequence.push(previous[part], _identity(sequence), steps[part])
            for part in self.slices(sequence, len(steps))
        ]
        values, pushed = zip(*parts, strict=True)
        return joined(values), Dense(joined([_as_blocks(each) for each in pushed]))

    def linearise(
        self, sequence: Sequence, starts: Tensor, chunk: int, first: int = 0, ends: Tensor | None = None
    ) -> tuple[Tensor, Dense]:
        # The columns of the product are pushed through the steps as tangents: no step's own Jacobian is ever
        # formed, and what a step merely passes on (with_history) costs nothing.
        if chunk == 1:
            return self.evaluate(sequence, starts, range(first, sequence.length))
        reached, blocks = [], []
        for part in self.slices(sequence, len(starts)):
            ends, pushed = sequence.push_out(starts[part], _identity(sequence), chunk, first, part)
            reached.append(ends)
            blocks.append(_as_blocks(pushed))
        return joined(reached), Dense(joined(blocks))

    def slices(self, sequence: Sequence, count: int) -> list[slice]:
        """How many of ``count`` steps (or chunks) are done at a time to keep to the memory budget."""
        at_once = max(1, self.budget(sequence) // (_WORKSPACE * block_bytes(sequence)))
        return [slice(start, min(start + at_once, count)) for start in range(0, count, at_once)]

    def budget(self, sequence: Sequence) -> int:
        if self.memory_budget is not None:
            return self.memory_budget
        device = sequence.layout.device
        if device.type != "cuda":
            return 2**30
        if is_capturing(device):  # no time to ask what is free
            return torch.cuda.get_device_properties(device).total_memory // 8
        return torch.cuda.mem_get_info(device)[0] // 4

    @property
    def settings(self) -> tuple[Any, ...]:
        return (self.memory_budget,)

    def for_recording(self, sequence: Sequence) -> Jacobian:
        return DenseJacobian(memory_budget=self.budget(sequence))

    def fit_chunk(self, sequence: Sequence, chunk: int) -> int:
        budget = self.budget(sequence)
        while chunk < sequence.length and 4 * block_bytes(sequence) * sequence.length > budget * chunk:
            chunk = min(2 * chunk, sequence.length)
        return chunk

    def steps_at_once(self, sequence: Sequence) -> int:
        return max(1, self.budget(sequence) // (4 * block_bytes(sequence)))


def block_bytes(sequence: Sequence) -> int:
    """Memory of the dense blocks of one step for all rows."""
    layout = sequence.layout
    return layout.rows * layout.width**2 * layout.dtype.itemsize


def _identity(sequence: Sequence) -> Tensor:
    layout = sequence.layout
    eye = torch.eye(layout.width, dtype=layout.dtype, device=layout.device)
    return eye[None, :, None, :].expand(1, layout.width, layout.rows, layout.width)


def _as_blocks(pushed: Tensor) -> Tensor:
    """Columns [N, K, B, D] to matrices [N, B, D, K]; contiguous, as matrix products want them."""
    return pushed.permute(0, 2, 3, 1).contiguous()
