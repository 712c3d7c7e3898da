"""Which way a solve goes where nobody says it: every way gives the loop's states and gradients. Without kernels: those are in fuse/test_solve.py."""

import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

import deeppcr
from deeppcr import ConvergenceWarning, Newton, Result, runtime
from deeppcr.sequence import Sequence
from deeppcr.ways import fused, plan
from problems import plain_loop


@pytest.fixture(autouse=True, scope="module")
def device_is_warm(device):
    """The first products of a process take a GPU so long that no loop seems short."""
    if device.type == "cuda":
        z = torch.ones(3, 3, dtype=torch.float64, device=device, requires_grad=True)
        torch.nn.functional.linear(torch.tanh(z), z, z[0]).sum().backward()


@pytest.fixture(autouse=True)
def nothing_is_known(without_kernels):
    plan.forget_records()
    fused.forget_kernels()
    yield
    plan.forget_records()
    fused.forget_kernels()


def problem(device, length=40):
    z0, xs = (torch.randn(*shape, dtype=torch.float64, device=device) for shape in ((2, 3), (length, 2, 3)))
    weight = torch.randn(3, 3, dtype=torch.float64, device=device) / 3
    return (lambda z, x: torch.tanh(z @ weight) + x), z0.requires_grad_(), xs, weight.requires_grad_()


def by_loop(step, z, xs):
    states = []
    for x in xs:
        z = step(z, x)
        states.append(z)
    return torch.stack(states)


def check(solution, step, z0, xs, *given):
    right = by_loop(step, z0, xs)
    torch.testing.assert_close(solution.states, right, rtol=1e-9, atol=1e-9)
    ours, theirs = (torch.autograd.grad(states.square().sum(), [z0, *given]) for states in (solution.states, right))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_a_short_loop_is_a_loop(device):
    step, z0, xs, weight = problem(device)
    for _ in range(2):
        found = deeppcr.solve(step, z0, xs)
        assert found.result is Result.LOOP
        check(found, step, z0, xs, weight)


def test_a_long_loop_is_solved_in_parallel_and_the_quicker_way_is_kept(device, impatient):
    step, z0, xs, weight = problem(device)
    for turn in range(3):
        found = deeppcr.solve(step, z0, xs)
        assert found.result is Result.CONVERGED
        assert any("newton is tried" in note for note in found.plan.notes)
        (record,) = plan._records.values()
        assert record.tries == {"newton": turn + 1}
        record.seconds["loop"] = 1e9  # a probe is all that is known of it
    check(found, step, z0, xs, weight)
    record.estimated.clear()
    for quicker, expected in (("loop", Result.LOOP), ("newton", Result.CONVERGED)):
        record.seconds.update({"loop": 2.0, "newton": 2.0, quicker: 1e-9})
        found = deeppcr.solve(step, z0, xs)
        assert found.result is expected
        assert any("of this kind loop " in note for note in found.plan.notes)
        check(found, step, z0, xs, weight)


@torch.no_grad()
def test_a_loop_that_is_not_much_slower_by_an_estimate_is_measured(device, impatient):
    """A few steps by themselves take longer than many: else a parallel solve would be kept that loses."""
    step, z0, xs, _ = problem(device)
    deeppcr.solve(step, z0, xs)
    (record,) = plan._records.values()
    record.seconds.update({"newton": 1.0, "loop": 4.0})
    found = deeppcr.solve(step, z0, xs)
    assert found.result is Result.LOOP
    assert "so that it is measured" in str(found.plan)
    assert not record.estimated
    assert record.seconds["loop"] < 1
    plan.forget_records()
    deeppcr.solve(step, z0, xs)
    (record,) = plan._records.values()
    record.seconds.update({"newton": 1.0, "loop": 9.0})
    assert deeppcr.solve(step, z0, xs).result is Result.CONVERGED


