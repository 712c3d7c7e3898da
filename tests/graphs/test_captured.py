"""Solves that are recorded and replayed: the same results, whatever changes between them.

Without a GPU a tape stands for CUDA graphs: it, too, repeats operations and nothing of Python.
"""

import gc
import re
import threading
import warnings
import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import deeppcr
from deeppcr import (
    DiagonalJacobian,
    FixedIterations,
    GivenJacobian,
    Newton,
    PaperTest,
    Result,
    UpdateTest,
    linear,
    ways,
)
from deeppcr.graphs import cache, record
from deeppcr.graphs.cache import captured_solves
from deeppcr.iteration import Iteration
from deeppcr.sequence import Sequence
from kernel_support import pairwise, thorough
from problems import CHAOTIC, Generator, Problem, mlp, plain_loop, relative_error, resnet
from tape import Tape

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
REPLAYED = "replayed as a CUDA graph"


@pytest.fixture(autouse=True)
def forgetful(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setitem(record.RECORDERS, "cpu", Tape)
    else:  # where steps have kernels, which come first, nothing would be recorded
        monkeypatch.setattr(ways, "_by_kernels", lambda *_: None)
    deeppcr.clear_caches()
    yield
    deeppcr.clear_caches()


def is_replayed(solution) -> bool:
    return REPLAYED in solution.plan.notes


def why_not(solution) -> str:
    return next((note for note in solution.plan.notes if note.startswith("not captured")), "")


def assert_same(found, expected):
    """Of a replayed solve and one by the general iteration."""
    assert is_replayed(found), found.plan
    assert not why_not(found)
    assert found.results == expected.results
    assert found.iterations.tolist() == expected.iterations.tolist()
    assert found.exact_steps.tolist() == expected.exact_steps.tolist()
    assert found.updates.shape == expected.updates.shape
    assert found.residual.shape == expected.residual.shape
    assert found.message == expected.message
    dtype = pytree.tree_leaves(found.states)[0].dtype
    assert relative_error(found.states, expected.states) < TOLERANCE[dtype]
    for name in ("evaluation", "derivative", "chunk"):
        assert getattr(found.plan, name) == getattr(expected.plan, name)


def tuples(make, length, rows):
    """States and inputs that are nests."""
    weight = make.normal(4, 4) / 4

    def step(z, x):
        a, b = z
        return torch.tanh(a @ weight + x["a"]), 0.5 * b + a.sum(-1, keepdim=True) * x["b"]

    xs = {"a": make.normal(length, 4), "b": make.normal(length, rows, 1)}
    return Problem(step, (make.normal(rows, 4), make.normal(rows, 1)), xs)


def linear_steps(make, length, rows):
    blocks = make.normal(length, 3, 3) / 3
    return Problem(lambda z, x: z @ x.mT + 1, make.normal(rows, 3), blocks)


PROBLEMS = {
    "relu": mlp,
    "tanh": lambda make, length, rows: mlp(make, length, rows, activation=torch.tanh),
    "resnet": partial(resnet, skip=2),
    "tuples": tuples,
    "linear": linear_steps,
}


@pytest.mark.parametrize("length", [20, *thorough(50)])
@pairwise(
    name=PROBLEMS.keys(),
    dtype=[torch.float32, torch.float64],
    stop={"update": UpdateTest(), "paper": PaperTest()},
    chunk=[1, 6],
)
def test_like_the_general_iteration(name, dtype, stop, length, chunk, device):
    problem = PROBLEMS[name](Generator(0, dtype, device), length, 3)
    solver = Newton(chunk=chunk, stop=stop)
    expected = problem.solve(solver=Newton(chunk=chunk, stop=stop, capture=False))
    first = problem.solve(solver=solver)
    assert why_not(first) == "not captured: the first of its kind"
    assert_same(problem.solve(solver=solver), expected)

    other = PROBLEMS[name](Generator(1, dtype, device), length, 3)
    if name != "tuples":  # which closes over a weight of its own
        problem.z0, problem.xs = other.z0, other.xs
        expected = problem.solve(solver=Newton(chunk=chunk, stop=stop, capture=False))
        assert_same(problem.solve(solver=solver), expected)


def twice(solve):
    """The second of two solves of a kind, which is recorded."""
    solve()
    solution = solve()
    assert is_replayed(solution), solution.plan
    return solution


@pytest.mark.parametrize("count", [1, 3, 13])
def test_a_fixed_number_of_iterations(count, device):
    problem = mlp(Generator(0, torch.float64, device), 11, 3, activation=torch.tanh)  # exact before the thirteenth
    settings = {"chunk": 1, "stop": FixedIterations(count)}
    solution = twice(lambda: problem.solve(solver=Newton(**settings)))
    assert_same(solution, problem.solve(solver=Newton(**settings, capture=False)))
    assert solution.result is Result.ITERATIONS_DONE

    problem.xs[1][0] = torch.inf
    with pytest.warns(deeppcr.ConvergenceWarning, match="not finite"):
        overflowed = problem.solve(solver=Newton(**settings))
    assert why_not(overflowed) == "not captured: handed over to the general iteration"


def test_ragged_chunks_no_batch_no_inputs_one_step(device):
    for length, chunk in ((7, 3), (64, 8), (1, 1), (5, 1)):
        z0 = torch.linspace(-1, 1, 4, device=device)
        solution = twice(lambda: deeppcr.solve(torch.cos, z0, length=length, solver=Newton(chunk=chunk)))  # noqa: B023
        assert relative_error(solution.states, plain_loop(torch.cos, z0, length=length)) < 1e-5


def test_results_are_not_overwritten(device):
    problem = mlp(Generator(0, torch.float32, device), 40, 2)
    kept = twice(problem.solve)
    copies = [t.clone() for t in (kept.states, kept.residual, kept.iterations, kept.updates)]
    problem.z0 = problem.z0 + 1
    assert relative_error(problem.solve().states, problem.loop()) < 1e-5
    for mine, copy in zip((kept.states, kept.residual, kept.iterations, kept.updates), copies, strict=True):
        assert torch.equal(mine, copy)


def test_a_guess_is_no_part_of_the_recording(device):
    problem = mlp(Generator(0, torch.float64, device), 40, 2, activation=torch.tanh)
    cold = twice(problem.solve)
    warm = problem.solve(guess=cold)
    assert is_replayed(warm)
    assert warm.iterations.tolist() == [1, 1]
    assert is_replayed(problem.solve(guess=deeppcr.Random(seed=1)))
    with pytest.raises(ValueError, match="not finite"):
        problem.solve(guess=torch.full((40, 2, 16), torch.nan, dtype=torch.float64, device=device))
    assert len(captured_solves) == 1


class TestWhatTheStepClosesOver:
    def problem(self, device):
        make = Generator(0, torch.float64, device)
        return make.normal(3, 8), make.normal(40, 8), make.normal(8, 8) / 4

    def test_changed_in_place(self, device):
        z0, xs, weight = self.problem(device)
        step = lambda z, x: torch.tanh(z @ weight + x)  # noqa: E731
        twice(lambda: deeppcr.solve(step, z0, xs, solver=Newton()))
        weight.mul_(-0.5)
        solution = deeppcr.solve(step, z0, xs, solver=Newton())
        assert is_replayed(solution)
        assert len(captured_solves) == 1
        assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-9

    def test_rebound(self, device):
        z0, xs, weight = self.problem(device)
        step = lambda z, x: torch.tanh(z @ weight + x)  # noqa: E731
        twice(lambda: deeppcr.solve(step, z0, xs, solver=Newton()))
        weight = -0.5 * weight
        solution = deeppcr.solve(step, z0, xs, solver=Newton())
        assert not is_replayed(solution)
        solution = twice(lambda: deeppcr.solve(step, z0, xs, solver=Newton()))
        assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-9
        assert len(captured_solves) == 2

    def test_a_number(self, device):
        z0, xs, weight = self.problem(device)
        factor = 1.0
        step = lambda z, x: factor * torch.tanh(z @ weight + x)  # noqa: E731
        twice(lambda: deeppcr.solve(step, z0, xs, solver=Newton()))
        factor = 0.5
        solution = deeppcr.solve(step, z0, xs, solver=Newton())
        assert not is_replayed(solution)
        assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-9
        factor = 1.0
        solution = deeppcr.solve(step, z0, xs, solver=Newton())
        assert is_replayed(solution)
        assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-9

    def test_the_mode_of_a_module(self, device):
        class Gate(nn.Module):
            def forward(self, z):
                return torch.tanh(z) if self.training else torch.sin(z)

        z0, xs, weight = self.problem(device)
        gate = Gate()
        step = lambda z, x: gate(z @ weight) + x  # noqa: E731
        twice(lambda: deeppcr.solve(step, z0, xs, solver=Newton()))
        gate.eval()
        for _ in range(3):
            assert relative_error(deeppcr.solve(step, z0, xs, solver=Newton()).states, plain_loop(step, z0, xs)) < 1e-9

    def test_which_result_is_returned(self, device):
        z0 = (torch.ones(2, 3, device=device), torch.zeros(2, 3, device=device))
        swap = False

        def step(z):
            a, b = torch.tanh(z[0]), torch.cos(z[1])
            return (b, a) if swap else (a, b)

        twice(lambda: deeppcr.solve(step, z0, length=20, solver=Newton()))
        swap = True
        for _ in range(3):
            solution = deeppcr.solve(step, z0, length=20, solver=Newton())
            assert relative_error(solution.states, plain_loop(step, z0, length=20)) < 1e-5

    def test_its_own_inputs(self, device):
        """The xs of one solve, closed over, are not the xs of the next."""
        z0, xs, weight = self.problem(device)
        step = lambda z, x: torch.tanh(z @ weight + x + xs[0])  # noqa: E731
        for _ in range(4):
            assert relative_error(deeppcr.solve(step, z0, xs, solver=Newton()).states, plain_loop(step, z0, xs)) < 1e-9
            xs = xs + 1

    def test_new_closures_of_the_same_kind_share_a_recording(self, device):
        z0, xs, weight = self.problem(device)
        solutions = [deeppcr.solve(lambda z, x: torch.tanh(z @ weight + x), z0, xs, solver=Newton()) for _ in range(3)]
        assert [is_replayed(s) for s in solutions] == [False, True, True]

    def test_tensors_made_anew_for_every_solve_are_not_recorded_forever(self, device):
        z0, xs, weight = self.problem(device)
        kept = []
        for number in range(12):
            kept.append(weight / (1 + number))
            for _ in range(2):
                step = lambda z, x: torch.tanh(z @ kept[-1] + x)  # noqa: E731
                solution = deeppcr.solve(step, z0, xs, solver=Newton())
                assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-9
        assert len(captured_solves) < 10

    def test_recordings_that_are_replayed_are_not_counted_as_idle(self, device):
        z0, xs, weight = self.problem(device)
        for number in range(6):
            scaled = weight / (1 + number)
            step = lambda z, x: torch.tanh(z @ scaled + x)  # noqa: B023, E731
            solutions = [deeppcr.solve(step, z0, xs, solver=Newton()) for _ in range(3)]
            assert is_replayed(solutions[-1]), solutions[-1].plan


class Slotted:
    __slots__ = ("scale",)

    def __call__(self, z):
        return torch.sin(self.scale * z)


class OnItsClass:
    scale = 1.0

    def method(self, z):
        return torch.sin(self.scale * z)


def in_a_slot():
    step = Slotted()
    return step, lambda scale: setattr(step, "scale", scale)


def in_a_class():
    return OnItsClass().method, lambda scale: setattr(OnItsClass, "scale", scale)


def in_a_list_of_closures():
    make = lambda scale: lambda z: torch.sin(scale * z)  # noqa: E731
    inner = [torch.cos, None]
    return lambda z: inner[1](z), lambda scale: inner.__setitem__(1, make(scale))


def in_a_partial():
    inner = [None]
    return lambda z: inner[0](z), lambda scale: inner.__setitem__(0, partial(lambda s, z: torch.sin(s * z), scale))


def in_a_keyword_of_a_partial():
    step = partial(lambda z, *, scale: torch.sin(scale * z), scale=None)
    return step, lambda scale: step.keywords.update(scale=scale)


def in_a_default():
    def step(z, scale=None):
        return torch.sin(scale * z)

    return step, lambda scale: setattr(step, "__defaults__", (scale,))


def in_a_keyword_default():
    def step(z, *, scale=None):
        return torch.sin(scale * z)

    return step, lambda scale: step.__kwdefaults__.update(scale=scale)


def in_a_global_variable():
    namespace = {"torch": torch}
    exec("def step(z): return torch.sin(scale * z)", namespace)
    return namespace["step"], lambda scale: namespace.update(scale=scale)


def in_an_attribute_of_an_attribute():
    settings = SimpleNamespace(inner=SimpleNamespace())
    return lambda z: torch.sin(settings.inner.scale * z), lambda scale: setattr(settings.inner, "scale", scale)


def in_a_hook():
    module = nn.Identity()

    def put(scale):
        module._forward_hooks.clear()
        module.register_forward_hook(lambda module, inputs, found: torch.sin(scale * found))

    return module, put


PLACES = [
    *(in_a_slot, in_a_class, in_a_list_of_closures, in_a_partial, in_a_keyword_of_a_partial, in_a_default),
    *(in_a_keyword_default, in_a_global_variable, in_an_attribute_of_an_attribute, in_a_hook),
]


@pytest.mark.parametrize(
    ("place", "of"),
    [
        *((place, "number") for place in PLACES),
        *((place, "tensor") for place in PLACES[:3]),
        *thorough(*((place, "tensor") for place in PLACES[3:])),
    ],
)
def test_wherever_a_step_holds_what_changes(place, of, device):
    """Each value has a recording of its own, and none gets that of another."""
    step, put = place()
    z0 = torch.linspace(-1, 1, 6, dtype=torch.float64, device=device).reshape(2, 3)
    values = [0.5, 1.0] if of == "number" else [torch.full_like(z0[0], scale) for scale in (0.5, 1.0)]
    replayed = []
    for number in (0, 0, 1, 1, 0, 1):
        put(values[number])
        solution = deeppcr.solve(step, z0, length=8, solver=Newton(chunk=1))
        assert relative_error(solution.states, plain_loop(step, z0, length=8)) < 1e-9
        replayed.append(is_replayed(solution))
    assert replayed == [False, True, False, True, True, True]
    assert len(captured_solves) == 2


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda z: torch.tanh(z) * float(z.detach().sum() * 0 + 0.5), "looks at values"),
        (lambda z: torch.tanh(z) + torch.tensor(0.1, device=z.device), "needs a tensor on|makes a tensor"),
    ],
    ids=["item", "constant"],
)
@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
def test_what_cannot_be_recorded_runs_as_ever(step, reason, device):
    z0 = torch.ones(2, 3, device=device)
    for _ in range(3):
        solution = deeppcr.solve(step, z0, length=20, solver=Newton())
        assert re.search(reason, why_not(solution)), solution.plan
        assert relative_error(solution.states, plain_loop(step, z0, length=20)) < 1e-4
    assert len(captured_solves) == 0


