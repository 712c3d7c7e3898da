"""``scan`` is the loop: its carries, outputs and gradients, whatever rides along with the state."""

import pytest
import torch

import deeppcr
from deeppcr import Loop, Newton, Result, scan
from kernel_support import thorough
from plain_scan import SOLVERS, assert_same, normal, plain_scan


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 3, 65, *thorough(63, 1000)])
def test_values_and_gradients_are_those_of_the_loop(length, solver, device):
    weight, gain, start = normal(3, 3, device=device), normal(2, device=device), normal(3, device=device)
    xs = {"drive": normal(length, 3, device=device), "scale": normal(length, device=device)}
    seen = (torch.zeros((), dtype=torch.long, device=device), torch.tensor([False], device=device))

    def combine(carry, x):
        h, (count, high) = carry["h"], carry["seen"]
        after = torch.tanh(0.4 * weight @ h) + x["drive"] * (1 + count % 3)
        return {"h": after, "seen": (count + 1, high | (x["scale"] > 1))}, (h[:2] * gain * x["scale"], [count, after])

    def evaluated(run, **options):
        carry, ys, *more = run(combine, {"h": start, "seen": seen}, xs, **options)
        total = carry["h"].sin().sum() + ys[0].cos().sum() + ys[1][1].exp().mean()
        return (carry, ys, torch.autograd.grad(total, [weight, gain, start, *xs.values()])), more

    found, (solution,) = evaluated(scan, solver=solver, return_solution=True)
    assert_same(found, evaluated(plain_scan)[0], rtol=1e-8, atol=1e-9)
    if solver is not None or device.type == "cpu":  # by default a GPU may take either way
        assert solution.result is (Result.CONVERGED if isinstance(solver, Newton) else Result.LOOP)
    assert [leaf.shape for leaf in solution.states] == [(length, 3)]


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "reverse"])
def test_it_gives_what_the_scan_of_pytorch_gives(reverse):
    from torch._higher_order_ops import scan as theirs

    def combine(carry, x):
        h, count = carry
        after = torch.sin(h) + x["a"] * x["b"]
        return (after, count + 1), {"both": after * x["b"], "count": count * 2}

    init, xs = (torch.randn(4), torch.tensor(3)), {"a": torch.randn(7, 4), "b": torch.randn(7, 1)}
    expected = theirs(combine, init, xs, reverse=reverse)
    for solver in SOLVERS:
        assert_same(scan(combine, init, xs, reverse=reverse, solver=solver), expected)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_steps_lie_along_any_dimension(dim, solver, device):
    xs = normal(4, 5, 3, device=device)
    init = torch.zeros_like(xs.select(dim, 0))

    def combine(carry, x):
        after = 0.5 * torch.sin(carry) + x
        return after, (after.cos(), after.sum())

    expected = plain_scan(combine, init, xs, dim=dim % 3, reverse=True)
    assert_same(scan(combine, init, xs, dim=dim, reverse=True, solver=solver), expected, rtol=1e-8, atol=1e-9)


def test_rows_that_are_declared_are_solved_each(device):
    weight, xs = normal(3, 3, device=device), normal(65, 4, 3, device=device)
    combine = lambda h, x: ((after := torch.tanh(h @ weight * 0.3) + x), after.square())  # noqa: E731
    init = normal(4, 3, device=device)
    carry, ys, solution = scan(combine, init, xs, batch_dims=1, solver=Newton(), return_solution=True)
    assert solution.iterations.shape == (4,)
    assert solution.result is Result.CONVERGED
    assert_same((carry, ys), plain_scan(combine, init, xs), rtol=1e-8, atol=1e-9)


