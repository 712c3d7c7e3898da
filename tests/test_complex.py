"""Loops over complex states, holomorphic or not: as pairs of real numbers they are loops like any other."""

import warnings

import pytest
import torch

import deeppcr
from deeppcr import DiagonalJacobian, GivenJacobian, HutchinsonJacobian, Loop, Newton, Result, Unrolled, linear, solve
from deeppcr.fuse.expressions import NotCovered
from kernel_support import thorough
from problems import plain_loop

STEPS = {
    "holomorphic": lambda a: lambda z, x: torch.tanh(0.5 * a * z) + x,
    "not holomorphic": lambda a: lambda z, x: a * z / (1 + z.abs().square()) + 0.1 * z.conj() + x,
}
SOLVERS = {
    "default": None,
    "dense": Newton(),
    "diagonal": Newton(jacobian=DiagonalJacobian()),
    "one by one": Newton(chunk=1, linear=linear.Hierarchical(chunk=2)),
    "estimated": Newton(jacobian=HutchinsonJacobian()),
    "loop": Loop(),
}


def normal(*shape, device, dtype=torch.complex128):
    return torch.randn(*shape, dtype=dtype, device=device, requires_grad=True)


def assert_same_gradients(found, expected, tensors, **tolerance):
    """Of a loss that sees both parts of the states, and is not holomorphic."""
    ours, theirs = (
        torch.autograd.grad(each.abs().square().sum() + each.imag.sin().sum(), tensors, retain_graph=True)
        for each in (found, expected)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("length", [1, 2, 65, *thorough(3, 63)])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", STEPS)
def test_states_and_gradients_are_those_of_the_loop(name, solver, length, device):
    a, z0, xs = (normal(*shape, device=device) for shape in ((3,), (2, 3), (length, 2, 3)))
    step = STEPS[name](0.9 * a / a.detach().abs())
    expected = plain_loop(step, z0, xs)
    solution = solve(step, z0, xs, solver=SOLVERS[solver])
    assert solution.result in (Result.CONVERGED, Result.LOOP)
    torch.testing.assert_close(solution.states, expected, rtol=1e-9, atol=1e-10)
    assert_same_gradients(solution.states, expected, (a, z0, xs), rtol=1e-7, atol=1e-8)
    assert solution.residual.dtype is torch.float64


def test_complex64_and_unrolled_gradients(device):
    z0, xs = normal(3, device=device, dtype=torch.complex64), normal(65, 3, device=device, dtype=torch.complex64)
    step = STEPS["not holomorphic"](0.9)
    expected = plain_loop(step, z0, xs)
    for gradient in (Unrolled(), deeppcr.Implicit()):
        solution = solve(step, z0, xs, solver=Newton(), gradient=gradient)
        assert solution.result is Result.CONVERGED
        torch.testing.assert_close(solution.states, expected, rtol=1e-4, atol=1e-4)
        assert_same_gradients(solution.states, expected, (z0, xs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("solver", ["default", "dense", "loop"])
def test_real_and_complex_tensors_in_one_state(solver, device):
    """The real one first, and of an odd width: no pair lies where a view could find it."""

    def step(state, x):
        amplitude, wave = state["amplitude"], state["wave"]
        turned = wave * torch.tanh(amplitude).sum() * torch.exp(1j * x)
        return {"wave": 0.3 * turned + 0.1, "amplitude": 0.5 * amplitude + 0.1 * wave.imag.sum()}

    z0 = {"amplitude": normal(3, device=device, dtype=torch.float64), "wave": normal(2, device=device)}
    xs = normal(65, 2, device=device, dtype=torch.float64)
    expected, solution = plain_loop(step, z0, xs), solve(step, z0, xs, solver=SOLVERS[solver])
    for name in z0:
        torch.testing.assert_close(solution.states[name], expected[name], rtol=1e-9, atol=1e-10)
    assert_same_gradients(solution.states["wave"], expected["wave"], (*z0.values(), xs), rtol=1e-7, atol=1e-8)
    with pytest.raises(ValueError, match="DiagonalJacobian is for elements that are all real or all complex"):
        solve(step, z0, xs, solver=SOLVERS["diagonal"])


def test_a_diagonal_is_one_of_two_by_two_blocks(device):
    sequence = deeppcr.sequence.Sequence(lambda z: z.conj() * z, normal(4, device=device), length=3)
    previous = torch.randn(3, 1, 8, dtype=torch.float64, device=device)
    values, blocks = DiagonalJacobian().evaluate(sequence, previous, range(3))
    assert isinstance(blocks, linear.BlockDiagonal)
    _, dense = deeppcr.DenseJacobian().evaluate(sequence, previous, range(3))
    torch.testing.assert_close(blocks.to_dense(), dense.data)
    torch.testing.assert_close(values[..., 1::2], torch.zeros_like(values[..., 1::2]))


def test_steps_that_mix_elements_are_no_diagonal(device):
    last = torch.tensor([0, 0, 1], dtype=torch.float64, device=device)
    step, z0 = (lambda z: 0.5 * z + 0.1 * last * z[0]), normal(3, device=device).detach()
    with pytest.raises(deeppcr.StepError, match="the step is not elementwise: element 2 of its output"):
        solve(step, z0, length=9, solver=SOLVERS["diagonal"])
    findings = deeppcr.check(step, z0, length=9, jacobian=DiagonalJacobian())
    assert any("DiagonalJacobian is claimed" in finding.message for finding in findings)
    assert not deeppcr.check(lambda z: 0.5j * z.conj() + 1, z0, length=9, jacobian=DiagonalJacobian())


def test_where_newton_fails_the_loop_goes_on(device):
    step, z0 = (lambda z: z * z - 0.12 + 0.6j), torch.tensor([0.1 + 0.1j, 0.2], dtype=torch.complex128, device=device)
    newton = Newton(max_iterations=2, chunk=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", deeppcr.ConvergenceWarning)
        solution = solve(step, z0, length=40, solver=newton)
    assert solution.result is Result.FINISHED_BY_LOOP
    torch.testing.assert_close(solution.states, plain_loop(step, z0, length=40))


def test_what_is_not_finite_is_named(device):
    z0, xs = (
        torch.ones(2, dtype=torch.complex128, device=device),
        torch.ones(9, 2, dtype=torch.complex128, device=device),
    )
    xs[4, 1] = complex(0, torch.nan)
    for solver in (None, Newton()):
        with pytest.warns(
            deeppcr.ConvergenceWarning, match="step 5 produced a value that is not finite; xs holds NaN there"
        ):
            assert solve(lambda z, x: 0.5 * z + x, z0, xs, solver=solver).result is Result.NON_FINITE


def test_lengths_guesses_and_states_that_are_kept(device):
    z0, xs = (normal(*shape, device=device).detach() for shape in ((3, 2), (9, 3, 2)))
    gain, lengths = normal(2, device=device), torch.tensor([4, 0, 9])
    step = lambda z, x: torch.tanh(0.3 * gain * z * x) + x  # noqa: E731
    expected = plain_loop(step, z0, xs)
    padded = xs.clone()
    padded[4:, 0] = complex(torch.nan, 0)
    found = solve(step, z0, padded, lengths=lengths, solver=Newton())
    torch.testing.assert_close(found.states[-1], torch.stack([expected[3, 0], z0[1], expected[-1, 2]]))
    (gradient,) = torch.autograd.grad(found.states[-1].abs().sum(), gain)
    (alone,) = torch.autograd.grad(expected[3, 0].abs().sum() + expected[-1, 2].abs().sum(), gain, retain_graph=True)
    torch.testing.assert_close(gradient, alone)
    warm = solve(step, z0, xs, guess=expected.detach(), solver=Newton(), keep=3)
    torch.testing.assert_close(warm.states, expected[2::3])
    assert int(warm.iterations.max()) <= 2
    with pytest.raises(TypeError, match=r"guess: expected torch\.complex128 on"):
        solve(step, z0, xs, guess=expected.real, solver=Newton())


def test_a_wave_that_dies_out_is_told_of(device):
    z0 = torch.ones(2, dtype=torch.complex64, device=device)
    solution = solve(lambda z: 0.5j * z, z0, length=65, solver=Newton())
    assert 0 < int(solution.known_steps) < 65
    assert "died out" in solution.message


def test_what_is_refused(device):
    z0 = torch.ones(2, dtype=torch.complex128, device=device)
    with pytest.raises(
        deeppcr.StepError, match=r"changes the state's dtype: expected complex128\[2\].*got float64\[2\]"
    ):
        solve(lambda z: z.real, z0, length=3, solver=Newton())
    given = GivenJacobian(lambda z: linear.Diagonal(torch.full_like(z, 0.5)), exact=True)
    with pytest.raises(TypeError, match="jacobian: the blocks are complex"):
        solve(lambda z: 0.5 * z, z0, length=3, solver=Newton(jacobian=given))
    with pytest.raises(TypeError, match="share one dtype and device"):
        solve(lambda z: z, (z0, torch.ones(2, device=device)), length=3)
    with pytest.raises(NotCovered, match="complex states are not covered"):
        deeppcr.fuse.source(lambda z: z * z, z0)


def test_a_scan_of_complex_carries(device):
    a, xs = normal(3, device=device), normal(65, 3, device=device)

    def combine(carry, x):
        state, count = carry
        after = 0.9 * state * a / a.detach().abs() + x
        return (after, count + 1), after.real * count

    init = (torch.zeros(3, dtype=torch.complex128, device=device), torch.tensor(0, device=device))
    (state, count), ys, solution = deeppcr.scan(combine, init, xs, solver=Newton(), return_solution=True)
    expected = plain_loop(lambda z, x: combine((z, 0), x)[0][0], init[0], xs)
    assert solution.result is Result.CONVERGED
    assert count.item() == 65
    torch.testing.assert_close(state, expected[-1])
    times = torch.arange(65, device=device).unsqueeze(1)
    torch.testing.assert_close(ys, expected.real * times)
    ours, theirs = (torch.autograd.grad(each.square().sum(), (a, xs)) for each in (ys, expected.real * times))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
