"""Modules that run by the kernels: interpreted where there is no GPU, as if there were one."""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
import warnings

import pytest
import torch

from compiling import compiled_and_counted, value_and_gradients
from deeppcr import ConvergenceWarning, Newton, PaperTest, Result, Zeros
from deeppcr.nn import MLP, ResNet
from kernel_support import error, thorough

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr.linear.kernels import dense
from deeppcr.nn import adjoint, base, calibrate, cost, forward, kernel_way
from deeppcr.nn.base import Network
from deeppcr.nn.choose import choose

TOLERANCE = 5e-5


@pytest.fixture
def by_kernels(device, monkeypatch):
    """Modules use the kernels: on a GPU they do, elsewhere they are told to."""
    if device.type == "cpu":
        monkeypatch.setattr(Network, "_may_use_kernels", lambda self, hidden: True)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return device


def build(kind, depth, device, width=3, **settings):
    torch.manual_seed(0)
    if kind == "mlp":
        return MLP(4, width, depth, 2, **settings).to(device)
    return ResNet(4, width, depth, 2, **{"skip": 2, **settings}).to(device)


def in_float64(net):
    """The same network, step by step on a CPU."""
    twin = copy.deepcopy(net).cpu().double()
    twin.mode = "sequential"
    return twin


def outputs_and_gradients(net, x):
    net.zero_grad()
    out = net(x)
    out.square().sum().backward()
    return out.detach(), [parameter.grad.clone() for parameter in net.parameters()]


def assert_like_float64(net, x, tolerance=TOLERANCE):
    twin = in_float64(net)
    out, gradients = outputs_and_gradients(net, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Network, "_may_use_kernels", lambda *_: False)
        expected, expected_gradients = outputs_and_gradients(twin, x.cpu().double())
    assert error(out.cpu(), expected) <= tolerance
    largest = max(float(g.norm()) for g in expected_gradients)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert (ours.cpu().double() - theirs).norm() <= 5 * tolerance * max(float(theirs.norm()), 1e-2 * largest)


@pytest.mark.parametrize("room", [False, True])
def test_wide_layers_need_a_device_with_room(room, monkeypatch):
    monkeypatch.setattr(kernel_way, "has_room", lambda device: room)
    for width, expected in ((64, True), (65, room)):
        shape = build("mlp", 9, "cpu", width=width).weight.shape
        assert kernel_way.covered(shape, 1, torch.device("cuda", 0), "auto", True) == (expected, expected)


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
@pytest.mark.parametrize(
    ("kind", "depth", "activation"), [("mlp", 7, "tanh"), ("mlp", 1, "relu"), ("resnet", 6, "relu")]
)
def test_small_networks(kind, depth, activation, mode, by_kernels):
    net = build(kind, depth, by_kernels, activation=activation, mode=mode)
    assert_like_float64(net, torch.randn(2, 4, device=by_kernels))


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


def has_kernels(net, hidden, mode):
    return net._may_use_kernels(hidden) and net._way(net.weight, hidden, mode) is not None