def test_a_step_that_vmap_does_not_cover_runs_as_ever(device):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return 0.5 * torch.cos(z)

        @staticmethod
        def backward(ctx, grad):
            return grad

    z0 = torch.ones(2, 3, device=device)
    settings = {
        "length": 12,
        "solver": Newton(jacobian=GivenJacobian(lambda z: linear.Diagonal(-0.5 * torch.sin(z)), exact=True)),
    }
    for number in range(3):
        solution = deeppcr.solve(Twice.apply, z0, **settings)
        assert relative_error(solution.states, plain_loop(Twice.apply, z0, length=12)) < 1e-5
        assert ("evaluated by loop" in why_not(solution)) == (number > 0), solution.plan


def test_buffers_that_a_step_changes_are_found(device):
    count = torch.zeros(3, device=device)

    def step(z):
        count.add_(1)
        return torch.tanh(z)

    trace = Sequence(step, torch.ones(2, 3, device=device), length=5, traced=True).trace
    assert trace is not None
    assert "changes a tensor" in str(trace.refusal)


def test_a_recording_that_fails_is_answered_by_the_general_iteration(device, monkeypatch):
    def fail(self, function):
        raise RuntimeError("operation not permitted when stream is capturing")

    problem = mlp(Generator(0, torch.float32, device), 40, 2)
    monkeypatch.setattr(record.RECORDERS[device.type], "record", fail)
    for number in range(3):
        solution = problem.solve()
        assert relative_error(solution.states, problem.loop()) < 1e-5
        assert ("not permitted" in why_not(solution)) == (number > 0)


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
class TestHandedOver:
    def test_chaos(self, device):
        problem = CHAOTIC["logistic"](Generator(0, torch.float64, device), 300, 2)
        expected = problem.solve(solver=Newton(capture=False))
        for number in range(5):
            solution = problem.solve()
            assert solution.results == expected.results
            assert torch.equal(solution.states, expected.states)
            reason = ["the first", *3 * ["handed over"], "safeguards"][number]
            assert reason in why_not(solution)
        assert len(captured_solves) == 0

    def test_a_value_that_is_not_finite(self, device):
        make = Generator(0, torch.float64, device)
        z0, xs = make.normal(2, 3), make.normal(30, 3)
        step = lambda z, x: torch.tanh(z) + x  # noqa: E731
        twice(lambda: deeppcr.solve(step, z0, xs, solver=Newton()))
        bad = xs.clone()
        bad[20] = torch.inf
        solution = deeppcr.solve(step, z0, bad, solver=Newton())
        assert "handed over" in why_not(solution)
        assert solution.result is Result.NON_FINITE
        assert solution.exact_steps.tolist() == [20, 20]
        assert is_replayed(deeppcr.solve(step, z0, xs, solver=Newton()))

    def test_few_iterations_allowed(self, device):
        problem = mlp(Generator(0, torch.float64, device), 60, 2, activation=torch.tanh)
        solver = Newton(max_iterations=1, chunk=1)
        for _ in range(3):
            assert problem.solve(solver=solver, on_failure="return").result is Result.NOT_CONVERGED

    def test_states_thrown_far(self, device):
        """A Newton step that overshoots by far: the general iteration calls the states back."""
        step = lambda z: z - 0.9 * torch.atan(z * 4)  # noqa: E731
        z0 = torch.full((2, 1), 5.0, dtype=torch.float64, device=device)
        solver = Newton(chunk=1)
        expected = deeppcr.solve(step, z0, length=60, solver=Newton(chunk=1, capture=False))
        for _ in range(3):
            solution = deeppcr.solve(step, z0, length=60, solver=solver)
            assert solution.results == expected.results
            assert relative_error(solution.states, expected.states) < 1e-8


