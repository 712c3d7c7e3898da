"""Modules that run by the kernels: interpreted where there is no GPU, as if there were one."""

from __future__ import annotations

import copy
import pickle
import platform
import warnings

import pytest
import torch

from compiling import compiled_and_counted, value_and_gradients
from deeppcr import ConvergenceWarning, Newton, Result
from kernel_support import error, thorough

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr.linear.kernels import dense
from deeppcr.nn import forward
from deeppcr.nn.base import Network
from nn.kernels.modules import TOLERANCE, assert_like_float64, build, in_float64, outputs_and_gradients


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
@pytest.mark.parametrize(
    ("kind", "depth", "activation"), [("mlp", 7, "tanh"), ("mlp", 1, "relu"), ("resnet", 6, "relu")]
)
def test_small_networks(kind, depth, activation, mode, by_kernels):
    net = build(kind, depth, by_kernels, activation=activation, mode=mode)
    assert_like_float64(net, torch.randn(2, 4, device=by_kernels))


@pytest.mark.parametrize("depth", [1, 3])
def test_a_parallel_pass_leaves_a_solution(depth, by_kernels):
    net = build("mlp", depth, by_kernels, mode="parallel")
    assert net.solution is None
    net(torch.randn(2, 4, device=by_kernels))
    assert net.solution.plan.evaluation == "fused kernels"
    assert net.solution.iterations.shape == (2,)
    assert net.solution.result in (Result.CONVERGED, Result.LOOP)
    assert net.solution.updates.shape == (int(net.solution.iterations.max()), 2)
    net(torch.randn(3, 4, device=by_kernels), mode="sequential")
    assert net.solution.plan.notes == ['mode="sequential"']
    assert net.solution.updates.shape == (0, 3)
    assert net.solution.iterations.shape == (3,)
    net(torch.randn(2, 4, device=by_kernels))
    assert net.solution.plan.evaluation == "fused kernels"


def test_a_warm_start_begins_where_the_last_pass_ended(by_kernels):
    x = torch.randn(1, 4, device=by_kernels)
    net = build("mlp", 7, by_kernels, activation="tanh", mode="parallel", newton=Newton(chunk=2), warm_start=True)
    with torch.no_grad():
        net.weight *= 2
    first = net(x)
    cold = net.solution.updates[0].max()
    second = net(x)
    assert net.solution.updates[0].max() < 1e-2 * cold
    assert error(second, first) <= TOLERANCE
    net.eval()
    before = net.activations.clone()
    net(torch.randn(2, 4, device=by_kernels))
    assert torch.equal(net.activations, before)


@pytest.mark.parametrize(("chunk", "rounds", "taken"), [(6, 8, 1), (2, 8, 2), (2, 1, 1)])
@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
def test_a_warm_start_is_the_mean_of_the_states(chunk, rounds, taken, by_kernels, monkeypatch):
    """They are averaged before it is known whether there is more to do: of one chunk, in two rounds, or by the loop."""
    monkeypatch.setattr(forward, "_ROUNDS", rounds)
    forward.plan_for.cache_clear()  # nobody knows how many rounds it will take
    newton = Newton(chunk=chunk)
    net = build("mlp", 6, by_kernels, activation="tanh", mode="parallel", newton=newton, warm_start=True)
    states = net.hidden_states(torch.randn(2, 3, device=by_kernels))
    assert int(net.solution.iterations.max()) == taken
    assert (net.solution.result is Result.FINISHED_BY_LOOP) is (rounds == 1)
    torch.testing.assert_close(net.activations, states.detach().mean(1))


def test_what_newton_does_not_finish_is_warned_of(by_kernels, monkeypatch):
    monkeypatch.setattr(forward, "_ROUNDS", 2)
    net = build("mlp", 14, by_kernels, activation="tanh", mode="parallel", newton=Newton(chunk=2))
    with torch.no_grad():
        net.weight *= 6
    with pytest.warns(ConvergenceWarning, match="Newton stopped with the states up to step"):
        net(torch.randn(1, 4, device=by_kernels))
    assert net.solution.result is Result.FINISHED_BY_LOOP


def test_a_diverged_pass_is_no_warm_start(by_kernels, monkeypatch):
    monkeypatch.setattr(forward, "_ROUNDS", 2)
    newton = Newton(chunk=2)
    net = build("mlp", 12, by_kernels, mode="parallel", newton=newton, warm_start=True)
    good = net.weight.detach().clone()
    x = torch.randn(1, 4, device=by_kernels)
    with torch.no_grad():
        net.weight.fill_(1e10)
        net.bias.fill_(0.1)
    with pytest.warns(ConvergenceWarning):
        assert not torch.isfinite(net(x)).all()
    with torch.no_grad():
        net.weight.copy_(good)
    assert torch.isfinite(net(x)).all()


def test_a_module_can_be_pickled_after_a_pass(by_kernels):
    net = build("mlp", 3, by_kernels, mode="parallel")
    x = torch.randn(1, 4, device=by_kernels)
    out = net(x)
    again = pickle.loads(pickle.dumps(net))
    assert again.solution.result is net.solution.result
    assert torch.equal(again(x), out)
    assert torch.equal(copy.deepcopy(net)(x), out)


