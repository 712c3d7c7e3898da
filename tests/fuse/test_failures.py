"""Solves by kernels that fail, or have values that are not finite, tell so."""

import warnings

import pytest
import torch

import deeppcr
from deeppcr import ConvergenceError, ConvergenceWarning, Loop, Newton, Result
from deeppcr.ways import fused, fused_solution, plan
from deeppcr.ways import given as ways
from fuse.loops import by_loop
from fuse.solving import NEWTON, by_kernels, normal, solve
from kernel_support import error, thorough

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def chaotic(z):
    return 3.9 * z * (1 - z)


def test_one_bad_solve_does_not_change_how_later_ones_go(device):
    """Whoever met NaN once is solved in parallel the next time."""
    step, z0, xs = lambda z, x: 0.5 * torch.sin(z) + x, normal(2, 3, device=device), normal(40, 2, 3, device=device)
    good = solve(step, z0, xs)
    bad = xs.clone()
    bad[3] = float("nan")
    with pytest.warns(ConvergenceWarning, match="step 4"):
        assert deeppcr.solve(step, z0, bad, solver=NEWTON).result is Result.NON_FINITE
    again = deeppcr.solve(step, z0, xs, solver=NEWTON)
    assert again.result is Result.CONVERGED
    assert again.plan.chunk == good.plan.chunk


def test_a_chaotic_loop_is_finished_by_the_loop_and_told(device):
    """Each time, although later ones go there at once."""
    z0 = torch.tensor([[0.3], [0.4]], dtype=torch.float64, device=device)
    assert not by_kernels(deeppcr.solve(chaotic, z0, length=90, solver=NEWTON))
    for _ in range(2):
        with pytest.warns(ConvergenceWarning, match="one step at a time"):
            found = deeppcr.solve(chaotic, z0, length=90, solver=NEWTON)
        assert by_kernels(found)
        assert found.result is Result.FINISHED_BY_LOOP
        assert found.results == (Result.FINISHED_BY_LOOP,) * 2
        previous = torch.cat([z0[None], found.states[:-1]])
        assert torch.allclose(found.states, chaotic(previous), rtol=1e-12, atol=0)


def test_rows_end_each_in_its_own_way(device):
    """One that is finished by the loop beside one that is as exact as it gets."""
    rate = torch.tensor([[3.9], [1.5]], dtype=torch.float64, device=device)
    z0 = torch.tensor([[0.3], [0.4]], dtype=torch.float64, device=device)
    step = lambda z: rate * z * (1 - z)  # noqa: E731
    for _ in range(2):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", ConvergenceWarning)
            found = deeppcr.solve(step, z0, length=60, solver=Newton(chunk=2))
    assert any("one step at a time" in str(each.message) for each in told)
    assert by_kernels(found)
    assert found.result is Result.FINISHED_BY_LOOP
    assert found.results == (Result.FINISHED_BY_LOOP, Result.CONVERGED)
    assert 0 < found.exact_steps[0] < 60
    assert found.exact_steps[1] == 60
    assert f"up to step {found.exact_steps[0]} exact" in found.message