def test_states_that_are_called_back_are_replayed(device, monkeypatch):
    """A narrow ReLU network throws a state far away in its first update; the replay calls it back as the general one."""
    make = Generator(0, torch.float64, device)
    weights, biases, z0 = make.normal(512, 2, 2) / 1.3, make.normal(512, 2) / 2, make.normal(1, 2)
    step = lambda z, x: torch.relu(z) @ x[0].mT + x[1]  # noqa: E731
    called, changes_states = [], Iteration.changes_states
    monkeypatch.setattr(
        Iteration, "changes_states", lambda self, flags: called.append(changes_states(self, flags)) or called[-1]
    )
    plain = Newton(chunk=1, capture=False)
    expected = deeppcr.solve(step, z0, (weights, biases), solver=plain)
    assert any(called)
    solution = twice(lambda: deeppcr.solve(step, z0, (weights, biases), solver=Newton(chunk=1)))
    assert is_replayed(solution)
    assert_same(solution, expected)


def test_rows_finish_by_themselves(device):
    rates = torch.tensor([[0.1], [2.9]], dtype=torch.float64, device=device)
    step = lambda z: rates * z * (1 - z)  # noqa: E731
    z0 = torch.full((2, 1), 0.3, dtype=torch.float64, device=device)
    solver = Newton(chunk=4)
    expected = deeppcr.solve(step, z0, length=40, solver=Newton(chunk=4, capture=False))
    assert expected.iterations[0] < expected.iterations[1]
    assert_same(twice(lambda: deeppcr.solve(step, z0, length=40, solver=solver)), expected)


