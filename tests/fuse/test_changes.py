"""Kernels are made for kinds of solves that come again, and what a step depends on may change: it is seen."""

import copy

import pytest
import torch
from torch import nn

import deeppcr
from deeppcr import Newton, Result
from fuse.loops import by_loop
from fuse.solving import NEWTON, by_kernels, normal, solve
from kernel_support import error, thorough

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def test_kernels_are_made_for_kinds_that_come_again(device):
    step, z0 = lambda z, x: 0.5 * torch.sin(z) + x, normal(2, 3, device=device)
    first, second = (deeppcr.solve(step, z0, xs, solver=NEWTON) for xs in normal(2, 9, 2, 3, device=device))
    assert not by_kernels(first)
    assert any("the first of its kind" in note for note in first.plan.notes)
    assert by_kernels(second)
    assert second.result is Result.CONVERGED
    # Another length of a step that has kernels needs no others.
    third = deeppcr.solve(step, z0, normal(7, 2, 3, device=device), solver=NEWTON)
    assert by_kernels(third)
    assert third.plan.chunk == 4
    # Another number of rows does.
    assert not by_kernels(deeppcr.solve(step, z0[:1], normal(7, 1, 3, device=device), solver=NEWTON))


class Changing:
    """Everything that a step may depend on beside its arguments."""

    def __init__(self, device):
        self.device = device
        self.weight, self.number, self.held = normal(3, device=device), 0.5, [normal(3, device=device), 0.1]
        self.module = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Tanh()).to(device)
        self.switch = nn.Identity()
        self.of = {"gain": normal((), device=torch.device("cpu"))}

    def step(self, z, x):
        z = self.module(z) * self.weight + self.number * self.held[0] + self.held[1] * x
        return z * self.of["gain"] if self.switch.training else z * 0.5


#: Each changes one thing; all must be seen by the next solve.
CHANGES = {
    "values in place": lambda it: it.weight.mul_(-0.5),
    "another tensor": lambda it: setattr(it, "weight", normal(3, device=it.device)),
    "a tensor of rows": lambda it: setattr(it, "weight", normal(2, 3, device=it.device)),
    "a number": lambda it: setattr(it, "number", 0.9),
    "an entry of a list": lambda it: it.held.__setitem__(0, normal(3, device=it.device)),
    "a number in a list": lambda it: it.held.__setitem__(1, 0.7),
    "a value in a dictionary": lambda it: it.of.update(gain=torch.tensor(0.2, dtype=torch.float64)),
    "a single number in place": lambda it: it.of["gain"].fill_(0.4),
    "parameters": lambda it: [each.data.mul_(0.5) for each in it.module.parameters()],
    "another parameter": lambda it: setattr(it.module[0], "weight", nn.Parameter(normal(3, 3, device=it.device))),
    "another module": lambda it: it.module.__setitem__(1, nn.Sigmoid()),
    "a mode": lambda it: it.switch.eval(),
    "a tensor of another shape": lambda it: setattr(it, "weight", normal((), device=it.device)),
}


@pytest.mark.parametrize(
    "names", [("values in place", "another tensor", "a number", "parameters", "a mode"), *thorough((tuple(CHANGES),))]
)
def test_changes_are_seen(names, device):
    it = Changing(device)
    z0, xs = normal(2, 3, device=device), normal(5, 2, 3, device=device)
    right = None
    for name in ("nothing", *names):
        with torch.no_grad():
            CHANGES.get(name, lambda it: None)(it)
            was, right = right, by_loop(it.step, z0, xs)
            assert was is None or error(was, right) > 1e-3, name
            for _ in range(2):
                found = deeppcr.solve(it.step, z0, xs, solver=NEWTON)
                assert error(found.states, right) < 1e-9, name
        assert by_kernels(found), name


GLOBAL = 0.5


def test_changed_globals_are_seen(device, monkeypatch):
    step = lambda z: GLOBAL * torch.sin(z) + 0.1  # noqa: E731
    z0 = normal(2, 3, device=device)
    for value in (0.5, 0.8, torch.tensor(0.3, dtype=torch.float64)):
        monkeypatch.setitem(globals(), "GLOBAL", value)
        found = solve(step, z0, length=9)
        assert by_kernels(found)
        assert error(found.states, by_loop(step, z0, length=9)) < 1e-9


