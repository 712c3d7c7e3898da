"""Solves by kernels, through the public call: what changes is seen, what is wrong is noticed, and results tell how they were found."""

import copy
import dataclasses
import math
import pickle
import threading
import warnings

import pytest
import torch
import triton
from torch import nn

import deeppcr
from deeppcr import ConvergenceError, ConvergenceWarning, Loop, Newton, Result, fused, plan, ways
from deeppcr.fuse import back, run
from deeppcr.fuse.step import FusedStep
from deeppcr.graphs import record
from deeppcr.sequence.layout import Layout
from fuse.loops import Fused, by_loop
from kernel_support import error, thorough
from tape import Tape

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
#: Chunks that keep the interpreter's time short.
NEWTON = Newton(chunk=4)


def normal(*shape, device):
    return torch.randn(*shape, dtype=torch.float64, device=device)


def solve(*arguments, solver=NEWTON, again=True, **options):
    """A solve by kernels, which come with the second solve of a kind."""
    found = deeppcr.solve(*arguments, solver=solver, **options)
    return deeppcr.solve(*arguments, solver=solver, **options) if again and not by_kernels(found) else found


def by_kernels(solution):
    return solution.plan.evaluation.startswith("fused kernels")


def test_kernels_are_made_for_kinds_that_come_again(device):
    step, z0 = lambda z, x: 0.5 * torch.sin(z) + x, normal(2, 3, device=device)
    first, second = (deeppcr.solve(step, z0, xs, solver=NEWTON) for xs in normal(2, 9, 2, 3, device=device))
    assert not by_kernels(first)
    assert any("the first of its kind" in note for note in first.plan.notes)
    assert by_kernels(second)
    assert second.result is Result.CONVERGED
    # Another length of a step that has kernels needs no others.
    third = deeppcr.solve(step, z0, normal(7, 2, 3, device=device), solver=NEWTON)
    assert by_kernels(third)
    assert third.plan.chunk == 4
    # Another number of rows does.
    assert not by_kernels(deeppcr.solve(step, z0[:1], normal(7, 1, 3, device=device), solver=NEWTON))


class Changing:
    """Everything that a step may depend on beside its arguments."""

    def __init__(self, device):
        self.device = device
        self.weight, self.number, self.held = normal(3, device=device), 0.5, [normal(3, device=device), 0.1]
        self.module = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Tanh()).to(device)
        self.switch = nn.Identity()
        self.of = {"gain": normal((), device=torch.device("cpu"))}

    def step(self, z, x):
        z = self.module(z) * self.weight + self.number * self.held[0] + self.held[1] * x
        return z * self.of["gain"] if self.switch.training else z * 0.5


#: Each changes one thing; all must be seen by the next solve.
CHANGES = {
    "values in place": lambda it: it.weight.mul_(-0.5),
    "another tensor": lambda it: setattr(it, "weight", normal(3, device=it.device)),
    "a tensor of rows": lambda it: setattr(it, "weight", normal(2, 3, device=it.device)),
    "a number": lambda it: setattr(it, "number", 0.9),
    "an entry of a list": lambda it: it.held.__setitem__(0, normal(3, device=it.device)),
    "a number in a list": lambda it: it.held.__setitem__(1, 0.7),
    "a value in a dictionary": lambda it: it.of.update(gain=torch.tensor(0.2, dtype=torch.float64)),
    "a single number in place": lambda it: it.of["gain"].fill_(0.4),
    "parameters": lambda it: [each.data.mul_(0.5) for each in it.module.parameters()],
    "another parameter": lambda it: setattr(it.module[0], "weight", nn.Parameter(normal(3, 3, device=it.device))),
    "another module": lambda it: it.module.__setitem__(1, nn.Sigmoid()),
    "a mode": lambda it: it.switch.eval(),
    "a tensor of another shape": lambda it: setattr(it, "weight", normal((), device=it.device)),
}


@pytest.mark.parametrize(
    "names", [("values in place", "another tensor", "a number", "parameters", "a mode"), *thorough((tuple(CHANGES),))]
)
def test_changes_are_seen(names, device):
    it = Changing(device)
    z0, xs = normal(2, 3, device=device), normal(5, 2, 3, device=device)
    right = None
    for name in ("nothing", *names):
        with torch.no_grad():
            CHANGES.get(name, lambda it: None)(it)
            was, right = right, by_loop(it.step, z0, xs)
            assert was is None or error(was, right) > 1e-3, name
            for _ in range(2):
                found = deeppcr.solve(it.step, z0, xs, solver=NEWTON)
                assert error(found.states, right) < 1e-9, name
        assert by_kernels(found), name


