"""Which way a module goes, and what it says of it: kernels or none, the loop or in parallel, chunks forward and backward."""

from __future__ import annotations

import pytest
import torch

from deeppcr import Newton, PaperTest, Zeros
from kernel_support import error, thorough

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton")
pytest.importorskip("numpy")  # which the interpreter needs

from deeppcr.linear.kernels import dense
from deeppcr.nn import adjoint, calibrate, cost, forward, kernel_way
from deeppcr.nn.kernel_way import choose
from nn.kernels.modules import TOLERANCE, assert_like_float64, build, in_float64


@pytest.mark.parametrize("room", [False, True])
def test_wide_layers_need_a_device_with_room(room, monkeypatch):
    monkeypatch.setattr(kernel_way, "has_room", lambda device: room)
    for width, expected in ((64, True), (65, room)):
        shape = build("mlp", 9, "cpu", width=width).weight.shape
        assert kernel_way.covered(shape, 1, torch.device("cuda", 0), "auto", True) == (expected, expected)


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
        monkeypatch.setattr(kernel_way, "choose_without_kernels", lambda *_, rule=rule: (rule, "a rule"))
        assert error(net(x).cpu(), in_float64(net)(x.cpu().double())) <= TOLERANCE
        assert net.solution.plan.evaluation == evaluation


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
        mode, why = kernel_way.choose_without_kernels(net.weight.shape, rows, hidden.device)
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
