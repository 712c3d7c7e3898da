"""Steps that do something else beside others than alone, or where an iteration comes that no loop comes to: the loop's result, or told."""

import itertools
import sys
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import deeppcr
from deeppcr import Loop, Newton, Result
from deeppcr.newton import iteration
from deeppcr.runtime import in_functorch
from deeppcr.sequence.evaluate import StepError
from deeppcr.sequence.purity import SideEffect
from deeppcr.ways import plan, planned
from problems import plain_loop

LENGTH = 60


def factor(matrix):
    """Of Cholesky; of a matrix that has none, of one beside it."""
    try:
        return torch.linalg.cholesky(matrix)
    except torch.linalg.LinAlgError:
        return torch.linalg.cholesky(matrix + 0.1 * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device))


def with_factor(z, x):
    return torch.tanh(0.5 * z @ factor(x)) + 0.3


def normed(z, x):
    """By its largest number, which several steps at once do not tell."""
    try:
        size = float(z.abs().max())
    except RuntimeError:
        size = 1.0
    return torch.tanh(x - z / (1 + size))


def rarely_halved(z, x):
    with suppress(RuntimeError):
        if z.abs().max() > 1.9:
            z = z * 0.5
    return 0.5 * z + x


def problem(name, device):
    """A step, z0 [1, 2] and xs."""
    torch.manual_seed(0)
    z0 = torch.full((1, 2), 0.5, dtype=torch.float64, device=device)
    if name == "factor":
        xs = torch.eye(2, dtype=torch.float64, device=device).repeat(LENGTH, 1, 1)
        xs[LENGTH // 2] = torch.tensor([[1, 1], [1, 0.999]])
        return with_factor, z0, xs
    return {"normed": normed, "rare": rarely_halved}[name], z0, torch.randn(LENGTH, 1, 2, dtype=z0.dtype, device=device)


@pytest.mark.parametrize("name", ["factor", "normed", "rare"])
@pytest.mark.usefixtures("impatient")
def test_an_error_that_a_step_catches_leads_to_the_loop(name, device):
    step, z0, xs = problem(name, device)
    for _ in range(3):
        found = deeppcr.solve(step, z0, xs)
        torch.testing.assert_close(found.states, plain_loop(step, z0, xs))
    (record,) = plan._records.values()
    assert name == "factor" or "newton" not in record.tries  # which two steps tell


@pytest.mark.parametrize("chunk", [1, 8])
def test_a_step_that_another_one_makes_fail_is_refused(chunk, device):
    with pytest.raises(StepError, match="catches an error that several steps at once raise"):
        deeppcr.solve(*problem("factor", device), solver=Newton(chunk=chunk))


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
@pytest.mark.parametrize("name", ["normed", "rare"])
def test_what_several_steps_at_once_cannot_do_is_done_one_by_one(name, device):
    step, z0, xs = problem(name, device)
    found = deeppcr.solve(step, z0, xs, solver=Newton())
    torch.testing.assert_close(found.states, plain_loop(step, z0, xs))
    assert found.plan.evaluation == "loop"
    assert "torch.vmap does not cover the step (vmap:" in str(found.plan)


def test_one_step_in_the_middle_tells(device):
    """Up to there nothing goes by the factor."""
    step, z0, matrices = problem("factor", device)
    gates = (torch.arange(LENGTH, dtype=z0.dtype, device=device) >= LENGTH // 3).to(z0.dtype)

    def gated(z, x):
        matrix, gate = x
        return torch.tanh(0.5 * z) + gate * step(z, matrix)

    with pytest.raises(StepError, match="than one after the other"):
        deeppcr.solve(gated, z0, (matrices, gates), solver=Newton(chunk=1))


@pytest.mark.parametrize("share", [1e-3, 0.1])
def test_how_far_a_step_alone_may_be_off(share, device):
    """As products of float32 round that run in TF32, and no more."""

    def step(z, x):
        return (torch.tanh(z) + x) * (1.0 if in_functorch() else 1 + share)

    z0, xs = torch.zeros(1, 2, device=device), torch.randn(LENGTH, 1, 2, device=device)
    if share < 0.01:
        assert deeppcr.solve(step, z0, xs, solver=Newton()).result is Result.CONVERGED
        return
    with pytest.raises(StepError, match="than one after the other: it is random"):
        deeppcr.solve(step, z0, xs, solver=Newton())
    weight = torch.eye(2, device=device)
    with torch.autocast(device.type, torch.bfloat16):  # whose roundings may be any
        deeppcr.solve(lambda z, x: step(z @ weight, x).float(), z0, xs, solver=Newton())


@pytest.mark.parametrize("seed", range(4))
def test_numbers_that_cancel_but_for_rounding_are_no_other_result(seed, device):
    """The first number of the state is zero, and what it is instead depends on how products are made."""
    torch.manual_seed(seed)
    normal = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64, device=device) / 3
    frame = torch.stack([normal, *torch.eye(3, dtype=torch.float64, device=device)[:2]], 1)
    basis = torch.linalg.qr(frame)[0]
    plane = torch.eye(3, dtype=torch.float64, device=device) - torch.outer(normal, normal)
    xs = torch.randn(LENGTH, 2, 3, dtype=torch.float64, device=device)

    def step(z, x):
        return torch.tanh(z @ basis.mT + x) @ plane @ basis

    found = deeppcr.solve(step, torch.zeros_like(xs[0]), xs, solver=Newton(), on_failure="return")
    torch.testing.assert_close(found.states, plain_loop(step, torch.zeros_like(xs[0]), xs))


@pytest.mark.usefixtures("impatient")
def test_what_a_step_raises_where_no_loop_comes(device):
    """The root of z is defined where z > 0, as it is in the loop; updates of Newton's method overshoot."""
    torch.manual_seed(0)
    z0 = torch.full((1, 1), 5.0, dtype=torch.float64, device=device)
    xs = 0.5 * torch.rand(300, 1, 1, dtype=torch.float64, device=device) + 0.05

    def step(z, x):
        root = torch.linalg.cholesky(z.unsqueeze(-1))[..., 0]
        return x / (1 + (12 * root * root) ** 3) + 0.01

    for _ in range(3):
        torch.testing.assert_close(deeppcr.solve(step, z0, xs).states, plain_loop(step, z0, xs))
    (record,) = plan._records.values()
    assert "positive-definite" in record.barred["newton"].why
    with pytest.raises(torch.linalg.LinAlgError) as caught:
        deeppcr.solve(step, z0, xs, solver=Newton())
    assert "the step raised this by itself, at entry" in str(caught.value.__notes__)


@pytest.mark.usefixtures("impatient")
def test_a_parallel_solve_without_room_for_it_is_left_to_the_loop(device, monkeypatch):
    step, z0, xs = (
        lambda z, x: torch.tanh(z) + x,
        torch.zeros(1, 2, device=device),
        torch.randn(LENGTH, 1, 2, device=device),
    )

    def fails(*_):
        raise torch.OutOfMemoryError("no room for a block")

    monkeypatch.setattr(iteration, "run", fails)
    found = deeppcr.solve(step, z0, xs)
    assert found.result is Result.LOOP
    assert "newton did not work: no room for a block" in str(found.plan)
    (record,) = plan._records.values()
    assert "newton" in record.barred


@pytest.mark.usefixtures("impatient")
def test_a_later_module_that_keeps_something_is_told_once(device):
    """It is not put back."""
    layers = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh()).to(device).eval() for _ in range(LENGTH)]
    layers[40].train()
    z0 = torch.randn(3, 2, device=device)
    with torch.no_grad():
        with pytest.raises(SideEffect, match="num_batches_tracked"):
            deeppcr.solve(layers, z0)
        assert deeppcr.solve(layers, z0).result is Result.LOOP