def test_gradients(device):
    make = Generator(0, torch.float64, device)
    weight = (make.normal(8, 8) / 4).requires_grad_()
    z0, xs = make.normal(3, 8).requires_grad_(), make.normal(40, 8).requires_grad_()
    step = lambda z, x: torch.tanh(z @ weight + x)  # noqa: E731

    def gradients(states):
        return torch.autograd.grad(states.square().sum(), (weight, z0, xs))

    expected = gradients(plain_loop(step, z0, xs))
    for _ in range(3):
        solution = deeppcr.solve(step, z0, xs, solver=Newton())
        for found, true in zip(gradients(solution.states), expected, strict=True):
            assert relative_error(found, true) < 1e-8
    assert is_replayed(solution)
    with torch.no_grad():
        weight.mul_(0.5)
    solution = deeppcr.solve(step, z0, xs, solver=Newton())
    assert is_replayed(solution)
    for found, true in zip(gradients(solution.states), gradients(plain_loop(step, z0, xs)), strict=True):
        assert relative_error(found, true) < 1e-8
    solution = deeppcr.solve(step, z0.detach(), xs.detach(), solver=Newton())
    assert not solution.states.is_leaf  # the weight still requires a gradient


class TestJacobians:
    def test_given_by_a_function(self, device):
        make = Generator(0, torch.float64, device)
        z0, weights = make.normal(2, 5), make.normal(40, 5, 5) / 5
        scale = 1.0

        def jacobian(z, w):
            return linear.Dense(scale * w * (1 - torch.tanh(z) ** 2).unsqueeze(-2))

        step = lambda z, w: torch.tanh(z) @ w.mT  # noqa: E731
        settings = {"jacobian": GivenJacobian(jacobian, exact=True), "chunk": 1}
        expected = deeppcr.solve(step, z0, weights, solver=Newton(**settings, capture=False))
        assert_same(twice(lambda: deeppcr.solve(step, z0, weights, solver=Newton(**settings))), expected)
        scale = 0.9
        assert not is_replayed(deeppcr.solve(step, z0, weights, solver=Newton(**settings)))

    def test_wherever_the_memory_of_a_trace_lies(self, device):
        """What is made on the way is freed, and the trace of the Jacobian finds other tensors there."""
        newton = Newton(chunk=1, stop=PaperTest())
        network = deeppcr.nn.ResNet(5, 4, 16, 3, mode="parallel", newton=newton, device=device)
        kept = []
        for number in range(5):
            network(torch.ones(2, 5, device=device))
            assert is_replayed(network.solution) == (number > 0), network.solution.plan
            kept += [torch.empty(2, 4, device=device) for _ in range(number)]

    def test_given_blocks(self, device):
        make = Generator(0, torch.float64, device)
        z0, weights = make.normal(2, 5), make.normal(40, 5, 5) / 5
        step = lambda z, w: z @ w.mT  # noqa: E731
        newton = Newton(jacobian=GivenJacobian(linear.Dense(weights), exact=True))
        twice(lambda: deeppcr.solve(step, z0, weights, solver=newton))
        newton = Newton(jacobian=GivenJacobian(linear.Dense(weights.clone()), exact=True))
        assert not is_replayed(deeppcr.solve(step, z0, weights, solver=newton))

    @pytest.mark.parametrize("chunk", [1, 4])
    def test_diagonal_and_its_check(self, chunk, device):
        make = Generator(0, torch.float64, device)
        z0, xs = make.normal(2, 3), torch.eye(3, dtype=torch.float64, device=device).repeat(30, 1, 1) / 2
        step = lambda z, x: torch.tanh(z) @ x  # noqa: E731
        newton = Newton(jacobian=DiagonalJacobian(), chunk=chunk)
        expected = deeppcr.solve(step, z0, xs, solver=Newton(jacobian=DiagonalJacobian(), chunk=chunk, capture=False))
        assert_same(twice(lambda: deeppcr.solve(step, z0, xs, solver=newton)), expected)
        with pytest.raises(deeppcr.StepError, match="not elementwise"):
            deeppcr.solve(step, z0, xs + 1e-4, solver=newton)  # so little that it converges all the same

    def test_approximate_ones_are_not_captured(self, device):
        for solver in (
            deeppcr.Picard(),
            deeppcr.Jacobi(),
            Newton(shrink=0.9),
            Newton(jacobian=GivenJacobian(lambda z: linear.Scalar(z[..., 0] * 0))),
        ):
            for _ in range(3):
                assert not is_replayed(
                    deeppcr.solve(
                        lambda z: 0.5 * torch.cos(z), torch.ones(2, 3, device=device), length=9, solver=solver
                    )
                )
        assert len(captured_solves) == 0


