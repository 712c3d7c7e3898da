"""Modules by kernels on a GPU: what an interpreter has no time for, or no graphs, streams and clocks."""

from __future__ import annotations

import copy
import time
import warnings

import pytest
import torch

from deeppcr import Newton, PaperTest, Result, Zeros
from kernel_support import error

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr.nn import calibrate
from nn.kernels.modules import TOLERANCE, assert_like_float64, build, in_float64, outputs_and_gradients


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
@pytest.mark.parametrize(
    ("kind", "depth", "skip", "width", "activation"),
    [
        ("mlp", 300, 1, 8, "relu"),
        ("mlp", 300, 1, 16, "tanh"),
        ("mlp", 300, 1, 33, "sigmoid"),
        ("resnet", 256, 4, 16, "relu"),
        ("resnet", 32, 1, 64, "tanh"),
    ],
)
def test_large_networks(kind, depth, skip, width, activation, mode, gpu):
    settings = {"skip": skip} if kind == "resnet" else {}
    net = build(kind, depth, gpu, width, activation=activation, mode=mode, **settings)
    # Residual networks amplify rounding; and the derivative of a ReLU jumps: a state within rounding of 0 may lie on
    # either side.
    assert_like_float64(net, torch.randn(5, 4, device=gpu), TOLERANCE if activation == "sigmoid" else 1e-3)
    if mode == "parallel":
        assert net.solution.plan.evaluation == "fused kernels"
        assert net.solution.result is Result.CONVERGED