def test_the_floor_of_rounding_is_told(device):
    """Sums have the rounding of their largest term: below that nothing is to be had, and nothing failed."""
    z0, xs = normal(1, 2, device=device).float(), normal(24, 1, 2, device=device).float()
    step = lambda z, x: z + x  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        found = solve(step, z0, xs, solver=Newton(chunk=4, rtol=1e-9))
    assert by_kernels(found)
    # Where kernels add in the order of the loop, chunks join exactly.
    assert found.result is Result.PRECISION_FLOOR or (found.residual == 0).all()
    assert error(found.states, by_loop(step, z0.double(), xs.double())) < 1e-6


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
@pytest.mark.parametrize("mixing", [False, *thorough(True)])
def test_where_nobody_can_look_rows_that_overflow_end_in_nan(mixing, device):
    """From their exact steps on; the others are left alone, and nothing waits until somebody asks for it."""
    rates = torch.tensor([[1e60], [0.5], [1e60]], dtype=torch.float64, device=device)
    step = lambda z: rates * (z.flip(-1) if mixing else z)  # noqa: E731
    z0 = normal(3, 2, device=device).abs() + 0.1
    z0[2] = 0.0  # of which nothing grows
    right, newton = by_loop(step, z0, length=12), Newton(chunk=2)
    solve(step, z0 * 1e-100, length=12, solver=newton)
    call = fused.Call(step, z0, None, 12, None)
    found = fused.solve_fused(call, newton, None, fixed=2)
    assert found.result is Result.ITERATIONS_DONE
    assert set(fused_solution.LATE) <= set(vars(found))
    assert found.exact_steps.tolist() == [6, 12, 12]  # a chunk from the initial state, and one for each correction
    assert error(found.states[:5, 0], right[:5, 0]) < 1e-12
    assert torch.equal(found.states[5, 0], right[5, 0])  # infinities
    assert found.states[6:, 0].isnan().all()
    assert error(found.states[:, 1:], right[:, 1:]) < 1e-12
    assert found.residual.isnan().tolist() == [True, False, False]


def test_on_failure_is_honoured(device):
    """What is not to be finished by the loop goes the usual way, where there is a failure to be raised or returned."""
    z0, few = torch.tensor([[0.3]], dtype=torch.float64, device=device), Newton(chunk=4, max_iterations=3)
    for _ in range(3):
        with pytest.raises(ConvergenceError):
            deeppcr.solve(chaotic, z0, length=90, solver=few, on_failure="raise")
    with pytest.warns(ConvergenceWarning):
        found = deeppcr.solve(chaotic, z0, length=90, solver=few, on_failure="return")
    assert found.result is Result.NOT_CONVERGED


@pytest.mark.parametrize(
    ("value", "length"),  # of two chunks, and of more than there are passes
    [(float("nan"), 6), (float("inf"), 21), *thorough((float("nan"), 21), (float("inf"), 6))],
)
def test_what_is_not_finite_is_told_with_its_step(value, length, device):
    z0, xs = normal(2, 3, device=device), normal(length, 2, 3, device=device)
    step = lambda z, x: 0.5 * torch.sin(z) + 1 / x  # noqa: E731
    solve(step, z0, xs)
    xs[5, 1, 2] = 0 if value == float("inf") else value
    with pytest.warns(ConvergenceWarning, match="step 6 produced a value that is not finite"):
        found = deeppcr.solve(step, z0, xs, solver=NEWTON)
    assert found.result is Result.NON_FINITE
    assert found.results[1] is Result.NON_FINITE
    assert found.results[0] in (Result.CONVERGED, Result.FINISHED_BY_LOOP)
    assert found.exact_steps.tolist()[1] == 5
    torch.testing.assert_close(found.states, by_loop(step, z0, xs), equal_nan=True)


def test_overflow_is_told_with_its_step(device):
    """By every way, and the same states."""
    step = lambda z: z * z  # noqa: E731
    z0 = torch.tensor([[1.5, 0.5], [0.9, 0.1]], dtype=torch.float64, device=device)
    for _ in range(3):
        with pytest.warns(ConvergenceWarning, match="step 11 produced a value that is not finite"):
            found = deeppcr.solve(step, z0, length=20, solver=NEWTON)
        assert found.results[0] is Result.NON_FINITE
        assert found.exact_steps[0] == 10
        torch.testing.assert_close(found.states[:10], by_loop(step, z0, length=20)[:10])
    assert by_kernels(found)
    with pytest.warns(ConvergenceWarning, match="step 11"):
        assert deeppcr.solve(step, z0, length=20, solver=Loop(by="kernel")).result is Result.NON_FINITE