@pytest.mark.thorough
def test_modes_that_a_step_asks_for_are_seen(device):
    """However many solves in another one went well before. (Stand-ins need no gradients: such a step is not trusted to kernels.)"""
    weight, z0 = normal(3, device=device), normal(2, 3, device=device)

    def step(z):
        factor = 0.3 if torch.is_inference_mode_enabled() else 0.5
        return torch.sin(weight * z) * (0.7 if weight.requires_grad else factor)

    for mode, differentiated in ((False, False), (True, False), (False, True)):
        weight.requires_grad_(differentiated)
        with torch.inference_mode(mode):
            right = by_loop(step, z0, length=5)
            for _ in range(4):
                found = deeppcr.solve(step, z0, length=5, solver=NEWTON)
                assert error(found.states, right) < 1e-9
        assert by_kernels(found) is not differentiated


def test_training_takes_the_loops_steps(device):
    """Some steps of an optimiser, on changing batches: parameters end as those of the loop do."""
    torch.manual_seed(1)
    cell = nn.Linear(2, 2, dtype=torch.float64, device=device)
    other = copy.deepcopy(cell)

    def train(cell, run):
        optimiser, losses = torch.optim.Adam(cell.parameters(), lr=0.05), []
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            xs = torch.randn(9, 3, 2, dtype=torch.float64, generator=generator).to(device)
            states = run(lambda z, x: torch.tanh(cell(z)) + 0.5 * x, xs.new_zeros(3, 2), xs)
            loss = (states - 0.3).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return losses

    ways = []

    def by_solve(*arguments):
        found = deeppcr.solve(*arguments, solver=NEWTON)
        ways.append(by_kernels(found))
        return found.states

    ours, theirs = train(cell, by_solve), train(other, by_loop)
    assert ways == [False, True, True, True]
    assert ours == pytest.approx(theirs, rel=1e-10)
    for a, b in zip(cell.parameters(), other.parameters(), strict=True):
        assert error(a, b) < 1e-9


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, z, x=0.0):
        return torch.tanh(self.inner(z)) + 0.5 * z + x


class Scaled(Layer):
    """Shares a factor with others, of which it is no part."""

    def __init__(self, width, scale):
        super().__init__(width)
        self.shared = [scale]

    def forward(self, z, x=0.0):
        return self.shared[0] * super().forward(z, x)


class OfTrained(Layer):
    def forward(self, z, x=0.0):
        return super().forward(z, x) + (0.5 if self.inner.bias.requires_grad else 0.0)


def test_what_modules_that_are_alike_share_has_its_gradient(device):
    scale, z0 = torch.tensor(0.9, device=device, requires_grad=True), torch.randn(2, 3, device=device)
    layers = nn.ModuleList([Scaled(3, scale) for _ in range(7)]).to(device)
    for _ in range(3):
        found = deeppcr.solve(layers, z0, solver=Newton(chunk=3))
        z = z0
        for layer in layers:
            z = layer(z)
        ours, theirs = (torch.autograd.grad(each.sin().sum(), scale)[0] for each in (found.final, z))
        assert error(ours, theirs) < 1e-4
    assert by_kernels(found)


def test_modules_that_look_at_what_kernels_do_not_see_are_found_out(device):
    layers, z0 = nn.ModuleList([OfTrained(3) for _ in range(7)]).to(device), torch.randn(2, 3, device=device)
    for _ in range(3):
        found = deeppcr.solve(layers, z0, solver=Newton(chunk=3))
        z = z0
        for layer in layers:
            z = layer(z)
        assert error(found.final, z) < 1e-5
    assert not by_kernels(found)


@pytest.mark.parametrize(("width", "has_inputs"), [(9, False), *thorough((3, False), (9, True), (3, True))])
def test_modules_that_are_alike_are_one_step(width, has_inputs, device):
    layers, z0 = nn.ModuleList([Layer(width) for _ in range(7)]).to(device), torch.randn(2, width, device=device)
    xs = torch.randn(7, 2, width, device=device) if has_inputs else None
    for _ in range(2):
        found = deeppcr.solve(layers, z0, xs, solver=Newton(chunk=3))
        states, z = [], z0
        for index, layer in enumerate(layers):
            z = layer(z) if xs is None else layer(z, xs[index])
            states.append(z)
        right = torch.stack(states)
        assert error(found.states, right) < 1e-5
    assert by_kernels(found)
    weights, seed = list(layers.parameters()), torch.randn_like(right)
    pairs = (torch.autograd.grad(each, weights, seed, retain_graph=True) for each in (found.states, right))
    for one, other in zip(*pairs, strict=True):
        assert error(one, other) < 1e-4
    with torch.no_grad():
        layers[2].inner.weight.mul_(0.5)
    changed = deeppcr.solve(layers, z0, xs)  # whoever asks for no solver gets the kernels that there are
    assert by_kernels(changed)
    assert error(changed.states[2], layers[2](right[1]) if xs is None else layers[2](right[1], xs[2])) < 1e-5
