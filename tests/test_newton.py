"""The iteration itself: what converges how fast, what is kept, what is frozen, when it gives up."""

import math

import pytest
import torch

import deeppcr
from deeppcr import FixedIterations, Newton, PaperTest, Result
from kernel_support import pairwise
from problems import CHAOTIC, Generator, attention, lorenz, mlp, plain_loop, relative_error


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("chunk", [1, 8, "auto"])
@pytest.mark.parametrize(
    ("growth", "stop"),  # the paper's absolute residual cannot be met where states reach 1e17
    [(0.5, PaperTest()), (1.0, PaperTest()), *((growth, deeppcr.UpdateTest()) for growth in (0.5, 1.0, 1.5))],
)
def test_linear_steps_take_one_iteration(growth, chunk, stop, device):
    make = Generator(0, torch.float64, device)
    blocks, terms = growth * make.normal(100, 5, 5) / 5**0.5, make.normal(100, 5)
    step = lambda z, x: z @ x[0].mT + x[1]  # noqa: E731
    z0 = make.normal(3, 5)
    solution = deeppcr.solve(step, z0, (blocks, terms), solver=Newton(chunk=chunk, stop=stop), on_failure="raise")
    assert solution.iterations.tolist() == [1, 1, 1]
    loop = plain_loop(step, z0, (blocks, terms))
    assert ((solution.states - loop).abs().amax(-1) <= 1e-9 * loop.abs().amax(-1)).all()


@pytest.mark.parametrize("activation", [torch.relu, torch.tanh, torch.sigmoid])
@pytest.mark.parametrize("length", [2**4, 2**8, 2**12])
def test_the_papers_networks_take_at_most_six_iterations_under_its_test(length, activation, device):
    for seed in range(2):
        problem = mlp(Generator(seed, torch.float32, device), length, 1, width=8, activation=activation)
        solution = problem.solve(solver=Newton(chunk=1, stop=PaperTest(1e-4, 1e-4), max_iterations=15))
        assert solution.result is Result.CONVERGED
        assert int(solution.iterations) <= 6


def test_a_small_residual_alone_is_not_believed(device):
    """A slow time stepper has a tiny residual at any guess: the update must say how far the trajectory is off."""
    step = lambda z: z + 1e-6 * torch.cos(z)  # noqa: E731
    z0 = torch.zeros(1, 2, dtype=torch.float64, device=device)
    loop = plain_loop(step, z0, length=3000)
    settings = {"atol": 1e-5, "rtol": 0.0, "chunk": 1}
    by_residual = deeppcr.solve(step, z0, length=3000, solver=Newton(stop=PaperTest(1e-4, 0.0), chunk=1))
    assert relative_error(by_residual.states, loop) < 1e-5  # one whole iteration is always made
    for solver in (Newton(**settings), deeppcr.Picard(**settings), deeppcr.Jacobi(**settings)):
        solution = deeppcr.solve(step, z0, length=3000, solver=solver)
        assert (solution.states - loop).abs().max() < 1e-4


def test_iteration_zero_never_counts(device):
    problem = mlp(Generator(0, torch.float64, device), 30, 2)
    solution = problem.solve(guess=problem.loop())
    assert solution.iterations.tolist() == [1, 1]


def test_the_prefix_grows_with_every_iteration_and_is_never_touched(device):
    """After k iterations the first k chunks are the loop's own, to the last bit."""
    problem = CHAOTIC["logistic"](Generator(0, torch.float64, device), 60, 3)
    loop = problem.loop()
    for chunk in (1, 4):
        for count in (1, 3, 6):
            solution = problem.solve(solver=Newton(stop=FixedIterations(count), chunk=chunk))
            exact = count * chunk
            assert torch.allclose(solution.states[:exact], loop[:exact], rtol=1e-10)
            if chunk == 1:  # the unknowns themselves stay finite
                assert solution.states.isfinite().all()


def test_finite_termination_is_convergence(device):
    problem = CHAOTIC["logistic"](Generator(0, torch.float64, device), 30, 2)
    solution = problem.solve(solver=Newton(chunk=2), on_failure="raise")
    assert solution.result is Result.CONVERGED
    assert solution.iterations.max() <= 15
    assert torch.allclose(solution.states, problem.loop(), atol=1e-8)