def test_an_initial_state_that_is_not_finite_is_refused(device):
    """As by every other way."""
    step = lambda z: 0.5 * torch.sin(z)  # noqa: E731
    z0 = normal(2, 3, device=device)
    solve(step, z0, length=9)
    z0[1, 1] = float("nan")
    for solver in (NEWTON, Loop(by="kernel"), None):
        with pytest.raises(ValueError, match="z0: holds NaN"):
            deeppcr.solve(step, z0, length=9, solver=solver)


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
@pytest.mark.parametrize(
    "step", [lambda z, x: torch.tanh(0.9 * z + x), lambda z, x: z + x, lambda z, x: torch.sin(z) + x]
)
def test_from_an_infinity_the_loop_in_a_kernel_alone_goes_on(step, device):
    """One that was held against the step before. Where infinities are what z0 holds, NaN alone is told."""
    fine, xs = torch.zeros(2, 3, dtype=torch.float64, device=device), normal(40, 2, 3, device=device)
    z0 = fine.clone()
    z0[1, 1] = -torch.inf
    right = by_loop(step, z0, xs)
    for solver in (NEWTON, Loop(by="kernel")):
        with pytest.raises(ValueError, match="an infinity"):  # nothing can be held against the step
            deeppcr.solve(step, z0, xs, solver=solver)
        for _ in range(4):
            solve(step, fine, xs)
        if solver is NEWTON:  # whether it is held against the step or not
            with pytest.raises(ValueError, match="an infinity"):
                deeppcr.solve(step, z0, xs, solver=solver)
            deeppcr.clear_caches()
            continue
        found = deeppcr.solve(step, z0, xs, solver=solver)
        assert by_kernels(found)
        torch.testing.assert_close(found.states, right, equal_nan=True)
        assert (found.results[1] is Result.NON_FINITE) == right.isnan().any()
        deeppcr.clear_caches()


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
@pytest.mark.parametrize(("width", "length"), [(4, 48), *thorough((4, 256), (10, 256))])
def test_a_state_that_is_infinite_for_one_step_is_told_and_hides_nothing(width, length, device):
    """Behind it states are finite again, and chaotic: their tolerance is not infinite."""
    source = torch.Generator().manual_seed(0)
    weight = (2 * torch.randn(width, width, generator=source) / width**0.5).to(device)
    xs = (0.3 * torch.randn(length, 1, width, generator=source)).to(device)
    xs[5] = torch.inf
    step, z0 = lambda z, x: torch.tanh(z) @ weight + x, torch.randn(1, width, generator=source).to(device)
    found = solve(step, z0, xs, solver=Newton())
    assert by_kernels(found)
    assert found.result is Result.NON_FINITE
    assert found.exact_steps.tolist() == [5]
    before = torch.cat([z0.unsqueeze(0), found.states[:-1]])
    misses = (found.states - torch.vmap(step)(before, xs)).abs()[6:]
    assert misses.max() < 1e-4


def test_nobody_is_warned_who_did_not_ask_for_a_parallel_solve(device, monkeypatch):
    """A chaotic loop by default: the plan and the result say how it went."""
    monkeypatch.setattr(plan, "_WORTH_KERNELS", 0.0)
    z0 = torch.tensor([[0.3]], dtype=torch.float64, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        found = [deeppcr.solve(chaotic, z0, length=90) for _ in range(3)]
    assert found[0].result is Result.LOOP
    assert [by_kernels(each) for each in found] == [False, True, True]
    for each in found:
        assert torch.allclose(each.states[1:], chaotic(each.states[:-1]), rtol=1e-12, atol=0)


def test_where_newton_gives_up_a_kernel_finishes_long_loops(device, monkeypatch):
    monkeypatch.setattr(ways, "_WORTH_A_KERNEL", 20)
    z0 = torch.tensor([[0.3], [0.6]], dtype=torch.float64, device=device)
    rates = torch.tensor([[3.99], [0.5]], dtype=torch.float64, device=device)  # one row is chaotic, the other dies out
    step = lambda z: rates * z * (1 - z)  # noqa: E731
    with pytest.warns(ConvergenceWarning):
        found = deeppcr.solve(step, z0, length=200, solver=Newton())
    assert found.results == (Result.FINISHED_BY_LOOP, Result.CONVERGED)
    assert "the rest was computed one step after the other by a kernel" in found.plan.notes
    previous = torch.cat([z0.unsqueeze(0), found.states[:-1]])
    assert error(found.states[:, :1], step(previous)[:, :1]) < 1e-14
