"""The kernels of a step, interpreted or compiled: states and all gradients against the bare loop, in float64.

Shapes: L steps in chunks of C, B rows, D numbers of the state.
"""

from dataclasses import replace

import pytest
import torch

from deeppcr import Newton, launch
from fuse.compared import compare, elementwise, narrow, normal
from fuse.loops import Fused, by_loop
from kernel_support import error, misaligned, offset, strided, thorough

# Of the interpreter, where iterates stray, or nothing is divided by nothing.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("leaves", [2, *thorough(1, 3)])
@pytest.mark.parametrize(
    ("length", "rows"), [(13, 3), *thorough((1, 1), (2, 33), (3, 3), (63, 1), (64, 3), (65, 3), (130, 33))]
)
def test_elementwise_steps(leaves, length, rows, device):
    fused = compare(*elementwise(leaves, device, rows, length), chunk=4)
    assert fused.program.elementwise
    assert fused.program.width == leaves


@pytest.mark.parametrize("width", [3, *thorough(1, 2, 4, 5, 6, 7, 8)])
@pytest.mark.parametrize(
    ("length", "rows"), [(13, 3), *thorough((1, 1), (2, 33), (3, 3), (63, 1), (64, 3), (65, 3), (130, 33))]
)
def test_narrow_steps(width, length, rows, device):
    fused = compare(*narrow(width, device, rows, length), chunk=4)
    assert fused.program.width == (1 if width == 1 and fused.program.elementwise else width)


@pytest.mark.parametrize("length", [1, 17, *thorough(2, 3, 65)])
def test_awkward_lengths(length, device):
    compare(*elementwise(1, device, 2, length, 3), chunk=16)


#: How xs may lie in memory.
LAYOUTS = {
    "strided": strided,
    "offset": offset,
    "misaligned": misaligned,
    "expanded over rows": lambda xs: xs[:, :1].expand_as(xs),
    "expanded over steps": lambda xs: xs[:1].expand_as(xs),
    "expanded over channels": lambda xs: xs[..., :1].expand_as(xs),
    "backwards": lambda xs: xs.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "every other step": lambda xs: xs.repeat_interleave(2, 0)[::2],
}


#: of which the others are of a kind
FEW = ["strided", "expanded over rows", "misaligned"]


@pytest.mark.parametrize("how", [*FEW, *thorough(*(how for how in LAYOUTS if how not in FEW))])
def test_xs_may_lie_anyhow(how, device):
    step, z0, xs, closures = elementwise(1, device, 3, 9, 3)
    xs = LAYOUTS[how](xs)
    leaf = xs.detach() if xs.is_contiguous() or xs._is_view() else xs
    compare(step, strided(z0), leaf, [*closures[1:]], chunk=4)


@pytest.mark.thorough
@pytest.mark.parametrize("how", LAYOUTS)
def test_xs_of_a_step_that_mixes_may_lie_anyhow(how, device):
    step, z0, (of_row, of_all), closures = narrow(3, device, 3, 9)
    compare(step, strided(z0), (LAYOUTS[how](of_row).detach(), strided(of_all)), closures, chunk=4)


@pytest.mark.thorough
def test_integers_and_booleans_in_xs(device):
    xs = {
        "on": torch.rand(9, 3, 4, device=device) > 0.5,
        "by": torch.randint(-2, 3, (9, 4), device=device),
        "in": normal(9, 3, 4, device=device),
    }
    compare(
        lambda z, x: torch.where(x["on"], torch.sin(z) * x["by"], x["in"] - 0.3 * z),
        normal(3, 4, device=device),
        xs,
        [],
        chunk=4,
    )


@pytest.mark.parametrize("rtol", [None, *thorough(1e-3)])
def test_float32(rtol, device):
    """Within its tolerance of the same loop in float64; and gradients are those of the loop, too."""
    step, z0, xs, closures = elementwise(2, device)
    reference = by_loop(step, z0, xs)
    for tensor in closures:
        tensor.data = tensor.data.float()
    fused = Fused(step, tuple(h.float() for h in z0), xs.float())
    newton = Newton() if rtol is None else Newton(rtol=rtol)
    for ours, right in zip(fused.states(4, newton=newton), reference, strict=True):
        assert ours.dtype == torch.float32
        assert error(ours, right) < (1e-6 if rtol is None else rtol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *thorough(torch.float16)])
def test_half_precision_is_storage(dtype, device):
    """States are kept in it, and computed in float32: gradients too."""
    weight = torch.rand(4, device=device).to(dtype).requires_grad_()
    z0, xs = (
        normal(3, 4, device=device, dtype=dtype).requires_grad_(),
        normal(9, 3, 4, device=device, dtype=dtype).requires_grad_(),
    )
    step = lambda z, x: 0.5 * torch.sin(weight * z) + x  # noqa: E731
    given = [weight, z0, xs]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    ours = Fused(step, z0, xs).states(4)
    right = by_loop(lambda z, x: 0.5 * torch.sin(wide[0] * z) + x, wide[1], wide[2])
    assert ours.dtype == dtype
    rounding = torch.finfo(dtype).eps
    assert error(ours, right) < rounding
    for a, b in zip(torch.autograd.grad(ours.sum(), given), torch.autograd.grad(right.sum(), wide), strict=True):
        assert a.dtype == dtype
        assert error(a, b) < 2 * rounding


