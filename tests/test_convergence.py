"""The judgement on each iteration, fed with updates made by hand."""

import math

import pytest
import torch

from deeppcr import Result, UpdateTest
from deeppcr.convergence import Progress, error_left, error_left_of_one, still_to_come
from deeppcr.sequence.layout import Layout
from deeppcr.tolerance import Tolerance


def progress(*, quadratic=True, tolerance=1e-7, steps=5, rows=1, max_iterations=100, compare_with_loop=False):
    layout = Layout.of(torch.zeros(rows, 2), 1)
    return Progress(
        layout,
        steps,
        1,
        tolerance=Tolerance(tolerance, 0.0),
        quadratic=quadratic,
        stop=UpdateTest(),
        max_iterations=max_iterations,
        compare_with_loop=compare_with_loop,
    )


def feed(judged: Progress, update: float, residual: float = 0.0) -> None:
    """One iteration whose every update has this size, at states of size 1."""
    shape = (judged.chunks, judged.layout.rows, 2)
    frozen, _ = judged.frozen(0)
    judged.judge(
        0,
        frozen,
        torch.ones(shape[:2], dtype=torch.bool),
        torch.full(shape, residual),
        torch.full(shape, update),
        judged.bounds(torch.ones(shape), torch.ones(shape[1:])),
    )


def test_rows_are_stuck_whose_small_updates_stop_shrinking():
    judged = progress(steps=50)
    for update in (1e-2, 1e-5, 1e-5, 0.9e-5):
        feed(judged, update)
        assert not judged.stuck.any()
    feed(judged, 1e-5)
    assert judged.stuck.all()


def test_what_is_carried_from_one_iteration_to_the_next_is_all_there_is():
    """In a recording everything else is overwritten in between."""
    judged = progress(steps=50)
    for update in (1e-2, 1e-5, 1e-5, 0.9e-5, 1e-5):
        kept: dict[str, torch.Tensor] = {}
        feed(judged, update)
        judged.carry(lambda name, tensor, kept=kept: kept.setdefault(name, tensor.clone()))
        constant = {id(judged.index), *map(id, kept.values())}
        for value in vars(judged).values():
            if isinstance(value, torch.Tensor) and id(value) not in constant and value is not judged.stuck:
                value.fill_(99)
    assert judged.stuck.all()
    assert judged.iterations.tolist() == [5]


@pytest.mark.parametrize(
    ("update", "residual"), [(1e-5, 1e-3), (1e-2, 0.0)], ids=["residual too large", "update too large"]
)
def test_no_floor_where_a_step_does_not_hold_or_the_update_is_not_small(update, residual):
    judged = progress(steps=50)
    for _ in range(8):
        feed(judged, update, residual)
        assert not judged.stuck.any()


def test_an_approximate_jacobian_takes_longer_to_stall():
    judged = progress(quadratic=False, steps=80)
    for count in range(11):
        assert not judged.stuck.any(), count
        feed(judged, 1e-6)
    assert judged.stuck.all()


def test_true_jacobians_are_believed_as_far_as_updates_fall():
    judged = progress(tolerance=1.0)
    feed(judged, 0.5)
    same = judged.error_left(torch.full((5, 1), 0.5, dtype=torch.float64))
    assert (same == math.inf).all()
    falling = judged.error_left(torch.full((5, 1), 0.4, dtype=torch.float64))
    assert torch.allclose(falling, torch.full_like(falling, 1.6))  # 0.4 (0.8 + 0.8^2 + ...)
    tiny = judged.error_left(torch.full((5, 1), 0.005, dtype=torch.float64))
    assert torch.allclose(tiny, torch.full_like(tiny, 0.005))
    assert judged.active.all()  # an update within the tolerance alone finishes no row


def test_one_lucky_iteration_proves_nothing():
    judged = progress(quadratic=False, tolerance=1e-3, steps=50)
    for update in (1.0, 0.99, 0.98, 0.9e-3):  # creeping, then one update within the tolerance
        feed(judged, update)
        assert judged.active.all(), update
    feed(judged, 0.3e-3)
    feed(judged, 0.1e-3)
    assert judged.results == [Result.CONVERGED]


