"""What is easily mixed up: where tensors lie, what a first solve has shown, and who is asked whether a gradient is right."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import deeppcr
from deeppcr import Loop, Newton, StepError
from fuse.loops import Fused, by_loop
from kernel_support import error, thorough

pytestmark = pytest.mark.usefixtures("kernels")
NEWTON = Newton(chunk=4)


def normal(*shape, device):
    return torch.randn(*shape, dtype=torch.float64, device=device)


def by_kernels(solution):
    return solution.plan.evaluation.startswith("fused kernels")


def test_launches_tell_tensors_that_share_their_memory(device, compiled):
    """One tensor given twice, and two parts of one or the other, are launches of their own."""

    def step(z, x):
        return 0.5 * torch.sin(z) * x[0] + x[1] - x[2]

    z0, a, b, c = normal(2, 3, device=device), *(normal(18, 2, 3, device=device) for _ in range(3))
    problem = Fused(step, z0, (a[:9], b[:9], c[:9]))
    for xs in ((a[:9], a[:9], b[:9]), (a[:9], b[:9], c[:9]), (a[:9], b[:9], a[9:]), (a[:9], b[:9], b[9:])):
        for _ in range(2):
            problem.inputs = list(xs)
            assert error(problem.solve(4).states.reshape(9, 2, 3), by_loop(step, z0, xs)) < 1e-12


def test_launches_tell_dtypes(device, compiled):
    """Inputs of another dtype that lie alike are read as what they are."""
    step, z0, xs = lambda z, x: 0.5 * torch.sin(z) + x, normal(2, 3, device=device), normal(9, 2, 3, device=device)
    problem = Fused(step, z0, xs)
    for given in (xs, xs.float(), xs.half(), xs):
        for _ in range(2):
            problem.inputs = [given]
            assert error(problem.solve(4).states.reshape(9, 2, 3), by_loop(step, z0, given.double())) < 1e-12
    assert device.type != "cpu" or compiled() > 0  # what is counted stands for compiled kernels


def test_launches_tell_guesses(device, compiled):
    """By their dtype and by where they begin. From the right states, which float32 holds too, two passes do."""
    step, z0, xs = (
        lambda z, x: 0.75 * z.abs() - x,
        normal(2, 3, device=device).round(),
        normal(9, 2, 3, device=device).round(),
    )
    problem, right = Fused(step, z0, xs), by_loop(step, z0, xs)
    elsewhere = torch.cat([right.new_zeros(1), right.flatten()])[1:].view(9, 2, 3)
    for guess in (None, right, right.float(), elsewhere):
        for _ in range(2):
            found = problem.solve(4, guess=guess)
            assert error(found.states.reshape(9, 2, 3), right) < 1e-12
            assert guess is None or found.passes == 2
    assert device.type != "cpu" or compiled() > 0  # what is counted stands for compiled kernels


def test_tensors_stored_as_their_negatives(device):
    def step(z, x):
        return 0.5 * torch.sin(z) + x

    z0, xs = normal(2, 3, device=device), normal(9, 2, 3, device=device)
    problem = Fused(step, z0, xs)
    problem.z0, problem.inputs = torch._neg_view(z0), [torch._neg_view(xs)]
    assert error(problem.solve(4).states.reshape(9, 2, 3), by_loop(step, -z0, -xs)) < 1e-12


@pytest.mark.parametrize("solver", [NEWTON, *thorough(Loop(by="kernel"))])
def test_a_hook_on_gradients_is_refused_whatever_was_solved_before(solver, device):
    """Kernels never call it: the gradient would be another, also where earlier solves needed none."""

    def step(z, x):
        y = torch.sin(z) * x
        if y.requires_grad:
            y.register_hook(lambda gradient: 2 * gradient)
        return 0.5 * y

    z0, xs = normal(2, 3, device=device), normal(9, 2, 3, device=device)
    for _ in range(2):
        found = deeppcr.solve(step, z0, xs, solver=solver)
    assert by_kernels(found)
    for _ in range(3):
        with pytest.raises(StepError, match="hook"):
            deeppcr.solve(step, z0.clone().requires_grad_(), xs, solver=solver)


def test_a_hook_on_a_module_inside_a_step_is_refused_though_it_changes_nothing(device):
    """It is never called, which nobody can see in states or gradients."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()).to(device)
    net[0].register_full_backward_hook(lambda module, *gradients: None)
    z0 = normal(2, 3, device=device).float()
    for solver in (Newton(), Loop(by="kernel")):
        with torch.no_grad():
            for _ in range(2):
                found = deeppcr.solve(net, z0, length=9, solver=solver)
        assert by_kernels(found)
        for _ in range(2):
            with pytest.raises(StepError, match=r"the module Sequential\.0 has a backward hook"):
                deeppcr.solve(net, z0, length=9, solver=solver)


