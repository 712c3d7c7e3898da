"""Steps on tiles: what their kernels find, interpreted or compiled, against the bare loop in float64."""

import platform

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import deeppcr
from deeppcr import Newton, Result
from deeppcr.fuse import compiled, kept, tile_rules
from deeppcr.fuse import trace as tracing
from deeppcr.fuse.compiled import kernels_of
from deeppcr.fuse.expressions import NotCovered
from deeppcr.fuse.kinds import first_chunk, is_shorter_in_one
from deeppcr.fuse.tile_program import TileProgram
from deeppcr.fuse.tiled import groups_of
from deeppcr.fuse.trace import one_row
from deeppcr.sequence.layout import Layout
from fuse.loops import Fused, by_loop, check_any_chunk
from fuse.tile_steps import STEPS, Draw, gru, mlp
from kernel_support import error, misaligned, offset, strided, thorough

# Of the interpreter, where iterates stray.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def compare(make, device, chunk=4, rtol=2e-5, **sizes):
    """States and gradients in float32 are those of the same loop in float64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        draw = Draw(dtype, device, **sizes)
        step, z0, xs = make(draw)
        if dtype == torch.float32:
            fused = Fused(step, z0, xs, length=draw.length)
            assert isinstance(fused.program, TileProgram)
            states = pytree.tree_leaves(fused.states(chunk))
        else:
            states = pytree.tree_leaves(by_loop(step, z0, xs, draw.length))
        generator = torch.Generator().manual_seed(2)
        weights = [torch.randn(each.shape, generator=generator).to(each) for each in states]
        gradients = torch.autograd.grad(states, draw.given, weights, allow_unused=True)
        found.append([*states, *gradients])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) is (theirs is None)
        assert ours is None or (ours.shape == theirs.shape and error(ours, theirs) < rtol)
    return fused


#: of which the others are of a kind
FEW = ["GRU 12", "cosine", "expanded", "reset"]


@pytest.mark.parametrize("name", [*FEW, *thorough(*(name for name in STEPS if name not in FEW))])
def test_steps(name, device):
    compare(STEPS[name], device)


@pytest.mark.parametrize("width", thorough(9, 15, 16, 17, 31, 64))
def test_widths(width, device):
    compare(gru(width), device, length=5, chunk=2)


@pytest.mark.parametrize("width", thorough(65, 100, 128))
def test_the_widest(width, device):
    compare(mlp(width), device, length=5, chunk=2)


@pytest.mark.parametrize(
    ("length", "chunk", "rows"),
    [
        (19, 2, 1),  # four groups of three chunks, the last of one
        *thorough((1, 4, 2), (2, 1, 3), (3, 2, 2), (4, 4, 33), (17, 16, 2), (26, 1, 1), (33, 4, 3)),
    ],
)
def test_lengths(length, chunk, rows, device):
    compare(mlp(10), device, length=length, chunk=chunk, rows=rows)


@pytest.mark.parametrize("width", [10, *thorough(16, 65)])
def test_a_linear_step_takes_one_pass(width, device):
    """And one that finds nothing to correct, or rounding alone: chunks are joined by their maps, over four groups of them. Wrong maps are slow, not wrong."""
    draw = Draw(torch.float32, device, length=19)
    weights = torch.linalg.qr(torch.randn(19, width, width, generator=torch.Generator().manual_seed(0)))[0].to(device)
    step, z0, xs = lambda z, x: z @ x[0] + x[1], draw.z0(width), (weights, draw.xs(width))
    found = Fused(step, z0, xs).solve(2)
    # On a GPU maps are products of TF32: what they leave is corrected, and that is seen; on ARM processors what rounding leaves is.
    assert found.passes <= (2 if device.type == "cpu" and platform.machine() == "x86_64" else 4)
    assert error(found.states, by_loop(step, z0, xs)) < 1e-5


def test_groups():
    """Every chunk is in one of them, also where the last ones are empty."""
    for chunks in range(2, 200):
        groups = groups_of(chunks)
        each = -(-chunks // groups)
        assert groups * each >= chunks > 0
        assert groups <= chunks
    assert (groups_of(10), groups_of(9), groups_of(2)) == (4, 3, 2)


@pytest.mark.parametrize("how", thorough(strided, offset, misaligned))
def test_xs_may_lie_anyhow(how, device):
    def make(draw):
        step, z0, (weights, biases) = mlp(10)(draw)
        return step, strided(z0), (how(weights), how(biases))

    compare(make, device)


def dense(width, device, length=9):
    """A step, its start and its inputs, in float32."""
    return mlp(width)(Draw(torch.float32, device, length))


@pytest.mark.thorough
def test_two_dimensions_of_rows(device):
    weight = torch.randn(10, 10, device=device) / 5
    z0, xs = torch.randn(2, 3, 10, device=device), torch.randn(5, 2, 3, 10, device=device)
    given = [each.requires_grad_() for each in (weight, z0, xs)]
    step = lambda z, x: torch.tanh(z @ weight + x)  # noqa: E731
    fused = Fused(step, z0, xs, batch_dims=2)
    assert isinstance(fused.program, TileProgram)
    ours, theirs = fused.states(2), by_loop(step, z0, xs)
    assert error(ours, theirs) < 1e-5
    for a, b in zip(*(torch.autograd.grad((each**2).sum(), given) for each in (ours, theirs)), strict=True):
        assert error(a, b) < 1e-5


def test_unwritten_memory_is_not_read(device, poisoned_memory):
    compare(mlp(10), device, length=11, rows=3)


def test_rows_without_numbers_leave_others_alone(device):
    """NaN in one row, and an overflow in another."""
    weight = torch.eye(9, device=device) + 0.1

    def step(z, x):
        return torch.tanh(z @ weight) * 0.5 + x * (z * z).sum(-1, keepdim=True)

    z0 = 0.1 * torch.randn(3, 9, device=device)
    xs = 0.01 * torch.rand(9, 3, 9, device=device)
    xs[3, 1, 4], xs[3:, 2] = float("nan"), 1e30
    ours, theirs = Fused(step, z0, xs).solve(4).states, by_loop(step, z0, xs)
    assert error(ours[:, 0], theirs[:, 0]) < 1e-5
    assert error(ours[:3], theirs[:3]) < 1e-5
    assert ours[4:, 1].isnan().all()
    assert not ours[5:, 2].isfinite().any()


@pytest.mark.thorough
def test_what_grows_comes_out_of_the_loop(device):
    """Chunks that never join are finished one step after the other; rows that are settled stay."""
    weight = torch.randn(9, 9, generator=torch.Generator().manual_seed(0)).to(device)

    def step(z, x):
        return x * torch.sin(3 * (z @ weight)) + (1 - x) * 0.1 * z

    z0, xs = torch.ones(2, 9, device=device), torch.tensor([0.0, 1.0], device=device).reshape(1, 2, 1).expand(24, 2, 1)
    fused = Fused(step, z0, xs)
    found = fused.solve(1)
    assert found.left == 1
    assert error(found.states[:, 0], by_loop(step, z0, xs)[:, 0]) < 1e-5
    first = by_loop(step, z0, xs)[:4, 1]  # rounding grows nearly tenfold with every step
    assert error(found.states[:4, 1], first) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, *thorough(torch.float16)])
def test_half_precision_is_storage(dtype, device):
    """States are kept in it, and computed in float32: gradients too."""
    step, z0, xs = mlp(10)(draw := Draw(dtype, device, length=5))
    wide, z0_wide, xs_wide = mlp(10)(reference := Draw(torch.float64, device, length=5))
    for tensor, rounded in zip(reference.given, draw.given, strict=True):
        tensor.data = rounded.detach().double()
    ours, theirs = Fused(step, z0, xs).states(2), by_loop(wide, z0_wide, xs_wide)
    assert ours.dtype == dtype
    rounding = torch.finfo(dtype).eps
    assert error(ours, theirs) < rounding
    found = zip(
        torch.autograd.grad(ours.sum(), draw.given), torch.autograd.grad(theirs.sum(), reference.given), strict=True
    )
    for a, b in found:
        assert a.dtype == dtype
        assert error(a, b) < 4 * rounding


@pytest.mark.thorough
def test_pulling_back_by_any_chunk_gives_the_same(device):
    check_any_chunk(Fused(*dense(10, device, length=13)), 1e-5)


def test_a_guess_is_where_it_starts(device):
    step, z0, xs = dense(10, device)
    fused, right = Fused(step, z0, xs), by_loop(step, z0, xs).detach()
    found = fused.solve(4, guess=right.contiguous())
    assert found.passes == 2
    assert error(found.states, right) < 1e-6


def test_launches_are_repeated_for_tensors_that_lie_alike_only(device, compiled):
    """Weights that lie at odd places are read number by number, others four at a time."""
    step, z0, xs = dense(12, device, length=5)
    fused = Fused(step, z0, xs)
    for how in (torch.clone, misaligned, torch.clone):
        fused.inputs, fused.z0 = [how(each).detach().requires_grad_() for each in xs], how(z0).detach()
        states = fused.states(2)
        assert error(states, by_loop(step, z0, xs)) < 1e-5
        states.sum().backward()
    assert device.type == "cuda" or compiled() > 0


def test_factors_before_tangents_change_nothing(device, monkeypatch, tmp_path):
    """With tangents as sums of products, and with every operation for itself."""
    fused = Fused(*gru(12)(Draw(torch.float32, device, length=3, rows=1)))
    with_them = fused.solve(1).states
    monkeypatch.setattr(tile_rules, "combined", lambda *_: None)
    monkeypatch.setattr(kept, "_folder", lambda: tmp_path)  # by the graph it is the same step
    plain = Fused(fused.step, fused.z0, fused.xs)
    assert len(plain.kernels.forward_source) != len(fused.kernels.forward_source)
    assert error(plain.solve(1).states, with_them) < 1e-6


def test_numbers_of_the_derivative_alone_are_read(device):
    """A forward pass that holds none, and a backward pass that brings one."""
    fused = Fused(*STEPS["every other"](Draw(torch.float32, device)))
    assert len(fused.kernels.numbers(device)) == 1
    fused.program.code.numbers.append(0.25)
    assert fused.kernels.numbers(device)[0] == 0.25


NOT_COVERED = {
    "mixes 129 numbers": lambda z: z @ torch.ones(129, 129) * 0.01,
    "mixes 9 numbers is not covered in float64": lambda z: z.double() * z.double().sum(),
    "aten.sort": lambda z: z.sort().values,
    "aten.linalg_vector_norm": lambda z: z / z.norm(3),
    "a view of": lambda z: (z.reshape(3, 3) @ z.reshape(3, 3)).reshape(9),
    "an index without a pattern": lambda z: z[[0, 1, 5]].sum() * z,
}


@pytest.mark.parametrize("what", NOT_COVERED)
def test_what_is_not_covered_is_named(what):
    width = 129 if "129" in what else 9
    z0 = torch.zeros(width, dtype=torch.float64 if "float64" in what else torch.float32)
    with pytest.raises(NotCovered, match=what):
        _ = Fused(NOT_COVERED[what], z0, length=4).kernels.forward_source


def test_tiles_that_are_too_large_are_named(monkeypatch):
    step = lambda h, x: torch.tanh(h @ torch.ones(12, 12)) + x.sum()  # noqa: E731
    monkeypatch.setattr(tile_rules, "_MOST", 8)
    with pytest.raises(NotCovered, match="a tensor of 12 numbers inside a step"):
        Fused(step, torch.zeros(1, 12), torch.zeros(3, 1, 2))


# Through the public call.

NEWTON = Newton(chunk=4)


def solved(*given):
    """By kernels, which come with the second solve of a kind."""
    for _ in range(2):
        found = deeppcr.solve(*given, solver=NEWTON)
    return found


def by_kernels(solution):
    return solution.plan.evaluation.startswith("fused kernels")


@pytest.mark.usefixtures("kernels")
def test_solve_takes_tiles(device):
    """What changes is seen: values, parameters, closures, and inputs."""
    weight, net = torch.randn(10, 10, device=device) / 5, nn.Linear(10, 10).to(device)

    def step(z, x):
        return torch.tanh(net(z) + z @ weight) + x

    z0, xs = torch.randn(2, 10, device=device), torch.randn(9, 2, 10, device=device)
    found = solved(step, z0, xs)
    assert by_kernels(found)
    assert found.result is Result.CONVERGED
    assert error(found.states, by_loop(step, z0, xs)) < 1e-5
    for change in (
        lambda: weight.mul_(-0.5),
        lambda: net.weight.data.mul_(0.3),
        lambda: setattr(net, "bias", nn.Parameter(torch.ones(10, device=device))),
        lambda: xs.mul_(0.5),
        lambda: z0.add_(1),
    ):
        change()
        found = deeppcr.solve(step, z0, xs, solver=NEWTON)
        assert by_kernels(found)
        assert error(found.states, by_loop(step, z0, xs)) < 1e-5
    found.states.sum().backward()
    ours, net.weight.grad = net.weight.grad, None
    by_loop(step, z0, xs).sum().backward()
    assert error(ours, net.weight.grad) < 1e-5


@pytest.mark.usefixtures("kernels")
def test_solve_goes_another_way_where_tiles_do_not(device):
    weight = torch.eye(9, dtype=torch.float64, device=device)
    step = lambda z: torch.tanh(z @ weight) * 0.5  # noqa: E731
    z0 = torch.ones(2, 9, dtype=torch.float64, device=device)
    for _ in range(2):
        found = deeppcr.solve(step, z0, length=9, solver=NEWTON)
    assert not by_kernels(found)
    assert any("mixes 9 numbers is not covered in float64" in note for note in found.plan.notes)
    assert error(found.states, by_loop(step, z0, None, 9)) < 1e-10


@pytest.mark.parametrize(("width", "tiled"), [(3, False), (6, True)])
def test_narrow_steps_of_many_operations(width, tiled, device, kernels):
    """The compiler would take minutes for them as lanes."""
    step, z0, xs = gru(width)(Draw(torch.float32, device, length=5))
    with torch.no_grad():
        for _ in range(2):
            solution = deeppcr.solve(step, z0, xs, solver=Newton(chunk=2))
    assert solution.plan.evaluation == f"fused kernels ({'tiles' if tiled else 'narrow'})"
    assert error(solution.states, by_loop(step, z0, xs)) < 1e-5


@pytest.mark.parametrize(("width", "longest"), [(16, 96), (64, 128)])
def test_so_few_steps_are_one_chunk(width, longest, device):
    weight = torch.eye(width, device=device)
    layout = Layout.of(torch.zeros(1, width, device=device), None)
    program = kernels_of(one_row(lambda z: torch.tanh(z @ weight), layout, None), layout).program
    assert program.parts.tiled
    for length in (longest, longest + 1):
        chunk = first_chunk(length, 1, program)
        assert is_shorter_in_one(length, chunk, program) == (length == longest)


def test_narrow_steps_that_a_compiler_would_not_end(device, monkeypatch):
    """Neither on tiles, nor short enough for a lane."""
    how = {"dtype": torch.float64, "device": device}
    examples = torch.randn(20, 8, **how)
    step, z0 = lambda z: z - 1e-3 * torch.sigmoid(z @ examples.mT) @ examples, torch.randn(2, 8, **how)
    layout = Layout.of(z0, None)
    with pytest.raises(NotCovered, match=r"a step of .* lines in one lane is not covered \(up to 2,000\)"):
        kernels_of(one_row(step, layout, None), layout)
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_MOST_OPERATIONS", 3)
        with pytest.raises(NotCovered, match=r"a step of .* operations is not covered"):
            one_row(step, layout, None)
    few = lambda z: z - 1e-3 * torch.sigmoid(z @ examples[:1].mT) @ examples[:1]  # noqa: E731
    row = one_row(few, layout, None)
    monkeypatch.setattr(compiled, "_LONG_FORWARD", 10**6)  # where tiles are no way out
    monkeypatch.setattr(compiled, "_LONG_BACKWARD", 10**6)
    assert kernels_of(row, layout).no_gradients is None
    monkeypatch.setitem(compiled._ENDLESS, torch.float64, (4_000, 100))
    assert "a backward pass of" in kernels_of(row, layout).no_gradients
