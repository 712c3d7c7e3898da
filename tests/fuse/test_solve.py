"""Solves by kernels, through the public call: settings, solutions, gradients, and what goes another way."""

import copy
import dataclasses
import pickle
import threading
import warnings

import pytest
import torch

import deeppcr
from deeppcr import ConvergenceWarning, FixedIterations, Loop, Newton, Result
from deeppcr.graphs import record
from deeppcr.ways import fused
from fuse.loops import by_loop
from fuse.solving import NEWTON, by_kernels, normal, solve
from kernel_support import error, thorough
from tape import Tape

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def test_what_is_not_covered_stands_in_the_plan(device, monkeypatch):
    """Also where the solve is replayed as a CUDA graph."""
    if device.type == "cpu":
        monkeypatch.setitem(record.RECORDERS, "cpu", Tape)
    step, z0 = lambda z: 0.5 * z.sort(-1).values, normal(2, 3, device=device)
    for _ in range(3):
        found = deeppcr.solve(step, z0, length=9, solver=NEWTON)
    assert found.plan.notes == ["not by kernels: aten.sort is not covered", "replayed as a CUDA graph"]
    with pytest.raises(ValueError, match=r"no kernel for this step: aten.sort is not covered. Loop\(\) takes any step"):
        deeppcr.solve(step, z0, length=9, solver=Loop(by="kernel"))


def test_the_loop_in_one_kernel(device):
    weight, z0, xs = normal(3, device=device), normal(2, 3, device=device), normal(9, 2, 3, device=device)
    given = [tensor.requires_grad_() for tensor in (weight, z0, xs)]
    step = lambda z, x: torch.sin(z * weight) + x  # noqa: E731
    found, right = deeppcr.solve(step, z0, xs, solver=Loop(by="kernel")), by_loop(step, z0, xs)
    assert by_kernels(found)
    assert found.result is Result.LOOP
    assert "one step after the other, by a kernel" in found.plan.notes
    assert not found.iterations.any()
    assert not found.residual.any()
    assert found.updates.shape == (0, 2)
    assert found.exact_steps.tolist() == [9, 9]
    assert error(found.states, right) < 1e-14
    for a, b in zip(*(torch.autograd.grad(s.sum(), given) for s in (found.states, right)), strict=True):
        assert error(a, b) < 1e-12


def test_only_implicit_gradients_of_the_loop_in_one_kernel(device):
    with pytest.raises(ValueError, match=r"its gradients are those of Implicit\(\)"):
        deeppcr.solve(
            torch.cos, normal(2, device=device), length=9, solver=Loop(by="kernel"), gradient=deeppcr.Unrolled()
        )


def test_a_loop_of_one_chunk_is_solved_by_rolling_it_out(device):
    """Nothing failed, and nobody is warned."""
    z0, xs = normal(2, 3, device=device), normal(5, 2, 3, device=device)
    step = lambda z, x: 0.5 * torch.sin(z) + x  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        found = solve(step, z0, xs, solver=Newton())
    assert by_kernels(found)
    assert found.result is Result.CONVERGED
    assert found.plan.chunk == 5
    assert error(found.states, by_loop(step, z0, xs)) < 1e-14


def test_a_fixed_number_of_passes_asks_nobody(device, poisoned_memory):
    """As inside a CUDA graph: after as many passes as there are chunks the states are those of the loop."""
    step = lambda z, x: 0.5 * torch.sin(z) + x  # noqa: E731
    z0, xs = normal(2, 3, device=device), normal(9, 2, 3, device=device)
    assert by_kernels(solve(step, z0, xs))
    call = fused.Call(step, z0, xs, None, None)
    for passes in (1, 3):
        found = fused.solve_fused(call, NEWTON, None, fixed=passes)
        assert found.result is Result.ITERATIONS_DONE
        assert found.states.isfinite().all()
        assert found.updates.shape == (passes, 2)
    assert error(found.states, by_loop(step, z0, xs)) < 1e-13


def test_half_precision(device):
    """Kept in it, computed in float32: rounded once, however many steps there are. (The interpreter cuts digits off.)"""
    z0, xs = normal(2, 3, device=device).bfloat16(), normal(12, 2, 3, device=device).bfloat16()
    step = lambda z, x: 0.5 * torch.sin(z) + x  # noqa: E731
    found = solve(step, z0, xs)
    assert by_kernels(found)
    assert found.states.dtype == torch.bfloat16
    rounding = torch.finfo(torch.bfloat16).eps / (2 if device.type == "cuda" else 1)
    assert error(found.states, by_loop(step, z0.double(), xs.double())) < rounding


