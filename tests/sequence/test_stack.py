"""Lists of steps: modules that are alike are stacked, and one stands in for all, where it does what they do."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr import Newton
from problems import Generator, relative_error


class Block(nn.Module):
    def __init__(self, width, slope=0.1):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.slope = slope
        self.register_buffer("shift", torch.randn(width))

    def forward(self, z):
        return nn.functional.leaky_relu(self.linear(z), self.slope) + 0.1 * self.shift


def check_list(layers, z0, said, xs=None):
    with torch.no_grad():
        loop = plain_loop_over(layers, z0, xs)
    solution = deeppcr.solve(layers, z0, xs, solver=Newton())
    assert relative_error(solution.states, loop) < 1e-9
    assert any(said in note for note in solution.plan.notes)
    return solution


def plain_loop_over(layers, z, xs=None):
    states = []
    for index, layer in enumerate(layers):
        z = layer(z) if xs is None else layer(z, xs[index])
        states.append(z)
    return torch.stack(states)


def test_modules_of_equal_structure_are_stacked(device):
    layers = nn.ModuleList(Block(4) for _ in range(20)).double().to(device)
    z0 = torch.randn(3, 4, dtype=torch.float64, device=device)
    solution = check_list(layers, z0, "20 stacked in 1 groups")
    loss = solution.states.square().sum()
    ours = torch.autograd.grad(loss, list(layers.parameters()))
    loops = torch.autograd.grad(plain_loop_over(layers, z0).square().sum(), list(layers.parameters()))
    for a, b in zip(ours, loops, strict=True):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9)


def test_modules_that_differ_in_any_attribute_are_not(device):
    z0 = torch.randn(3, 4, dtype=torch.float64, device=device)
    mixed = [Block(4, slope=0.1 if i % 2 else 0.3).double().to(device) for i in range(10)]
    mixed.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double().to(device))
    hooked = Block(4).double().to(device)
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    mixed += [hooked, torch.sin, torch.sin, lambda z: 0.5 * z]
    solution = check_list(mixed, z0, "12 stacked in 3 groups, 3 called one by one")
    assert solution.plan.evaluation == "loop, vmap"
    parameters = [p for layer in mixed if isinstance(layer, nn.Module) for p in layer.parameters()]
    ours = torch.autograd.grad(solution.states.sum(), parameters)
    loops = torch.autograd.grad(plain_loop_over(mixed, z0).sum(), parameters)
    for a, b in zip(ours, loops, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)


def test_training_mode_shapes_and_extra_tensors_tell_modules_apart():
    from deeppcr.sequence.stack import _same_structure

    base = Block(4)
    assert _same_structure(base, Block(4))
    assert not _same_structure(base, Block(5))
    assert not _same_structure(base, Block(4).eval())
    assert not _same_structure(base, torch.sin)
    assert not _same_structure(nn.Tanh(), nn.Tanh())  # nothing to stack
    extra = Block(4)
    extra.table = torch.ones(3)
    other = Block(4)
    other.table = torch.ones(3)
    assert not _same_structure(extra, other)  # a tensor that is no buffer: not compared
    assert not _same_structure(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert not _same_structure(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    for value, twin, different in (
        ([1, (2, 3)], [1, (2, 3)], [1, (2, 4)]),
        ({"a": 1}, {"a": 1}, {"a": 2}),
        (1, 1, 1.0),
    ):
        one, two, three = Block(4), Block(4), Block(4)
        one.setting, two.setting, three.setting = value, twin, different
        assert _same_structure(one, two)
        assert not _same_structure(one, three)


def test_a_list_with_inputs_for_every_step(device):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, z, x):
            return torch.tanh(self.linear(z)) + x

    make = Generator(0, torch.float64, device)
    layers = [Gated().double().to(device) for _ in range(12)]
    xs = make.normal(12, 4)
    check_list(layers, make.normal(3, 4), "12 stacked", xs)
    check_list([*layers[:11], lambda z, x: torch.sin(z) + x], make.normal(3, 4), "1 called one by one", xs)
    check_list([lambda z, x: torch.sin(z) + x] * 12, make.normal(3, 4), "12 stacked", xs)


def test_threads_that_share_one_model(device):
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12)).double().to(device)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with torch.no_grad(), ThreadPoolExecutor(4) as pool:
            inputs = [torch.randn(2, 4, dtype=torch.float64, device=device) for _ in range(16)]
            solutions = list(pool.map(lambda z0: deeppcr.solve(layers, z0, solver=Newton()), inputs))
    finally:
        sys.setswitchinterval(before)
    for z0, solution in zip(inputs, solutions, strict=True):
        assert relative_error(solution.states, plain_loop_over(layers, z0)) < 1e-9
    assert all(isinstance(p, nn.Parameter) for layer in layers for p in layer.parameters())


def test_backward_hooks_keep_a_module_out_of_the_stack(device):
    layers = [nn.Linear(4, 4).double().to(device) for _ in range(6)]
    layers[2].register_full_backward_hook(lambda module, inputs, outputs: tuple(0 * g for g in inputs))
    with torch.no_grad():  # where they do no harm
        solution = deeppcr.solve(layers, torch.randn(2, 4, dtype=torch.float64, device=device), solver=Newton())
    assert any("1 called one by one" in note for note in solution.plan.notes)


def test_what_a_later_callable_closes_over_has_a_gradient(device):
    z0 = torch.ones(2, 3, device=device)
    weight = torch.full((3,), 0.5, device=device, requires_grad=True)
    steps = [torch.tanh, lambda z: z * weight, torch.sin]
    (ours,) = torch.autograd.grad(deeppcr.solve(steps, z0, solver=Newton()).states.sum(), weight)
    (loops,) = torch.autograd.grad(plain_loop_over(steps, z0).sum(), weight)
    assert torch.allclose(ours, loops, rtol=1e-4)


class Child(nn.Module):
    """Reaches its network without being its parent, as many do."""

    def __init__(self, net):
        super().__init__()
        self.linear, self.net = nn.Linear(4, 4), [net]


class Scaled(Child):
    def forward(self, z):
        return torch.tanh(self.linear(z) * self.net[0].scale)


class Numbered(Child):
    def forward(self, z):
        number = [each is self for each in self.net[0].layers].index(True)
        return torch.tanh(self.linear(z) * (1 + 0.1 * number))


class FirstIsOther(Child):
    def forward(self, z):
        return torch.tanh(self.linear(z)) + (self.net[0].layers[0] is self)


class LastIsOther(Child):
    def forward(self, z):
        return torch.tanh(self.linear(z)) + (self.net[0].layers[-1] is self)


class Trained(Child):
    def forward(self, z):
        return torch.tanh(self.linear(z)) + (0.5 if self.linear.weight.requires_grad else 0.0)


class OfParameters(Child):
    def forward(self, z):
        return torch.tanh(self.linear(z)) + (0.5 if isinstance(self.linear.bias, nn.Parameter) else 0.0)


class Attributed(Child):
    def __init__(self, net):
        super().__init__(net)
        self.linear.weight.gain = 0.1

    def forward(self, z):
        return torch.tanh(self.linear(z)) * self.linear.weight.gain


class Locked(Child):
    """Holds what cannot be copied, and what it must not write to is the caller's."""

    lock = threading.Lock()

    def __init__(self, net):
        super().__init__(net)
        self.held, self.condition = self.lock, net.condition

    def forward(self, z):
        with self.held:
            return torch.tanh(self.linear(z) + self.condition)