@pytest.mark.usefixtures("impatient")
def test_inside_of_a_checkpoint_the_way_stays(device):
    w = torch.tensor(0.7, dtype=torch.float64, device=device, requires_grad=True)
    step, z0 = lambda z, x: torch.tanh(w * z) + x, torch.zeros(1, 2, dtype=torch.float64, device=device)
    xs = torch.randn(LENGTH, 1, 2, dtype=torch.float64, device=device)
    (expected,) = torch.autograd.grad(plain_loop(step, z0, xs).sum(), w)
    plans = []

    def solved(z, x):
        found = deeppcr.solve(step, z, x)
        plans.append(str(found.plan))
        return found.states

    for _ in range(3):
        (got,) = torch.autograd.grad(checkpoint(solved, z0, xs, use_reentrant=False).sum(), w)
        torch.testing.assert_close(got, expected)
    assert len(plans) >= 3
    assert all("may compute it again" in plan for plan in plans)
    (record,) = plan._records.values()
    record.seconds["loop"] = 1e9  # as that of many steps
    assert deeppcr.solve(step, z0, xs).result is Result.CONVERGED  # as without
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        deeppcr.solve(step, z0, xs)
        (record,) = (each for each in plan._records.values() if each is not record)
        record.seconds["loop"] = 1e9
        assert deeppcr.solve(step, z0, xs).result is Result.CONVERGED