def test_rows_converge_by_themselves_and_are_frozen(device):
    """An easy row beside a hard one: same iterations and same bits as alone."""
    rates = torch.tensor([[0.1], [3.9]], dtype=torch.float64, device=device)
    z0 = torch.tensor([[0.3], [0.3]], dtype=torch.float64, device=device)
    step = lambda z, r: r * z * (1 - z)  # noqa: E731
    xs = rates.expand(40, 2, 1)
    both = deeppcr.solve(step, z0, xs, solver=Newton(chunk=1))
    easy = deeppcr.solve(step, z0[:1], xs[:, :1], solver=Newton(chunk=1))
    assert int(both.iterations[0]) == int(easy.iterations) < int(both.iterations[1])
    assert torch.equal(both.states[:, 0], easy.states[:, 0])


def test_one_row_that_fails_leaves_the_others_alone(device):
    rates = torch.tensor([[0.5], [4.0]], dtype=torch.float64, device=device)
    z0 = torch.tensor([[0.3], [0.3]], dtype=torch.float64, device=device)
    step = lambda z, r: r * z * (1 - z)  # noqa: E731
    xs = rates.expand(3000, 2, 1)
    with pytest.warns(deeppcr.ConvergenceWarning, match=r"row 1; 1 of 2 rows"):
        solution = deeppcr.solve(step, z0, xs, solver=Newton(chunk=1))
    assert solution.result is Result.FINISHED_BY_LOOP
    assert [result.name for result in solution.results] == ["CONVERGED", "FINISHED_BY_LOOP"]
    assert torch.allclose(solution.states, plain_loop(step, z0, xs), atol=1e-9)


@pytest.mark.parametrize("chunk", [1, 8])
def test_values_that_are_not_finite_are_named_with_their_step(chunk, device):
    step = lambda z, x: torch.log(z) + x  # noqa: E731
    z0 = torch.full((2, 3), 4.0, dtype=torch.float64, device=device)
    xs = torch.full((50, 2, 3), 3.0, dtype=torch.float64, device=device)
    xs[20, 1, 2] = -50.0  # step 22 of row 1 takes the logarithm of a negative number
    solver = Newton(chunk=chunk)
    with pytest.warns(deeppcr.ConvergenceWarning, match="step 22 produced a value that is not finite"):
        solution = deeppcr.solve(step, z0, xs, solver=solver)
    assert [result.name for result in solution.results] == ["CONVERGED", "NON_FINITE"]
    loop = plain_loop(step, z0, xs)
    assert torch.allclose(solution.states, loop, equal_nan=True)
    assert int(solution.exact_steps[1]) == 21
    with pytest.raises(deeppcr.ConvergenceError, match="step 22 produced a value that is not finite"):
        deeppcr.solve(step, z0, xs, solver=solver, on_failure="raise")
    with pytest.warns(deeppcr.ConvergenceWarning, match="step 22 produced"):
        returned = deeppcr.solve(step, z0, xs, solver=solver, on_failure="return")
    assert torch.allclose(returned.states[:21], loop[:21])
    with pytest.warns(deeppcr.ConvergenceWarning, match="step 22 produced"):
        assert deeppcr.solve(step, z0, xs, solver=deeppcr.Loop()).result is Result.NON_FINITE


def test_nan_in_the_inputs_is_named(device):
    xs = torch.zeros(50, 3, 2, device=device)
    xs[20, 1, 0] = torch.nan
    with pytest.warns(
        deeppcr.ConvergenceWarning, match=r"step 21 produced .* not finite; xs holds NaN there, .* \(row 1;"
    ):
        solution = deeppcr.solve(lambda z, x: z / 2 + x, torch.ones(3, 2, device=device), xs, solver=Newton())
    assert solution.result is Result.NON_FINITE
    assert solution.exact_steps.tolist() == [50, 20, 50]


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_what_another_row_or_a_mask_holds_is_not_named(value, device):
    xs = torch.zeros(30, 2, 1, device=device)
    xs[:, 1 if value != value else 0] = value  # NaN in the row that does not overflow, or a mask in the one that does
    z0 = torch.tensor([[1.5], [0.1]], device=device)
    with pytest.warns(deeppcr.ConvergenceWarning, match=r"step \d+ produced") as caught:
        deeppcr.solve(lambda z, x: 2 * z * z + torch.nan_to_num(x).exp().clamp(max=0.1), z0, xs, solver=Newton())
    assert not any("xs holds" in str(each.message) for each in caught)


