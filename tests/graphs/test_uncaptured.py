"""Solves that are not recorded, or handed over to the general iteration; recordings that are forgotten or shared."""

import gc
import re
import threading
import weakref
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import deeppcr
from deeppcr import (
    GivenJacobian,
    Newton,
    Result,
    linear,
)
from deeppcr.graphs import record
from deeppcr.graphs.cache import captured_solves
from deeppcr.sequence import Sequence
from graphs.replayed import assert_same, is_replayed, twice, why_not
from problems import CHAOTIC, Generator, mlp, plain_loop, relative_error

pytestmark = pytest.mark.usefixtures("recording")


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

    trace = Sequence(step, torch.ones(2, 3, device=device), length=5, traced=True, watched=False).trace
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
        problem = CHAOTIC["logistic"](Generator(0, torch.float64, device), 120, 2)
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
        expected = deeppcr.solve(step, z0, length=30, solver=Newton(chunk=1, capture=False))
        for _ in range(3):
            solution = deeppcr.solve(step, z0, length=30, solver=solver)
            assert solution.results == expected.results
            assert relative_error(solution.states, expected.states) < 1e-8


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
