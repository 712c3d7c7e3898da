"""Derivatives along tangents are those of ``torch.func.jvp`` to the last bit, wherever they were taken by parts."""

import itertools

import pytest
import torch
from torch import nn
from torch.func import jvp, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from deeppcr.sequence import forward_mode
from deeppcr.sequence.evaluate import StepGroup
from deeppcr.sequence.forward_mode import pushed_forward
from deeppcr.sequence.layout import Layout

make = torch.Generator().manual_seed(0)


def numbers(*shape, dtype=torch.float32):
    return (torch.rand(shape, generator=make) + 0.5).to(dtype)


OPERATIONS = {
    "z * c": lambda z, c: z * c,
    "c * z": lambda z, c: c * z,
    "z + c": lambda z, c: z + c,
    "c + z": lambda z, c: c + z,
    "z - c": lambda z, c: z - c,
    "c - z": lambda z, c: c - z,
    "z / c": lambda z, c: z / c,
    "c / z": lambda z, c: c / z,
    "torch.mul": torch.mul,
    "torch.add": torch.add,
    "torch.sub": torch.sub,
    "torch.div": torch.div,
}
CONSTANTS = {
    "tensor": numbers(2, 4),
    "parameter": nn.Parameter(numbers(2, 4)),
    "larger": numbers(3, 2, 4),
    "smaller": numbers(4),
    "without dimensions": numbers(),
    "double": numbers(2, 4, dtype=torch.float64),
    "double without dimensions": numbers(dtype=torch.float64),
    "half": numbers(2, 4, dtype=torch.float16),
    "integers": torch.arange(1, 5),
    "complex": numbers(2, 4, dtype=torch.complex64),
    "float": 1.7,
    "int": 3,
    "bool": True,
    "infinite": float("inf"),
    "transposed": numbers(4, 2).mT,
}


def assert_equal(one, other):
    """Also which zeros are negative."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    for part in ("real", "imag") if one.is_complex() else ("real",):
        sign = [torch.signbit(getattr(each, part))[~each.isnan()] for each in (one, other)]
        assert torch.equal(*sign)


def assert_same(function, z, tangent, ways=slice(None)):
    """Of one tangent, of several, and of several steps."""
    for make_jvp in (
        lambda push: push(function, z, tangent),
        lambda push: vmap(lambda t: push(function, z, t))(torch.stack([tangent, 2 * tangent])),
        lambda push: vmap(lambda z, t: push(function, z, t))(torch.stack([z, z / 3]), torch.stack([tangent, tangent])),
    )[ways]:
        expected = make_jvp(lambda function, z, t: jvp(function, (z,), (t,)))
        for one, other in zip(make_jvp(pushed_forward), expected, strict=True):
            assert_equal(one, other)


@pytest.mark.parametrize("constant", CONSTANTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_like_jvp(operation, constant, device):
    c = CONSTANTS[constant]
    c = c.to(device) if isinstance(c, torch.Tensor) else c
    if c is True and operation in ("z - c", "c - z", "torch.sub"):
        pytest.skip("PyTorch subtracts no bool")
    z, tangent = numbers(2, 4).to(device), numbers(2, 4).to(device)
    assert_same(lambda z: OPERATIONS[operation](z, c), z, tangent, ways=slice(2, 3))


IN_PLACE = {
    "times a constant": lambda y, c: y.mul_(c),
    "plus the state": lambda y, c: y.add_(c * 2),
    "relu": lambda y, c: functional.relu(y, inplace=True),
    "a column": lambda y, c: y[:, 1].mul_(3.0),
    "a number": lambda y, c: y.__setitem__((slice(None), 1), 2.0),
    "another": lambda y, c: y.copy_(c),
}


@pytest.mark.parametrize("written", IN_PLACE)
@pytest.mark.parametrize("operation", [*OPERATIONS, "linear"])
def test_what_is_written_in_place_changes_nothing_else(operation, written, device):
    """Neither what the operation was given, nor, where that is written to, what it gave."""
    make = OPERATIONS.get(operation, lambda z, c: functional.linear(z, torch.eye(4, device=z.device), c[0]))
    z, tangent, c = (numbers(2, 4).to(device) for _ in range(3))
    for constant in (c,) if operation == "linear" else (c, c[0, 0], 0.5, 1, 0):
        for of_result in (True, False):

            def step(z, constant=constant, of_result=of_result):
                given = z * 1.5 + c
                found = make(given, constant)
                IN_PLACE[written](found if of_result else given, c)
                return found * 2 + given

            if isinstance(constant, torch.Tensor) or not operation.startswith("c"):
                assert_same(step, z, tangent, ways=slice(0, 1))


@pytest.mark.parametrize("bias", [None, numbers(3)], ids=["without", "bias"])
def test_linear_layers(bias, device):
    weight, bias = numbers(3, 4).to(device), None if bias is None else bias.to(device)
    z, tangent = numbers(2, 4).to(device), numbers(2, 4).to(device)
    assert_same(lambda z: functional.linear(z, weight, bias), z, tangent)
    assert_same(lambda z: functional.linear(z, z[:1].expand(3, 4), bias), z, tangent)
    assert_same(lambda z: functional.linear(z, weight, z[0, :3]), z, tangent)
    assert_same(lambda z: functional.linear(weight, z[:, :4], z[0, :2]), z, tangent)


def changed_in_place(z, c):
    """What is made by parts is nobody else's memory."""
    changed = z + c
    changed.mul_(3.0)
    other = c - z
    other.add_(z)
    return changed * z + other