def test_a_fixed_number_of_iterations_ends_where_all_is_exact(device):
    step = lambda z: torch.cos(z)  # noqa: E731
    solution = deeppcr.solve(
        step, torch.ones(1, device=device), length=64, solver=Newton(stop=FixedIterations(13), chunk=1)
    )
    assert 3 <= int(solution.iterations) < 13
    assert "or as many as leave rounding alone" in solution.message
    assert torch.allclose(solution.states, plain_loop(step, torch.ones(1, device=device), length=64), atol=1e-6)


@pytest.mark.parametrize("wrong", [2.5, math.nan, "three", None])
def test_bad_stopping_tests(wrong):
    with pytest.raises(TypeError, match="count: expected a whole number"):
        FixedIterations(wrong)
    with pytest.raises(ValueError, match="at least one"):
        FixedIterations(0)
    if wrong != 2.5:
        with pytest.raises((TypeError, ValueError), match="relative: expected a number"):
            PaperTest(1e-4, wrong)
    with pytest.raises(ValueError, match="absolute: expected a number of at least 0"):
        PaperTest(-1.0)


def test_an_infinite_mask_in_the_inputs_is_legal(device):
    make = Generator(0, torch.float64, device)
    mask = torch.zeros(40, 4, dtype=torch.float64, device=device)
    mask[:, 2] = -torch.inf
    step = lambda z, m: torch.softmax(z + m, -1) + 0.5 * torch.sin(z)  # noqa: E731
    z0 = make.normal(3, 4)
    solution = deeppcr.solve(step, z0, mask, on_failure="raise", solver=Newton())
    assert torch.allclose(solution.states, plain_loop(step, z0, mask), atol=1e-9)


def test_iterates_that_stray_out_of_the_domain_do_not_spoil_the_rest(device):
    """sqrt is not defined where a wild Newton iterate may go; the sequence itself stays inside."""
    make = Generator(0, torch.float64, device)
    step = lambda z, x: 3 * torch.sqrt(z * (4 - z)) / 2 + x  # noqa: E731
    z0, xs = torch.full((2, 1), 0.5, dtype=torch.float64, device=device), 0.1 * make.uniform(60, 2, 1)
    solution = deeppcr.solve(step, z0, xs, solver=Newton(chunk=2))
    loop = plain_loop(step, z0, xs)
    assert loop.isfinite().all()
    assert torch.allclose(solution.states, loop, atol=1e-6)


def test_the_precision_floor_is_recognised(device):
    problem = mlp(Generator(0, torch.float32, device), 100, 2, activation=torch.tanh)
    solution = problem.solve(solver=Newton(atol=1e-7, rtol=1e-9, chunk=1), on_failure="raise")
    assert solution.result in (Result.PRECISION_FLOOR, Result.CONVERGED)
    assert relative_error(solution.states, problem.loop()) < 1e-6
    picard = deeppcr.Picard(atol=1e-7, rtol=1e-9)
    step = lambda z, x: 0.5 * torch.tanh(z) + x  # noqa: E731
    z0, xs = torch.ones(1, 4, device=device), torch.ones(50, 4, device=device) * 10
    solution = deeppcr.solve(step, z0, xs, solver=picard)
    assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-6


def test_giving_up_early_when_the_prefix_cannot_reach_the_end(device):
    problem = lorenz(Generator(0, torch.float64, device), 2000, 1)
    with pytest.warns(deeppcr.ConvergenceWarning):
        solution = problem.solve(solver=Newton(chunk=1, max_iterations=100))
    assert int(solution.iterations) <= 15
    assert any(note.startswith("gave up after") for note in solution.plan.notes)


