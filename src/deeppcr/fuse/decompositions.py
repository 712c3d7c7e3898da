"""What operations are taken apart into while a step is traced: PyTorch's table, and what it leaves whole.

Written as PyTorch's operations, so that their derivatives are PyTorch's, too. Small matrices are eliminated row by row, with the
largest pivot chosen by selects. Where PyTorch raises (a matrix is singular, or not positive definite) NaN or infinity
comes out: whoever runs the code compares it with the step itself.

Shapes: a matrix is [..., n, n], one of its rows [..., n].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions

#: the widest matrix that is eliminated: code and registers grow with the cube
WIDEST = 4

_aten = torch.ops.aten


def _rows(a: Tensor) -> list[Tensor]:
    return list(a.unbind(-2))


def _eliminate(a: Tensor, rhs: Tensor | None = None) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The rows of a triangle, those of a right-hand side [..., n, m] that went the same way, and which rows were exchanged, [...] each."""
    n, exchanged = a.shape[-1], []
    rows = _rows(a if rhs is None else torch.cat((a, rhs), -1))
    for k in range(n):
        for i in range(k + 1, n):
            larger = rows[i][..., k].abs() > rows[k][..., k].abs()
            here = larger.unsqueeze(-1)
            rows[k], rows[i] = torch.where(here, rows[i], rows[k]), torch.where(here, rows[k], rows[i])
            exchanged.append(larger)
        for i in range(k + 1, n):
            factor = rows[i][..., k : k + 1] / rows[k][..., k : k + 1]
            rows[i] = rows[i] - factor * rows[k]
    return [row[..., :n] for row in rows], [row[..., n:] for row in rows], exchanged


def _substitute(rows: list[Tensor], rhs: list[Tensor], *, upper: bool, unitriangular: bool = False) -> Tensor:
    """The solution [..., n, m] of a triangular system."""
    solution: list[Tensor] = list(rhs)
    order = range(len(rows))
    for i in reversed(order) if upper else order:
        value = rhs[i]
        for k in order[i + 1 :] if upper else order[:i]:
            value = value - rows[i][..., k : k + 1] * solution[k]
        solution[i] = value if unitriangular else value / rows[i][..., i : i + 1]
    return torch.stack(solution, -2)


def _solve(a: Tensor, rhs: Tensor) -> Tensor:
    rows, right, _ = _eliminate(*_broadcast(a, rhs))
    return _substitute(rows, right, upper=True)


def _broadcast(a: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    batch = torch.broadcast_shapes(a.shape[:-2], rhs.shape[:-2])
    return a.expand(*batch, *a.shape[-2:]), rhs.expand(*batch, *rhs.shape[-2:])


def _unused(a: Tensor) -> tuple[Tensor, Tensor]:
    """In place of factors and pivots, which are for the derivatives of an operation that is not taken apart."""
    return torch.full_like(a, math.nan), torch.zeros_like(a[..., 0], dtype=torch.int32)


def _no_error(a: Tensor) -> Tensor:
    return torch.zeros_like(a[..., 0, 0], dtype=torch.int32)


def _linalg_inv_ex(a: Tensor, *, check_errors: bool = False):
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    return _solve(a, identity), _no_error(a)


def _linalg_solve_ex(a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False):
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    if vector:
        result = _solve(a, b.unsqueeze(-1)).squeeze(-1)
    else:
        result = _solve(a, b) if left else _solve(a.mT, b.mT).mT
    return result, *_unused(a), _no_error(a)


def _pivots(a: Tensor) -> tuple[list[Tensor], Tensor]:
    """Of which the determinant is the product, and its sign after the exchanges; [...] each."""
    rows, _, exchanged = _eliminate(a)
    sign = torch.ones_like(a[..., 0, 0])
    for here in exchanged:
        sign = torch.where(here, -sign, sign)
    return [row[..., k] for k, row in enumerate(rows)], sign


def _linalg_det(a: Tensor):
    pivots, determinant = _pivots(a)
    for pivot in pivots:
        determinant = determinant * pivot
    return determinant, *_unused(a)


def _linalg_slogdet(a: Tensor):
    pivots, sign = _pivots(a)
    logarithm = torch.zeros_like(sign)
    for pivot in pivots:
        sign, logarithm = sign * pivot.sign(), logarithm + pivot.abs().log()
    return sign, logarithm, *_unused(a)


def _linalg_cholesky_ex(a: Tensor, *, upper: bool = False, check_errors: bool = False):
    a = a.mT if upper else a
    # PyTorch reads one triangle, and its derivative is that of a symmetric matrix.
    symmetric = (a + a.mT) / 2
    a, n = symmetric + (a - symmetric).detach(), a.shape[-1]
    factor: list[list[Tensor]] = [[torch.zeros_like(a[..., 0, 0]) for _ in range(n)] for _ in range(n)]
    for i in range(n):
        for k in range(i + 1):
            rest = a[..., i, k]
            for j in range(k):
                rest = rest - factor[i][j] * factor[k][j]
            factor[i][k] = rest.sqrt() if i == k else rest / factor[k][k]
    lower = torch.stack([torch.stack(row, -1) for row in factor], -2)
    return (lower.mT if upper else lower), _no_error(a)


def _linalg_solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False):
    if not left:
        turned = _linalg_solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular)
        return turned if turned is NotImplemented else turned.mT
    if a.shape[-1] > WIDEST:
        return NotImplemented
    a, b = _broadcast(a, b)
    return _substitute(_rows(a), _rows(b), upper=upper, unitriangular=unitriangular)