def detached(z, c):
    return (z.detach() * c + z) * z.detach()


def without_gradients(z, c):
    with torch.no_grad():
        return (z * c - 1) / c


def with_transforms_of_its_own(z, c):
    inner, along = jvp(lambda y: y * c + z, (z * 2,), (z,))
    slope = torch.func.grad(lambda y: (y * c + z * y).sum())(z)
    return inner + along * slope + vmap(lambda row: row * z[0] + c[0] * row)(z)


def both(z, c):
    y = z * c + 1.5
    return y * z + y / (z + c) - (z - y)


def with_options(z, c):
    return torch.add(z, c, alpha=2) - torch.div(z, c, rounding_mode="floor") + torch.sub(c, z, alpha=0.5)


def with_constants_of_its_own(z, c):
    """Inside of a transform they look like what depends on the state."""
    gate, rest = c.chunk(2, -1)
    return torch.cat(
        [z[..., :2] * gate + rest, (1 - rest) / z[..., 2:] - functional.linear(z, c.exp(), gate[:, 0])], -1
    )


def with_numbers(z, c):
    return (
        (2.5 / z - 0.0) * -1.0
        + (z / 3 - z * True)
        - (1 - z) * 0.0
        + torch.true_divide(z, 2)
        - torch.multiply(z, c).neg()
    )


def with_positional_alpha(z, c):
    return torch.add(z, 2, c) + torch.sub(z, 0.5, c)


def under_autocast(z, c):
    with torch.autocast(z.device.type, torch.bfloat16):
        layered = functional.linear(z, c, c[:, 0])
    return torch.tanh(layered.to(z.dtype) * c[0, :2] + 1)


def with_zeros(z, c):
    zero = torch.zeros_like(c)
    return (z * zero - c) * -zero + (-z + zero) / c


def left_detached(z, c):
    """PyTorch detaches no view in place, and what is made by parts is one."""
    kept = z * c
    kept.detach_()
    return kept + z


STEPS = [
    with_numbers,
    with_positional_alpha,
    under_autocast,
    with_zeros,
    left_detached,
    with_constants_of_its_own,
    changed_in_place,
    detached,
    without_gradients,
    with_transforms_of_its_own,
    both,
    with_options,
]


