"""The operations that tests hold against PyTorch, as functions of tensors."""

import math

import torch
import torch.nn.functional as F

inf, nan = math.inf, math.nan
AWKWARD = [0.0, -0.0, 1e-300, -1e-9, 1e-4, 0.3, -0.7, 1.0, -1.0, 2.5, -3.5, 30.0, -40.0, 1e4, -1e200, inf, -inf, nan]
#: kinks, and where tangents are finite
ORDINARY = [0.0, 1e-9, -1e-4, 0.3, -0.7, 1.0, -1.0, 2.5, -3.5, 7.0, -12.0, 800.0, -800.0]

UNARY = {
    "abs": torch.abs,
    "acos": torch.acos,
    "acosh": torch.acosh,
    "add_number": lambda x: x + 0.1,
    "and": lambda x: ((x > 0) & (x < 1)).to(x.dtype),
    "asin": torch.asin,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "atan2_of_numbers": lambda x: torch.atan2(x, torch.full_like(x, 2)) + torch.atan2(torch.ones_like(x), x),
    "atanh": torch.atanh,
    "bitwise_not": lambda x: torch.where(~(x > 0), x, 2 * x),
    "ceil": torch.ceil,
    "celu": F.celu,
    "clamp": lambda x: x.clamp(-1, 2.5),
    "clamp_max": lambda x: x.clamp(max=0.3),
    "clamp_min": lambda x: x.clamp(min=-0.7),
    "clamp_to_nothing": lambda x: x.clamp(2.5, -1),
    "cos": torch.cos,
    "cosh": torch.cosh,
    "detach": lambda x: x * x.detach(),
    "div_number": lambda x: x / 3,
    "elu": lambda x: F.elu(x, 0.7),
    "erf": torch.erf,
    "erfc": torch.erfc,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "floor": torch.floor,
    "floor_divide": lambda x: x // 0.7,
    "floor_divide_negative": lambda x: x // -2.5,
    "fmod": lambda x: x.fmod(0.7),
    "frac": torch.frac,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": lambda x: F.hardtanh(x, -1, 2.5),
    "heaviside": lambda x: torch.heaviside(x, torch.full_like(x, 0.5)),
    "hypot_of_number": lambda x: torch.hypot(x, torch.full_like(x, 2.0)),
    "isfinite": lambda x: x.isfinite(),
    "isinf": lambda x: x.isinf(),
    "isnan": lambda x: x.isnan(),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "log": torch.log,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "log_sigmoid": F.logsigmoid,
    "logical_not": lambda x: torch.logical_not(x),
    "logical_xor": lambda x: torch.logical_xor(x > 0, x),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.1),
    "mish": F.mish,
    "nan_to_num": torch.nan_to_num,
    "neg": lambda x: -x,
    "or": lambda x: (x > 1) | (x < 0),
    "pow_0": lambda x: x**0,
    "pow_1": lambda x: x**1.0,
    "pow_2": lambda x: x**2,
    "pow_3": lambda x: x**3,
    "pow_4": lambda x: x**4,
    "pow_7": lambda x: x**7,
    "pow_half": lambda x: x**0.5,
    "pow_minus_1": lambda x: x**-1,
    "pow_minus_2": lambda x: x**-2,
    "pow_minus_half": lambda x: x**-0.5,
    "pow_of_number": lambda x: 1.7**x,
    "pow_odd": lambda x: x**1.3,
    "reciprocal": torch.reciprocal,
    "relu": torch.relu,
    "relu6": F.relu6,
    "remainder": lambda x: x % 0.7,
    "remainder_negative": lambda x: x.remainder(-0.7),
    "round": torch.round,
    "round_decimals": lambda x: x.round(decimals=1),
    "round_tens": lambda x: x.round(decimals=-1),
    "rsqrt": torch.rsqrt,
    "rsub": lambda x: 0.1 - x,
    "selu": F.selu,
    "sgn": torch.sgn,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "silu": F.silu,
    "sin": torch.sin,
    "sinc": lambda x: 1 + torch.sinc(x),
    "sinh": torch.sinh,
    "softplus": F.softplus,
    "softplus_beta": lambda x: F.softplus(x, 2, 5),
    "softsign": F.softsign,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "tanhshrink": lambda x: F.tanhshrink(2 + x),
    "threshold": lambda x: F.threshold(x, 0.3, 5.0),
    "to_bool": lambda x: x.bool().to(x.dtype) * x,
    "to_int": lambda x: x.clamp(-5, 5).nan_to_num().to(torch.int64) * x,
    "trunc": torch.trunc,
    "where": lambda x: torch.where(x > 0.3, x, 0.1),
    "where_numbers": lambda x: torch.where(x > 0.3, 0.1, -2).to(x.dtype).exp(),  # 0.1 in float32,
}