@pytest.mark.parametrize(
    "newton",
    [Newton(chunk=3, rtol=1e-3), *thorough(Newton(chunk=5, atol=1e-2, rtol=0.0), Newton(chunk=2, scale="local"))],
)
def test_settings_are_honoured(newton, device):
    step, z0, xs = lambda z, x: 0.5 * torch.sin(3 * z) + x, normal(2, 3, device=device), normal(20, 2, 3, device=device)
    solve(step, z0, xs)  # with others
    found = solve(step, z0, xs, solver=newton)
    assert by_kernels(found)
    assert found.result is Result.CONVERGED
    assert found.plan.chunk == newton.chunk
    assert found.tolerance == newton.tolerance(torch.float64)
    allowed = (newton.atol or 0) + found.tolerance.rtol * 5
    assert (found.states - by_loop(step, z0, xs)).abs().max() <= allowed
    assert found.iterations.max() <= solve(step, z0, xs, solver=Newton(chunk=newton.chunk)).iterations.max() + 2 * (
        newton.scale == "local"
    )


@pytest.mark.thorough
def test_what_kernels_do_not_do_goes_the_usual_way(device):
    z0 = normal(2, 3, device=device)
    for options in (
        {"solver": Newton(chunk=1)},
        {"solver": Newton(jacobian=deeppcr.DiagonalJacobian())},
        {"solver": Newton(stop=deeppcr.PaperTest())},
        {"gradient": deeppcr.Unrolled()},
        {"guess": deeppcr.Zeros()},
    ):
        found = solve(torch.cos, z0, length=9, **options)
        assert not by_kernels(found)


def states_that_die_out(device):
    return solve(lambda z: 0.01 * z, torch.ones(2, 3, dtype=torch.float64, device=device), length=30)


def test_a_solution_tells_what_it_is_asked_late(device):
    step, z0, xs = lambda z, x: 0.5 * torch.sin(z) + x, normal(2, 3, device=device), normal(9, 2, 3, device=device)
    found = solve(step, z0, xs)
    assert {"iterations", "residual", "updates", "exact_steps"}.isdisjoint(vars(found))
    assert found.iterations.shape == found.residual.shape == found.exact_steps.shape == (2,)
    assert found.iterations.dtype == torch.int64
    assert (found.iterations >= 2).all()
    assert found.updates.shape == (int(found.iterations.max()), 2)
    assert (found.residual <= 1e-10 * xs.abs().max()).all()
    assert found.exact_steps.tolist() == [9, 9]
    assert found.known_steps.tolist() == [9, 9]
    assert "iterations" in vars(found)
    assert repr(found).startswith("Solution(CONVERGED, iterations=")
    assert not hasattr(found, "nothing_of_the_kind")
    assert "died out" in states_that_die_out(device).message


@pytest.mark.parametrize("nest", [True, *thorough(False)])
def test_a_solution_can_be_copied_pickled_and_replaced(nest, device):
    step = (lambda z: {"a": 0.5 * torch.sin(z["b"]), "b": z["a"]}) if nest else (lambda z: 0.5 * torch.sin(z))
    z0 = {name: normal(2, 3, device=device) for name in "ab"} if nest else normal(2, 3, device=device)
    found = solve(step, z0, length=9)
    assert by_kernels(found)
    leaf = lambda solution: solution.states["a"] if nest else solution.states  # noqa: E731
    for other in (
        copy.copy(found),
        copy.deepcopy(found),
        pickle.loads(pickle.dumps(found)),
        dataclasses.replace(found),
    ):
        assert isinstance(other, deeppcr.Solution)
        assert torch.equal(leaf(other), leaf(found))
        assert torch.equal(other.iterations, found.iterations)
        assert torch.equal(other.residual, found.residual)
        assert other.result is found.result
        assert repr(other) == repr(found)
    replaced = dataclasses.replace(found, description="another", iterations=found.iterations + 1)
    assert replaced.message == "another"
    assert torch.equal(replaced.iterations, found.iterations + 1)
    assert torch.equal(replaced.updates, found.updates)
    assert {field.name for field in dataclasses.fields(found)} <= vars(dataclasses.replace(found)).keys()


def test_a_solution_is_a_guess_for_the_next_solve(device):
    step, z0 = lambda z: 0.5 * torch.sin(z) + 0.3, normal(2, 3, device=device)
    found = solve(step, z0, length=9)
    again = deeppcr.solve(step, z0, length=9, solver=NEWTON, guess=found)
    assert error(again.states, found.states) < 1e-10


@pytest.mark.thorough
def test_gradients_are_those_of_the_loop_where_a_signal_dies_out(device):
    """A gradient asks for digits of every state."""
    z0 = torch.ones(1, 2, dtype=torch.float64, device=device).requires_grad_()
    step = lambda z: torch.relu(0.1 * z) - 0.05 * z  # noqa: E731
    for _ in range(2):
        states = deeppcr.solve(step, z0, length=20, solver=NEWTON).states
    right = by_loop(step, z0, length=20)
    (a,), (b,) = (torch.autograd.grad(each[-1].sum() * 1e20, z0) for each in (states, right))
    assert error(states, right) < 1e-10
    assert error(a, b) < 1e-10