def _cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False):
    if factor.shape[-1] > WIDEST:
        return NotImplemented
    lower = factor.mT if upper else factor
    half = _linalg_solve_triangular(lower, b, upper=False)
    return _linalg_solve_triangular(lower.mT, half, upper=True)


def _small(function: Callable) -> Callable:
    """Leave wide matrices, and those that have no numbers, whole."""

    def decompose(a: Tensor, *arguments: Any, **options: Any) -> Any:
        return function(a, *arguments, **options) if 0 < a.shape[-1] <= WIDEST else NotImplemented

    return decompose


def _extreme_dim(is_better: Callable[[Tensor, Tensor], Tensor]) -> Callable:
    """The first of the largest numbers along a dimension, and where it stands; NaN is larger than all, and smaller."""

    def decompose(a: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        if a.ndim == 0:
            return a.clone(), torch.zeros_like(a, dtype=torch.int64)
        best, *others = a.unbind(dim)
        place = torch.zeros_like(best, dtype=torch.int64)
        for index, other in enumerate(others, 1):
            better = is_better(other, best) | (other.isnan() & ~best.isnan())
            best, place = torch.where(better, other, best), torch.where(better, index, place)
        return (best.unsqueeze(dim), place.unsqueeze(dim)) if keepdim else (best, place)

    return decompose


def _place_only(extreme: Callable) -> Callable:
    def decompose(a: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is not None:
            return extreme(a, dim, keepdim)[1]
        place = extreme(a.reshape(-1), 0)[1]
        return place.reshape((1,) * a.ndim) if keepdim else place

    return decompose


def _gates(
    count: int, inputs: Tensor, hidden: Tensor, bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Any, Any]:
    """Of a recurrent cell what comes from its inputs and from its state, [..., count H] each, gate by gate."""
    inputs = inputs if bias is None else inputs + bias
    hidden = hidden if hidden_bias is None else hidden + hidden_bias
    return inputs.chunk(count, -1), hidden.chunk(count, -1)


def _thnn_fused_gru_cell(inputs: Tensor, hidden: Tensor, hx: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor]:
    """What ``nn.GRUCell`` is on a GPU: the next state, and what a kernel for its derivatives would need."""
    (a_reset, a_keep, a_new), (b_reset, b_keep, b_new) = _gates(3, inputs, hidden, *biases)
    reset, keep = (a_reset + b_reset).sigmoid(), (a_keep + b_keep).sigmoid()
    new = (a_new + reset * b_new).tanh()
    return new + keep * (hx - new), torch.cat((reset, keep, new, hx, b_new), -1)


def _thnn_fused_lstm_cell(inputs: Tensor, hidden: Tensor, cx: Tensor, *biases: Tensor | None) -> tuple[Tensor, ...]:
    """What ``nn.LSTMCell`` is on a GPU."""
    take, keep, new, show = (a + b for a, b in zip(*_gates(4, inputs, hidden, *biases), strict=True))
    take, keep, new, show = take.sigmoid(), keep.sigmoid(), new.tanh(), show.sigmoid()
    cell = keep * cx + take * new
    return show * cell.tanh(), cell, torch.cat((take, keep, new, show), -1)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    # The operation itself has no derivative in forward mode.
    return source.to(target.dtype).expand_as(target).clone()


def _scaled(add: Callable[[Tensor, Any], Tensor]) -> Callable[..., Any]:
    """A sum whose second term has a factor. To trace the tangent of the operation itself ends the process where that term has none."""

    def rule(a: Tensor, b: Any, *, alpha: float = 1) -> Any:
        return NotImplemented if alpha == 1 else add(a, b * alpha)

    return rule


def _addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if alpha == beta == 1:
        return NotImplemented
    product = (a @ b) * alpha
    return product if beta == 0 else c * beta + product  # PyTorch, too, does not look at c then


#: What has a rule, since PyTorch's formula has not its derivative: that of a detached tensor is 0, and those of the others are NaN, as 0
#: times infinity, where a select hides what overflows.
_WHOLE = {_aten.celu, _aten.detach, _aten.logaddexp, _aten.mish, _aten.sinc, _aten.softplus, _aten.xlogy}

_max, _min = _extreme_dim(torch.gt), _extreme_dim(torch.lt)

#: What to trace with, inside of ``torch.func.functionalize``, which does away with changes in place.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **{
        key: rule
        for key, rule in core_aten_decompositions().items()
        if getattr(key, "overloadpacket", None) not in _WHOLE
    },
    **get_decompositions([_aten.native_layer_norm, _aten._softmax, _aten._log_softmax]),
    _aten.add.Tensor: _scaled(torch.add),
    _aten.addmm.default: _addmm,
    _aten.addmv.default: _addmm,
    _aten.argmax.default: _place_only(_max),
    _aten.argmin.default: _place_only(_min),
    _aten.cholesky_solve.default: _cholesky_solve,
    _aten.copy.default: _copy,
    _aten.linalg_cholesky_ex.default: _small(_linalg_cholesky_ex),
    _aten._linalg_det.default: _small(_linalg_det),
    _aten.linalg_inv_ex.default: _small(_linalg_inv_ex),
    _aten._linalg_slogdet.default: _small(_linalg_slogdet),
    _aten._linalg_solve_ex.default: _small(_linalg_solve_ex),
    _aten.linalg_solve_triangular.default: _linalg_solve_triangular,
    _aten.max.dim: _max,
    _aten.min.dim: _min,
    _aten.sub.Tensor: _scaled(torch.sub),
    _aten._thnn_fused_gru_cell.default: _thnn_fused_gru_cell,
    _aten._thnn_fused_lstm_cell.default: _thnn_fused_lstm_cell,
}