@pytest.mark.parametrize("step", STEPS, ids=[each.__name__ for each in STEPS])
def test_steps_like_jvp(step, device):
    c, z, tangent = (numbers(2, 4).to(device) for _ in range(3))
    assert_same(lambda z: step(z, c), z, tangent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.complex128])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_states_of_other_dtypes(operation, dtype, device):
    z, tangent = numbers(2, 4, dtype=dtype).to(device), numbers(2, 4, dtype=dtype).to(device)
    if dtype.is_complex:
        z, tangent = z * (1 + 2j), tangent * (2 - 1j)
    for c in (
        numbers(2, 4),
        numbers(dtype=torch.float64),
        numbers(4, dtype=torch.complex64),
        numbers(2, 4, dtype=dtype),
    ):
        assert_same(lambda z: OPERATIONS[operation](z, c.to(device)), z, tangent)  # noqa: B023


def test_operations_in_place_where_steps_share_a_tangent(device):
    """As they do for Jacobians of which the structure is known."""
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)).to(device).requires_grad_(False)
    z = numbers(2, 5, 4).to(device)
    step, tangents = lambda z: network(z).mul_(0.5).add_(z), torch.ones(1, 1, 5, 4, device=device)
    group = StepGroup(step, None, Layout.of(z[0], None))
    found = group.push(z, tangents, slice(0, 2))
    assert (group.way, group.derivative, group.notes) == ("vmap", "forward", [])
    for each, other in zip(found, jvp(step, (z,), (tangents[:, 0].expand_as(z),)), strict=True):
        torch.testing.assert_close(each.reshape(z.shape), other)


@pytest.mark.parametrize(
    "operation",
    [torch.frac, lambda z: z % 3.0, lambda z: torch.remainder(z, 3), lambda z: z.fmod(2.0), lambda z: z - 0.5],
)
@pytest.mark.parametrize("write", [lambda y, z: y.neg_(), lambda y, z: y.add_(z), lambda y, z: y.mul_(0.5)])
def test_what_is_written_in_place_into_a_tangent_that_was_handed_on(operation, write, device):
    def step(z):
        y = operation(z)
        write(y, z)
        return y + z

    z, tangents = numbers(2, 5, 4).to(device), numbers(1, 3, 5, 4).to(device)
    group, kept = StepGroup(step, None, Layout.of(z[0], None)), tangents.clone()
    slope = torch.autograd.functional.jacobian(lambda z: step(z * 1).sum(), z)
    for _ in range(2):
        _, pushed = group.push(z, tangents, slice(0, 2))
        torch.testing.assert_close(pushed, slope.unsqueeze(1) * kept)
        assert torch.equal(tangents, kept)


class Doubled(torch.autograd.Function):
    """Without forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z):
        return 2 * z

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, given):
        return 2 * given


@pytest.mark.parametrize(
    ("step", "shared"), [(torch.tanh, True), (lambda z: (z + 1).mul_(z), False), (lambda z: Doubled.apply(z) / 3, True)]
)
def test_tangents_are_shared_where_that_goes(step, shared, device):
    """A linear layer then multiplies those of one step, not of all. Reverse mode shares them, whatever forward mode tried before."""
    group = StepGroup(step, None, Layout.of(torch.ones(5, 4, device=device), None))
    group.push(numbers(2, 5, 4).to(device), torch.ones(1, 1, 5, 4, device=device), slice(0, 2))
    assert group._shares_tangents is shared
    assert group.way == "vmap"


@pytest.mark.parametrize("operation", ["z * c", "z + c", "z - c", "c - z", "z / c", "c / z"])
def test_a_tangent_without_dimensions_keeps_its_dtype(operation, device):
    z, tangent = numbers().to(device), numbers().to(device)
    value, pushed = pushed_forward(lambda z: OPERATIONS[operation](z, 2.5), z, tangent)
    expected, double = jvp(lambda z: OPERATIONS[operation](z, 2.5), (z,), (tangent,))
    assert value == expected
    assert pushed.dtype == torch.float32
    assert torch.allclose(pushed, double.float(), rtol=1e-6)


def test_derivatives_of_derivatives(device):
    c, z, tangent = (numbers(2, 4).to(device) for _ in range(3))

    def twice(push):
        given = z.clone().requires_grad_()
        value, pushed = push(lambda z: torch.tanh(z * c + 1.0) / c - z, given, tangent)
        return torch.autograd.grad((value * pushed).sum(), given)[0]

    assert torch.equal(twice(pushed_forward), twice(lambda function, z, t: jvp(function, (z,), (t,))))


class Power(torch.Tensor):
    """Whose products are none."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), named=None):
        with torch._C.DisableTorchFunctionSubclass():
            return torch.pow(*arguments) if function is torch.Tensor.mul else function(*arguments, **(named or {}))


