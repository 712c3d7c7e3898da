"""Every operation that becomes source, its tangents and its products, against PyTorch."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from deeppcr.fuse.expressions import Code, NotCovered
from deeppcr.fuse.operations import is_pointwise, pointwise
from fuse.emitted import Emitted, expected, pulled_back, pushed_forward, trace
from kernel_support import thorough

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


def points(numbers, arguments):
    """[N] each, every number beside every other."""
    grid = torch.cartesian_prod(*[torch.tensor(numbers, dtype=torch.float64)] * arguments)
    return [grid] if arguments == 1 else list(grid.unbind(-1))


@dataclass
class Held:
    """Emitted code of a function, held against the function itself.

    Args:
        function: of tensors
        arguments: [N, ...] each
        rtol, atol: of what is compared
    """

    function: Callable
    arguments: list[torch.Tensor]
    device: torch.device
    folder: Path
    rtol: float = 1e-13
    atol: float = 1e-300

    def __post_init__(self):
        self.primitive = trace(self.function, *(argument[0] for argument in self.arguments))

    def values(self, arguments=None):
        arguments = arguments or self.arguments
        self._compare(self.primitive, self.function, arguments, self.rtol, self.atol)

    def tangents(self):
        """Of the traced function, as a solve takes them, and of the function."""
        self._derive(pushed_forward, [*self.arguments, *(torch.randn_like(argument) for argument in self.arguments)])

    def products(self):
        self._derive(pulled_back, self.arguments)

    def _derive(self, transform, arguments):
        graph = trace(transform(self.primitive), *(argument[0] for argument in arguments))
        self._compare(graph, transform(self.function), arguments, max(self.rtol, 1e-12), max(self.atol, 1e-13))

    def _compare(self, graph, function, arguments, rtol, atol):
        actual = Emitted(graph, *arguments).run(self.device, folder=self.folder)
        for one, other in zip(actual, expected(function, *arguments), strict=True):
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)


#: of which PyTorch knows none
NO_TANGENT = {
    *("floor_divide", "floor_divide_negative", "heaviside", "isfinite", "isinf", "isnan", "logical_not", "logical_xor"),
    *("or", "compare"),
}
#: PyTorch's own has 1/6 in float32; two that are close are subtracted
LOOSE = {"hardsigmoid": 1e-7, "sinc": 1e-8}

#: whose derivatives are looked at in ``make test`` already: kinks, selects, formulas that overflow, and what differs in kind
QUICK = {
    *(
        "abs",
        "clamp",
        "detach",
        "elu",
        "gelu",
        "leaky_relu",
        "pow_3",
        "relu",
        "remainder",
        "sigmoid",
        "silu",
        "softplus",
    ),
    *("sqrt", "tanh", "to_int", "where_numbers", "atan2", "maximum"),
    *(
        "addmm",
        "amax",
        "cat",
        "einsum",
        "in_place",
        "index",
        "layer_norm",
        "matmul",
        "max_dim",
        "norm",
        "roll",
        "slice",
    ),
    *("softmax", "split", "stack", "sum", "var_mean"),
}


def derivatives(cases):
    quick = [name for name in cases if name in QUICK]
    return pytest.mark.parametrize("name", quick + thorough(*(sorted(set(cases) - set(quick) - NO_TANGENT))))


def of_one_number(name, device, folder):
    return Held(UNARY[name], points(ORDINARY, 1), device, folder, LOOSE.get(name, 1e-13))


def of_two_numbers(name, device, folder):
    return Held(BINARY[name], points([-0.7, 1.0, 2.5, -3.0], 2), device, folder)


def of_an_array(name, device, folder):
    return Held(ARRAYS[name], [torch.randn(2, 3, 4, dtype=torch.float64)], device, folder, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", UNARY)
def test_values_of_one_number(name, device, tmp_path):
    of_one_number(name, device, tmp_path).values(points(AWKWARD, 1))


@pytest.mark.parametrize("name", BINARY)
def test_values_of_two_numbers(name, device, tmp_path):
    of_two_numbers(name, device, tmp_path).values(points([*AWKWARD[1::2], nan, 0.0], 2))


@pytest.mark.parametrize("name", ARRAYS)
def test_values_of_arrays(name, device, tmp_path):
    of_an_array(name, device, tmp_path).values()


@derivatives(UNARY)
def test_tangents_of_one_number(name, device, tmp_path):
    of_one_number(name, device, tmp_path).tangents()


@derivatives(BINARY)
def test_tangents_of_two_numbers(name, device, tmp_path):
    of_two_numbers(name, device, tmp_path).tangents()


@derivatives(ARRAYS)
def test_tangents_of_arrays(name, device, tmp_path):
    of_an_array(name, device, tmp_path).tangents()


@pytest.mark.thorough
@derivatives(UNARY)
def test_products_of_one_number(name, device, tmp_path):
    of_one_number(name, device, tmp_path).products()


@pytest.mark.thorough
@derivatives(BINARY)
def test_products_of_two_numbers(name, device, tmp_path):
    of_two_numbers(name, device, tmp_path).products()


@pytest.mark.thorough
@derivatives(ARRAYS)
def test_products_of_arrays(name, device, tmp_path):
    of_an_array(name, device, tmp_path).products()


@pytest.mark.parametrize(
    ("n", "name"),
    [(2, "inv"), *thorough(*((n, name) for n in (1, 2, 3, 4) for name in MATRICES if (n, name) != (2, "inv")))],
)
def test_of_small_matrices(n, name, device, tmp_path):
    arguments = [torch.randn(3, n, 4, dtype=torch.float64)]
    held = Held(MATRICES[name], arguments, device, tmp_path, rtol=1e-8, atol=1e-9)
    held.tangents()
    held.products()


@pytest.mark.parametrize("n", [2, *thorough(1, 3, 4)])
def test_values_of_small_matrices(n, device, tmp_path):
    def all_of_them(x):
        return [MATRICES[name](x) for name in MATRICES]

    Held(all_of_them, [torch.randn(3, n, 4, dtype=torch.float64)], device, tmp_path, rtol=1e-10).values()


NOT_COVERED = {
    "aten.sort": lambda x: x.sort().values,
    "aten.topk": lambda x: x.topk(2).values,
    "aten.median": lambda x: x.median(),
    "aten.lgamma": lambda x: torch.lgamma(x),
    "aten.rand_like": lambda x: x + torch.rand_like(x),
    "aten._linalg_svd": lambda x: torch.linalg.svdvals(torch.outer(x, x)),
    "aten.linalg_inv_ex": lambda x: torch.linalg.inv(torch.outer(x, x) + torch.eye(5)),  # too wide
    "aten._fft_r2c of complex numbers": lambda x: torch.fft.fft(x).abs(),
    "aten.add of complex numbers": lambda x: (x + 1j).abs(),
    "an index that is computed": lambda x: x.gather(0, x.argmax(keepdim=True)),
    "float64 beside other floating dtypes": lambda x: x.double().exp().float() + x.sin(),
}


@pytest.mark.parametrize("name", NOT_COVERED)
def test_what_is_not_covered_is_named(name):
    with pytest.raises(NotCovered, match=f"^{re.escape(name)} is not covered"):
        Emitted(NOT_COVERED[name], torch.randn(2, 5))


def test_in_place_is_not_covered():
    """Whoever traces takes it away: what else sees the tensor is not in the graph."""

    def step(x):
        y = x * 2
        y[0].add_(1)
        return y

    graph = make_fx(step, tracing_mode="fake")(torch.randn(3))
    with pytest.raises(NotCovered, match=r"aten\.add_, which changes a tensor in place, is not covered"):
        Emitted(graph, torch.randn(2, 3))


def test_numbers_are_rounded_as_tensors_are(device, tmp_path):
    """A number in a tensor of float32, within a step in float64."""
    Held(lambda x: x * torch.full((3,), 0.1), [torch.randn(2, 3, dtype=torch.float64)], device, tmp_path).values()
    emitted = Emitted(lambda x: x * torch.full((3,), 0.1), torch.randn(2, 3, dtype=torch.float64))
    assert emitted.code.numbers == [torch.tensor(0.1).item()]


def test_one_channel_of_a_pointwise_step(device):
    """As the elementwise placement does: each node by itself, on scalars."""

    def step(z, x):
        return torch.where(z > x, torch.tanh(z) * 0.3, torch.clamp(x, min=z)).to(torch.float64)

    numbers = [torch.randn(4, dtype=torch.float64) for _ in range(2)]
    graph, code, known = trace(step, *numbers).graph, Code(), {}
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = code.input(f"x{len(known)}_0")
        elif node.op == "call_function":
            assert is_pointwise(node)
            known[node] = pointwise(node, [known.get(argument, argument) for argument in node.args], code)
    result = known[next(node for node in graph.nodes if node.op == "output").args[0]]
    whole = Emitted(step, *(each[:, None] for each in numbers))
    assert code.lines(1, [result]) == whole.lines
    assert code.numbers == whole.code.numbers
    torch.testing.assert_close(whole.by_numpy()[0], step(*numbers))


def test_what_is_not_pointwise():
    graph = trace(lambda x: (x.sum() + x[0]).relu(), torch.randn(3)).graph
    named = {str(node.target): is_pointwise(node) for node in graph.nodes if node.op == "call_function"}
    assert not named["aten.sum.dim_IntList"]
    assert not named["aten.select.int"]
    assert named["aten.relu.default"]
