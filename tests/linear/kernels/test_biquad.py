"""Recursive filters by their kernel and by blocks: against the plain loop, gradients included."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr import linear, runtime
from deeppcr.linear.kernels import biquad

#: Resonators near and far from the unit circle, an order of one, and one that grows.
FILTERS = {
    "resonator": ([0.02, 0.0, -0.02], [1.0, -1.95, 0.9604]),
    "sharp": ([1e-3, 0.0, -1e-3], [1.0, -1.99, 0.9998]),
    "damped": ([1.0, 0.5, 0.25], [2.0, -0.3, 0.1]),
    "first order": ([1.0, 0.5], [1.0, -0.9]),
    "numerator alone": ([1.0, 0.5, -2.0], [1.0]),
    "denominator alone": ([0.5], [1.0, 0.2, -0.3]),
    "growing": ([1.0], [1.0, -1.1]),
}


def by_loop(b, a, x):
    b, a = b / a[0], a / a[0]
    outputs = []
    for l in range(len(x)):
        y = sum(b[k] * x[l - k] for k in range(min(len(b), l + 1)))
        outputs.append(y - sum(a[k] * outputs[l - k] for k in range(1, min(len(a), l + 1))))
    return torch.stack(outputs)


@pytest.fixture(params=["kernel", "blocks"])
def way(request, device, monkeypatch):
    """By the kernel, interpreted on a CPU; and by blocks."""
    if request.param == "kernel":
        monkeypatch.setattr(runtime, "KERNEL_DEVICES", {device.type})
        monkeypatch.setattr(biquad, "SHORTEST", 8)
        monkeypatch.setattr(biquad, "LANES", 4)
    else:
        monkeypatch.setattr(runtime, "KERNEL_DEVICES", set())
    return request.param


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(("length", "batch"), [(1, ()), (2, (3,)), (7, (1,)), (65, (5,)), (33, (2, 3))])
def test_the_loop_is_what_it_computes(name, length, batch, way, device):
    b, a = (torch.tensor(each, dtype=torch.float64, device=device) for each in FILTERS[name])
    x = torch.randn(length, *batch, dtype=torch.float64, device=device)
    expected = by_loop(b, a, x)
    assert relative(linear.lfilter(b, a, x), expected) < 1e-12
    single = linear.lfilter(b.float(), a.float(), x.float())
    exact = by_loop(b.float().double(), a.float().double(), x.float().double())
    assert single.dtype == torch.float32
    assert relative(single, exact) < (1e-6 if way == "kernel" else 1e-4)


@pytest.mark.parametrize("name", FILTERS)
def test_gradients(name, way, device):
    b, a = (torch.tensor(each, dtype=torch.float64, device=device, requires_grad=True) for each in FILTERS[name])
    x = torch.randn(21, 3, dtype=torch.float64, device=device, requires_grad=True)
    outer = torch.randn(21, 3, dtype=torch.float64, device=device)
    found = torch.autograd.grad(linear.lfilter(b, a, x), (b, a, x), outer)
    expected = torch.autograd.grad(by_loop(b, a, x), (b, a, x), outer)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10 * other.abs().max().item())


def test_signals_that_lie_otherwise(way, device):
    b, a = (torch.tensor(each, device=device) for each in FILTERS["resonator"])
    x = torch.randn(3, 40, 2, device=device).permute(1, 0, 2)[::2, :, 1]
    assert relative(linear.lfilter(b, a, x), by_loop(b.double(), a.double(), x.double())) < 1e-4
    assert linear.lfilter(b, a, torch.zeros(0, 3, device=device)).shape == (0, 3)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("chunk", "few"), [(1, 64), (1, 1), (2, 3), (4, 2), (16, 64), (64, 64)])
def test_chunks_of_any_length(chunk, few, reverse, device, monkeypatch):
    """A power of two of the block joins them, of one sample too; many of them in groups."""
    monkeypatch.setattr(biquad, "FEW", few)
    coefficients = torch.tensor([0.5, -0.25, 0.125, -1.2, 0.7], dtype=torch.float64, device=device)
    x = torch.randn(45, 3, device=device)
    given = x.flip(0) if reverse else x
    b, a = coefficients[:3], torch.cat([torch.ones(1, dtype=torch.float64, device=device), coefficients[3:]])
    expected = by_loop(b, a, given.double())
    found = biquad.run(coefficients, x, reverse=reverse, chunk=chunk)
    assert relative(found, expected.flip(0) if reverse else expected) < 1e-6


def test_chunks_fill_the_device():
    assert biquad.chunk_length(2**19, 64) == 256
    assert biquad.chunk_length(100, 1) == biquad.SHORTEST


@pytest.mark.parametrize("name", ["resonator", "first order", "growing"])
def test_second_derivatives(name, way, device):
    b, a = (torch.tensor(each, dtype=torch.float64, device=device, requires_grad=True) for each in FILTERS[name])
    x = torch.randn(11, 2, dtype=torch.float64, device=device, requires_grad=True)

    def seconds(filtered):
        first = torch.autograd.grad(filtered(b, a, x).square().sum(), (b, a, x), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), (b, a, x))

    for one, other in zip(seconds(linear.lfilter), seconds(by_loop), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9 * other.abs().max().item())


def test_a_batch_of_gradients(way, device):
    b, a = (torch.tensor(each, dtype=torch.float64, device=device, requires_grad=True) for each in FILTERS["resonator"])
    x = torch.randn(7, 2, dtype=torch.float64, device=device, requires_grad=True)
    outer = torch.randn(3, 7, 2, dtype=torch.float64, device=device)

    def batched(filtered):
        return torch.autograd.grad(filtered(b, a, x), (b, a, x), outer, is_grads_batched=True)

    for one, other in zip(batched(linear.lfilter), batched(by_loop), strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10 * other.abs().max().item())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"b": torch.ones(1, 2)}, r"b: expected coefficients, a tensor \[N\], got \[1, 2\]"),
        ({"a": torch.tensor([0.0, 1.0])}, r"a\[0\] must not be 0"),
        ({"a": torch.ones(0)}, r"a: expected coefficients, a tensor \[N\], got \[0\]"),
        ({"x": torch.ones(3, dtype=torch.long)}, r"x: expected signals, a real tensor .*int64 \[3\]"),
        ({"a": torch.ones(2).double()}, r"a: expected torch.float32 on cpu, as x is, got torch.float64"),
    ],
)
def test_bad_input_is_named(change, words):
    given = {"b": torch.ones(2), "a": torch.ones(2), "x": torch.ones(3)} | change
    with pytest.raises((TypeError, ValueError), match=words):
        linear.lfilter(**given)


def test_powers_beyond_the_numbers_of_a_state_that_is_zero(device):
    """Of an unstable filter that has heard nothing yet."""
    x = torch.zeros(3000, 1, dtype=torch.float64, device=device)
    x[-20:] = 1
    given = [torch.tensor(each, dtype=torch.float64, device=device) for each in ([1.0], [1.0, -4.0])]
    found = linear.lfilter(*given, x)
    assert found[-1] == (4**20 - 1) / 3
    assert torch.equal(found[:-20], x[:-20])