def test_inputs_that_only_seem_large(device):
    """Expanded leaves are kept, and copied, as small as they are; strided ones come out right too."""
    make = Generator(0, torch.float64, device)
    z0, weight, offsets = make.normal(2, 4), make.normal(4, 4) / 4, make.normal(4, 30).mT

    def solve():
        xs = (weight.expand(30, 4, 4), offsets)
        step = lambda z, x: torch.tanh(z @ x[0] + x[1])  # noqa: E731
        return deeppcr.solve(step, z0, xs, solver=Newton()), plain_loop(step, z0, xs)

    for number in range(3):
        solution, loop = solve()
        assert is_replayed(solution) == (number > 0)
        assert relative_error(solution.states, loop) < 1e-9
        weight, offsets = -weight, 0.5 * offsets
        offsets = offsets.mT.contiguous().mT


def test_the_cache_is_bounded(device, monkeypatch):
    monkeypatch.setattr(captured_solves._recordings, "most", 3)
    for length in range(10, 16):
        twice(lambda: deeppcr.solve(torch.cos, torch.ones(2, 3, device=device), length=length, solver=Newton()))  # noqa: B023
        assert len(captured_solves) <= 3
    assert is_replayed(deeppcr.solve(torch.cos, torch.ones(2, 3, device=device), length=15, solver=Newton()))
    monkeypatch.setattr(captured_solves._recordings, "most_bytes", 1)
    twice(lambda: deeppcr.solve(torch.cos, torch.ones(2, 3, device=device), length=17, solver=Newton()))
    assert len(captured_solves) == 1
    deeppcr.clear_caches()
    assert len(captured_solves) == 0


