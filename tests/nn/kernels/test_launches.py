"""Networks whose kernels are launched again as they were compiled, and how many launches a call is."""

from __future__ import annotations

import math

import pytest
import torch

from deeppcr import Newton
from deeppcr.nn import MLP, ResNet
from kernel_support import Launches, error

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr.nn import adjoint, forward
from deeppcr.nn.layers import Layers
from nn.kernels.plain import assert_states_and_gradients, loop, network

CASES = [  # blocks, width, rows, skip, residual, activation, chunk
    (1, 3, 2, 3, True, "tanh", None),
    (7, 3, 2, 1, False, "relu", 2),
    (6, 5, 3, 2, True, "sigmoid", 2),
    (3, 66, 1, 1, False, "tanh", 2),
]


@pytest.mark.parametrize(("blocks", "width", "rows", "skip", "residual", "activation", "chunk"), CASES)
def test_other_values_in_the_same_places(blocks, width, rows, skip, residual, activation, chunk, compiled, device):
    layers = Layers(skip, residual, activation, chunk=chunk)
    for _ in range(2):
        problem = network(blocks, width, rows, skip=skip, residual=residual, activation=activation, device=device)
        assert_states_and_gradients(problem, layers)
    assert compiled() or device.type == "cuda"


def test_gradients_of_many_rows(compiled, device, monkeypatch):
    """More than one program sums."""
    monkeypatch.setattr(adjoint, "_FEW_ROWS", 1)
    for _ in range(2):
        assert_states_and_gradients(network(3, 3, 2, device=device), Layers(1, False, "tanh", chunk=2))


@pytest.mark.parametrize(("width", "chunk"), [(3, 2), (3, 3), (66, 3)])
def test_the_last_state_alone(width, chunk, compiled, device):
    layers = Layers(1, False, "tanh", chunk=chunk)
    for _ in range(2 if width < 66 else 1):
        leaves = [each.requires_grad_() for each in network(3, width, 2, device=device)]
        last, states = forward.apply(*leaves, None, layers, [], True), forward.apply(*leaves, None, layers, [])
        assert torch.equal(last, states[-1])
        gradient = torch.randn_like(last)
        found = torch.autograd.grad(last, leaves, gradient)
        full = [leaf.detach().double().requires_grad_() for leaf in leaves]
        right = torch.autograd.grad(loop(*full, layers)[-1], full, gradient.double())
        for ours, theirs in zip(found, right, strict=True):
            assert error(ours, theirs) <= 1e-4


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_one_gradient_alone(wanted, compiled, device):
    layers, problem = Layers(1, False, "tanh", chunk=2), network(3, 3, 2, device=device)
    leaves = [each.clone().requires_grad_(k == wanted) for k, each in enumerate(problem)]
    all_leaves = [each.clone().requires_grad_() for each in problem]
    found, right = (forward.apply(*each, None, layers, []).square().sum() for each in (leaves, all_leaves))
    (found,), right = torch.autograd.grad(found, [leaves[wanted]]), torch.autograd.grad(right, all_leaves)
    assert torch.equal(found, right[wanted])


def test_guesses_for_all_rows_and_for_each(compiled, device):
    """They are read where they lie, whatever lies there later."""
    layers = Layers(1, False, "tanh", chunk=2)
    for _ in range(2):
        problem = network(5, 3, 2, device=device)
        exact = loop(*problem, layers)
        for guess in (None, exact, exact[:, 1], exact.transpose(1, 2).contiguous().transpose(1, 2)):
            x, report = forward.run(*problem, guess, layers)
            assert error(x[1:], exact) <= 2e-5
            assert report is not None
            if guess is exact:
                assert report.passes_taken() == [2, 2]
            if guess is not None and guess.ndim == 2:
                assert report.passes_taken()[1] == 2


def test_a_hard_pass_makes_the_next_look_later_and_report_the_same(compiled, device):
    layers, problem = Layers(1, False, "tanh", chunk=1), network(8, 3, device=device)
    exact = loop(*problem, layers)[:, 0]

    def rounds(guess):
        x, report = forward.run(*problem, guess, layers)
        assert error(x[1:, 0], exact) <= 2e-5
        solution = report.solution()
        return report.rounds, solution.iterations.tolist(), solution.updates.shape

    far = exact + torch.randn_like(exact)
    first = rounds(exact), rounds(far)
    assert first[0][0] < first[1][0]
    assert (rounds(far), rounds(exact)) == (first[1], first[0])


def test_the_loop_alone_with_a_tensor_for_what_is_found(compiled, device):
    """It has nothing to find and is given the states there; what measures it has a tensor of its own."""
    layers, problem = Layers(1, False, "relu", chunk=8), network(8, 3, device=device)
    for _ in range(2):
        x, _ = forward.run(*problem, None, layers)
    weight, bias, initial = problem
    plan = forward.plan_for(len(weight), len(initial), 3, layers, False, weight.device)
    own, found = torch.full_like(x, math.nan), torch.zeros_like(x)
    for _ in range(2):
        forward.network_of(weight, bias, own, layers, plan).whole(initial, 0, found, 0)
        assert torch.equal(own, x)
        assert not found.any()


# What a call takes of the host: see the same for linear systems.
@pytest.fixture
def settled(uncomputed, by_kernels, monkeypatch):
    def passes_taken(report):
        report.found[: 2 * report.rounds].tolist()
        return [2] * report.found.shape[-1]

    monkeypatch.setattr(forward.Report, "passes_taken", passes_taken)


def launches(function):
    for _ in range(2):  # the second is what every later one is
        function()
    with Launches() as made:
        function()
    return made.count


def test_launches_of_an_mlp(settled):
    net, hidden = MLP(4, 4, 1024, 3, mode="parallel", newton=Newton(chunk=16)), torch.zeros(1, 4)
    with torch.no_grad():
        assert launches(lambda: net.hidden_states(hidden)) == 6
    assert launches(lambda: net.hidden_states(hidden)) == 6
    states, gradient = net.hidden_states(hidden), torch.zeros(1024, 1, 4)
    assert launches(lambda: torch.autograd.grad(states, (net.weight, net.bias), gradient, retain_graph=True)) == 6


def test_launches_of_a_loop(settled):
    net, hidden = MLP(4, 4, 1024, 3, mode="sequential"), torch.zeros(1, 4)
    with torch.no_grad():
        assert launches(lambda: net.hidden_states(hidden)) == 1


def test_launches_of_a_training_step(settled):
    net = ResNet(8, 4, 256, 3, skip=4, mode="parallel", newton=Newton(chunk=2), warm_start=True)
    x, labels = torch.zeros(8, 8), torch.zeros(8, dtype=torch.long)
    assert launches(lambda: torch.nn.functional.cross_entropy(net(x), labels)) == 6

    def step():
        net.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(net(x), labels).backward()

    assert launches(step) == 10
