"""Complex systems by kernels, as pairs of real numbers."""

import pytest
import torch

from deeppcr import linear
from kernel_support import thorough
from linear.reference import STRUCTURES, one_after_the_other, random_blocks


@pytest.fixture
def anywhere(device, monkeypatch):
    """Kernels run on the device under test, whichever it is."""
    if device.type == "cpu":
        monkeypatch.setattr(linear.Fused, "refusal", lambda self, couplings: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "reverse"])
@pytest.mark.parametrize(
    ("length", "batch", "of_blocks"), [(2, (), ()), (9, (2, 3), (2, 1)), *thorough((3, (2,), (2,)), (65, (3,), (1,)))]
)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_kernels_solve_complex_systems(structure, length, batch, of_blocks, reverse, anywhere, compiled, device):
    data = random_blocks(structure, length, of_blocks, 4, dtype=torch.complex64, device=device).data
    rhs, initial = (torch.randn(*shape, *batch, 4, dtype=torch.complex64, device=device) for shape in ((length,), ()))
    wide = [each.to(torch.complex128) for each in (data, rhs, initial)]
    expected = one_after_the_other(structure(wide[0]).to_dense(4), *wide[1:], reverse)
    for _ in range(2):  # later calls repeat the launches of the first
        found = linear.solve(structure(data), rhs, initial, reverse=reverse, solver=linear.Fused())
        assert found.dtype is torch.complex64
        torch.testing.assert_close(found.to(torch.complex128), expected, rtol=1e-4, atol=1e-4)


def test_gradients_by_kernels(anywhere, compiled, device):
    data = random_blocks(linear.Diagonal, 9, (), 3, dtype=torch.complex64, device=device).data.requires_grad_()
    rhs = torch.randn(9, 3, dtype=torch.complex64, device=device, requires_grad=True)
    ours, theirs = (
        torch.autograd.grad(linear.solve(linear.Diagonal(data), rhs, solver=solver).abs().square().sum(), (data, rhs))
        for solver in (linear.Fused(), linear.ForwardSubstitution())
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_what_kernels_are_too_narrow_for(monkeypatch):
    class OnGPU(torch.Tensor):
        is_cuda = True

    def refusal(blocks):
        return linear.Fused().refusal(type(blocks)(blocks.data.as_subclass(OnGPU)))

    monkeypatch.setattr(linear.fused, "has_room", lambda device: False)
    assert refusal(linear.Dense(torch.zeros(1, 64, 64, dtype=torch.complex64))) is None
    assert "up to 64" in refusal(linear.Dense(torch.zeros(1, 65, 65, dtype=torch.complex64)))
    assert "up to 4" in refusal(linear.BlockDiagonal(torch.zeros(1, 2, 5, 5, dtype=torch.complex64)))
    assert "in float32" in refusal(linear.Diagonal(torch.zeros(1, 2, dtype=torch.complex128)))
