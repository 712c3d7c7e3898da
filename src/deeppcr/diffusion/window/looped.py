"""The loop itself, some steps at a time on buffers that stay where they are: what CUDA graphs replay.

Shapes: L steps, B samples, D the flattened sample, K slots, S steps at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..problem import Problem
from ..samplers import Coefficients


class Looped:
    """One kind of loop: its state, and which step is the next, lie on the device, so one recording serves all steps.

    Args:
        problem: of this kind

    Attributes:
        states: [L, B, D, K], after every step that was taken
    """

    def __init__(self, problem: Problem):
        self.coefficients: Coefficients = problem.coefficients
        self.state: Tensor = torch.zeros_like(problem.initial.detach())
        like = self.state
        self.shift: Tensor | None = None
        if problem.shift is not None:
            self.shift = like.new_zeros(problem.length, *like.shape[:2])
        self.states: Tensor = like.new_zeros(problem.length, *like.shape)
        self.next: Tensor = torch.zeros(1, dtype=torch.long, device=like.device)
        self.classes: tuple[Any, Any] = pytree.tree_map_only(Tensor, torch.clone, problem.denoiser.given)
        self.who: Tensor = torch.arange(problem.samples, device=like.device)

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in vars(self).values() if isinstance(each, Tensor))

    def load(self, problem: Problem) -> None:
        """The noise and the classes of a run, which begins with its first step."""
        given = pytree.tree_leaves(problem.denoiser.given)
        for kept, new in zip(pytree.tree_leaves(self.classes), given, strict=True):
            if isinstance(kept, Tensor):
                kept.copy_(new)
        if self.shift is not None and problem.shift is not None:
            self.shift.copy_(problem.shift.detach())
        self.begin(problem.initial.detach(), 0)

    def begin(self, state: Tensor, at: int) -> None:
        """Go on from a state [B, D, K] with a step."""
        self.state.copy_(state)
        self.next.fill_(at)

    def advance(self, network: Callable[[Tensor, Tensor, Tensor], Tensor], count: int) -> None:
        """So many steps from the next one on, of which there are as many left."""
        state, steps = self.state, self.next + torch.arange(count, device=self.state.device)
        coefficients, shifts = self.coefficients.taken(steps), None if self.shift is None else self.shift[steps]
        states = []
        for number in range(count):
            inputs = coefficients.scale[number] * state[..., 0] if coefficients.scaled else state[..., 0]
            outputs = network(inputs, coefficients.timesteps[number].expand(len(state)), self.who)
            one = slice(number, number + 1)
            state = coefficients.advance(one, state[None], outputs[None], None if shifts is None else shifts[one])[0]
            states.append(state)
        self.state.copy_(state)
        self.states.index_copy_(0, steps, torch.stack(states))
        self.next += count
