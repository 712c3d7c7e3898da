"""A step may hide the derivative of some of its numbers (``round``, ``detach``): what then adds up unseen is found, and left to the loop."""

import warnings
from functools import cache

import pytest
import torch

import deeppcr
from deeppcr import Newton, Result
from deeppcr.graphs import record
from deeppcr.ways import judged, plan
from kernel_support import pairwise
from problems import plain_loop
from tape import Tape

GRID = {torch.float32: 2.0**-15, torch.float64: 2.0**-34}
SMALL = {torch.float32: 1e-5, torch.float64: 1e-10}


def rounded_clock(z, x):
    grid = GRID[x.dtype]
    return 0.99 * z[0] + x, torch.round((z[1] + grid) / grid) * grid


def rounded_clock_beside_tanh(z, x):
    return torch.tanh(0.9 * z[0] + x), rounded_clock(z, x)[1]


def clock_drives_filter(z, x):
    return 0.9 * z[0] + torch.sin(5 * z[1]), rounded_clock(z, x)[1]


def floored_counter(z, x):
    grid = GRID[x.dtype]
    return torch.tanh(z[0] + x), torch.floor(z[1] / grid + 1.5) * grid


def detached(z, x):
    return torch.tanh(0.9 * z[0] + x), z[1].detach() + 0.1 * SMALL[x.dtype] * 100


def half_detached(z, x):
    """Half of the influence is in the derivative."""
    return torch.tanh(0.9 * z[0] + x), 0.5 * z[1] + 0.5 * z[1].detach() + 0.1 * SMALL[x.dtype] * 100


def slow_statistics(z, x):
    level = z[1].detach() + 10 * SMALL[x.dtype] * z[0].detach().square()
    return torch.tanh(0.5 * z[0] + x), level


def dithered(z, x):
    """The increment is a sign, whose derivative is none; and the level itself is detached."""
    return 0.9 * z[0] + x, z[1].detach() + 10 * SMALL[x.dtype] * torch.sign(z[0] + 1)


def swapped_registers(z, x):
    """Each number of the second tensor takes the other's place: what one hides shows in the other."""
    first, second = z[1].unbind(-1)
    return 0.9 * z[0] + x, torch.stack([second.detach() + 5 * SMALL[x.dtype], first], -1)


def some_columns(z, x):
    column = torch.arange(z[1].shape[-1], device=x.device) == 1
    return 0.9 * z[0] + x, torch.where(column, z[1].detach(), z[1]) + SMALL[x.dtype]


#: Steps that hide derivatives which matter, with the width of their second tensor.
HIDING = {
    each.__name__: (each, width)
    for each, width in [
        (rounded_clock, 1),
        (rounded_clock_beside_tanh, 1),
        (clock_drives_filter, 1),
        (floored_counter, 1),
        (detached, 1),
        (half_detached, 1),
        (slow_statistics, 1),
        (dithered, 1),
        (swapped_registers, 2),
        (some_columns, 3),
    ]
}


def problem(width, dtype, device, rows=2, length=600):
    made = torch.Generator("cpu").manual_seed(0)
    xs = torch.randn(length, rows, 1, generator=made, dtype=dtype).to(device)
    z0 = torch.zeros(rows, 1, dtype=dtype, device=device), torch.full((rows, width), 100.0, dtype=dtype, device=device)
    return z0, xs


@cache
def looped(name, dtype, device):
    """A step that hides a derivative, with its start and inputs, and what the loop gives."""
    step, width = HIDING[name]
    loop = problem(width, dtype, device)
    return step, loop, plain_loop(step, *loop)


def is_right(states, expected, dtype):
    return all(
        ((one - other).abs() <= 10 * SMALL[dtype] * other.abs().amax()).all()
        for one, other in zip(states, expected, strict=True)
    )


def solved(*loop, **settings):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        return deeppcr.solve(*loop, **settings), told


