"""Emitted code in kernels, interpreted or compiled: the functions, and random programs of operations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deeppcr.fuse.expressions import FUNCTIONS
from fuse.emitted import Emitted, expected, pulled_back, pushed_forward, trace
from kernel_support import thorough

#: by their names in libdevice, where PyTorch has other ones
IN_PYTORCH = {"rint": torch.round}
TWO = {"atan2", "fmod", "hypot", "pow"}
NUMBERS = [-1e4, -30.0, -2.5, -1.0, -0.7, -1e-6, 0.0, 1e-6, 1e-3, 0.3, 0.5, 1.0, 1.5, 2.0, 7.0, 40.0, 80.0, 1e4]


def in_pytorch(name):
    return IN_PYTORCH.get(name) or getattr(torch, name)


def every_function(x, y):
    """Whatever functions there are, of one number and of two."""
    return [in_pytorch(name)(x, y) if name in TWO else in_pytorch(name)(x) for name in sorted(FUNCTIONS)]


def ulps(actual, right, dtype):
    """How many units in the last place lie between two numbers; 0 between two of NaN or equal infinities."""
    same = (actual == right) | (actual.isnan() & right.isnan())
    unit = torch.finfo(dtype).eps * right.abs().clamp(min=torch.finfo(dtype).tiny)
    return torch.where(same, 0.0, (actual - right).abs() / unit)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_functions_have_pytorchs_digits(dtype, device, tmp_path):
    """Each within 4 units in the last place of PyTorch's on that device, or of what is right: on some CPUs its erf has no digits near 0."""
    x = torch.tensor(NUMBERS, dtype=dtype)
    y = x.roll(5)
    theirs = every_function(x.to(device), y.to(device))
    right = [each.to(dtype) for each in every_function(x.double(), y.double())]
    # By name, not by what PyTorch would trace some of them into.
    emitted = Emitted(lambda x, y: [x * y], x, y)
    a, b = (emitted.code.input(name) for name in ("x0_0", "x1_0"))
    calls = [emitted.code.call(name, a, b) if name in TWO else emitted.code.call(name, a) for name in sorted(FUNCTIONS)]
    emitted.finish([()] * len(calls), calls)
    actual = emitted.by_kernel(tmp_path, device, dtype)
    for name, one, *others in zip(sorted(FUNCTIONS), actual, theirs, right, strict=True):
        assert torch.minimum(*(ulps(one, other.cpu(), dtype) for other in others)).max() <= 4, name


def test_kinds_in_a_kernel(device, tmp_path):
    """Selects of numbers, integers, bools and numbers that are arguments."""

    def step(x, y):
        whole = (x * 3).clamp(-9, 9).to(torch.int64)
        mask = (x > 0) ^ (y > 0.3)
        chosen = torch.where(mask, 0.1, 2.0).to(x.dtype).exp() + torch.where(~mask, 1.0, math.inf)
        return (
            chosen,
            mask,
            whole % 4,
            whole // -3 * x,
            whole.sign() + mask,
            x.new_full((), 0.3),
            x.relu(),
            -x.abs() / 3,
        )

    numbers = torch.randn(5, dtype=torch.float64)
    arguments = numbers, numbers.flip(0)
    for one, other in zip(
        Emitted(step, *arguments).by_kernel(tmp_path, device), expected(step, *arguments), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=0)


class Programs:
    """Random programs of operations on vectors of three numbers."""

    UNARY = (
        *(
            torch.sin,
            torch.tanh,
            torch.sigmoid,
            torch.relu,
            torch.abs,
            torch.neg,
            torch.floor,
            torch.square,
            torch.sign,
        ),
        *(lambda x: x.exp().clamp(max=9), lambda x: (x.abs() + 0.1).log(), lambda x: (x.abs() + 0.1).sqrt()),
        *(lambda x: x.roll(1), lambda x: x.flip(0), lambda x: x.sum().expand(3), lambda x: x.cumsum(0)),
        *(lambda x: x.softmax(0), lambda x: x.amax().expand(3), lambda x: torch.cat([x[1:], x[:1] * 2])),
        *(lambda x: torch.nn.functional.layer_norm(x, (3,)), lambda x: x[[0, 2, 2]], lambda x: x / (1 + x.norm())),
        *(lambda x: 0.3 * x + 1, lambda x: torch.outer(x, x) @ x, lambda x: x.remainder(0.7), lambda x: x.new_zeros(3)),
    )
    BINARY = (
        *(torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.atan2),
        *(lambda x, y: x / (1 + y * y), lambda x, y: torch.where(x > y, x, y * 2), lambda x, y: x * (y > 0)),
        *(lambda x, y: x.lerp(y, 0.2), lambda x, y: torch.dot(x, y) * x, lambda x, y: torch.stack([x, y]).mean(0)),
    )

    @classmethod
    def make(cls, choices):
        """A function that begins with two vectors and goes on with results of its own, each used as a choice says."""

        def program(x, y):
            known = [x, y]
            for kind, first, second in choices:
                a, b = known[first % len(known)], known[second % len(known)]
                unary = cls.UNARY[kind % len(cls.UNARY)]
                result = unary(a) if kind < len(cls.UNARY) else cls.BINARY[kind - len(cls.UNARY)](a, b)
                known.append(torch.tanh(result) if len(known) % 4 == 0 else result)
            return known[-1] + known[-2]

        return program

    strategy = st.lists(
        st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 9), st.integers(0, 9)),
        min_size=1,
        max_size=8,
    ).map(lambda choices: Programs.make(choices))


def compare_program(program, transform, device, folder):
    arguments = list(torch.randn(4 if transform is pushed_forward else 2, 2, 3, dtype=torch.float64))
    primitive = trace(program, *(argument[0] for argument in arguments[:2]))
    emitted = Emitted(trace(transform(primitive), *(argument[0] for argument in arguments)), *arguments)
    actual = emitted.run(device, folder=folder)
    for one, other in zip(actual, expected(transform(program), *arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10, equal_nan=True)


@settings(max_examples=5)
@given(Programs.strategy)
def test_random_programs(device, tmp_path_factory, program):
    compare_program(program, pushed_forward, device, tmp_path_factory.mktemp("program"))


@pytest.mark.thorough
@pytest.mark.parametrize("transform", [pushed_forward, pulled_back])
@settings(max_examples=120)
@given(program=Programs.strategy)
def test_more_random_programs(device, tmp_path_factory, transform, program):
    compare_program(program, transform, device, tmp_path_factory.mktemp("program"))


@pytest.mark.parametrize("dtype", [torch.float64, *thorough(torch.float32)])
def test_a_step_in_a_kernel(dtype, device, tmp_path):
    """A pendulum by RK4, with a tangent."""

    def slope(z):
        return torch.stack([z[1], -torch.sin(z[0]) - 0.3 * z[1]])

    def step(z):
        k1 = slope(z)
        k2 = slope(z + 0.005 * k1)
        k3 = slope(z + 0.005 * k2)
        return z + 0.01 / 6 * (k1 + 2 * k2 + 2 * k3 + slope(z + 0.01 * k3))

    z, tangent = torch.randn(3, 2, dtype=dtype), torch.randn(3, 2, dtype=dtype)
    graph = trace(pushed_forward(trace(step, z[0])), z[0], tangent[0])
    actual = Emitted(graph, z, tangent).by_kernel(tmp_path, device, dtype)
    right = torch.cat(expected(pushed_forward(step), z, tangent), -1).to(dtype)
    torch.testing.assert_close(torch.stack(actual, -1), right, rtol=10 * torch.finfo(dtype).eps, atol=0)