@pytest.mark.parametrize("where", ["inside", "all"])
def test_a_hook_that_comes_later_is_seen(where, device):
    """The kernels were held against the same step without it, with gradients: with a hook it is another one."""
    net, hook = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()).to(device), lambda module, *gradients: None
    z0 = normal(2, 3, device=device).float()
    for _ in range(3):
        found = deeppcr.solve(net, z0, length=9, solver=Newton())
    assert by_kernels(found)
    register = torch.nn.modules.module.register_module_full_backward_hook
    handle = register(hook) if where == "all" else net[0].register_full_backward_hook(hook)
    try:
        for _ in range(3):
            with pytest.raises(StepError, match="backward hook"):
                deeppcr.solve(net, z0, length=9, solver=Newton())
    finally:
        handle.remove()
    assert by_kernels(deeppcr.solve(net, z0, length=9, solver=Newton()))


def test_no_gradient_goes_through_data(device):
    z0, xs, weight = (normal(*shape, device=device).requires_grad_() for shape in ((2, 3), (9, 2, 3), (3,)))

    def step(z, x):
        return 0.5 * torch.sin(z * weight.data + z.data) + x.data * weight

    ours, theirs = deeppcr.solve(step, z0, xs, solver=Loop(by="kernel")).states, by_loop(step, z0, xs)
    assert error(ours, theirs) < 1e-12
    for a, b in zip(*(torch.autograd.grad((s**2).sum(), [z0, weight]) for s in (ours, theirs)), strict=True):
        assert error(a, b) < 1e-12


@pytest.mark.parametrize("cell", [nn.GRUCell, *thorough(nn.RNNCell, nn.LSTMCell)])
def test_a_cell_of_pytorch_is_differentiated(cell, device):
    """That of a GRU works in place inside, and on a GPU is one operation, as that of an LSTM."""
    cell = cell(2, 3, dtype=torch.float64, device=device)
    h, c, xs = (normal(*shape, device=device).requires_grad_() for shape in ((2, 3), (2, 3), (9, 2, 2)))
    z0, wanted = ((h, c), [c]) if isinstance(cell, nn.LSTMCell) else (h, [])
    ours = deeppcr.solve(lambda z, x: cell(x, z), z0, xs, solver=Loop(by="kernel")).states
    theirs, wanted = by_loop(lambda z, x: cell(x, z), z0, xs), [*wanted, h, xs, *cell.parameters()]
    losses = [sum((leaf**2).sum() for leaf in tree_leaves(states)) for states in (ours, theirs)]
    for a, b in zip(*(torch.autograd.grad(loss, wanted) for loss in losses), strict=True):
        assert error(a, b) < 1e-12


@pytest.mark.parametrize(
    ("mixing", "dtype"),
    [(False, torch.int8), *thorough((True, torch.uint8), (True, torch.int32), (False, torch.int16))],
)
def test_small_integers_wrap_around(mixing, dtype, device):
    """Also in a solve that nobody looks at: the first ones have shown none that do."""
    z0, xs, count = normal(2, 3, device=device), normal(9, 2, 3, device=device), torch.ones(9, 2, 1, dtype=dtype)
    most = torch.iinfo(dtype).max

    def step(z, x):
        number = (x[1] * (most - 2) - 7).to(z.dtype) / most
        return 0.3 * torch.sin(z * number) + x[0] + (0.1 * z.sum(-1, keepdim=True) if mixing else 0)

    problem = Fused(step, z0, (xs, count.to(device)))
    for factor in (1, 0, 3):
        problem.inputs = [xs, (factor * count).to(device)]
        expected = by_loop(step, z0, tuple(problem.inputs))
        assert error(problem.solve(4).states.reshape(9, 2, 3), expected) < 1e-12
