"""Kernels that write no more states than are kept."""

import pytest
import torch

import deeppcr
from deeppcr import Loop, Newton, Result
from deeppcr.fuse.kinds import Kind
from deeppcr.fuse.run import Run, solve
from fuse.loops import Fused, by_loop
from kernel_support import error, thorough

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def normal(*shape, device):
    return torch.randn(*shape, dtype=torch.float64, device=device)


def elementwise(z, x):
    return torch.tanh(0.6 * z[0] + x), 0.5 * z[1] + torch.sin(z[0])


def single(z, x):
    return torch.tanh(0.6 * z + x)


def narrow(z, x):
    return torch.tanh(0.6 * z.roll(1, -1) + x)


def problem(step, length, device):
    z0 = normal(2, 3, device=device)
    return step, (z0, z0.sin()) if step is elementwise else z0, normal(length, 2, 3, device=device)


@pytest.fixture
def written(monkeypatch):
    """The lengths of what kernels were given to write states to."""
    lengths, new_states = [], Run.new_states

    def noted(self, *arguments):
        lengths.append(len(new_states(self, *arguments)))
        return new_states(self, *arguments)

    monkeypatch.setattr(Run, "new_states", noted)
    return lengths


@pytest.mark.parametrize("solver", [Newton(chunk=4), Loop(by="kernel")])
@pytest.mark.parametrize("step", [single, *thorough(narrow, elementwise)])
def test_no_more_is_written_than_is_kept(step, solver, written, device):
    length, keep = 7, 3
    step, z0, xs = problem(step, length, device)
    expected = by_loop(step, z0, xs)
    for _ in range(4):
        found = deeppcr.solve(step, z0, xs, keep=keep, solver=solver)
        for leaf, final, one in zip(*map(leaves, (found.states, found.final, expected)), strict=True):
            assert error(leaf, one[keep - 1 :: keep]) < 1e-9
            assert error(final, one[-1]) < 1e-9
        assert found.exact_steps.tolist() == found.known_steps.tolist() == [length] * 2
        assert found.residual.max() < 1e-9
    assert found.plan.evaluation.startswith("fused kernels")
    # All of them in the solves that are held against the step itself, of which there are two so far (three, where there is no first
    # one without kernels).
    assert written.count(length) == 2 + (solver != Newton(chunk=4))
    assert written.count(length // keep) == 1


def leaves(nest):
    return torch.utils._pytree.tree_leaves(nest)


@pytest.mark.parametrize(
    ("step", "chunk", "wanted"),
    [(elementwise, 3, (2, 7)), (narrow, 7, (3, 6)), *thorough((narrow, 3, range(2, 8)), (elementwise, 5, range(2, 8)))],
)
def test_states_that_kernels_write(step, chunk, wanted, device):
    length = 7
    fused = Fused(*problem(step, length, device))
    run, tolerance = fused.run(), Newton().tolerance(torch.float64)
    kind = Kind(length, chunk)
    whole = run.in_parallel(kind, tolerance)
    for every in wanted:
        found = run.in_parallel(kind, tolerance, every=every)
        assert found.states.shape == (length // every, *whole.states.shape[1:])
        assert torch.equal(found.states, whole.states[every - 1 :: every])
        assert torch.equal(found.others.final, whole.states[-1])
        chunks = [each.abs() for each in whole.states.split(chunk)]
        starts = [run.initial, *(each[-1] for each in chunks[:-1])]
        sizes = [torch.maximum(each.amax(0), start.abs()) for each, start in zip(chunks, starts, strict=True)]
        torch.testing.assert_close(found.others.sizes, torch.stack(sizes), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
@pytest.mark.parametrize("solver", [Loop(by="kernel"), *thorough(Newton(chunk=4))])
@pytest.mark.parametrize("bad", [torch.nan, *thorough(torch.inf)])
def test_what_is_not_finite_is_told_also_where_it_was_not_kept(solver, bad, device):
    step = lambda z, x: torch.where(torch.isfinite(z), torch.tanh(z), 0.0) + x  # noqa: E731
    z0, xs = normal(3, 2, device=device), normal(7, 3, 2, device=device)
    for _ in range(2 + (solver != Loop(by="kernel"))):
        deeppcr.solve(step, z0, xs, keep="last", solver=solver)
    xs[5, 1, 0] = xs[3, 2, 1] = bad
    found = deeppcr.solve(step, z0, xs, keep="last", solver=solver)
    whole = deeppcr.solve(step, z0, xs, solver=solver)
    assert found.plan.evaluation.startswith("fused kernels")
    assert found.results == whole.results
    assert found.message == whole.message
    assert "step 4 produced a value that is not finite" in found.message
    assert ("xs holds NaN there" in found.message) == (bad != bad)
    assert "(row 2; 2 of 3 rows)" in found.message
    assert found.results[1:] == (Result.NON_FINITE, Result.NON_FINITE)
    assert found.exact_steps[1:].tolist() == [5, 3]
    assert found.states.isfinite().all()
    assert error(found.states, whole.states[-1:]) < 1e-9


def test_states_that_died_out_are_told_of(device):
    step, z0 = lambda z: 0.1 * z, torch.ones(2, 3, dtype=torch.float64, device=device)
    solver, length = Newton(chunk=4), 14
    whole = deeppcr.solve(step, z0, length=length, solver=solver)
    for _ in range(3):
        found = deeppcr.solve(step, z0, length=length, keep=4, solver=solver)
    assert len(found.states) == 3
    assert found.plan.evaluation.startswith("fused kernels")
    known = whole.known_steps.unique().item()
    assert known < length
    assert found.known_steps.unique().item() in range(known - 5, known + 1)
    assert "died out" in found.message


def test_gradients_need_all_states(written, device):
    step, z0, xs = problem(narrow, 7, device)
    z0.requires_grad_()
    for _ in range(3):
        found = deeppcr.solve(step, z0, xs, keep=3, solver=Loop(by="kernel"))
    assert set(written) == {7}
    expected = by_loop(step, z0, xs)
    seed = torch.randn_like(expected[2::3])
    (one,) = torch.autograd.grad(found.states, z0, seed)
    (other,) = torch.autograd.grad(expected[2::3], z0, seed)
    assert error(one, other) < 1e-9


@pytest.mark.parametrize("solver", [Loop(by="kernel"), *thorough(Newton(chunk=4))])
def test_steps_on_tiles_write_all_states_of_which_those_that_are_kept_are_returned(solver, written, device):
    length, keep, weight = 9, 4, 0.3 * torch.randn(10, 10, device=device)
    step, z0, xs = lambda z, x: torch.tanh(z @ weight + x), torch.randn(2, 10, device=device), torch.randn(length, 10, device=device)  # fmt: skip
    for _ in range(4):
        found = deeppcr.solve(step, z0, xs, keep=keep, solver=solver)
    assert found.plan.evaluation == "fused kernels (tiles)"
    assert set(written) == {length}
    expected = by_loop(step, z0, xs)
    assert error(found.states, expected[keep - 1 :: keep]) < 1e-4
    assert error(found.final, expected[-1]) < 1e-4
    assert found.exact_steps.tolist() == found.known_steps.tolist() == [length] * 2


def test_chunks_that_are_tried_again_after_the_loop_write_all_states(device):
    rate, z0 = torch.tensor([[[3.9]], [[0.3]]], dtype=torch.float64, device=device)
    problem = Fused(lambda z: rate * z * (1 - z), z0, length=60)
    kind, written = Kind(60, 60, first=4, gave_up=True, patience=2), []
    for value in (3.9, 3.9, 2.0, 2.0):
        rate.fill_(value)
        found = solve(problem.run(), kind, Newton().tolerance(torch.float64), every=7)
        written.append((len(found.states), found.passes > 0))
        expected = by_loop(problem.step, z0, length=60)
        assert error(found.states, expected if found.others is None else expected[6::7]) < 1e-9
    assert written == [(8, False), (8, False), (60, True), (8, True)]


def test_a_copy_of_what_is_known_of_a_kind_is_all_of_it():
    kind = Kind(60, 4, rolls=8, passes=5, first=2, gave_up=True, looped=3, patience=16, joined=True)
    assert kind.copy() == kind
    assert kind.copy() is not kind