def test_an_estimate_is_that_of_steps_that_nothing_disturbed(monkeypatch):
    times = iter([0.0, 5.0, 6.0, 9.0, 11.0])
    monkeypatch.setattr(plan, "now", lambda device: next(times))
    record, asked = plan.Record("cpu"), []
    probe = plan.Probe(record, 100, torch.device("cpu"), asked.append)
    assert [probe.gives_up(index) for index in range(plan.PROBED)] == [False] * (plan.PROBED - 1) + [None]
    assert asked == [100.0]
    assert record.seconds == {"loop": 100.0}


def test_what_a_first_parallel_solve_imports_counts_until_loops_have_taken_as_long(monkeypatch):
    monkeypatch.setattr(plan, "_COLD", 1.7)
    monkeypatch.delitem(sys.modules, plan._RULES, raising=False)
    record = plan.Record("cpu", (20_000, 3, 4), seconds={"loop": 0.5})
    ways = []
    for _ in range(5):
        way, why = record.choose()
        ways.append(way)
        assert ("what that imports first takes longer" in why) == (way == "loop")
        record.took("loop", 0.5)
    assert ways == ["loop"] * 3 + ["newton"] * 2
    assert "nothing else is worth a try" in plan.Record("cpu", (20, 3, 4), seconds={"loop": 5e-4}).choose()[1]
    monkeypatch.setitem(sys.modules, plan._RULES, plan)
    assert plan.Record("cpu", (20_000, 3, 4), seconds={"loop": 0.5}).choose()[0] == "newton"


def test_a_first_parallel_solve_imports_what_is_counted():
    """In a process of its own: rules of derivatives, and no compiler, which takes PyTorch 1.5 s."""
    program = f"""
import sys, torch, deeppcr
gru, linear = torch.nn.Linear(8, 12), torch.nn.Linear(4, 4)
def step(z, x):
    reset, update, new = gru(torch.cat([z, x], -1)).chunk(3, -1)
    new = torch.tanh(new + torch.sigmoid(reset) * linear(z))
    return (1 - torch.sigmoid(update)) * new + torch.sigmoid(update) * z / 2.0 - 0.1
assert {plan._RULES!r} not in sys.modules
assert deeppcr.solve(step, torch.zeros(2, 4), torch.randn(50, 2, 4), solver=deeppcr.Newton()).result.name == "CONVERGED"
assert {plan._RULES!r} in sys.modules and "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_where_there_is_no_room_for_a_derivative_the_loop_goes_on(device, impatient, monkeypatch):
    """There may be some another time: that is looked at again, after a while."""
    step, z0, xs, _ = problem(device)
    asked = []

    def push(*given):
        asked.append(1)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Sequence, "push", push)
    for _ in range(12):
        assert deeppcr.solve(step, z0, xs).result is Result.LOOP
    assert len(asked) == 2
    monkeypatch.undo()


def test_kinds_are_told_apart(device):
    """By their length, their step, their shapes, and by whether gradients are wanted."""
    step, z0, xs, _ = problem(device)
    deeppcr.solve(step, z0, xs)
    deeppcr.solve(step, z0, xs.clone())
    assert len(plan._records) == 1
    deeppcr.solve(step, z0, xs[:-1])
    deeppcr.solve(step, z0[:1], xs[:, :1])
    deeppcr.solve(lambda z, x: torch.sin(z) + x, z0, xs)
    with torch.no_grad():
        deeppcr.solve(step, z0, xs)
    assert len(plan._records) == 5
    assert [record.differentiated for record in plan._records.values()] == [True] * 4 + [False]
    plan.forget_records()
    bare = lambda z, x: torch.sin(z) + x  # noqa: E731
    for given in ((z0.detach(), xs), (z0, xs), (z0.detach(), xs.clone().requires_grad_())):
        deeppcr.solve(bare, *given)
    deeppcr.solve(step, z0.detach(), xs)
    assert [record.differentiated for record in plan._records.values()] == [False, True, True]


def chaotic(z, x):
    return 3.9 * z * (1 - z) + 0 * x


def test_what_does_not_converge_is_told_to_nobody_who_did_not_ask(device, impatient):
    """The result says it; the next time it is a loop."""
    z0, xs = torch.full((1, 1), 0.3, dtype=torch.float64, device=device), torch.zeros(600, 1, 1, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        first = deeppcr.solve(chaotic, z0, xs.double())
        assert first.result is Result.FINISHED_BY_LOOP
        if device.type == "cpu":
            assert deeppcr.solve(chaotic, z0, xs.double()).result is Result.LOOP
    torch.testing.assert_close(first.states[1:], chaotic(first.states[:-1], 0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("long", [False, True])
def test_what_is_not_finite_is_told_whichever_way(long, device, request):
    """The caller's loop does so too, and he is told as by Loop()."""
    if long:
        request.getfixturevalue("impatient")
    step, z0, xs, _ = problem(device)
    xs[20, 1, 1] = float("nan")
    with pytest.warns(ConvergenceWarning, match="step 21 produced a value that is not finite"):
        assert deeppcr.solve(step, z0, xs).result is Result.NON_FINITE
    (record,) = plan._records.values()
    assert not record.barred  # of numbers that are none, nothing is to be learned


