"""Rows of different lengths: each is what a loop of its own over its own inputs gives, whatever pads them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import deeppcr
from deeppcr import DiagonalJacobian, GivenJacobian, Jacobi, Loop, Newton, Picard, StepError, Unrolled
from deeppcr.linear import Dense
from kernel_support import thorough

SOLVERS = {
    "planned": None,
    "loop": Loop(),
    "newton": Newton(),
    "chunk 1": Newton(chunk=1),
    "chunk 4": Newton(chunk=4),
    "picard": Picard(chunk=1),
    "jacobi": Jacobi(chunk=1),
    "diagonal": Newton(jacobian=DiagonalJacobian()),
}


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def by_rows(step, z0, xs, lengths):
    """Of every row by itself the loop over its first steps; nests of [L, B, ...], [B, ...], batches of one dimension."""
    length, rows = len(pytree.tree_leaves(xs)[0]), []
    for b, count in enumerate(lengths.tolist()):
        z = pytree.tree_map(lambda leaf, b=b: leaf[b : b + 1], z0)
        states = []
        for l in range(length):
            if l < count:
                z = step(z, pytree.tree_map(lambda leaf, l=l, b=b: leaf[l, b : b + 1], xs))
            states.append(z)
        rows.append(pytree.tree_map(lambda *leaves: torch.stack(leaves), *states))
    return pytree.tree_map(lambda *leaves: torch.cat(leaves, 1), *rows)


def padded(xs, lengths, padding=float("nan")):
    """A copy whose rows hold something else behind their lengths."""
    active = torch.arange(len(xs), device=xs.device).view(-1, *(1,) * lengths.ndim) < lengths.to(xs.device)
    active = active.view(*active.shape, *(1,) * (xs.ndim - active.ndim))
    return (
        xs.detach()
        .where(active, torch.tensor(padding, dtype=xs.dtype, device=xs.device))
        .requires_grad_(xs.requires_grad)
    )


def assert_same(found, expected, inputs, others, weight=None):
    """States, and gradients by ``inputs`` of the one and ``others`` of the other."""
    found, expected = ([*pytree.tree_leaves(each)] for each in (found, expected))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    seeds = [normal(*leaf.shape) for leaf in expected]
    for one, other in zip(
        torch.autograd.grad(found, inputs, seeds, materialize_grads=True),
        torch.autograd.grad(expected, others, seeds, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("lengths", [[13, 0, 5, 12, 1], [0] * 5, *thorough([3, 2, 0, 1, 3])])
def test_rows_are_loops_of_their_own(name, lengths):
    weight = normal(3, 4).requires_grad_()
    step = lambda z, x: torch.tanh(0.4 * z + x @ weight)  # noqa: E731
    if name not in ("jacobi", "diagonal", "picard"):
        step = lambda z, x: torch.tanh(0.4 * z.roll(1, -1) + x @ weight)  # noqa: E731
    z0, xs, lengths = normal(5, 4).requires_grad_(), normal(13, 5, 3).requires_grad_(), torch.tensor(lengths)
    filled = padded(xs, lengths)
    solution = deeppcr.solve(step, z0, filled, lengths=lengths, solver=SOLVERS[name])
    assert solution.states.shape == (13, 5, 4)
    assert torch.equal(solution.states[:, lengths == 0], z0.expand(13, 5, 4)[:, lengths == 0])
    expected = by_rows(step, z0, xs, lengths)
    assert_same(solution.states, expected, (z0, filled, weight), (z0, xs, weight))


@settings(max_examples=15)
@given(data=st.data())
def test_random_lengths(data):
    length, rows = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 4))
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, length), min_size=rows, max_size=rows)))
    padding = data.draw(st.sampled_from([float("nan"), float("inf"), 5.0, 0.0]))
    solver = data.draw(st.sampled_from([None, Loop(), Newton(), Newton(chunk=3)]))
    gain = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    step = lambda z, x: torch.sin(gain * z) + x.exp()  # noqa: E731
    z0, xs = normal(rows, 2).requires_grad_(), normal(length, rows, 2).requires_grad_()
    filled = padded(xs, lengths, padding)
    solution = deeppcr.solve(step, z0, filled, lengths=lengths, solver=solver)
    assert_same(solution.states, by_rows(step, z0, xs, lengths), (z0, filled, gain), (z0, xs, gain))


@pytest.mark.parametrize("solver", [None, Loop(), Newton()])
def test_nests_and_inputs_that_all_rows_share(solver):
    """Also where what is shared has as many entries as there are rows, so that its shape does not tell."""
    rows = 3
    weights, noise, times = normal(9, rows, rows).div(3), {"n": normal(9, rows, 3)}, normal(9)
    z0, lengths = {"b": normal(rows, 3), "a": normal(rows, 2, 2)}, torch.tensor([4, 7, 0])

    def step(z, x):
        w, noise, t = x
        return {"a": torch.cos(z["a"]) * t, "b": torch.tanh(z["b"]) @ w + noise["n"]}  # in another order

    one_row = lambda w, noise, t: (  # noqa: E731
        w.unsqueeze(1).expand(9, rows, rows, rows), noise, t.unsqueeze(1).expand(9, rows)
    )  # fmt: skip

    def row_step(z, x):
        return dict(reversed(step(z, (x[0][0], x[1], x[2].view(1, 1, 1))).items()))

    leaves = [weights.requires_grad_(), noise["n"].requires_grad_(), times.requires_grad_()]
    expected = by_rows(row_step, z0, one_row(weights, noise, times), lengths)
    filled = [each.detach().clone() for each in leaves]
    for each in filled:
        each[7:] = torch.nan  # where no row is left
        each.requires_grad_()
    solution = deeppcr.solve(
        step, z0, (filled[0], {"n": filled[1]}, filled[2]), lengths=lengths, solver=solver
    )  # fmt: skip
    assert list(solution.states) == ["b", "a"]
    assert_same(solution.states, expected, filled, leaves)


@pytest.mark.parametrize("solver", [Loop(), Newton()])
def test_batches_of_two_dimensions_and_whole_numbers(solver):
    """A padding that is no number of a row raises where it is read, with lengths, too: who knows whose it is."""
    table, lengths = normal(6, 2).requires_grad_(), torch.tensor([[3, 0, 8], [8, 1, 5]])
    z0, tokens = normal(2, 3, 2), torch.randint(6, (8, 2, 3))
    step = lambda z, token: torch.sin(z) * 0.5 + table[token]  # noqa: E731
    filled = padded(tokens, lengths, -100)
    with pytest.raises(IndexError):
        deeppcr.solve(step, z0, filled, batch_dims=2, lengths=lengths, solver=solver)
    solution = deeppcr.solve(step, z0, padded(tokens, lengths, 0), batch_dims=2, lengths=lengths, solver=solver)
    expected = by_rows(step, z0.flatten(0, 1), tokens.flatten(1, 2), lengths.flatten()).unflatten(1, (2, 3))
    assert_same(solution.states, expected, (table,), (table,))


@pytest.mark.parametrize("solver", [Loop(), Newton()])
def test_a_row_may_end_where_its_step_does(solver):
    """The state that is left is none that the step can go on from: that does not matter either, for gradients too."""
    step = lambda z: torch.sqrt(z - 1)  # noqa: E731
    z0 = torch.tensor([[2.5], [30.0], [5.0]], dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([2, 3, 2])
    solution = deeppcr.solve(step, z0, length=6, lengths=lengths, solver=solver)
    assert torch.isnan(step(solution.states[-1, 0]))
    stepped = lambda z, _: step(z)  # noqa: E731
    assert_same(solution.states, by_rows(stepped, z0, normal(6, 3), lengths), (z0,), (z0,))


@pytest.mark.parametrize("solver", [Loop(), Newton()])
def test_lists_of_steps_and_recurrent_cells(solver):
    layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(6)]).double()
    z0, lengths = normal(4, 3).requires_grad_(), torch.tensor([6, 2, 0, 3])
    solution = deeppcr.solve(layers, z0, lengths=lengths, solver=solver)
    states, z = [], z0
    for l, layer in enumerate(layers):
        z = torch.where((l < lengths).unsqueeze(-1), layer(z), z)
        states.append(z)
    parameters = [*layers.parameters()]
    assert_same(solution.states, torch.stack(states), (z0, *parameters), (z0, *parameters))
    if solver == Newton():
        assert "stacked in 1 groups" in str(solution.plan)
    cell = nn.GRUCell(2, 3).double()
    xs = normal(7, 4, 2)
    step = deeppcr.rowwise(lambda z, x: cell(x, z))
    solution = deeppcr.solve(step, z0, padded(xs, lengths), lengths=lengths, solver=solver)
    parameters = [*cell.parameters()]
    assert_same(solution.states, by_rows(step.step, z0, xs, lengths), (z0, *parameters), (z0, *parameters))


def test_guesses_see_xs_as_they_are_given():
    step, lengths = lambda z, x: torch.tanh(z) + x, torch.tensor([4, 9])
    z0, xs = normal(2, 3), normal(9, 2, 3)
    seen = []

    def guess(z0, xs):
        seen.append(xs)
        return xs

    solution = deeppcr.solve(step, z0, xs, lengths=lengths, guess=guess, solver=Newton(chunk=1))
    assert seen == [xs]
    torch.testing.assert_close(solution.states, by_rows(step, z0, xs, lengths))


def test_unrolled_gradients():
    step, lengths = lambda z, x: torch.tanh(z) + x, torch.tensor([4, 9])
    z0, xs = normal(2, 3).requires_grad_(), normal(9, 2, 3)
    solution = deeppcr.solve(step, z0, padded(xs, lengths), lengths=lengths, gradient=Unrolled())
    assert_same(solution.states, by_rows(step, z0, xs, lengths), (z0,), (z0,))


def test_check_and_predict_know_of_lengths():
    step, lengths = lambda z, x: torch.tanh(z) + x, torch.tensor([4, 9])
    z0, filled = normal(2, 3), padded(normal(9, 2, 3), lengths)
    assert [finding.kind for finding in deeppcr.check(step, z0, filled)] != []
    assert deeppcr.check(step, z0, filled, lengths=lengths) == []
    assert "not finite" in deeppcr.predict(step, z0, filled).errors
    assert "not finite" not in deeppcr.predict(step, z0, filled, lengths=lengths).errors
    kinds = [finding.kind for finding in deeppcr.check(lambda z, x: z - z.mean(0), z0, filled, lengths=lengths)]
    assert "rows" in kinds


@pytest.mark.parametrize(
    ("lengths", "error", "words"),
    [
        (torch.tensor([4, -1]), ValueError, "lengths: expected numbers from 0 to L = 9, got -1"),
        (torch.tensor([4, 10]), ValueError, "lengths: expected numbers from 0 to L = 9, got 10"),
        (torch.tensor([4]), ValueError, r"lengths: expected one for each row, \[2\], got \[1\]"),
        (torch.tensor(4), ValueError, "lengths: expected one for each row"),
        (torch.tensor([4.0, 9.0]), TypeError, "lengths: expected a tensor of integers"),
        (torch.tensor([True, False]), TypeError, "torch.bool"),
        (
            [[1, 2], [3]],
            TypeError,
            "lengths: expected a tensor of integers, or a list of them, one for each row, got list",
        ),
        (
            [{"a": 1}, 2],
            TypeError,
            "lengths: expected a tensor of integers, or a list of them, one for each row, got list",
        ),
        ([4, 9.5], TypeError, "lengths: expected a tensor of integers, or a list of them, one for each row, got list"),
    ],
)
def test_wrong_lengths_are_named(lengths, error, words):
    for call in (deeppcr.solve, deeppcr.check, deeppcr.predict):
        with pytest.raises(error, match=words):
            call(lambda z, x: torch.tanh(z) + x, normal(2, 3), normal(9, 2, 3), lengths=lengths)


def test_what_else_is_refused():
    step, z0, xs, lengths = lambda z, x: torch.tanh(z) + x, normal(2, 3), normal(9, 2, 3), torch.tensor([4, 9])
    with pytest.raises(ValueError, match="lengths: the states have no batch dimension"):
        deeppcr.solve(step, z0, xs, lengths=lengths, batch_dims=0)
    solver = Newton(jacobian=GivenJacobian(lambda z, x: Dense(torch.diag_embed(1 - torch.tanh(z) ** 2))))
    with pytest.raises(ValueError, match="lengths: a GivenJacobian"):
        deeppcr.solve(step, z0, xs, lengths=lengths, solver=solver)
    with pytest.raises(ValueError, match="xs: lengths differ"):
        deeppcr.solve(step, z0, xs, length=8, lengths=lengths)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda z, x: (z + x)[..., :1], "changes the state's shape"),
        (lambda z, x: (z + x).float(), "changes the state's dtype"),
        (lambda z, x: (z + x, z), "changes the state's structure"),
        (lambda z, x: None, "returns None"),
    ],
)
@pytest.mark.parametrize("solver", [None, Newton()])
def test_a_step_that_returns_no_state_is_told_so(step, words, solver):
    """Shapes and dtypes that would be made to fit, too."""
    with pytest.raises(StepError, match=words):
        deeppcr.solve(step, normal(2, 3), normal(9, 2, 3), lengths=torch.tensor([4, 9]), solver=solver)


@pytest.mark.parametrize("solver", [None, Loop(), Newton()])
def test_what_all_rows_share_is_left_alone_whatever_its_shape(solver):
    """As many numbers as there are rows, some of which a step does not look at, or compares."""
    shared, lengths, z0 = torch.rand(10, 4, dtype=torch.float64), torch.tensor([10, 3, 0, 5]), normal(4, 1)
    for step in (
        lambda z, c: z + c[3],
        lambda z, c: torch.tanh(c[1] * z + c[2]),
        lambda z, c: torch.where(c[0] > 0.9, 0 * z, z + c[1]),
    ):
        z, states = z0, []
        for l in range(10):
            z = torch.where((l < lengths).unsqueeze(-1), step(z, shared[l]), z)
            states.append(z)
        found = deeppcr.solve(step, z0, shared, lengths=lengths, solver=solver)
        torch.testing.assert_close(found.states, torch.stack(states), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("solver", [None, Loop()])
def test_rows_that_look_at_each_other_see_those_that_are_done_as_they_are(solver):
    lengths, z, xs = torch.tensor([6, 2, 0]), normal(3, 2), normal(6, 3, 2)
    step = lambda z, x: torch.tanh(z - z.mean(0) + x)  # noqa: E731
    found, states = deeppcr.solve(step, z, xs, lengths=lengths, solver=solver), []
    for l in range(6):
        z = torch.where((l < lengths).unsqueeze(-1), step(z, xs[l]), z)
        states.append(z)
    torch.testing.assert_close(found.states, torch.stack(states), rtol=1e-9, atol=1e-12)


def test_lengths_of_two_dimensions_of_rows_are_nested_lists():
    found = deeppcr.solve(
        lambda z, x: z + x, torch.zeros(2, 2, 1), torch.ones(3, 2, 2, 1), lengths=[[0, 1], [2, 3]], batch_dims=2
    )
    assert found.final.squeeze(-1).tolist() == [[0, 1], [2, 3]]
    with pytest.raises(TypeError, match="lengths: expected a tensor of integers"):
        deeppcr.solve(
            lambda z, x: z + x, torch.zeros(2, 2, 1), torch.ones(3, 2, 2, 1), lengths=[[0, 1.5], [2, 3]], batch_dims=2
        )