@pytest.mark.usefixtures(
    "without_kernels"
)  # whose chunks are long: two of them are right after two passes. See fuse/test_hidden.py
@pairwise(
    name=HIDING.keys(),
    dtype={"float32": torch.float32, "float64": torch.float64},
    solver={"auto": Newton(), "chunk 1": Newton(chunk=1), "local": Newton(scale="local")},
)
def test_what_adds_up_unseen_is_left_to_the_loop_and_told(name, dtype, solver, device):
    step, loop, expected = looped(name, dtype, device)
    found, told = solved(step, *loop, solver=solver)
    assert is_right(found.states, expected, dtype)
    assert found.result is Result.FINISHED_BY_LOOP
    assert any(issubclass(each.category, deeppcr.ConvergenceWarning) for each in told)


def reset_after_a_burst(z, x):
    """``x``: what the level is set to, where that is positive."""
    return torch.where(x > 0, x + 0 * z, z.detach() + 1e-4)


@pytest.mark.parametrize("chunk", [1, 4])
def test_what_was_large_once_does_not_hide_that_a_derivative_is_hidden(chunk, device):
    xs = torch.zeros(1500, 1, 1, device=device)
    xs[11:20], xs[20] = 1000.0, 1.0
    z0 = torch.ones(2, 3, device=device)
    found, told = solved(reset_after_a_burst, z0, xs, solver=Newton(chunk=chunk))
    assert (found.states - plain_loop(reset_after_a_burst, z0, xs)).abs().max() <= 0.01
    assert found.result is Result.FINISHED_BY_LOOP
    assert told


@pytest.mark.parametrize("name", ["rounded_clock", "detached", "half_detached", "slow_statistics"])
def test_gradients_of_a_hidden_derivative_are_those_of_the_loop(name, device):
    step, width = HIDING[name]
    z0, xs = problem(width, torch.float64, device, length=600)
    xs.requires_grad_()
    of_tuples = lambda z, x: step(z, x)  # noqa: E731
    expected = plain_loop(of_tuples, z0, xs)
    found, told = solved(of_tuples, z0, xs, solver=Newton(chunk=1))
    assert found.result is Result.FINISHED_BY_LOOP
    assert told
    assert is_right(found.states, expected, torch.float64)
    gradients = [torch.autograd.grad(each[0].sum() + each[1].sum(), xs)[0] for each in (found.states, expected)]
    assert torch.allclose(*gradients, rtol=1e-8, atol=1e-12)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("gradients", [False, True], ids=["states", "gradients"])
@pytest.mark.parametrize("name", ["rounded_clock", "detached"])
def test_by_default_it_is_the_loop(name, gradients, device, monkeypatch):
    """Also where the parallel solve is expected to be faster."""
    monkeypatch.setattr(plan, "_WORTH_NEWTON", {"cpu": 0.0, "cuda": 0.0})
    monkeypatch.setattr(plan.Record, "expected_newton", lambda *_: 0.0)
    step, width = HIDING[name]
    z0, xs = problem(width, torch.float32, device)
    xs.requires_grad_(gradients)
    expected = plain_loop(step, z0, xs)
    deeppcr.clear_caches()
    results = set()
    for _ in range(3):
        found, _ = solved(step, z0, xs)
        assert is_right(found.states, expected, torch.float32)
        results.add(found.result)
    deeppcr.clear_caches()
    assert Result.FINISHED_BY_LOOP in results  # it was tried
    assert results <= {Result.FINISHED_BY_LOOP, Result.LOOP}


def test_rows_are_told_one_by_one(device):
    """In the first row nothing is added."""

    def step(z, x):
        return torch.tanh(0.9 * z[0] + x[0]), z[1].detach() + x[1]

    z0, xs = problem(1, torch.float32, device)
    added = torch.tensor([[0.0], [1e-4]], device=device).expand(len(xs), -1, -1)
    found, _ = solved(step, z0, (xs, added), solver=Newton())
    assert found.results == (Result.CONVERGED, Result.FINISHED_BY_LOOP)
    assert is_right(found.states, plain_loop(step, z0, (xs, added)), torch.float32)