LOOPS = {
    "two dtypes": ((torch.ones(2), torch.ones(3, dtype=torch.float64)), "several dtypes"),
    "an infinity": ((torch.full((2,), -torch.inf), torch.ones(3)), "not finite"),
    "nothing": ((torch.ones(0), torch.ones(3)), "empty"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_carries_that_no_solve_takes_are_left_to_the_loop(name):
    init, why = LOOPS[name]
    combine = lambda c, x: ((torch.maximum(c[0], x), c[1] * x), (c[0], c[1]))  # noqa: E731
    xs = torch.rand(9, 1)
    carry, ys, solution = scan(combine, init, xs, solver=Newton(), return_solution=True)
    assert_same((carry, ys), plain_scan(combine, init, xs))
    assert why in str(solution.plan)


def test_a_loop_that_leaves_the_numbers_says_where():
    combine = lambda c, x: (c * x, c)  # noqa: E731
    xs = torch.tensor([1.0, 2.0, torch.inf, 1.0])
    *_, solution = scan(combine, torch.ones(2), xs, solver=Loop(), return_solution=True)
    assert (solution.result, solution.exact_steps.item()) == (Result.NON_FINITE, 2)
    assert solution.message.startswith("step 3 ")


def test_integers_alone_need_no_solve():
    combine = lambda n, x: (n + x, (n * x, x > 3))  # noqa: E731
    xs = torch.arange(65)
    carry, ys, solution = scan(combine, torch.tensor(5), xs, return_solution=True)
    assert_same((carry, ys), plain_scan(combine, torch.tensor(5), xs))
    assert "nothing to solve for" in str(solution.plan)


def test_outputs_come_with_the_loop_where_that_is_the_way():
    calls = []

    def combine(carry, x):
        calls.append(None)
        return torch.sin(carry) + x, carry * x

    deeppcr.clear_caches()
    xs = torch.randn(9, 2)
    found = scan(combine, torch.zeros(2), xs)
    assert len(calls) == 9
    assert_same(found, plain_scan(combine, torch.zeros(2), xs))


def test_outputs_without_a_rule_for_all_steps_at_once(device):
    combine = lambda c, x: (0.5 * torch.sin(c) + x, c * c.sum().item())  # noqa: E731
    init, xs = normal(3, device=device), normal(9, 3, device=device)
    found = scan(combine, init, xs, solver=Newton())
    expected = plain_scan(combine, init, xs)
    assert_same(found, expected, rtol=1e-8, atol=1e-9)
    gradients = [torch.autograd.grad(each[1].sum(), xs)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_nests_of_outputs(solver):
    constant = torch.arange(2)
    combine = lambda c, x: ({"b": c["b"] * x, "a": c["a"] + x}, {"n": None, "c": constant, "e": [], "s": x})  # noqa: E731
    carry, ys = scan(combine, {"a": torch.zeros(2), "b": torch.ones(1)}, torch.ones(5), solver=solver)
    assert_same(carry, {"a": torch.full((2,), 5.0), "b": torch.ones(1)})
    assert ys["n"] is None
    assert ys["e"] == []
    assert_same(ys["c"], constant.expand(5, 2))
    assert_same(ys["s"], torch.ones(5))


def test_without_inputs_there_is_no_step():
    init = torch.ones(2)
    carry, ys = scan(lambda c, x: (c, c), init, ())
    assert carry is init
    assert ys == []
    with pytest.raises(ValueError, match="return_solution: xs has no tensor"):
        scan(lambda c, x: (c, c), init, (), return_solution=True)


ADD, ONES = (lambda c, x: (c + x, c)), torch.ones(4, 3)
METADATA = "Expected init and carry to have same metadata but found:\npair\\[0\\] differ in "
#: Arguments, options, and what is said: PyTorch's words where it has some.
REFUSED = {
    "no function": ((3, ONES[0], ONES), {}, "Combine_fn must be a callable, but got 3"),
    "no dimension": ((ADD, ONES[0], ONES), {"dim": "0"}, "Dim must be an int, but got <class 'str'>"),
    "no direction": ((ADD, ONES[0], ONES), {"reverse": 1}, "Reverse must be a bool, but got <class 'int'>"),
    "no carry": ((ADD, (), ONES), {}, r"scan\(\) operator requires init leaves."),
    "a number to begin with": ((ADD, 1.0, ONES), {}, "All init leaves must be a Tensor but got 1.0"),
    "a number for input": ((ADD, ONES[0], (ONES, 1)), {}, "All xs leaves must be a Tensor but got 1"),
    "nothing for input": ((ADD, ONES[0], None), {}, "All xs leaves must be a Tensor but got None"),
    "no step": ((ADD, ONES[0], ONES[:0]), {}, "All xs leaves must at least have 'dim' number of dimensions"),
    "too few dimensions": ((ADD, ONES[0], (ONES, ONES[0])), {"dim": 1}, "All xs leaves must at least have 'dim' number"),
    "a dimension too far": ((ADD, ONES[0], ONES), {"dim": 2}, r"Dimension out of range \(expected to be in range of \[-2, 1\]"),
    "lengths": ((ADD, ONES[0], (ONES, ONES[:2])), {}, r"xs: lengths differ: xs\[0\] has 4, xs\[1\] has 2"),
    "a carry alone": ((lambda c, x: c + x, ONES[0], ONES), {}, r"Expect combine_fn to return a tuple \(next_carry, y\) but got"),
    "three": ((lambda c, x: (c, c, c), ONES[0], ONES), {}, r"return a tuple \(next_carry, y\) but got tuple of 3"),
    "another dtype": ((lambda c, x: (c.double(), c), ONES[0], ONES), {}, METADATA + "'dtype: torch.float32 vs torch.float64'"),
    "another shape": ((lambda c, x: (c[:2], c), ONES[0], ONES), {}, METADATA + r"'shape: torch.Size\(\[3\]\) vs torch.Size\(\[2\]\)'"),
    "another nest": ((lambda c, x: ((c[0], c[1], x), c[0]), (ONES[0], ONES[1]), ONES), {}, "to have same tree structure"),
    "an integer's dtype": (
        (lambda c, x: ((c[0], c[1] + 1.0), x), (ONES[0], torch.tensor(0)), ONES),
        {},
        r"pair\[1\] differ in 'dtype: torch.int64 vs torch.float32'",
    ),
    "an output that is a number": ((lambda c, x: (c, 3), ONES[0], ONES), {}, "tensors or None, but got int"),
    "rows that there are not": ((ADD, ONES[0], ONES), {"batch_dims": 3}, "batch_dims=3"),
}  # fmt: skip


@pytest.mark.parametrize("solver", SOLVERS[:2], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_named(name, solver):
    arguments, options, words = REFUSED[name]
    with pytest.raises((RuntimeError, IndexError, ValueError), match=words):
        scan(*arguments, solver=solver, **options)


def test_outputs_of_several_structures_are_refused():
    count = iter(range(9))
    with pytest.raises(RuntimeError, match="outputs of combine_fn of one tree structure"):
        scan(lambda c, x: (c + x, (c,) * (1 + next(count))), torch.ones(2), torch.ones(3, 2), solver=Loop())


def test_a_compiler_steps_around_it():
    graphs = []
    run = torch.compile(
        lambda start, xs: scan(lambda c, x: ((c[0] + x, c[1] + 1), x), (start, torch.tensor(0)), xs)[0][0] * 2,
        backend=lambda graph, _: graphs.append(graph) or graph,
    )
    xs = torch.randn(5, 2)
    torch.testing.assert_close(run(torch.ones(2), xs), 2 * (1 + xs.sum(0)))
    assert len(graphs) == 2  # what comes before it, and what comes after