def test_max_iterations_is_kept(device):
    problem = lorenz(Generator(0, torch.float64, device), 200, 1)
    with pytest.warns(deeppcr.ConvergenceWarning):
        solution = problem.solve(solver=Newton(chunk=1, max_iterations=3))
    assert int(solution.iterations) == 3
    assert solution.updates.shape == (3, 1)


def test_shrinking_the_blocks_still_finds_the_solution(device):
    problem = mlp(Generator(0, torch.float64, device), 60, 2, activation=torch.tanh)
    solution = problem.solve(solver=Newton(shrink=0.8, chunk=1), on_failure="raise")
    assert relative_error(solution.states, problem.loop()) < 1e-9
    plain = problem.solve(solver=Newton(chunk=1))
    assert solution.iterations.min() > plain.iterations.max()


def test_products_of_blocks_that_overflow_are_redone(device):
    """Each step blows one direction up by 1e6 and the next one projects it out again."""
    up = torch.tensor([[1e6, 0.0], [0.0, 0.5]], device=device)
    down = torch.tensor([[1e-6, 0.0], [0.0, 0.5]], device=device)
    weights = torch.stack([up, up, up, up, up, up, down, down, down, down, down, down] * 4)
    step = lambda z, w: torch.tanh(z) @ w.mT * 1e-3 + 0.1 * torch.tanh(z)  # noqa: E731
    z0 = torch.full((1, 2), 0.1, device=device)
    solution = deeppcr.solve(step, z0, weights, solver=Newton(chunk=1, linear=deeppcr.PCR()))
    assert torch.allclose(solution.states, plain_loop(step, z0, weights), rtol=1e-3, atol=1e-5)


def test_states_of_very_different_size_are_judged_leaf_by_leaf(device):
    """A large leaf must not hide the error of a small one."""
    make = Generator(0, torch.float64, device)
    weight = make.normal(3, 3) / 3

    def step(state, x):
        large, small = state
        return 1e6 + torch.tanh(large), torch.tanh(small @ weight) * 1e-4 + 1e-5 * x

    z0 = (torch.zeros(2, 3, dtype=torch.float64, device=device), make.normal(2, 3))
    xs = make.normal(50, 3)
    solution = deeppcr.solve(step, z0, xs, solver=Newton(atol=0.0, rtol=1e-8), on_failure="raise")
    assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-7


def test_settings_are_checked():
    for bad, name in (
        ({"chunk": 0}, "chunk"),
        ({"chunk": "big"}, "chunk"),
        ({"chunk": True}, "chunk"),
        ({"max_iterations": 0}, "max_iterations"),
        ({"atol": -1.0}, "atol"),
        ({"rtol": float("nan")}, "rtol"),
        ({"rtol": True}, "rtol"),
        ({"rtol": 2.0}, "below 1"),
        ({"shrink": 1.5}, "shrink"),
    ):
        with pytest.raises(ValueError, match=name):
            Newton(**bad)
    for bad, name in (
        ({"jacobian": deeppcr.DenseJacobian}, "jacobian"),
        ({"stop": 1e-4}, "stop"),
        ({"linear": deeppcr.PCR}, "linear"),
    ):
        with pytest.raises(TypeError, match=name):
            Newton(**bad)
    with pytest.raises(ValueError, match="count"):
        FixedIterations(0)


def test_more_fixed_iterations_than_there_are_chunks(device):
    problem = mlp(Generator(0, torch.float64, device), 6, 2)
    solution = problem.solve(solver=Newton(stop=FixedIterations(20), chunk=2))
    assert solution.result is Result.ITERATIONS_DONE
    assert relative_error(solution.states, problem.loop()) < 1e-12


@pairwise(shrinking=[20, 60], growing=[30, 75], chunk=[1, "auto"], dtype=[torch.float32, torch.float64])
def test_what_shrinks_below_the_tolerance_and_grows_again_is_not_lost(shrinking, growing, chunk, dtype, device):
    """States far below atol on the way, large at the end: nothing may be frozen with an error that is then amplified."""
    gains = [torch.full((shrinking, 1), 0.5), torch.full((growing, 1), 2.0)]
    xs = torch.cat(gains).to(device, dtype)
    step = lambda z, x: x * torch.tanh(z)  # noqa: E731
    for start in (1.0, 0.3, 3.0):
        z0 = torch.full((1, 1), start, dtype=dtype, device=device)
        solution = deeppcr.solve(step, z0, xs, solver=Newton(chunk=chunk))
        loop = plain_loop(step, z0, xs)
        assert relative_error(solution.states[-1], loop[-1]) < (1e-3 if dtype is torch.float32 else 1e-8)