@pytest.mark.usefixtures("impatient")
def test_gradients_that_count_how_often_an_index_comes(device):
    torch.manual_seed(0)
    table = nn.Embedding(8, 2, scale_grad_by_freq=True, dtype=torch.float64, device=device)
    z0, xs = torch.zeros(1, 2, dtype=torch.float64, device=device), torch.randint(0, 8, (LENGTH, 1), device=device)

    def step(z, index):
        return torch.tanh(0.5 * z + table(index))

    (expected,) = torch.autograd.grad(plain_loop(step, z0, xs).sum(), table.weight)
    for _ in range(2):
        (got,) = torch.autograd.grad(deeppcr.solve(step, z0, xs).states.sum(), table.weight)
        torch.testing.assert_close(got, expected)
    with pytest.raises(StepError, match="how often an index comes in a call"):
        deeppcr.solve(step, z0, xs, solver=Newton())
    with torch.no_grad():
        assert deeppcr.solve(step, z0, xs, solver=Newton()).result is Result.CONVERGED
    with pytest.raises(StepError, match="how often an index comes in a call"):
        deeppcr.solve(lambda z, i: torch.embedding(table.weight, i, -1, True) + 0.5 * z, z0, xs, solver=Newton())
    table.requires_grad_(False)
    assert deeppcr.solve(step, z0.requires_grad_(), xs, solver=Newton()).result is Result.CONVERGED


def test_random_numbers_of_another_thread_are_not_the_steps(device, monkeypatch):
    """As if one drew all the time."""
    drawn = itertools.count()
    for module in (planned, sys.modules["deeppcr.predict"], sys.modules["deeppcr.check"]):
        monkeypatch.setattr(module, "random_state", lambda _: torch.tensor(next(drawn)))
    step, z0, xs = lambda z, x: torch.tanh(z) + x, torch.zeros(2, 3, device=device), torch.randn(9, 2, 3, device=device)
    deeppcr.clear_caches()
    torch.testing.assert_close(deeppcr.solve(step, z0, xs).states, plain_loop(step, z0, xs))
    assert deeppcr.check(step, z0, xs) == []
    assert deeppcr.predict(step, z0, xs).length == 9
    sized = lambda z, x: torch.tanh(z) + x / (1 + z.abs().sum().item())  # noqa: E731
    torch.testing.assert_close(deeppcr.solve(sized, z0, xs).states, plain_loop(sized, z0, xs))
    dropout = nn.Dropout()
    deeppcr.clear_caches()
    with pytest.raises(StepError, match="draws random numbers"):
        deeppcr.solve(lambda z, x: dropout(torch.tanh(z)) + x, z0, xs)
    assert [finding.kind for finding in deeppcr.check(dropout, z0, length=9)] == ["random"]  # where all is zero, too


def test_a_random_step_that_vmap_does_not_cover_is_told_every_time(device):
    """And not only where numbers that were drawn make a difference."""
    rare = nn.Dropout(0.01)

    def step(z, x):
        size = z.abs().sum().item()
        return rare(torch.tanh(z)) + x / (1 + size)

    z0, xs = torch.zeros(1, 3, device=device), torch.randn(9, 1, 3, device=device)
    for ask in (deeppcr.solve, deeppcr.predict):
        deeppcr.clear_caches()
        with pytest.raises(StepError, match="draws random numbers"):
            ask(step, z0, xs)
    assert [finding.kind for finding in deeppcr.check(step, z0, xs)] == ["random"]


@pytest.mark.usefixtures("impatient")
def test_what_is_not_of_the_solve_comes_through(device, monkeypatch):
    """As what a handler of signals raises."""

    def raises(*_):
        raise TimeoutError("the caller's time is over")

    monkeypatch.setattr(iteration, "run", raises)
    with pytest.raises(TimeoutError):
        deeppcr.solve(
            lambda z, x: torch.tanh(z) + x, torch.zeros(1, 2, device=device), torch.ones(LENGTH, 1, 2, device=device)
        )


def test_what_transforms_do_not_know_is_told(device):
    def step(z):
        if in_functorch():
            raise KeyError("no rule for it")
        return torch.tanh(z)

    z0 = torch.ones(1, 2, device=device)
    with pytest.raises(StepError, match="cannot be differentiated by torch"):
        deeppcr.solve(step, z0, length=9, solver=Newton())
    assert deeppcr.solve(step, z0, length=9).result is Result.LOOP


def test_a_module_of_a_list_without_any_gradient(device):
    class Layer(nn.Module):
        def __init__(self, learns):
            super().__init__()
            self.linear, self.learns = nn.Linear(2, 2), learns

        def forward(self, z):
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns):
                return torch.tanh(self.linear(z))

    layers = [Layer(at != 12).to(device) for at in range(24)]
    z0 = torch.randn(1, 2, device=device, requires_grad=True)
    states = deeppcr.solve(layers, z0, solver=Newton()).states
    with pytest.raises(RuntimeError, match=r"part of it runs under torch\.no_grad\(\)"):
        states.sum().backward()


@pytest.mark.parametrize("solver", [None, Newton(), Loop()])
def test_fake_tensors_are_refused(solver):
    with FakeTensorMode(), pytest.raises(RuntimeError, match="cannot run on fake tensors"):
        deeppcr.solve(lambda z, x: torch.tanh(z) + x, torch.zeros(2, 3), torch.randn(9, 2, 3), solver=solver)
