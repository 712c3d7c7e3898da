"""The kernels of a step, interpreted or compiled: states and all gradients against the bare loop, in float64.

Shapes: L steps in chunks of C, B rows, D numbers of the state.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils import _pytree as pytree

from deeppcr import Newton, launch
from deeppcr.fuse import back, kinds
from deeppcr.fuse.back import pull_back
from deeppcr.fuse.kinds import Kind, first_chunk
from deeppcr.fuse.run import solve
from fuse.loops import Fused, by_loop
from kernel_support import error, misaligned, offset, strided, thorough

# Of the interpreter, where iterates stray, or nothing is divided by nothing.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def normal(*shape, device, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, device=device)


def elementwise(leaves, device, rows=3, length=13, channels=4):
    """A step of so many leaves that closes over a tensor of channels, one of rows and a number."""
    weight, shift = normal(channels, device=device), normal(rows, channels, device=device)
    gain = torch.tensor(0.6, dtype=torch.float64)  # on the CPU wherever the state is

    def step(z, x):
        z = (z,) if leaves == 1 else z
        total = sum(z[1:], z[0])
        found = tuple(gain * torch.sin(weight * h + 0.3 * i * total) + x for i, h in enumerate(z))
        found = (found[0] + 0.1 * shift, *found[1:])
        return found[0] if leaves == 1 else found

    z0 = tuple(normal(rows, channels, device=device) for _ in range(leaves))
    xs = normal(length, rows, channels, device=device)
    return step, z0[0] if leaves == 1 else z0, xs, [weight, shift, gain]


def narrow(width, device, rows=3, length=13):
    """A step that mixes so many numbers, by a matrix that it closes over and one of every step that rows share."""
    weight, shift = normal(width, width, device=device) / (1 + width), normal(rows, width, device=device)

    def step(z, x):
        of_row, of_all = x
        return torch.tanh(z @ weight + 0.3 * (z @ of_all)) + of_row * shift

    xs = normal(length, rows, width, device=device), normal(length, width, width, device=device) / (1 + width)
    return step, normal(rows, width, device=device), xs, [weight, shift]


def compare(step, z0, xs, closures, chunk, rtol=1e-9, length=None, **options):
    """States, and gradients of z0, xs and closures, are those of the loop."""
    given = [*pytree.tree_leaves(z0), *pytree.tree_leaves(xs), *closures]
    given = [tensor for tensor in given if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()]
    for tensor in given:
        tensor.requires_grad_()
    fused = Fused(step, z0, xs, length=length)
    ours, theirs = fused.states(chunk, **options), by_loop(step, z0, xs, length)
    assert pytree.tree_structure(ours) == pytree.tree_structure(theirs)
    losses = []
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        assert a.shape == b.shape
        assert error(a, b) < rtol
        weights = torch.randn_like(b)
        losses.append(((a * weights).sum(), (b * weights).sum()))
    ours, theirs = (torch.autograd.grad(sum(loss), given) for loss in zip(*losses, strict=True))
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert a.device == b.device
        assert error(a, b) < rtol
    return fused


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


@pytest.mark.thorough
def test_chunks_grow_where_they_do_not_join(device):
    """A loop that amplifies errors: after rolls, larger chunks; and the next solve of the kind begins with those."""
    step = lambda z: 3.9 * z * (1 - z)  # noqa: E731
    fused = Fused(step, torch.tensor([[0.3, 0.31]], dtype=torch.float64, device=device), length=70)
    found = fused.solve(2)
    assert not found.left
    assert found.chunk == fused.kind.chunk == 8
    assert torch.allclose(found.states[1:], step(found.states[:-1]), rtol=1e-12, atol=0)


def test_larger_chunks_go_on_from_the_states_of_smaller_ones(device, monkeypatch):
    """Where those leave few lanes; and the next solve of the kind takes no more passes of either than it needs."""
    monkeypatch.setattr(kinds, "_ROLLS", (0,))
    rate = torch.tensor([[1.5, 1.6, 1.7, 1.8, 2.95]], dtype=torch.float64, device=device)
    z0 = torch.full_like(rate, 0.3)
    step = lambda z: rate * z * (1 - z)  # noqa: E731
    fused = Fused(step, z0, length=70)
    found = fused.solve(2)
    assert not found.left
    assert fused.kind.chunk == 8
    (stage,) = fused.kind.before
    assert stage.chunk == 2
    passes = found.passes
    again = solve(fused.run(), fused.kind, Newton().tolerance(torch.float64))
    assert not again.left
    assert again.passes <= passes
    from_guess = fused.run().in_parallel(Kind(70, 8), Newton().tolerance(torch.float64))
    assert from_guess.left == 1
    for states in (found.states, again.states):
        assert torch.allclose(states[1:], step(states[:-1]), rtol=1e-11, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_counts_for_what_it_moves(dtype, device):
    """A spring at rest far from zero: what its place rounds to moves its speed, of which no digits are left."""

    def step(z):
        place, speed = z.unbind(-1)
        speed = speed - 0.1 * ((place - 100.0) + speed)
        return torch.stack([place + 0.1 * speed, speed], -1)

    z0 = torch.tensor([[100.5, 0.0], [99.9, 0.2]], dtype=dtype, device=device)
    fused, length = Fused(step, z0, length=320), 320
    tolerance = replace(Newton().tolerance(dtype), local=True)
    found = fused.run().in_parallel(Kind(length, 16, 2), tolerance)
    assert found.floored >= 1  # one by one, corrections go up and down, or not
    assert found.left + found.floored == 2
    found = solve(fused.run(), Kind(length, 16, 2), tolerance)
    right = by_loop(step, z0, length=length)
    assert (found.states - right).abs().max() <= 300 * 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_a_large_number_that_is_exact_hides_no_signal(size, local, device):
    """A constant beside it rounds to nothing, whatever its size: what the other misses is not its rounding."""

    def step(z, x):
        constant, signal = z.unbind(-1)
        return torch.stack([constant, 0.8 * torch.sin(1.6 * signal) + torch.cos(constant) * x], -1)

    z0, xs = (
        torch.tensor([[size, 0.3]], device=device).repeat(16, 1),
        2 * normal(48, 16, dtype=torch.float32, device=device),
    )
    tolerance = replace(Newton().tolerance(torch.float32), local=local)
    found = solve(Fused(step, z0, xs).run(), Kind(48, 4), tolerance)
    errors = (found.states - by_loop(step, z0, xs, length=48)).abs()[..., 1].amax(0)
    assert errors.max() <= 1e-4


def test_what_is_tried_before_the_loop():
    kind = Kind(length=4096, chunk=64)
    tried = []
    while kind.try_harder(width=1):
        tried.append((kind.chunk, kind.rolls))
    assert tried == [(64, 2), (64, 4), (64, 8), (256, 0), (256, 2), (256, 4), (256, 8)]
    assert kind.chunk == 4096


def test_chunks_are_tried_again_after_8_solves_then_16_and_32():
    """Each time once, with the chunk that was tried first; what works is as new."""
    kind = Kind(length=4096, chunk=64)
    while kind.try_harder(width=1):
        pass
    tried = []
    for number in range(70):
        kind.begin()
        if not kind.gave_up:
            tried.append((number, kind.chunk, kind.rolls))
            assert not kind.try_harder(width=1)
        else:
            kind.sufficed(0)
        assert kind.chunk == 4096
    assert tried == [(8, 64, 0), (25, 64, 0), (58, 64, 0)]
    while kind.gave_up:
        kind.begin()
    kind.sufficed(3)
    assert kind.try_harder(width=1)


def test_a_loop_that_was_chaotic_is_solved_in_parallel_once_it_is_not(device, monkeypatch):
    monkeypatch.setattr(kinds, "_PATIENCE", 2)
    rate = torch.tensor([[3.9]], dtype=torch.float64, device=device)
    z0 = torch.tensor([[0.3]], dtype=torch.float64, device=device)
    step = lambda z: rate * z * (1 - z)  # noqa: E731
    problem = Fused(step, z0, length=60)
    kind, passes = Kind(60, 4, patience=2), []
    for value in (3.9, 3.9, 3.9, 0.5, 0.5, 3.9):
        rate.fill_(value)
        found = solve(problem.run(), kind, Newton().tolerance(torch.float64))
        passes.append(found.passes)
        assert torch.allclose(found.states, torch.cat([step(z0)[None], step(found.states[:-1])]), rtol=1e-9, atol=1e-10)
    assert [number > 0 for number in passes] == [True, False, False, True, True, True]
    assert kind.gave_up


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("length", [1, 2, 63, 1000, 10**6])
@pytest.mark.parametrize("rows", [1, 1000])
def test_a_chunk_is_no_longer_than_the_loop(length, rows, elementwise):
    program = SimpleNamespace(elementwise=elementwise, parts=SimpleNamespace(tiled=False))
    assert 1 <= first_chunk(length, rows, program) <= length


def test_the_loop_takes_over_for_lanes_that_are_not_settled_only(device):
    """A chaotic row beside one that contracts: of that nothing is computed again."""
    rate = torch.tensor([[3.9], [1.5]], dtype=torch.float64, device=device)
    z0 = torch.tensor([[0.3], [0.4]], dtype=torch.float64, device=device)
    step = lambda z: rate * z * (1 - z)  # noqa: E731
    fused = Fused(step, z0, length=60)
    found = fused.solve(2)
    assert found.left == 1
    assert torch.allclose(found.states, torch.cat([step(z0)[None], step(found.states[:-1])]), rtol=1e-11, atol=0)
    assert error(found.states[:, 1], by_loop(step, z0, length=60)[:, 1]) < 1e-9
    assert fused.kind.gave_up  # the next time it is the loop at once
    assert fused.run().in_parallel(fused.kind, Newton().tolerance(torch.float64)).passes == 0


def test_the_loop_takes_over_right_behind_what_is_exact(device):
    """Of a step that jumps: corrections lead nowhere, and not even the next state is near."""
    step = lambda z: torch.frac(3 * z + 0.1)  # noqa: E731
    z0 = torch.rand(5, 1, dtype=torch.float64, device=device)
    problem = Fused(step, z0, length=60).run()
    found = problem.in_parallel(
        Kind(60, 2), Newton().tolerance(torch.float64)
    )  # without roll-outs, by which more is exact
    assert found.left == 5
    problem.loop(found.states, found)
    assert torch.allclose(found.states, torch.cat([step(z0)[None], step(found.states[:-1])]), rtol=0, atol=1e-12)


def test_corrections_far_beyond_the_states_are_not_believed(device):
    """Of a step whose states stay below 80, and whose linearisation over a chunk leads to millions."""
    step = lambda z: 40 * torch.sin(z) + 0.5 * z  # noqa: E731
    problem = Fused(step, 1 + torch.rand(5, 1, dtype=torch.float64, device=device), length=24).run()
    found = problem.in_parallel(Kind(24, 3), Newton().tolerance(torch.float64), most=2)
    assert 1 < found.states.abs().max() <= 0.5 * 10 * 80 + 40  # a step after the start of a chunk


def test_local_digits_are_those_of_every_chunk(device):
    """Of states that die out: what is rounding beside the largest so far is none beside those of a chunk."""
    step = lambda z: 0.2 * torch.sin(z)  # noqa: E731
    problem = Fused(step, torch.ones(1, 1, dtype=torch.float64, device=device), length=40)
    expected, tolerance = by_loop(step, problem.z0, length=40), Newton(rtol=1e-9).tolerance(torch.float64)

    def digits_lost(found):
        return float(((found.states - expected) / expected).abs().max())

    found = problem.run().in_parallel(Kind(40, 4), tolerance)
    assert (found.left, found.floored) == (0, 0)
    assert digits_lost(found) > 1
    found = problem.run().in_parallel(Kind(40, 4), replace(tolerance, local=True))
    assert (found.left, found.floored) == (1, 0)
    assert digits_lost(solve(problem.run(), Kind(40, 4), replace(tolerance, local=True))) < 1e-8


def test_cotangents_of_tensors_that_leaves_share(device):
    """Overlapping views of one input, of one row and of all: their cotangents add up."""

    def step(z, x):
        return torch.sin(z) * x[..., :3] + 0.2 * x[..., 1:] + x[..., 1:2]

    compare(step, normal(2, 3, device=device), normal(9, 2, 4, device=device), [], chunk=4)
    compare(step, normal(2, 3, device=device), normal(9, 4, device=device), [], chunk=4)


def test_cotangents_of_what_steps_share_are_summed_by_the_kernels(device):
    """Of several tensors, of parts of one, and of one that rows have each: compared, and then counted."""
    weights, pair = [normal(3, device=device) for _ in range(2)], normal(2, 3, device=device)
    step = lambda z: weights[0] * torch.sin(weights[1] * z) + pair[0] * torch.cos(pair[1] * z)  # noqa: E731
    fused = compare(step, normal(2, 3, device=device), None, [*weights, pair], chunk=4, length=9)
    run, found = fused.run(), fused.solve(4)
    with torch.profiler.profile() as profile:
        pull_back(run, found.states, torch.ones_like(found.states), 4)
    assert [event.count for event in profile.key_averages() if event.key == "aten::sum"] == []


def test_a_part_of_what_is_read_gets_zeros(device, poisoned_memory):
    """What no lane reads of an input has a gradient of 0, not of whatever memory held."""
    compare(
        lambda z, x: torch.sin(z) * x[..., 1:3],
        normal(2, 2, device=device),
        normal(9, 2, 5, device=device),
        [],
        chunk=4,
    )


@pytest.mark.thorough
def test_gradients_of_what_needs_none_are_not_asked_for(device):
    """Only z0, only a closure, or nothing at all."""
    step, z0, xs, closures = elementwise(1, device)
    for some in ([closures[0]], [xs]):
        for tensor in (z0, xs, *closures):
            tensor.requires_grad_(any(tensor is each for each in some))
        ours, theirs = Fused(step, z0, xs).states(4), by_loop(step, z0, xs)
        (a,), (b,) = (torch.autograd.grad((states**2).sum(), some) for states in (ours, theirs))
        assert error(a, b) < 1e-10


@pytest.mark.thorough
def test_a_backward_pass_takes_any_cotangent(device):
    """Of the last state only, expanded, and not contiguous."""
    step, z0, xs, _ = elementwise(1, device)
    z0.requires_grad_()
    fused = Fused(step, z0, xs)
    theirs = by_loop(step, z0, xs)
    for loss in (lambda s: s[-1].sum(), lambda s: (s.mT * 2).square().sum()):
        (a,), (b,) = (torch.autograd.grad(loss(states), z0, retain_graph=True) for states in (fused.states(4), theirs))
        assert error(a, b) < 1e-10


def test_changed_tensors_are_told_in_the_backward_pass(device):
    """As autograd does: what a backward pass needs must not be written to before it."""
    for which in (0, 1, 2):
        step, z0, xs, closures = elementwise(1, device)
        given = [z0, xs, *closures[:2]]
        for tensor in given:
            tensor.requires_grad_()
        states = Fused(step, z0, xs).states(4)
        with torch.no_grad():
            given[which].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            states.sum().backward()


@pytest.mark.thorough
def test_pulling_back_by_any_chunk_gives_the_same(device):
    step, z0, xs, _ = narrow(2, device)
    fused = Fused(step, z0, xs)
    found, run = fused.solve(4), fused.run()
    given = torch.randn_like(found.states)
    expected = pull_back(run, found.states, given, 13)
    for chunk in (1, 5):
        initial, bases = pull_back(run, found.states, given, chunk)
        assert error(initial, expected[0]) < 1e-12
        for a, b in zip(bases, expected[1], strict=True):
            assert error(a, b) < 1e-12


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


@pytest.mark.parametrize(
    ("seed", "length", "rtol", "floored"),
    [
        (2, 24, 1e-5, False),  # the last correction is a tenth of what is allowed
        (3, 128, 1e-6, False),  # one is twice what is allowed, when chunks join to the last digits for the first time
        (2, 24, 1e-6, True),  # so it is here, and there is no pass left
    ],
)
def test_a_correction_that_still_shrinks_is_no_floor_of_rounding(seed, length, rtol, floored, device):
    generator = torch.Generator().manual_seed(seed)
    z0, xs = (torch.randn(*shape, 2, 1, generator=generator).to(device) for shape in ((), (length,)))
    problem = Fused(lambda z, x: 0.9 * torch.sin(z) + x, z0, xs)
    found = problem.solve(4, newton=Newton(rtol=rtol))
    assert found.left == 0
    # Where it settles at its last pass hangs by the last digits of a sine, which a GPU rounds otherwise.
    if device.type == "cpu" or not floored:
        assert bool((found.notes.taken < 0).any()) is bool(found.floored) is floored
    assert error(found.states.squeeze(-1), by_loop(problem.step, z0, xs).squeeze(-1)) < 1e-6


def test_gradients_of_a_filter_whose_powers_grow_are_those_of_the_loop(device, monkeypatch):
    """Products of its blocks lose digits that steps keep: where chunks do not join, cotangents are corrected, or taken step by step."""
    roots = torch.tensor([0.99, 0.985, 0.98, 0.975], dtype=torch.float64)
    polynomial = torch.ones(1, dtype=torch.float64)
    for root in roots:
        polynomial = torch.nn.functional.pad(polynomial, (0, 1)) - root * torch.nn.functional.pad(polynomial, (1, 0))
    companion = torch.zeros(4, 4, dtype=torch.float64)
    companion[0], companion[1:, :3] = -polynomial[1:], torch.eye(3)
    companion = companion.to(device).requires_grad_()
    z0, xs = torch.zeros(1, 4, dtype=torch.float64, device=device), normal(48, 1, 4, device=device)
    inputs = (z0.requires_grad_(), xs.requires_grad_(), companion)
    fused = Fused(lambda z, x: z @ companion.mT + x, z0, xs)
    right = torch.autograd.grad(by_loop(fused.step, z0, xs)[-1].sum(), inputs)
    found = torch.autograd.grad(fused.states(12)[-1].sum(), inputs)
    for one, other in zip(found, right, strict=True):
        assert error(one, other) < 1e-10
    # Without the passes that see it, digits are missing: else this test shows nothing.
    monkeypatch.setattr(back, "_TOLERANCE", {torch.float64: 1e9})
    rough = torch.autograd.grad(fused.states(12)[-1].sum(), inputs)
    assert max(error(one, other) for one, other in zip(rough, right, strict=True)) > 1e-10