def test_what_is_no_tensor_of_pytorchs_own_is_left_to_itself(device):
    c, z, tangent = (numbers(2, 4).to(device) for _ in range(3))
    assert_same(lambda z: z * c.as_subclass(Power), z, tangent)
    assert_same(lambda z: c.as_subclass(Power) * z, z, tangent)


class Doubling(TorchFunctionMode):
    """A caller's own, which sees what the step asks for and not the parts of it."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        found = function(*arguments, **(named or {}))
        return found * 2 if function in (torch.Tensor.mul, torch.Tensor.add) else found


def test_modes_of_the_caller_see_the_step_itself(device):
    c, z, tangent = (numbers(2, 4).to(device) for _ in range(3))
    with Doubling():
        assert_same(lambda z: torch.tanh(z * c) + z, z, tangent)


def test_a_default_device_changes_nothing(device, monkeypatch):
    c, z, tangent = (numbers(2, 4).to(device) for _ in range(3))
    with device:
        assert_same(lambda z: torch.tanh(z * c) + torch.ones(4) * z, z, tangent)
        monkeypatch.setattr(forward_mode, "jvp", lambda function, *given: (function.__name__, None))
        assert pushed_forward(torch.sin, z, tangent)[0] == "by_parts"
    with Doubling():
        assert pushed_forward(torch.sin, z, tangent)[0] == "sin"


def test_inference_tensors(device):
    with torch.inference_mode():
        c = numbers(2, 4).to(device)
        z, tangent = (numbers(2, 4).to(device) for _ in range(2))
        assert_same(
            lambda z: (z * c + c) / c - 1, z, tangent, slice(1)
        )  # under vmap PyTorch 2.11 has no forward mode here
    z, tangent = (numbers(2, 4).to(device) for _ in range(2))
    assert_same(lambda z: (z * c + c) / c - 1, z, tangent)


def test_errors_of_a_step_are_its_own(device):
    calls = []

    def fails(z):
        calls.append(1)
        raise KeyError("not here")

    with pytest.raises(KeyError, match="not here"):
        pushed_forward(fails, numbers(3).to(device), numbers(3).to(device))
    assert len(calls) == 2


def test_what_is_done_by_parts(monkeypatch, device):
    """PyTorch's own way gives the same, at ten times the time."""
    c, z, tangent = (numbers(2, 4).to(device) for _ in range(3))
    found = []
    for function, rule in forward_mode._RULES.items():
        spy = lambda *given, rule=rule: found.append(rule(*given)) or found[-1]  # noqa: E731
        monkeypatch.setitem(forward_mode._RULES, function, spy)
    operations = {**OPERATIONS, "linear": lambda z, c: functional.linear(z, c, c[:, 0])}
    parameter = nn.Parameter(c)
    for (name, operation), other in itertools.product(operations.items(), (c, parameter, 2.0)):
        if isinstance(other, torch.Tensor) or name not in (
            "c - z",
            "linear",
        ):  # nothing is to be gained in the one, and the other is not there
            found.clear()
            pushed_forward(lambda z: operation(z, other), z, tangent)  # noqa: B023
            by_parts = len(found) == 1 and found[0] is not None
            assert by_parts == (name != "c / z" or not isinstance(other, torch.Tensor)), name
