"""Slices that are pushed back to what a step reads: graphs mean what they meant."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deeppcr.fuse.slices import pushed
from deeppcr.fuse.trace import OneRow
from fuse.emitted import trace

aten = torch.ops.aten
#: Widths of states, inputs and weights in random steps.
WIDTH = 4


def step_row(function, *tensors, states=1):
    """A function of one row as a step, whose first arguments are the state."""
    return OneRow(trace(function, *tensors), states, 0, tuple(tensors[states:]), (False,) * (len(tensors) - states), 1)


def targets(row):
    return [node.target for node in row.graph.graph.nodes if node.op == "call_function"]


def check(function, *tensors, states=1):
    """The pushed graph computes what the function does; with its gradients."""
    row = pushed(step_row(function, *tensors, states=states))
    given = [each.clone().requires_grad_() for each in tensors]
    ours, theirs = row.graph(*given), function(*given)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    if theirs.requires_grad:
        weights = torch.randn_like(theirs)
        found = (torch.autograd.grad(each, given, weights, allow_unused=True) for each in (ours, theirs))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(
                torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b, rtol=1e-12, atol=1e-12
            )
    return row


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_gates_are_products_with_slices_of_weights():
    row = check(lambda h, w, b: torch.mul(*(h @ w + b).chunk(2, -1)), normal(1, 4), normal(4, 10), normal(10))
    found = targets(row)
    assert found.count(aten.mm.default) == 2
    assert {node.args[0].op for node in row.graph.graph.nodes if node.target == aten.slice.Tensor} == {"placeholder"}


def test_addmm_and_turned_weights():
    row = check(
        lambda h, w, b: torch.nn.functional.linear(h, w, b)[:, 2:5].tanh(), normal(1, 4), normal(6, 4), normal(6)
    )
    sliced = {node.args[0].target for node in row.graph.graph.nodes if node.target == aten.slice.Tensor}
    assert sliced.isdisjoint({aten.addmm.default, aten.tanh.default})


def test_what_stands_beside_each_other_is_a_sum_of_products():
    row = check(lambda h, x, w: torch.cat([h, x], -1) @ w, normal(1, 4), normal(1, 3), normal(7, 5))
    assert aten.cat.default not in targets(row)
    row = check(lambda h, x, w: w @ torch.cat([h, x], 0), normal(4, 1), normal(3, 1), normal(5, 7))
    assert aten.cat.default not in targets(row)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_product_of_what_is_joined_with_itself(dim):
    def squared(h, x):
        joined = torch.cat([h, x], dim)
        return joined @ joined

    check(squared, normal(2, 4) if dim == 0 else normal(4, 2), normal(2, 4) if dim == 0 else normal(4, 2))


def test_what_is_sliced_as_it_was_joined_is_not_joined():
    row = check(lambda z: torch.sub(*torch.cat([z.sin(), z], -1).chunk(2, -1)), normal(1, 4))
    assert aten.cat.default not in targets(row)


@pytest.mark.parametrize(
    "function",
    [
        lambda z: z[:, 1:][:, 1:] * z[:, :-2] + (z * z[:, :1])[:, 2:],  # one of them is broadcast
        lambda z: torch.cat([z, z], -1)[:, 2:6],  # a slice across
        lambda z: torch.cat([z, z], 0)[1:, 1:],
        lambda z: aten.slice.Tensor(torch.cat([z, z], 0), 1, 0, WIDTH),  # all of it, across
        lambda z: (z * 2)[:, ::2],  # in steps, which stay
        lambda z: (z + 1)[:, -3:-1],
        lambda z: (z.mT @ z)[1:, :2].mT,
        lambda z: torch.cat([(z * 2)[:, 2:2], z], -1),  # nothing
        lambda z: torch.addmm(z[:, :1], z, torch.ones(4, 5, dtype=z.dtype), beta=0.5, alpha=2)[:, 1:3],
        lambda z: (z > 0)[:, 1:] * z[:, :-1],
        lambda z: torch.where(z > 0, z, 0.5)[:, 1:3],
        lambda z: z.unsqueeze(-1).expand(1, 4, 3)[:, 1:, :2].sum(-1),
    ],
)  # fmt: skip
def test_slices_of_all_kinds(function):
    check(function, normal(1, WIDTH))


@st.composite
def programs(draw):
    """A few operations, each of results of those before it: as (name, places of its arguments, numbers)."""
    return [
        (
            draw(st.sampled_from(sorted(OPERATIONS))),
            draw(st.tuples(*[st.integers(0, 9)] * 2)),
            draw(st.tuples(*[st.integers(0, 9)] * 3)),
        )
        for _ in range(draw(st.integers(2, 8)))
    ]


def cut(a, b, numbers, weight):
    dim = numbers[0] % 2
    start = numbers[1] % a.shape[dim]
    return a.narrow(dim, start, 1 + numbers[2] % (a.shape[dim] - start))


def product(a, b, numbers, weight):
    """With a part of a weight, from one side or the other."""
    return a @ weight[: a.shape[1], : 1 + numbers[1]] if numbers[0] % 2 else weight[: 1 + numbers[1], : a.shape[0]] @ a


def biased(a, b, numbers, weight):
    right = weight[: a.shape[1], : 1 + numbers[1]]
    return torch.addmm(weight[0, : right.shape[1]] if numbers[0] % 2 else weight[: a.shape[0], :1], a, right)


def together(a, b, numbers, weight):
    dim = numbers[0] % 2
    size = min(a.shape[1 - dim], b.shape[1 - dim])
    found = torch.cat([each.narrow(1 - dim, 0, size) for each in (a, b, a)[: 2 + numbers[1] % 2]], dim)
    return found.narrow(dim, 0, min(found.shape[dim], 8))


def pointwise(a, b, numbers, weight):
    rows, columns = (min(x, y) for x, y in zip(a.shape, b.shape, strict=True))
    b = b[:1, :columns] if numbers[1] % 3 == 0 else b[:rows, :1] if numbers[1] % 3 == 1 else b[:rows, :columns]
    return torch.sin(a[:rows, :columns] * b) + (0.5 if numbers[0] % 2 else b)


def split(a, b, numbers, weight):
    return a.chunk(2, numbers[0] % 2)[-1]


OPERATIONS = {
    "cut": cut,
    "cut again": cut,
    "product": product,
    "biased": biased,
    "together": together,
    "pointwise": pointwise,
    "turned": lambda a, b, numbers, weight: a.mT,
    "split": split,
}


def computed(program, z, x, weight):
    """What a program makes of a state, an input and a weight."""
    known = [z, x]
    for name, (one, other), numbers in program:
        known.append(OPERATIONS[name](known[one % len(known)], known[other % len(known)], numbers, weight))
    return known[-1]


@settings(max_examples=20, deadline=None)
@given(programs())
def test_random_steps_keep_their_meaning(program):
    torch.manual_seed(0)
    check(lambda *given: computed(program, *given), normal(1, WIDTH), normal(3, WIDTH), normal(10, 10))
