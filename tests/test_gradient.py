"""Gradients, several ways: implicit = unrolled = autograd through the plain loop = finite differences."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import deeppcr
from deeppcr import Implicit, Newton, Unrolled
from kernel_support import pairwise, thorough
from problems import CONTRACTING, Generator, mlp, plain_loop

TIGHT = Newton(atol=1e-12, rtol=1e-12)


def gradients(states, inputs, weights):
    """Gradients of a random weighting of all states: every step and element matters."""
    leaves = pytree.tree_leaves(states)
    total = sum((leaf * weight).sum() for leaf, weight in zip(leaves, weights, strict=True))
    return torch.autograd.grad(total, inputs)


def compare(found, expected, tolerance):
    for ours, loops in zip(found, expected, strict=True):
        assert (ours - loops).abs().max() <= tolerance * loops.abs().max()


@pairwise(name=CONTRACTING.keys(), chunk=[1, 4, "auto"], gradient=[Implicit(), Unrolled()])
def test_gradients_equal_those_through_the_loop(name, chunk, gradient, device):
    make = Generator(0, torch.float64, device)
    problem = CONTRACTING[name](make, 25, 3)
    inputs = [leaf.requires_grad_() for leaf in pytree.tree_leaves((problem.z0, problem.xs))]
    loop = problem.loop()
    weights = [make.normal(*leaf.shape) for leaf in pytree.tree_leaves(loop)]
    solution = problem.solve(solver=Newton(atol=1e-12, rtol=1e-12, chunk=chunk), gradient=gradient)
    compare(gradients(solution.states, inputs, weights), gradients(loop, inputs, weights), 1e-9)


@pytest.mark.parametrize("name", CONTRACTING)
def test_gradients_in_float32_with_default_settings(name, device):
    make = Generator(2, torch.float32, device)
    problem = CONTRACTING[name](make, 200, 3)
    inputs = [leaf.requires_grad_() for leaf in pytree.tree_leaves((problem.z0, problem.xs))]
    loop = problem.loop()
    weights = [make.normal(*leaf.shape) for leaf in pytree.tree_leaves(loop)]
    compare(gradients(problem.solve().states, inputs, weights), gradients(loop, inputs, weights), 1e-4)


@pytest.mark.parametrize("gradient", [Implicit(), Unrolled()])
def test_parameters_that_the_step_closes_over(gradient, device):
    make = Generator(0, torch.float64, device)
    cell = make.module(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    scale = torch.tensor(0.7, dtype=torch.float64, device=device, requires_grad=True)
    step = lambda z, x: scale * cell(z) + x  # noqa: E731
    z0, xs = make.normal(2, 6), make.normal(30, 6)
    inputs = [scale, *cell.parameters()]
    loop, weights = plain_loop(step, z0, xs), [make.normal(30, 2, 6)]
    solution = deeppcr.solve(step, z0, xs, solver=TIGHT, gradient=gradient)
    compare(gradients(solution.states, inputs, weights), gradients(loop, inputs, weights), 1e-9)


@pytest.mark.parametrize("gradient", [Implicit(), Unrolled()])
def test_gradcheck(gradient, device):
    make = Generator(0, torch.float64, device)
    z0, weights = make.normal(2, 2).requires_grad_(), (make.normal(4, 2, 2) / 2).requires_grad_()

    def run(z0, weights):
        return deeppcr.solve(lambda z, w: torch.tanh(z @ w.mT), z0, weights, solver=TIGHT, gradient=gradient).states

    assert torch.autograd.gradcheck(run, (z0, weights))


def test_second_derivatives_through_the_iterations(device):
    make = Generator(0, torch.float64, device)
    z0, weights = make.normal(1, 2).requires_grad_(), (make.normal(3, 2, 2) / 2).requires_grad_()

    def run(z0, weights):
        step = lambda z, w: torch.tanh(z @ w.mT)  # noqa: E731
        return deeppcr.solve(step, z0, weights, solver=TIGHT, gradient=Unrolled()).states

    assert torch.autograd.gradgradcheck(run, (z0, weights))


def test_second_derivatives_of_the_implicit_gradient_raise(device):
    problem = mlp(Generator(0, torch.float64, device), 10, 2)
    problem.z0.requires_grad_()
    states = problem.solve().states
    with pytest.raises(RuntimeError, match="Unrolled"):
        torch.autograd.grad(states.sum(), problem.z0, create_graph=True)


def test_transforms_and_forward_mode_raise_instead_of_being_wrong(device):
    problem = mlp(Generator(0, torch.float64, device), 10, 2)
    run = lambda z0: deeppcr.solve(problem.step, z0, problem.xs, solver=Newton()).states.sum()  # noqa: E731
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(RuntimeError, match=r"torch\.func"):
            transform(run)(problem.z0)
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.vmap(run)(problem.z0.expand(3, -1, -1))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        run(torch.autograd.forward_ad.make_dual(problem.z0, torch.ones_like(problem.z0)))


def test_the_backward_pass_can_be_repeated_and_batched_over_outputs(device):
    make = Generator(0, torch.float64, device)
    problem = mlp(make, 10, 2, width=4)
    problem.z0.requires_grad_()
    states, loop = problem.solve(solver=TIGHT).states, problem.loop()
    for index in range(4):
        (ours,) = torch.autograd.grad(states[-1, 0, index], problem.z0, retain_graph=True)
        (loops,) = torch.autograd.grad(loop[-1, 0, index], problem.z0, retain_graph=True)
        assert torch.allclose(ours, loops, atol=1e-11)


APPROXIMATE = {
    "picard": deeppcr.ScalarJacobian(1.0),
    "jacobi": deeppcr.ScalarJacobian(0.0),
    "hutchinson": deeppcr.HutchinsonJacobian(samples=2),
}


@pytest.mark.parametrize("width", [8, 40])  # the dense adjoint; vector-Jacobian products only
@pytest.mark.parametrize("name", APPROXIMATE)
def test_the_adjoint_is_true_where_the_forward_pass_approximated(name, width, device):
    make = Generator(0, torch.float64, device)
    weights = make.normal(60, width, width) * 0.3 / width**0.5
    z0, xs = make.normal(2, width).requires_grad_(), weights.requires_grad_()
    step = lambda z, w: 0.3 * z + torch.tanh(z @ w.mT)  # noqa: E731
    solver = Newton(jacobian=APPROXIMATE[name], atol=1e-13, rtol=1e-13)
    solution = deeppcr.solve(step, z0, xs, solver=solver, on_failure="raise")
    cotangent = [make.normal(60, 2, width)]
    expected = gradients(plain_loop(step, z0, xs), [z0, xs], cotangent)
    compare(gradients(solution.states, [z0, xs], cotangent), expected, 1e-9)


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
def test_the_adjoint_that_does_not_converge_is_done_step_by_step(device):
    # Rotations neither grow nor decay, and the identity is no approximation of them: sweeps do not converge.
    make = Generator(0, torch.float64, device)
    width = 40
    rotation, _ = torch.linalg.qr(make.normal(width, width))
    z0 = make.normal(1, width).requires_grad_()
    step = lambda z: 1.3 * torch.sin(z @ rotation)  # noqa: E731
    solver = Newton(jacobian=deeppcr.ScalarJacobian(0.0), max_iterations=200)
    solution = deeppcr.solve(step, z0, length=120, solver=solver)
    cotangent = [make.normal(120, 1, width)]
    expected = gradients(plain_loop(step, z0, length=120), [z0], cotangent)
    compare(gradients(solution.states, [z0], cotangent), expected, 1e-9)


def test_the_adjoint_in_slices_of_memory(device):
    make = Generator(0, torch.float64, device)
    problem = mlp(make, 33, 2, width=5)
    inputs = [leaf.requires_grad_() for leaf in (problem.z0, *problem.xs)]
    weights = [make.normal(33, 2, 5)]
    expected = gradients(problem.loop(), inputs, weights)
    for budget in (1, 4 * 2 * 25 * 8 * 7):  # one step at a time; seven
        solver = Newton(jacobian=deeppcr.DenseJacobian(memory_budget=budget), chunk=1, atol=1e-12, rtol=1e-12)
        compare(gradients(problem.solve(solver=solver).states, inputs, weights), expected, 1e-9)


@pytest.mark.filterwarnings("ignore::deeppcr.ConvergenceWarning")
def test_rows_that_influence_each_other_are_found_in_the_backward_pass(device):
    make = Generator(0, torch.float64, device)
    z0 = make.normal(3, 4).requires_grad_()
    weight = make.normal(4, 4) / 4
    step = lambda z: torch.tanh(z @ weight + 0.3 * z.mean(0))  # noqa: E731
    states = deeppcr.solve(step, z0, length=30, solver=Newton()).states
    with pytest.raises(RuntimeError, match="rows of the batch influence each other"):
        states.sum().backward()
    # With no batch dimension, the same state is one row, and right.
    states = deeppcr.solve(step, z0, length=30, batch_dims=0, solver=TIGHT).states
    (ours,) = torch.autograd.grad(states.sum(), z0)
    (loops,) = torch.autograd.grad(plain_loop(step, z0, length=30).sum(), z0)
    assert torch.allclose(ours, loops, atol=1e-10)


def test_a_wrong_given_jacobian_is_found_in_the_backward_pass(device):
    make = Generator(0, torch.float64, device)
    z0 = make.normal(2, 4).requires_grad_()
    half = lambda z: deeppcr.linear.Diagonal(0.5 * torch.cos(z))  # noqa: E731
    solver = Newton(jacobian=deeppcr.GivenJacobian(half, exact=True), chunk=1)
    states = deeppcr.solve(torch.sin, z0, length=30, solver=solver).states
    with pytest.raises(RuntimeError, match="given Jacobian is wrong"):
        states.sum().backward()


def test_after_fixed_iterations_the_adjoint_is_taken_at_the_states_as_they_are(device):
    make = Generator(0, torch.float64, device)
    problem = mlp(make, 20, 2, width=4, activation=torch.tanh, gain=2.0)
    weights, bias = (leaf.requires_grad_() for leaf in problem.xs)
    solution = problem.solve(solver=Newton(stop=deeppcr.FixedIterations(1), chunk=1))
    assert solution.result is deeppcr.Result.ITERATIONS_DONE
    states = solution.states.detach()
    assert (states - problem.loop()).abs().max() > 1e-4  # not the solution
    previous = torch.cat([problem.z0.unsqueeze(0), states[:-1]])
    adjoint, total = torch.zeros(2, 4, dtype=torch.float64, device=device), []
    for index in reversed(range(20)):
        adjoint = adjoint + 1.0  # the gradient of the sum of all states
        total.append(adjoint.sum(0))
        adjoint = (adjoint @ weights[index]) * (1 - torch.tanh(previous[index]) ** 2)
    (ours,) = torch.autograd.grad(solution.states.sum(), bias)
    assert torch.allclose(ours, torch.stack(total[::-1]).detach(), atol=1e-10)


def test_nothing_extra_is_evaluated_where_no_gradient_is_needed(device):
    problem = mlp(Generator(0, torch.float64, device), 10, 2)
    problem.z0.requires_grad_()
    with torch.no_grad():
        assert not problem.solve().states.requires_grad
    problem.z0.requires_grad_(False)
    assert not problem.solve().states.requires_grad
    assert problem.solve(gradient=Unrolled()).states.grad_fn is None
    problem.xs[0].requires_grad_()
    assert problem.solve().states.requires_grad


def test_training_a_recurrent_net_through_the_solve(device):
    make = Generator(0, torch.float64, device)
    cell = make.module(nn.GRUCell(1, 4))
    readout = make.module(nn.Linear(4, 1))
    step = deeppcr.rowwise(lambda z, x: cell(x, z))
    inputs = make.normal(40, 8, 1)
    target = inputs.cumsum(0).sin()
    optimiser = torch.optim.Adam([*cell.parameters(), *readout.parameters()], lr=0.05)
    losses = []
    for _ in range(20):
        states = deeppcr.solve(step, make.normal(8, 4) * 0, inputs, solver=Newton()).states
        loss = (readout(states) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_adjoint_that_dies_out_is_no_failure(dtype, device):
    """The usual case: a contracting sequence with a loss on its last state; far back the adjoint underflows."""
    for seed in range(5):
        make = Generator(seed, dtype, device)
        weight = make.normal(4, 4) / 4
        z0 = make.normal(3, 4).requires_grad_()
        step = lambda z, x: torch.tanh(z @ weight) + x  # noqa: B023, E731
        states = deeppcr.solve(step, z0, make.normal(300, 3, 4), solver=Newton()).states
        states[-1].square().sum().backward()
        assert z0.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_a_jacobian_rounds_does_not_add_up(dtype, device):
    """In half precision 0.99 is 0.988, and after a hundred steps off by a sixth; the loop rounds up as often as down."""
    make = Generator(0, dtype, device)
    z0, xs, seed = make.normal(2, 4), make.normal(400, 2, 4), make.normal(400, 2, 4)
    step, found = lambda z, x: z * 0.99 + 0.01 * x, []
    for solve, real in ((None, torch.float64), (None, dtype), (Newton(), dtype)):
        start = z0.to(real).requires_grad_()
        inputs = xs.to(real)
        states = (
            plain_loop(step, start, inputs)
            if solve is None
            else deeppcr.solve(step, start, inputs, solver=solve).states
        )
        found.append(torch.autograd.grad((states * seed.to(real)).sum(), start)[0].double())
    right, by_loop, ours = found
    assert (ours - right).norm() < 2 * (by_loop - right).norm()


@pytest.mark.parametrize(
    ("dtype", "length", "coupling"),
    [  # float32 has more rounding to hide it, and a weaker coupling hides better
        (torch.float32, 2000, 8e-4),
        *thorough((torch.float32, 4000, 4e-4), (torch.float64, 4000, 4e-4)),
    ],
)
def test_weak_coupling_of_rows_that_adds_up_is_found(dtype, length, coupling, device):
    """A heat equation on [points, channels] read as a batch: each step is off by little, the gradient by all of it."""
    make = Generator(0, dtype, device)
    z0 = make.normal(8, 2).requires_grad_()
    step = lambda z: z + coupling * (z.roll(1, 0) + z.roll(-1, 0) - 2 * z)  # noqa: E731
    states = deeppcr.solve(step, z0, length=length, solver=Newton()).states
    with pytest.raises(RuntimeError, match="rows of the batch influence each other"):
        states[-1].square().sum().backward()


def test_a_given_jacobian_that_is_a_little_wrong_is_found(device):
    z0 = torch.ones(1, 2, device=device, requires_grad=True)
    identity = deeppcr.GivenJacobian(lambda z: deeppcr.linear.Diagonal(torch.ones_like(z)), exact=True)
    with torch.no_grad():
        found = deeppcr.solve(lambda z: z - 1e-3 * z, z0, length=2000, solver=Newton())
    solver = Newton(jacobian=identity, chunk=1)
    states = deeppcr.solve(lambda z: z - 1e-3 * z, z0, length=2000, solver=solver, guess=found).states
    with pytest.raises(RuntimeError, match="given Jacobian is wrong"):
        states[-1].sum().backward()


def test_parameters_that_only_later_steps_use(device):
    weight = torch.tensor([0.5, 0.7], device=device, requires_grad=True)
    plain = lambda z: torch.sin(z) + 1  # noqa: E731
    weighted = lambda z: weight * torch.sin(z) + 1  # noqa: E731
    z0 = torch.zeros(1, 2, device=device)
    states = deeppcr.solve([plain, plain, weighted, weighted], z0, solver=Newton()).states
    (ours,) = torch.autograd.grad(states.sum(), weight)
    z = weighted(weighted(plain(plain(z0)))) + weighted(plain(plain(z0)))
    (loops,) = torch.autograd.grad(z.sum(), weight)
    assert torch.allclose(ours, loops, atol=1e-4)
    branching = lambda z, x: torch.sin(z) + x if float(x.sum()) < 0 else weight * torch.sin(z) + x  # noqa: E731
    xs = torch.tensor([[-1.0], [1.0], [2.0]], device=device)
    assert deeppcr.solve(branching, z0, xs, solver=Newton()).states.requires_grad


def test_what_a_step_closes_over_must_not_change_before_the_backward_pass(device):
    make = Generator(0, torch.float64, device)
    layers = [make.module(nn.Linear(4, 4)) for _ in range(3)]
    z = make.normal(2, 4).requires_grad_()
    for layer in layers:
        z = deeppcr.solve(lambda s: torch.tanh(layer(s)), z, length=10, solver=Newton()).states[-1]  # noqa: B023
    with pytest.raises(RuntimeError, match="rebound since the forward pass"):
        z.sum().backward()


def test_rows_of_very_different_gradients_are_judged_by_themselves(device):
    make = Generator(0, torch.float64, device)
    width = 40
    rates = torch.tensor([[0.1], [0.9]], dtype=torch.float64, device=device)
    z0 = make.normal(2, width).requires_grad_()
    step = lambda z: rates * torch.sin(z)  # noqa: E731
    states = deeppcr.solve(step, z0, length=60, solver=deeppcr.Jacobi(max_iterations=300)).states
    loss = torch.tensor([[1e9], [1.0]], dtype=torch.float64, device=device)
    (ours,) = torch.autograd.grad((states * loss).sum(), z0)
    (loops,) = torch.autograd.grad((plain_loop(step, z0, length=60) * loss).sum(), z0)
    assert ((ours - loops).abs().amax(-1) <= 1e-8 * loops.abs().amax(-1)).all()


@pytest.mark.parametrize("solver", [Newton(), deeppcr.Picard(), deeppcr.Picard(shrink=0.5)])
def test_unrolled_derivatives_are_right_after_a_warm_start(solver, device):
    z0 = torch.full((1, 1), 0.3, dtype=torch.float64, device=device)
    weight = torch.tensor(0.8, dtype=torch.float64, device=device, requires_grad=True)
    step = lambda z: torch.sin(weight * z) + 0.5  # noqa: E731
    with torch.no_grad():
        found = deeppcr.solve(step, z0, length=20, solver=Newton())

    def derivatives(last):
        (first,) = torch.autograd.grad(last.sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first, weight)
        return first.detach(), second

    ours = derivatives(deeppcr.solve(step, z0, length=20, solver=solver, guess=found, gradient=Unrolled()).states[-1])
    loops = derivatives(plain_loop(step, z0, length=20)[-1])
    for a, b in zip(ours, loops, strict=True):
        assert torch.allclose(a, b, rtol=1e-8)


def test_mixed_precision_steps_on_float32_states(device):
    make = Generator(0, torch.float32, device)
    weight = (make.normal(4, 4) / 4).requires_grad_()
    step = lambda z, x: torch.tanh(z @ weight).float() + x  # noqa: E731
    with torch.autocast(device.type, dtype=torch.bfloat16):
        states = deeppcr.solve(
            step, make.normal(3, 4), make.normal(50, 3, 4), solver=Newton(atol=1e-2, rtol=1e-2)
        ).states
    states.square().sum().backward()
    assert weight.grad.isfinite().all()


def test_a_gradient_that_overflows_is_named(device):
    z0 = torch.tensor([[0.3]], device=device, requires_grad=True)
    with pytest.warns(deeppcr.ConvergenceWarning):
        states = deeppcr.solve(lambda z: 3.99 * z * (1 - z), z0, length=250, solver=Newton()).states
    with pytest.raises(RuntimeError, match="overflows"):
        states.sum().backward()


def test_a_batch_of_gradients_is_refused_in_one_line(device):
    z0 = torch.ones(3, 2, device=device, requires_grad=True)
    states = deeppcr.solve(torch.sin, z0, length=20, solver=Newton()).states
    with pytest.raises(RuntimeError, match="one gradient at a time"):
        torch.autograd.grad(states, z0, torch.randn(4, 20, 3, 2, device=device), is_grads_batched=True)


@pytest.mark.parametrize("solver", [Newton(), deeppcr.Picard()])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_come_through_as_in_the_loop(bad, solver, device):
    make = Generator(0, torch.float64, device)
    z0, weights = make.normal(3, 40).requires_grad_(), (make.normal(30, 40, 40) / 20).requires_grad_()
    xs = make.normal(30, 3, 40).requires_grad_()
    step = lambda z, x: torch.tanh(z @ x[0]) + x[1]  # noqa: E731
    states = deeppcr.solve(step, z0, (weights, xs), solver=solver).states
    loop = plain_loop(step, z0, (weights, xs))
    gradients = make.normal(30, 3, 40)
    gradients[20, 1, 2] = bad
    ours = torch.autograd.grad(states, [z0, weights, xs], gradients)
    loops = torch.autograd.grad(loop, [z0, weights, xs], gradients)
    for a, b in zip(ours, loops, strict=True):
        assert not b.isfinite().all()
        assert torch.allclose(a, b, atol=1e-8, equal_nan=True)


@pytest.mark.parametrize("solver", [Newton(), Newton(chunk=1), Newton(chunk=7)])
def test_a_row_that_is_not_finite_leaves_the_gradients_of_the_others(solver, device):
    make = Generator(0, torch.float64, device)
    z0, xs = make.normal(3, 4).requires_grad_(), make.normal(40, 3, 4)
    xs[30, 1, 2] = float("nan")
    step = lambda z, x: torch.tanh(z + x)  # noqa: E731
    with pytest.warns(deeppcr.ConvergenceWarning):
        solution = deeppcr.solve(step, z0, xs, solver=solver)
    loop = plain_loop(step, z0, xs)
    for loss in (lambda states: states[:, ::2].sum(), lambda states: states[:20].sum()):
        (ours,), (loops,) = (
            torch.autograd.grad(loss(states), z0, retain_graph=True) for states in (solution.states, loop)
        )
        assert ours[::2].isfinite().all()
        assert torch.allclose(ours, loops, atol=1e-10, equal_nan=True)


def test_rows_with_finite_gradients_are_checked_whatever_the_others_hold(device):
    z0 = Generator(0, torch.float64, device).normal(3, 4).requires_grad_()
    coupled = deeppcr.solve(lambda z: torch.sin(z + 0.1 * z.mean(0)), z0, length=20, solver=Newton()).states
    gradients = torch.ones_like(coupled)
    gradients[:, 1] = float("inf")
    with pytest.raises(RuntimeError, match="the adjoint does not hold"):
        coupled.backward(gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("last", ["softmax", "layer norm", "direction"])
def test_a_gradient_that_no_step_lets_through_is_rounding_and_no_error(last, dtype, device):
    """The sum of a softmax is 1 whatever it is of: what the loop returns is rounding, and so is this."""
    normalise = {
        "softmax": lambda z: torch.softmax(z, -1),
        "layer norm": lambda z: torch.nn.functional.layer_norm(z, (6,)),
        "direction": lambda z: torch.nn.functional.normalize(z, dim=-1),
    }[last]
    make = Generator(0, dtype, device)
    z0, weights = make.normal(5, 6).requires_grad_(), make.normal(70, 6, 6) / 2
    step = lambda z, weight: normalise(torch.tanh(z @ weight))  # noqa: E731
    for length in (2, 70):
        states = deeppcr.solve(step, z0, weights[:length], solver=Newton()).states
        loss = states[-1].square().sum() if last == "direction" else states[-1].sum()
        (gradient,) = torch.autograd.grad(loss, z0)
        assert gradient.abs().max() < 1e4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mistake_far_back_where_gradients_have_vanished_still_shows(dtype, device):
    """There they are a millionth of what they are at the end; optimisers that divide by their size make much of them."""
    make = Generator(0, dtype, device)
    weights = make.normal(40, 8, 8) / 5

    def layer(index):
        weight = weights[index]
        if index >= 5:
            return lambda z: torch.tanh(z @ weight)
        return lambda z: torch.tanh(z @ weight) + 0.3 * torch.tanh(z).mean(0)  # rows that influence each other

    z0 = make.normal(5, 8).requires_grad_()
    states = deeppcr.solve([layer(index) for index in range(40)], z0, solver=Newton()).states
    with pytest.raises(RuntimeError, match="the adjoint does not hold"):
        states[-1].sum().backward()


@pytest.mark.parametrize("depth", [1, 50])
def test_loss_scaling_skips_a_step_whose_gradients_overflow(depth, device):
    layers = torch.nn.ModuleList(torch.nn.Linear(3, 3, device=device) for _ in range(depth))
    optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**120)
    before = [p.detach().clone() for p in layers.parameters()]
    states = deeppcr.solve(layers, torch.ones(2, 3, device=device), solver=Newton()).states
    scaler.scale(states.sum() * 1e30).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2.0**120
    for parameter, old in zip(layers.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_a_derivative_that_is_not_finite_is_called_that(device):
    """The trap of torch.where: the branch that is not taken has the derivative NaN, and 0 times that is NaN."""
    z0, far = torch.full((2, 1), 0.5, device=device, requires_grad=True), torch.zeros(9, 2, 1, device=device)
    far[5, 1] = 100.0  # in the sixth step

    def step(z, x):
        return torch.where(torch.ones_like(z) > 0, 0.5 * torch.cos(z), torch.sqrt(z - x))

    states = deeppcr.solve(step, z0, far, solver=Newton()).states
    assert torch.isfinite(states).all()
    with pytest.raises(RuntimeError, match=r"the derivative of step 6 is not finite \(row 1\)"):
        states.sum().backward()


def test_iterations_that_the_loop_finished_keep_their_gradient():
    """A row that is not finite sends the others to the loop as well; through a fixed number of iterations, too."""
    weights = 0.4 * torch.randn(40, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights[1, 1] = torch.nan
    z0 = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)

    def gradient(**settings):
        states = deeppcr.solve(
            lambda z, w: torch.tanh((w @ z.unsqueeze(-1)).squeeze(-1)), z0, weights, **settings
        ).states
        return torch.autograd.grad(states[:, 0].sum(), z0)[0][0]

    with pytest.warns(deeppcr.ConvergenceWarning, match="not finite"):
        found = gradient(solver=Newton(stop=deeppcr.FixedIterations(3)), gradient=Unrolled())
    with pytest.warns(deeppcr.ConvergenceWarning, match="not finite"):
        expected = gradient(solver=deeppcr.Loop())
    torch.testing.assert_close(found, expected)