GLOBAL = 0.5


def test_changed_globals_are_seen(device, monkeypatch):
    step = lambda z: GLOBAL * torch.sin(z) + 0.1  # noqa: E731
    z0 = normal(2, 3, device=device)
    for value in (0.5, 0.8, torch.tensor(0.3, dtype=torch.float64)):
        monkeypatch.setitem(globals(), "GLOBAL", value)
        found = solve(step, z0, length=9)
        assert by_kernels(found)
        assert error(found.states, by_loop(step, z0, length=9)) < 1e-9


@pytest.mark.thorough
def test_modes_that_a_step_asks_for_are_seen(device):
    """However many solves in another one went well before. (Stand-ins need no gradients: such a step is not trusted to kernels.)"""
    weight, z0 = normal(3, device=device), normal(2, 3, device=device)

    def step(z):
        factor = 0.3 if torch.is_inference_mode_enabled() else 0.5
        return torch.sin(weight * z) * (0.7 if weight.requires_grad else factor)

    for mode, differentiated in ((False, False), (True, False), (False, True)):
        weight.requires_grad_(differentiated)
        with torch.inference_mode(mode):
            right = by_loop(step, z0, length=5)
            for _ in range(4):
                found = deeppcr.solve(step, z0, length=5, solver=NEWTON)
                assert error(found.states, right) < 1e-9
        assert by_kernels(found) is not differentiated


def test_training_takes_the_loops_steps(device):
    """Some steps of an optimiser, on changing batches: parameters end as those of the loop do."""
    torch.manual_seed(1)
    cell = nn.Linear(2, 2, dtype=torch.float64, device=device)
    other = copy.deepcopy(cell)

    def train(cell, run):
        optimiser, losses = torch.optim.Adam(cell.parameters(), lr=0.05), []
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            xs = torch.randn(9, 3, 2, dtype=torch.float64, generator=generator).to(device)
            states = run(lambda z, x: torch.tanh(cell(z)) + 0.5 * x, xs.new_zeros(3, 2), xs)
            loss = (states - 0.3).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return losses

    ways = []

    def by_solve(*arguments):
        found = deeppcr.solve(*arguments, solver=NEWTON)
        ways.append(by_kernels(found))
        return found.states

    ours, theirs = train(cell, by_solve), train(other, by_loop)
    assert ways == [False, True, True, True]
    assert ours == pytest.approx(theirs, rel=1e-10)
    for a, b in zip(cell.parameters(), other.parameters(), strict=True):
        assert error(a, b) < 1e-9


def spoil(monkeypatch, kernels, factor=1.01):
    """Break emitted source: 0.3 becomes something else."""
    numbers = kernels.numbers

    def spoiled(self, device):
        return numbers(self, device) * factor

    monkeypatch.setattr(kernels, "numbers", spoiled)


@pytest.mark.parametrize("factor", [1.01, math.nan, math.inf])
def test_kernels_that_compute_something_else_are_noticed_at_once(factor, device, monkeypatch):
    """Also where it is no number: the step itself makes none of these states infinite."""
    from deeppcr.fuse.compiled import Kernels

    step, z0 = lambda z: 0.3 * torch.sin(z) + 0.7, normal(2, 3, device=device)
    spoil(monkeypatch, Kernels, factor)
    found = solve(step, z0, length=9)
    assert not by_kernels(found)
    assert any("another result than the step itself" in note for note in found.plan.notes)
    assert found.result is Result.CONVERGED
    assert error(found.states, by_loop(step, z0, length=9)) < 1e-9
    with pytest.raises(ValueError, match="another result than the step itself"):
        solve(step, z0, length=9, solver=Loop(by="kernel"))


def test_kernels_that_go_wrong_later_are_noticed(device, monkeypatch):
    """By the second solve with kernels, the fourth, the eighth ..."""
    from deeppcr.fuse.compiled import Kernels

    step, z0 = lambda z: 0.3 * torch.sin(z) + 0.7, normal(2, 3, device=device)
    assert by_kernels(solve(step, z0, length=9))
    spoil(monkeypatch, Kernels)
    found = solve(step, z0, length=9)
    assert not by_kernels(found)
    assert error(found.states, by_loop(step, z0, length=9)) < 1e-9


