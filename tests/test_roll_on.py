"""Where Newton is hopeless from the guess, the chunks are rolled out from it before the loop takes over."""

import warnings

import pytest
import torch

import deeppcr
from deeppcr import Newton, Result
from deeppcr.convergence import Progress
from deeppcr.graphs import record
from kernel_support import thorough
from problems import Generator, plain_loop, relative_error
from tape import Tape

pytestmark = pytest.mark.usefixtures("without_kernels")  # which have no chunks that are rolled out


def logistic(z, rate):
    return rate * z * (1 - z)


def rolled_on(solution) -> bool:
    return any("rolled out" in note for note in solution.plan.notes)


def starts(seed, rows=3, device="cpu"):
    return Generator(seed, torch.float64, device).uniform(rows, 1)


@pytest.mark.parametrize(
    ("rate", "length", "seed"), [(3.2, 101, 1), (3.5, 100, 0), (3.5, 300, 2), *thorough((3.5, 700, 2))]
)
def test_a_map_that_contracts_after_all_converges(rate, length, seed, device):
    """Its derivative is large where it does not stay: Newton is thrown about there, and loses the phase of the cycle."""
    z0 = torch.rand(3, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)
    rates = torch.full((length, 1, 1), rate, dtype=torch.float64, device=device)
    solution = deeppcr.solve(logistic, z0, rates, on_failure="raise", solver=Newton())
    assert solution.result is Result.CONVERGED
    assert rolled_on(solution), solution.plan
    assert relative_error(solution.states, plain_loop(logistic, z0, rates)) < 1e-8


def test_gradients_are_those_of_the_loop(device):
    found = []
    for gradient in (deeppcr.Unrolled(), deeppcr.Implicit(), None):
        z0 = torch.full((1, 1), 0.3, dtype=torch.float64, device=device, requires_grad=True)
        rates = torch.full((100, 1, 1), 3.5, dtype=torch.float64, device=device, requires_grad=True)
        if gradient is None:
            states = plain_loop(logistic, z0, rates)
        else:
            solution = deeppcr.solve(logistic, z0, rates, gradient=gradient, on_failure="raise", solver=Newton())
            assert rolled_on(solution), solution.plan
            states = solution.states
        found.append(torch.autograd.grad(states.sum(), (z0, rates)))
    for gradients in found[:2]:
        assert relative_error(gradients, found[2]) < 1e-6


def test_each_row_by_itself_and_what_is_exact_stays(device):
    """One row settles into a cycle, one is chaotic: the loop finishes that one, from where it is exact."""
    z0 = starts(0, 2, device)
    rates = torch.tensor([3.5, 3.99], dtype=torch.float64, device=device).view(1, 2, 1).expand(300, 2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
        solution = deeppcr.solve(logistic, z0, rates, solver=Newton())
        returned = deeppcr.solve(logistic, z0, rates, on_failure="return", solver=Newton())
    assert solution.results == (Result.CONVERGED, Result.FINISHED_BY_LOOP)
    assert rolled_on(solution), solution.plan
    loop = plain_loop(logistic, z0, rates)
    assert relative_error(solution.states[:, 0], loop[:, 0]) < 1e-8
    exact = int(returned.exact_steps[1])
    assert 96 < exact < 300  # further than by one chunk an iteration
    previous = torch.cat([z0.unsqueeze(0), returned.states[:-1]])
    off = (logistic(previous, rates) - returned.states)[:exact, 1].abs()
    assert off.max() < 1e-14


def test_a_sequence_that_overflows_is_named_with_its_step(device):
    z0 = torch.full((1, 1), 0.3, dtype=torch.float64, device=device)
    rates = torch.full((100, 1, 1), 3.5, dtype=torch.float64, device=device)
    assert rolled_on(deeppcr.solve(logistic, z0, rates, solver=Newton()))
    rates[30] = torch.inf  # of the chunks that are rolled out, some hold it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
        solution = deeppcr.solve(logistic, z0, rates, on_failure="return", solver=Newton())
    assert solution.result is Result.NON_FINITE
    assert solution.exact_steps.tolist() == [30]
    assert solution.iterations.tolist() <= [9]  # the chunk is found as soon as all before it is exact


def test_a_chunk_that_was_asked_for_is_left_to_newton(device):
    """Who gives a chunk wants Newton's method with it, as the paper does with 1."""
    z0 = torch.full((1, 1), 0.3, dtype=torch.float64, device=device)
    rates = torch.full((100, 1, 1), 3.5, dtype=torch.float64, device=device)
    solution = deeppcr.solve(logistic, z0, rates, solver=Newton(chunk=4))
    assert not rolled_on(solution)


def test_the_end_is_rolled_out_where_the_rest_was_quick(monkeypatch, device):
    """A chaotic end: it takes the loop's dependent steps whatever is done, and the whole takes far fewer."""
    z0 = torch.full((1, 1), 0.3, dtype=torch.float64, device=device)
    rates = torch.full((400, 1, 1), 2.0, dtype=torch.float64, device=device)
    rates[350:] = 3.99
    loop = plain_loop(logistic, z0, rates)
    monkeypatch.setattr(Progress, "why_hopeless", lambda progress: "hopeless" if progress.count == 4 else None)
    solution = deeppcr.solve(logistic, z0, rates, on_failure="raise", solver=Newton())
    assert solution.result is Result.CONVERGED
    assert solution.iterations.tolist() == [4]
    assert rolled_on(solution), solution.plan
    assert torch.equal(solution.states[343:], loop[343:])  # exact, as only the loop's own order of steps is


@pytest.mark.parametrize("noise", [0.0, 1e-12, *thorough(3e-13)])
def test_chunks_that_do_not_join_lose_their_claim(noise, monkeypatch, device):
    """As many chunks at once may round otherwise than some of them, which a chaotic end makes visible: on a GPU, or here."""
    z0 = torch.full((1, 1), 0.3, dtype=torch.float64, device=device)
    rates = torch.full((400, 1, 1), 2.0, dtype=torch.float64, device=device)
    rates[350:] = 3.99
    step = lambda z, rate: logistic(z, rate) * (1 + (noise * (len(z) % 7 - 3) if len(z) > 4 else 0))  # noqa: E731
    monkeypatch.setattr(Progress, "why_hopeless", lambda progress: "hopeless" if progress.count == 4 else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
        solution = deeppcr.solve(deeppcr.rowwise(step), z0, rates, solver=Newton())
        returned = deeppcr.solve(deeppcr.rowwise(step), z0, rates, on_failure="return", solver=Newton())
    assert solution.result is (Result.FINISHED_BY_LOOP if noise else Result.CONVERGED)
    assert int(returned.exact_steps) == (352 if noise else 400)  # what does join is kept
    previous = torch.cat([z0.unsqueeze(0), solution.states[:-1]])
    assert (logistic(previous, rates) - solution.states).abs().max() <= 1e-11


def test_a_recording_hands_over_what_needs_it(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setitem(record.RECORDERS, "cpu", Tape)
    deeppcr.clear_caches()
    z0 = torch.full((1, 1), 0.3, dtype=torch.float64, device=device)
    rates = torch.full((100, 1, 1), 3.5, dtype=torch.float64, device=device)
    solve = lambda: deeppcr.solve(logistic, z0, rates, on_failure="raise", solver=Newton())  # noqa: E731
    first = solve()
    assert rolled_on(first), first.plan
    for _ in range(4):
        again = solve()
        assert any("handed over" in note or "safeguards" in note for note in again.plan.notes), again.plan
        assert torch.equal(again.states, first.states)
    deeppcr.clear_caches()