def test_a_recording_does_not_keep_the_step(device):
    """What a step closes over may be a large model: it goes when its owner lets go of it."""
    weight = torch.eye(3, device=device) / 2
    step = lambda z: torch.tanh(z @ weight)  # noqa: E731
    z0 = torch.ones(2, 3, device=device)
    expected = deeppcr.solve(step, z0, length=20, solver=Newton(capture=False))
    assert_same(twice(partial(deeppcr.solve, step, z0, length=20, solver=Newton())), expected)
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None
    again = lambda z: torch.tanh(z @ weight)  # noqa: E731
    assert not is_replayed(deeppcr.solve(again, z0, length=20, solver=Newton()))  # another place in a program
    assert len(captured_solves) == 1


def test_large_blocks_are_not_captured(device, monkeypatch):
    monkeypatch.setattr("deeppcr.graphs.replay._LARGEST_BLOCKS", 100)
    problem = mlp(Generator(0, torch.float32, device), 20, 2)
    problem.solve()
    assert "MiB" in why_not(problem.solve())


def test_settings_of_the_process_are_part_of_the_kind(device):
    problem = mlp(Generator(0, torch.float32, device), 30, 2)
    twice(problem.solve)
    with torch.inference_mode():
        assert not is_replayed(problem.solve())
        assert relative_error(twice(problem.solve).states, problem.loop()) < 1e-5
    assert is_replayed(problem.solve())
    with torch.autocast(device.type, dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
        half = lambda z, x: (torch.relu(z) @ x[0].mT + x[1]).float()  # noqa: E731
        for _ in range(3):
            solution = deeppcr.solve(half, problem.z0, problem.xs, solver=Newton())
            assert relative_error(solution.states, plain_loop(half, problem.z0, problem.xs)) < 0.05


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def other_arithmetic():
    with pytest.MonkeyPatch.context() as patched:
        for where, name in cache._ARITHMETIC:
            patched.setattr(where, name, "other")
        yield


SETTINGS = {
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "another dtype of autocast": partial(torch.autocast, "cpu", dtype=torch.float16),
    "inference mode": torch.inference_mode,
    "deterministic algorithms": deterministic,
    "arithmetic": other_arithmetic,
}


def test_each_setting_makes_another_kind(monkeypatch):
    """By itself: traces may be equal, as a step without a product is the same under autocast."""
    monkeypatch.setattr(cache, "_ARITHMETIC", [(SimpleNamespace(value=number), "value") for number in range(3)])
    problem = mlp(Generator(0, torch.float32), 5, 2)
    sequence = Sequence(*problem)
    kinds = [cache._kind_of(Newton(), sequence, 4)]
    for setting in SETTINGS.values():
        with setting():
            kinds.append(cache._kind_of(Newton(), sequence, 4))
    assert cache._kind_of(Newton(), sequence, 4) == kinds[0]
    turned = pytree.tree_map(lambda leaf: leaf.mT.contiguous().mT if leaf.ndim > 2 else leaf, problem.xs)
    kinds.append(cache._kind_of(Newton(), Sequence(problem.step, problem.z0, turned), 4))
    assert len(set(kinds)) == len(SETTINGS) + 2


def test_off(device):
    problem = mlp(Generator(0, torch.float32, device), 20, 2)
    for _ in range(3):
        solution = problem.solve(solver=Newton(capture=False))
        assert not is_replayed(solution)
        assert not why_not(solution)
    assert len(captured_solves) == 0


def test_threads_with_one_recording(device):
    make = Generator(0, torch.float64, device)
    xs, weight = make.normal(60, 8), make.normal(8, 8) / 4
    step = lambda z, x: torch.tanh(z @ weight + x)  # noqa: E731
    starts = [make.normal(3, 8) for _ in range(4)]
    twice(lambda: deeppcr.solve(step, starts[0], xs, solver=Newton()))
    errors: list = []

    def work(z0):
        try:
            loop = plain_loop(step, z0, xs)
            for _ in range(4):
                solution = deeppcr.solve(step, z0, xs, solver=Newton())
                assert is_replayed(solution)
                assert relative_error(solution.states, loop) < 1e-9
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(z0,)) for z0 in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_where_somebody_looks_at_the_operations_they_are_all_done(device):
    problem = mlp(Generator(0, torch.float32, device), 20, 2)
    twice(problem.solve)
    with FlopCounterMode(display=False) as counter:
        assert not is_replayed(problem.solve())
    assert counter.get_total_flops() > 0


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.fixture(autouse=True)
    def needs_one(self, device):
        if device.type != "cuda":
            pytest.skip("needs --device=cuda")

    def test_two_streams(self, device):
        make = Generator(0, torch.float32, device)
        xs, weight = make.normal(2000, 16), make.normal(16, 16) / 8
        step = lambda z, x: torch.tanh(z @ weight + x)  # noqa: E731
        starts = [make.normal(3, 16) for _ in range(2)]
        expected = [deeppcr.solve(step, z0, xs, solver=Newton(capture=False)).states for z0 in starts]
        twice(lambda: deeppcr.solve(step, starts[0], xs, solver=Newton()))
        streams = [torch.cuda.Stream() for _ in starts]
        torch.cuda.synchronize()
        found: list[list] = [[], []]
        for _ in range(20):
            for number, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    found[number].append(deeppcr.solve(step, starts[number], xs, solver=Newton()).states)
        torch.cuda.synchronize()
        for number, states in enumerate(found):
            assert all(relative_error(each, expected[number]) < 1e-5 for each in states)

    def test_after_an_optimiser_step(self, device):
        cell = nn.Linear(16, 16).to(device)
        optimiser = torch.optim.SGD(cell.parameters(), lr=0.1)
        z0, xs = torch.randn(4, 16, device=device), torch.randn(1000, 4, 16, device=device)
        step = lambda z, x: torch.tanh(cell(z) + x)  # noqa: E731
        for number in range(4):
            optimiser.zero_grad()
            solution = deeppcr.solve(step, z0, xs, solver=Newton())
            assert is_replayed(solution) == (number > 0), solution.plan
            with torch.no_grad():
                assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-4
            solution.states[-1].square().sum().backward()
            optimiser.step()