def test_what_is_exact_is_kept(device):
    """The clock stands still for a while: the loop goes on from where it does not."""

    def step(z, x):
        return 0.9 * z[0] + x[0], z[1].detach() + x[1]

    z0, xs = problem(1, torch.float64, device, rows=1, length=1500)
    added = torch.full_like(xs, 2e-10)
    added[:700] = 0
    found, _ = solved(step, z0, (xs, added), solver=Newton(), on_failure="return")
    assert found.result is Result.NOT_CONVERGED
    assert 0 < int(found.exact_steps) <= 720
    states = plain_loop(step, z0, (xs, added))
    exact = int(found.exact_steps)
    assert all(torch.equal(one[:exact], other[:exact]) for one, other in zip(found.states, states, strict=True))


@pytest.mark.parametrize("part", [0.03, 0.3])
def test_some_steps_may_hide_it(part, device):
    def step(z, x):
        return 0.9 * z[0] + x[0], torch.where(x[1], z[1].detach(), z[1]) + 1e-10

    z0, xs = problem(1, torch.float64, device)
    hiding = torch.rand(xs.shape, generator=torch.Generator().manual_seed(0)).to(device) < part
    found, told = solved(step, z0, (xs, hiding), solver=Newton(chunk=1))
    assert found.result is Result.FINISHED_BY_LOOP
    assert told
    assert is_right(found.states, plain_loop(step, z0, (xs, hiding)), torch.float64)


@pytest.mark.parametrize("chunk", [1, "auto"])
def test_what_turns_adds_up_whatever_its_sign(chunk, device):
    """From the states of a turn that was a little smaller: by how much steps miss has every direction."""

    def turning(angle):
        turn = torch.polar(torch.ones(1, dtype=torch.float64), torch.tensor([angle], dtype=torch.float64)).to(device)
        return lambda z, x: (0.9 * z[0] + x, z[1].detach() * turn)

    z0, xs = problem(1, torch.float64, device)
    z0 = z0[0], z0[1].to(torch.complex128)
    near = deeppcr.solve(turning(2.4), z0, xs, solver=deeppcr.Loop())
    step = turning(2.4 + 4e-12)
    found, told = solved(step, z0, xs, guess=near, solver=Newton(chunk=chunk))
    assert found.result is Result.FINISHED_BY_LOOP
    assert told
    assert is_right(found.states, plain_loop(step, z0, xs), torch.float64)


def straight_through(z, x):
    """Rounded, with the derivative that it has on the average."""
    clock, grid = z[1] + GRID[x.dtype], GRID[x.dtype]
    return torch.tanh(0.9 * z[0] + x), clock + (torch.round(clock / grid) * grid - clock).detach()


def constant(z, x):
    return torch.tanh(0.9 * z[0] + x * z[1][:, :1]), z[1].detach()


def quantised_input(z, x):
    return 0.9 * z[0] + torch.round(4 * x) / 4, torch.floor(x) + 0 * z[1]


def saturated(z, x):
    """Zero is the derivative that it has there."""
    return torch.relu(0.9 * z[0] + x), torch.clamp(z[1] + 1 + x.abs(), max=100.0)


def quantised_read_out(z, x):
    """What is rounded does not come back."""
    return torch.tanh(0.9 * z[0] + x), torch.round(100 * z[0]) / 100


def visible_clock(z, x):
    return torch.tanh(0.9 * z[0] + x), z[1] + GRID[x.dtype]


