"""Every operation that becomes source, its tangents and its products, against PyTorch."""

import math
import re

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from deeppcr.fuse.expressions import Code, NotCovered
from deeppcr.fuse.operations import check_dtypes, is_pointwise, pointwise
from fuse.cases import ARRAYS, AWKWARD, BINARY, MATRICES, NO_TANGENT, ORDINARY, UNARY
from fuse.emitted import Emitted, expected, pulled_back, pushed_forward, trace
from kernel_support import thorough


def points(numbers, arguments):
    """[N] each, every number beside every other."""
    grid = torch.cartesian_prod(*[torch.tensor(numbers, dtype=torch.float64)] * arguments)
    return [grid] if arguments == 1 else list(grid.unbind(-1))


def of_itself(function):
    return function


def compare(cases, arguments, transform, device, folder, rtol=1e-13, atol=1e-300):
    """Emitted code of functions, as one program, with what PyTorch computes by the functions themselves.

    Args:
        cases: functions by their names
        arguments: [N, ...] each
        transform: of the functions, after they were decomposed, as a solve takes derivatives
    """
    first = [argument[0] for argument in arguments]
    tensors = first[: len(first) // 2] if transform is pushed_forward else first
    primitives = [trace(function, *tensors) for function in cases.values()]
    graph = trace(lambda *lane: [transform(primitive)(*lane) for primitive in primitives], *first)
    actual = iter(Emitted(graph, *arguments).run(device, folder=folder))
    for name, function in cases.items():
        for right in expected(transform(function), *arguments):
            loose = {"rtol": max(rtol, LOOSE.get(name, 0)), "atol": atol, "equal_nan": True}
            torch.testing.assert_close(next(actual), right, msg=lambda text, name=name: f"{name}: {text}", **loose)


def compare_derivatives(cases, arguments, transform, device, folder):
    cases = {name: function for name, function in cases.items() if name not in NO_TANGENT}
    if transform is pushed_forward:
        arguments = [*arguments, *(torch.randn_like(argument) for argument in arguments)]
    compare(cases, arguments, transform, device, folder, rtol=1e-12, atol=1e-13)


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
FAMILIES = {"one number": UNARY, "two numbers": BINARY, "arrays": ARRAYS}


def arguments_of(family, numbers):
    if family == "arrays":
        return [torch.randn(2, 3, 4, dtype=torch.float64)]
    return points(numbers, 1 if family == "one number" else 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_values(family, device, tmp_path):
    numbers = [*AWKWARD[1::2], math.nan, 0.0] if family == "two numbers" else AWKWARD
    rounding = {"rtol": 1e-12, "atol": 1e-14} if family == "arrays" else {}
    compare(FAMILIES[family], arguments_of(family, numbers), of_itself, device, tmp_path, **rounding)


@pytest.mark.thorough
def test_what_another_pytorch_may_leave_whole(device, tmp_path):
    """Rules of operations that are decomposed today, as other versions of PyTorch may not do."""
    arguments = [torch.randn(2, 3, 4, dtype=torch.float64)]
    graphs = {name: trace(function, arguments[0][0], decompositions={}) for name, function in ARRAYS.items()}
    held = set()
    for name, graph in graphs.items():
        try:
            emitted = Emitted(graph, *arguments)
        except NotCovered:
            continue
        held.add(name)
        for actual, right in zip(emitted.run(device, folder=tmp_path), expected(ARRAYS[name], *arguments), strict=True):
            torch.testing.assert_close(actual, right, rtol=1e-12, atol=1e-14)
    assert held >= {
        "addmm",
        "baddbmm",
        "cumsum",
        "mv",
        "roll",
        "select_scatter",
        "split",
        "stack",
        "std",
        "tril",
        "unbind",
        "zeros",
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("transform", "cases"),
    [(pushed_forward, "quick"), *thorough((pushed_forward, "others"), (pulled_back, "others"), (pulled_back, "quick"))],
)
def test_derivatives(family, transform, cases, device, tmp_path):
    numbers = [-0.7, 1.0, 2.5, -3.0] if family == "two numbers" else ORDINARY
    chosen = {name: function for name, function in FAMILIES[family].items() if (name in QUICK) == (cases == "quick")}
    compare_derivatives(chosen, arguments_of(family, numbers), transform, device, tmp_path)


def test_a_select_hides_no_nan(device, tmp_path):
    """PyTorch's formulas would give the product of 0 and infinity for what overflows beside what is selected."""
    chosen = {name: UNARY[name] for name in ("celu", "mish", "sinc", "softplus")}
    compare_derivatives(chosen, points(ORDINARY, 1), pulled_back, device, tmp_path)


@pytest.mark.parametrize("n", [2, *thorough(1, 3, 4)])
def test_values_of_small_matrices(n, device, tmp_path):
    compare(MATRICES, [torch.randn(3, n, 4, dtype=torch.float64)], of_itself, device, tmp_path, rtol=1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("transform", [pushed_forward, pulled_back])
def test_derivatives_of_small_matrices(n, name, transform, device, tmp_path):
    arguments = [torch.randn(3, n, 4, dtype=torch.float64) for _ in range(2 if transform is pushed_forward else 1)]
    compare({name: MATRICES[name]}, arguments, transform, device, tmp_path, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("cell", "fused"), [(nn.GRUCell, "gru"), (nn.LSTMCell, "lstm")])
def test_cells_as_a_gpu_has_them(cell, fused, bias):
    """One operation, which a CPU only knows by name; against the cell itself, and its derivatives."""
    cell = cell(2, 3, bias, dtype=torch.float64)
    x, h, c = (torch.randn(4, size, dtype=torch.float64) for size in (2, 3, 3))
    biases = [cell.bias_ih.detach(), cell.bias_hh.detach()] if bias else []
    operation = getattr(torch.ops.aten, f"_thnn_fused_{fused}_cell").default

    def by_operation(x, h, c):
        gates = x @ cell.weight_ih.detach().mT, h @ cell.weight_hh.detach().mT
        return operation(*gates, h if fused == "gru" else c, *biases)[: 1 if fused == "gru" else 2]

    def by_cell(x, h, c):
        found = cell(x, h if fused == "gru" else (h, c))
        return [found] if fused == "gru" else found

    for transform in (of_itself, pulled_back):
        graph = trace(transform(trace(by_operation, x, h, c)), x, h, c)
        for one, other in zip(graph(x, h, c), transform(by_cell)(x, h, c), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
        Emitted(graph, *(each.unsqueeze(0) for each in (x, h, c)))


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
}


@pytest.mark.parametrize("name", NOT_COVERED)
def test_what_is_not_covered_is_named(name):
    with pytest.raises(NotCovered, match=f"^{re.escape(name)} is not covered"):
        Emitted(NOT_COVERED[name], torch.randn(2, 5))


def _rounded(x):
    return x.float().double()


@pytest.mark.parametrize(
    "step", [lambda x: x.float().exp().double() * x, _rounded, lambda x: x.sum() + x.float().sum()]
)
def test_two_precisions_are_not_covered(step):
    with pytest.raises(NotCovered, match="float64 beside other floating dtypes is not covered"):
        check_dtypes(trace(step, torch.randn(3, dtype=torch.float64)).graph)


def test_numbers_have_no_precision(device, tmp_path):
    """Numbers in tensors of float32, selected in a step in float64, and in float64 in one in float32."""

    def select(x):
        return torch.where(x > 0, 0.1, -2.0) * x + torch.arange(3) * 0.1 + x.new_ones(3, dtype=torch.float32)

    check_dtypes(trace(select, torch.randn(3, dtype=torch.float64)).graph)
    compare({"select": select}, [torch.randn(2, 3, dtype=torch.float64)], of_itself, device, tmp_path)
    check_dtypes(trace(lambda x: x * torch.tensor(0.3, dtype=torch.float64) + 0.1, torch.randn(3)).graph)


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
    x = torch.randn(2, 3, dtype=torch.float64)
    compare({"full": lambda x: x * torch.full((3,), 0.1)}, [x], of_itself, device, tmp_path)
    emitted = Emitted(lambda x: x * torch.full((3,), 0.1), x)
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