@torch.library.custom_op("deeppcr_tests::scaled", mutates_args=())
def _scaled(z: torch.Tensor) -> torch.Tensor:
    return z * _SCALE[0]


@_scaled.register_vmap
def _(info, dims, z):
    return _scaled(z), dims[0]


_SCALE = [0.3]


def test_operations_whose_inside_is_not_seen_are_not_recorded(device):
    class Filled(torch.autograd.Function):  # as one around a kernel that PyTorch knows nothing of
        generate_vmap_rule = True

        @staticmethod
        def forward(z):
            return torch.empty_like(z).copy_(0.3 * z)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def jvp(ctx, tangent):
            return 0.3 * tangent

    z0 = torch.ones(2, 3, dtype=torch.float64, device=device)
    for step, reason in ((lambda z: Filled.apply(torch.sin(z)), "unseen"), (lambda z: torch.sin(_scaled(z)), "inside")):
        jacobian = GivenJacobian(lambda z: linear.Dense(torch.diag_embed(0.3 * torch.cos(z))), exact=True)
        for _ in range(3):
            solution = deeppcr.solve(step, z0, length=30, solver=Newton(chunk=1, jacobian=jacobian))
            assert not is_replayed(solution)
        assert reason in why_not(solution)


@pytest.mark.parametrize("flag", ["conv", "rnn"])
def test_the_precision_of_convolutions_is_part_of_the_kind(flag, device):
    settings = getattr(torch.backends.cudnn, flag)
    step = lambda z: torch.sin(z) / 2  # noqa: E731
    z0 = torch.ones(2, 3, dtype=torch.float64, device=device)
    solve = lambda: deeppcr.solve(step, z0, length=30, solver=Newton(chunk=1))  # noqa: E731
    assert is_replayed(twice(solve))
    before = settings.fp32_precision
    settings.fp32_precision = "ieee" if before != "ieee" else "tf32"
    try:
        assert not is_replayed(solve())  # the first of another kind
    finally:
        settings.fp32_precision = before