#: What may be wrong with the first row of states [40, 3, 2] in chunks of 8, at which step, and up to which.
WRONG = {
    "not a number": (20, 40, math.nan),
    "infinite for one step": (30, 31, math.inf),
    "a wrong start": (16, 24, 0.1),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_few_steps_tell_wrong_starts_and_what_is_not_finite_by_mistake(what, device):
    step, z0 = torch.square, normal(3, 2, device=device).clamp(-0.9, 0.9)
    z0[2] = 2.0  # which the step itself makes infinite
    fused_step, states = FusedStep.of(step, Layout.of(z0, None), z0, None, []), by_loop(step, z0, length=40)

    def is_borne_out():
        return fused_step.is_borne_out(step, z0, None, states, Newton().tolerance(states.dtype), 8)

    assert all(is_borne_out() for _ in range(5))
    first, last, value = WRONG[what]
    states[first:last, 0] += value
    assert not any(is_borne_out() for _ in range(5))


def test_a_step_that_knows_how_many_rows_there_are_is_not_trusted_to_kernels(device):
    """Of one row nothing tells that it is one of several."""
    z0 = normal(3, 2, device=device)
    for step in (
        lambda z: torch.sin(z) * (1 + torch.arange(len(z), device=z.device)).unsqueeze(-1) / 4,
        lambda z: torch.sin(z) / len(z),
    ):
        found = solve(step, z0, length=9)
        assert not by_kernels(found)
        assert error(found.states, by_loop(step, z0, length=9)) < 1e-9


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


def chaotic(z):
    return 3.9 * z * (1 - z)


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
    assert set(fused._LATE) <= set(vars(found))
    assert found.exact_steps.tolist() == [4, 12, 12]
    assert error(found.states[:4, 0], right[:4, 0]) < 1e-12
    assert found.states[4:, 0].isnan().all()
    assert error(found.states[:, 1:], right[:, 1:]) < 1e-12
    assert found.residual.isnan().tolist() == [True, False, False]


def test_half_precision(device):
    """Kept in it, computed in float32: rounded once, however many steps there are. (The interpreter cuts digits off.)"""
    z0, xs = normal(2, 3, device=device).bfloat16(), normal(12, 2, 3, device=device).bfloat16()
    step = lambda z, x: 0.5 * torch.sin(z) + x  # noqa: E731
    found = solve(step, z0, xs)
    assert by_kernels(found)
    assert found.states.dtype == torch.bfloat16
    rounding = torch.finfo(torch.bfloat16).eps / (2 if device.type == "cuda" else 1)
    assert error(found.states, by_loop(step, z0.double(), xs.double())) < rounding


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
        with pytest.raises(ValueError, match="z0: holds values that are not finite"):
            deeppcr.solve(step, z0, length=9, solver=solver)


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


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, z, x=0.0):
        return torch.tanh(self.inner(z)) + 0.5 * z + x


@pytest.mark.parametrize(("width", "has_inputs"), [(9, False), *thorough((3, False), (9, True), (3, True))])
def test_modules_that_are_alike_are_one_step(width, has_inputs, device):
    layers, z0 = nn.ModuleList([Layer(width) for _ in range(7)]).to(device), torch.randn(2, width, device=device)
    xs = torch.randn(7, 2, width, device=device) if has_inputs else None
    for _ in range(2):
        found = deeppcr.solve(layers, z0, xs, solver=Newton(chunk=3))
        states, z = [], z0
        for index, layer in enumerate(layers):
            z = layer(z) if xs is None else layer(z, xs[index])
            states.append(z)
        right = torch.stack(states)
        assert error(found.states, right) < 1e-5
    assert by_kernels(found)
    weights, seed = list(layers.parameters()), torch.randn_like(right)
    pairs = (torch.autograd.grad(each, weights, seed, retain_graph=True) for each in (found.states, right))
    for one, other in zip(*pairs, strict=True):
        assert error(one, other) < 1e-4
    with torch.no_grad():
        layers[2].inner.weight.mul_(0.5)
    changed = deeppcr.solve(layers, z0, xs)  # whoever asks for no solver gets the kernels that there are
    assert by_kernels(changed)
    assert error(changed.states[2], layers[2](right[1]) if xs is None else layers[2](right[1], xs[2])) < 1e-5


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
@pytest.mark.parametrize(("width", "length"), [(4, 96), *thorough((4, 256), (10, 256))])
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