CREEPING = {
    "a fast element beside a slow one": (
        lambda z: torch.stack([0.1 * torch.sin(z[..., 0]) + 1, z[..., 1] + 1e-6 * torch.cos(z[..., 1])], -1),
        torch.zeros(1, 2),
        {"length": 3000},
    ),
    "many small steps": (lambda z: z + 1e-7 * torch.cos(z), torch.zeros(1, 1), {"length": 3000}),
    "a derivative that is not the step's": (
        lambda z: z.detach() + 1e-7 * torch.cos(z),
        torch.zeros(1, 1),
        {"length": 3000},
    ),
}


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
@pytest.mark.parametrize("solver", [Newton(), deeppcr.Jacobi(), deeppcr.Picard()], ids=["newton", "jacobi", "picard"])
@pytest.mark.parametrize("name", CREEPING)
def test_small_updates_that_add_up_are_not_taken_for_convergence(name, solver, device):
    step, z0, settings = CREEPING[name]
    solution = deeppcr.solve(step, z0.to(device), solver=solver, **settings)
    loop = plain_loop(step, z0.to(device), **settings)
    assert (solution.states - loop).abs().max() <= 1e-4 * (1 + loop.abs().max())


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
def test_errors_that_shrink_first_and_grow_later_do_not_fool_an_approximate_jacobian(device):
    xs = torch.cat([torch.full((20, 1), 0.5), torch.full((20, 1), 2.0)]).to(device)
    step = lambda z, x: x * z  # noqa: E731
    old = deeppcr.solve(step, torch.ones(1, 1, device=device), xs, solver=deeppcr.Loop())
    z0 = torch.full((1, 1), 1.1, device=device)
    for solver in (deeppcr.Jacobi(), Newton(jacobian=deeppcr.ScalarJacobian(0.1))):
        solution = deeppcr.solve(step, z0, xs, solver=solver, guess=old)
        assert relative_error(solution.states, plain_loop(step, z0, xs)) < 1e-4


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
def test_a_jacobian_that_is_wrongly_called_exact_is_not_believed(device):
    step = lambda z: z + 1e-6 * torch.cos(z)  # noqa: E731
    forgot_the_one = deeppcr.GivenJacobian(lambda z: deeppcr.linear.Diagonal(-1e-6 * torch.sin(z)), exact=True)
    z0 = torch.zeros(1, 1, device=device)
    solution = deeppcr.solve(step, z0, length=3000, solver=Newton(jacobian=forgot_the_one, chunk=1))
    assert (solution.states - plain_loop(step, z0, length=3000)).abs().max() < 1e-4


def test_states_that_were_thrown_far_away_are_called_back(device):
    """Left alone, the tail that the first updates throw to 1e160 takes more than a hundred iterations to come back."""
    problem = attention(Generator(0, torch.float64, device), 1000, 3)
    solution = problem.solve(solver=Newton(chunk=1), on_failure="raise")
    assert solution.result is Result.CONVERGED
    assert solution.iterations.max() <= 40
    assert relative_error(solution.states, problem.loop()) < 1e-9


def test_the_chain_is_cut_where_an_iterate_left_the_domain(device):
    """One bad state in the guess: the states behind it are still solved for, not merely stepped once."""
    step = lambda z: 0.5 * z + 1 + 0 * torch.sqrt(z)  # noqa: E731
    z0 = torch.full((1, 1), 2.0, dtype=torch.float64, device=device)  # the fixed point
    guess = torch.full((40, 1, 1), 2.0, dtype=torch.float64, device=device)
    guess[10], guess[12:] = -1.0, 5.0
    solution = deeppcr.solve(step, z0, length=40, guess=guess, solver=Newton(chunk=1, stop=FixedIterations(1)))
    assert torch.allclose(solution.states, torch.full_like(guess, 2.0))