class Net(nn.Module):
    def __init__(self, kind, count=12):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.condition = nn.Linear(4, 4)(torch.ones(3, 4)) if kind is Locked else None
        self.layers = nn.ModuleList()
        for _ in range(count):
            self.layers.append(kind(self))


@pytest.mark.parametrize("gradient", [deeppcr.Implicit(), deeppcr.Unrolled()])
def test_what_modules_share_has_its_gradient(gradient, device):
    net = Net(Scaled).double().to(device)
    z0 = torch.randn(3, 4, dtype=torch.float64, device=device)
    found = deeppcr.solve(net.layers, z0, solver=Newton(), gradient=gradient)
    assert any("12 stacked in 1 groups" in note for note in found.plan.notes)
    loop = plain_loop_over(net.layers, z0)
    for ours, loops in zip(*(torch.autograd.grad(s.sin().sum(), [*net.parameters()], retain_graph=True) for s in (found.states, loop)), strict=True):  # fmt: skip
        assert torch.allclose(ours, loops, rtol=1e-7, atol=1e-9)
    model = deeppcr.nn.Sequential.from_torch(nn.Sequential(*net.layers), mode="parallel")
    assert torch.allclose(
        *(torch.autograd.grad(out.sum(), net.scale)[0] for out in (model(z0), loop[-1])), rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("kind", [Numbered, FirstIsOther, LastIsOther, Trained, OfParameters, Attributed])
def test_modules_that_a_stand_in_is_not_are_called_themselves(kind, device):
    net = Net(kind).double().to(device)
    z0 = torch.randn(3, 4, dtype=torch.float64, device=device)
    found = check_list(net.layers, z0, "where one stands in for others, it fails or does something else")
    for ours, loops in zip(*(torch.autograd.grad(s.sum(), [*net.layers.parameters()]) for s in (found.states, plain_loop_over(net.layers, z0))), strict=True):  # fmt: skip
        assert torch.allclose(ours, loops, rtol=1e-7, atol=1e-9)
    (finding,) = deeppcr.check(net.layers, z0)
    assert (finding.kind, "called one by one" in finding.message) == ("slow", True)


def test_modules_may_hold_what_cannot_be_copied(device):
    net = Net(Locked).to(device)
    net.condition = net.condition.to(device)
    for layer in net.layers:
        layer.condition = net.condition
    z0 = torch.randn(3, 4, device=device)
    found = deeppcr.solve(net.layers, z0, solver=Newton())
    loop = plain_loop_over(net.layers, z0)
    assert relative_error(found.states, loop) < 1e-5
    ours, loops = (torch.autograd.grad(s.sum(), net.condition, retain_graph=True)[0] for s in (found.states, loop))
    assert relative_error(ours, loops) < 1e-4


def test_modules_are_left_as_they_were(device):
    class Notes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(4, 4), []

        def forward(self, z):
            self.seen.append(len(self.seen))
            return torch.tanh(self.linear(z)) + len(self.seen)

    layers = nn.ModuleList(Notes() for _ in range(6)).to(device)
    with pytest.raises(deeppcr.StepError, match="'seen'"):
        deeppcr.solve(layers, torch.randn(3, 4, device=device), solver=Newton())
    assert not any(layer.seen for layer in layers)


class Ranged(nn.Module):
    """Takes no state of another layer."""

    def __init__(self, most):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("most", torch.tensor(most))

    def forward(self, z):
        if (z.abs() > self.most).any():
            raise ValueError("out of range")
        return 0.4 * torch.tanh(self.linear(z)) * self.most


def test_modules_need_not_take_the_states_of_others(device):
    layers = nn.ModuleList(Ranged(8 * 0.5**i) for i in range(8)).to(device)
    z0 = torch.randn(3, 4, device=device)
    states = plain_loop_over(layers, z0)
    assert relative_error(deeppcr.solve(layers, z0, guess=states.detach()).states, states) < 1e-5
    assert deeppcr.predict(layers, z0).length == 8


class Looks(nn.Module):
    def __setattr__(self, name, value):
        self.names.append(name)
        super().__setattr__(name, value)

    def __init__(self, inner):
        object.__setattr__(self, "names", [])
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), inner

    def forward(self, z):
        return 0.5 * torch.tanh(self.linear(z)) + 0.3 * self.inner(z)


