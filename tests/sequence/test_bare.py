"""The loop by Python: what the plain loop gives, whatever containers are used, at little more than its cost; and what is wrong is named."""

import sys
from collections import namedtuple

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import deeppcr
from deeppcr import Loop, StepError

SOLVERS = [None, Loop()]
Pair = namedtuple("Pair", ["a", "b"])

STATES = {
    "tensor": (torch.zeros(2, 3), lambda z, x: torch.tanh(z + x)),
    "complex": (
        torch.zeros(2, 3, dtype=torch.complex128),
        lambda z, x: torch.exp(0.3j * x) * z + x,
    ),
    "tuple": ((torch.zeros(2, 3), torch.zeros(2, 1)), lambda z, x: (torch.tanh(z[1] + x), z[0][:, :1] * x[:, 1:2])),
    "dict": ({"a": torch.zeros(2, 3), "b": torch.ones(2, 3)}, lambda z, x: {"b": z["a"] + x, "a": torch.sin(z["b"])}),
    "list": ([torch.zeros(2, 3)], lambda z, x: [torch.cos(z[0]) * x]),
    "named": (Pair(torch.zeros(2, 3), torch.ones(2, 3)), lambda z, x: Pair(z.b * x, torch.cos(z.a))),
    "nest": (
        {"a": (torch.zeros(2, 3), torch.ones(2, 3))},
        lambda z, x: {"a": (torch.tanh(z["a"][1]) + x, z["a"][0] * 0.5)},
    ),
}
INPUTS = {
    "tensor": (lambda x: x, lambda x: x),
    "tuple": (lambda x: (x, 2 * x), lambda x: x[1] - x[0]),
    "dict": (lambda x: {"p": x, "q": x.sum(-1, keepdim=True)}, lambda x: x["p"] + x["q"]),
    "nest": (lambda x: {"p": [x, x]}, lambda x: x["p"][0] * x["p"][1]),
}


def plainly(step, z0, xs, length):
    z, states = z0, []
    for index in range(length):
        z = step(z, pytree.tree_map(lambda leaf, at=index: leaf[at], xs))
        states.append(pytree.tree_leaves(z if not isinstance(z, dict) else dict(sorted(z.items()))))
    return [torch.stack(each) for each in zip(*states, strict=True)]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_it_is_the_plain_loop(state, inputs, length, solver):
    z0, inner = STATES[state]
    z0 = pytree.tree_map(lambda leaf: leaf.to(torch.promote_types(leaf.dtype, torch.float64)).requires_grad_(), z0)
    make, read = INPUTS[inputs]
    x = torch.linspace(-1, 1, length * 6, dtype=torch.float64).reshape(length, 2, 3).requires_grad_()

    def step(z, x):
        return inner(z, read(x))

    right = plainly(step, z0, make(x), length)
    found = deeppcr.solve(step, z0, make(x), solver=solver)
    assert found.result is deeppcr.Result.LOOP
    assert type(found.states) is type(z0)
    found = pytree.tree_leaves(found.states)
    assert all(map(torch.equal, found, right))
    wanted = [x, *pytree.tree_leaves(z0)]
    pairs = [
        torch.autograd.grad(sum((leaf.abs() + leaf.real).sum() for leaf in each), wanted, allow_unused=True)
        for each in (found, right)
    ]
    torch.testing.assert_close(*pairs)


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def cost_of_a_step(z0, step, solver):
    """Operations of PyTorch and calls of functions of Python's that a further step adds, beyond its own."""
    operations, calls = [], []
    for length in (40, 90):
        xs = torch.zeros(length, 2, 3)
        with Operations() as counted:
            deeppcr.solve(step, z0, xs, solver=solver)
        operations.append(counted.count)
        seen = 0

        def count(frame, event, argument):
            nonlocal seen
            seen += event == "call"

        sys.setprofile(count)
        try:
            deeppcr.solve(step, z0, xs, solver=solver)
        finally:
            sys.setprofile(None)
        calls.append(seen)
    return (operations[1] - operations[0]) / 50, (calls[1] - calls[0]) / 50


@pytest.mark.parametrize(("state", "own", "most"), [("tensor", 2, 1), ("tuple", 5, 1), ("dict", 2, 8)])
def test_a_step_costs_little_more_than_itself(state, own, most):
    """Four to six plain loops it took to look at every state as if it were the first, one and a half to look at each by itself."""
    z0, step = STATES[state]
    operations, calls = cost_of_a_step(z0, step, Loop())
    assert operations <= own + 1  # a view of xs
    assert calls <= most


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda z: z[:, :1], "changes the state's shape"),
        (lambda z: z.double(), "changes the state's dtype"),
        (lambda z: z.half(), "changes the state's dtype"),  # which the next step makes good
        (lambda z: (z,), "changes the state's structure"),
        (lambda z: None, "returns None"),
        (lambda z: z.expand(4, 2, 3), "It was broadcast"),
    ],
)
def test_a_state_that_is_none_is_named_at_any_step(wrong, message, solver):
    calls = []

    def step(z, x):
        calls.append(1)
        return wrong(z) if len(calls) == 5 else z + x

    with pytest.raises(StepError, match=message):
        deeppcr.solve(step, torch.zeros(2, 3), torch.ones(9, 2, 3), solver=solver)
    assert len(calls) <= 9  # no step was taken twice


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("pair", [False, True])
def test_a_state_that_is_none_is_soon_found(pair, solver):
    calls = []

    def step(z, x):
        calls.append(1)
        after = (z[0] if pair else z) + x
        after = after.double() if len(calls) == 5 else after
        return (after, after) if pair else after

    z0 = (torch.zeros(2),) * 2 if pair else torch.zeros(2)
    with pytest.raises(StepError, match="changes the state's dtype"):
        deeppcr.solve(step, z0, torch.ones(5_000, 2), solver=solver)
    assert len(calls) < 600


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_state_that_is_changed_in_place_is_named(solver):
    with pytest.raises(StepError, match="changes its state in place"):
        deeppcr.solve(lambda z, x: z.add_(x), torch.zeros(2, 3), torch.ones(9, 2, 3), solver=solver)


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_a_step_raises_says_how_it_was_called(solver):
    def step(z, x):
        if x[0, 0] > 3:
            raise KeyError("mine")
        return z + x

    xs = torch.arange(9.0)[:, None, None].expand(9, 2, 3)
    with pytest.raises(KeyError, match="mine") as raised:
        deeppcr.solve(step, torch.zeros(2, 3), xs, solver=solver)
    assert "(step 5)" in raised.value.__notes__[0]