def test_second_derivatives_and_batched_gradients_are_refused(device):
    """They are not silently wrong."""
    z0 = normal(2, 3, device=device).requires_grad_()
    states = solve(torch.cos, z0, length=9).states
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(states.sum(), z0, create_graph=True)
    with pytest.raises(RuntimeError, match="one gradient at a time"):
        torch.autograd.grad(states, z0, torch.ones(4, *states.shape).to(states), is_grads_batched=True)


def test_gradients_switched_off(device):
    z0 = normal(2, 3, device=device).requires_grad_()
    with torch.no_grad():
        found = solve(torch.cos, z0, length=9)
    assert by_kernels(found)
    assert not found.states.requires_grad
    assert solve(torch.cos, z0, length=9).states.requires_grad
    with torch.inference_mode():
        assert error(solve(torch.cos, z0, length=9).states, found.states) < 1e-9


def test_a_state_of_one_number(device):
    found = solve(torch.cos, torch.tensor(0.3, dtype=torch.float64, device=device), length=9)
    assert by_kernels(found)
    assert found.states.shape == (9,)
    assert found.iterations.shape == ()


def test_threads_solve_side_by_side(gpu):
    """Kernels of one step, of several lengths, made and used by many at once."""
    z0, wrong = normal(64, 3, device=gpu), []
    step = lambda z, x: 0.5 * torch.sin(z.roll(1, -1)) + x  # noqa: E731

    def work(seed):
        try:
            generator = torch.Generator(gpu).manual_seed(seed)
            for turn in range(6):
                xs = torch.randn(100 + 40 * (turn % 3), 64, 3, dtype=torch.float64, device=gpu, generator=generator)
                found = deeppcr.solve(step, z0, xs, solver=Newton())
                if not error(found.states, by_loop(step, z0, xs)) < 1e-9:
                    wrong.append((seed, turn, found.plan.evaluation))
        except Exception as failure:
            wrong.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("differentiated", [False, True])
def test_a_fixed_number_of_iterations_outside_of_a_capture(device, differentiated):
    """The same kernels as inside of one, so that a warm-up is what is captured: once a solve that tests has borne them out."""
    weight, z0, xs = normal(3, device=device), normal(2, 3, device=device), normal(30, 2, 3, device=device)
    weight.requires_grad_(differentiated)
    step = lambda z, x: torch.tanh(0.3 * z.flip(-1) * weight.sin() + x)  # noqa: E731

    def fixed(count):
        return deeppcr.solve(step, z0, xs, solver=Newton(chunk=4, stop=FixedIterations(count)))

    by_tensors = [fixed(count) for count in (1, 2, 9)]
    assert not any(map(by_kernels, by_tensors))
    assert by_kernels(solve(step, z0, xs))
    for count, plain in zip((1, 2, 9), by_tensors, strict=True):
        found = fixed(count)
        assert by_kernels(found)
        assert found.result is plain.result is Result.ITERATIONS_DONE
        # At the ends of chunks tensors are corrected, and kernels come to where the corrected starts lead.
        inside = torch.arange(30, device=device) % 4 != 3
        assert error(found.states[inside], plain.states[inside]) < 1e-12
        assert (found.iterations <= count).all()
        assert len(found.updates) <= count
    gradients = differentiated and [torch.autograd.grad(each.states.sum(), weight)[0] for each in (found, plain)]
    assert not differentiated or error(*gradients) < 1e-10


def test_fixed_iterations_beyond_the_numbers_are_told_of(device):
    z0 = torch.tensor([[0.5], [3.0]], dtype=torch.float64, device=device)
    step = lambda z: z * z  # noqa: E731
    assert by_kernels(solve(step, z0 / 4, length=40))
    with pytest.warns(ConvergenceWarning, match="not finite"):
        found = deeppcr.solve(step, z0, length=40, solver=Newton(chunk=4, stop=FixedIterations(3)))
    assert not by_kernels(found)
    assert found.results[1] is Result.NON_FINITE


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize(("count", "chunk"), [(12, 4), (2, 30)])
def test_fixed_iterations_that_reach_the_end_tell_of_numbers_that_are_none(count, chunk, device):
    """All of their states are exact, those behind a NaN, too."""
    z0, xs = normal(2, 3, device=device), normal(30, 2, 3, device=device)
    step = lambda z, x: torch.tanh(0.3 * z.flip(-1)) + x  # noqa: E731
    assert by_kernels(solve(step, z0, xs, solver=Newton(chunk=chunk)))
    fixed = Newton(chunk=chunk, stop=FixedIterations(count))
    assert by_kernels(deeppcr.solve(step, z0, xs, solver=fixed))
    xs[15, 1, 0] = torch.nan
    with pytest.warns(ConvergenceWarning, match="not finite"):
        found = deeppcr.solve(step, z0, xs, solver=fixed)
    assert found.results == (Result.ITERATIONS_DONE, Result.NON_FINITE)
    assert found.exact_steps.tolist() == [30, 15]
    assert error(found.states[:15], by_loop(step, z0, xs)[:15]) < 1e-12
