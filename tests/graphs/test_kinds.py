"""A recording is replayed for the step that it was made of and under the settings of then: what differs is another kind."""

import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import deeppcr
from deeppcr import (
    FixedIterations,
    Newton,
    PaperTest,
    UpdateTest,
)
from deeppcr.graphs import cache
from deeppcr.graphs.cache import captured_solves
from deeppcr.sequence import Sequence
from graphs.replayed import assert_same, is_replayed, twice
from kernel_support import thorough
from problems import Generator, mlp, plain_loop, relative_error

pytestmark = pytest.mark.usefixtures("recording")


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