def reset(z, x):
    return torch.where(x > 1, x, 0.99 * z[0] + 0.1 * x), torch.where(
        x > 2, torch.zeros_like(z[1]), z[1] + GRID[x.dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    "step", [straight_through, constant, quantised_input, saturated, quantised_read_out, visible_clock, reset]
)
def test_what_hides_nothing_is_solved_in_parallel(step, dtype, device):
    z0, xs = problem(1, dtype, device)
    found, told = solved(step, z0, xs, solver=Newton())
    assert found.result is Result.CONVERGED
    assert not told
    assert is_right(found.states, plain_loop(step, z0, xs), dtype)


def floored(z, x):
    """It falls short in every step, and forgets it: nothing adds up."""
    level, grid = 0.5 * z[1] + 50 + x, 8 * GRID[x.dtype]
    return 0.9 * z[0] + x, torch.floor(level / grid) * grid


def floored_straight_through(z, x):
    level, (other, rounded) = 0.5 * z[1] + 50 + x, floored(z, x)
    return other, level + (rounded - level).detach()


def derivative_of_floored(z, x):
    return deeppcr.linear.Diagonal(torch.cat([0.9 * torch.ones_like(z[0]), 0.5 * torch.ones_like(z[1])], -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    ("step", "jacobian"),
    [
        (floored_straight_through, deeppcr.DenseJacobian()),
        (floored, deeppcr.GivenJacobian(derivative_of_floored, exact=True)),
    ],
    ids=["straight-through", "given"],
)
def test_a_derivative_that_is_right_on_the_average_is_borne_out(step, jacobian, dtype, device, monkeypatch):
    """Small residuals of one sign do not add up where it says so: the steps are asked, and agree."""
    asked = []
    ask = judged.steps_have_derivative
    monkeypatch.setattr(judged, "steps_have_derivative", lambda *given: asked.append(ask(*given)) or asked[-1])
    z0, xs = problem(1, dtype, device)
    found, told = solved(step, z0, xs, solver=Newton(chunk=1, jacobian=jacobian))
    assert [bool(each.all()) for each in asked] == [True]
    assert found.result is Result.CONVERGED
    assert not told
    assert is_right(found.states, plain_loop(step, z0, xs), dtype)


def test_replays_ask_the_general_iteration(device, monkeypatch):
    """A recording made while nothing was added; then something is. On a GPU there are kernels, of which fuse/test_hidden.py asks the same."""
    if device.type != "cpu":
        pytest.skip("what stands in for a CUDA graph here is not one")
    monkeypatch.setitem(record.RECORDERS, device.type, Tape)
    deeppcr.clear_caches()

    def step(z, x):
        return 0.9 * z[0] + x[0], z[1].detach() + x[1]

    z0, xs = problem(1, torch.float32, device)
    nothing = torch.zeros_like(xs)
    for _ in range(4):
        found, _ = solved(step, z0, (xs, nothing), solver=Newton())
    assert "replayed as a CUDA graph" in found.plan.notes
    found, told = solved(step, z0, (xs, nothing + 3e-5), solver=Newton())
    deeppcr.clear_caches()
    assert found.result is Result.FINISHED_BY_LOOP
    assert told
    assert is_right(found.states, plain_loop(step, z0, (xs, nothing + 3e-5)), torch.float32)


@pytest.mark.parametrize("name", HIDING)
def test_check_tells(name, device):
    step, width = HIDING[name]
    z0, xs = problem(width, torch.float32, device, length=50)
    assert [finding.kind for finding in deeppcr.check(step, z0, xs)] == ["derivative"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    "step", [lambda z, x: (0.7 * z + 3) - 3 + 0 * x, lambda z, x: 3 * (torch.sigmoid(z) - 0.5) + 0 * x]
)
def test_what_fades_may_be_the_difference_of_what_stays_large(step, dtype, device):
    z0 = torch.linspace(0.5, 2, 6, dtype=dtype, device=device).view(2, 3)
    xs = torch.zeros(300, 2, 3, dtype=dtype, device=device)
    assert [finding.kind for finding in deeppcr.check(step, z0, xs)] == ["fading"]


@pytest.mark.parametrize("step", [straight_through, quantised_input, saturated, visible_clock])
def test_check_has_nothing_to_tell_of_steps_that_hide_nothing(step, device):
    assert deeppcr.check(step, *problem(1, torch.float32, device, length=50)) == []


@pytest.mark.parametrize(("dtype", "added"), [(torch.float16, 0.0625), (torch.float16, 0.25), (torch.bfloat16, 0.5)])
def test_half_precision(dtype, added, device):
    def step(z, x):
        return 0.9 * z[0] + x, z[1].detach() + added

    z0, xs = ([each.to(dtype) for each in nest] for nest in problem(1, torch.float32, device, length=300))
    z0, xs = tuple(z0), torch.stack(xs)
    for solver in (Newton(), Newton(chunk=1)):
        found, _ = solved(step, z0, xs, solver=solver)
        assert (found.final[1] - plain_loop(step, z0, xs)[1][-1]).abs().max() <= 3