BINARY = {
    "add": lambda x, y: torch.add(x, y, alpha=0.3),
    "atan2": torch.atan2,
    "clamp_between": lambda x, y: torch.clamp(x, -y.abs(), y.abs()),
    "compare": lambda x, y: torch.stack([x == y, x != y, x < y, x <= y, x > y, x >= y]),
    "div": torch.div,
    "div_floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "fmax": lambda x, y: torch.where(x > y, x, y),
    "fmod": torch.fmod,
    "hypot": torch.hypot,
    "int_arithmetic": lambda x, y: _integers(x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "logaddexp": torch.logaddexp,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mul": torch.mul,
    "pow": lambda x, y: x.abs() ** y,
    "remainder": torch.remainder,
    "sub": lambda x, y: torch.sub(x, y, alpha=2),
    "where": lambda x, y: torch.where(x > y, x * y, y),
    "xlogy": lambda x, y: torch.xlogy(x, y.abs()),
}

#: of which PyTorch knows no derivative
NO_TANGENT = {
    *("floor_divide", "floor_divide_negative", "heaviside", "isfinite", "isinf", "isnan", "logical_not", "logical_xor"),
    *("or", "compare"),
}


def _integers(x, y):
    """Integers, of both signs, that are known on the device only."""
    a, b = x.nan_to_num().clamp(-9, 9).to(torch.int64), y.nan_to_num().clamp(-9, 9).to(torch.int64)
    b = torch.where(b == 0, 4, b)
    quotients = [torch.div(a, b, rounding_mode=mode) for mode in ("floor", "trunc")]
    bits = [a & b, a | b, a ^ b, ~a]
    return torch.stack([a + b, a - b, a * b, a**3, *quotients, a % b, a.fmod(b), a.abs(), a.sign(), *bits]) * (x + y)


MATRIX = torch.tensor([[0.9, -0.3, 0.2, 1.1], [0.4, 0.7, -0.6, 0.1], [-0.5, 0.2, 0.8, -0.9]], dtype=torch.float64)
VECTOR = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
PLACES = torch.tensor([2, 0, 2])

#: of a matrix [3, 4]
ARRAYS = {
    "addmm": lambda x: torch.addmm(MATRIX[:3, :3], x, MATRIX.mT, beta=0.3, alpha=0.7),
    "all": lambda x: ((x > -9).all(-1) * x[:, 0], x.bool().all() * x),
    "amax": lambda x: (x.amax(0), x.amin((0, 1), keepdim=True), x.max(), x.min()),
    "any": lambda x: ((x > 0.5).any(0) * x[0], (x > 9).any() * x),
    "arange": lambda x: x * torch.arange(4) + torch.arange(0.5, 2.2, 0.5),
    "argmax": lambda x: (x * x.argmax(-1, keepdim=True), x.argmin() * x, x.argmax(0) * x),
    "baddbmm": lambda x: torch.baddbmm(x[None, :, :3], x[None], x.mT[None], beta=0.3, alpha=2),
    "bmm": lambda x: torch.bmm(x.reshape(2, 3, 2), x.reshape(2, 2, 3)),
    "broadcast": lambda x: x + VECTOR[:, None] * x[:, :1],
    "cat": lambda x: torch.cat([x, x[:1] * 2, torch.zeros(0, dtype=x.dtype)]),
    "chunk": lambda x: x.chunk(3, -1)[1] * x.chunk(2)[1][0, 0],
    "count": lambda x: (x > 0).sum() * x,
    "cross": lambda x: torch.linalg.cross(x[:, 0], x[:, 1]),
    "cumprod": lambda x: x.cumprod(0),
    "cumsum": lambda x: x.cumsum(-1),
    "diag": lambda x: (torch.diag(x[:, 0]), torch.diag_embed(x, 1), torch.diagonal(x, 1), x[:, :3].trace()),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, x[:, 1], -0),
    "diff": lambda x: x.diff(dim=-1),
    "dot": lambda x: torch.dot(x[0], x[1]) + torch.vdot(x[1], x[2]) + x[0].inner(x[2]),
    "einsum": lambda x: torch.einsum("ij,kj,k->ik", x, MATRIX, VECTOR),
    "expand": lambda x: x[:, :1].expand(3, 5) + x[0, 0].expand(3, 5),
    "eye": lambda x: x[:, :3] + 2 * torch.eye(3, dtype=x.dtype),
    "flatten": lambda x: x.flatten() @ torch.ones(12, dtype=x.dtype),
    "flip": lambda x: x.flip(0, 1) + x.flipud(),
    "full": lambda x: torch.full_like(x, 0.3) * x + torch.ones_like(x) - torch.zeros_like(x) + x.new_full((3, 1), 0.1),
    "gather": lambda x: x.gather(0, torch.tensor([[0, 2, 1, 0], [1, 1, 0, 2]])),
    "in_place": lambda x: _in_place(x),
    "index": lambda x: (x[PLACES], x[:, [3, 3]], x[PLACES, [0, 1, 2]], x[1, 2]),
    "index_add": lambda x: x.index_add(0, PLACES, x * 2),
    "index_put": lambda x: torch.index_put(x, (PLACES,), x[:, :1], accumulate=True),
    "index_select": lambda x: x.index_select(1, PLACES),
    "kron": lambda x: torch.kron(x[:2, :2], x[1:, 1:3]),
    "layer_norm": lambda x: F.layer_norm(x, (4,), MATRIX[0], MATRIX[1]),
    "linear": lambda x: F.linear(x, MATRIX, VECTOR),
    "log_softmax": lambda x: torch.log_softmax(x, 0),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "matmul": lambda x: x @ MATRIX.mT @ VECTOR + x.reshape(3, 1, 4).matmul(MATRIX[0]).squeeze(-1),
    "matrix_power": lambda x: torch.linalg.matrix_power(x[:, :3], 3),
    "max_dim": lambda x: (x.max(-1).values, x.min(0, keepdim=True)[0], x.max(0)[1] * x),
    "mean": lambda x: (x.mean(), x.mean(0, keepdim=True)),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0] * 2,
    "mm": lambda x: torch.mm(x, MATRIX.t()),
    "movedim": lambda x: x.reshape(3, 2, 2).movedim(0, -1).mT.swapaxes(0, 1),
    "mv": lambda x: torch.mv(x, x[0]),
    "norm": lambda x: (x.norm(), torch.linalg.vector_norm(x, 1, -1), x.norm(3, 0), x.norm(inf), x.norm(-inf, -1)),
    "norm_of_matrix": lambda x: torch.linalg.matrix_norm(x),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "nothing": lambda x: x,
    "one_of_all": lambda x: x.sum(0)[2] * x[..., None, 0],
    "outer": lambda x: torch.outer(x[:, 0], x[0]),
    "pad": lambda x: F.pad(x, (1, -2, 0, 1), value=0.3),
    "prod": lambda x: (x.prod(), x.prod(0)),
    "repeat": lambda x: x.repeat(2, 1, 2) + x.tile(1, 2) + x.repeat_interleave(2, 1),
    "rms_norm": lambda x: F.rms_norm(x, (4,), MATRIX[0], 1e-5),
    "roll": lambda x: x.roll(1, -1) + x.roll((1, 2), (0, 1)) + x.roll(5),
    "scatter": lambda x: x.scatter(1, torch.tensor([[0], [3], [1]]), x[:, :1] * 2).scatter_add(
        0, PLACES[:, None].expand(3, 4), x
    ),
    "select_scatter": lambda x: torch.select_scatter(x, x[0] * 2, 0, 1),
    "slice": lambda x: x[1:, ::2] * x[:2, -2:] + x[-1:, 1:99:2],
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:, :2], 1, 1, 4, 2),
    "softmax": lambda x: torch.softmax(x, -1),
    "softmin": lambda x: F.softmin(x, 0),
    "split": lambda x: [part.sum() for part in (*x.split(3, 1), *x.split([1, 3], 1), *x.tensor_split(2))],
    "squeeze": lambda x: x[:, None, :1].squeeze(1).squeeze().unsqueeze(-1),
    "stack": lambda x: torch.stack([x, 2 * x], 1),
    "std": lambda x: (x.std(), x.std(0, correction=0), x.var(-1, keepdim=True)),
    "sum": lambda x: (x.sum(), x.sum(-1), x.sum((0, 1), keepdim=True), x.sum([]), x[0, 0].sum()),
    "tensor": lambda x: torch.tensor(0.3) * x + torch.tensor([1, 2, 3, 4]) * x,
    "tensordot": lambda x: torch.tensordot(x, MATRIX, dims=([1], [1])),
    "transpose": lambda x: x.T.transpose(0, 1).permute(1, 0) + x.mT.contiguous(),
    "tril": lambda x: x.tril(-1) + 2 * x.triu(1),
    "unbind": lambda x: [row * k for k, row in enumerate(x.unbind(0))],
    "unflatten": lambda x: x.unflatten(1, (2, 2)).flatten(0, 1).view(-1, 3),
    "unfold": lambda x: torch.stack([x[:, k : k + 2] for k in range(3)]),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "where": lambda x: torch.where(torch.tensor([True, False, True])[:, None], x, 0.0),
    "zeros": lambda x: torch.zeros(3, 4, dtype=x.dtype) + torch.ones(4, dtype=x.dtype) * x * 0,
}


