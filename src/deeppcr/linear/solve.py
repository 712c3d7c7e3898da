"""``linear.solve``: checks its input, and has the system solved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..distributed.ranks import Ranks, Trouble
from ..runtime import declares, in_functorch, is_observed
from .auto import Auto
from .blocks import Blocks
from .fused import Fused, layout_of
from .operator import has_operator, solve_by_operator
from .sharded import SolveOver, facts_of, solve_over
from .solver import LinearSolver
from .system import HALF, in_full, solution, solve_system, with_initial

_COMPLEX = (torch.complex64, torch.complex128)
_PLAIN = (Tensor, torch.nn.Parameter)  # whose numbers lie in memory as they are
_MOST = 4096


def solve(
    blocks: Blocks,
    rhs: Tensor,
    initial: Tensor | None = None,
    *,
    reverse: bool = False,
    solver: LinearSolver = Auto(),
    mesh: Any = None,
) -> Tensor:
    """Solve ``z_l = A_l z_{l-1} + b_l`` for l = 1..L, in parallel over l.

    Differentiable twice in ``blocks``, ``rhs`` and ``initial``; works under ``torch.vmap`` and ``torch.compile``. All of them may be
    complex (complex64, complex128); their gradients are conjugated as everywhere in PyTorch.
    bfloat16 and float16 are accumulated in float32. Products of dense or block-diagonal blocks can lose digits that steps
    keep: where the residual is above some roundings of its terms, the solution is corrected by further solves, found in float64, or
    by forward substitution; so it is where a product overflows although the solution does not. While a CUDA graph is
    captured, where values cannot be looked at, there is one correction in any case, and what overflowed is not finite.
    Under ``torch.compile`` and ``torch.export`` a system is one operator, ``deeppcr::linear_solve``: the same graph for all lengths
    from 3 on, and values are looked at as ever. Inside transforms (``torch.func``, forward mode), and with a solver or blocks of a
    class of your own, a compiler traces through the solver instead: a graph for each length, with one correction. Second derivatives
    of a compiled graph are refused by PyTorch.
    ``Fused`` finds both out by itself, where chunks of steps join, and goes on in float64 or step by step there; of dense blocks wider than 64 it
    finds overflows only. A product of blocks can also underflow: states that lie further below the
    others than the dtype's range may come out as zero, except by ``ForwardSubstitution``.

    Args:
        blocks: L blocks ``A_l``; their batch dimensions broadcast against those of ``rhs``
        rhs: [L, *batch, D], the ``b_l``
        initial: [*batch, D], ``z_0`` (with ``reverse``: ``z_{L+1}``); None means zero
        reverse: solve ``z_l = A_l z_{l+1} + b_l`` instead, from the last step to the first
        solver: Auto(), Fused(), ForwardSubstitution(), PCR() or Hierarchical()
        mesh: a one-dimensional DeviceMesh over whose ranks the steps are spread: ``blocks`` and ``rhs`` are this rank's part, as many
            steps as it has, or none; ``initial`` is the same everywhere. Every rank makes the call, and the backward pass. Gradients of
            what ranks share are this rank's part of them: their sum is the gradient

    Returns:
        [L, *batch, D]; with a mesh, of this rank's steps

    >>> import torch
    >>> from deeppcr import linear
    >>> blocks = linear.Dense(torch.randn(100, 3, 3) / 3)
    >>> linear.solve(blocks, torch.randn(100, 8, 3), torch.randn(8, 3)).shape
    torch.Size([100, 8, 3])

    A linear recurrent unit: every channel turns and decays by a complex number of its own.

    >>> turns = torch.polar(torch.full((3,), 0.9), torch.tensor([0.1, 0.2, 0.3]))
    >>> linear.solve(linear.Diagonal(turns.expand(100, 3)), torch.randn(100, 8, 3) + 0j).dtype
    torch.complex64
    """
    if mesh is not None:
        return _over_ranks(blocks, rhs, initial, reverse, solver, mesh)
    if initial is None and (found := _solve_again(blocks, rhs, reverse, solver)) is not None:
        return found
    given, batch = (blocks, rhs), _check(blocks, rhs, initial)
    # Products of blocks are no place for a lower precision: here that of the first with the initial state.
    if initial is not None and torch.is_autocast_enabled(rhs.device.type):
        with torch.autocast(rhs.device.type, enabled=False):
            return solve(blocks, rhs, initial, reverse=reverse, solver=solver)
    _check_solver(solver)
    result_dtype = rhs.dtype
    blocks, rhs, initial = _in_full(blocks, rhs, initial, batch)
    couplings, rhs = with_initial(blocks, rhs, initial, reverse)
    states = solve_coupled(couplings, rhs, reverse=reverse, solver=solver)
    if initial is None and rhs is given[1]:  # not in another precision or shape
        _prepare(*given, couplings, reverse, solver)
    return states if states.dtype == result_dtype else states.to(result_dtype)


#: By ``layout_of`` blocks and right-hand side: the launches of such a system, and how many bytes after the first block the couplings
#: begin.
_prepared: dict[tuple[Any, ...], tuple[Any, int]] = {}


def _solve_again(blocks: Blocks, rhs: Tensor, reverse: bool, solver: LinearSolver) -> Tensor | None:
    """By the launches of an earlier call whose tensors differed in their values and places only; None if there was none.

    Checks, views and the choice of a solver take longer than the kernels of a small system do: without this, half of the targets for
    calls would be missed (docs/performance.md).
    """
    # In this order: a compiler that looked into the dictionary would compile anew whenever it has grown.
    if torch.compiler.is_compiling() or not _prepared or not declares(solver, "fuses"):
        return None
    try:
        prepared = _prepared.get(layout_of(blocks, rhs, reverse))
    except (AttributeError, TypeError, RuntimeError):  # no tensors, sizes that are symbols, or tensors without strides
        return None
    if prepared is None:
        return None
    data, (noted, offset) = blocks.data, prepared
    plain = all(type(each) in _PLAIN and not each.is_neg() for each in (data, rhs))
    if is_observed(data, rhs) or not plain or torch.cuda.current_device() != rhs.device.index:
        return None
    return noted.again(rhs, data.data_ptr() + offset, rhs.data_ptr())


def _prepare(blocks: Blocks, rhs: Tensor, couplings: Blocks, reverse: bool, solver: LinearSolver) -> None:
    """After a call: keep for ``_solve_again`` what it has launched."""
    if torch.compiler.is_compiling() or not declares(solver, "fuses") or not len(couplings):
        return
    if is_observed(blocks.data, rhs):
        return
    noted = Fused().noted(couplings, rhs, reverse=reverse)
    if noted is not None:
        if len(_prepared) >= _MOST:
            _prepared.clear()
        offset = couplings.data.data_ptr() - blocks.data.data_ptr()
        _prepared[layout_of(blocks, rhs, reverse)] = noted, offset


def solve_coupled(
    couplings: Blocks, rhs: Tensor, *, reverse: bool, solver: LinearSolver, look: bool = True, refined: bool = True
) -> Tensor:
    """``solve`` without its checks, for the L - 1 blocks between the unknowns and no initial state.

    Without a ``look`` at its values, a solution in which a product of blocks overflowed is returned as it is, and nothing
    is differentiated. A solution that is not ``refined`` may lack digits that products of blocks lost; its derivatives do not.

    >>> import torch
    >>> from deeppcr import linear
    >>> halves = linear.Scalar(torch.full((2,), 0.5))
    >>> linear.solve_coupled(halves, torch.ones(3, 1), reverse=False, solver=linear.PCR()).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """
    if torch.is_autocast_enabled(rhs.device.type):  # see ``solve``
        with torch.autocast(rhs.device.type, enabled=False):
            return solve_coupled(couplings, rhs, reverse=reverse, solver=solver, look=look, refined=refined)
    if rhs.dtype in HALF:
        full = in_full(couplings, rhs)
        return solve_coupled(*full, reverse=reverse, solver=solver, look=look, refined=refined).to(rhs.dtype)
    compiling = torch.compiler.is_compiling()
    if compiling and look and has_operator(couplings, solver):  # of any length, 1 included: no graph depends on it
        return solve_by_operator(couplings, rhs, solver, reverse, refined)
    if len(couplings) == 0:
        return rhs.clone()  # as for every other length, the caller may change the result in place
    if not look:
        return solver.solve_coupled(couplings, rhs, reverse=reverse)
    # A compiler traces no custom function with a jvp, and plans memory by itself.
    return (solution if compiling else solve_system)(couplings, rhs, solver, reverse, refined)


def _over_ranks(
    blocks: Blocks, rhs: Tensor, initial: Tensor | None, reverse: bool, solver: LinearSolver, mesh: Any
) -> Tensor:
    if torch.compiler.is_compiling():  # it looks at values, and at what other ranks say
        run: Any = torch.compiler.disable(_over_ranks)
        return run(blocks, rhs, initial, reverse, solver, mesh)
    ranks, trouble = Ranks.of(mesh), Trouble()
    facts, batch, differentiated = (0,), torch.Size(), False
    with trouble.kept():
        if in_functorch():
            raise RuntimeError(
                "linear.solve: with a mesh it cannot run inside a torch.func transform (vmap, grad, jvp, ...)"
            )
        batch = _check(blocks, rhs, initial, least=0)
        _check_solver(solver)
        given = [blocks.data, rhs, *([] if initial is None else [initial])]
        differentiated = torch.is_grad_enabled() and any(each.requires_grad for each in given)
        facts = facts_of(blocks, rhs, batch, initial)
    # The graph of every rank holds the solve where that of one does, or a backward pass would wait for ever.
    told = ranks.agree(trouble.error, *facts, differentiated)
    if len({each[:-1] for each in told}) > 1:
        raise ValueError(
            "blocks, rhs, initial, mesh: structure, dtypes and all sizes but the number of steps must be the same on every rank"
        )
    result_dtype = rhs.dtype
    blocks, rhs, initial = _in_full(blocks, rhs, initial, batch)
    first = rhs.new_zeros(rhs.shape[1:]) if initial is None else initial.expand(rhs.shape[1:])
    ranks, extra = ranks.reversed() if reverse else ranks, rhs.new_zeros(rhs.shape[1:])
    with torch.autocast(rhs.device.type, enabled=False):
        if any(each[-1] for each in told):
            rhs = rhs if rhs.requires_grad else rhs.detach().requires_grad_()
            states, _ = SolveOver.apply(blocks.data, rhs, first, extra, type(blocks), solver, reverse, ranks)  # type: ignore[misc]
        else:
            states, *_ = solve_over(ranks, blocks, rhs, first, extra, solver, reverse=reverse)
    return states if states.dtype == result_dtype else states.to(result_dtype)


def _in_full(
    blocks: Blocks, rhs: Tensor, initial: Tensor | None, batch: torch.Size
) -> tuple[Blocks, Tensor, Tensor | None]:
    """In float32 at least, from here on, so that the initial state is not rounded once more; and with all batch dimensions."""
    blocks, rhs = in_full(blocks, rhs)
    initial = None if initial is None else initial.to(rhs.dtype)
    if rhs.shape[1:-1] != batch:
        rhs = rhs[(slice(None), *(None,) * (len(batch) - rhs.ndim + 2))]
        rhs = rhs.expand(rhs.shape[0], *batch, rhs.shape[-1])
    return blocks.aligned(len(batch)), rhs, initial


def _check_solver(solver: Any) -> None:
    if not isinstance(solver, LinearSolver):
        raise TypeError(
            f"solver: expected Auto(), Fused(), PCR(), Hierarchical() or ForwardSubstitution(), got {solver!r}"
        )


def _check(blocks: Blocks, rhs: Tensor, initial: Tensor | None, least: int = 1) -> torch.Size:
    """The batch shape of the result; raises what is wrong with the arguments."""
    if not isinstance(blocks, Blocks):
        raise TypeError(
            f"blocks: expected linear.Dense, Diagonal, BlockDiagonal or Scalar around a tensor, got {type(blocks).__name__}"
        )
    data = blocks.data
    given = [("rhs", rhs), ("blocks", data), *([] if initial is None else [("initial", initial)])]
    for name, tensor in given:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if not tensor.dtype.is_floating_point and tensor.dtype not in _COMPLEX:
            raise TypeError(f"{name}: expected a floating dtype, complex64 or complex128, got {tensor.dtype}")
        if tensor.dtype != rhs.dtype or tensor.device != rhs.device:
            raise TypeError(f"{name}: is {tensor.dtype} on {tensor.device}, but rhs is {rhs.dtype} on {rhs.device}")
    shape, core = rhs.shape, blocks.core_dims
    if len(shape) < 2:
        raise ValueError(f"rhs: expected [L, *batch, D], got shape {tuple(shape)}")
    if shape[0] < least:
        raise ValueError("rhs: has no steps (L = 0)")
    if data.ndim < 1 + core:
        raise ValueError(
            f"blocks: {type(blocks).__name__} expects at least {1 + core} dimensions, got shape {tuple(data.shape)}; what is the same at "
            "all steps is expanded: A.expand(L, *A.shape)"
        )
    if core >= 2 and data.shape[-1] != data.shape[-2]:
        raise ValueError(f"blocks: the matrices must be square, got shape {tuple(data.shape)}")
    if data.shape[0] != shape[0]:  # ``len`` would make a number of what may be a symbol
        raise ValueError(f"blocks: {len(blocks)} of them for {shape[0]} steps in rhs")
    if blocks.width not in (None, shape[-1]):
        raise ValueError(f"blocks: width {blocks.width}, but rhs has width {shape[-1]}")
    if initial is not None and (initial.ndim < 1 or initial.shape[-1] != shape[-1]):
        raise ValueError(f"initial: expected [*batch, {shape[-1]}], got shape {tuple(initial.shape)}")
    batch, of_blocks, of_initial = shape[1:-1], blocks.batch_shape, () if initial is None else initial.shape[:-1]
    if of_blocks in ((), batch) and of_initial in ((), batch):  # to broadcast takes longer than all of the checks
        return batch
    try:
        return torch.broadcast_shapes(of_blocks, batch, of_initial)
    except RuntimeError:
        shapes = f"{tuple(of_blocks)}, {tuple(batch)} and {tuple(of_initial)}"
        raise ValueError(f"blocks, rhs, initial: batch shapes {shapes} do not broadcast") from None
