"""Loops that look back further than one state, written so that they do not."""

import pytest
import torch

import deeppcr
from deeppcr import Newton
from problems import Generator, plain_loop, relative_error


def layer(z, x):
    weight, bias = x
    return torch.tanh(z) @ weight.mT + bias


def resnet_loop(z, xs, skip):
    """The paper's equation: every skip-th layer adds the state before the skip."""
    states = []
    for index in range(len(xs[0])):
        if index % skip == 0:
            before = z
        z = layer(z, (xs[0][index], xs[1][index]))
        if index % skip == skip - 1:
            z = z + before
            states.append(z)
    return torch.stack(states)


@pytest.mark.parametrize("skip", [1, 2, 4])
def test_skip_connections_collapse(skip, device):
    make = Generator(0, torch.float64, device)
    xs, z0 = make.linear_layers(8 * skip, 6), make.normal(3, 6)
    step, grouped = deeppcr.collapse(layer, xs, skip)
    solution = deeppcr.solve(step, z0, grouped, on_failure="raise", solver=Newton())
    assert relative_error(solution.states, resnet_loop(z0, xs, skip)) < 1e-9


def test_collapse_with_another_connection_and_its_mistakes(device):
    make = Generator(0, torch.float64, device)
    xs, z0 = make.linear_layers(12, 6), make.normal(3, 6)
    step, grouped = deeppcr.collapse(layer, xs, 3, connect=lambda new, old: 0.5 * (new + old))
    assert torch.allclose(
        step(z0, (grouped[0][0], grouped[1][0]))[0], 0.5 * (plain_loop(layer, z0, (xs[0][:3], xs[1][:3]))[-1] + z0)[0]
    )
    with pytest.raises(ValueError, match="12 layers are not a multiple of skip = 5"):
        deeppcr.collapse(layer, xs, 5)
    with pytest.raises(ValueError, match="skip: at least 1"):
        deeppcr.collapse(layer, xs, 0)
    with pytest.raises(TypeError, match="xs: expected tensors"):
        deeppcr.collapse(layer, [1.0], 1)


def test_layers_inside_one_long_skip(device):
    make = Generator(0, torch.float64, device)
    xs, z0 = make.linear_layers(100, 6), make.normal(3, 6)
    inside = deeppcr.solve(layer, z0, xs, solver=Newton())
    output = inside.states[-1] + z0
    assert relative_error(output, plain_loop(layer, z0, xs)[-1] + z0) < 1e-9


def test_nested_skips_are_two_solves(device):
    """As in a U-net: layer L + k of the right half sees the output of layer L - k of the left half."""
    make = Generator(0, torch.float64, device)
    left_xs, right_xs, z0 = make.linear_layers(50, 6), make.linear_layers(50, 6), make.normal(3, 6).requires_grad_()
    up = lambda z, x: layer(z, x[0]) + 0.5 * x[1]  # noqa: E731

    left = deeppcr.solve(layer, z0, left_xs, solver=Newton()).states
    right = deeppcr.solve(up, left[-1], (right_xs, left.flip(0)), solver=Newton()).states

    loop_left = plain_loop(layer, z0, left_xs)
    loop_right = plain_loop(up, loop_left[-1], (right_xs, loop_left.flip(0)))
    assert relative_error(right, loop_right) < 1e-9
    (ours,) = torch.autograd.grad(right[-1].sum(), z0)
    (loops,) = torch.autograd.grad(loop_right[-1].sum(), z0)
    assert torch.allclose(ours, loops, atol=1e-9)


def windowed(states, x):
    newest, *older = states
    total = 0.4 * torch.tanh(newest) + x
    for weight, old in zip((0.3, 0.2, 0.1), older, strict=False):
        total = total + weight * torch.sin(old)
    return total


def history_loop(states, xs):
    states, found = list(states), []
    for x in xs:
        new = windowed(tuple(states), x)
        states = [new, *states[:-1]]
        found.append(new)
    return torch.stack(found)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 5, "auto"])
def test_a_window_of_earlier_states(window, chunk, device):
    make = Generator(0, torch.float64, device)
    z0, xs = tuple(make.normal(2, 3) for _ in range(window)), make.normal(60, 3)
    step = deeppcr.with_history(windowed, window)
    solution = deeppcr.solve(step, z0, xs, solver=Newton(chunk=chunk), on_failure="raise")
    assert relative_error(solution.states[0], history_loop(z0, xs)) < 1e-9
    if chunk == "auto":
        assert solution.plan.chunk >= window


def test_the_structure_of_a_window_is_used(device, monkeypatch):
    """Within a chunk no product of blocks as wide as the window is formed: states that are passed on cost nothing."""
    make = Generator(0, torch.float64, device)
    window, width = 4, 3
    z0, xs = tuple(make.normal(2, width) for _ in range(window)), make.normal(64, width)
    products = []
    compose, bmm = deeppcr.linear.Dense.compose, torch.bmm

    def counted(self, first):
        products.append(len(self))
        return compose(self, first)

    def counted_by_row(left, right):
        products.append(len(left) / 2)
        return bmm(left, right)

    monkeypatch.setattr(deeppcr.linear.Dense, "compose", counted)
    monkeypatch.setattr(torch, "bmm", counted_by_row)
    solver = Newton(chunk=8, stop=deeppcr.FixedIterations(1), linear=deeppcr.PCR())
    deeppcr.solve(deeppcr.with_history(windowed, window), z0, xs, solver=solver)
    assert sum(products) == 6 + 4  # PCR on the 7 couplings of 8 chunk ends, and nothing for the 64 steps


def test_histories_that_cannot_work():
    with pytest.raises(ValueError, match="lower-triangular"):
        deeppcr.with_history(windowed, "all")
    with pytest.raises(ValueError, match="window: expected"):
        deeppcr.with_history(windowed, 0)
    with pytest.raises(ValueError, match="starts from a tuple of 3 states"):
        deeppcr.solve(
            deeppcr.with_history(windowed, 3), (torch.ones(2), torch.ones(2)), torch.ones(5, 2), solver=Newton()
        )


def test_bidirectional_recurrences(device):
    make = Generator(0, torch.float64, device)
    weight, xs, z0 = make.normal(4, 4) / 4, make.normal(50, 3, 4), make.normal(3, 4)
    step = lambda z, x: torch.tanh(z @ weight + x)  # noqa: E731
    both = torch.cat(
        [
            deeppcr.solve(step, z0, xs, solver=Newton()).states,
            deeppcr.solve(step, z0, xs.flip(0), solver=Newton()).states.flip(0),
        ],
        -1,
    )
    loop = torch.cat([plain_loop(step, z0, xs), plain_loop(step, z0, xs.flip(0)).flip(0)], -1)
    assert relative_error(both, loop) < 1e-9


def test_newton_needs_fewer_iterations_than_jacobi_on_such_sequences(device):
    make = Generator(0, torch.float64, device)
    z0, xs = tuple(make.normal(1, 3) for _ in range(3)), make.normal(200, 3)
    step = deeppcr.with_history(windowed, 3)
    newton = deeppcr.solve(step, z0, xs, solver=Newton(chunk=1), on_failure="raise")
    jacobi = deeppcr.solve(step, z0, xs, solver=deeppcr.Jacobi(max_iterations=400), on_failure="raise")
    assert relative_error(newton.states, jacobi.states) < 1e-8
    assert int(newton.iterations.max()) * 3 < int(jacobi.iterations.max())