def test_a_parallel_solve_is_tried_again_where_a_parameter_has_changed(impatient, device, monkeypatch):
    """From a chaotic loop to one that contracts; until it is tried, it is the loop."""
    monkeypatch.setattr(plan, "_PATIENCE", 2)
    rate = torch.tensor(3.9, dtype=torch.float64, device=device)
    z0, results = torch.full((1, 1), 0.3, dtype=torch.float64, device=device), []
    for value in (3.9, 3.9, 3.9, 3.9, 0.5, 0.5, 0.5, 0.5, 0.5):
        rate.fill_(value)
        results.append(deeppcr.solve(lambda z: rate * z * (1 - z), z0, length=200).result)
    looped, failed = {Result.LOOP}, {Result.FINISHED_BY_LOOP}
    assert [set(part) for part in (results[:1], results[1:3], results[3:4], results[4:8])] == [failed, looped] * 2
    assert results[8] is Result.CONVERGED
    (record,) = plan._records.values()
    assert not record.barred


def test_who_has_wishes_gets_the_iteration(device):
    step, z0, xs, _ = problem(device)
    for options in (
        {"guess": deeppcr.Zeros()},
        {"gradient": deeppcr.Unrolled()},
        {"on_failure": "raise"},
        {"on_failure": "return"},
        {"solver": Newton()},
    ):
        assert deeppcr.solve(step, z0, xs, **options).result is Result.CONVERGED
    assert len(plan._records) == 0


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, z, x=0.0):
        return torch.tanh(self.inner(z)) + 0.5 * x


@pytest.mark.parametrize("length", [1, 2, 3, 20])
@pytest.mark.parametrize("has_inputs", [False, True])
@pytest.mark.parametrize("kernels", [False, True])
def test_a_list_is_planned_as_any_loop(length, has_inputs, kernels, device, monkeypatch):
    """A short one is a loop, gradients included; also where modules that are alike are one step for kernels."""
    monkeypatch.setattr(runtime, "KERNEL_DEVICES", {device.type} if kernels else set())
    monkeypatch.setattr(plan, "_WORTH_KERNELS", math.inf)
    layers = torch.nn.ModuleList(Layer() for _ in range(length)).to(device)
    _, z0, xs, _ = problem(device, length)
    for _ in range(2):
        found = deeppcr.solve(layers, z0, xs if has_inputs else None)
        assert found.result is Result.LOOP
        z, states = z0, []
        for layer, x in zip(layers, xs, strict=True):
            z = layer(z, x) if has_inputs else layer(z)
            states.append(z)
        right, wanted = torch.stack(states), [z0, *layers.parameters()]
        torch.testing.assert_close(found.states, right)
        pairs = [torch.autograd.grad(each.square().sum(), wanted) for each in (found.states, right)]
        torch.testing.assert_close(*pairs)
    (record,) = plan._records.values()
    assert record.tries == {"loop": 2}
    assert record.differentiated


