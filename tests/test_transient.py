"""What was large once does not hide what comes after it: states that live on are right, or the caller is told."""

import math
import warnings

import pytest
import torch

import deeppcr
from deeppcr import ConvergenceWarning, Newton, Result
from deeppcr.newton.iteration import Iteration
from deeppcr.sequence import Sequence
from deeppcr.solution import Plan
from deeppcr.tolerance import Tolerance
from problems import plain_loop

LENGTH = 300


def forgetting(z, x):
    """Forgets where it was in ten steps, and is driven to numbers of order one."""
    return 0.1 * z + torch.sin(1.3 * torch.tanh(z)) * 0.8 + x


def chaotic(z, x):
    """Large states shrink; the others never settle."""
    return torch.where(z.abs() > 10, 0.1 * z, 3 * torch.sin(2 * z)) + 0.1 * x


def beside_a_large_one(z, x):
    """The number that lives is beside one that stays large: not all of the state is faint."""
    return torch.stack([0.999 * z[..., 0] + 1, forgetting(z[..., 1], x)], -1)


def driven(dtype=torch.float32, length=LENGTH):
    return torch.randn(length, dtype=dtype, generator=torch.Generator().manual_seed(0))


def solve(*arguments, **options):
    """The solution, and whether its caller was told that something is wrong."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = deeppcr.solve(*arguments, **options)
    told = any(issubclass(each.category, ConvergenceWarning) for each in caught)
    assert told or found.result in (Result.CONVERGED, Result.LOOP)
    return found, told


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", ["auto", 1])
@pytest.mark.parametrize("size", [1e5, 1e7, 1e12])
def test_a_large_start(size, chunk, dtype):
    xs, z0 = driven(dtype), torch.tensor([size], dtype=dtype)
    found, _ = solve(forgetting, z0, xs, solver=Newton(chunk=chunk))
    off = (found.states - plain_loop(forgetting, z0, xs)).abs()[20:]
    assert off.max() <= 1e-3


def test_it_takes_few_iterations_more():
    xs, large, usual = driven(), torch.tensor([1e7]), torch.tensor([1.0])
    found, told = solve(forgetting, large, xs, solver=Newton())
    assert found.result is Result.CONVERGED
    assert not told
    ordinary, _ = solve(forgetting, usual, xs, solver=Newton())
    assert found.iterations <= ordinary.iterations + 3
    assert "digits of every state were asked for" in str(found.plan)
    assert int(found.known_steps) == LENGTH
    assert "died out" not in found.message


def test_what_cannot_be_found_is_left_to_the_loop_and_told():
    xs, z0 = driven(), torch.tensor([1e7])
    found, told = solve(chaotic, z0, xs, solver=Newton())
    assert torch.allclose(found.states, plain_loop(chaotic, z0, xs))
    assert found.result is Result.FINISHED_BY_LOOP
    assert told


def test_a_burst_in_the_middle():
    xs, z0 = driven(), torch.zeros(1)
    xs[100] = 3e8
    found, _ = solve(forgetting, z0, xs, solver=Newton())
    off = (found.states - plain_loop(forgetting, z0, xs)).abs()
    assert off[:100].max() <= 1e-3
    assert off[120:].max() <= 1e-3


@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("at", [280, 290, 295])
def test_a_burst_near_the_end(at, chunk):
    """Nothing can be seen to live on there: but a signal that dies out is not larger than ever before just then."""
    step = lambda z, x: 0.5 * z + torch.sin(2 * torch.tanh(z)) * 0.9 + x  # noqa: E731
    xs, z0 = driven(), torch.zeros(1)
    xs[at] = 6e7
    found, _ = solve(step, z0, xs, solver=Newton(chunk=chunk))
    loop = plain_loop(step, z0, xs)
    assert ((found.states - loop).abs() <= 1e-3 * loop.abs().clamp(min=0.1)).all()


def test_signals_of_a_time_between_bursts_and_silence():
    xs, z0 = driven(), torch.zeros(1)
    xs[20], xs[260], xs[150:260] = 3e8, 1e9, 0.0
    found, _ = solve(forgetting, z0, xs, solver=Newton())
    assert (found.states - plain_loop(forgetting, z0, xs)).abs()[40:150].max() <= 1e-3


def test_a_number_beside_one_that_stays_large():
    xs, z0 = driven(), torch.tensor([1000.0, 1e7])
    found, _ = solve(beside_a_large_one, z0, xs, solver=Newton())
    assert (found.states - plain_loop(beside_a_large_one, z0, xs)).abs()[20:, 1].max() <= 1e-3


def test_rows_by_themselves():
    """A row of order one is solved as it is without the other."""
    xs, z0 = driven(), torch.tensor([[1.0], [1e7]])
    found, _ = solve(forgetting, z0, xs, solver=Newton())
    alone, _ = solve(forgetting, z0[:1], xs, solver=Newton())
    assert found.iterations[0] == alone.iterations[0]
    assert found.local.tolist() == [False, True]
    assert (found.states - plain_loop(forgetting, z0, xs)).abs()[20:].max() <= 1e-3


@pytest.mark.parametrize("solver", [deeppcr.Jacobi(), deeppcr.Picard(), Newton(jacobian=deeppcr.DiagonalJacobian())])
def test_other_jacobians(solver):
    xs, z0 = driven(), torch.tensor([1e7])
    found, _ = solve(forgetting, z0, xs, solver=solver)
    assert (found.states - plain_loop(forgetting, z0, xs)).abs()[20:].max() <= 1e-3


def test_a_scan():
    xs, z0 = driven(), torch.tensor([1e7])
    combine = lambda z, x: (forgetting(z, x), forgetting(z, x))  # noqa: E731
    last, ys = deeppcr.scan(combine, z0, xs, solver=Newton())
    loop = plain_loop(forgetting, z0, xs)
    assert (ys - loop).abs()[20:].max() <= 1e-3
    assert (last - loop[-1]).abs() <= 1e-3
    with pytest.warns(ConvergenceWarning):
        deeppcr.scan(lambda z, x: (chaotic(z, x), z), z0, xs, solver=Newton())


@pytest.mark.parametrize("chunk", ["auto", 1, 4])
@pytest.mark.parametrize("seed", [14, 109, 178, 386])
def test_what_is_gone_so_late_that_it_seems_to_die_out_is_told(seed, chunk):
    """A contracting step with kinks, which a correction moves, and states that are zero now and then. The last states are too few to be seen
    to live on, and they are among those of which ``known_steps`` says that nothing is known."""
    make = torch.Generator().manual_seed(seed)
    length = 60 + 20 * (seed % 4)
    matrix, drive = torch.tensor([[-0.67, 0.3], [0.2, 0.55]]), 0.03 * torch.randn(length, 2, generator=make)

    def step(z, x):
        z = z @ matrix.to(z)
        return torch.relu(z + x) - 0.5 * torch.relu(0.3 * x - z)

    z0 = 1e9 * torch.randn(1, 2, generator=make)
    found, told = solve(step, z0, drive, solver=Newton(chunk=chunk))
    loop = plain_loop(step, z0.double(), drive.double())
    size = loop.abs().amax(-1, keepdim=True)
    around = torch.nn.functional.max_pool1d(size.reshape(1, 1, -1), 9, 1, 4).reshape(-1, 1, 1)
    off = ((found.states - loop).abs() / around).amax((1, 2))
    known = int(found.known_steps)
    assert told or off[:known].max() <= 1e-3
    assert known == length or f"after step {known} states are so far below" in found.message


def test_zeros_among_states_without_digits_do_not_vouch_for_them():
    tolerance, numbers = Tolerance(0.0, 1e-5), torch.arange(1, 7)

    def known(*states):
        states = torch.tensor(states).reshape(-1, 1, 1)
        return int(tolerance.known_steps(states, torch.ones_like(states), numbers[: len(states)]))

    assert known(1.0, 0.5, 1e-6, 0.0, 1e-6, 0.0) == 2
    assert known(1.0, 0.5, 0.0, 0.0, 0.0) == 5
    assert known(1.0, 1e-6, 0.5, 0.0, 0.5) == 5
    assert known(1e-6, 0.0) == 0


class TestCloserLooks:
    """What is done to see whether noise or a signal is left: of a sequence that died, whose guess did not."""

    @staticmethod
    def iteration():
        sequence = Sequence(lambda z, x: 0.1 * z + 0 * x, torch.tensor([1e7]), torch.zeros(100, 1), batch_dims=0)
        ends = 1e7 * 0.1 ** torch.arange(1.0, 101) + 1
        return Iteration(Newton(chunk=1), sequence, ends.reshape(-1, 1, 1), 1, Plan())

    def find(self, iteration):
        values, blocks = iteration.linearise()
        errors = torch.full_like(iteration.ends, -0.999)
        return iteration.find_hidden(torch.tensor([True]), iteration.ends, values, errors, blocks)

    def test_noise_falls(self):
        hidden, nearest = self.find(self.iteration())
        assert not hidden.any()
        assert nearest[20:].abs().max() < 1e-3  # what was corrected on the way is kept

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_corrections_that_are_not_finite_are_no_noise(self, value, monkeypatch):
        iteration = self.iteration()
        monkeypatch.setattr(iteration, "solve", lambda blocks, residual: torch.full_like(residual, value))
        hidden, nearest = self.find(iteration)
        assert hidden.all()
        assert torch.isfinite(nearest).all()

    def test_rows_that_are_stuck_are_looked_at_where_their_last_update_began(self, monkeypatch):
        iteration, seen = self.iteration(), []
        before = iteration.ends
        values, blocks = iteration.linearise()
        iteration.update(values, blocks)
        iteration.progress.stuck = torch.tensor([True])
        monkeypatch.setattr(iteration, "hidden_among", lambda *given: (seen.append(given), (None, None))[1])
        delta = iteration.ends - before
        iteration.end_stuck(values, delta, blocks, iteration.bounds())
        _, ends, *_ = seen[0]
        torch.testing.assert_close(ends, before)


class TestWhatIsHidden:
    """Of the rule itself: sizes of states, and of errors in them."""

    @staticmethod
    def hides(sizes, errors, rtol=1e-5, closer=None):
        initial, *states = torch.as_tensor(sizes).reshape(-1, 1, 1)
        errors = torch.full((len(states), 1, 1), errors)
        closer = None if closer is None else torch.as_tensor(closer)[1:].reshape(-1, 1, 1)
        return bool(Tolerance(0.0, rtol).hides(torch.stack(states), initial, errors, closer))

    @pytest.mark.parametrize("length", [8, 9, 100])
    def test_a_signal_that_lives_on(self, length):
        sizes = torch.ones(length)
        sizes[0] = 1e7
        assert self.hides(sizes, 0.5)
        assert not self.hides(sizes, 1e-3)  # its digits are known
        assert not self.hides(sizes.clamp(max=100.0), 0.5)  # it is not faint

    @pytest.mark.parametrize("rate", [0.99, 0.9, 0.6, 0.1])
    def test_a_signal_that_dies_out(self, rate):
        sizes = rate ** torch.arange(2000.0, dtype=torch.float64)
        assert not self.hides(sizes, 1e-3)
        assert not self.hides(sizes * torch.cos(torch.arange(2000.0)), 1e-3)

    def test_what_is_zero_needs_no_digits(self):
        assert not self.hides([1e7, *[0.0] * 50], 0.5)

    def test_a_long_transient(self):
        sizes = 1e7 * 0.9 ** torch.arange(1000.0) + 1
        assert self.hides(sizes, 0.5)

    def test_noise_falls_when_it_is_looked_at_closer(self):
        sizes = torch.ones(100)
        sizes[0] = 1e7
        assert self.hides(sizes, 0.5, closer=sizes)
        assert not self.hides(sizes, 0.5, closer=1e-3 * sizes)


@pytest.mark.parametrize("seed", range(4))
def test_networks_whose_signals_die_out_by_chance_keep_their_iterations(seed):
    """Products of random matrices fall, rest, and fall on: nothing lives there that a large start could hide."""
    make = torch.Generator().manual_seed(seed)
    weights = torch.randn(600, 8, 8, generator=make) / 8**0.5
    z0 = torch.randn(4, 8, generator=make)
    solution = deeppcr.solve(lambda z, w: torch.tanh(z) @ w.mT, z0, weights, solver=Newton())
    assert solution.result is Result.CONVERGED
    assert solution.local is None
    assert solution.iterations.max() <= 8


@pytest.mark.parametrize("keep", ["all", 50])
@pytest.mark.parametrize("on_failure", ["loop", "return"])
@pytest.mark.parametrize("solver", [None, Newton(), deeppcr.Loop(), deeppcr.Jacobi()], ids=str)
@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
def test_nothing_is_known_after_a_value_that_is_not_finite(solver, on_failure, keep):
    """Whatever way was taken."""
    xs = torch.full((300, 1), 0.1)
    xs[150] = 10.0
    step = lambda z, x: torch.where(x > 5, z * float("nan"), 0.5 * torch.tanh(z) + x)  # noqa: E731
    found = deeppcr.solve(step, torch.ones(2, 1), xs, solver=solver, on_failure=on_failure, keep=keep)
    assert found.result is Result.NON_FINITE
    assert found.known_steps.tolist() == found.exact_steps.tolist() == [150, 150]