def test_what_is_still_to_come():
    update, before = torch.tensor([0.0, 0.5, 0.9, 1.0, 2.0]), torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    assert torch.allclose(still_to_come(update, before), torch.tensor([1.0, 1.0, 9.0, math.inf, math.inf]))


def test_the_error_left_of_numbers_and_of_tensors():
    sizes = torch.tensor([0.0, 1e-30, 0.005, 0.01, 0.011, 0.1, 0.5, 0.9, 1.0, 2.0, math.inf], dtype=torch.float64)
    update, before = torch.cartesian_prod(sizes, sizes).T
    of_numbers = [error_left_of_one(*each) for each in zip(update.tolist(), before.tolist(), strict=True)]
    assert error_left(update, update, before).tolist() == of_numbers


def test_hopeless_only_when_neither_prefix_nor_updates_can_arrive():
    slow = progress(steps=1000, tolerance=1e-6)
    falling = progress(steps=1000, tolerance=1e-6)
    for count in range(12):
        assert slow.why_hopeless() is None
        feed(slow, 10.0, 1.0)
        feed(falling, 10.0 * 0.3**count, 1.0)
    assert "more were needed" in (slow.why_hopeless() or "")
    assert falling.why_hopeless() is None


@pytest.mark.parametrize(("steps", "judged_at"), [(10, 5), (28, 7), (1000, 12)])
def test_short_sequences_are_judged_sooner_and_anew_after_an_advance(steps, judged_at):
    judged = progress(steps=steps, tolerance=1e-6, compare_with_loop=True)
    for _ in range(judged_at):
        assert judged.why_hopeless() is None
        feed(judged, 10.0, 1.0)
    assert judged.why_hopeless() is not None
    assert judged.is_early == (judged_at < 12)
    judged.advance(torch.ones(1, dtype=torch.bool), 1)
    assert judged.prefix.tolist() == [judged_at + 1]
    assert judged.why_hopeless() is None


def test_a_few_more_iterations_are_made_though_the_loop_needs_no_longer():
    judged = progress(steps=9, tolerance=1e-6, compare_with_loop=True)
    for _ in range(9):
        assert judged.why_hopeless() is None
        feed(judged, 10.0, 1.0)


def test_an_advance_is_of_active_rows_and_finishes_what_it_completes():
    judged = progress(rows=3)
    judged.finish(torch.tensor([False, False, True]), Result.NON_FINITE)
    judged.advance(torch.tensor([True, False, True]), 9)
    assert judged.prefix.tolist() == [5, 0, 0]
    assert judged.results == [Result.CONVERGED, Result.NOT_CONVERGED, Result.NON_FINITE]


def test_residuals_fall_as_long_as_one_active_row_has_half_of_what_it_had():
    judged = progress(rows=2)
    row = lambda *sizes: torch.tensor(sizes, dtype=torch.float64)  # noqa: E731
    assert judged.falls([])
    assert judged.falls([row(9, 9)] * 4)  # nothing can be said yet
    assert not judged.falls([row(9, 9)] * 5)
    assert judged.falls([row(9, 9)] * 4 + [row(4, 9)])
    assert not judged.falls([row(9, 9), row(1, 0.5)])  # within the tolerance
    judged.finish(torch.tensor([True, False]), Result.CONVERGED)
    assert not judged.falls([row(9, 9)] * 4 + [row(4, 9)])


def test_near_is_what_fell_below_newtons_update_and_is_small():
    judged = progress(rows=4)
    judged.tolerance = Tolerance(0.0, 1e-5)
    judged.updates.append(torch.tensor([1e5, 1e5, 1e5, 10.0]).double())
    before, residual = torch.tensor([1e4, 1e2, 1e9, 1e4]).double(), torch.tensor([1e2, 90.0, 5e3, 9.0]).double()
    assert judged.came_near(before, residual).tolist() == [True, False, False, False]