@pytest.mark.gpu
class TestOnTheDevice:
    @pytest.mark.parametrize(
        "settings",
        [
            {"dtype": torch.float64},
            {"dtype": torch.bfloat16},
            {"activation": torch.tanh},
            {"width": 257},
            {"guess": Zeros()},
            {"newton": Newton(chunk=1)},
            {"newton": Newton(max_iterations=15)},
            {"newton": Newton(stop=PaperTest(1e-4, 1e-4))},
        ],
        ids=[
            "float64",
            "bfloat16",
            "function",
            "width",
            "guess",
            "chunk",
            "iterations",
            "paper",
        ],  # the same in all workers
    )
    @pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
    def test_what_takes_the_general_path(self, settings, gpu):
        net = build("mlp", 100, gpu, mode="parallel", **settings)
        out = net(torch.randn(2, 4, device=gpu, dtype=net.weight.dtype))
        assert net.solution.plan.evaluation != "fused kernels"
        assert torch.isfinite(out).all()

    def test_second_derivatives_by_the_loop(self, gpu):
        net = build("mlp", 64, gpu, activation=torch.tanh, mode="sequential")
        x = torch.randn(2, 4, device=gpu, requires_grad=True)
        (first,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        first.square().sum().backward()
        assert torch.isfinite(x.grad).all()

    def test_auto_is_parallel_where_it_pays(self, gpu):
        net = build("mlp", 16384, gpu)
        net(torch.randn(2, 4, device=gpu))
        assert net.solution.plan.evaluation == "fused kernels"
        assert "ms one layer after the other" in net.solution.plan.notes[0]

    def test_times_are_measured(self, gpu):
        kind = calibrate.Kind.of(3, "relu", 1, False)
        clocks = calibrate.seconds_on_device, calibrate.seconds_of_call
        begun = time.perf_counter()
        times = calibrate.measure(calibrate.Kernels(gpu, kind, 3, *clocks), kind, 3)
        assert time.perf_counter() - begun < 60  # compiled, and on whatever GPU
        assert 1e-8 < times.block[0] < times.step[0] < 1e-4
        assert 1e-6 < times.host_loop < times.host_parallel < 1e-1

    @pytest.mark.parametrize("kind", ["mlp", "resnet"])
    def test_training_with_a_warm_start(self, kind, gpu):
        losses = {}
        for name, mode, warm in (("sequential", "sequential", False), ("warm", "parallel", True)):
            net = build(kind, 200, gpu, 16, activation="tanh", mode=mode, warm_start=warm)
            optimiser = torch.optim.SGD(net.parameters(), lr=1e-2)
            x, y = torch.randn(8, 4, device=gpu), torch.randn(8, 2, device=gpu)
            losses[name] = []
            for _ in range(10):
                optimiser.zero_grad()
                loss = (net(x) - y).square().mean()
                loss.backward()
                optimiser.step()
                losses[name].append(loss.item())
        assert losses["warm"] == pytest.approx(losses["sequential"], rel=1e-3)
        assert losses["warm"][-1] < losses["warm"][0]
        assert net.solution.plan.evaluation == "fused kernels"

    def capture(self, net, hidden):
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                net.hidden_states(hidden)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                states = net.hidden_states(hidden)
        return graph, states

    def misfit(self, net, hidden, states):
        """The largest ``|z_l - step(z_{l-1})|`` relative to the largest state, in float64."""
        states, weight, bias = states.double(), net.weight.detach().double(), net.bias.detach().double()
        before = torch.cat([hidden.double().unsqueeze(0), states[:-1]])
        inner = before
        if weight.ndim == 3:
            weight, bias = weight.unsqueeze(1), bias.unsqueeze(1)
        for k in range(weight.shape[1]):
            inner = net._apply_activation(inner) @ weight[:, k].mT + bias[:, k].unsqueeze(1)
        after = inner + before if net.weight.ndim == 4 else inner
        return float((states - after).abs().max() / states.abs().max())

    @pytest.mark.parametrize("kind", ["mlp", "resnet"])
    @pytest.mark.parametrize("width", [8, 32])
    def test_a_graph_is_replayed_on_new_parameters(self, kind, width, gpu):
        net = build(kind, 256, gpu, width, activation="tanh", mode="parallel").eval()
        hidden = torch.randn(3, width, device=gpu)
        graph, states = self.capture(net, hidden)
        for seed, gain in ((1, 1.0), (2, 0.5), (3, 1.0)):
            torch.manual_seed(seed)
            with torch.no_grad():
                net.reset_parameters()
                net.weight *= gain
                hidden.normal_()
            graph.replay()
            assert self.misfit(net, hidden, states) <= 1e-4
            if kind == "mlp":  # a residual network amplifies rounding
                with torch.no_grad():
                    expected = in_float64(net).hidden_states(hidden.cpu())
                assert error(states.cpu(), expected) <= TOLERANCE

    @pytest.mark.parametrize("kind", ["mlp", "resnet"])
    @pytest.mark.parametrize("width", [8, 32])
    def test_a_graph_finishes_by_the_loop_where_newton_does_not_converge(self, kind, width, gpu):
        newton = Newton(chunk=4)  # so many chunks that the passes of a graph do not suffice by themselves
        net = build(kind, 1024, gpu, width, activation="tanh", mode="parallel", newton=newton).eval()
        hidden = torch.randn(3, width, device=gpu)
        graph, states = self.capture(net, hidden)
        with torch.no_grad():
            net.weight *= 8
        graph.replay()
        assert self.misfit(net, hidden, states) <= 1e-5
        assert net.solution.result is Result.FINISHED_BY_LOOP

    def test_a_captured_training_step(self, gpu):
        net = build("mlp", 128, gpu, 16, activation="tanh", mode="parallel", warm_start=True)
        twin = copy.deepcopy(net)
        twin.mode, twin.warm_start = "sequential", False
        x, y = torch.randn(8, 4, device=gpu), torch.randn(8, 2, device=gpu)

        def step(module):
            loss = (module(x) - y).square().mean()
            gradients = torch.autograd.grad(loss, list(module.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                    parameter -= 1e-2 * gradient
            return loss

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(net)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step(net)
        found = []
        for _ in range(5):
            graph.replay()
            found.append(loss.item())
        expected = [step(twin).item() for _ in range(8)][3:]
        assert found == pytest.approx(expected, rel=1e-3)

    def test_two_streams_at_once(self, gpu):
        nets = [build("mlp", depth, gpu, 16, activation="tanh", mode="parallel").eval() for depth in (900, 1000)]
        xs = [torch.randn(4, 4, device=gpu) for _ in nets]
        with torch.no_grad():
            alone = [net(x) for net, x in zip(nets, xs, strict=True)]
            torch.cuda.synchronize()
            streams, found = [torch.cuda.Stream() for _ in nets], [[], []]
            for _ in range(10):
                for which, stream in enumerate(streams):
                    with torch.cuda.stream(stream):
                        found[which].append(nets[which](xs[which]))
            torch.cuda.synchronize()
        for which in range(2):
            assert all(torch.equal(each, alone[which]) for each in found[which])

    def test_compiled(self, gpu):
        net = build("mlp", 200, gpu, 16, activation="tanh", mode="parallel")
        x = torch.randn(3, 4, device=gpu)
        out, gradients = outputs_and_gradients(net, x)
        compiled_out, compiled_gradients = outputs_and_gradients(torch.compile(net), x)
        assert error(compiled_out, out) <= TOLERANCE
        for ours, theirs in zip(compiled_gradients, gradients, strict=True):
            assert error(ours, theirs) <= 1e-3

    def test_under_autocast(self, gpu):
        net = build("mlp", 100, gpu, 16, mode="parallel").eval()
        x = torch.randn(3, 4, device=gpu)
        with torch.autocast("cuda", torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("error")
            out = net(x)
        assert net.solution.plan.evaluation == "fused kernels"
        assert error(out, net(x)) <= 5e-2

    def test_on_the_modules_device_rather_than_the_current_one(self, gpu):
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        net = build("mlp", 100, "cuda:1", 16, mode="parallel")
        assert_like_float64(net, torch.randn(3, 4, device="cuda:1"))
