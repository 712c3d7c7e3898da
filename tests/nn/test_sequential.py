"""Sequential: the layers of a torch.nn.Sequential in parallel."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from deeppcr import Newton, Result, StepError
from deeppcr.nn import Sequential
from problems import relative_error

TIGHT = Newton(atol=1e-12, rtol=1e-12)


LAYERS = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
    "convolution": lambda: nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.ReLU()),
    "normalisation": lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.BatchNorm1d(2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_sequential_is_a_drop_in(name, device):
    torch.manual_seed(0)
    plain = nn.Sequential(*(LAYERS[name]() for _ in range(20))).double().to(device).eval()
    net = Sequential.from_torch(plain, mode="parallel", newton=TIGHT)
    x = torch.randn(3, 2, 6, dtype=torch.float64, device=device)
    assert relative_error(net(x), plain(x)) < 1e-9
    assert any("20 stacked" in note for note in net.solution.plan.notes)
    ours = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    theirs = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-9)
    fresh = Sequential(*(LAYERS[name]() for _ in range(20))).double().to(device)
    fresh.load_state_dict(plain.state_dict())
    fresh.to_torch().load_state_dict(net.state_dict())
    assert net.to_torch()[0] is plain[0]
    assert torch.equal(net(x, mode="sequential"), plain(x))
    assert "mode=parallel" in repr(net)


def test_sequential_of_attention(device):
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, z):
            return 0.5 * z + self.attention(z, z, z, need_weights=False)[0]

    layers = [Attention().double().to(device).eval() for _ in range(8)]
    net = Sequential(*layers, mode="parallel", newton=TIGHT)
    x = torch.randn(2, 3, 4, dtype=torch.float64, device=device)
    with torch.no_grad():
        assert relative_error(net(x), nn.Sequential(*layers)(x)) < 1e-9


class _Residual(nn.Module):
    """Keeps the dtype of its input under autocast."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, z):
        return z + 0.1 * torch.tanh(self.inner(z))


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [LAYERS["linear"], _Residual], ids=["linear", "residual"])
@pytest.mark.parametrize("depth", [1, 2, 3, 20])
def test_sequential_under_autocast_has_the_dtype_of_the_loop(depth, make, given, device):
    torch.manual_seed(0)
    net = Sequential(*(make() for _ in range(depth)), mode="parallel").to(device)
    x = torch.randn(3, 6, device=device).to(given).requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        outs = {mode: net(x, mode=mode) for mode in ("sequential", "auto", "parallel")}
        expected = net.to_torch()(x)
        outs["parallel"].float().square().sum().backward()
    assert (net.solution.result is Result.CONVERGED) is (depth > 2)
    exact = net(x.float(), mode="sequential")
    for out in outs.values():
        assert out.dtype == expected.dtype
        assert relative_error(out.float(), exact) < 2e-2
    ours = [p.grad for p in net.parameters()]
    theirs = torch.autograd.grad(exact.square().sum(), list(net.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=2e-2 * float(b.abs().max()))


def test_sequential_under_autocast_keeps_the_precision_between_its_ends(device):
    """Small steps of many layers would be lost to the rounding of bfloat16."""
    torch.manual_seed(0)
    net = Sequential(*(_Residual() for _ in range(20)), mode="parallel").to(device)
    x = torch.randn(3, 6, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16), torch.no_grad():
        parallel, sequential = net(x), net(x, mode="sequential")
    exact = net(x, mode="sequential")
    assert relative_error(parallel, exact) < 0.5 * relative_error(sequential, exact)


def test_names_of_layers_are_kept():
    plain = nn.Sequential(OrderedDict(a=nn.Linear(6, 6), b=nn.Linear(6, 6)))
    net = Sequential.from_torch(plain)
    assert list(net.state_dict()) == list(plain.state_dict()) == list(net.to_torch().state_dict())
    net.load_state_dict(plain.state_dict())
    layer = nn.Linear(6, 6)
    assert len(Sequential.from_torch(nn.Sequential(layer, layer))) == 2, "one layer twice"


def test_a_slice_runs_as_the_whole():
    newton = Newton(chunk=2)
    net = Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)), mode="parallel", newton=newton)
    part = net[1:4]
    assert (type(part), len(part), part.mode, part.newton) == (Sequential, 3, "parallel", newton)
    assert part[0] is net[1]
    part(torch.randn(2, 6))
    assert part.solution.result is Result.CONVERGED
    for longer, length in ((net + part, 8), (net * 2, 10), (2 * net, 10)):
        assert (type(longer), len(longer), longer.mode, longer.newton) == (Sequential, length, "parallel", newton)
    assert (net + part)[6] is part[1]
    x = torch.randn(2, 6)
    assert torch.allclose((net + part)(x), part(net(x)), atol=1e-5)


def test_attention_that_takes_a_shortcut_without_derivative():
    """In eval mode an encoder layer takes one where nobody seems to differentiate; the error says how to turn it off."""
    net = Sequential(*(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True) for _ in range(3)), mode="parallel").eval()
    x = torch.randn(2, 3, 4, requires_grad=True)
    with pytest.raises(StepError, match=r"no derivative .*set_fastpath_enabled\(False\)"):
        net(x).sum().backward()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        (found,) = torch.autograd.grad(net(x).sum(), x)
        (expected,) = torch.autograd.grad(net(x, mode="sequential").sum(), x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert torch.allclose(found, expected, atol=1e-5)