@pytest.mark.parametrize("mixing", [False, True])
def test_unwritten_memory_is_not_read(mixing, device, poisoned_memory):
    """With lanes, steps and chunks that do not fill what is launched for them."""
    compare(*(narrow(2, device, 3, 11) if mixing else elementwise(2, device, 3, 11, 5)), chunk=4)


def test_a_pass_changes_nothing_that_is_settled(device):
    """Twice the same bits, whatever memory holds."""
    fused = Fused(*elementwise(1, device)[:3])
    first, second = fused.solve(4), fused.solve(4)
    assert torch.equal(first.states, second.states)
    assert first.passes == second.passes
    assert not first.left


@pytest.mark.parametrize("rolls", [1, *thorough(0, 2)])
def test_a_guess_is_where_it_starts(rolls, device):
    """The solution itself needs two passes to be known as such, and a wild one does no harm."""
    step, z0, xs, _ = elementwise(1, device)
    fused, right = Fused(step, z0, xs), by_loop(step, z0, xs)
    found = fused.solve(4, guess=fused.layout.pack(right, 1).contiguous(), rolls=rolls)
    assert found.passes == 2
    assert error(found.states, fused.layout.pack(right, 1)) < 1e-12
    wild = fused.solve(4, guess=100 * torch.randn_like(fused.layout.pack(right, 1)), rolls=rolls)
    assert error(wild.states, fused.layout.pack(right, 1)) < 1e-10


@pytest.mark.parametrize("mixing", [True, *thorough(False)])
def test_the_loop_in_one_kernel(mixing, device):
    """Its chunk is the whole length; nothing is solved, and gradients are the same."""
    step, z0, xs, closures = narrow(2, device, 3, 7) if mixing else elementwise(2, device, 3, 7)
    fused = compare(step, z0, xs, closures, chunk=7, rtol=1e-13)
    found = fused.solve(7)
    assert found.passes == 0
    assert found.left == 0
    assert not found.notes.memory.any()


def test_launches_are_repeated_for_tensors_that_lie_alike_only(device, compiled):
    """Kernels are compiled for what is told of their arguments: other lengths, rows and places in memory must not be mixed up."""
    z0, xs = normal(3, 3, device=device), normal(9, 3, 3, device=device)
    fused = Fused(lambda z, x: 0.5 * torch.sin(z) + x, z0, xs)

    def found(z0, xs):
        fused.z0, fused.inputs, fused.length = z0, [xs], len(xs)
        fused.layout = replace(fused.layout, batch_shape=z0.shape[:1])
        return fused.states(4)

    for _ in range(2):
        for how in (torch.clone, misaligned):
            for z, x in ((z0, xs), (z0, xs[:8]), (z0[:1], xs[:, :1])):
                z, x = how(z).detach().requires_grad_(), how(x).detach().requires_grad_()
                ours, theirs = found(z, x), by_loop(lambda z, x: 0.5 * torch.sin(z) + x, z, x)
                assert error(ours, theirs) < 1e-12
                for a, b in zip(*(torch.autograd.grad(s.sum(), [z, x]) for s in (ours, theirs)), strict=True):
                    assert error(a, b) < 1e-12
    assert device.type == "cuda" or compiled() > 0


def test_launches_of_both_directions_are_noted(device, compiled, monkeypatch):
    """Whatever comes with the source of derivatives, and however the tensors share their memory."""
    monkeypatch.setattr(launch, "_noted", {})
    memory = normal(4, 3, device=device)
    first, second = memory[0].requires_grad_(), memory[1].requires_grad_()
    fused = Fused(lambda z: 0.5 * torch.sin(first * z) + 0.3 * z**3 * second, memory[2:], length=9)
    for _ in range(2):
        torch.autograd.grad(fused.states(4).sum(), [first, second])
    assert len(launch._noted) > 1
    assert None not in launch._noted.values()


SCALED = {
    "add": lambda z, x: torch.tanh(z).add(x, alpha=0.1),
    "sub": lambda z, x: torch.tanh(z).sub(x, alpha=0.1),
    "in place": lambda z, x: (0.5 * z).add_(x.sin(), alpha=-0.1),
    "rsub": lambda z, x: torch.rsub(torch.tanh(z), x, alpha=0.3),
    "number": lambda z, x: torch.add(torch.tanh(z), 1.0, alpha=0.3) + x,
    "addmm": lambda z, x: torch.addmm(x, z, torch.eye(3, dtype=z.dtype, device=z.device), alpha=0.5, beta=0.25),
    "addmm of a product alone": lambda z, x: (
        torch.addmm(torch.full_like(x, torch.nan), z, torch.eye(3, dtype=z.dtype, device=z.device), alpha=0.5, beta=0.0)
        + x
    ),
}


def test_a_product_with_a_vector_added_to_one_that_does_not_depend_on_the_state(device):
    """The same, of a state without rows."""
    matrix, added = normal(3, 3, device=device) / 4, normal(3, device=device)
    step = lambda z, x: torch.addmv(added, matrix, z, beta=0.3, alpha=0.7) + x  # noqa: E731
    compare(step, normal(3, device=device), normal(9, 3, device=device), (), chunk=4)


@pytest.mark.parametrize("what", SCALED)
def test_sums_with_a_factor_before_what_does_not_depend_on_the_state(what, device):
    """Of which PyTorch's own tangent, traced, ends the process."""
    compare(SCALED[what], normal(2, 3, device=device), normal(9, 2, 3, device=device), (), chunk=4)