class _OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU: whether there are kernels is decided without touching values."""

    is_cuda = True


@pytest.mark.parametrize(
    ("settings", "mode", "expected"),
    [
        ({}, "parallel", True),
        ({}, "sequential", True),
        ({"newton": Newton(atol=1e-6, chunk=8)}, "parallel", True),
        ({"newton": Newton(chunk=1)}, "parallel", False),
        ({"newton": Newton(max_iterations=15)}, "parallel", False),
        ({"newton": Newton(shrink=0.5)}, "parallel", False),
        ({"newton": Newton(stop=PaperTest(1e-4, 1e-4))}, "parallel", False),
        ({"guess": Zeros()}, "parallel", False),
        ({"activation": torch.tanh}, "sequential", False),
        ({"dtype": torch.float64}, "sequential", False),
        ({"width": 257}, "sequential", False),
    ],
)
def test_what_the_kernels_are_asked_for(settings, mode, expected):
    net = build("mlp", 64, "cpu", **settings)
    hidden = torch.zeros(2, net.weight.shape[-1], dtype=net.weight.dtype).as_subclass(_OnGpu)
    assert has_kernels(net, hidden, mode) is expected
    with torch.autograd.forward_ad.dual_level():
        assert not has_kernels(net, hidden, mode)


@pytest.mark.parametrize("mode", ["parallel", "auto"])
@pytest.mark.parametrize(
    "settings",
    [{"guess": Zeros()}, {"newton": Newton(chunk=1)}, {"newton": Newton(stop=PaperTest(1e-4, 1e-4))}, {"width": 257}],
    ids=["guess", "chunk", "paper", "width"],
)
@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
def test_what_there_are_no_kernels_for(settings, mode, by_kernels):
    net = build("mlp", 8, by_kernels, mode=mode, **settings)
    x = torch.randn(2, 4, device=by_kernels)
    assert error(net(x).cpu(), in_float64(net)(x.cpu().double())) <= 1e-3  # the paper's test is loose
    by_loop = mode == "auto" and "width" not in settings  # for these, the loop has a kernel
    assert net.solution.plan.evaluation != "fused kernels"
    assert (net.solution.plan.notes == ["there are kernels for the loop only"]) is by_loop


def test_more_rows_than_the_loop_has_a_kernel_for(by_kernels, monkeypatch):
    monkeypatch.setattr(kernel_way, "_MOST_ROWS", 2)
    monkeypatch.setattr(kernel_way, "find", kernel_way.find.__wrapped__)
    x = torch.randn(3, 4, device=by_kernels)
    for rule, evaluation in (("parallel", "fused kernels"), ("sequential", "loop")):
        net = build("mlp", 12, by_kernels, width=2, mode="auto")
        for module in (base, kernel_way):
            monkeypatch.setattr(module, "choose_without_kernels", lambda *_, rule=rule: (rule, "a rule"))
        assert error(net(x).cpu(), in_float64(net)(x.cpu().double())) <= TOLERANCE
        assert net.solution.plan.evaluation == evaluation


@pytest.mark.parametrize(("width", "rows"), [(300, 2), (3, 5000), (3, 0)])
def test_compiled_in_one_graph_where_there_are_no_kernels(width, rows, by_kernels):
    net = build("mlp", 3, by_kernels, width=width, mode="sequential")
    x = torch.randn(rows, 4, device=by_kernels)
    with torch.no_grad():
        found = torch.compile(net, backend="eager", fullgraph=True)(x)
    assert torch.allclose(found, net(x), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("mlp", "parallel"), ("resnet", "parallel"), ("resnet", "sequential"), *thorough(("mlp", "auto"))],
)
@pytest.mark.parametrize("every", [False, True])
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


@pytest.mark.parametrize(
    ("depth", "rows", "settings", "expected"),
    [
        (16384, 1, {}, "parallel"),
        (100, 1, {}, "sequential"),
        (2048, 4096, {}, "sequential"),
        (16384, 1, {"guess": Zeros()}, "sequential"),
        (64, 100, {"activation": torch.tanh}, "parallel"),
        (63, 1, {"activation": torch.tanh}, "sequential"),
    ],
)
def test_the_mode_that_auto_chooses(depth, rows, settings, expected):
    net = build("mlp", depth, "cpu", **settings)
    hidden = torch.zeros(rows, 3, device="meta").as_subclass(_OnGpu)
    if has_kernels(net, hidden, "auto"):
        way = net._way(net.weight, hidden, "auto")
        mode, why = ("sequential", way.why) if way.choice is None else ("parallel", way.choice.why)
    else:
        mode, why = base.choose_without_kernels(net.weight.shape, rows, hidden.device)
    assert mode == expected
    assert len(why.split()) > 5


def test_the_plan_says_why(by_kernels):
    x = torch.randn(2, 4, device=by_kernels)
    net = build("mlp", 40, by_kernels, mode="parallel")
    net(x)
    plan = net.solution.plan
    assert (plan.evaluation, plan.chunk) == (
        "fused kernels",
        choose(net.weight.shape, 2, "relu", "auto", 2**30, x.device).chunk,
    )
    (note,) = plan.notes
    assert note.startswith("expected: ")
    assert f"ms in chunks of {plan.chunk}, " in note
    assert "one layer after the other (" in note


WAYS_BACK = [  # mode, choice, forward, backward
    ("auto", ("parallel", "sequential"), 3, 7),
    ("parallel", ("sequential", "sequential"), 3, 2),
    ("auto", ("sequential", "parallel"), 7, 2),
    ("auto", ("sequential", "sequential"), 7, 7),
    ("auto", ("parallel", "parallel"), 3, 2),
    ("sequential", ("parallel", "parallel"), 7, 7),
]


@pytest.mark.parametrize(
    ("kind", "width", "mode", "choice", "blocks", "blocks_back"),
    [
        *(("resnet", 3, *way) for way in WAYS_BACK),
        *(("mlp", 66, *way) for way in WAYS_BACK[:2]),
        *thorough(*(("mlp", 66, *way) for way in WAYS_BACK[2:])),
    ],
)
def test_the_backward_pass_has_chunks_of_its_own(
    kind, width, mode, choice, blocks, blocks_back, by_kernels, monkeypatch
):
    """Where the loop is the faster way forward, too: a linear system in parallel takes one round."""
    seen: dict[str, int] = {}
    run, launch, solve_chain = forward.run, adjoint.launch, dense.solve_chain

    def launched(kernel, programs, arguments, *more, **settings):
        if kernel is adjoint.adjoint_substitute:
            seen["backward"] = arguments[-1]
            assert programs == -(-7 // arguments[-1]) * 2  # of two rows
        launch(kernel, programs, arguments, *more, **settings)

    def solved(*arguments, **settings):
        if len(arguments) == 5:  # with scales: the slopes of a backward pass
            seen.setdefault("backward", 7 if arguments[3] == 6 else arguments[3])  # the first layer has no equation
        return solve_chain(*arguments, **settings)

    def ran(*arguments):
        seen["forward"] = arguments[4].chunk_blocks(7)
        return run(*arguments)

    made_up = cost.Choice(choice[0], 3, choice[1], 2, "made up")
    monkeypatch.setattr(kernel_way, "choose", lambda *_: made_up)
    monkeypatch.setattr(kernel_way, "find", kernel_way.find.__wrapped__)
    monkeypatch.setattr(adjoint, "launch", launched)
    monkeypatch.setattr("deeppcr.launch._noted", {})  # what was launched before would be launched again
    monkeypatch.setattr(dense, "solve_chain", solved)
    monkeypatch.setattr(forward, "run", ran)
    net = build(kind, 14 if kind == "resnet" else 7, by_kernels, width, mode=mode)
    assert_like_float64(net, torch.randn(2, 4, device=by_kernels))
    assert seen == {"forward": blocks, "backward": blocks_back}
    back = {2: "; backward in chunks of 2", 7: "; backward one after the other"}[blocks_back]
    if mode != "sequential":
        assert net.solution.plan.notes == ["made up" + ("" if blocks == blocks_back else back)]


@pytest.mark.parametrize(("width", "skip"), [(3, 1), (2, 2), (70, 1)])
def test_what_times_are_measured_by(width, skip, by_kernels):
    """That the kernels run, and as often as they are asked: not how long they take."""
    kind = calibrate.Kind.of(width, "tanh", skip, skip > 1)
    runs = []

    def clock(run):
        run()
        runs.append(run)
        return 1.0

    bench = calibrate.Kernels(by_kernels, kind, width, clock, clock)
    assert bench.loop(4, 2) == bench.round(3, 2, 2) == 1.0
    assert bench.host() == (1.0, 1.0)
    assert len(runs) == 4


def test_a_sequential_resnet_is_one_chunk(by_kernels, monkeypatch):
    seen = []
    run = forward.run
    monkeypatch.setattr(forward, "run", lambda *arguments: seen.append(arguments[4]) or run(*arguments))
    net = build("resnet", 8, by_kernels, mode="sequential")
    net(torch.randn(2, 4, device=by_kernels))
    assert seen[0].chunk_blocks(4) == 4


def test_tolerances_are_floats(by_kernels, monkeypatch):
    """A kernel is specialised on integers, and launched again as it was compiled."""
    seen = []
    run = forward.run
    monkeypatch.setattr(forward, "run", lambda *arguments: seen.append(arguments[4]) or run(*arguments))
    build("mlp", 6, by_kernels, mode="parallel", newton=Newton(atol=1, rtol=0))(torch.randn(1, 4, device=by_kernels))
    assert [*map(type, seen[0].tolerance)] == [float] * 3


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
    off = (states - loop).abs().amax(-1) / loop.abs().amax(-1)
    assert off.max() <= 1e-3
    assert net.solution.result is Result.CONVERGED
    assert net.solution.known_steps.tolist() == [40, 40]


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