@pytest.mark.parametrize(("width", "rows"), [(300, 2), (3, 5000), (3, 0)])
def test_compiled_in_one_graph_where_there_are_no_kernels(width, rows, by_kernels):
    net = build("mlp", 3, by_kernels, width=width, mode="sequential")
    x = torch.randn(rows, 4, device=by_kernels)
    with torch.no_grad():
        found = torch.compile(net, backend="eager", fullgraph=True)(x)
    assert torch.allclose(found, net(x), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "mode", "every"),
    [
        ("mlp", "parallel", True),
        ("resnet", "parallel", False),
        ("resnet", "sequential", True),
        *thorough(("mlp", "parallel", False), ("resnet", "parallel", True), ("resnet", "sequential", False)),
        *thorough(("mlp", "auto", False), ("mlp", "auto", True)),
    ],
)
def test_compiled_by_kernels(kind, mode, every, by_kernels, monkeypatch):
    """Forward and backward, in one graph for two numbers of rows: what the layers inside of a block gave is computed again."""
    net = build(kind, 12, by_kernels, mode=mode)
    compiled, graphs = compiled_and_counted(net.hidden_states if every else net)
    for rows in (3, 2):
        x = torch.randn(rows, 3 if every else 4, device=by_kernels)
        leaf = x.clone().requires_grad_()
        out = (net.hidden_states if every else net)(leaf)  # solved once, for both kinds of gradients
        eagerly = out, *torch.autograd.grad(out.sin().sum(), leaf, retain_graph=True)
        for found, expected in zip(value_and_gradients(compiled, x, changing=1), eagerly, strict=True):
            assert error(found, expected) <= TOLERANCE
        expected = torch.autograd.grad(out.square().sum(), (net.weight, net.bias))
        monkeypatch.setattr(Network, "_loop", None)  # nothing goes another way
        found = torch.autograd.grad(compiled(x).square().sum(), (net.weight, net.bias))
        for one, other in zip(found, expected, strict=True):
            assert error(one, other) <= TOLERANCE
    assert len(graphs) == 2  # with gradients of x, and without


class TestVanishing:
    """Biases that start at zero: every layer halves the power of its input, and far below the tolerance signs still matter."""

    @staticmethod
    def build(depth, device, width, **settings):
        net = build("mlp", depth, device, width, mode="parallel", **settings)
        torch.nn.init.zeros_(net.bias)
        return net, torch.randn(1, 4, device=device)

    @pytest.mark.parametrize(("depth", "width", "chunk"), [(16, 4, 2), *thorough((16, 6, 2))])
    def test_gradients_are_those_of_the_loop(self, depth, width, chunk, by_kernels):
        net, x = self.build(depth, by_kernels, width, newton=Newton(chunk=chunk))
        found = []
        for mode in ("sequential", "parallel"):
            net.mode = mode
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                found.append(outputs_and_gradients(net, x)[1])
        for loops, ours in zip(*found, strict=True):
            assert (ours - loops).abs().max() <= 1e-4 * loops.abs().max()

    def test_digits_of_every_layer_where_a_gradient_may_be_asked_for(self, by_kernels):
        """A tolerance that is asked for is taken."""

        def tolerance(**settings):
            net, x = self.build(32, by_kernels, 4, **settings)
            return net._way(net.weight, net.input(x), "parallel").layers.tolerance

        assert tolerance() == tolerance(activation="tanh") == (0.0, 1e-5, 0.0)
        assert tolerance(newton=Newton(atol=1e-3)) == (1e-3, 1e-5, 1.0)
        with torch.no_grad():
            assert tolerance() == (0.0, 1e-5, 1.0)
            assert tolerance(newton=Newton(scale="local")) == (0.0, 1e-5, 0.0)


@pytest.mark.parametrize(
    ("activation", "size", "width"),
    [
        ("tanh", 1e8, 3),
        ("relu", 1e4, 3),
        ("relu", 1e6, 8),
        *thorough(("relu", 1e8, 8), ("relu", 1e5, dense.NARROW + 1)),
    ],
)
def test_a_large_input_does_not_hide_the_layers_after_it(activation, size, width, by_kernels):
    """The first layers bring it down, or more than half of them; what the later ones make of their biases lives on."""
    net = build("mlp", 40, by_kernels, width=width, activation=activation, mode="parallel", newton=Newton(chunk=4))
    with torch.no_grad():
        net.weight.mul_(1.5)
        hidden = net.input(torch.randn(2, 4, device=by_kernels) * size)
        states, loop = net.hidden_states(hidden).cpu(), in_float64(net).hidden_states(hidden.cpu().double())
    off, known = (states - loop).abs().amax(-1) / loop.abs().amax(-1), net.solution.known_steps.tolist()
    assert max(off[:steps, row].max() for row, steps in enumerate(known)) <= 1e-3
    assert net.solution.result is Result.CONVERGED
    # On ARM processors and GPUs, where other digits are rounded, what is below the last digit of a first state of 1e8 is told to be unknown.
    usual = by_kernels.type == "cpu" and platform.machine() == "x86_64"
    if activation == "tanh" or size < 1e8 or usual:
        assert known == [40, 40]


def test_what_dies_out_is_told(by_kernels):
    """Where nothing lives on, digits are not asked for, and ``known_steps`` says so; where they are, all are known."""
    net = build("mlp", 40, by_kernels, activation="tanh", mode="parallel", newton=Newton(chunk=4))
    with torch.no_grad():
        net.bias.zero_()
        x = torch.randn(2, 4, device=by_kernels)
        states = net.hidden_states(net.input(x))
        size = torch.cat([net.input(x).unsqueeze(0), states]).abs().amax(-1)
        solution = net.solution
        for known, of_row in zip(solution.known_steps.tolist(), size.T.tolist(), strict=True):
            assert known % 4 == 0
            assert of_row[known] > 1e-3 * of_row[0] >= of_row[known + 4]
        assert solution.result is Result.CONVERGED
        assert f"after step {int(solution.known_steps.min())} states are so far below" in solution.message
        net.newton = Newton(chunk=4, scale="local")
        net(x)
        assert net.solution.known_steps.tolist() == [40, 40]
        assert "died out" not in net.solution.message
