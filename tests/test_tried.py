"""Gradients that a parallel solve has not: nobody meets them who did not ask for one, and who did is told the cause."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import deeppcr
from deeppcr import Newton, Result, gradient
from deeppcr.sequence.evaluate import StepError
from deeppcr.ways import plan
from problems import plain_loop

pytestmark = pytest.mark.usefixtures("impatient")
LENGTH = 60
# Before PyTorch 2.13 a checkpoint calls a function without vmap even where nothing is differentiated.
ALWAYS_SAVES = hasattr(torch.utils.checkpoint, "_NoopSaveInputs")


class Clipped(torch.autograd.Function):
    """Its backward pass is not linear: no Jacobian has it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z):
        return z * 1.0

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0].clamp(-0.1, 0.1)


def problem(name, device):
    """A step, z0 [2, 1], xs [L, 2, 1] and its parameter."""
    torch.manual_seed(0)
    xs = torch.randn(LENGTH, 2, 1, dtype=torch.float64, device=device)
    z0 = torch.full((2, 1), 0.5, dtype=torch.float64, device=device)
    w = torch.tensor(0.7, dtype=torch.float64, device=device, requires_grad=True)
    rare = xs.max()
    steps = {
        "fine": lambda z, x: torch.tanh(w * z) + x,
        "not finite": lambda z, x: torch.sqrt(torch.relu(w * z)) + x,
        "checkpoint": lambda z, x: checkpoint(lambda a: torch.tanh(w * a), z, use_reentrant=False) + x,
        "clipped": lambda z, x: Clipped.apply(torch.tanh(w * z)) + x,
        "rows": lambda z, x: torch.tanh(w * z) + x + torch.where(x == rare, z.mean(0), 0.0),
    }
    return steps[name], z0, xs, w


def check_gradient(found, step, z0, xs, w):
    ours, right = (torch.autograd.grad(states.sum(), w)[0] for states in (found.states, plain_loop(step, z0, xs)))
    assert torch.isfinite(right)
    torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["not finite", "checkpoint", "clipped", "rows"])
def test_what_a_parallel_solve_cannot_differentiate_is_left_to_the_loop(name, device):
    step, z0, xs, w = problem(name, device)
    step(z0, xs[0])  # the first checkpoint of all sets an attribute of PyTorch's function, which makes it another kind
    for turn in range(3):
        found = deeppcr.solve(step, z0, xs)
        assert found.result is Result.LOOP
        check_gradient(found, step, z0, xs, w)
        (record,) = plan._records.values()
        assert record.tries == {"loop": turn + 1}  # it was found out once
        assert record.only_loop or set(record.barred) == {"newton", "graph"}  # whose gradients are the same
    if name == "checkpoint" and ALWAYS_SAVES:
        return
    with torch.no_grad():  # where it has no derivative to be had
        assert deeppcr.solve(step, z0, xs, solver=Newton()).result is Result.CONVERGED


def test_what_can_be_differentiated_stays_parallel(device):
    step, z0, xs, w = problem("fine", device)
    for _ in range(2):
        found = deeppcr.solve(step, z0, xs)
        assert found.result is Result.CONVERGED
        check_gradient(found, step, z0, xs, w)
        (record,) = plan._records.values()
        record.seconds["loop"] = 1e9  # as that of many steps


def test_a_backward_pass_that_raised_is_remembered(device, monkeypatch):
    step, z0, xs, w = problem("rows", device)
    monkeypatch.setattr(gradient.Adjoint, "check", lambda *_: None)
    found = deeppcr.solve(step, z0, xs)
    assert found.result is Result.CONVERGED
    with pytest.raises(RuntimeError, match="rows of the batch influence each other"):
        found.states.sum().backward()
    found = deeppcr.solve(step, z0, xs)
    assert found.result is Result.LOOP
    assert "rows of the batch influence each other" in str(found.plan)
    (record,) = plan._records.values()
    assert record.choose()[0] == "loop"  # and no graph, also where there are some
    check_gradient(found, step, z0, xs, w)


def test_a_jacobian_that_is_not_finite_is_named(device):
    step, z0, xs, _ = problem("not finite", device)
    found = deeppcr.solve(step, z0, xs, solver=Newton())
    with pytest.raises(RuntimeError, match="Jacobian of the step is not finite there, though"):
        found.states.sum().backward()
    (finding,) = deeppcr.check(step, z0, xs)
    assert finding.kind == "derivative"
    assert "is not finite (row" in finding.message
    assert deeppcr.check(*problem("fine", device)[:3]) == []


def test_a_checkpoint_is_refused_by_name(device):
    step, z0, xs, _ = problem("checkpoint", device)
    with pytest.raises(StepError, match="how tensors are saved"):
        deeppcr.solve(step, z0, xs, solver=Newton())
    (finding,) = deeppcr.check(step, z0, xs)
    assert "torch.utils.checkpoint" in finding.message
    with torch.no_grad():
        assert [finding.kind for finding in deeppcr.check(step, z0, xs)] == ["slow"] * ALWAYS_SAVES


def test_how_the_caller_saves_tensors_is_not_blamed_on_the_step(device):
    step, z0, xs, _ = problem("fine", device)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert deeppcr.solve(step, z0, xs, solver=Newton()).result is Result.CONVERGED
    with torch.autograd.graph.save_on_cpu():  # and it is as it was
        torch.ones(2, requires_grad=True).exp().sum().backward()