@pytest.mark.parametrize("width", [1, *thorough(9)])
def test_a_wrong_start_is_not_excused_by_what_it_leads_to(width, device):
    """The first correction leads to where the step jumps to 1e12: the size of that is no measure of the start."""
    length, chunk, jump, mix = 64, 8, 5, 0.0 if width == 1 else 0.1
    weight = mix * torch.ones(width, width, device=device) / width
    x = 0.1 * torch.ones(length, 1, width, device=device)
    bend, jumps = torch.zeros(2, length, 1, 1, device=device)
    bend[(jump - 1) * chunk : jump * chunk], jumps[jump * chunk] = 0.05, 1e12

    def step_around(center):
        def step(z, given):
            x, bend, jumps = given
            low = z.clamp(max=3.0)
            return (
                (0.9 - mix) * low
                + low @ weight
                + x
                + bend * low * low
                + jumps * torch.exp(-(((z - center) / 1e-3) ** 2))
            )

        return step

    def one_chunk(z):
        for l in range((jump - 1) * chunk, jump * chunk):
            z = step_around(50.0)(z, (x[l], bend[l], jumps[l]))
        return z

    z0, xs = torch.full((1, width), 0.2, device=device), (x, bend, jumps)
    right = by_loop(step_around(50.0), z0, xs)[(jump - 1) * chunk - 1]
    value, change = torch.func.jvp(one_chunk, (z0,), (right - z0,))
    step = step_around(float((value + change)[0, 0]))
    found = Fused(step, z0, xs).solve(chunk)
    assert error(found.states.view(length, 1, width), by_loop(step, z0, xs)) < 1e-4


@pytest.mark.parametrize("name", ["roll", "sweep"])
def test_kernels_that_do_not_fit_the_device(name, device, monkeypatch):
    """A step is solved otherwise, and the next time nobody tries; of gradients that is known before they are asked for."""
    weight = torch.full((2,), 0.5, device=device, requires_grad=True)
    step, z0, xs = (
        lambda z, x: torch.tanh(weight * z) + x,
        torch.zeros(2, device=device),
        torch.ones(20, 2, device=device),
    )
    module = run if name == "roll" else back

    def launch_too_much(kernel, *_, **__):
        raise triton.OutOfResources(300_000, 200_000, "shared memory")

    monkeypatch.setattr(module, "launch", launch_too_much)
    deeppcr.solve(step, z0, xs, solver=NEWTON)
    for _ in range(2):
        solution = deeppcr.solve(step, z0, xs, solver=NEWTON)
        assert any("fit the device" in note for note in solution.plan.notes)
    (found,) = torch.autograd.grad(solution.states.sum(), weight)
    (expected,) = torch.autograd.grad(deeppcr.solve(step, z0, xs, solver=deeppcr.Loop()).states.sum(), weight)
    torch.testing.assert_close(found, expected)


def test_kernels_of_gradients_are_tried_for_all_that_they_are_compiled_for(device, monkeypatch):
    """Inputs that lie otherwise (here: not at a multiple of 16 bytes) have others, which may not fit where the first ones did."""
    weight = torch.full((2,), 0.5, device=device, requires_grad=True)
    step, z0 = lambda z, x: torch.tanh(weight * z) + x, torch.zeros(2, device=device)
    whole = torch.ones(42, device=device)
    assert by_kernels(solve(step, z0, whole[:40].view(20, 2)))

    def launch_too_much(kernel, *_, **__):
        raise triton.OutOfResources(300_000, 200_000, "shared memory")

    monkeypatch.setattr(back, "launch", launch_too_much)
    assert by_kernels(deeppcr.solve(step, z0, whole[:40].view(20, 2), solver=NEWTON))  # they are known to fit
    found = deeppcr.solve(step, z0, whole[1:41].view(20, 2), solver=NEWTON)
    assert any("fit the device" in note for note in found.plan.notes)
    found.states.sum().backward()


def grid(z, x):
    return torch.round((z + x) * 2.0**38) / 2.0**38


@pytest.mark.parametrize(
    ("step", "width", "dtype", "drift"),
    [
        (lambda z, x: z.detach() + x, 1, torch.float64, 4e-12),
        (grid, 1, torch.float64, 2.0**-38),
        (lambda z, x: 0.5 * z + 0.5 * z.detach() + x, 1, torch.float64, 4e-12),
        (lambda z, x: z.detach() + x + 0 * z.sum(), 10, torch.float32, 9e-7),
    ],
)
def test_a_drift_that_derivatives_know_nothing_of(step, width, dtype, drift, device):
    """A correction of every chunk is within the tolerance, and the same again in every pass: their sum is not."""
    z0, xs = (
        torch.ones(1, width, dtype=dtype, device=device),
        torch.full((16, 1, width), drift, dtype=dtype, device=device),
    )
    loop = Fused(step, z0, xs)
    found = loop.run().in_parallel(run.Kind(16, 2), NEWTON.tolerance(dtype))
    assert found.passes == 4  # as many as are worth it
    assert found.left == found.notes.taken.numel()