def test_a_long_list_is_solved_in_parallel(device, impatient):
    layers = torch.nn.ModuleList(Layer() for _ in range(40)).to(device)
    _, z0, xs, _ = problem(device)
    found = deeppcr.solve(layers, z0, xs)
    assert found.result is Result.CONVERGED
    torch.testing.assert_close(found.states, deeppcr.solve(layers, z0, xs, solver=deeppcr.Loop()).states)


def test_what_is_wrong_with_a_list_is_named(device):
    _, z0, xs, _ = problem(device, 3)
    with pytest.raises(TypeError, match="entry 1 of the list is not callable"):
        deeppcr.solve([torch.cos, 3, torch.cos], z0)
    with pytest.raises(ValueError, match="lengths differ: step: the list has 2, xs has 3"):
        deeppcr.solve([Layer(), Layer()], z0, xs)
    with pytest.raises(ValueError, match="at least one step"):
        deeppcr.solve([], z0)
    with pytest.raises(ValueError, match="lengths differ: length has 4, step: the list has 2"):
        deeppcr.solve([torch.cos, torch.cos], z0, length=4)


def test_what_is_wrong_is_named(device):
    step, z0, xs, _ = problem(device)
    with pytest.raises(ValueError, match="length"):
        deeppcr.solve(lambda z: z, z0)
    with pytest.raises(TypeError, match="z0"):
        deeppcr.solve(step, 3.0, xs)
    with pytest.raises(Exception, match="shape"):
        deeppcr.solve(lambda z, x: z[:1], z0, xs)


def test_records_are_bounded(device):
    step, z0, xs, _ = problem(device, length=3)
    assert plan._records.most == 1024
    deeppcr.solve(step, z0, xs)
    plan.forget_records()
    assert len(plan._records) == 0


@pytest.mark.parametrize("solver", [None, deeppcr.Loop(), Newton()])
def test_a_parameter_that_is_not_finite_is_none_of_xs(solver):
    layers = torch.nn.ModuleList(Layer() for _ in range(6))
    with torch.no_grad():
        layers[3].inner.weight[0, 0] = math.nan
    z0, xs = torch.ones(2, 3, dtype=torch.float64), torch.ones(6, 2, 3, dtype=torch.float64)
    with pytest.warns(
        deeppcr.ConvergenceWarning, match="step 4 produced a value that is not finite although its input is"
    ):
        deeppcr.solve(layers, z0, xs, solver=solver)


class TestWhatOnlyTheLoopDoesRight:
    """At any length: what a short loop does is not refused because it has become longer."""

    @pytest.fixture(autouse=True)
    def newton_pays(self, monkeypatch):
        deeppcr.clear_caches()
        monkeypatch.setattr(plan.Record, "_candidates", lambda record: ["newton"])
        monkeypatch.setattr(plan.Record, "most_iterations", lambda record, most: most)
        yield
        deeppcr.clear_caches()

    @pytest.mark.parametrize("length", [1, 2, 300])
    def test_batch_statistics(self, length, device):
        norm, other = (torch.nn.BatchNorm1d(4, device=device) for _ in range(2))
        z0, xs = torch.zeros(3, 4, device=device), torch.randn(length, 3, 4, device=device)
        found = deeppcr.solve(lambda z, x: torch.tanh(0.5 * norm(z) + x), z0, xs)
        expected = plain_loop(lambda z, x: torch.tanh(0.5 * other(z) + x), z0, xs)
        torch.testing.assert_close(found.states, expected)
        torch.testing.assert_close(norm.state_dict(), other.state_dict())
        assert found.result is deeppcr.Result.LOOP
        assert length == 1 or "a BatchNorm1d of the step changes" in str(found.plan)

    @pytest.mark.parametrize("length", [1, 2, 300])
    def test_rows_that_influence_each_other(self, length, device):
        step = lambda z, x: torch.tanh(0.5 * (z - z.mean(0)) + x)  # noqa: E731
        z0, xs = torch.zeros(3, 4, device=device), torch.randn(length, 3, 4, device=device, requires_grad=True)
        for _ in range(2):
            found = deeppcr.solve(step, z0, xs)
            (gradient,) = torch.autograd.grad(found.states.square().sum(), xs)
            (expected,) = torch.autograd.grad(plain_loop(step, z0, xs).square().sum(), xs)
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
        assert length < 300 or "rows of the batch influence each other" in str(found.plan)

    def test_rows_that_do_not(self, device):
        z0, xs = torch.zeros(3, 4, device=device), torch.randn(300, 3, 4, device=device, requires_grad=True)
        assert deeppcr.solve(lambda z, x: torch.tanh(0.5 * z + x), z0, xs).result is deeppcr.Result.CONVERGED


