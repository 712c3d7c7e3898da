"""Not all states are kept: those that are, and all that is said of them, are what they are where all are."""

import gc
import sys
import warnings

import pytest
import torch

import deeppcr
from deeppcr import ConvergenceWarning, Loop, Newton, Result, Unrolled
from deeppcr.sequence import kept as kept_states
from kernel_support import thorough
from test_memory import PeakMemory

SOLVERS = {"planned": None, "loop": Loop(), "newton": Newton()}


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def by_loop(step, z0, xs):
    states = []
    for x in xs:
        z0 = step(z0, x)
        states.append(z0)
    return torch.stack(states)


def every(keep, length):
    return {"all": 1, "last": length}.get(keep, keep)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(kept_states, "_BLOCK", 4)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("length", [1, 13, *thorough(2, 4, 5)])
def test_what_is_kept_is_what_the_loop_gives(name, length):
    weight = normal(3).requires_grad_()
    step = lambda z, x: torch.tanh(0.5 * z + weight * x)  # noqa: E731
    z0, xs = normal(2, 3).requires_grad_(), normal(length, 2, 3).requires_grad_()
    expected = by_loop(step, z0, xs)
    for keep in ("last", 1, 3, 4, 7):
        k = every(keep, length)
        if k > length:
            continue
        with torch.no_grad():
            quiet = deeppcr.solve(step, z0, xs, keep=keep, solver=SOLVERS[name])
        solution = deeppcr.solve(step, z0, xs, keep=keep, solver=SOLVERS[name])
        for found in (quiet, solution):
            torch.testing.assert_close(found.states, expected[k - 1 :: k], rtol=1e-9, atol=1e-12)
            assert found.states.shape == (length // k, 2, 3)
            torch.testing.assert_close(found.final, expected[-1], rtol=1e-9, atol=1e-12)
            assert found.exact_steps.tolist() == found.known_steps.tolist() == [length] * 2
            assert "died out" not in repr(found)
        seed, last = normal(length // k, 2, 3), normal(2, 3)
        inputs = (z0, xs, weight)
        of_found = torch.autograd.grad([solution.states, solution.final], inputs, [seed, last], materialize_grads=True)
        wanted = torch.autograd.grad(
            [expected[k - 1 :: k], expected[-1]], inputs, [seed, last], retain_graph=True, materialize_grads=True
        )
        for one, other in zip(of_found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_numbers_whose_sum_is_not_finite_are_finite():
    found = deeppcr.solve(lambda z: -z, torch.full((2, 3), 3e38), length=5)
    assert found.result is Result.LOOP
    found = deeppcr.solve(lambda z: z.clone(), torch.full((2, 3), 3e38), length=5, keep=2, solver=Loop())
    assert found.result is Result.LOOP


@pytest.mark.parametrize("name", SOLVERS)
def test_nests_and_lengths(name):
    step = lambda z, x: (torch.sin(z[0]) + x, z[1] * 0.5 + z[0].mean(-1, keepdim=True))  # noqa: E731
    z0, xs, lengths = (normal(2, 3), normal(2, 1)), normal(11, 2, 3), torch.tensor([5, 11])
    whole = deeppcr.solve(step, z0, xs, lengths=lengths, solver=Loop()).states
    found = deeppcr.solve(step, z0, xs, lengths=lengths, keep=4, solver=SOLVERS[name])
    for leaf, final, expected in zip(found.states, found.final, whole, strict=True):
        torch.testing.assert_close(leaf, expected[3::4])
        torch.testing.assert_close(final, expected[-1])


def test_unrolled_gradients_and_guesses():
    step, z0, xs = lambda z, x: torch.tanh(z) + x, normal(2, 3).requires_grad_(), normal(9, 2, 3)
    expected = by_loop(step, z0, xs)
    found = deeppcr.solve(step, z0, xs, keep="last", gradient=Unrolled())
    torch.testing.assert_close(found.states, expected[-1:])
    (one,) = torch.autograd.grad(found.states.sum(), z0)
    torch.testing.assert_close(one, torch.autograd.grad(expected[-1].sum(), z0)[0])
    # A solution that lacks states is no guess.
    with pytest.raises(ValueError, match=r"guess: expected states of shape \[9, 2, 3\]"):
        deeppcr.solve(step, z0, xs, guess=found)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("solver", [None, Loop()])
def test_what_is_not_finite_is_told_also_where_it_was_not_kept(solver):
    """And is no longer seen in what was."""
    step = lambda z, x: torch.where(torch.isfinite(z), torch.tanh(z), 0.0) + x  # noqa: E731
    z0, xs = normal(3, 2), normal(15, 3, 2)
    xs[9, 1, 0] = torch.inf
    xs[6, 2, 1] = torch.nan
    whole = deeppcr.solve(step, z0, xs, solver=Loop())
    with pytest.warns(ConvergenceWarning, match="step 7 produced a value that is not finite"):
        found = deeppcr.solve(step, z0, xs, keep="last", solver=solver)
    assert found.states.isfinite().all()
    assert found.results == whole.results == (Result.LOOP, Result.NON_FINITE, Result.NON_FINITE)
    assert found.exact_steps.tolist() == whole.exact_steps.tolist() == [15, 9, 6]


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
@pytest.mark.parametrize("keep", ["all", 3])
@pytest.mark.parametrize("solver", [None, Loop()])
def test_what_is_not_finite_in_a_state_of_several_tensors(keep, solver):
    step = lambda z, x: (torch.tanh(z[1]) + x, z[0].sum(-1, keepdim=True))  # noqa: E731
    xs = normal(9, 2, 3)
    xs[4, 1, 2] = torch.nan
    found = deeppcr.solve(step, (normal(2, 3), normal(2, 1)), xs, keep=keep, solver=solver)
    assert found.results == (Result.LOOP, Result.NON_FINITE)
    assert found.exact_steps.tolist() == [9, 4]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("keep", ["all", "last", 3])
@pytest.mark.parametrize("solver", [None, Loop()])
def test_a_step_that_changes_its_state_is_refused(keep, solver):
    def step(z, x):
        after = torch.tanh(z) + x
        if count[0] > 1:
            z.mul_(2)
        count[0] += 1
        return after

    count = [0]
    with pytest.raises(deeppcr.StepError, match="its state"):
        deeppcr.solve(step, normal(2, 3), normal(15, 2, 3), keep=keep, solver=solver)


def test_states_that_died_out_are_told_of_although_they_were_not_kept():
    step = lambda z: 0.1 * z  # noqa: E731
    solver = Newton(chunk=1)
    whole = deeppcr.solve(step, torch.ones(2, 3), length=40, solver=solver)
    found = deeppcr.solve(step, torch.ones(2, 3), length=40, solver=solver, keep=7)
    assert found.known_steps.tolist() == whole.known_steps.tolist()
    assert found.message == whole.message
    assert "died out" in found.message


@pytest.mark.parametrize("solver", [None, Loop()])
def test_a_loop_holds_no_more_than_is_kept(solver):
    """Blocks of 256 states, which are stacked and looked at, and what is kept."""
    length, z0 = 1200, torch.zeros(8, 16)
    step = lambda z: torch.tanh(z + 0.1)  # noqa: E731
    peaks = {}
    for keep in ("all", "last"):
        with torch.no_grad(), PeakMemory() as memory:
            deeppcr.solve(step, z0, length=length, keep=keep, solver=solver)
        peaks[keep] = memory.peak / (8 * 16 * 4)
    assert peaks["all"] > length  # or nothing is seen
    assert peaks["last"] < 3 * 256


@pytest.mark.parametrize("solver", [None, deeppcr.Loop()])
def test_xs_are_taken_apart_some_at_a_time(solver, monkeypatch):
    """Each entry of a tensor is an object of half a kilobyte: a million of them at once are more than the states."""
    monkeypatch.setattr(sys.modules["deeppcr.sequence.bare"], "_ENTRIES", 16)
    counts = []

    def step(z, x):
        if len(counts) < 2:
            counts.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
        return z + x

    z0, xs = torch.zeros(1), normal(401, 1).requires_grad_()
    before = sum(type(each) is torch.Tensor for each in gc.get_objects())
    found = deeppcr.solve(step, z0.double(), xs, solver=solver)
    assert max(counts) < before + 50
    torch.testing.assert_close(found.final, xs.sum(0))
    torch.testing.assert_close(torch.autograd.grad(found.final, xs)[0], torch.ones_like(xs))


@pytest.mark.parametrize("keep", ["some", 0, -1, 2.0, True, None])
def test_what_cannot_be_kept_is_named(keep):
    with pytest.raises(ValueError, match="keep: expected"):
        deeppcr.solve(torch.cos, torch.ones(1), length=5, keep=keep)
    with pytest.raises(ValueError, match="keep: there are 5 steps, fewer than 6"):
        deeppcr.solve(torch.cos, torch.ones(1), length=5, keep=6)


def test_nothing_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deeppcr.solve(torch.cos, torch.ones(2, 1), length=50, keep="last", solver=Newton())


@pytest.mark.parametrize("solver", [None, Loop()])
def test_a_step_that_returns_a_tensor_of_its_own_again_in_inference_mode(solver):
    """There nobody counts how often a tensor was written to."""
    own = torch.zeros_like(normal(2, 3))

    def step(z, x):
        return own.copy_(torch.tanh(z) + x)

    z0, xs = normal(2, 3), normal(15, 2, 3)
    with torch.inference_mode():
        found = deeppcr.solve(step, z0, xs, solver=solver).states
        z, expected = z0, []
        for x in xs:
            z = torch.tanh(z) + x
            expected.append(z)
    assert torch.equal(found, torch.stack(expected))
