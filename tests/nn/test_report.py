"""What is read off the numbers that the kernels leave: passes, results, residuals, a row at a time."""

import pytest
import torch

from deeppcr import Result
from deeppcr.nn.report import Report
from deeppcr.tolerance import size_at_first

# Corrections of four passes, in units of the tolerance, and the pass after which the row is settled.
ROWS = {
    "far below the tolerance": ([1e3, 0.005, 0.0, 0.0], 2),
    "falling fast": ([10.0, 1.0, 0.05, 0.0], 3),
    "just small enough": ([1.0, 0.5, 0.01, 0.0], 3),
    "small, and falling too slowly to be believed": ([0.09, 0.08, 0.07, 0.06], 0),
    "small, and growing": ([0.05, 0.06, 0.07, 0.08], 0),
    "not settled": ([10.0, 9.0, 8.0, 7.0], 0),
}


@pytest.fixture
def report():
    corrections = torch.tensor([row for row, _ in ROWS.values()]).T
    residuals = (
        torch.arange(float(corrections.numel())).reshape(corrections.shape) % 5 / 1e3
    )  # which would settle any row
    return Report(blocks=20, chunk=4, found=torch.stack([corrections, residuals], 1), rounds=2)


def test_a_row_is_settled_by_its_corrections_alone(report):
    assert report.passes_taken() == [passes for _, passes in ROWS.values()]


def test_rows_that_were_not_settled_were_finished_by_the_loop(report):
    solution, settled = report.solution(), [passes > 0 for _, passes in ROWS.values()]
    assert solution.results == tuple(Result.CONVERGED if done else Result.FINISHED_BY_LOOP for done in settled)
    assert solution.iterations.tolist() == [
        1,
        2,
        2,
        2,
        2,
        2,
    ]  # two passes are one; all of them where it was not settled
    assert solution.exact_steps.tolist() == [20, 20, 20, 12, 12, 12]  # each pass but the first makes a chunk exact
    expected = [
        float(report.found[passes - 1, 1, row]) if passes else 0.0 for row, (_, passes) in enumerate(ROWS.values())
    ]
    assert solution.residual.tolist() == expected
    assert "up to step 12" in solution.message


class TestSizeAtFirst:
    """What the tolerance of later states is measured by, of rows by themselves. In the kernels it is the same."""

    @staticmethod
    def of(sizes, before=None, rtol=1e-5):
        sizes = torch.tensor(sizes, dtype=torch.float32).unsqueeze(1)
        before = None if before is None else torch.tensor(before, dtype=torch.float32).unsqueeze(1)
        return float(size_at_first(sizes, before, rtol))

    @pytest.mark.parametrize("chunks", [4, 10, 64, 300])
    @pytest.mark.parametrize("gone", [0.25, 0.5, 0.6])
    def test_of_a_transient_that_is_gone(self, chunks, gone):
        last = max(1, round(gone * chunks))
        sizes = [1e6 * 1e-6 ** min(1, chunk / last) for chunk in range(chunks + 1)]
        assert self.of(sizes) <= 20  # of sizes that are looked at

    @pytest.mark.parametrize("rate", [0.99, 0.9, 0.5, 0.1])
    def test_of_a_signal_that_dies_out(self, rate):
        assert self.of([rate**chunk for chunk in range(65)]) == 1

    def test_of_one_that_falls_in_steps(self):
        assert self.of([10.0 ** -(chunk // 10) for chunk in range(64)]) == 1

    def test_sizes_that_fell_since_the_pass_before_may_be_anything(self):
        """Those of a network that dies, or what the guess left above a signal: by their profile nobody knows."""
        sizes = [1e10 * 0.3**chunk for chunk in range(33)]
        assert self.of(sizes, sizes) == torch.tensor(1e10)
        assert self.of(sizes, [100 * size for size in sizes]) == pytest.approx(sizes[-1])

    def test_what_is_left_of_a_network_that_died_is_asked_for_until_it_is_nothing(self):
        died = [1.0, *[1e-33] * 32]
        assert self.of(died, [100 * size for size in died]) == 1
        assert self.of(died) == 1

    def test_of_nothing(self):
        assert self.of([0.0] * 9) == 0
        assert self.of([1.0, *[0.0] * 9]) == 1