def test_a_trial_in_vain_ends_after_as_many_iterations_as_a_loop_is_worth(device):
    """By sizes, not by the clock: twice the same."""
    short, long = (plan.Record("cpu", (length, 4, 2)) for length in (1_000, 8_000))
    assert 1 <= short.most_iterations(100) < long.most_iterations(100) < 100
    assert plan.Record("cuda", (8_000, 4, 2)).most_iterations(100) == 100
    # A backward pass through the loop costs more than one through a parallel solve, so that more may be tried.
    assert plan.Record("cpu", (8_000, 4, 2), True).most_iterations(100) > long.most_iterations(100)


def test_a_first_call_of_a_marginal_loop_is_left_to_the_loop_in_time(device, monkeypatch):
    monkeypatch.setitem(plan._WORTH_NEWTON, device.type, 0.0)
    monkeypatch.setattr(plan, "_PAYS", 1e9)
    monkeypatch.setitem(plan._OPERATION, device.type, (1.0, 1.0, 0.0))
    z0, length = torch.full((1, 1), 0.3, dtype=torch.float64, device=device), 400
    step = lambda z: 3.7 * z * (1 - z)  # noqa: E731 - chaotic
    found = deeppcr.solve(step, z0, length=length)
    record = plan._records.values()[-1]
    assert record.tries == {"newton": 1}
    assert found.result is Result.FINISHED_BY_LOOP
    assert found.iterations.max() <= record.most_iterations(100) < 100


class TestWhatCanOnlyBeCalledOneByOne:
    """The loop takes it, of any length, and at once: an iteration would take longer."""

    @staticmethod
    def branching(z, x):
        return torch.tanh(z + x) if x.sum() > 0 else torch.tanh(z - x)

    @staticmethod
    def by_numpy(z, x):
        return torch.from_numpy(np.tanh((0.5 * z + x).cpu().numpy())).to(z.device)

    @pytest.mark.parametrize("step", [branching, by_numpy])
    def test_by_the_loop(self, step, device, monkeypatch):
        deeppcr.clear_caches()
        monkeypatch.setitem(plan._WORTH_NEWTON, device.type, 0.0)
        monkeypatch.setattr(plan, "_PAYS", 1e9)
        monkeypatch.setattr(plan.Record, "most_iterations", lambda record, most: most)
        z0, xs = torch.zeros(3, 4, device=device), torch.randn(200, 3, 4, device=device)
        calls, found = [], None

        def counted(z, x):
            calls.append(1)
            return step(z, x)

        for _ in range(2):
            found = deeppcr.solve(counted, z0, xs)
            torch.testing.assert_close(found.states, plain_loop(step, z0, xs))
            assert found.result is Result.LOOP
        said = ("one by one", "cannot be differentiated", "graph did not work")  # which a GPU tries last
        assert any(each in str(found.plan) for each in said)
        assert len(calls) < 3 * len(xs)