@pytest.mark.parametrize("stop", [UpdateTest(), PaperTest(), FixedIterations(9)], ids=["update", "paper", "fixed"])
def test_a_replay_that_no_longer_fits_the_step_is_noticed(stop, device, monkeypatch):
    """Whatever a trace cannot see: the adjoint evaluates the step as it is now."""
    make = Generator(0)
    problem = mlp(make, 9, 2, activation=torch.tanh)
    z0 = problem.z0.to(device).requires_grad_()
    xs = tuple(x.to(device) for x in problem.xs)
    solver, true = Newton(chunk=1, stop=stop), plain_loop(problem.step, z0, xs, 9)
    original = captured_solves.solve

    def stale(*arguments):
        found = original(*arguments)
        if found is None:
            return None
        outcome, residual = found
        return replace(outcome, states=outcome.states + 0.1), residual

    monkeypatch.setattr(captured_solves, "solve", stale)
    for _ in range(3):
        solution = deeppcr.solve(problem.step, z0, xs, solver=solver)
    assert "another result" in " ".join(solution.plan.notes)
    assert relative_error(solution.states, true) < 1e-4


def test_a_derivative_of_its_own_is_part_of_a_recording_that_tests_nothing(device):
    """The values of the step do not depend on what its derivative does; the iterates of a fixed number of iterations do."""
    factor = [1.0]

    class Sine(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(z):
            return torch.sin(z)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx, tangent):
            return factor[0] * torch.cos(ctx.saved_tensors[0]) * tangent

    make = Generator(0, torch.float64, device)
    weight, z0, xs = make.normal(3, 3), make.normal(2, 3), make.normal(30, 3)

    def solve(**settings):
        newton = Newton(stop=deeppcr.FixedIterations(2), chunk=1, **settings)
        with torch.no_grad():
            return deeppcr.solve(lambda z, x: Sine.apply(z @ weight + x), z0, xs, solver=newton)

    assert is_replayed([solve() for _ in range(3)][-1])
    factor[0] = 0.2
    assert_same([solve() for _ in range(3)][-1], solve(capture=False))


def test_what_was_large_does_not_hide_what_comes_after_it(device):
    """A recording cannot look closer: it hands over what lives on, and keeps what dies out."""
    step = lambda z, x: 0.1 * z + torch.sin(1.3 * torch.tanh(z)) * 0.8 + x  # noqa: E731
    xs, z0 = torch.randn(100, 1, generator=torch.Generator().manual_seed(0)).to(device), torch.ones(1, device=device)
    assert is_replayed(twice(lambda: deeppcr.solve(step, z0, xs, solver=Newton(), batch_dims=0)))
    found = deeppcr.solve(step, 1e7 * z0, xs, solver=Newton(), batch_dims=0)
    assert not is_replayed(found)
    assert (found.states - plain_loop(step, 1e7 * z0, xs)).abs()[20:].max() <= 1e-3
    dying = torch.zeros_like(xs)
    assert is_replayed(twice(lambda: deeppcr.solve(lambda z, x: 0.3 * torch.sin(z) + x, z0, dying, solver=Newton())))


def test_a_solve_of_many_chunks_is_replayed(device):
    """Whether something large hides what follows is asked of 64 chunks without a look by the host."""
    weights = 0.3 * torch.randn(8, 8, device=device)
    step, z0, xs = (
        lambda z, x: torch.tanh(z @ weights + x),
        torch.zeros(2, 8, device=device),
        torch.randn(256, 2, 8, device=device),
    )
    with torch.no_grad():
        found = [deeppcr.solve(step, z0, xs, solver=Newton(chunk=4)) for _ in range(4)]
    assert is_replayed(found[-1]), found[-1].plan.notes