def _in_place(x):
    y = x.clone()
    y[0] += 1
    y[1:, 2] *= 3
    y.view(-1)[-1] = 0.3
    y.diagonal().add_(y[0, :3])
    return y.relu_() @ VECTOR.new_ones(4)


def _definite(x):
    return x @ x.mT + 0.2 * torch.eye(len(x), dtype=x.dtype)


def _square(x):
    """One whose first pivot is the smallest."""
    return torch.roll(_definite(x), 1, 0)


#: of a matrix [n, 4], n from 1 to 4
MATRICES = {
    "cholesky": lambda x: (torch.linalg.cholesky(_definite(x)), torch.linalg.cholesky(_definite(x), upper=True)),
    "cholesky_solve": lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(_definite(x))),
    "det": lambda x: (torch.linalg.det(_square(x)), torch.det(_square(x)[None])),
    "inv": lambda x: torch.linalg.inv(_square(x)),
    "logdet": lambda x: (torch.logdet(_definite(x)), torch.linalg.slogdet(-_square(x))),
    "solve": lambda x: (torch.linalg.solve(_square(x), x), torch.linalg.solve(_square(x), x[:, 0])),
    "solve_right": lambda x: torch.linalg.solve(_square(x), x.mT, left=False),
    "solve_triangular": lambda x: (
        torch.linalg.solve_triangular(_definite(x).tril(), x, upper=False),
        torch.linalg.solve_triangular(_definite(x).triu(), x.mT, upper=True, left=False),
    ),
}
