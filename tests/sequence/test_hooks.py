"""Hooks on gradients inside a step are refused: a parallel backward pass would not call them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import deeppcr
from deeppcr import Loop, StepError


def clipped(z, weight):
    y = torch.tanh(z @ weight)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return y


@pytest.fixture
def weights(device):
    return (torch.randn(20, 4, 4, generator=torch.Generator().manual_seed(0)) / 2).to(device)


def test_a_hook_on_a_tensor(weights, device):
    z0 = torch.ones(3, 4, device=device, requires_grad=True)
    with pytest.raises(StepError, match="hook on the gradient of a tensor"):
        deeppcr.solve(clipped, z0, weights, solver=deeppcr.Newton())
    assert [finding.kind for finding in deeppcr.check(clipped, z0, weights)]
    loop = deeppcr.solve(clipped, z0, weights, solver=Loop()).states
    (gradient,) = torch.autograd.grad(loop.sum(), z0)
    assert gradient.abs().max() > 0
    with torch.no_grad():  # where it is never registered
        assert torch.allclose(deeppcr.solve(clipped, z0, weights, solver=deeppcr.Newton()).states, loop, atol=1e-5)
    assert deeppcr.solve(clipped, z0.detach(), weights, solver=deeppcr.Newton()).result is deeppcr.Result.CONVERGED


@pytest.mark.parametrize("gradients", [False, True])
def test_what_is_put_into_the_data_of_a_tensor(gradients, device):
    """As a bound on the size of weights does it. Under PyTorch's transforms the process would end, of which no error tells."""
    weight = torch.nn.Parameter(torch.eye(3, device=device), requires_grad=gradients)

    def bounded(z, x):
        weight.data = torch.renorm(weight.data, 2, 0, 0.5)
        return torch.tanh(z @ weight) + x

    z0, xs = torch.ones(2, 3, device=device), torch.ones(50, 2, 3, device=device)
    for solver in (deeppcr.Newton(), deeppcr.Picard()):
        with pytest.raises(StepError, match=r"\.data of one"):
            deeppcr.solve(bounded, z0, xs, solver=solver)
    assert [finding.kind for finding in deeppcr.check(bounded, z0, xs)] == ["error"]
    assert deeppcr.solve(bounded, z0, xs).result is deeppcr.Result.LOOP


@pytest.mark.parametrize("where", ["outside", "inside", "all"])
def test_a_hook_on_a_module(where, device):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).to(device)
    hook = lambda module, *gradients: None  # noqa: E731
    z0 = torch.ones(3, 4, device=device)
    if where == "all":
        handle = torch.nn.modules.module.register_module_full_backward_hook(hook)
    else:
        handle = (net if where == "outside" else net[0]).register_full_backward_hook(hook)
    try:
        name = {"outside": "the module Sequential has", "inside": "the module Sequential.0 has", "all": "all modules"}
        for step in (net, [net, torch.sin]):
            with pytest.raises(StepError, match=name[where]):
                deeppcr.solve(step, z0, length=2, solver=deeppcr.Newton())
        with torch.no_grad():
            assert deeppcr.solve(net, z0, length=20, solver=deeppcr.Newton()).result is deeppcr.Result.CONVERGED
    finally:
        handle.remove()
    deeppcr.solve(net, z0, length=20, solver=deeppcr.Newton()).states.sum().backward()


def test_a_hook_on_a_parameter_is_called_as_ever(device):
    """Once, with the sum over all steps: it is not inside the step."""
    net, seen = torch.nn.Linear(4, 4, device=device), []
    net.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    deeppcr.solve(net, torch.ones(3, 4, device=device), length=20, solver=deeppcr.Newton()).states.sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], net.weight.grad)


def test_hooks_that_look_on_are_no_reason_to_refuse(device):
    """Those of PyTorch's counter of operations."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).to(device)
    z0 = torch.ones(3, 4, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        states = deeppcr.solve(net, z0, length=20, solver=deeppcr.Newton()).states
    assert counter.get_total_flops() > 0
    states.sum().backward()