class Given(Looks):
    def __new__(cls, inner):
        assert inner is not None
        return super().__new__(cls)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [Looks, Given])
@pytest.mark.parametrize("how", ["script", "trace", "graph", "plain"])
def test_modules_of_other_kinds_stand_in_for_others_too(kind, how, device):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)
    if how == "script":
        inner = torch.jit.script(inner)
    elif how == "trace":
        inner = torch.jit.trace(inner, torch.ones(3, 4, device=device))
    elif how == "graph":
        inner = torch.fx.symbolic_trace(inner)
    layers = nn.ModuleList(kind(inner) for _ in range(8)).to(device)
    z0 = torch.randn(3, 4, device=device)
    found = deeppcr.solve(layers, z0, solver=Newton())
    loop = plain_loop_over(layers, z0)
    assert relative_error(found.states, loop) < 1e-5
    assert any("8 stacked in 1 groups" in note for note in found.plan.notes)
    ours, loops = (torch.autograd.grad(s.sum(), [*layers.parameters()]) for s in (found.states, loop))
    for one, other in zip(ours, loops, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("where", [0, 3, 7])
def test_modules_that_keep_what_a_call_sets_are_refused(where, device):
    class Counts(nn.Module):
        def __init__(self, counts):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("counts", torch.tensor(float(counts)))

        def forward(self, z):
            self.calls += self.counts
            return torch.tanh(self.linear(z))

    layers = nn.ModuleList([nn.Tanh(), *(Counts(i == where) for i in range(8))]).to(device)
    with pytest.raises(deeppcr.StepError, match="'calls'"):
        deeppcr.solve(layers, torch.randn(3, 4, device=device), solver=Newton())
