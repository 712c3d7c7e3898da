"""The solution of a system as a function of couplings and right-hand side, with its derivatives (twice, both modes)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..runtime import apply_directly, in_functorch, is_observed, values_can_be_read
from .blocks import Blocks
from .refine import refine
from .solver import ForwardSubstitution, LinearSolver

#: Products of blocks are no place for a lower precision than float32.
HALF = (torch.bfloat16, torch.float16)


def solve_system(couplings: Blocks, rhs: Tensor, solver: LinearSolver, reverse: bool, refined: bool = True) -> Tensor:
    """``_Solve``, with autograd's bookkeeping only where somebody needs it: it takes longer than a small system."""
    if is_observed(couplings.data, rhs):
        return _Solve.apply(couplings.data, rhs, type(couplings), solver, reverse, refined)
    return solution(couplings, rhs, solver, reverse, refined)


def in_full(blocks: Blocks, rhs: Tensor) -> tuple[Blocks, Tensor]:
    """In float32 at least."""
    return (type(blocks)(blocks.data.float()), rhs.float()) if rhs.dtype in HALF else (blocks, rhs)


def with_initial(blocks: Blocks, rhs: Tensor, initial: Tensor | None, reverse: bool) -> tuple[Blocks, Tensor]:
    """The L - 1 blocks between unknowns, and a right-hand side into which the initial state [*batch, D] is folded.

    The adjoint system then has the very same couplings, transposed, and no block needs shifting or copying.
    """
    couplings = blocks[:-1] if reverse else blocks[1:]
    if initial is None:
        return couplings, rhs
    if reverse:
        return couplings, torch.cat([rhs[:-1], rhs[-1:] + blocks[-1:].apply(initial.unsqueeze(0))])
    return couplings, torch.cat([rhs[:1] + blocks[:1].apply(initial.unsqueeze(0)), rhs[1:]])


def solution(couplings: Blocks, rhs: Tensor, solver: LinearSolver, reverse: bool, refined: bool) -> Tensor:
    """Its values, with what products of blocks lost given back; autograd sees the single operations, if anything."""
    solver, _ = solver.choose(couplings, rhs)
    states = solver.solve_coupled(couplings, rhs, reverse=reverse)
    if not solver.overflows:
        return states
    if refined and not couplings.exact_products:
        return refine(couplings, rhs, states, solver, reverse)
    if values_can_be_read(states) and not torch.isfinite(states).all():
        return ForwardSubstitution().solve_coupled(couplings, rhs, reverse=reverse)
    return states


def pull_back(
    couplings: Blocks, states: Tensor, reverse: bool, solve_adjoint: Callable[[Blocks], Tensor], of_blocks: bool
) -> tuple[Tensor | None, Tensor]:
    """The gradients in the blocks' data (None unless asked for) and in the right-hand side.

    Args:
        states: [L, *batch, D], the solution
        reverse: the direction that it was found in
        solve_adjoint: solves the system of the blocks that it is given, in the other direction, with the gradient in ``states``
            on the right
    """
    adjoint = solve_adjoint(couplings.adjoint())
    if not of_blocks:
        return None, adjoint
    left, right = (adjoint[:-1], states[1:]) if reverse else (adjoint[1:], states[:-1])
    return couplings.outer(left, right.conj()).sum_to_size(couplings.data.shape), adjoint


class _Solve(torch.autograd.Function):
    """The solution as a function of couplings and right-hand side; its derivatives are such systems again."""

    @classmethod
    def apply(cls, *arguments):
        return super().apply(*arguments) if in_functorch() else apply_directly(cls, *arguments)

    @staticmethod
    def forward(data, rhs, structure, solver, reverse, refined):
        return solution(structure(data), rhs, solver, reverse, refined)

    @staticmethod
    def setup_context(ctx, inputs, output):
        data, _, ctx.structure, ctx.solver, ctx.reverse, _ = inputs
        ctx.save_for_backward(data, output)
        ctx.save_for_forward(data, output)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        """One batch dimension more: inside, values can be read and kernels launched as ever."""
        (data, rhs, structure, *settings), (data_dim, rhs_dim, *_) = arguments, in_dims
        batch_dims = rhs.ndim - 2 - (rhs_dim is not None)
        data = data.unsqueeze(1) if data_dim is None else data.movedim(data_dim, 1)
        data = data.reshape(
            *data.shape[:2], *(1,) * (batch_dims + 2 + structure.core_dims - data.ndim), *data.shape[2:]
        )
        rhs = rhs.unsqueeze(1) if rhs_dim is None else rhs.movedim(rhs_dim, 1)
        rhs = rhs.expand(rhs.shape[0], info.batch_size, *rhs.shape[2:])
        return _Solve.apply(data, rhs, structure, *settings), 1

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad,) = grad_outputs
        if torch.is_autocast_enabled(grad.device.type):
            with torch.autocast(grad.device.type, enabled=False):
                return _Solve.backward(ctx, grad)
        data, states = ctx.saved_tensors

        def solve_adjoint(couplings: Blocks) -> Tensor:
            return solve_system(couplings, grad, ctx.solver, not ctx.reverse)

        couplings = ctx.structure(data)
        of_data, of_rhs = pull_back(couplings, states, ctx.reverse, solve_adjoint, ctx.needs_input_grad[0])
        return of_data, of_rhs, None, None, None, None

    @staticmethod
    def jvp(ctx, *grad_inputs):
        data_tangent, rhs_tangent = grad_inputs[:2]
        data, states = ctx.saved_tensors
        pushed = ctx.structure(data_tangent).apply(states[1:] if ctx.reverse else states[:-1])
        if ctx.reverse:
            rhs_tangent = torch.cat([rhs_tangent[:-1] + pushed, rhs_tangent[-1:]])
        else:
            rhs_tangent = torch.cat([rhs_tangent[:1], rhs_tangent[1:] + pushed])
        return _Solve.apply(data, rhs_tangent, ctx.structure, ctx.solver, ctx.reverse, True)
