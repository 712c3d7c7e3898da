"""The plain loop, in any precision, its gradients, and what is known of it: how far rounding carries, whether it contracts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .problems import Problem


def cast(nest: Any, dtype: torch.dtype, device: Any = "cpu", *, grad: bool = False) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device, dtype).clone().requires_grad_(grad), nest)


def at(xs: Any, index: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[index], xs)


def run_loop(step: Callable, z0: Any, xs: Any, length: int, values: Any = None) -> Any:
    """The states, each leaf [L, ...].

    Args:
        values: states that replace those of the loop, while derivatives stay those of the steps
    """
    states, z = [], z0
    for index in range(length):
        z = step(z) if xs is None else step(z, at(xs, index))
        if values is not None:
            z = pytree.tree_map(lambda leaf, value: leaf + (value - leaf).detach(), z, at(values, index))
        states.append(z)
    return pytree.tree_map(lambda *each: torch.stack(each), *states)


class Precision:
    """The problem's tensors in one precision on one device, and its step."""

    def __init__(self, problem: Problem, dtype: torch.dtype, device: Any = "cpu"):
        self.problem = problem
        self.z0, xs, self.parameters = cast(problem.sources, dtype, device, grad=True)
        self.xs = None if problem.model.xs is None else xs
        self.step = problem.step(self.parameters, dtype, device)

    def loop(self, values: Any = None) -> Any:
        return run_loop(self.step, self.z0, self.xs, self.problem.length, values)

    def jittered(self, values: Any = None, seed: int = 0) -> Any:
        """The loop where every step's inputs and result are off by a rounding of the problem's own precision."""
        eps, source = torch.finfo(self.problem.dtype).eps, torch.Generator().manual_seed(seed)

        def jitter(leaf: Tensor) -> Tensor:
            noise = 2 * torch.rand(leaf.shape, generator=source, dtype=torch.float64) - 1
            return leaf * (1 + eps * noise).to(leaf.device, leaf.dtype)

        def off(nest: Any) -> Any:
            return pytree.tree_map(jitter, nest)

        def step(z: Any, *x: Any) -> Any:
            return off(self.step(z, *(off(each) for each in x)))

        return run_loop(step, self.z0, self.xs, self.problem.length, values)

    def gradients(self, states: Any, weights: Any) -> list[Tensor]:
        """Of ``sum(weights * states)``, or of the last states relative to their size, by z0, xs and parameters: float64."""
        outputs = pytree.tree_leaves(states)
        given = [w.to(leaf.device, leaf.dtype) for w, leaf in zip(pytree.tree_leaves(weights), outputs, strict=True)]
        if self.problem.model.read_out:
            parts = torch.cat([leaf[-1] * w[-1] for leaf, w in zip(outputs, given, strict=True)], -1)
            largest = parts.detach().abs().amax(-1, keepdim=True)  # whose square may be too small for a number
            dead = largest == 0  # of nothing there is no size
            largest = torch.where(dead, 1, largest)
            size = ((parts / largest).square().sum(-1, keepdim=True) + dead).sqrt()
            outputs = [leaf[-1] / largest / size for leaf in outputs]
            given = [w[-1] for w in given]
        sources = pytree.tree_leaves((self.z0, () if self.xs is None else self.xs, self.parameters))
        if not any(leaf.requires_grad for leaf in outputs):
            return [torch.zeros_like(leaf).double().cpu() for leaf in sources]
        found = torch.autograd.grad(outputs, sources, given, allow_unused=True, materialize_grads=True)
        return [gradient.to("cpu", torch.float64) for gradient in found]

    @torch.no_grad()
    def images(self, states: Any) -> Tensor:
        """What each step makes of the state before it, all of them at once: [L, B, D]."""
        before = pytree.tree_map(lambda first, rest: torch.cat([first.unsqueeze(0), rest[:-1]]), self.z0, states)
        if self.xs is None:
            return self.problem.pack(torch.vmap(self.step)(before))
        return self.problem.pack(torch.vmap(self.step)(before, self.xs))


def exponent(problem: Problem, states: Any, sizes: Tensor) -> Tensor:
    """The mean logarithmic growth of a small change along the states of the loop, a step and row: [B].

    Args:
        states: of the loop in float64, in the problem's nest
        sizes: [B, D], of each number of the state, which changes are measured by
    """
    source = torch.Generator().manual_seed(0)
    fresh = lambda: torch.randn(sizes.shape, generator=source, dtype=torch.float64) / sizes.shape[-1] ** 0.5  # noqa: E731
    direction, total = fresh(), torch.zeros(len(sizes), dtype=torch.float64)
    for part in range(0, problem.length, 256):
        for jacobian in _jacobians(problem, states, sizes, part, min(part + 256, problem.length)):
            direction = (jacobian @ direction.unsqueeze(-1)).squeeze(-1)
            size = direction.norm(dim=-1, keepdim=True)
            # After a reset nothing is left of a change: the next one starts there, and the reset itself is not counted.
            lost = size < math.exp(-50)
            total += torch.where(lost, 0, size.clamp(min=1e-300).log())[:, 0]
            direction = torch.where(lost, fresh(), direction / size.clamp(min=1e-300))
    return total / problem.length


def _jacobians(problem: Problem, states: Any, sizes: Tensor, start: int, stop: int) -> Tensor:
    """Of the steps from ``start`` to ``stop``, on numbers of size 1: [steps, B, D, D]."""
    step, xs = problem.step(problem.model.parameters, torch.float64), problem.model.xs
    before = pytree.tree_map(lambda first, rest: torch.cat([first.unsqueeze(0), rest])[start:stop], problem.z0, states)
    inputs = () if xs is None else (pytree.tree_map(lambda leaf: leaf[start:stop], xs),)
    columns = []
    for unit in torch.eye(sizes.shape[-1], dtype=torch.float64):
        tangent = problem.unpack((unit * sizes).expand(stop - start, *sizes.shape))
        pushed = torch.func.jvp(lambda z: torch.vmap(step)(z, *inputs), (before,), (tangent,))
        columns.append(problem.pack(pushed[1]) / sizes)
    return torch.stack(columns, -1)
