"""More elements than 32 bits can count: every place in memory is computed in 64.

A wrong place shows where the equations are looked at one by one, in parts that fit beside what they are of.
"""

import tempfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import deeppcr
from deeppcr import linear

#: Elements of the largest tensor. The few show that the checks hold where nothing can go wrong.
FEW, MANY = 2**12, 2**31 + 2**10
#: Bytes that have to be free: of the largest tensors, 8 GiB each, there are up to six.
NEEDED = 80 * 2**30
#: Elements that are looked at at a time.
PART = 2**26
TOLERANCE = 2e-5


@pytest.fixture(params=[FEW, pytest.param(MANY, marks=pytest.mark.gpu)], ids=["few", "many"])
def elements(request, device):
    """One test of the many at a time: two of them do not fit."""
    if request.param == FEW:
        yield FEW
        return
    if device.type != "cuda":
        pytest.skip("needs a GPU: --device=cuda")
    with FileLock(Path(tempfile.gettempdir()) / "deeppcr-huge-tests.lock"):
        deeppcr.clear_caches()
        torch.cuda.empty_cache()
        if (free := torch.cuda.mem_get_info(device)[0]) < NEEDED:
            pytest.skip(f"needs {NEEDED >> 30} GiB on the GPU, {free >> 30} are free")
        yield MANY
        deeppcr.clear_caches()
        torch.cuda.empty_cache()


def steps_of(elements, each):
    """So many steps of ``each`` elements are more than asked for, and one more than a round number."""
    return elements // each + 2


def worst(length, size, difference):
    """The largest element of ``difference(part)`` over steps 1 ... length - 1, in parts of some steps of ``size`` elements."""
    many = max(1, PART // size)
    return max(
        float(difference(slice(first, min(first + many, length))).abs().max()) for first in range(1, length, many)
    )


def before(part):
    return slice(part.start - 1, part.stop - 1)


SHAPES = {"long": (1, 64), "rows": (4099, 1), "wide": (33, 4097)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("reverse", [False, True])
def test_diagonal_systems(shape, reverse, elements, device):
    length, size = steps_of(elements, shape[0] * shape[1]), shape[0] * shape[1]
    blocks = torch.rand(length, *shape, device=device) - 0.5
    rhs = torch.rand(length, *shape, device=device)
    z = linear.solve(linear.Diagonal(blocks), rhs, reverse=reverse)
    earlier, later = (lambda part: part, before) if reverse else (before, lambda part: part)
    assert (
        worst(length, size, lambda part: z[later(part)] - blocks[later(part)] * z[earlier(part)] - rhs[later(part)])
        < TOLERANCE
    )
    edge = -1 if reverse else 0
    torch.testing.assert_close(z[edge], rhs[edge])


@pytest.mark.parametrize("rows", [1, 7])
def test_dense_systems(rows, elements, device):
    width, length = 8, steps_of(elements, rows * 8 * 8)
    blocks = (torch.rand(length, rows, width, width, device=device) - 0.5).mul_(0.5)
    rhs = torch.rand(length, rows, width, device=device)
    z = linear.solve(linear.Dense(blocks), rhs)

    def difference(part):
        return z[part] - (blocks[part] @ z[before(part)].unsqueeze(-1)).squeeze(-1) - rhs[part]

    assert worst(length, rows * width**2, difference) < TOLERANCE


def test_filters(elements, device):
    b, a = torch.tensor([0.2, 0.3, -0.1], device=device), torch.tensor([1.0, -0.8, 0.3], device=device)
    x = torch.rand(steps_of(elements, 3), 3, device=device)
    y = linear.lfilter(b, a, x)

    def difference(part):
        first = max(part.start, 2)
        past = [slice(first - k, part.stop - k) for k in range(3)]
        return sum(a[k] * y[each] - b[k] * x[each] for k, each in enumerate(past))

    assert worst(len(x), 3, difference) < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_loops_and_their_gradients(shape, elements, device):
    length, size = steps_of(elements, shape[0] * shape[1]), shape[0] * shape[1]
    xs = torch.rand(length, *shape, device=device, requires_grad=True)
    z = deeppcr.solve(lambda z, x: 0.5 * torch.tanh(z) + x, torch.zeros(shape, device=device), xs).states
    z.sum().backward()
    z, x, g = z.detach(), xs.detach(), xs.grad
    assert g is not None
    torch.testing.assert_close((z[0], g[-1]), (x[0], torch.ones_like(x[0])))
    assert worst(length, size, lambda part: z[part] - 0.5 * torch.tanh(z[before(part)]) - x[part]) < TOLERANCE
    # Adjoints, from the last state backwards.
    assert (
        worst(length, size, lambda part: g[before(part)] - 1 - 0.5 * (1 - torch.tanh(z[before(part)]) ** 2) * g[part])
        < TOLERANCE
    )


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_networks(mode, elements, device):
    """Weights, and their gradients."""
    width, rows = 64, 3
    length = steps_of(elements, width**2)
    net = deeppcr.nn.MLP(1, width, 1, 1, "tanh", mode=mode, device=device)
    with torch.no_grad():
        net.weight = torch.nn.Parameter(torch.empty(length, width, width, device=device).uniform_(-0.125, 0.125))
        net.bias = torch.nn.Parameter(torch.empty(length, width, device=device).uniform_(-0.5, 0.5))
    start = torch.rand(rows, width, device=device)
    states = net.hidden_states(start)
    states.sum().backward()
    z, weight, bias = states.detach(), net.weight.detach(), net.bias.detach()

    def layer(part):
        return torch.tanh(z[before(part)]) @ weight[part].mT + bias[part].unsqueeze(1)

    assert worst(length, width**2, lambda part: z[part] - layer(part)) < TOLERANCE
    # The gradient of a bias is the sum of the rows' adjoints; that of a weight, at one place, what the layer below makes of them.
    last = slice(length - 1, length)
    torch.testing.assert_close(net.bias.grad[last], torch.full_like(bias[last], rows))
    ones = torch.ones(rows, width, device=device)
    for layers in (last, slice(length - 2, length - 1)):
        expected = ones.mT @ torch.tanh(z[before(layers)][0])
        torch.testing.assert_close(net.weight.grad[layers][0], expected, rtol=1e-4, atol=1e-4)
        ones = 1 + (ones @ weight[layers][0]) * (1 - torch.tanh(z[before(layers)][0]) ** 2)
    assert bool(net.weight.grad[0].isfinite().all())


def test_recurrent_layers(elements, device):
    """The last rows are those that they are by themselves."""
    hidden, length = 32, 64
    rows = steps_of(elements, 3 * hidden * length)
    layer = deeppcr.nn.GRU(4, hidden, batch_first=True, mode="parallel", device=device)
    x = torch.rand(rows, length, 4, device=device)
    with torch.no_grad():
        found, _ = layer(x)
        for some in (slice(0, 2), slice(rows - 2, rows)):
            torch.testing.assert_close(found[some], layer(x[some])[0], rtol=1e-4, atol=1e-5)
